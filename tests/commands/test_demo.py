"""What `tapfm demo` does around its commands: order, what is kept, what is told. The journey runs it in full."""

import io
import json
import re
import signal
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from rich.console import Console

from tapfm.config.study import load_study
from tapfm.demo.attention_check import _choose_typical as choose_typical
from tapfm.demo.attention_check import _measure_cohort as measure_cohort
from tapfm.demo.attention_check_image import _draw_outlines as draw_outlines
from tapfm.demo.attention_check_image import _planted_mask as planted_mask
from tapfm.demo.folder import DemoFolder
from tapfm.demo.run import run_demo
from tapfm.demo.sizes import SIZES
from tapfm.demo.steps import demo_steps
from tapfm.errors import CommandFailedError, InputError, Interrupted, RunError
from tapfm.runtime.messages import format_command
from tapfm.slides.slide import Box, Thumbnail
from tapfm.synthetic.truth import SlideTruth

TINY = SIZES["tiny"]


class Typist:
    """Takes the place of the commands: notes what is typed, and makes the file that each is to make."""

    def __init__(self, out, fails=None, code=0):
        self.steps, self.typed = {step.arguments: step for step in demo_steps(TINY, DemoFolder(out))}, []
        self.fails, self.code = fails, code

    def __call__(self, words):
        step = self.steps[words]
        self.typed.append(step.name)
        print(f"Tiled by {step.name}")
        if step.name == self.fails:
            return self.code
        for path in step.files[:1]:  # the first is in the second, where there are two
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(step.name)
        return 0


@pytest.fixture
def out(tmp_path, monkeypatch):
    folder = DemoFolder(tmp_path / "demo")

    def measure(folder):
        folder.attention_check.write_text("{}")
        folder.attention_check_image.write_text("")

    monkeypatch.setattr("tapfm.demo.attention_check.check_attention", measure)
    return folder.path


def run(out, typist, size=TINY):
    said = io.StringIO()
    run_demo(size, out, console=Console(width=400, file=said), run_command=typist)
    return said.getvalue()


NAMES = ["synth", "inspect", "tile", "tile-external", "split", "study", "predict-test", "predict-external", "report"]


def test_steps_are_typed_in_order_and_shown(out):
    typist = Typist(out)
    said = run(out, typist)
    assert typist.typed == NAMES
    assert f"$ tapfm synth {out}/synthetic --slides 10" in said
    assert "3/10 Detect tissue" in said
    assert "Tiled by tile\n" in said  # of what a command prints the telling lines, and the rest is in its log
    assert "Tiled by report" not in said
    assert "Tiled by report" in (out / "logs" / "report.txt").read_text()


def test_what_is_done_is_not_done_again(out):
    run(out, Typist(out))
    again = Typist(out)
    assert "10 of 10 steps done already." in run(out, again)
    assert not again.typed


def test_a_file_that_is_gone_is_made_again_with_all_that_follows(out):
    run(out, Typist(out))
    (out / "study" / "table_binary.csv").unlink()
    again = Typist(out)
    assert "5 of 10 steps done already." in run(out, again)
    assert again.typed == NAMES[5:]


def test_nothing_old_stands_beside_what_is_done_again(out):
    """Done again from the study on, and stopped after it: what was predicted before is gone, not taken for done."""
    run(out, Typist(out))
    (out / "study" / "table_binary.csv").unlink()
    with pytest.raises(Interrupted):
        run(out, Typist(out, fails="predict-test", code=130))
    assert not (out / "predictions" / "external").exists()
    assert not (out / "report.html").exists()
    again = Typist(out)
    run(out, again)
    assert again.typed == NAMES[6:]


def test_a_step_that_was_stopped_is_gone_on_with(out):
    with pytest.raises(Interrupted) as stopped:
        run(out, Typist(out, fails="study", code=130))
    assert stopped.value.signal_number == signal.SIGINT
    again = Typist(out)
    run(out, again)
    assert again.typed == NAMES[5:]


def test_a_step_that_fails_passes_its_exit_code_on(out):
    said = io.StringIO()
    with pytest.raises(CommandFailedError) as failed:
        run_demo(TINY, out, console=Console(width=400, file=said), run_command=Typist(out, fails="tile", code=3))
    assert failed.value.exit_code == 3
    assert str(out / "logs" / "tile.txt") in failed.value.message
    assert failed.value.hint.endswith(f"tapfm demo --tiny --out {out}")
    assert json.loads((out / "demo.json").read_text())["done"] == ["inspect", "synth"]


@pytest.mark.parametrize(
    ("error", "raised"),
    [(InputError("a bad table"), InputError), (KeyboardInterrupt(), Interrupted), (SystemExit(143), Interrupted)],
)
def test_an_error_or_a_signal_in_a_command_ends_the_demo_and_its_time_is_kept(out, error, raised, monkeypatch):
    typist, said = Typist(out), io.StringIO()
    clock = iter(range(10_000))
    monkeypatch.setattr("tapfm.runtime.steps.time.monotonic", lambda: next(clock))

    def run_command(words):
        if words[0] == "tile":
            raise error
        return typist(words)

    with pytest.raises(raised) as stopped:
        run_demo(TINY, out, run_command, console=Console(width=400, file=said))
    if raised is Interrupted:
        assert 128 + stopped.value.signal_number == getattr(error, "code", 130)
    assert f"tapfm demo --tiny --out {out}\n" in said.getvalue()
    state = json.loads((out / "demo.json").read_text())
    assert state["done"] == ["inspect", "synth"]
    assert state["seconds"]["tile"] > 0


