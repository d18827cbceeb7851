"""The script that draws figures of the docs, on a small synthetic cohort."""

import re
import subprocess
import sys
from pathlib import Path

import cv2
import pytest
from command_line import tapfm

TOOL = Path(__file__).parents[2] / "tools" / "draw_doc_figures.py"


def run_tool(*arguments):
    command = [sys.executable, str(TOOL), *map(str, arguments)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.fixture(scope="module")
def predicted(tmp_path_factory, workspace, train):  # noqa: ARG001 - of the workspace, by a run of it
    folder = tmp_path_factory.mktemp("figures")
    options = ("--slides", 3, "--external", 0, "--tiles-per-slide", 10, "--prevalence", 0.5, "--difficulty", "easy")
    assert tapfm("synth", folder / "synthetic", *options).returncode == 0
    arguments = ("--model", train("figures"), folder / "synthetic" / "cohort.csv", "--out", folder / "predicted")
    assert tapfm("predict", *arguments).returncode == 0
    return folder


def test_heatmaps_are_drawn_next_to_the_ground_truth(predicted):
    slides = sorted(path.name for path in (predicted / "predicted" / "per-slide").iterdir())
    out = predicted / "heatmaps.jpg"
    output = run_tool("truth", predicted / "predicted", predicted / "synthetic" / "truth", *slides, "--out", out)
    assert re.findall(r"^(S\d+):", output, re.MULTILINE) == slides
    counts = [int(count) for count in re.findall(r"(\d+) of \d+ tiles have the signal", output)]
    assert max(counts) > 0 == min(counts), "some slides have the signal, others do not"
    assert len(re.findall(r"contribution.FGFR3: AUC over tiles (?:\d\.\d+|-)$", output, re.MULTILINE)) == len(slides)
    height, width = cv2.imread(str(out)).shape[:2]
    assert (width, height) == (1200, 260 * len(slides))


def test_the_figure_of_the_two_graphs_is_drawn(tmp_path):
    run_tool("two-graphs", "--out", tmp_path / "graphs.png")
    image = cv2.imread(str(tmp_path / "graphs.png"))
    assert image.shape[1] > image.shape[0] > 300
    assert image.std() > 10, "the image is not blank"
