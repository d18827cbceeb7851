"""Measure how well tapfm-pocket detects the planted signal, compared with colour statistics and an oracle.

    PYTHONPATH=src python tools/generate_synthetic_tiles.py out/probe --probe --slides 240
    PYTHONPATH=src python tools/probe_pocket.py out/probe [--teacher DINOV2.safetensors] [--other NAME=p28:FILE]

Tiles: AUC of a linear probe trained on tile labels, over all tiles and over tiles with nests only. Slides: AUC of a
linear model trained on slide labels with the mean tile features, of one with stain and size only, and of an oracle: the
mean score of the tile probe over the highest 10% of a slide's tiles. Confidence intervals are 95%, by bootstrap over
slides (2,000 resamples).
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
from pocket_models import IMAGENET_MEAN_STD, POCKET_MEAN_STD, build_student, load_teacher, normalise, tiles_to_images
from safetensors.torch import load_file
from torch import Tensor

from tapfm.encoders.weights import load_encoder

Probe = Callable[[Tensor], Tensor]  # from features to scores

SPLITS = ("train", "test", "external")
MIN_NESTS = 0.25  # tiles with at least this fraction of epithelium count as tiles with nests
RESAMPLES = 2000
SLIDE_C_VALUES = (1e-4, 1e-3, 1e-2, 0.1)  # strong regularisation, because there are few slides


@dataclass(frozen=True)
class Split:
    """Tiles of the train, test or external slides."""

    tiles: Tensor
    truth: Tensor  # whether each tile has the signal
    nests: Tensor  # whether each tile has nests
    slide: Tensor  # index of the slide of each tile
    label: Tensor  # one per slide

    def slide_means(self, values: Tensor) -> Tensor:
        """Return the mean over the tiles of each slide."""
        return torch.stack([values[self.slide == number].mean(0) for number in range(len(self.label))])

    def slide_stds(self, values: Tensor) -> Tensor:
        """Return the standard deviation over the tiles of each slide."""
        return torch.stack([values[self.slide == number].std(0) for number in range(len(self.label))])

    def slide_top_means(self, scores: Tensor, fraction: float = 0.1) -> Tensor:
        """Return the mean of the highest scores of each slide."""
        each = [scores[self.slide == number] for number in range(len(self.label))]
        return torch.stack([values.topk(max(1, round(fraction * len(values)))).values.mean() for values in each])

    def tile_counts(self) -> Tensor:
        """Return the number of tiles of each slide, (n, 1)."""
        return torch.bincount(self.slide, minlength=len(self.label)).double()[:, None]


def cls_features(vit: Any, tiles: Tensor, mean_std: tuple[tuple[float, ...], tuple[float, ...]]) -> Tensor:
    """Return the CLS tokens of uint8 tiles after the final norm, in float32."""
    vit, device = vit.eval(), next(vit.parameters()).device
    with torch.no_grad():
        features = [
            vit.forward_features(normalise(tiles_to_images(t.to(device)), mean_std))[:, 0] for t in tiles.split(128)
        ]
    return torch.cat(features).float()


def colour_statistics(tiles: Tensor) -> Tensor:
    """Return 30 values per tile: mean, std and three percentiles of each channel, as pixels and as optical density."""

    def statistics(batch: Tensor) -> Tensor:
        rgb = tiles_to_images(batch)[..., ::2, ::2].flatten(2)  # a quarter of the pixels is sufficient
        values = torch.cat([rgb, -rgb.clamp(min=1 / 255).log()], 1)
        percentiles = values.quantile(torch.tensor([0.1, 0.5, 0.9], device=values.device), dim=2)
        return torch.stack([values.mean(2), values.std(2), *percentiles], 2).flatten(1)

    return torch.cat([statistics(batch) for batch in tiles.split(32)])  # quantile supports at most 16 M values


def auc(scores: Tensor, truth: Tensor) -> float:
    """Return the area under the ROC curve; ties count half."""
    truth = truth.bool()
    positives, negatives = int(truth.sum()), int((~truth).sum())
    if not positives or not negatives:
        return math.nan
    _, inverse, counts = scores.double().unique(return_inverse=True, return_counts=True)
    rank = (counts.cumsum(0) - (counts - 1) / 2)[inverse]
    return (float(rank[truth].sum()) - positives * (positives + 1) / 2) / (positives * negatives)


def fit_tuned_logistic(
    features: Tensor, truth: Tensor, c_values: tuple[float, ...] = (1e-4, 1e-3, 1e-2, 0.1, 1, 10)
) -> Probe:
    """Fit a logistic regression on standardised features, with the value of C that is best on held-out data.

    The held-out data is the last quarter: tiles are ordered by slide, and tiles of a slide are similar.
    """
    fitted, held_out = slice(0, 3 * len(features) // 4), slice(3 * len(features) // 4, None)
    fits = {c: fit_logistic(features[fitted], truth[fitted], c) for c in c_values}
    best = max(c_values, key=lambda c: auc(fits[c](features[held_out]), truth[held_out]))
    return fit_logistic(features, truth, best)


def fit_logistic(features: Tensor, truth: Tensor, c: float) -> Probe:
    """Fit a logistic regression with scikit-learn's parameter C. Returns a function from features to log odds."""
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
    fitted = weight.detach()
    return lambda new: (new.double() - mean) / std @ fitted[1:] + fitted[0]


