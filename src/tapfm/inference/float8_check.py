"""Compare float8 with bfloat16 on one slide before using float8."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from tapfm.encoders.inference import prepare_encoder
from tapfm.errors import RunError
from tapfm.inference.bags import PREFETCH_BYTES, PixelBags, SlideTiles
from tapfm.inference.predictor import EncodedSlide, InferenceModel, Predictor

COMPARED_TILES = 1024  # of a slide, evenly spaced
_MAX_CHANGE = 0.01  # of a probability
_OTHER_PRECISION = "Use --precision bfloat16, or omit --precision."


def prepare_float8_model(
    reference: InferenceModel,
    slides: Mapping[str, SlideTiles],
    *,
    tiles: int,
    compiled: bool | None,
    batch: int | None,
    workers: int,
) -> tuple[InferenceModel, str]:
    """Convert a model to float8; return it and a message on how much it changes the first readable slide.

    reference: the same model in bfloat16, which is not changed. The message is empty if no slide can be read.
    Raises RunError if a probability changes by more than `_MAX_CHANGE`, or is not finite.
    """
    assert reference.encoder is not None
    encoder = prepare_encoder(copy.deepcopy(reference.encoder.encoder), "float8", tiles=tiles, compiled=compiled)
    assert reference.model is not None
    # without a reference to the encoder in bfloat16, so that its memory can be freed
    fast = InferenceModel(encoder, replace(reference.model, encoder=encoder.encoder))
    predictor = Predictor([reference, fast], batch=batch)
    for slide_id, slide in slides.items():
        compared = _measure_change(predictor, slide_id, slide, workers)
        if compared is None:
            continue
        change, count = compared
        message = (
            f"float8 changes the probabilities of slide {slide_id} by at most {change:.4f} (on {count:,} of its "
            f"{len(slide.tiles):,} tiles)"
        )
        if change > _MAX_CHANGE:
            raise RunError(f"{message}; the limit is {_MAX_CHANGE:g}.", hint=_OTHER_PRECISION)
        return fast, f"{message}."
    return fast, ""


def _measure_change(predictor: Predictor, slide_id: str, slide: SlideTiles, workers: int) -> tuple[float, int] | None:
    """Return the largest change of a probability between two models, and how many tiles of the slide it is based on.

    At most `COMPARED_TILES` tiles are used. Returns None if the slide cannot be read.
    """
    count = len(slide.tiles)
    rows = np.unique(np.linspace(0, count - 1, min(COMPARED_TILES, count)).astype(np.int64))
    some = replace(slide, tiles=slide.tiles.select(rows))
    assert predictor.tile_px is not None
    bags = PixelBags(
        {slide_id: some},
        tile_px=predictor.tile_px,
        device=predictor.device,
        workers=workers,
        prefetch_bytes=PREFETCH_BYTES,
    )
    changes: list[tuple[float, int]] = []

    def compare(slide_id: str, encoded: EncodedSlide) -> None:
        before, after = predictor.predict_each(slide_id, encoded)
        largest = max(
            abs(kind.activate(before.logits[target]) - kind.activate(after.logits[target]))
            for target, kind in predictor.targets.items()
        )
        changes.append((largest, encoded.tiles))

    failed = predictor.run([slide_id], bags, compare).get(slide_id)
    if failed is not None and failed.stage == "predict":
        raise RunError(
            f"float8 cannot be checked on slide {slide_id}: {failed.reason.rstrip('.')}.", hint=_OTHER_PRECISION
        )
    return changes[0] if changes else None
