"""A new user's first hour: `tapfm demo` in its smallest size, then all that docs/tutorials/first-hour.md types."""

import json
import re
import shlex
import shutil
import signal
import statistics
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from cohort_files import rows_of
from command_line import PROGRAM, tapfm, wait_for
from PIL import Image

from tapfm.encoders.features import read_features
from tapfm.metrics.ranking import auc
from tapfm.prediction.folder import PredictionFolder
from tapfm.synthetic.truth import SIGNAL_THRESHOLD, read_truth
from tapfm.viewer.assets import _FOLDER as FOLDER

PAGE = Path(__file__).parents[2] / "docs" / "tutorials" / "first-hour.md"
TYPED = [
    shlex.split(line.partition("#")[0])
    for block in re.findall(r"^```console\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    for line in block.splitlines()
]


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    """Stopped once by Ctrl-C while it paints, and gone on with."""
    where = tmp_path_factory.mktemp("demo")
    program = {"args": [*PROGRAM, "demo", "--tiny", "--out", "demo"], "cwd": where, "text": True}
    process = subprocess.Popen(**program, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    wait_for(lambda: len(list(where.glob("demo/synthetic/slides/*.svs"))) >= 2, process)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 130, said
    assert "tapfm demo --tiny --out demo\n" in said
    again = subprocess.run(**program, capture_output=True, check=False)
    assert again.returncode == 0, again.stderr
    return where / "demo", again


def test_it_ends_with_what_was_measured(demo):
    folder, result = demo
    shown = {words[0]: words[1:] for line in result.stdout.splitlines() if (words := re.split(r" {2,}", line))}
    titles = {"fixed": "fixed encoder + ABMIL", "finetune": "fine-tuned encoder + ABMIL", "tapfm": "TAPFM"}
    for line in rows_of(folder / "study" / "table_binary.csv"):
        cell = shown[titles.get(line["regime"], line["model"])][line["cohort"] == "external"]
        assert cell.startswith(f"{float(line['auc']):.3f}")
    found = json.loads((folder / "attention-check.json").read_text())
    rows = {"attention before": "attention, pretrained encoder", "attention after": "attention, after TAPFM"}
    for number, cohort in enumerate(("test", "external")):
        for name, title in rows.items():
            assert shown[title][number].startswith(f"{found[cohort]['found'][name]['value']:.3f}")
    assert "held-out (3 patients)" in result.stdout
    assert "the figures mean nothing" in result.stdout


def test_it_says_what_was_chosen_for_its_size(demo):
    _, result = demo
    said = " ".join(result.stderr.split())
    assert "40% of the slides are positive. 50% of all are for training, 20% for validation, 30% for testing" in said
    assert "chosen for so few slides" in said


def test_everything_that_it_points_to_is_there(demo):
    folder, result = demo
    named = [line.split("  #")[0].strip() for line in result.stdout.splitlines() if line.startswith("  demo/")]
    assert len(named) == 4
    for path in named:
        assert (folder.parent / path).exists(), path
    maps = list((folder / "predictions" / "external" / "per-slide").glob("*/heatmap-contribution-FGFR3.png"))
    assert len(maps) == 4
    with Image.open(folder / "attention-check.png") as picture:
        assert picture.width > 3 * picture.height / 2


@pytest.mark.parametrize("cohort", ["test", "external"])
def test_planted_tiles_are_counted_from_the_truth(demo, cohort):
    """Once more, from the files alone."""
    folder, _ = demo
    predictions = PredictionFolder(folder / "predictions" / cohort)
    features = folder / "study" / "features" / f"tapfm-pocket{'' if cohort == 'test' else '-external'}"
    before, after = [], []
    rows = rows_of(folder / ("split.csv" if cohort == "test" else "synthetic/external.csv"))
    rows = [row for row in rows if row["split"] == "test"]
    assert [slide.slide_id for slide in predictions.slides()] == [row["slide_id"] for row in rows]
    for row in rows:
        tiles = predictions.tiles(row["slide_id"])
        truth = read_truth(folder / "synthetic" / "truth", row["slide_id"])
        side = round(224 * 0.5 / truth.mpp)
        carries = truth.signal("FGFR3", tiles.positions, side) >= SIGNAL_THRESHOLD
        if 0 < sum(carries) < len(carries):
            stored = read_features(features / f"{row['slide_id']}.h5")
            assert np.array_equal(stored.positions, tiles.positions)
            before.append(auc(carries, stored.attention.astype(float)))
            after.append(auc(carries, tiles.values["attention"]))
    found = json.loads((folder / "attention-check.json").read_text())[cohort]
    assert found["slides"] == len(before) > 0
    assert found["found"]["attention before"]["value"] == pytest.approx(statistics.fmean(before))
    assert found["found"]["attention after"]["value"] == pytest.approx(statistics.fmean(after))


def test_again_it_is_done_at_once_and_says_the_same(demo, monkeypatch):
    folder, result = demo
    monkeypatch.chdir(folder.parent)
    times = {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}
    again = tapfm("demo", "--tiny", "--out", "demo")
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


def test_the_tutorial_can_be_typed_from_top_to_bottom(demo, monkeypatch):
    """In its order, in one folder, shortened: painted slides for one's own, the encoder at hand for UNI, one epoch."""
    where = demo[0].parent
    monkeypatch.chdir(where)
    shutil.copytree("demo/synthetic/slides", "slides")
    labels = {row["slide_id"]: row["FGFR3"] for row in rows_of(where / "demo" / "synthetic" / "cohort.csv")}
    assert TYPED[0] == ["make", "demo"]
    for program, *words in TYPED[1:]:
        assert program == "tapfm"
        if words[0] == "view":
            look_at_once(words)
            continue
        result = tapfm(*("tapfm-pocket" if word == "uni" else word for word in words))
        assert result.returncode == 0, f"tapfm {shlex.join(words)}\n{result.said}"
        if "--write-cohort" in words:  # "Add a column for the label"
            head, *lines = (where / "cohort.csv").read_text().splitlines()
            with_labels = [f"{head},FGFR3", *(f"{line},{labels[line.split(',')[0]]}" for line in lines)]
            (where / "cohort.csv").write_text("\n".join(with_labels) + "\n")
        if words[0] == "config":
            text = (where / "run.toml").read_text()
            assert "# epochs = 20 " in text
            (where / "run.toml").write_text(text.replace("# epochs = 20 ", "epochs = 1 "))
    assert (where / "report.html").stat().st_size > 100_000
    assert len(rows_of(where / "predicted" / "predictions.csv")) == len(labels)


def look_at_once(words):
    """Start a server and end it by Ctrl-C."""
    if not (FOLDER / "index.html").exists():
        return  # the viewer's pages are not built: tests of the viewer say so
    program = [*PROGRAM, *words, "--port", "0", "--no-browser"]
    server = subprocess.Popen(program, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    address = server.stdout.readline()
    server.send_signal(signal.SIGINT)
    _, said = server.communicate(timeout=60)
    assert address.startswith("http://127.0.0.1:"), said
    assert server.returncode == 0, said


def test_the_hours_of_the_tutorial_follow_from_what_was_measured():
    """Slides x tiles x epochs / speed, and the speeds are those of the benchmarks."""
    table = (PAGE.parents[1] / "evidence" / "benchmarks.md").read_text()
    page = PAGE.read_text()
    for encoder, tiles, written in (("uni", 300, ("19 min", "2.1 h")), ("h-optimus-0", 75, ("23 min", "2.6 h"))):
        rows = re.findall(rf"\| {encoder}: full step \| {tiles} \| \S+ \| ([\d,]+) \|", table)
        speed = max(int(each.replace(",", "")) for each in rows)
        assert f"{speed:,}" in page
        assert f"{240 * tiles * 20 / speed / 60:.0f} min" == written[0]
        assert f"{1624 * tiles * 20 / speed / 3600:.1f} h" == written[1]
    assert "| 19 min | 23 min |" in page
    assert "| 2.1 h | 2.6 h |" in page
