"""Example predictions with made-up values, with and without a slide file."""

from dataclasses import replace

import numpy as np

from tapfm.prediction.folder import PredictedSlide, TargetPrediction
from tapfm.prediction.layers import Layer
from tapfm.prediction.tile_table import TILES_PARQUET, TileTable, write_tile_table
from tapfm.slides.opening import open_slide
from tapfm.slides.slide import Box
from tapfm.tiles.grid import TileSpec, tile_grid

TARGET = "FGFR3"
CONTRIBUTION = Layer(f"contribution.{TARGET}", "contribution", TARGET)
ATTENTION = Layer("attention", "attention")
PREDICTION = TargetPrediction(logit=0.5, probability=0.6225, threshold=0.5, call=1, label=None, constant=-0.5)


def predicted_slide(path="missing.svs", *, bounds=None, size_px0=(2240, 1792), mpp=0.5, tile_px=224, targets=(TARGET,)):
    """Return a made-up prediction of a slide that has no file."""
    spec = TileSpec(tile_px=tile_px)
    return PredictedSlide(
        slide_id="case-17",
        patient_id="P17",
        cohort=None,
        split=None,
        path=path,
        width_px0=size_px0[0],
        height_px0=size_px0[1],
        bounds=bounds or Box(0, 0, *size_px0),
        mpp=mpp,
        side_px0=spec.side_px0(mpp),
        tile_px=tile_px,
        columns=("attention", "weight", *(f"contribution.{target}" for target in targets)),
        targets=dict.fromkeys(targets, PREDICTION),
        tiles=0,
        tiles_failed=0,
        seconds=1.0,
        key="key",
    )


def predicted_file(path, *, mpp=0.5, tile_px=224, targets=(TARGET,)):
    """Return a made-up prediction of a slide file."""
    slide = open_slide(path)
    metadata = slide.metadata
    slide.close()
    size_px0 = metadata.width_px0, metadata.height_px0
    return predicted_slide(path, bounds=metadata.bounds, size_px0=size_px0, mpp=mpp, tile_px=tile_px, targets=targets)


def tile_positions(predicted, *, overlap_px=0):
    """Return the positions of all tiles of a slide's bounds."""
    return tile_grid(predicted.bounds, TileSpec(tile_px=predicted.tile_px, overlap_px=overlap_px), predicted.mpp)


def make_tile_table(predicted, positions, values=None):
    """Return a tile table with the same values in each column, or random ones."""
    rng = np.random.default_rng(0)
    columns = {name: rng.normal(size=len(positions)) if values is None else values for name in predicted.columns}
    return TileTable(np.asarray(positions), {name: np.asarray(each, float) for name, each in columns.items()})


def write_prediction(folder, predicted, table):
    """Write the files of a predicted slide."""
    predicted = replace(predicted, tiles=len(table))
    write_tile_table(folder / TILES_PARQUET, table)
    predicted.write(folder)
    return predicted