def test_results_of_an_earlier_attempt_are_not_shown_for_steps_that_did_not_run(out):
    run(out, Typist(out))
    (out / "tiles" / "summary.csv").unlink()
    said = io.StringIO()
    with pytest.raises(CommandFailedError):
        run_demo(TINY, out, Typist(out, fails="tile", code=3), console=Console(width=400, file=said))
    assert "Tiled by tile" in said.getvalue()
    assert "Tiled by tile-external" not in said.getvalue()


def test_time_is_counted_over_all_attempts(out, monkeypatch):
    clock = iter(range(0, 10_000, 7))
    monkeypatch.setattr("tapfm.runtime.steps.time.monotonic", lambda: next(clock))
    with pytest.raises(Interrupted):
        run(out, Typist(out, fails="study", code=130))
    run(out, Typist(out))
    seconds = json.loads((out / "demo.json").read_text())["seconds"]
    assert seconds["study"] == 14
    assert seconds["report"] == 7


def test_another_version_is_not_mixed_with_this_one(out, monkeypatch):
    run(out, Typist(out))
    monkeypatch.setattr("tapfm.demo.run.__version__", "99")
    with pytest.raises(RunError, match=r"another size or version \(tiny, tapfm 0"):
        run(out, Typist(out))


def test_sizes_are_not_mixed(out):
    with pytest.raises(Interrupted):
        run(out, Typist(out, fails="synth", code=130))
    with pytest.raises(RunError, match=r"another size or version \(tiny, ") as refused:
        run(out, Typist(out), SIZES["full"])
    assert f"tapfm demo --full --out {out}-again" in refused.value.hint


def test_files_of_others_are_not_written_over(out):
    out.mkdir()
    (out / "split.csv").write_text("mine")
    with pytest.raises(RunError, match=r"has other files in it, such as split\.csv"):
        run(out, Typist(out))
    assert [path.name for path in out.iterdir()] == ["split.csv"]


def test_a_folder_of_another_command_is_refused(out):
    out.mkdir()
    (out / ".tapfm-output").write_text("tapfm study")
    with pytest.raises(InputError, match="is what tapfm study wrote"):
        run(out, Typist(out))


def test_a_damaged_state_is_told(out):
    run(out, Typist(out))
    (out / "demo.json").write_text("{")
    with pytest.raises(RunError, match=r"demo\.json cannot be read"):
        run(out, Typist(out))


def test_a_folder_that_moved_predicts_again(out):
    run(out, Typist(out))
    moved = out.rename(out.with_name("moved"))
    again = Typist(moved)
    run(moved, again)
    assert again.typed == NAMES[6:]


def test_the_tutorial_shows_the_commands_that_are_typed():
    page = (Path(__file__).parents[2] / "docs" / "tutorials" / "first-hour.md").read_text()
    typed = {
        format_command(*step.arguments)
        for step in demo_steps(SIZES["demo"], DemoFolder(Path("demo")))
        if step.arguments
    }
    shown = re.findall(r"^ +\$ (tapfm .*)$", page, re.MULTILINE)
    assert len(shown) >= 5
    assert set(shown) <= typed


def test_of_slides_found_well_and_badly_the_middle_is_shown():
    slides = [SimpleNamespace(rank_auc=lambda _, value=value: value) for value in (0.9, 0.2, 0.6, 0.4)]
    assert choose_typical(slides) is slides[3]
    assert choose_typical([]) is None


def test_without_positive_slides_there_is_a_reason_instead_of_a_figure():
    found = measure_cohort("test", [])
    assert found["slides"] == 0
    assert found["found"]["attention after"]["reason"] == "no positive slide"


def test_three_ways_are_compared_on_the_cohorts_that_were_made(out):
    run(out, Typist(out))
    study = load_study(out / "study.toml")
    assert study.regimes == ["fixed", "finetune", "tapfm"]
    assert study.aggregators == ["abmil"]
    assert study.cohort.table == out / "split.csv"
    assert study.external.table == out / "synthetic" / "external.csv"
    assert "40% of the slides are positive. 50% of all are for training" in study.notes[1]
    assert "a step has 4 tiles of a slide, for 1 epochs" in study.notes[2]


def test_planted_nests_are_outlined_where_they_are():
    """A truth with one square, on a picture of half its size."""
    focus = np.zeros((100, 200), np.uint8)
    focus[20:60, 100:160] = 1
    truth = SlideTruth(np.ones_like(focus), focus, ("FGFR3",), width_px0=800, height_px0=400, mpp=0.25)
    thumbnail = Thumbnail(np.full((50, 100, 3), 255, np.uint8), Box(0, 0, 800, 400))
    mask = planted_mask(thumbnail, truth)
    assert mask[10:30, 50:80].all()
    assert mask.sum() == 20 * 30
    drawn = draw_outlines(thumbnail.pixels, mask)
    assert (drawn[20, 50] < 128).all()  # its left edge
    assert (drawn[20, 65] == 255).all()  # within
    assert (drawn[40, 65] == 255).all()  # below
