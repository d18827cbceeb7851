"""The models around tapfm-pocket: its candidates, the teacher, and the pixels each expects."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import timm
import torch
from safetensors.torch import load_file, save_file
from timm.layers import resample_abs_pos_embed
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

TILE_PX = 224
ARCHITECTURES: dict[str, dict[str, int]] = {  # the deepest within the limits; at 128 wide, depth 5 is 0.54 GFLOP
    "p16": {"patch_size": 16, "embed_dim": 128, "depth": 4, "num_heads": 4},
    "p28": {"patch_size": 28, "embed_dim": 192, "depth": 6, "num_heads": 3},
    "p32": {"patch_size": 32, "embed_dim": 192, "depth": 8, "num_heads": 3},
}
MOST_GFLOP, MOST_PARAMETERS, MOST_BYTES = 0.5, 5_000_000, 10_000_000
POCKET_PIXELS = ((0.7, 0.55, 0.7), (0.2, 0.22, 0.18))  # mean and std of 0..1 pixels
IMAGENET_PIXELS = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))


def build_student(architecture: str, **extra: Any) -> Any:
    """The timm ViT: CLS, four registers without position, patches."""
    arguments = ARCHITECTURES[architecture] | extra
    return timm.create_model(
        "vit_tiny_patch16_224", reg_tokens=4, no_embed_class=True, init_values=None, num_classes=0,
        global_pool="token", img_size=TILE_PX, **arguments,
    )  # fmt: skip


def check_limits(architecture: str, dtype: torch.dtype) -> str:
    """Assert what a pocket model may cost, and say what this one does: FLOP are two per multiply-add of one tile."""
    vit = build_student(architecture).eval()
    # The counter knows the plain attention on every device; of the fused kernels, not all.
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        vit(torch.zeros(1, 3, TILE_PX, TILE_PX))
    gflop, parameters = counter.get_total_flops() / 1e9, sum(p.numel() for p in vit.parameters())
    assert gflop <= MOST_GFLOP, f"{architecture}: {gflop:.3f} GFLOP"
    assert parameters <= MOST_PARAMETERS, f"{architecture}: {parameters} parameters"
    if parameters * dtype.itemsize + 50_000 > MOST_BYTES:  # the header takes a few kB
        raise SystemExit(f"{architecture} in {dtype} would be over {MOST_BYTES} bytes: use --dtype float16.")
    return f"{architecture}: {parameters / 1e6:.2f} M parameters, {gflop:.3f} GFLOP"


def normalised(images: Tensor, pixels: tuple[tuple[float, ...], tuple[float, ...]]) -> Tensor:
    """0..1 pixels with the mean and std that a model expects."""
    mean, std = (torch.tensor(values, device=images.device).view(1, 3, 1, 1) for values in pixels)
    return (images - mean) / std


def half_precision(device: torch.device) -> torch.autocast:
    """Run in bfloat16 where it is fast."""
    return torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda")


def unit_pixels(tiles: Tensor) -> Tensor:
    """Tiles n x height x width x 3 of uint8 as images n x 3 x height x width in 0..1."""
    return tiles.permute(0, 3, 1, 2).float() / 255


def load_teacher(path: Path, device: torch.device) -> Any:
    """DINOv2 ViT-S/14 from a timm checkpoint, its position table resampled to our tiles."""
    teacher = timm.create_model("vit_small_patch14_dinov2", img_size=TILE_PX, num_classes=0)
    state = {name: value.float() for name, value in load_file(path).items()}
    state["pos_embed"] = resample_abs_pos_embed(state["pos_embed"], teacher.patch_embed.grid_size, num_prefix_tokens=1)
    teacher.load_state_dict(state, strict=True)
    return teacher.to(device).eval().requires_grad_(False)


def save_student(vit: nn.Module, path: Path, architecture: str, dtype: torch.dtype, metadata: dict[str, str]) -> None:
    """Write the weights under the keys of the plain architecture, and read them back into it."""
    state = {name: value.detach().to("cpu", dtype).contiguous() for name, value in vit.state_dict().items()}
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file(state, path, metadata=metadata)
    build_student(architecture).load_state_dict(load_file(path), strict=True)
    assert path.stat().st_size <= MOST_BYTES, f"{path} has {path.stat().st_size} bytes"
