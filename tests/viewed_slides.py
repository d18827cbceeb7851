"""A folder of predictions over slides with a known answer, and a server that shows it."""

from contextlib import contextmanager
from dataclasses import replace

import numpy as np
from predicted_slides import PREDICTION, predicted_file, table_of, write_prediction
from slide_files import section, write_slide
from starlette.testclient import TestClient

from tapfm.prediction.folder import PREDICTION_JSON
from tapfm.slides.opening import PER_SLIDE
from tapfm.viewer.assets import Asset
from tapfm.viewer.collection import collect_viewed_slides
from tapfm.viewer.server import make_server

PAGE = {"index.html": Asset(b"<!doctype html><title>page</title>", "text/html; charset=utf-8", '"page"')}
SIDE = 100


def predict(folder, path, slide_id, *, probability=0.75, label=1, side_px0=SIDE, targets=("FGFR3",)):
    """Write a prediction of a slide: tiles on a grid over its bounds, the first one the most influential."""
    predicted = predicted_file(path, targets=targets)
    box = predicted.bounds
    columns, rows = box.width_px0 // side_px0, box.height_px0 // side_px0
    positions = [
        (box.x_px0 + column * side_px0, box.y_px0 + row * side_px0) for row in range(rows) for column in range(columns)
    ]
    said = {target: replace(PREDICTION, probability=probability, label=label) for target in targets}
    predicted = replace(predicted, slide_id=slide_id, side_px0=side_px0, targets=said)
    # from the largest down to its opposite: each tile has its own number
    table = table_of(predicted, positions, np.linspace(1.0, -0.99, len(positions)))
    (folder / PER_SLIDE / slide_id).mkdir(parents=True, exist_ok=True)
    (folder / PREDICTION_JSON).write_text("{}")
    return write_prediction(folder / PER_SLIDE / slide_id, predicted, table)


def two_predictions(folder):
    """Write two slides and their predictions."""
    for number, probability in ((1, 0.25), (2, 0.75)):
        path = folder / "slides" / f"case-{number}.svs"
        path.parent.mkdir(parents=True, exist_ok=True)
        write_slide(path, section(1300, 900, seed=number), compression="zlib", aperio=False, downsamples=(1, 4))
        predict(folder / "predicted", path, f"case-{number}", probability=probability, label=1)
    return folder / "predicted"


@contextmanager
def served(*sources, slides=None, admission=None, base_url="http://127.0.0.1:8000", assets=PAGE):
    """Ask a server of these sources, without a socket."""
    application = make_server(collect_viewed_slides(sources, slides), assets, admission)
    with TestClient(application, base_url=base_url, raise_server_exceptions=False) as client:
        yield client


def keys_of(client):
    """Give the key of each slide."""
    return {slide["slide_id"]: slide["key"] for slide in client.get("/api/collection").json()["slides"]}
