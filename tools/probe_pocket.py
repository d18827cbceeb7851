"""Measure what tapfm-pocket sees of the planted signal, beside colour, chance and an oracle.

    PYTHONPATH=src python tools/generate_synthetic_tiles.py out/probe --probe --slides 240
    PYTHONPATH=src python tools/probe_pocket.py out/probe [--teacher DINOV2.safetensors] [--other NAME=p28:FILE]

Tiles: a linear probe that is shown which tiles carry the signal; its AUC over all tiles, and over those with nests
alone. Slides: what can be learned from slide labels by a linear model on the mean of the tiles' features, by one on
stain and size alone, and by an oracle, which is the tile probe and takes the mean of a slide's highest tenth.
Intervals are 95%, by bootstrap over slides (2,000 draws).
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from pocket_models import IMAGENET_PIXELS, POCKET_PIXELS, build_student, load_teacher, normalised, unit_pixels
from safetensors.torch import load_file
from torch import Tensor

from tapfm.encoders.weights import load_encoder

Scores = Callable[[Tensor], Tensor]

PARTS = ("train", "test", "external")
NESTS = 0.25  # part of a tile that is epithelium
DRAWS = 2000
SLIDE_STRENGTHS = (1e-4, 1e-3, 1e-2, 0.1)  # few slides: weak models only


@dataclass(frozen=True)
class Part:
    """Tiles of one group of slides."""

    tiles: Tensor
    truth: Tensor
    nests: Tensor
    slide: Tensor  # number of the slide, for each tile
    label: Tensor  # for each slide

    def mean(self, values: Tensor) -> Tensor:
        """Average tiles over each slide."""
        return torch.stack([values[self.slide == number].mean(0) for number in range(len(self.label))])

    def spread(self, values: Tensor) -> Tensor:
        """Measure how much tiles of a slide differ."""
        return torch.stack([values[self.slide == number].std(0) for number in range(len(self.label))])

    def highest(self, scores: Tensor, share: float = 0.1) -> Tensor:
        """Average the highest scores of each slide."""
        each = [scores[self.slide == number] for number in range(len(self.label))]
        return torch.stack([values.topk(max(1, round(share * len(values)))).values.mean() for values in each])

    def counts(self) -> Tensor:
        """Count the tiles of each slide."""
        return torch.bincount(self.slide, minlength=len(self.label)).double()[:, None]


def cls_features(vit: Any, tiles: Tensor, pixels: tuple[tuple[float, ...], tuple[float, ...]]) -> Tensor:
    """CLS tokens after the final norm, in float32; `tiles` are uint8."""
    vit, device = vit.eval(), next(vit.parameters()).device
    with torch.no_grad():
        parts = [vit.forward_features(normalised(unit_pixels(t.to(device)), pixels))[:, 0] for t in tiles.split(128)]
    return torch.cat(parts).float()


def colour_statistics(tiles: Tensor) -> Tensor:
    """30 numbers per tile: mean, std and three percentiles of each channel, as pixels and as optical density."""

    def statistics(part: Tensor) -> Tensor:
        red_green_blue = unit_pixels(part)[..., ::2, ::2].flatten(2)  # a quarter of the pixels says the same
        values = torch.cat([red_green_blue, -red_green_blue.clamp(min=1 / 255).log()], 1)
        percentiles = values.quantile(torch.tensor([0.1, 0.5, 0.9], device=values.device), dim=2)
        return torch.stack([values.mean(2), values.std(2), *percentiles], 2).flatten(1)

    return torch.cat([statistics(part) for part in tiles.split(32)])  # quantile takes 16 M numbers at most


def auc(scores: Tensor, truth: Tensor) -> float:
    """The area under the ROC curve as Mann-Whitney's U; ties count half."""
    truth = truth.bool()
    positives, negatives = int(truth.sum()), int((~truth).sum())
    if not positives or not negatives:
        return math.nan
    _, place, counts = scores.double().unique(return_inverse=True, return_counts=True)
    rank = (counts.cumsum(0) - (counts - 1) / 2)[place]
    return (float(rank[truth].sum()) - positives * (positives + 1) / 2) / (positives * negatives)