def read_split(path: Path) -> Split:
    """Read a file of tools/generate_synthetic_tiles.py."""
    with np.load(path) as arrays:
        _, first, number = np.unique(arrays["slide"], return_index=True, return_inverse=True)
        return Split(
            torch.from_numpy(arrays["tiles"]),
            torch.from_numpy(arrays["truth"]),
            torch.from_numpy(arrays["nests"]) >= MIN_NESTS,
            torch.from_numpy(number),
            torch.from_numpy(arrays["label"][first]).bool(),
        )


def format_auc(scores: Tensor, label: Tensor) -> str:
    """Return an AUC over slides with its bootstrap confidence interval."""
    generator = torch.Generator().manual_seed(0)
    groups = label.nonzero().ravel(), (~label).nonzero().ravel()
    resampled = []
    for _ in range(RESAMPLES):
        sample = torch.cat([each[torch.randint(len(each), (len(each),), generator=generator)] for each in groups])
        resampled.append(auc(scores[sample], label[sample]))
    low, high = np.quantile(resampled, [0.025, 0.975])
    return f"{auc(scores, label):.3f} ({low:.3f} to {high:.3f})"


def print_tile_row(name: str, features: dict[str, Tensor], splits: dict[str, Split]) -> Probe:
    """Fit a tile probe, print its row of the table, and return it."""
    probe = fit_tuned_logistic(features["train"], splits["train"].truth)
    cells = []
    for split in ("test", "external"):
        scores, truth, nests = probe(features[split]), splits[split].truth, splits[split].nests
        cells += [f"{auc(scores, truth):.3f}", f"{auc(scores[nests], truth[nests]):.3f}"]
    print(f"| {name} | {' | '.join(cells)} |", flush=True)
    return probe


def print_slide_row(name: str, scores: dict[str, Tensor], splits: dict[str, Split]) -> None:
    print(f"| {name} | {' | '.join(format_auc(scores[each], splits[each].label) for each in ('test', 'external'))} |")


def score_slides(features: dict[str, Tensor], splits: dict[str, Split]) -> dict[str, Tensor]:
    """Fit a probe on the labels of the train slides, and return its scores of all slides."""
    probe = fit_tuned_logistic(features["train"], splits["train"].label, SLIDE_C_VALUES)
    return {name: probe(values) for name, values in features.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="output of generate_synthetic_tiles.py --probe")
    parser.add_argument("--teacher", type=Path, help="DINOv2 ViT-S/14, for comparison")
    parser.add_argument(
        "--other", action="append", default=[], metavar="NAME=ARCHITECTURE:FILE", help="another model; repeatable"
    )
    options = parser.parse_args()
    splits = {name: read_split(options.folder / f"{name}.npz") for name in SPLITS}
    tiles = {name: split.tiles for name, split in splits.items()}
    for name, split in splits.items():
        signal_fraction = float(split.truth[split.label[split.slide]].double().mean())
        print(
            f"{name}: {len(split.label)} slides, {int(split.label.sum())} positive, {len(split.tiles)} tiles; "
            f"{signal_fraction:.1%} of the tiles of positive slides have the signal"
        )

    torch.manual_seed(0)
    pocket = load_encoder("tapfm-pocket").encoder.vit
    encoders = {"untrained pocket": (build_student("p16"), POCKET_MEAN_STD), "tapfm-pocket": (pocket, POCKET_MEAN_STD)}
    for text in options.other:
        name, _, rest = text.partition("=")
        architecture, _, file = rest.partition(":")
        encoders[name] = (build_student(architecture), POCKET_MEAN_STD)
        encoders[name][0].load_state_dict({key: value.float() for key, value in load_file(file).items()})
    if options.teacher:
        encoders["DINOv2 ViT-S/14"] = (load_teacher(options.teacher, torch.device("cpu")), IMAGENET_MEAN_STD)

    print("\n| tiles, AUC | test | test, nests | external | external, nests |\n|---|---|---|---|---|")
    colours = {name: colour_statistics(values) for name, values in tiles.items()}
    print_tile_row("colour statistics", colours, splits)
    all_features, probes = {}, {}
    for name, (vit, mean_std) in encoders.items():
        all_features[name] = {split: cls_features(vit, values, mean_std) for split, values in tiles.items()}
        probes[name] = print_tile_row(name, all_features[name], splits)

    print("\n| slides, AUC | test | external |\n|---|---|---|")
    stain_and_size = {
        name: torch.cat([split.slide_means(colours[name]), split.slide_stds(colours[name]), split.tile_counts()], 1)
        for name, split in splits.items()
    }
    print_slide_row("stain and size", score_slides(stain_and_size, splits), splits)
    for name, features in all_features.items():
        means = {split: splits[split].slide_means(values) for split, values in features.items()}
        print_slide_row(f"{name}, mean of tiles", score_slides(means, splits), splits)
    for name in encoders:
        oracle = {
            split: splits[split].slide_top_means(probes[name](values)) for split, values in all_features[name].items()
        }
        print_slide_row(f"{name}, oracle", oracle, splits)


if __name__ == "__main__":
    main()
