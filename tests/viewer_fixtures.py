"""Prediction folders with known values, and a test client of the viewer that shows them."""

from contextlib import contextmanager
from dataclasses import replace

import numpy as np
from predicted_slides import PREDICTION, make_tile_table, predicted_file, write_prediction
from slide_files import section, write_slide
from starlette.testclient import TestClient

from tapfm.prediction.folder import PREDICTION_JSON
from tapfm.slides.opening import PER_SLIDE
from tapfm.viewer.app import create_app
from tapfm.viewer.assets import Asset
from tapfm.viewer.collection import collect_slides

INDEX_ASSETS = {"index.html": Asset(b"<!doctype html><title>page</title>", "text/html; charset=utf-8", '"page"')}
SIDE = 100


def write_predicted_slide(
    folder, path, slide_id, *, probability=0.75, label=1, side_px0=SIDE, targets=("FGFR3",), with_edge=False
):
    """Write the prediction of a slide: a grid of tiles over its bounds, with decreasing values from 1 to -0.99.

    with_edge: include tiles that extend past the right or bottom edge.
    """
    predicted = predicted_file(path, targets=targets)
    box = predicted.bounds
    extra_px0 = side_px0 - 1 if with_edge else 0
    columns, rows = ((length + extra_px0) // side_px0 for length in (box.width_px0, box.height_px0))
    positions = [
        (box.x_px0 + column * side_px0, box.y_px0 + row * side_px0) for row in range(rows) for column in range(columns)
    ]
    results = {target: replace(PREDICTION, probability=probability, label=label) for target in targets}
    predicted = replace(predicted, slide_id=slide_id, side_px0=side_px0, targets=results)
    table = make_tile_table(predicted, positions, np.linspace(1.0, -0.99, len(positions)))
    (folder / PER_SLIDE / slide_id).mkdir(parents=True, exist_ok=True)
    (folder / PREDICTION_JSON).write_text("{}")
    return write_prediction(folder / PER_SLIDE / slide_id, predicted, table)


def write_two_predictions(folder):
    """Write two slides and their predictions, and return the prediction folder."""
    for number, probability in ((1, 0.25), (2, 0.75)):
        path = folder / "slides" / f"case-{number}.svs"
        path.parent.mkdir(parents=True, exist_ok=True)
        write_slide(path, section(1300, 900, seed=number), compression="zlib", aperio=False, downsamples=(1, 4))
        write_predicted_slide(folder / "predicted", path, f"case-{number}", probability=probability, label=1)
    return folder / "predicted"


@contextmanager
def viewer_client(*sources, slides=None, policy=None, base_url="http://127.0.0.1:8000", assets=INDEX_ASSETS):
    """Yield a test client of a viewer, without a socket."""
    app = create_app(collect_slides(sources, slides), assets, policy)
    with TestClient(app, base_url=base_url, raise_server_exceptions=False) as client:
        yield client


def slide_keys(client):
    """Return the key of each slide by its id."""
    return {slide["slide_id"]: slide["key"] for slide in client.get("/api/collection").json()["slides"]}
