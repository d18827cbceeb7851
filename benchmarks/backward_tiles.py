"""Backward through some of a slide's tiles: how far is the estimated gradient from the whole one?

    python benchmarks/backward_tiles.py                    # about a minute on two cores
    python benchmarks/backward_tiles.py --json out/subset.json

Paints slides, trains an aggregator on what tapfm-pocket says of the tiles of some, and takes two others, one of either
class. Of these each tile's part of the encoder's gradient (eq. 7) is computed once; a draw's gradient is then a
weighted sum of them. Prints Markdown: the mean squared distance of a draw's gradient to the whole gradient,
relative to that one's squared norm, for n of K tiles drawn evenly, by the size of their gradients at the aggregator
(`adaptation.backward_tiles`), and, as a bound that needs backward through all tiles, by the size of their parts.
"""

from __future__ import annotations

import argparse
import json
import platform
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import cv2
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

import tapfm
from tapfm.adaptation.subset import inclusion_probabilities, systematic_sample, tile_importance
from tapfm.adaptation.two_graph import AggregatorGradients, compute_aggregator_gradients
from tapfm.aggregators.abmil import Abmil
from tapfm.aggregators.cls_attention import ClsAttention
from tapfm.contracts import EncodedTiles, Targets
from tapfm.encoders.vit import VitEncoder
from tapfm.encoders.weights import load_encoder
from tapfm.runtime.seeding import make_rng
from tapfm.synthetic.cohort import CohortSpec, PlannedSlide, plan_cohort
from tapfm.synthetic.slides import render_slide
from tapfm.tasks.binary import BinaryTask
from tapfm.tasks.cross_entropy import encode_labels

TARGET = "FGFR3"
TASK = BinaryTask.from_training_labels(TARGET, [0, 1])
AGGREGATORS: dict[str, Callable[[int], nn.Module]] = {
    "cls-attention, tau 1": lambda size: ClsAttention(size),
    "cls-attention, tau 0.1": lambda size: ClsAttention(size, tau=0.1),
    "abmil": lambda size: Abmil(size),
}
RATIOS = (1 / 16, 1 / 8, 1 / 4, 1 / 2)
Numbers = NDArray[np.float64]


@dataclass
class Slide:
    """Tiles, what the encoder says of them, and the label."""

    tiles: Tensor
    encoded: EncodedTiles
    targets: Targets


@dataclass
class Row:
    """One measurement: relative variances, by way of drawing."""

    aggregator: str
    label: int
    tiles: int  # K
    drawn: int  # n
    evenly: float
    by_size: float
    bound: float


def painted(planned: PlannedSlide, encoder: VitEncoder) -> Slide:
    slide = render_slide(planned)
    positions, side_px0 = slide.truth.default_grid()
    tissue = slide.truth.coverage(slide.truth.tissue, positions, side_px0) > 0.5
    size = (encoder.tile_px, encoder.tile_px)
    pixels = [
        cv2.resize(slide.scan.pixels[y : y + side_px0, x : x + side_px0], size, interpolation=cv2.INTER_AREA)
        for x, y in positions[tissue].tolist()
    ]
    tiles = torch.from_numpy(np.stack(pixels)).permute(0, 3, 1, 2).contiguous()
    with torch.no_grad():
        encoded = [encoder(some) for some in tiles.split(64)]
    together = EncodedTiles(torch.cat([each.z_KD for each in encoded]), torch.cat([each.r_K for each in encoded]))
    return Slide(tiles, together, encode_labels([planned.labels[TARGET]]))


def trained(make: Callable[[int], nn.Module], slides: list[Slide], steps: int) -> nn.Module:
    torch.manual_seed(0)
    aggregator = make(slides[0].encoded.z_KD.shape[1])
    optimiser = torch.optim.AdamW(aggregator.parameters(), lr=1e-3, weight_decay=1e-2)
    for step in range(steps):
        slide = slides[step % len(slides)]
        optimiser.zero_grad()
        torch.autograd.backward(TASK.loss(aggregator(*slide.encoded).logits_C, slide.targets))
        optimiser.step()
    return aggregator


