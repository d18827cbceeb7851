"""What `tapfm demo` does around its commands: order, what is kept, what is told. The journey runs it in full."""

import io
import json

import numpy as np
import pytest
import typer
from rich.console import Console

from tapfm.app.demo.planted_picture import outlined, planted_in
from tapfm.app.demo.run import run_demo
from tapfm.app.demo.sizes import SIZES
from tapfm.app.demo.steps import DemoFolder, steps_of
from tapfm.app.study.config import load_study
from tapfm.errors import InputError, RunError
from tapfm.slides.slide import Box, Thumbnail
from tapfm.synthetic.truth import SlideTruth

TINY = SIZES["tiny"]


class Typist:
    """Takes the place of the commands: notes what is typed, and makes the file that each is to make."""

    def __init__(self, out, fails=None, code=0):
        self.steps, self.typed = {step.words: step for step in steps_of(TINY, DemoFolder(out))}, []
        self.fails, self.code = fails, code

    def __call__(self, words):
        step = self.steps[words]
        self.typed.append(step.name)
        print(f"Tiled by {step.name}")
        if step.name == self.fails:
            return self.code
        step.made.parent.mkdir(parents=True, exist_ok=True)
        step.made.write_text(step.name)
        return 0


@pytest.fixture
def out(tmp_path, monkeypatch):
    folder = DemoFolder(tmp_path / "demo")
    monkeypatch.setattr("tapfm.app.demo.planted.measure_planted", lambda folder: folder.planted.write_text("{}"))
    return folder.path


def run(out, typist, size=TINY):
    said = io.StringIO()
    run_demo(size, out, console=Console(width=400, file=said), act=typist)
    return said.getvalue()


NAMES = ["synth", "inspect", "tile", "tile-external", "split", "study", "predict-test", "predict-external", "report"]


def test_steps_are_typed_in_order_and_shown(out):
    typist = Typist(out)
    said = run(out, typist)
    assert typist.typed == NAMES
    assert f"$ tapfm synth {out}/painted --slides 10" in said
    assert "3/10 Find the tissue" in said
    assert "Tiled by tile\n" in said  # of what a command prints the telling lines, and the rest is in its log
    assert "Tiled by report" not in said
    assert "Tiled by report" in (out / "logs" / "report.txt").read_text()


def test_what_is_done_is_not_done_again(out):
    run(out, Typist(out))
    again = Typist(out)
    assert "All 10 steps were done before." in run(out, again)
    assert not again.typed


def test_a_file_that_is_gone_is_made_again_with_all_that_follows(out):
    run(out, Typist(out))
    (out / "study" / "table_binary.csv").unlink()
    again = Typist(out)
    assert "5 of 10 steps were done before." in run(out, again)
    assert again.typed == NAMES[5:]


def test_a_step_that_was_stopped_is_gone_on_with(out):
    with pytest.raises(typer.Exit) as stopped:
        run(out, Typist(out, fails="study", code=130))
    assert stopped.value.exit_code == 130
    again = Typist(out)
    run(out, again)
    assert again.typed == NAMES[5:]


def test_a_step_that_fails_is_told_with_its_command(out):
    with pytest.raises(RunError, match=r"tapfm tile .*ended with exit code 3") as failed:
        run(out, Typist(out, fails="tile", code=3))
    assert str(out / "logs" / "tile.txt") in failed.value.hint
    assert list(json.loads((out / "demo.json").read_text())["done"]) == ["synth", "inspect"]


def test_another_version_goes_through_its_own_steps(out, monkeypatch):
    run(out, Typist(out))
    monkeypatch.setattr("tapfm.__version__", "99")
    again = Typist(out)
    run(out, again)
    assert again.typed == NAMES


def test_sizes_are_not_mixed(out):
    run(out, Typist(out))
    with pytest.raises(RunError, match=r"another size \(tiny\)") as refused:
        run(out, Typist(out), SIZES["full"])
    assert f"tapfm demo --full --out {out}-full" in refused.value.hint


def test_a_folder_of_other_things_is_refused(out):
    out.mkdir()
    (out / ".tapfm-output").write_text("tapfm study")
    with pytest.raises(InputError, match="is what tapfm study wrote"):
        run(out, Typist(out))


def test_a_damaged_state_costs_nothing_but_time(out):
    run(out, Typist(out))
    (out / "demo.json").write_text("{")
    again = Typist(out)
    run(out, again)
    assert again.typed == NAMES


def test_three_ways_are_compared_on_the_cohorts_that_were_made(out):
    run(out, Typist(out))
    study = load_study(out / "study.toml")
    assert study.regimes == ["fixed", "finetune", "tapfm"]
    assert study.aggregators == ["abmil"]
    assert study.cohort.table == out / "split.csv"
    assert study.external.table == out / "painted" / "external.csv"
    assert "40% of the slides are positive, and 50% of them are for training" in study.notes[1]


def test_planted_nests_are_outlined_where_they_are():
    """A truth with one square, on a picture of half its size."""
    focus = np.zeros((100, 200), np.uint8)
    focus[20:60, 100:160] = 1
    truth = SlideTruth(np.ones_like(focus), focus, ("FGFR3",), width_px0=800, height_px0=400, mpp=0.25)
    thumbnail = Thumbnail(np.full((50, 100, 3), 255, np.uint8), Box(0, 0, 800, 400))
    mask = planted_in(thumbnail, truth)
    assert mask[10:30, 50:80].all()
    assert mask.sum() == 20 * 30
    drawn = outlined(thumbnail.pixels, mask)
    assert (drawn[20, 50] < 128).all()  # its left edge
    assert (drawn[20, 65] == 255).all()  # within
    assert (drawn[40, 65] == 255).all()  # below
