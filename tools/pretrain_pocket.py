"""Pretrain tapfm-pocket, a ViT of half a GFLOP, on synthetic H&E tiles.

There are two methods. `distil` distils the tokens of DINOv2 ViT-S/14: the teacher gets the original tile, the student
the tile with another stain. `dino` needs no teacher: DINO (Caron et al. 2021) with Sinkhorn-Knopp, masked patches and
KoLeo. Tiles are .npy shards of uint8 (n, 224, 224, 3). All tiles are kept and augmented on the device.

    PYTHONPATH=src python tools/pretrain_pocket.py --method distil --tiles TILES --steps 4684 \
        --teacher DINOV2.safetensors --out pocket.safetensors --compile

`tools/probe_pocket.py` evaluates the result.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable, Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from pocket_models import (
    ARCHITECTURES,
    IMAGENET_MEAN_STD,
    POCKET_MEAN_STD,
    TILE_PX,
    autocast_bfloat16,
    build_student,
    check_limits,
    load_teacher,
    normalise,
    save_student,
    tiles_to_images,
)
from safetensors.torch import load_file
from torch import Tensor, nn

DTYPES = {"float16": torch.float16, "float32": torch.float32}

Encode = Callable[..., Tensor]


def encode_tokens(vit: Any, pixels: Tensor, mask: Tensor | None = None, mask_token: Tensor | None = None) -> Tensor:
    """Return all tokens after the final norm. Patches in `mask` (n, rows, columns) are replaced by `mask_token`."""
    patches = vit.patch_embed(pixels)
    if mask is not None and mask_token is not None:
        patches = torch.where(mask[..., None], mask_token.to(patches.dtype), patches)
    x: Tensor = vit.norm(vit.blocks(vit.norm_pre(vit._pos_embed(patches))))
    return x


def load_tiles(folder: Path, device: torch.device, limit: int | None) -> Tensor:
    """Load all shards, or the first `limit` tiles, as uint8 to the device."""
    shards = [np.load(path, mmap_mode="r") for path in sorted(folder.glob("*.npy"))]
    if not shards or any(s.dtype != np.uint8 or s.shape[1:] != (TILE_PX, TILE_PX, 3) for s in shards):
        raise SystemExit(f"{folder} must contain .npy shards of uint8 (n, {TILE_PX}, {TILE_PX}, 3).")
    count = min(sum(map(len, shards)), limit or 10**9)
    tiles = torch.empty((count, TILE_PX, TILE_PX, 3), dtype=torch.uint8, device=device)
    start = 0
    for shard in shards:
        part = np.array(shard[: count - start])
        tiles[start : start + len(part)] = torch.from_numpy(part)
        start += len(part)
    return tiles


def sample_batches(tiles: Tensor, size: int) -> Iterator[Tensor]:
    """Yield batches of tile indices without end, in a new random order each epoch."""
    size = min(size, len(tiles))
    while True:
        order = torch.randperm(len(tiles), device=tiles.device)
        yield from order[: len(tiles) // size * size].split(size)


def rotate_and_flip(tiles: Tensor, orientations: Tensor) -> Tensor:
    """Rotate and flip tiles (n, height, width, 3), each in one of eight orientations."""
    flip_vertical, flip_horizontal, transpose = ((orientations >> bit & 1).bool().view(-1, 1, 1, 1) for bit in range(3))
    tiles = torch.where(flip_vertical, tiles.flip(1), tiles)
    tiles = torch.where(flip_horizontal, tiles.flip(2), tiles)
    return torch.where(transpose, tiles.transpose(1, 2), tiles)


def sample_uniform(count: int, low: float, high: float, device: torch.device) -> Tensor:
    """Sample one random number per image, with a shape that broadcasts to images."""
    return torch.empty(count, 1, 1, 1, device=device).uniform_(low, high)


def random_crop(images: Tensor, side_px: int, min_area: float | None = None) -> Tensor:
    """Rotate, flip and crop each image to a random square of `side_px`.

    With `min_area` the crop covers at least this fraction of the image and is resized. Without it the crop keeps its
    resolution, because the size of a nucleus in pixels is informative.
    """
    count, full, device = len(images), images.shape[-1], images.device
    signs = torch.randint(0, 2, (count, 2, 1), device=device) * 2.0 - 1
    transpose = torch.rand(count, 1, 1, device=device) < 0.5
    axes = torch.eye(2, device=device)
    rotation = signs * torch.where(transpose, axes.flip(0), axes)
    if min_area is None:
        ratio = torch.full((count, 1, 1), side_px / full, device=device)
        corner = torch.randint(0, full - side_px + 1, (count, 2, 1), device=device)
        centre = (2 * corner + side_px) / full - 1  # at integer pixels, so that nothing is interpolated
    else:
        ratio = sample_uniform(count, min_area, 1, device)[..., 0].sqrt()
        centre = (1 - ratio) * (2 * torch.rand(count, 2, 1, device=device) - 1)
    grid = F.affine_grid(torch.cat([ratio * rotation, centre], 2), [count, 3, side_px, side_px], align_corners=False)
    return F.grid_sample(images, grid, align_corners=False, padding_mode="reflection")


def augment_stain_and_blur(images: Tensor) -> Tensor:
    """Change stain and brightness of each image at random, and blur the first fifth of the images."""
    count, device = len(images), images.device
    density = -images.clamp(min=1 / 255).log()
    strength = sample_uniform(count, -0.35, 0.35, device).exp()[..., 0]
    mix = torch.eye(3, device=device) + torch.randn(count, 3, 3, device=device) * 0.06
    shift = torch.randn(count, 3, 1, device=device) * 0.03
    density = ((strength * mix) @ density.flatten(2) + shift).view_as(density)
    brightness = sample_uniform(count, 0.9, 1.1, device)
    return blur_first_images((density.neg().exp() * brightness).clamp(0, 1))


def blur_first_images(images: Tensor, fraction: float = 0.2) -> Tensor:
    """Blur a fraction of the images, the first ones, with a Gaussian of 0.5 to 2 px. Batches are in random order.

    The blur is a matrix product per image and axis. This is fast although each image has its own width.
    """
    some = images[: round(fraction * len(images))]
    position = torch.arange(images.shape[-1], device=images.device, dtype=torch.float32)
    width = sample_uniform(len(some), 0.5, 2, images.device)
    matrix = (-0.5 * ((position[:, None] - position) / width) ** 2).softmax(-1)
    return torch.cat([matrix @ some @ matrix.transpose(2, 3), images[len(some) :]])


class Distillation:
    """The student's CLS predicts the teacher's CLS and mean patch token, its patches those of the teacher.

    The teacher's tokens of each tile in each of eight orientations are computed once. Tiles are not resized, because
    the size of a nucleus in pixels is informative.
    """

    def __init__(self, backbone: Any, encode: Encode, teacher: Any, tiles: Tensor) -> None:
        width, target = backbone.embed_dim, teacher.embed_dim
        heads = {"tile": nn.Linear(width, 2 * target), "patch": nn.Linear(width, target)}
        self.student = nn.ModuleDict({"backbone": backbone, **heads})
        self.encode, self.tiles = encode, tiles
        self.prefix, self.grid = backbone.num_prefix_tokens, backbone.patch_embed.grid_size
        self.targets = self.compute_targets(teacher)

    @torch.no_grad()
    def compute_targets(self, teacher: Any, batch_size: int = 512) -> dict[str, Tensor]:
        """Return the teacher's standardised tokens (n, 8, ...), with patch tokens averaged to the student's grid."""
        count, device = len(self.tiles), self.tiles.device
        targets: dict[str, Tensor] = {}
        moments: dict[str, tuple[Tensor, Tensor]] = {}
        for start in range(0, count, batch_size):
            rows = slice(start, min(start + batch_size, count))
            for orientation in range(8):
                orientations = torch.full((rows.stop - rows.start,), orientation, device=device)
                images = tiles_to_images(rotate_and_flip(self.tiles[rows], orientations))
                pixels = normalise(images, IMAGENET_MEAN_STD)
                with autocast_bfloat16(device):
                    x = teacher.forward_features(pixels).float()
                grids = x[:, 1:].transpose(1, 2).unflatten(2, teacher.patch_embed.grid_size)
                small = F.interpolate(grids, self.grid, mode="bilinear", antialias=True).flatten(2).transpose(1, 2)
                for name, value in {"tile": torch.cat([x[:, 0], x[:, 1:].mean(1)], 1), "patch": small}.items():
                    if (
                        name not in targets
                    ):  # mean and std of the first batch; a few dimensions are much larger than the rest
                        flat = value.flatten(0, -2)
                        moments[name] = flat.mean(0), flat.std(0).clamp(min=1e-2)
                        targets[name] = torch.empty((count, 8, *value.shape[1:]), dtype=torch.float16, device=device)
                    mean, std = moments[name]
                    targets[name][rows, orientation] = ((value - mean) / std).half()
        return targets

    def losses(self, batch: Tensor, average: nn.ModuleDict, progress: float) -> dict[str, Tensor]:
        """Return the smooth L1 plus cosine loss between the tokens of the stain-augmented tile and the targets."""
        del average, progress
        orientations = torch.randint(0, 8, (len(batch),), device=batch.device)
        with torch.no_grad():
            images = tiles_to_images(rotate_and_flip(self.tiles[batch], orientations))
            pixels = normalise(augment_stain_and_blur(images), POCKET_MEAN_STD)
        with autocast_bfloat16(batch.device):
            x = self.encode(self.student["backbone"], pixels)
            predictions = {"tile": self.student["tile"](x[:, 0]), "patch": self.student["patch"](x[:, self.prefix :])}
        losses = {}
        for name, prediction in predictions.items():
            target = self.targets[name][batch, orientations].float()
            cosine = 1 - F.cosine_similarity(prediction.float(), target, dim=-1).mean()
            losses[name] = F.smooth_l1_loss(prediction.float(), target) + cosine
        return losses

    def momentum(self, progress: float) -> float:
        """Return the momentum of the weight average, which is constant here."""
        del progress
        return 0.999


class PrototypeHead(nn.Module):
    """Head of DINO: an MLP to a normalised bottleneck, then the cosine similarity to each prototype."""

    def __init__(self, width: int, hidden: int = 1024, bottleneck: int = 256, count: int = 4096) -> None:
        super().__init__()
        layers = [nn.Linear(width, hidden), nn.Linear(hidden, hidden), nn.Linear(hidden, bottleneck)]
        for layer in layers:
            nn.init.trunc_normal_(layer.weight, std=0.02)
            nn.init.zeros_(layer.bias)
        self.mlp = nn.Sequential(layers[0], nn.GELU(), layers[1], nn.GELU(), layers[2])
        self.prototypes = nn.Parameter(torch.randn(count, bottleneck))

    def forward(self, x: Tensor) -> Tensor:
        """Return cosine similarities in float32, because they are divided by small temperatures (0.04 to 0.1)."""
        x = self.mlp(x)
        with torch.autocast(x.device.type, enabled=False):
            return F.linear(F.normalize(x.float(), dim=-1), F.normalize(self.prototypes, dim=-1))


class SelfDistillation:
    """DINO: the student predicts, from each view, the outputs of its moving average for the two global views."""

    local_views, student_temperature, mask_fraction, koleo_weight = 4, 0.1, 0.35, 0.1

    def __init__(self, backbone: Any, encode: Encode, tiles: Tensor, min_crop_area: float) -> None:
        self.tiles = tiles
        self.student = nn.ModuleDict({"backbone": backbone, "head": PrototypeHead(backbone.embed_dim)})
        self.student.register_parameter("mask_token", nn.Parameter(torch.zeros(backbone.embed_dim)))
        self.encode, self.min_crop_area = encode, min_crop_area
        self.prefix, self.grid = backbone.num_prefix_tokens, backbone.patch_embed.grid_size
        patch_px = backbone.patch_embed.patch_size[0]
        self.local_px = round(100 / patch_px) * patch_px

    def losses(self, batch: Tensor, average: nn.ModuleDict, progress: float) -> dict[str, Tensor]:
        """Return the losses of the views, of the masked patches, and the KoLeo regulariser."""
        images = tiles_to_images(self.tiles[batch])
        count, student = len(images), self.student
        order = torch.rand(count, math.prod(self.grid), device=images.device).argsort(1)
        masked = order[:, : round(self.mask_fraction * order.shape[1])]
        mask = torch.zeros_like(order, dtype=torch.bool).scatter(1, masked, True).view(count, *self.grid)
        with torch.no_grad():
            views = [self.global_view(images) for _ in range(2)]
            local = torch.cat([random_crop(images, self.local_px) for _ in range(self.local_views)])
            local = normalise(augment_stain_and_blur(local), POCKET_MEAN_STD)
        with autocast_bfloat16(images.device):
            with torch.no_grad():
                x = self.encode(average["backbone"], torch.cat(views))
                temperature = 0.04 + 0.03 * min(progress / 0.3, 1)
                targets = sinkhorn(average["head"](x[:, 0]), temperature).chunk(2)
                patch_targets = sinkhorn(average["head"](self.patches_at(masked, x[count:])).flatten(0, 1), temperature)
            # Only the second global view is masked, so that the student is also trained on complete images.
            unmasked_view = self.encode(student["backbone"], views[0])
            masked_view = self.encode(student["backbone"], views[1], mask, student.mask_token)
            local_cls = self.encode(student["backbone"], local)[:, 0]
            cls = torch.cat([unmasked_view[:, 0], masked_view[:, 0], local_cls])
            predictions = student["head"](cls).chunk(2 + self.local_views)
            patches = student["head"](self.patches_at(masked, masked_view)).flatten(0, 1)
        terms = [
            self.cross_entropy(prediction, target)
            for i, target in enumerate(targets)
            for j, prediction in enumerate(predictions)
            if i != j
        ]
        return {
            "views": torch.stack(terms).mean(),
            "patches": self.cross_entropy(patches, patch_targets),
            "koleo": self.koleo_weight * (koleo_loss(unmasked_view[:, 0]) + koleo_loss(masked_view[:, 0])) / 2,
        }

    def global_view(self, images: Tensor) -> Tensor:
        """Return a random crop of each image, resized to TILE_PX, with a random change of the stain."""
        return normalise(augment_stain_and_blur(random_crop(images, TILE_PX, self.min_crop_area)), POCKET_MEAN_STD)

    def patches_at(self, indices: Tensor, x: Tensor) -> Tensor:
        """Return the patch tokens at some indices (n, k) of each image."""
        return x[:, self.prefix :].take_along_dim(indices[..., None], 1)

    def cross_entropy(self, prediction: Tensor, target: Tensor) -> Tensor:
        """Return the cross entropy between assignments to prototypes."""
        return -(target * (prediction / self.student_temperature).log_softmax(-1)).sum(-1).mean()

    def momentum(self, progress: float) -> float:
        """Return the momentum of the weight average, which increases from 0.994 to 1."""
        return 1 - 0.006 * (1 + math.cos(math.pi * progress)) / 2


def sinkhorn(cosines: Tensor, temperature: float, iterations: int = 3) -> Tensor:
    """Return balanced assignments to prototypes (Sinkhorn-Knopp), which prevents a collapse to one prototype."""
    q = ((cosines - cosines.max()) / temperature).exp()
    for _ in range(iterations):
        q = q / q.sum(0, keepdim=True)
        q = q / q.sum(1, keepdim=True)
    return q


def koleo_loss(features: Tensor) -> Tensor:
    """Return the KoLeo loss, which increases the distance to the nearest feature (Sablayrolles et al. 2019)."""
    with torch.autocast(features.device.type, enabled=False):
        x = F.normalize(features.float(), dim=-1)
        with torch.no_grad():
            nearest = (x @ x.T).fill_diagonal_(-2).argmax(1)
        return -(F.pairwise_distance(x, x[nearest]) + 1e-6).log().mean()


def create_optimiser(student: nn.Module, rate: float, device: torch.device) -> torch.optim.AdamW:
    """Return AdamW with weight decay for matrices, not for norms, biases, positions, prefix tokens or prototypes."""
    groups: dict[bool, list[Tensor]] = {True: [], False: []}
    for name, parameter in student.named_parameters():
        groups[name.endswith("weight") and parameter.ndim > 1].append(parameter)
    settings = [{"params": groups[True], "weight_decay": 0.05}, {"params": groups[False], "weight_decay": 0.0}]
    return torch.optim.AdamW(settings, lr=rate, betas=(0.9, 0.98), fused=device.type == "cuda")


def train(
    method: Distillation | SelfDistillation,
    batches: Iterator[Tensor],
    options: argparse.Namespace,
    save: Callable[..., None],
) -> None:
    """Train for the given steps or minutes, and call `save` with the averaged weights after each quarter.

    The learning rate follows the fraction of this budget, so that it always ends at 0.
    """
    student = method.student
    average = deepcopy(student).requires_grad_(False)
    device = next(student.parameters()).device
    optimiser = create_optimiser(student, options.rate, device)
    sum(method.losses(next(batches), average, 0.0).values(), torch.zeros((), device=device)).backward()
    optimiser.zero_grad()  # this step only triggers the compilation, before the time is measured

    start = printed = time.monotonic()
    step = seen = seen_before = 0
    quarter, progress = 1, 0.0
    recent: Tensor | None = None
    while progress < 1:
        batch = next(batches)
        rate = options.rate * min(progress / 0.05, (1 + math.cos(math.pi * progress)) / 2)
        for group in optimiser.param_groups:
            group["lr"] = rate
        parts = method.losses(batch, average, progress)
        torch.stack(list(parts.values())).sum().backward()
        nn.utils.clip_grad_norm_(student.parameters(), 1.0)
        optimiser.step()
        optimiser.zero_grad()
        # The second term reduces the influence of the initial weights.
        decay = min(method.momentum(progress), (1 + step) / (10 + step))
        torch._foreach_lerp_(list(average.parameters()), list(student.parameters()), 1 - decay)

        step, seen = step + 1, seen + len(batch)
        values = torch.stack(list(parts.values())).detach()
        recent = values if recent is None else recent.lerp(values, 0.05)
        now = time.monotonic()
        progress = step / options.steps if options.steps else (now - start) / (60 * options.minutes)
        if step == 1 or now - printed >= 5 or progress >= 1:
            losses = dict(zip(parts, recent.tolist(), strict=True))  # waits for the device
            now = time.monotonic()
            line = "  ".join(f"{name} {value:.4f}" for name, value in losses.items())
            speed = (seen - seen_before) / (now - printed)
            print(f"step {step}  {line}  {speed:.0f} tiles/s  {min(progress, 1):.1%}", flush=True)
            if not all(map(math.isfinite, losses.values())):
                raise FloatingPointError(f"The loss of step {step} is not finite. Try a smaller --rate.")
            printed, seen_before = now, seen
        if progress >= 1 or progress >= quarter / 4:
            quarter = int(4 * progress) + 1
            losses = dict(zip(parts, recent.tolist(), strict=True))
            save(average["backbone"], final=progress >= 1, steps=step, tiles_seen=seen, losses=json.dumps(losses))


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Pretrain tapfm-pocket.")
    parser.add_argument("--method", choices=("distil", "dino"), required=True)
    parser.add_argument("--architecture", choices=ARCHITECTURES, default="p16")
    parser.add_argument("--tiles", type=Path, required=True, help="folder of .npy shards")
    parser.add_argument("--limit", type=int, help="use only this many tiles")
    parser.add_argument("--teacher", type=Path, help="DINOv2 ViT-S/14 as a timm checkpoint; required by `distil`")
    parser.add_argument("--out", type=Path, required=True, help="output file (.safetensors)")
    budget = parser.add_mutually_exclusive_group(required=True)
    budget.add_argument("--minutes", type=float, help="training time, without loading and compiling")
    budget.add_argument("--steps", type=int, help="number of training steps")
    parser.add_argument("--batch", type=int, default=1024, help="tiles per step")
    parser.add_argument("--rate", type=float, default=1e-3, help="peak learning rate")
    parser.add_argument(
        "--smallest-crop",
        type=float,
        default=0.7,
        help="smallest area of a global crop of `dino`, as a fraction of the tile",
    )
    parser.add_argument("--dtype", choices=DTYPES, default="float16", help="precision of the output file")
    parser.add_argument("--start", type=Path, help="initial weights, from an earlier run")
    parser.add_argument("--compile", action="store_true", help="compile the student")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    if options.method == "distil" and options.teacher is None:
        parser.error("--method distil needs --teacher")
    if (options.minutes or options.steps or 0) <= 0:
        parser.error("--minutes or --steps must be greater than 0")
    return options


def main() -> None:
    options = parse_options()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.set_float32_matmul_precision("high")
    dtype = DTYPES[options.dtype]
    print(check_limits(options.architecture, dtype))
    teacher = load_teacher(options.teacher, device) if options.teacher else None
    tiles = load_tiles(options.tiles, device, options.limit)
    print(f"{len(tiles)} tiles on {device}", flush=True)

    torch.manual_seed(options.seed)  # here, so that the initial weights do not depend on the steps above
    backbone = build_student(options.architecture, dynamic_img_size=True).to(device)
    if options.start:
        backbone.load_state_dict(load_file(options.start), strict=True)
    encode = torch.compile(encode_tokens, dynamic=False) if options.compile else encode_tokens
    batches = sample_batches(tiles, options.batch)
    method: Distillation | SelfDistillation
    if options.method == "distil":
        method = Distillation(backbone, encode, teacher, tiles)
        print("computed the features of the teacher", flush=True)
    else:
        method = SelfDistillation(backbone, encode, tiles, options.smallest_crop)
    method.student.to(device)

    common_metadata = {"tiles": len(tiles)} | {
        name: getattr(options, name) for name in ("method", "architecture", "seed", "rate", "batch", "start")
    }

    def save(vit: nn.Module, *, final: bool, **extra: object) -> None:
        path = options.out if final else options.out.with_suffix(".partial.safetensors")
        metadata = {name: str(value) for name, value in {**common_metadata, **extra}.items()}
        save_student(vit, path, options.architecture, dtype, metadata)

    train(method, batches, options, save)
    print(f"wrote {options.out}, {options.out.stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
