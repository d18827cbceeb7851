"""Pretrain tapfm-pocket, a ViT of half a GFLOP, on painted H&E tiles.

Two methods. `distil` teaches it the tokens of DINOv2 ViT-S/14: the teacher sees the tile as it is, the student sees it
in another stain. `dino` needs no teacher: DINO (Caron et al. 2021) with Sinkhorn-Knopp, masked patches and KoLeo. Tiles
are .npy shards of uint8 (n, 224, 224, 3); all of them live on the device, and so does their augmentation.

    PYTHONPATH=src python tools/pretrain_pocket.py --method distil --tiles TILES --steps 4684 \
        --teacher DINOV2.safetensors --out pocket.safetensors --compile

`tools/probe_pocket.py` says what came of it.
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
    IMAGENET_PIXELS,
    POCKET_PIXELS,
    TILE_PX,
    build_student,
    check_limits,
    half_precision,
    load_teacher,
    normalised,
    save_student,
    unit_pixels,
)
from safetensors.torch import load_file
from torch import Tensor, nn

DTYPES = {"float16": torch.float16, "float32": torch.float32}

Encode = Callable[..., Tensor]


def tokens(vit: Any, pixels: Tensor, hidden: Tensor | None = None, stand_in: Tensor | None = None) -> Tensor:
    """All tokens after the final norm; patches marked in `hidden` (n, rows, columns) are replaced by `stand_in`."""
    patches = vit.patch_embed(pixels)
    if hidden is not None and stand_in is not None:
        patches = torch.where(hidden[..., None], stand_in.to(patches.dtype), patches)
    x: Tensor = vit.norm(vit.blocks(vit.norm_pre(vit._pos_embed(patches))))
    return x


def load_tiles(folder: Path, device: torch.device, limit: int | None) -> Tensor:
    """All shards, or the first `limit` tiles of them, as uint8 on the device."""
    shards = [np.load(path, mmap_mode="r") for path in sorted(folder.glob("*.npy"))]
    if not shards or any(s.dtype != np.uint8 or s.shape[1:] != (TILE_PX, TILE_PX, 3) for s in shards):
        raise SystemExit(f"{folder} must hold .npy shards of uint8 (n, {TILE_PX}, {TILE_PX}, 3).")
    count = min(sum(map(len, shards)), limit or 10**9)
    tiles = torch.empty((count, TILE_PX, TILE_PX, 3), dtype=torch.uint8, device=device)
    start = 0
    for shard in shards:
        part = np.array(shard[: count - start])
        tiles[start : start + len(part)] = torch.from_numpy(part)
        start += len(part)
    return tiles


def batches(tiles: Tensor, size: int) -> Iterator[Tensor]:
    """Numbers of tiles without end, each epoch in a new order."""
    size = min(size, len(tiles))
    while True:
        order = torch.randperm(len(tiles), device=tiles.device)
        yield from order[: len(tiles) // size * size].split(size)


def turned(tiles: Tensor, turns: Tensor) -> Tensor:
    """Tiles n x height x width x 3, each turned or mirrored in one of eight ways."""
    down, across, swapped = ((turns >> bit & 1).bool().view(-1, 1, 1, 1) for bit in range(3))
    tiles = torch.where(down, tiles.flip(1), tiles)
    tiles = torch.where(across, tiles.flip(2), tiles)
    return torch.where(swapped, tiles.transpose(1, 2), tiles)


def uniform(count: int, low: float, high: float, device: torch.device) -> Tensor:
    """One random number per image, shaped to multiply images."""
    return torch.empty(count, 1, 1, 1, device=device).uniform_(low, high)


def cut(images: Tensor, side_px: int, smallest: float | None = None) -> Tensor:
    """Each image turned or mirrored, and cut to a square at random.

    With `smallest` the square has at least that share of the area and is zoomed to `side_px`. Without, it is cut out at
    `side_px` as it is: the size of a nucleus in pixels means something.
    """
    count, full, device = len(images), images.shape[-1], images.device
    signs = torch.randint(0, 2, (count, 2, 1), device=device) * 2.0 - 1
    swapped = torch.rand(count, 1, 1, device=device) < 0.5
    axes = torch.eye(2, device=device)
    turn = signs * torch.where(swapped, axes.flip(0), axes)
    if smallest is None:
        ratio = torch.full((count, 1, 1), side_px / full, device=device)
        corner = torch.randint(0, full - side_px + 1, (count, 2, 1), device=device)
        centre = (2 * corner + side_px) / full - 1  # on whole pixels, so nothing is interpolated
    else:
        ratio = uniform(count, smallest, 1, device)[..., 0].sqrt()
        centre = (1 - ratio) * (2 * torch.rand(count, 2, 1, device=device) - 1)
    grid = F.affine_grid(torch.cat([ratio * turn, centre], 2), [count, 3, side_px, side_px], align_corners=False)
    return F.grid_sample(images, grid, align_corners=False, padding_mode="reflection")


def restained(images: Tensor) -> Tensor:
    """Another stain, scanner and focus for each image."""
    count, device = len(images), images.device
    density = -images.clamp(min=1 / 255).log()
    strength = uniform(count, -0.35, 0.35, device).exp()[..., 0]
    mix = torch.eye(3, device=device) + torch.randn(count, 3, 3, device=device) * 0.06
    shift = torch.randn(count, 3, 1, device=device) * 0.03
    density = ((strength * mix) @ density.flatten(2) + shift).view_as(density)
    brightness = uniform(count, 0.9, 1.1, device)
    return blurred((density.neg().exp() * brightness).clamp(0, 1))


def blurred(images: Tensor, share: float = 0.2) -> Tensor:
    """A Gaussian blur of 0.5 to 2 px for the first of the images: they come in random order.

    As a product with one matrix per image and axis: each image has its own width, and a matrix product is quick.
    """
    some = images[: round(share * len(images))]
    place = torch.arange(images.shape[-1], device=images.device, dtype=torch.float32)
    width = uniform(len(some), 0.5, 2, images.device)
    matrix = (-0.5 * ((place[:, None] - place) / width) ** 2).softmax(-1)
    return torch.cat([matrix @ some @ matrix.transpose(2, 3), images[len(some) :]])


class Distillation:
    """The student's CLS predicts the teacher's CLS and mean patch token, its patches those of the teacher.

    What the teacher says of each tile, in each of the eight ways to lay it, is computed once. Nothing is zoomed: the
    size of a nucleus in pixels means something.
    """

    def __init__(self, backbone: Any, encode: Encode, teacher: Any, tiles: Tensor) -> None:
        width, target = backbone.embed_dim, teacher.embed_dim
        heads = {"tile": nn.Linear(width, 2 * target), "patch": nn.Linear(width, target)}
        self.student = nn.ModuleDict({"backbone": backbone, **heads})
        self.encode, self.tiles = encode, tiles
        self.prefix, self.grid = backbone.num_prefix_tokens, backbone.patch_embed.grid_size
        self.targets = self.ask(teacher)

    @torch.no_grad()
    def ask(self, teacher: Any, at_once: int = 512) -> dict[str, Tensor]:
        """Teacher's tokens of all tiles and turns (n x 8 x ...), standardised, its patches averaged to our grid."""
        count, device = len(self.tiles), self.tiles.device
        said: dict[str, Tensor] = {}
        moments: dict[str, tuple[Tensor, Tensor]] = {}
        for start in range(0, count, at_once):
            rows = slice(start, min(start + at_once, count))
            for turn in range(8):
                turns = torch.full((rows.stop - rows.start,), turn, device=device)
                pixels = normalised(unit_pixels(turned(self.tiles[rows], turns)), IMAGENET_PIXELS)
                with half_precision(device):
                    x = teacher.forward_features(pixels).float()
                maps = x[:, 1:].transpose(1, 2).unflatten(2, teacher.patch_embed.grid_size)
                small = F.interpolate(maps, self.grid, mode="bilinear", antialias=True).flatten(2).transpose(1, 2)
                for name, value in {"tile": torch.cat([x[:, 0], x[:, 1:].mean(1)], 1), "patch": small}.items():
                    if name not in said:  # a few dimensions are far larger than the rest; the first tiles tell
                        flat = value.flatten(0, -2)
                        moments[name] = flat.mean(0), flat.std(0).clamp(min=1e-2)
                        said[name] = torch.empty((count, 8, *value.shape[1:]), dtype=torch.float16, device=device)
                    mean, std = moments[name]
                    said[name][rows, turn] = ((value - mean) / std).half()
        return said

    def losses(self, chosen: Tensor, average: nn.ModuleDict, done: float) -> dict[str, Tensor]:
        """Smooth L1 and angle to the standardised targets, from the tile in another stain."""
        del average, done
        turns = torch.randint(0, 8, (len(chosen),), device=chosen.device)
        with torch.no_grad():
            pixels = normalised(restained(unit_pixels(turned(self.tiles[chosen], turns))), POCKET_PIXELS)
        with half_precision(chosen.device):
            x = self.encode(self.student["backbone"], pixels)
            guesses = {"tile": self.student["tile"](x[:, 0]), "patch": self.student["patch"](x[:, self.prefix :])}
        parts = {}
        for name, guess in guesses.items():
            target = self.targets[name][chosen, turns].float()
            angle = 1 - F.cosine_similarity(guess.float(), target, dim=-1).mean()
            parts[name] = F.smooth_l1_loss(guess.float(), target) + angle
        return parts

    def momentum(self, done: float) -> float:
        """Constant: the annealed learning rate does the rest."""
        del done
        return 0.999


