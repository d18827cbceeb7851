"""Test an encoder before and after adaptation with a linear probe on another task, and measure its feature drift."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from PIL import Image, UnidentifiedImageError

from tapfm.errors import InputError, RunError
from tapfm.runtime.files import write_atomically
from tapfm.study.probe_tiles import ProbeTile, ProbeTileSet

if TYPE_CHECKING:
    import torch

    from tapfm.encoders.vit import VitEncoder

Features = npt.NDArray[np.float64]  # (tiles, D)
_BATCH_SIZE = 64


def probe_run(run: Path, tile_set: ProbeTileSet, device: torch.device) -> dict[str, Any]:
    """Probe the encoder of a run before and after adaptation, and return the content of the probe file."""
    from tapfm.config.loading import load_config
    from tapfm.encoders.weights import load_encoder
    from tapfm.runs.saved_model import load_run

    saved = load_run(run, device)
    if saved.model.encoder is None:
        raise RunError(f"{run} did not train its encoder.", hint="Probe a run of method tapfm or finetune.")
    config = load_config(run / "config.toml")
    base = load_encoder(config.encoder.name, weights=config.encoder.weights).encoder.to(device)
    base.train(False)
    tiles = [*tile_set.train, *tile_set.test]
    before, after = _compute_features(base, tiles), _compute_features(saved.model.encoder, tiles)
    count = len(tile_set.train)
    truth = np.array([tile_set.classes.index(tile.label) for tile in tiles])
    probabilities = {
        name: _predict_with_probe(features[:count], truth[:count], features[count:], len(tile_set.classes))
        for name, features in (("before", before), ("after", after))
    }
    return {
        "classes": list(tile_set.classes),
        "train": count,
        "test": [tile.path.name for tile in tile_set.test],
        "truth": truth[count:].tolist(),
        **{name: np.round(values, 6).tolist() for name, values in probabilities.items()},
        "cosine_distance": _cosine_distance(before[count:], after[count:]),
        "linear_cka": _linear_cka(before[count:], after[count:]),
    }


def write_probe(path: Path, result: Mapping[str, Any]) -> None:
    write_atomically(path, (json.dumps(result) + "\n").encode())


def _compute_features(encoder: VitEncoder, tiles: Sequence[ProbeTile]) -> Features:
    import torch

    from tapfm.encoders.inference import wrap_encoder

    parts = []
    for start in range(0, len(tiles), _BATCH_SIZE):
        pixels = [_read_tile(tile.path, encoder.tile_px) for tile in tiles[start : start + _BATCH_SIZE]]
        batch = torch.from_numpy(np.stack(pixels)).permute(0, 3, 1, 2).to(encoder.mean.device)
        parts.append(wrap_encoder(encoder).encode(batch, _BATCH_SIZE).z_KD.double().cpu().numpy())
    return np.concatenate(parts)


def _read_tile(path: Path, side_px: int) -> npt.NDArray[np.uint8]:
    """Read an image and resize it to the tile size of the encoder."""
    try:
        with Image.open(path) as file:
            image = file.convert("RGB")
            if image.size != (side_px, side_px):
                image = image.resize((side_px, side_px), Image.Resampling.BICUBIC, reducing_gap=3.0)
            return np.array(image)
    except (OSError, UnidentifiedImageError) as error:
        raise InputError(f"{path} cannot be read ({error}).", hint="Fix or delete this file.") from error


def _predict_with_probe(train: Features, truth: npt.NDArray[np.int64], test: Features, classes: int) -> Features:
    """Fit a multinomial logistic regression with L2 penalty, and return the class probabilities of the test tiles."""
    from sklearn.linear_model import LogisticRegression

    centre, scale = train.mean(0), train.std(0)
    scale = np.where(scale > 0, scale, 1.0)
    # with two classes, scikit-learn fits one weight vector w instead of -w/2 and w/2, which doubles the penalty
    model = LogisticRegression(C=2.0 if classes == 2 else 1.0, tol=1e-8, max_iter=5000)
    model.fit((train - centre) / scale, truth)
    return np.asarray(model.predict_proba((test - centre) / scale))


def _cosine_distance(before: Features, after: Features) -> float:
    """Return the mean of 1 - cos between the features of a tile before and after."""
    norms = np.linalg.norm(before, axis=1) * np.linalg.norm(after, axis=1)
    cosines = np.divide((before * after).sum(1), norms, out=np.ones(len(before)), where=norms > 0)
    return float(np.mean(1 - cosines))


def _linear_cka(before: Features, after: Features) -> float:
    """Return the linear CKA of two sets of features, which is 1 if they are equal up to rotation and scale."""
    x, y = before - before.mean(0), after - after.mean(0)
    cross = np.linalg.norm(x.T @ y) ** 2
    norms = np.linalg.norm(x.T @ x) * np.linalg.norm(y.T @ y)
    return float(cross / norms) if norms > 0 else 0.0
