"""What an adapted encoder still knows: a linear probe on tiles of another task, before and after, and its drift."""

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
_BATCH = 64


def probe_run(run: Path, pictures: ProbeTileSet, device: torch.device) -> dict[str, Any]:
    """Probe a run's encoder as it was and as it is."""
    from tapfm.config.loading import load_config
    from tapfm.encoders.weights import load_encoder
    from tapfm.runs.saved_model import load_run

    saved = load_run(run, device)
    if saved.model.encoder is None:
        raise RunError(f"{run} did not change its encoder.", hint="Probe a run of method tapfm or finetune.")
    config = load_config(run / "config.toml")
    base = load_encoder(config.encoder.name, weights=config.encoder.weights).encoder.to(device)
    base.train(False)
    names = [*pictures.train, *pictures.test]
    before, after = _features_of(base, names), _features_of(saved.model.encoder, names)
    count = len(pictures.train)
    truth = np.array([pictures.classes.index(each.label) for each in names])
    probes = {
        name: _probe(features[:count], truth[:count], features[count:], len(pictures.classes))
        for name, features in (("before", before), ("after", after))
    }
    return {
        "classes": list(pictures.classes),
        "train": count,
        "test": [each.path.name for each in pictures.test],
        "truth": truth[count:].tolist(),
        **{name: np.round(each, 6).tolist() for name, each in probes.items()},
        "cosine_distance": _cosine_distance(before[count:], after[count:]),
        "linear_cka": _linear_cka(before[count:], after[count:]),
    }


def write_probe(path: Path, found: Mapping[str, Any]) -> None:
    """Write what was found."""
    write_atomically(path, (json.dumps(found) + "\n").encode())


def _features_of(encoder: VitEncoder, pictures: Sequence[ProbeTile]) -> Features:
    """Encode pictures as tiles, some at a time."""
    import torch

    from tapfm.encoders.inference import wrap_encoder

    parts = []
    for start in range(0, len(pictures), _BATCH):
        pixels = [_read_tile(each.path, encoder.tile_px) for each in pictures[start : start + _BATCH]]
        tiles = torch.from_numpy(np.stack(pixels)).permute(0, 3, 1, 2).to(encoder.mean.device)
        parts.append(wrap_encoder(encoder).encode(tiles, _BATCH).z_KD.double().cpu().numpy())
    return np.concatenate(parts)


def _read_tile(path: Path, side_px: int) -> npt.NDArray[np.uint8]:
    """Read a picture in the size the encoder takes."""
    try:
        with Image.open(path) as image:
            picture = image.convert("RGB")
            if picture.size != (side_px, side_px):
                picture = picture.resize((side_px, side_px), Image.Resampling.BICUBIC, reducing_gap=3.0)
            return np.array(picture)
    except (OSError, UnidentifiedImageError) as error:
        raise InputError(f"{path} cannot be read ({error}).", hint="Mend or remove it.") from error


def _probe(train: Features, truth: npt.NDArray[np.int64], test: Features, classes: int) -> Features:
    """Fit a linear probe (multinomial, with an L2 penalty) on features, and return the probabilities of test tiles."""
    from sklearn.linear_model import LogisticRegression

    centre, scale = train.mean(0), train.std(0)
    scale = np.where(scale > 0, scale, 1.0)
    # of two classes scikit-learn has one column w, which stands for -w/2 and w/2: the same penalty is half as strong
    model = LogisticRegression(C=2.0 if classes == 2 else 1.0, tol=1e-8, max_iter=5000)
    model.fit((train - centre) / scale, truth)
    return np.asarray(model.predict_proba((test - centre) / scale))


def _cosine_distance(before: Features, after: Features) -> float:
    """Say how far features turned: the mean of 1 - cos."""
    norms = np.linalg.norm(before, axis=1) * np.linalg.norm(after, axis=1)
    cosines = np.divide((before * after).sum(1), norms, out=np.ones(len(before)), where=norms > 0)
    return float(np.mean(1 - cosines))


def _linear_cka(before: Features, after: Features) -> float:
    """Say how alike two sets of features are, whatever their rotation and scale: 1 is the same."""
    x, y = before - before.mean(0), after - after.mean(0)
    across = np.linalg.norm(x.T @ y) ** 2
    own = np.linalg.norm(x.T @ x) * np.linalg.norm(y.T @ y)
    return float(across / own) if own > 0 else 0.0