class Prototypes(nn.Module):
    """DINO's head: an MLP to a bottleneck on the sphere, then the cosine to each prototype."""

    def __init__(self, width: int, hidden: int = 1024, bottleneck: int = 256, count: int = 4096) -> None:
        super().__init__()
        layers = [nn.Linear(width, hidden), nn.Linear(hidden, hidden), nn.Linear(hidden, bottleneck)]
        for layer in layers:
            nn.init.trunc_normal_(layer.weight, std=0.02)
            nn.init.zeros_(layer.bias)
        self.mlp = nn.Sequential(layers[0], nn.GELU(), layers[1], nn.GELU(), layers[2])
        self.prototypes = nn.Parameter(torch.randn(count, bottleneck))

    def forward(self, x: Tensor) -> Tensor:
        """Cosines in float32: they are divided by temperatures of a few percent."""
        x = self.mlp(x)
        with torch.autocast(x.device.type, enabled=False):
            return F.linear(F.normalize(x.float(), dim=-1), F.normalize(self.prototypes, dim=-1))


class SelfDistillation:
    """DINO: the student's views agree with what its own moving average makes of the two global ones."""

    local_views, student_temperature, hidden_share, koleo_weight = 4, 0.1, 0.35, 0.1

    def __init__(self, backbone: Any, encode: Encode, tiles: Tensor, smallest: float) -> None:
        self.tiles = tiles
        self.student = nn.ModuleDict({"backbone": backbone, "head": Prototypes(backbone.embed_dim)})
        self.student.register_parameter("stand_in", nn.Parameter(torch.zeros(backbone.embed_dim)))
        self.encode, self.smallest = encode, smallest
        self.prefix, self.grid = backbone.num_prefix_tokens, backbone.patch_embed.grid_size
        patch_px = backbone.patch_embed.patch_size[0]
        self.local_px = round(100 / patch_px) * patch_px

    def losses(self, chosen: Tensor, average: nn.ModuleDict, done: float) -> dict[str, Tensor]:
        """Agreement between views, between hidden patches and what was there, and distance between tiles."""
        images = unit_pixels(self.tiles[chosen])
        count, student = len(images), self.student
        order = torch.rand(count, math.prod(self.grid), device=images.device).argsort(1)
        places = order[:, : round(self.hidden_share * order.shape[1])]
        hidden = torch.zeros_like(order, dtype=torch.bool).scatter(1, places, True).view(count, *self.grid)
        with torch.no_grad():
            views = [normalised(restained(cut(images, TILE_PX, self.smallest)), POCKET_PIXELS) for _ in range(2)]
            local = torch.cat([cut(images, self.local_px) for _ in range(self.local_views)])
            local = normalised(restained(local), POCKET_PIXELS)
        with half_precision(images.device):
            with torch.no_grad():
                x = self.encode(average["backbone"], torch.cat(views))
                temperature = 0.04 + 0.03 * min(done / 0.3, 1)
                wanted = sinkhorn(average["head"](x[:, 0]), temperature).chunk(2)
                wanted_patches = sinkhorn(average["head"](self.at(places, x[count:])).flatten(0, 1), temperature)
            # The first global view stays whole, so that the student does not get used to holes.
            whole = self.encode(student["backbone"], views[0])
            holed = self.encode(student["backbone"], views[1], hidden, student.stand_in)
            cls = torch.cat([whole[:, 0], holed[:, 0], self.encode(student["backbone"], local)[:, 0]])
            guesses = student["head"](cls).chunk(2 + self.local_views)
            patches = student["head"](self.at(places, holed)).flatten(0, 1)
        terms = [self.mismatch(g, w) for i, w in enumerate(wanted) for j, g in enumerate(guesses) if i != j]
        return {
            "views": torch.stack(terms).mean(),
            "patches": self.mismatch(patches, wanted_patches),
            "koleo": self.koleo_weight * (koleo(whole[:, 0]) + koleo(holed[:, 0])) / 2,
        }

    def at(self, places: Tensor, x: Tensor) -> Tensor:
        """The patch tokens at some places of each image."""
        return x[:, self.prefix :].take_along_dim(places[..., None], 1)

    def mismatch(self, guess: Tensor, wanted: Tensor) -> Tensor:
        """The cross entropy between assignments to prototypes."""
        return -(wanted * (guess / self.student_temperature).log_softmax(-1)).sum(-1).mean()

    def momentum(self, done: float) -> float:
        """From 0.994 to 1: the teacher settles with the student."""
        return 1 - 0.006 * (1 + math.cos(math.pi * done)) / 2


