"""`tapfm demo`, as a new user types it, in its smallest size."""

import json
import re
import signal
import statistics
import subprocess
from html.parser import HTMLParser

import numpy as np
import pytest
from cohort_files import rows_of
from command_line import PROGRAM, start, tapfm, wait_for
from PIL import Image

from tapfm.encoders.features import read_features
from tapfm.evaluation.ranking import auc
from tapfm.prediction.folder import PredictionFolder
from tapfm.synthetic.truth import CARRIES, read_truth


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    """Stopped once by Ctrl-C while it paints, and gone on with."""
    where = tmp_path_factory.mktemp("demo")
    folder = where / "demo"
    process = start("demo", "--tiny", "--out", folder)
    wait_for(lambda: len(list(folder.glob("painted/slides/*.svs"))) >= 2, process)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 130, said
    assert f"go on with: tapfm demo --tiny --out {folder}" in said
    again = subprocess.run(
        [*PROGRAM, "demo", "--tiny", "--out", folder], capture_output=True, text=True, check=False, cwd=where
    )
    assert again.returncode == 0, again.stderr
    return folder, again


def test_it_ends_with_what_was_measured(demo):
    folder, result = demo
    for line in rows_of(folder / "study" / "table_binary.csv"):
        assert f"{float(line['auc']):.3f}" in result.stdout
    found = json.loads((folder / "planted.json").read_text())
    for cohort in ("test", "external"):
        for estimate in found[cohort]["found"].values():
            assert f"{estimate['value']:.3f}" in result.stdout
    for title in ("fixed encoder + ABMIL", "fine-tuned encoder + ABMIL", "TAPFM"):
        assert title in result.stdout
    assert "held-out (3 patients)" in result.stdout
    assert "the figures mean nothing" in result.stdout


def test_it_says_what_was_chosen_for_its_size(demo):
    _, result = demo
    said = " ".join(result.stderr.split())
    assert "40% of the slides are positive; 50% are for training, 20% for validation, 30% for testing" in said
    assert "chosen for so few slides" in said


def test_everything_that_it_points_to_is_there(demo):
    folder, result = demo
    named = [line.split("  #")[0].strip() for line in result.stdout.splitlines() if line.startswith(f"  {folder}")]
    assert len(named) == 4
    for path in named:
        assert (folder.parent / path).exists(), path
    maps = list((folder / "predictions" / "external" / "per-slide").glob("*/heatmap-contribution-FGFR3.png"))
    assert len(maps) == 4
    with Image.open(folder / "planted.png") as picture:
        assert picture.width > 3 * picture.height / 2


def test_planted_tiles_are_counted_from_the_truth(demo):
    """The figures of the external cohort, once more, from the files alone."""
    folder, _ = demo
    predictions = PredictionFolder(folder / "predictions" / "external")
    before, after = [], []
    for row in rows_of(folder / "painted" / "external.csv"):
        tiles = predictions.tiles(row["slide_id"])
        truth = read_truth(folder / "painted" / "truth", row["slide_id"])
        side = round(224 * 0.5 / truth.mpp)
        carries = [int(each) for each in truth.signal("FGFR3", tiles.positions, side) >= CARRIES]
        if 0 < sum(carries) < len(carries):
            stored = read_features(folder / "study" / "features" / "tapfm-pocket-external" / f"{row['slide_id']}.h5")
            assert np.array_equal(stored.positions, tiles.positions)
            before.append(auc(carries, stored.attention.tolist()))
            after.append(auc(carries, tiles.values["attention"].tolist()))
    found = json.loads((folder / "planted.json").read_text())["external"]
    assert found["slides"] == len(before) > 0
    assert found["found"]["attention before"]["value"] == pytest.approx(statistics.fmean(before))
    assert found["found"]["attention after"]["value"] == pytest.approx(statistics.fmean(after))


def test_again_it_is_done_at_once_and_says_the_same(demo):
    folder, result = demo
    times = {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}
    again = tapfm("demo", "--tiny", "--out", folder)
    assert again.returncode == 0
    assert again.stdout == result.stdout
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()} == times


def test_the_report_has_the_study_and_the_maps(demo):
    folder, _ = demo
    page = (folder / "report.html").read_text()
    HTMLParser().feed(page)
    assert "Three ways to learn FGFR3 from painted slides" in page
    assert len(re.findall(r"<img ", page)) >= 4
    assert "X001" in page


def test_two_sizes_at_once_are_refused():
    result = tapfm("demo", "--full", "--tiny")
    assert result.returncode == 2
    assert "Give one of them" in result.stderr