def fit_logistic(
    features: Tensor, truth: Tensor, choices: tuple[float, ...] = (1e-4, 1e-3, 1e-2, 0.1, 1, 10)
) -> Scores:
    """Logistic regression on standardised features, its C the best of `choices` on a quarter held out.

    The last quarter: tiles come slide by slide, and those of one slide resemble each other.
    """
    kept, held = slice(0, 3 * len(features) // 4), slice(3 * len(features) // 4, None)
    fits = {c: logistic(features[kept], truth[kept], c) for c in choices}
    best = max(choices, key=lambda c: auc(fits[c](features[held]), truth[held]))
    return logistic(features, truth, best)


def logistic(features: Tensor, truth: Tensor, c: float) -> Scores:
    """One fit, with scikit-learn's meaning of C, as a function from features to log odds."""
    mean, std = features.double().mean(0), features.double().std(0).clamp(min=1e-6)
    x, y = (features.double() - mean) / std, truth.double()
    weight = torch.zeros(x.shape[1] + 1, dtype=torch.float64, device=x.device, requires_grad=True)
    solver = torch.optim.LBFGS([weight], max_iter=500, tolerance_grad=1e-6, line_search_fn="strong_wolfe")

    def loss() -> Tensor:
        solver.zero_grad()
        fit = F.binary_cross_entropy_with_logits(x @ weight[1:] + weight[0], y)
        value = fit + weight[1:].square().sum() / (2 * c * len(x))
        value.backward()
        return value

    solver.step(loss)
    found = weight.detach()
    return lambda new: (new.double() - mean) / std @ found[1:] + found[0]


def read_part(path: Path) -> Part:
    """Read what tools/generate_synthetic_tiles.py wrote."""
    with np.load(path) as arrays:
        _, first, number = np.unique(arrays["slide"], return_index=True, return_inverse=True)
        return Part(
            torch.from_numpy(arrays["tiles"]),
            torch.from_numpy(arrays["truth"]),
            torch.from_numpy(arrays["nests"]) >= NESTS,
            torch.from_numpy(number),
            torch.from_numpy(arrays["label"][first]).bool(),
        )


def interval(scores: Tensor, label: Tensor) -> str:
    """Write an AUC over slides with its bootstrap interval."""
    generator = torch.Generator().manual_seed(0)
    groups = label.nonzero().ravel(), (~label).nonzero().ravel()
    draws = []
    for _ in range(DRAWS):
        drawn = torch.cat([each[torch.randint(len(each), (len(each),), generator=generator)] for each in groups])
        draws.append(auc(scores[drawn], label[drawn]))
    low, high = np.quantile(draws, [0.025, 0.975])
    return f"{auc(scores, label):.3f} ({low:.3f} to {high:.3f})"


def show_tiles(name: str, features: dict[str, Tensor], parts: dict[str, Part]) -> Callable[[Tensor], Tensor]:
    """Print a row on tiles; gives the probe."""
    probe = fit_logistic(features["train"], parts["train"].truth)
    cells = []
    for part in ("test", "external"):
        scores, truth, nests = probe(features[part]), parts[part].truth, parts[part].nests
        cells += [f"{auc(scores, truth):.3f}", f"{auc(scores[nests], truth[nests]):.3f}"]
    print(f"| {name} | {' | '.join(cells)} |", flush=True)
    return probe


def show_slides(name: str, scores: dict[str, Tensor], parts: dict[str, Part]) -> None:
    """Print a row on slides."""
    print(f"| {name} | {' | '.join(interval(scores[each], parts[each].label) for each in ('test', 'external'))} |")


def slide_probe(features: dict[str, Tensor], parts: dict[str, Part]) -> dict[str, Tensor]:
    """Learn from slide labels; score the other slides."""
    probe = fit_logistic(features["train"], parts["train"].label, SLIDE_STRENGTHS)
    return {name: probe(values) for name, values in features.items()}


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--teacher", type=Path, help="DINOv2 ViT-S/14, for comparison")
    parser.add_argument("--other", action="append", default=[], metavar="NAME=ARCHITECTURE:FILE")
    options = parser.parse_args()
    parts = {name: read_part(options.folder / f"{name}.npz") for name in PARTS}
    tiles = {name: part.tiles for name, part in parts.items()}
    for name, part in parts.items():
        carrying = float(part.truth[part.label[part.slide]].double().mean())
        print(
            f"{name}: {len(part.label)} slides, {int(part.label.sum())} positive, {len(part.tiles)} tiles; "
            f"{carrying:.1%} of the tiles of positive slides carry the signal"
        )

    torch.manual_seed(0)
    pocket = load_encoder("tapfm-pocket").encoder.vit
    encoders = {"untrained pocket": (build_student("p16"), POCKET_PIXELS), "tapfm-pocket": (pocket, POCKET_PIXELS)}
    for text in options.other:
        name, _, rest = text.partition("=")
        architecture, _, file = rest.partition(":")
        encoders[name] = (build_student(architecture), POCKET_PIXELS)
        encoders[name][0].load_state_dict({key: value.float() for key, value in load_file(file).items()})
    if options.teacher:
        encoders["DINOv2 ViT-S/14"] = (load_teacher(options.teacher, torch.device("cpu")), IMAGENET_PIXELS)

    print("\n| tiles, AUC | test | test, nests | external | external, nests |\n|---|---|---|---|---|")
    colours = {name: colour_statistics(values) for name, values in tiles.items()}
    show_tiles("colour statistics", colours, parts)
    found, probes = {}, {}
    for name, (vit, pixels) in encoders.items():
        found[name] = {part: cls_features(vit, values, pixels) for part, values in tiles.items()}
        probes[name] = show_tiles(name, found[name], parts)

    print("\n| slides, AUC | test | external |\n|---|---|---|")
    stain_and_size = {
        name: torch.cat([part.mean(colours[name]), part.spread(colours[name]), part.counts()], 1)
        for name, part in parts.items()
    }
    show_slides("stain and size", slide_probe(stain_and_size, parts), parts)
    for name, features in found.items():
        means = {part: parts[part].mean(values) for part, values in features.items()}
        show_slides(f"{name}, mean of tiles", slide_probe(means, parts), parts)
    for name in encoders:
        oracle = {part: parts[part].highest(probes[name](values)) for part, values in found[name].items()}
        show_slides(f"{name}, oracle", oracle, parts)


if __name__ == "__main__":
    main()
