"""Does float8 change what is predicted? Bags of real tiles, an encoder with real weights, heads trained in float32.

    python benchmarks/float8.py --tiles crc --weights dinov2_small.safetensors      # minutes on two cores

Tiles and bags are those of real_tiles.py, binary. Each head learns from float32 features of training bags; then it is
asked about test bags whose tiles were encoded in float32, in bfloat16 and in float8. A CPU rounds to the same float8
numbers as a GPU does, slowly; a GPU adds them up in another order. Prints Markdown; --json keeps it.
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
from real_tiles import ENCODED_AT_ONCE, WEIGHT_DECAY, Bags, Rows, Tissue, mean_auc
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

HEADS = ("mean", "abmil", "cls-attention", "cls-gated")
PRECISIONS: tuple[Precision, ...] = ("float32", "bfloat16", "float8")
RATE = 1e-3


@dataclass(frozen=True)
class Row:
    """One head asked about bags of one size, in one precision."""

    head: str
    tiles: int
    precision: str
    auc: float
    largest_change: float  # of a probability, against float32
    mean_change: float


def encoded(encoder: VitEncoder, pixels: Tensor, precision: Precision, rows: Rows) -> EncodedTiles:
    """Encode some tiles as `tapfm predict` does; the others are left empty."""
    prepared = prepare_encoder(copy.deepcopy(encoder), precision, compiled=False)
    found = prepared.encode(pixels[torch.from_numpy(rows)], ENCODED_AT_ONCE)
    z_KD, r_K = (part.new_full((len(pixels), *part.shape[1:]), torch.nan) for part in found)
    z_KD[rows], r_K[rows] = found.z_KD, found.r_K
    return EncodedTiles(z_KD, r_K)


def trained(head: str, stored: EncodedTiles, bags: Bags, epochs: int) -> Any:
    """Train a head on stored features."""
    torch.manual_seed(0)
    task = build_task({"AC": bags.labels[:, 0].tolist()})
    aggregator = build_aggregator(head, stored.z_KD.shape[1], 1).to(stored.z_KD.device).train()
    optimiser = make_optimiser(aggregator.named_parameters(), weight_decay=WEIGHT_DECAY, decay_all=True)
    for epoch in range(epochs):
        set_learning_rate(optimiser, LearningRateSchedule(first_cycle=epochs).rate(epoch, RATE))
        for number in make_rng(0, "order", epoch).permutation(len(bags.rows)).tolist():
            rows = torch.from_numpy(bags.rows[number]).to(stored.z_KD.device)
            z_KD, r_K = (part[rows].requires_grad_() for part in stored)
            known = encode_labels(bags.labels[number].tolist(), device=z_KD.device)
            compute_aggregator_gradients(aggregator, task, z_KD, r_K, known).accumulate_gradients()
            step_optimiser(optimiser, slides=1, clip_norm=0.0)
    return aggregator.eval()


@torch.no_grad()
def logits_of(aggregator: Any, features: EncodedTiles, bags: Bags) -> list[list[float]]:
    """Ask a head about bags."""
    return [
        aggregator(*(part[torch.from_numpy(rows).to(part.device)] for part in features)).logits_C.double().tolist()
        for rows in bags.rows
    ]


def compared(arguments: argparse.Namespace) -> Iterator[Row]:
    """Train and ask."""
    device = torch.device(arguments.device)
    encoder = load_encoder(arguments.encoder, weights=arguments.weights, tile_px=arguments.tile_px).encoder
    encoder = encoder.to(device).eval()
    tissue = Tissue(arguments.tiles, arguments.tile_px)
    everything, tested = np.arange(len(tissue.pixels)), tissue.of("test")  # training tiles are of use in float32 only
    features = {
        precision: encoded(encoder, tissue.pixels, precision, everything if precision == "float32" else tested)
        for precision in PRECISIONS
    }
    for head in HEADS:
        for tiles in arguments.bag_tiles:
            training = tissue.bags("train", "binary", tiles, arguments.training_bags, 0)
            test = tissue.bags("test", "binary", tiles, arguments.test_bags)
            aggregator = trained(head, features["float32"], training, arguments.epochs)
            said = {name: logits_of(aggregator, each, test) for name, each in features.items()}
            exact = probabilities(said["float32"])
            for name, logits in said.items():
                change = np.abs(probabilities(logits) - exact)
                yield Row(head, tiles, name, mean_auc(logits, test), float(change.max()), float(change.mean()))


def probabilities(logits: Sequence[Sequence[float]]) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Squash."""
    return 1 / (1 + np.exp(-np.array(logits)))


def main() -> None:
    """Compare and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiles", type=Path, required=True, help="folder with {train,test}/{AC,H,S,T,V}/*.webp")
    parser.add_argument("--weights", type=Path, help="default: the encoder's own, from the hub")
    parser.add_argument("--encoder", default="dinov2-s14")
    parser.add_argument("--tile-px", type=int, default=154)
    parser.add_argument("--bag-tiles", type=int, nargs="+", default=[50, 200])
    parser.add_argument("--training-bags", type=int, default=120)
    parser.add_argument("--test-bags", type=int, default=300)
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    rows = list(compared(arguments))
    about = f"{arguments.encoder} at {arguments.tile_px} px, {arguments.test_bags} test bags; {arguments.device}"
    print(f"tapfm {tapfm.__version__}, torch {torch.__version__}; {about}\n")
    print(
        "| head | K | AUC float32 | AUC bfloat16 | AUC float8 | largest change bfloat16 | largest change float8 "
        "| mean change float8 |\n|---|--:|--:|--:|--:|--:|--:|--:|"
    )
    for exact, half, quarter in zip(rows[::3], rows[1::3], rows[2::3], strict=True):
        numbers = [exact.auc, half.auc, quarter.auc, half.largest_change, quarter.largest_change, quarter.mean_change]
        print(f"| {exact.head} | {exact.tiles} | {' | '.join(f'{number:.4f}' for number in numbers)} |")
    if arguments.json is not None:
        arguments.json.write_text(json.dumps([asdict(row) for row in rows], indent=1))


if __name__ == "__main__":
    main()