def sinkhorn(cosines: Tensor, temperature: float, rounds: int = 3) -> Tensor:
    """Assignments to prototypes (Sinkhorn-Knopp) that use all of them equally, so that they cannot collapse to one."""
    q = ((cosines - cosines.max()) / temperature).exp()
    for _ in range(rounds):
        q = q / q.sum(0, keepdim=True)
        q = q / q.sum(1, keepdim=True)
    return q


def koleo(features: Tensor) -> Tensor:
    """Keep each feature away from its nearest neighbour in the batch (Sablayrolles et al. 2019)."""
    with torch.autocast(features.device.type, enabled=False):
        x = F.normalize(features.float(), dim=-1)
        with torch.no_grad():
            nearest = (x @ x.T).fill_diagonal_(-2).argmax(1)
        return -(F.pairwise_distance(x, x[nearest]) + 1e-6).log().mean()


def optimiser_for(student: nn.Module, rate: float, device: torch.device) -> torch.optim.AdamW:
    """AdamW that decays matrices only: not norms, biases, positions, prefix tokens or prototypes."""
    groups: dict[bool, list[Tensor]] = {True: [], False: []}
    for name, parameter in student.named_parameters():
        groups[name.endswith("weight") and parameter.ndim > 1].append(parameter)
    settings = [{"params": groups[True], "weight_decay": 0.05}, {"params": groups[False], "weight_decay": 0.0}]
    return torch.optim.AdamW(settings, lr=rate, betas=(0.9, 0.98), fused=device.type == "cuda")


