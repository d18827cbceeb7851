"""The tutorial docs/tutorials/first-hour.md: `tapfm demo` in its smallest size, then all commands of the page."""

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
from cohort_files import read_rows
from command_line import PROGRAM, tapfm, wait_for
from PIL import Image

from tapfm.demo.folder import DemoFolder
from tapfm.demo.sizes import SIZES
from tapfm.demo.steps import list_demo_steps
from tapfm.encoders.features import read_features
from tapfm.metrics.ranking import auc
from tapfm.prediction.folder import PredictionFolder
from tapfm.synthetic.truth import SIGNAL_THRESHOLD, read_truth
from tapfm.viewer.assets import _STATIC_FOLDER as STATIC_FOLDER

PAGE = Path(__file__).parents[2] / "docs" / "tutorials" / "first-hour.md"
COMMANDS = [
    shlex.split(line.partition("#")[0])
    for block in re.findall(r"^```console\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    for line in block.splitlines()
]


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    """Folder and output of a demo that was stopped once with Ctrl-C, while it generated slides, and resumed."""
    parent = tmp_path_factory.mktemp("demo")
    program = {"args": [*PROGRAM, "demo", "--tiny", "--out", "demo"], "cwd": parent, "text": True}
    process = subprocess.Popen(**program, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    wait_for(lambda: len(list(parent.glob("demo/synthetic/slides/*.svs"))) >= 2, process)
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 130, stderr
    assert "tapfm demo --tiny --out demo\n" in stderr
    again = subprocess.run(**program, capture_output=True, check=False)
    assert again.returncode == 0, again.stderr
    return parent / "demo", again


def test_final_tables_have_the_values_of_the_result_files(demo):
    folder, result = demo
    printed = {cells[0]: cells[1:] for line in result.stdout.splitlines() if (cells := re.split(r" {2,}", line))}
    titles = {"fixed": "fixed encoder + ABMIL", "finetune": "fine-tuned encoder + ABMIL", "tapfm": "TAPFM"}
    for line in read_rows(folder / "study" / "table_binary.csv"):
        title = titles.get(line["method"], line["model"]) + (" *" if line["chosen"] == "1" else "")
        validation = [line["validation_auc"]] if line["validation_auc"] else []
        cells = dict(zip(("validation", "test", "external")[1 - len(validation) :], printed[title], strict=False))
        assert cells[line["cohort"]].startswith(f"{float(line['auc']):.3f}")
        assert all(cells["validation"].startswith(f"{float(value):.3f}") for value in validation)
    chosen = [line["model"] for line in read_rows(folder / "study" / "table_binary.csv") if line["chosen"] == "1"]
    assert len(set(chosen)) == 1
    measured = json.loads((folder / "attention-check.json").read_text())
    rows = {"attention_before": "attention, pretrained encoder", "attention_after": "attention, after TAPFM"}
    for number, cohort in enumerate(("test", "external")):
        for name, title in rows.items():
            assert printed[title][number].startswith(f"{measured[cohort]['mean_auc'][name]['value']:.3f}")
    assert "held-out (3 patients)" in result.stdout
    assert "meaningless" in result.stdout


def test_prevalence_and_splits_are_printed(demo):
    _, result = demo
    printed = " ".join(result.stderr.split())
    assert "40% of the slides are positive" in printed
    assert "50% of the slides are used for training, 20% for validation and 30% for testing" in printed
    assert "These values suit a small cohort" in printed


def test_selected_output_of_each_step_is_printed(demo):
    """The demo finds these lines by their first words, which other modules print."""
    folder, result = demo
    steps = list_demo_steps(SIZES["tiny"], DemoFolder(folder))
    for number, step in enumerate(steps, 1):
        block = result.stderr.partition(f"{number}/{len(steps)} ")[2].partition(f"{number + 1}/{len(steps)} ")[0]
        for prefix in step.summary_line_prefixes:
            assert f"\n{prefix}" in block, (step.name, prefix)


def test_printed_result_files_exist(demo):
    folder, result = demo
    paths = [line.split("  #")[0].strip() for line in result.stdout.splitlines() if line.startswith("  demo/")]
    assert len(paths) == 4
    for path in paths:
        assert (folder.parent / path).exists(), path
    heatmaps = list((folder / "predictions" / "external" / "per-slide").glob("*/heatmap-contribution-FGFR3.png"))
    assert len(heatmaps) == 4
    with Image.open(folder / "attention-check.png") as image:
        assert image.width > 3 * image.height / 2


@pytest.mark.parametrize("cohort", ["test", "external"])
def test_attention_check_agrees_with_the_ground_truth(demo, cohort):
    """Compute the AUCs again from the files."""
    folder, _ = demo
    predictions = PredictionFolder(folder / "predictions" / cohort)
    features = folder / "study" / "features" / f"tapfm-pocket{'' if cohort == 'test' else '-external'}"
    before, after = [], []
    rows = read_rows(folder / ("split.csv" if cohort == "test" else "synthetic/external.csv"))
    rows = [row for row in rows if row["split"] == "test"]
    assert [slide.slide_id for slide in predictions.slides()] == [row["slide_id"] for row in rows]
    for row in rows:
        tiles = predictions.tiles(row["slide_id"])
        truth = read_truth(folder / "synthetic" / "truth", row["slide_id"])
        side = round(224 * 0.5 / truth.slide_mpp)
        has_signal = truth.signal_coverage("FGFR3", tiles.positions, side) >= SIGNAL_THRESHOLD
        if 0 < sum(has_signal) < len(has_signal):
            stored = read_features(features / f"{row['slide_id']}.h5")
            assert np.array_equal(stored.positions, tiles.positions)
            before.append(auc(has_signal, stored.attention.astype(float)))
            after.append(auc(has_signal, tiles.values["attention"]))
    measured = json.loads((folder / "attention-check.json").read_text())[cohort]
    assert measured["slides"] == len(before) > 0
    assert measured["mean_auc"]["attention_before"]["value"] == pytest.approx(statistics.fmean(before))
    assert measured["mean_auc"]["attention_after"]["value"] == pytest.approx(statistics.fmean(after))


def test_finished_demo_prints_the_same_results_without_writing_files(demo, monkeypatch):
    folder, result = demo
    monkeypatch.chdir(folder.parent)
    times = {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}
    again = tapfm("demo", "--tiny", "--out", "demo")
    assert again.returncode == 0
    assert again.stdout == result.stdout
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()} == times


def test_report_contains_the_study_and_heatmaps(demo):
    folder, _ = demo
    page = (folder / "report.html").read_text()
    HTMLParser().feed(page)
    assert "Three training methods for FGFR3 on synthetic slides" in page
    assert len(re.findall(r"<img ", page)) >= 4
    assert "X001" in page


def test_two_sizes_are_an_error():
    result = tapfm("demo", "--full", "--tiny")
    assert result.returncode == 2
    assert "--full and --tiny" in result.stderr


def test_all_commands_of_the_tutorial_run(demo, monkeypatch):
    """In order and in one folder, with synthetic slides, tapfm-pocket instead of UNI, and one epoch."""
    folder = demo[0].parent
    monkeypatch.chdir(folder)
    shutil.copytree("demo/synthetic/slides", "slides")
    labels = {row["slide_id"]: row["FGFR3"] for row in read_rows(folder / "demo" / "synthetic" / "cohort.csv")}
    assert COMMANDS[0] == ["make", "demo"]
    for program, *arguments in COMMANDS[1:]:
        assert program == "tapfm"
        if arguments[0] == "view":
            start_and_stop_viewer(arguments)
            continue
        result = tapfm(*("tapfm-pocket" if argument == "uni" else argument for argument in arguments))
        assert result.returncode == 0, f"tapfm {shlex.join(arguments)}\n{result.output}"
        if "--write-cohort" in arguments:  # the tutorial asks to add a label column
            head, *lines = (folder / "cohort.csv").read_text().splitlines()
            with_labels = [f"{head},FGFR3", *(f"{line},{labels[line.split(',')[0]]}" for line in lines)]
            (folder / "cohort.csv").write_text("\n".join(with_labels) + "\n")
        if arguments[0] == "config":
            text = (folder / "run.toml").read_text()
            assert "# epochs = 20 " in text
            (folder / "run.toml").write_text(text.replace("# epochs = 20 ", "epochs = 1 "))
    assert (folder / "report.html").stat().st_size > 100_000
    assert len(read_rows(folder / "predicted" / "predictions.csv")) == len(labels)


def start_and_stop_viewer(arguments):
    if not (STATIC_FOLDER / "index.html").exists():
        return  # the pages of the viewer are not built, which the tests of the viewer report
    program = [*PROGRAM, *arguments, "--port", "0", "--no-browser"]
    server = subprocess.Popen(program, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    address = server.stdout.readline()
    server.send_signal(signal.SIGINT)
    _, stderr = server.communicate(timeout=60)
    assert address.startswith("http://127.0.0.1:"), stderr
    assert server.returncode == 0, stderr


def test_training_times_of_the_tutorial_follow_from_the_benchmarks():
    """Time = slides x tiles x epochs / speed, with the speeds of the benchmarks page."""
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
