"""The tool that draws pictures of the docs, on a small painted cohort."""

import re
import subprocess
import sys
from pathlib import Path

import cv2
import pytest
from command_line import tapfm

TOOL = Path(__file__).parents[2] / "tools" / "draw_doc_figures.py"


def draw(*words):
    done = subprocess.run([sys.executable, str(TOOL), *map(str, words)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def predicted(tmp_path_factory, lab, train):  # noqa: ARG001 - of the lab, by a run of it
    folder = tmp_path_factory.mktemp("drawn")
    painted = ("--slides", 3, "--external", 0, "--tiles", 10, "--prevalence", 0.5, "--difficulty", "easy")
    assert tapfm("synth", folder / "painted", *painted).returncode == 0
    words = ("--model", train("drawn"), folder / "painted" / "cohort.csv", "--out", folder / "predicted")
    assert tapfm("predict", *words).returncode == 0
    return folder


def test_maps_stand_beside_what_was_planted(predicted):
    slides = sorted(path.name for path in (predicted / "predicted" / "per-slide").iterdir())
    out = predicted / "map.jpg"
    said = draw("truth", predicted / "predicted", predicted / "painted" / "truth", *slides, "--out", out)
    assert re.findall(r"^(S\d+):", said, re.MULTILINE) == slides
    counted = [int(found) for found in re.findall(r"(\d+) of \d+ tiles carry", said)]
    assert max(counted) > 0 == min(counted), "one slide has the cells, one has none"
    assert len(re.findall(r"contribution.FGFR3: AUC over tiles (?:\d\.\d+|-)$", said, re.MULTILINE)) == len(slides)
    height, width = cv2.imread(str(out)).shape[:2]
    assert (width, height) == (1200, 260 * len(slides))


def test_the_picture_of_the_two_graphs_is_drawn(tmp_path):
    draw("two-graphs", "--out", tmp_path / "graphs.png")
    picture = cv2.imread(str(tmp_path / "graphs.png"))
    assert picture.shape[1] > picture.shape[0] > 300
    assert picture.std() > 10, "there is something on it"