def train(
    method: Distillation | SelfDistillation,
    order: Iterator[Tensor],
    options: argparse.Namespace,
    save: Callable[..., None],
) -> None:
    """Train until the steps or minutes are used up; `save` gets the averaged weights at each quarter.

    The schedule follows the share of that budget, so it ends annealed however fast the machine is.
    """
    student = method.student
    average = deepcopy(student).requires_grad_(False)
    device = next(student.parameters()).device
    optimiser = optimiser_for(student, options.rate, device)
    sum(method.losses(next(order), average, 0.0).values(), torch.zeros((), device=device)).backward()
    optimiser.zero_grad()  # that round compiled what there is to compile, before the clock starts

    start = printed = time.monotonic()
    step = seen = seen_before = 0
    quarter, done = 1, 0.0
    recent: Tensor | None = None
    while done < 1:
        batch = next(order)
        rate = options.rate * min(done / 0.05, (1 + math.cos(math.pi * done)) / 2)
        for group in optimiser.param_groups:
            group["lr"] = rate
        parts = method.losses(batch, average, done)
        torch.stack(list(parts.values())).sum().backward()
        nn.utils.clip_grad_norm_(student.parameters(), 1.0)
        optimiser.step()
        optimiser.zero_grad()
        decay = min(method.momentum(done), (1 + step) / (10 + step))  # the first weights are worth little
        torch._foreach_lerp_(list(average.parameters()), list(student.parameters()), 1 - decay)

        step, seen = step + 1, seen + len(batch)
        values = torch.stack(list(parts.values())).detach()
        recent = values if recent is None else recent.lerp(values, 0.05)
        now = time.monotonic()
        done = step / options.steps if options.steps else (now - start) / (60 * options.minutes)
        if step == 1 or now - printed >= 5 or done >= 1:
            losses = dict(zip(parts, recent.tolist(), strict=True))  # waits for the device
            now = time.monotonic()
            line = "  ".join(f"{name} {value:.4f}" for name, value in losses.items())
            speed = (seen - seen_before) / (now - printed)
            print(f"step {step}  {line}  {speed:.0f} tiles/s  {min(done, 1):.1%}", flush=True)
            if not all(map(math.isfinite, losses.values())):
                raise FloatingPointError(f"The loss of step {step} is not finite.")
            printed, seen_before = now, seen
        if done >= 1 or done >= quarter / 4:
            quarter = int(4 * done) + 1
            losses = dict(zip(parts, recent.tolist(), strict=True))
            save(average["backbone"], final=done >= 1, steps=step, tiles_seen=seen, losses=json.dumps(losses))