def products(encoder: VitEncoder, slide: Slide, graph: AggregatorGradients) -> Numbers:
    """Inner products (K, K) of the tiles' parts of the encoder's gradient: all that distances need."""
    parts = []
    for i in range(len(slide.tiles)):
        encoder.zero_grad()
        encoded = encoder(slide.tiles[i : i + 1])
        loss = (encoded.z_KD * graph.g_z_KD[i]).sum() + (encoded.r_K * graph.g_r_K[i]).sum()
        torch.autograd.backward(loss)
        parts.append(torch.cat([p.grad.flatten() for p in encoder.parameters() if p.grad is not None]))
    together = torch.stack(parts)
    found: Numbers = (together @ together.T).double().numpy()
    return found


def variance(inner: Numbers, sizes: Numbers, count: int, draws: int) -> float:
    """Mean squared distance of a draw's gradient to the whole one, relative to that one's squared norm."""
    chances, rng, total = inclusion_probabilities(sizes, count), make_rng("subset"), 0.0
    for _ in range(draws):
        rows = systematic_sample(chances, rng.permutation(len(sizes)), rng.random())
        error = np.full(len(sizes), -1.0)
        error[rows] += 1 / chances[rows]
        total += float(error @ inner @ error)
    return total / draws / float(inner.sum())


def measure(name: str, aggregator: nn.Module, encoder: VitEncoder, slide: Slide, draws: int) -> list[Row]:
    features, attention = (values.clone().requires_grad_() for values in slide.encoded)
    graph = compute_aggregator_gradients(aggregator, TASK, features, attention, slide.targets)
    inner = products(encoder, slide, graph)
    ways = {
        "evenly": np.ones(len(inner)),
        "by_size": tile_importance(slide.encoded, graph.g_z_KD, graph.g_r_K, 1.0).numpy(),
        "bound": np.sqrt(np.diag(inner)),
    }
    rows = []
    for ratio in RATIOS:
        count = max(round(ratio * len(inner)), 1)
        found = {way: variance(inner, sizes, count, draws) for way, sizes in ways.items()}
        rows.append(Row(name, int(slide.targets.labels_C), len(inner), count, **found))
    return rows


def table(rows: list[Row]) -> str:
    lines = [
        "| aggregator | label | K | n | evenly | by size | of evenly | bound |",
        "|---|--:|--:|--:|--:|--:|--:|--:|",
    ]
    lines += [
        f"| {row.aggregator} | {row.label} | {row.tiles} | {row.drawn} | {row.evenly:.4f} | {row.by_size:.4f} | "
        f"{row.by_size / row.evenly:.1%} | {row.bound:.4f} |"
        for row in rows
    ]
    return "\n".join(lines)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiles", type=int, default=120, help="of tissue on the slides that are measured, about")
    parser.add_argument("--training-slides", type=int, default=12)
    parser.add_argument("--steps", type=int, default=240, help="of training the aggregator")
    parser.add_argument("--draws", type=int, default=2000)
    parser.add_argument("--json", type=Path, help="also write the figures here")
    arguments = parser.parse_args()
    encoder = load_encoder("tapfm-pocket").encoder.eval()
    half = {TARGET: 0.5}
    small = plan_cohort(CohortSpec(arguments.training_slides, external=0, tiles=30, seed=1, prevalence=half))
    large = plan_cohort(CohortSpec(6, external=0, tiles=arguments.tiles, seed=2, prevalence=half))
    training = [painted(planned, encoder) for planned in small]
    measured = [painted(next(each for each in large if each.labels[TARGET] == label), encoder) for label in (1, 0)]
    rows = []
    for name, make in AGGREGATORS.items():
        aggregator = trained(make, training, arguments.steps)
        for slide in measured:
            rows += measure(name, aggregator, encoder, slide, arguments.draws)
    print(
        f"tapfm {tapfm.__version__}, torch {torch.__version__}, {platform.machine()}; tapfm-pocket, painted slides, "
        f"mean over {arguments.draws:,} draws\n"
    )
    print(table(rows))
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps([asdict(row) for row in rows], indent=1))


if __name__ == "__main__":
    main()
