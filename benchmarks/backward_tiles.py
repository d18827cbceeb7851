"""Measure the error of the gradient if only a sample of a slide's tiles is backpropagated.

    python benchmarks/backward_tiles.py                    # about a minute on two cores
    python benchmarks/backward_tiles.py --json out/subset.json

Generates synthetic slides, and trains aggregators on features of tapfm-pocket. On two other slides, one of each
class, it computes each tile's contribution to the encoder's gradient (eq. 7) once. The gradient of a sample is a
weighted sum of contributions. Prints Markdown: the mean squared error of the sampled gradient, relative to the squared
norm of the whole gradient, for n of K tiles that are sampled
    uniform        with equal probabilities
    by importance  with probabilities from the gradients at the aggregator, as `adaptation.backward_tiles` does
    lower bound    with probabilities from the norms of the contributions, which need a backward pass of all tiles
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
from tapfm.synthetic.cohort_plan import CohortSpec, PlannedSlide, plan_cohort
from tapfm.synthetic.slide_rendering import render_slide
from tapfm.tasks.binary import BinaryTask
from tapfm.tasks.cross_entropy import encode_labels

TARGET = "FGFR3"
TASK = BinaryTask.from_training_labels(TARGET, [0, 1])
AGGREGATORS: dict[str, Callable[[int], nn.Module]] = {
    "cls-attention, tau 1": lambda size: ClsAttention(size),
    "cls-attention, tau 0.1": lambda size: ClsAttention(size, tau=0.1),
    "abmil": lambda size: Abmil(size),
}
FRACTIONS = (1 / 16, 1 / 8, 1 / 4, 1 / 2)
FloatArray = NDArray[np.float64]


@dataclass
class Slide:
    """Tiles of a slide, their features and attention, and the label."""

    tiles: Tensor
    encoded: EncodedTiles
    targets: Targets


@dataclass
class Row:
    """Relative errors on one slide, by sampling method."""

    aggregator: str
    label: int
    tiles: int  # K
    sampled: int  # n
    uniform: float
    by_importance: float
    lower_bound: float


def make_slide(planned_slide: PlannedSlide, encoder: VitEncoder) -> Slide:
    slide = render_slide(planned_slide)
    positions, side_px0 = slide.truth.default_tile_grid()
    tissue = slide.truth.coverage(slide.truth.tissue, positions, side_px0) > 0.5
    size = (encoder.tile_px, encoder.tile_px)
    pixels = [
        cv2.resize(slide.scan.pixels[y : y + side_px0, x : x + side_px0], size, interpolation=cv2.INTER_AREA)
        for x, y in positions[tissue].tolist()
    ]
    tiles = torch.from_numpy(np.stack(pixels)).permute(0, 3, 1, 2).contiguous()
    with torch.no_grad():
        encoded = [encoder(batch) for batch in tiles.split(64)]
    z_KD, r_K = (torch.cat(parts) for parts in zip(*encoded, strict=True))
    return Slide(tiles, EncodedTiles(z_KD, r_K), encode_labels([planned_slide.labels[TARGET]]))


def train_aggregator(make: Callable[[int], nn.Module], slides: list[Slide], steps: int) -> nn.Module:
    torch.manual_seed(0)
    aggregator = make(slides[0].encoded.z_KD.shape[1])
    optimiser = torch.optim.AdamW(aggregator.parameters(), lr=1e-3, weight_decay=1e-2)
    for step in range(steps):
        slide = slides[step % len(slides)]
        optimiser.zero_grad()
        torch.autograd.backward(TASK.loss(aggregator(*slide.encoded).logits_C, slide.targets))
        optimiser.step()
    return aggregator


def inner_products(encoder: VitEncoder, slide: Slide, graph: AggregatorGradients) -> FloatArray:
    """Return the inner products (K, K) of the tiles' contributions to the encoder's gradient."""
    contributions = []
    for i in range(len(slide.tiles)):
        encoder.zero_grad()
        encoded = encoder(slide.tiles[i : i + 1])
        loss = (encoded.z_KD * graph.g_z_KD[i]).sum() + (encoded.r_K * graph.g_r_K[i]).sum()
        torch.autograd.backward(loss)
        contributions.append(torch.cat([p.grad.flatten() for p in encoder.parameters() if p.grad is not None]))
    stacked = torch.stack(contributions)
    inner: FloatArray = (stacked @ stacked.T).double().numpy()
    return inner


def relative_error(inner: FloatArray, importance: FloatArray, count: int, samples: int) -> float:
    """Return the mean squared error of the sampled gradient, relative to the squared norm of the whole gradient."""
    probabilities, rng, total = inclusion_probabilities(importance, count), make_rng("subset"), 0.0
    for _ in range(samples):
        rows = systematic_sample(probabilities, rng.permutation(len(importance)), rng.random())
        error = np.full(len(importance), -1.0)
        error[rows] += 1 / probabilities[rows]
        total += float(error @ inner @ error)
    return total / samples / float(inner.sum())


def measure(name: str, aggregator: nn.Module, encoder: VitEncoder, slide: Slide, samples: int) -> list[Row]:
    features, attention = (values.clone().requires_grad_() for values in slide.encoded)
    graph = compute_aggregator_gradients(aggregator, TASK, features, attention, slide.targets)
    inner = inner_products(encoder, slide, graph)
    importances = {
        "uniform": np.ones(len(inner)),
        "by_importance": tile_importance(slide.encoded, graph.g_z_KD, graph.g_r_K, 1.0).numpy(),
        "lower_bound": np.sqrt(np.diag(inner)),
    }
    rows = []
    for fraction in FRACTIONS:
        count = max(round(fraction * len(inner)), 1)
        errors = {
            method: relative_error(inner, importance, count, samples) for method, importance in importances.items()
        }
        rows.append(Row(name, int(slide.targets.labels_C), len(inner), count, **errors))
    return rows


def format_table(rows: list[Row]) -> str:
    lines = [
        "| aggregator | label | K | n | uniform | by importance | relative to uniform | lower bound |",
        "|---|--:|--:|--:|--:|--:|--:|--:|",
    ]
    lines += [
        f"| {row.aggregator} | {row.label} | {row.tiles} | {row.sampled} | {row.uniform:.4f} | "
        f"{row.by_importance:.4f} | {row.by_importance / row.uniform:.1%} | {row.lower_bound:.4f} |"
        for row in rows
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiles", type=int, default=120, help="approximate tissue tiles per measured slide")
    parser.add_argument("--training-slides", type=int, default=12)
    parser.add_argument("--steps", type=int, default=240, help="training steps of each aggregator")
    parser.add_argument("--samples", type=int, default=2000, help="samples per error")
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    arguments = parser.parse_args()
    encoder = load_encoder("tapfm-pocket").encoder.eval()
    half = {TARGET: 0.5}
    small = plan_cohort(CohortSpec(arguments.training_slides, external=0, tiles=30, seed=1, prevalence=half))
    large = plan_cohort(CohortSpec(6, external=0, tiles=arguments.tiles, seed=2, prevalence=half))
    training = [make_slide(planned, encoder) for planned in small]
    measured = [make_slide(next(each for each in large if each.labels[TARGET] == label), encoder) for label in (1, 0)]
    rows = []
    for name, make in AGGREGATORS.items():
        aggregator = train_aggregator(make, training, arguments.steps)
        for slide in measured:
            rows += measure(name, aggregator, encoder, slide, arguments.samples)
    print(
        f"tapfm {tapfm.__version__}, torch {torch.__version__}, {platform.machine()}; tapfm-pocket, synthetic slides, "
        f"mean over {arguments.samples:,} samples\n"
    )
    print(format_table(rows))
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps([asdict(row) for row in rows], indent=1))


if __name__ == "__main__":
    main()
