"""Measure how much float8 changes predictions, on bags of real tiles and with pretrained weights.

    python benchmarks/float8.py --tiles crc --weights dinov2_small.safetensors      # minutes on two cores

Tiles and bags are those of the binary task of real_tiles.py. Each aggregator is trained on float32 features of training
bags. Then it predicts test bags whose tiles are encoded in float32, bfloat16 and float8. A CPU rounds to the same
float8 values as a GPU, but slowly; a GPU sums them in a different order. Prints Markdown; --json saves the values.
"""

from __future__ import annotations

import argparse
import copy
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from real_tiles import ENCODE_BATCH, WEIGHT_DECAY, Bags, Rows, TileDataset, mean_auc
from torch import Tensor

import tapfm
from tapfm.adaptation.optimisers import LearningRateSchedule, make_optimiser, set_learning_rate, step_optimiser
from tapfm.adaptation.two_graph import compute_aggregator_gradients
from tapfm.aggregators.catalog import build_aggregator
from tapfm.contracts import EncodedTiles
from tapfm.encoders.inference import Precision, prepare_encoder
from tapfm.encoders.vit import VitEncoder
from tapfm.encoders.weights import load_encoder
from tapfm.runtime.seeding import make_rng
from tapfm.tasks.catalog import build_task
from tapfm.tasks.cross_entropy import encode_labels

AGGREGATORS = ("mean", "abmil", "cls-attention", "cls-gated")
PRECISIONS: tuple[Precision, ...] = ("float32", "bfloat16", "float8")
RATE = 1e-3


@dataclass(frozen=True)
class Row:
    """Predictions of one aggregator for bags of one size, in one precision."""

    aggregator: str
    tiles: int
    precision: str
    auc: float
    largest_change: float  # of a probability, compared with float32
    mean_change: float


def encode_tiles(encoder: VitEncoder, pixels: Tensor, precision: Precision, rows: Rows) -> EncodedTiles:
    """Encode some of the tiles as `tapfm predict` does. The features of the other tiles are NaN."""
    prepared = prepare_encoder(copy.deepcopy(encoder), precision, compiled=False)
    encoded = prepared.encode(pixels[torch.from_numpy(rows)], ENCODE_BATCH)
    z_KD, r_K = (part.new_full((len(pixels), *part.shape[1:]), torch.nan) for part in encoded)
    z_KD[rows], r_K[rows] = encoded.z_KD, encoded.r_K
    return EncodedTiles(z_KD, r_K)


def train_aggregator(name: str, stored: EncodedTiles, bags: Bags, epochs: int) -> Any:
    torch.manual_seed(0)
    task = build_task({"AC": bags.labels[:, 0].tolist()})
    aggregator = build_aggregator(name, stored.z_KD.shape[1], 1).to(stored.z_KD.device).train()
    optimiser = make_optimiser(aggregator.named_parameters(), weight_decay=WEIGHT_DECAY, decay_all=True)
    for epoch in range(epochs):
        set_learning_rate(optimiser, LearningRateSchedule(first_cycle=epochs).rate(epoch, RATE))
        for number in make_rng(0, "order", epoch).permutation(len(bags.rows)).tolist():
            rows = torch.from_numpy(bags.rows[number]).to(stored.z_KD.device)
            z_KD, r_K = (part[rows].requires_grad_() for part in stored)
            targets = encode_labels(bags.labels[number].tolist(), device=z_KD.device)
            compute_aggregator_gradients(aggregator, task, z_KD, r_K, targets).accumulate_gradients()
            step_optimiser(optimiser, slides=1, clip_norm=0.0)
    return aggregator.eval()


@torch.no_grad()
def predict_bags(aggregator: Any, features: EncodedTiles, bags: Bags) -> list[list[float]]:
    return [
        aggregator(*(part[torch.from_numpy(rows).to(part.device)] for part in features)).logits_C.double().tolist()
        for rows in bags.rows
    ]


def compare_precisions(arguments: argparse.Namespace) -> Iterator[Row]:
    """Train all aggregators, and yield a row for each bag size and precision."""
    device = torch.device(arguments.device)
    encoder = load_encoder(arguments.encoder, weights=arguments.weights, tile_px=arguments.tile_px).encoder
    encoder = encoder.to(device).eval()
    dataset = TileDataset(arguments.tiles, arguments.tile_px)
    all_tiles, test_tiles = np.arange(len(dataset.pixels)), dataset.tiles_in("test")  # training tiles only in float32
    features = {
        precision: encode_tiles(encoder, dataset.pixels, precision, all_tiles if precision == "float32" else test_tiles)
        for precision in PRECISIONS
    }
    for name in AGGREGATORS:
        for tiles in arguments.bag_tiles:
            training = dataset.sample_bags("train", "binary", tiles, arguments.training_bags, 0)
            test = dataset.sample_bags("test", "binary", tiles, arguments.test_bags)
            aggregator = train_aggregator(name, features["float32"], training, arguments.epochs)
            logits = {precision: predict_bags(aggregator, each, test) for precision, each in features.items()}
            exact = sigmoid(logits["float32"])
            for precision, values in logits.items():
                change = np.abs(sigmoid(values) - exact)
                yield Row(name, tiles, precision, mean_auc(values, test), float(change.max()), float(change.mean()))


def sigmoid(logits: Sequence[Sequence[float]]) -> np.ndarray[Any, np.dtype[np.float64]]:
    return 1 / (1 + np.exp(-np.array(logits)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiles", type=Path, required=True, help="folder with {train,test}/{AC,H,S,T,V}/*.webp")
    parser.add_argument("--weights", type=Path, help="weights file; default: download from the Hugging Face Hub")
    parser.add_argument("--encoder", default="dinov2-s14")
    parser.add_argument("--tile-px", type=int, default=154)
    parser.add_argument("--bag-tiles", type=int, nargs="+", default=[50, 200])
    parser.add_argument("--training-bags", type=int, default=120)
    parser.add_argument("--test-bags", type=int, default=300)
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    arguments = parser.parse_args()
    rows = list(compare_precisions(arguments))
    about = f"{arguments.encoder} at {arguments.tile_px} px, {arguments.test_bags} test bags; {arguments.device}"
    print(f"tapfm {tapfm.__version__}, torch {torch.__version__}; {about}\n")
    print(
        "| aggregator | K | AUC float32 | AUC bfloat16 | AUC float8 | largest change bfloat16 | largest change float8 "
        "| mean change float8 |\n|---|--:|--:|--:|--:|--:|--:|--:|"
    )
    for exact, half, quarter in zip(rows[::3], rows[1::3], rows[2::3], strict=True):
        values = [exact.auc, half.auc, quarter.auc, half.largest_change, quarter.largest_change, quarter.mean_change]
        print(f"| {exact.aggregator} | {exact.tiles} | {' | '.join(f'{value:.4f}' for value in values)} |")
    if arguments.json is not None:
        arguments.json.write_text(json.dumps([asdict(row) for row in rows], indent=1))


if __name__ == "__main__":
    main()
