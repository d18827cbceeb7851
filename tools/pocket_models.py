"""Models for tapfm-pocket: the student architectures, the teacher, and their pixel normalisation."""

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
ARCHITECTURES: dict[str, dict[str, int]] = {  # the deepest within the limits: p16 with depth 5 would need 0.54 GFLOP
    "p16": {"patch_size": 16, "embed_dim": 128, "depth": 4, "num_heads": 4},
    "p28": {"patch_size": 28, "embed_dim": 192, "depth": 6, "num_heads": 3},
    "p32": {"patch_size": 32, "embed_dim": 192, "depth": 8, "num_heads": 3},
}
MAX_GFLOP, MAX_PARAMETERS, MAX_BYTES = 0.5, 5_000_000, 10_000_000
POCKET_MEAN_STD = ((0.7, 0.55, 0.7), (0.2, 0.22, 0.18))  # mean and std of 0..1 pixels
IMAGENET_MEAN_STD = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))


def build_student(architecture: str, **extra: Any) -> Any:
    """Build a timm ViT with CLS token, four register tokens without position embedding, and patch tokens."""
    arguments = ARCHITECTURES[architecture] | extra
    return timm.create_model(
        "vit_tiny_patch16_224", reg_tokens=4, no_embed_class=True, init_values=None, num_classes=0,
        global_pool="token", img_size=TILE_PX, **arguments,
    )  # fmt: skip


def check_limits(architecture: str, dtype: torch.dtype) -> str:
    """Check the size and cost of an architecture, and return them as text. A multiply-add counts as two FLOP."""
    vit = build_student(architecture).eval()
    # The FLOP counter supports plain attention on every device, but not all fused kernels.
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        vit(torch.zeros(1, 3, TILE_PX, TILE_PX))
    gflop, parameters = counter.get_total_flops() / 1e9, sum(p.numel() for p in vit.parameters())
    assert gflop <= MAX_GFLOP, f"{architecture}: {gflop:.3f} GFLOP"
    assert parameters <= MAX_PARAMETERS, f"{architecture}: {parameters} parameters"
    if parameters * dtype.itemsize + 50_000 > MAX_BYTES:  # the header takes a few kB
        raise SystemExit(f"{architecture} in {dtype} would be larger than {MAX_BYTES} bytes. Use --dtype float16.")
    return f"{architecture}: {parameters / 1e6:.2f} M parameters, {gflop:.3f} GFLOP"


def normalise(images: Tensor, mean_std: tuple[tuple[float, ...], tuple[float, ...]]) -> Tensor:
    """Normalise pixels in 0..1 with the mean and standard deviation of a model."""
    mean, std = (torch.tensor(values, device=images.device).view(1, 3, 1, 1) for values in mean_std)
    return (images - mean) / std


def autocast_bfloat16(device: torch.device) -> torch.autocast:
    """Return a context that runs in bfloat16 on CUDA devices."""
    return torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda")


def tiles_to_images(tiles: Tensor) -> Tensor:
    """Convert uint8 tiles (n, height, width, 3) to images (n, 3, height, width) in 0..1."""
    return tiles.permute(0, 3, 1, 2).float() / 255


def load_teacher(path: Path, device: torch.device) -> Any:
    """Load DINOv2 ViT-S/14 from a timm checkpoint, with its position embedding resampled to our tile size."""
    teacher = timm.create_model("vit_small_patch14_dinov2", img_size=TILE_PX, num_classes=0)
    state = {name: value.float() for name, value in load_file(path).items()}
    state["pos_embed"] = resample_abs_pos_embed(state["pos_embed"], teacher.patch_embed.grid_size, num_prefix_tokens=1)
    teacher.load_state_dict(state, strict=True)
    return teacher.to(device).eval().requires_grad_(False)


def save_student(vit: nn.Module, path: Path, architecture: str, dtype: torch.dtype, metadata: dict[str, str]) -> None:
    """Write the weights with the keys of the architecture, and check that it can load them."""
    state = {name: value.detach().to("cpu", dtype).contiguous() for name, value in vit.state_dict().items()}
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file(state, path, metadata=metadata)
    build_student(architecture).load_state_dict(load_file(path), strict=True)
    assert path.stat().st_size <= MAX_BYTES, f"{path} has {path.stat().st_size} bytes"