def parsed() -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(description="Pretrain tapfm-pocket.")
    parser.add_argument("--method", choices=("distil", "dino"), required=True)
    parser.add_argument("--architecture", choices=ARCHITECTURES, default="p16")
    parser.add_argument("--tiles", type=Path, required=True, help="folder of .npy shards")
    parser.add_argument("--limit", type=int, help="use the first tiles only")
    parser.add_argument("--teacher", type=Path, help="DINOv2 ViT-S/14 as a timm checkpoint; `distil` needs it")
    parser.add_argument("--out", type=Path, required=True, help="FILE.safetensors")
    budget = parser.add_mutually_exclusive_group(required=True)
    budget.add_argument("--minutes", type=float, help="of training; loading, compiling and the probe come on top")
    budget.add_argument("--steps", type=int)
    parser.add_argument("--batch", type=int, default=1024)
    parser.add_argument("--rate", type=float, default=1e-3, help="peak learning rate")
    parser.add_argument("--smallest-crop", type=float, default=0.7, help="of `dino`, as a share of the tile's area")
    parser.add_argument("--dtype", choices=DTYPES, default="float16", help="of the file")
    parser.add_argument("--start", type=Path, help="weights of an earlier run to go on from")
    parser.add_argument("--compile", action="store_true", help="compile the student")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    if options.method == "distil" and options.teacher is None:
        parser.error("--method distil needs --teacher")
    if (options.minutes or options.steps or 0) <= 0:
        parser.error("--minutes or --steps must be more than 0")
    return options


def main() -> None:
    """Train and save."""
    options = parsed()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.set_float32_matmul_precision("high")
    dtype = DTYPES[options.dtype]
    print(check_limits(options.architecture, dtype))
    teacher = load_teacher(options.teacher, device) if options.teacher else None
    tiles = load_tiles(options.tiles, device, options.limit)
    print(f"{len(tiles)} tiles on {device}", flush=True)

    torch.manual_seed(options.seed)  # here, so that the first weights do not depend on what was loaded before
    backbone = build_student(options.architecture, dynamic_img_size=True).to(device)
    if options.start:
        backbone.load_state_dict(load_file(options.start), strict=True)
    encode = torch.compile(tokens, dynamic=False) if options.compile else tokens
    order = batches(tiles, options.batch)
    method: Distillation | SelfDistillation
    if options.method == "distil":
        method = Distillation(backbone, encode, teacher, tiles)
        print("the teacher has spoken", flush=True)
    else:
        method = SelfDistillation(backbone, encode, tiles, options.smallest_crop)
    method.student.to(device)

    facts = {"tiles": len(tiles)} | {
        name: getattr(options, name) for name in ("method", "architecture", "seed", "rate", "batch", "start")
    }

    def save(vit: nn.Module, *, final: bool, **more: object) -> None:
        path = options.out if final else options.out.with_suffix(".partial.safetensors")
        metadata = {name: str(value) for name, value in {**facts, **more}.items()}
        save_student(vit, path, options.architecture, dtype, metadata)

    train(method, order, options, save)
    print(f"wrote {options.out}, {options.out.stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
