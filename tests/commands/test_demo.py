"""Steps of `tapfm demo`: order, output, resuming and errors, with fake commands. tests/journeys runs the real demo."""

import io
import json
import re
import signal
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from rich.console import Console
from study_results import make_results, make_study

from tapfm.config.study import load_study
from tapfm.demo.attention_check import _choose_median_slide as choose_median_slide
from tapfm.demo.attention_check import _measure_cohort as measure_cohort
from tapfm.demo.attention_check_image import _draw_outlines as draw_outlines
from tapfm.demo.attention_check_image import _make_signal_mask as make_signal_mask
from tapfm.demo.folder import DemoFolder
from tapfm.demo.results import read_results
from tapfm.demo.runner import run_demo
from tapfm.demo.sizes import SIZES
from tapfm.demo.steps import list_demo_steps
from tapfm.errors import CommandFailedError, InputError, Interrupted, RunError
from tapfm.results.table import table_csv
from tapfm.runtime.messages import format_command
from tapfm.slides.slide import Box, Thumbnail
from tapfm.study.comparison import compare_study, tidy_table
from tapfm.synthetic.truth import SlideTruth

TINY = SIZES["tiny"]


class FakeCommands:
    """Runs no command, but records the names of the steps and writes the first output file of each."""

    def __init__(self, out, fails=None, code=0):
        self.steps, self.names = {step.arguments: step for step in list_demo_steps(TINY, DemoFolder(out))}, []
        self.fails, self.code = fails, code

    def __call__(self, arguments):
        step = self.steps[arguments]
        self.names.append(step.name)
        print(f"Tiled by {step.name}")
        if step.name == self.fails:
            return self.code
        for path in step.expected_outputs[:1]:  # a second path is the folder of the first
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(step.name)
        return 0


@pytest.fixture
def out(tmp_path, monkeypatch):
    folder = DemoFolder(tmp_path / "demo")

    def write_files(folder):
        folder.attention_check.write_text("{}")
        folder.attention_check_image.write_text("")

    monkeypatch.setattr("tapfm.demo.attention_check.check_attention", write_files)
    return folder.path


def run(out, commands, size=TINY):
    printed = io.StringIO()
    run_demo(size, out, console=Console(width=400, file=printed), run_command=commands)
    return printed.getvalue()


NAMES = ["synth", "inspect", "tile", "tile-external", "split", "study", "predict-test", "predict-external", "report"]


def test_steps_run_in_order_and_are_printed(out):
    commands = FakeCommands(out)
    printed = run(out, commands)
    assert commands.names == NAMES
    assert f"$ tapfm synth {out}/synthetic --slides 10" in printed
    assert "3/10 Detect tissue" in printed
    assert "Tiled by tile\n" in printed  # selected lines of the output; the log has all of it
    assert "Tiled by report" not in printed
    assert "Tiled by report" in (out / "logs" / "report.txt").read_text()


def test_finished_demo_runs_no_step_again(out):
    run(out, FakeCommands(out))
    again = FakeCommands(out)
    assert "10 of 10 steps already done." in run(out, again)
    assert not again.names


def test_deleted_file_is_written_again_with_all_later_steps(out):
    run(out, FakeCommands(out))
    (out / "study" / "table_binary.csv").unlink()
    again = FakeCommands(out)
    assert "5 of 10 steps already done." in run(out, again)
    assert again.names == NAMES[5:]


def test_output_of_later_steps_is_removed_before_a_step_runs_again(out):
    """The study runs again and the demo is stopped after it: old predictions must not count as finished."""
    run(out, FakeCommands(out))
    (out / "study" / "table_binary.csv").unlink()
    with pytest.raises(Interrupted):
        run(out, FakeCommands(out, fails="predict-test", code=130))
    assert not (out / "predictions" / "external").exists()
    assert not (out / "report.html").exists()
    again = FakeCommands(out)
    run(out, again)
    assert again.names == NAMES[6:]


def test_stopped_demo_resumes_at_the_stopped_step(out):
    with pytest.raises(Interrupted) as stopped:
        run(out, FakeCommands(out, fails="study", code=130))
    assert stopped.value.signal_number == signal.SIGINT
    again = FakeCommands(out)
    run(out, again)
    assert again.names == NAMES[5:]


def test_exit_code_of_a_failed_step_is_returned(out):
    printed = io.StringIO()
    with pytest.raises(CommandFailedError) as failed:
        run_demo(
            TINY, out, console=Console(width=400, file=printed), run_command=FakeCommands(out, fails="tile", code=3)
        )
    assert failed.value.exit_code == 3
    assert str(out / "logs" / "tile.txt") in failed.value.message
    assert failed.value.hint.endswith(f"tapfm demo --tiny --out {out}")
    assert json.loads((out / "demo.json").read_text())["done"] == ["inspect", "synth"]


@pytest.mark.parametrize(
    ("error", "raised"),
    [(InputError("a bad table"), InputError), (KeyboardInterrupt(), Interrupted), (SystemExit(143), Interrupted)],
)
def test_error_or_signal_stops_the_demo_and_its_duration_is_saved(out, error, raised, monkeypatch):
    commands, printed = FakeCommands(out), io.StringIO()
    clock = iter(range(10_000))
    monkeypatch.setattr("tapfm.runtime.steps.time.monotonic", lambda: next(clock))

    def run_command(arguments):
        if arguments[0] == "tile":
            raise error
        return commands(arguments)

    with pytest.raises(raised) as stopped:
        run_demo(TINY, out, run_command, console=Console(width=400, file=printed))
    if raised is Interrupted:
        assert 128 + stopped.value.signal_number == getattr(error, "code", 130)
    assert f"tapfm demo --tiny --out {out}\n" in printed.getvalue()
    state = json.loads((out / "demo.json").read_text())
    assert state["done"] == ["inspect", "synth"]
    assert state["seconds"]["tile"] > 0


def test_logs_of_earlier_attempts_are_not_printed_for_steps_that_did_not_run(out):
    run(out, FakeCommands(out))
    (out / "tiles" / "summary.csv").unlink()
    printed = io.StringIO()
    with pytest.raises(CommandFailedError):
        run_demo(TINY, out, FakeCommands(out, fails="tile", code=3), console=Console(width=400, file=printed))
    assert "Tiled by tile" in printed.getvalue()
    assert "Tiled by tile-external" not in printed.getvalue()


def test_duration_is_summed_over_all_attempts(out, monkeypatch):
    clock = iter(range(0, 10_000, 7))
    monkeypatch.setattr("tapfm.runtime.steps.time.monotonic", lambda: next(clock))
    with pytest.raises(Interrupted):
        run(out, FakeCommands(out, fails="study", code=130))
    run(out, FakeCommands(out))
    seconds = json.loads((out / "demo.json").read_text())["seconds"]
    assert seconds["study"] == 14
    assert seconds["report"] == 7


def test_demo_of_another_version_is_an_error(out, monkeypatch):
    run(out, FakeCommands(out))
    monkeypatch.setattr("tapfm.demo.runner.__version__", "99")
    with pytest.raises(RunError, match=r"another size or version \(tiny, tapfm 0"):
        run(out, FakeCommands(out))


def test_demo_of_another_size_is_an_error(out):
    with pytest.raises(Interrupted):
        run(out, FakeCommands(out, fails="synth", code=130))
    with pytest.raises(RunError, match=r"another size or version \(tiny, ") as error:
        run(out, FakeCommands(out), SIZES["full"])
    assert f"tapfm demo --full --out {out}-again" in error.value.hint


def test_folder_with_other_files_is_an_error(out):
    out.mkdir()
    (out / "split.csv").write_text("mine")
    with pytest.raises(RunError, match=r"split\.csv"):
        run(out, FakeCommands(out))
    assert [path.name for path in out.iterdir()] == ["split.csv"]


def test_output_folder_of_another_command_is_an_error(out):
    out.mkdir()
    (out / ".tapfm-output").write_text("tapfm study")
    with pytest.raises(InputError, match="tapfm study"):
        run(out, FakeCommands(out))


def test_damaged_state_file_is_an_error(out):
    run(out, FakeCommands(out))
    (out / "demo.json").write_text("{")
    with pytest.raises(RunError, match=r"demo\.json cannot be read"):
        run(out, FakeCommands(out))


def test_moved_demo_folder_predicts_again(out):
    run(out, FakeCommands(out))
    moved = out.rename(out.with_name("moved"))
    again = FakeCommands(moved)
    run(moved, again)
    assert again.names == NAMES[6:]


def test_tutorial_shows_the_titles_and_commands_of_the_demo():
    page = (Path(__file__).parents[2] / "docs" / "tutorials" / "first-hour.md").read_text()
    steps = list_demo_steps(SIZES["demo"], DemoFolder(Path("demo")))
    commands = {format_command(*step.arguments) for step in steps if step.arguments}
    shown = re.findall(r"^ +\$ (tapfm .*)$", page, re.MULTILINE)
    assert len(shown) >= 5
    assert set(shown) <= commands
    titles = {f"{number}/{len(steps)} {step.title}" for number, step in enumerate(steps, 1)}
    assert set(re.findall(r"^ +(\d+/\d+ .*)$", page, re.MULTILINE)) <= titles


def test_slide_with_the_median_auc_is_drawn():
    slides = [SimpleNamespace(signal_auc=lambda _, value=value: value) for value in (0.9, 0.2, 0.6, 0.4)]
    assert choose_median_slide(slides) is slides[3]
    assert choose_median_slide([]) is None


def test_cohort_without_positive_slides_has_a_reason_instead_of_an_auc():
    measured = measure_cohort("test", [])
    assert measured["slides"] == 0
    assert measured["mean_auc"]["attention_after"]["reason"] == "no positive slide"


def test_study_compares_three_methods_on_the_synthetic_cohorts(out):
    run(out, FakeCommands(out))
    study = load_study(out / "study.toml")
    assert study.methods == ["fixed", "finetune", "tapfm"]
    assert study.aggregators == ["abmil"]
    assert study.cohort.table == out / "split.csv"
    assert study.external.table == out / "synthetic" / "external.csv"
    assert "40% of the slides are positive. 50% of the slides are used for training" in study.notes[1]
    assert "4 tiles per slide and step, for 1 epoch." in study.notes[2]


def test_outlines_are_drawn_around_the_planted_signal():
    """One square of ground truth, on a thumbnail of half its size."""
    focus = np.zeros((100, 200), np.uint8)
    focus[20:60, 100:160] = 1
    truth = SlideTruth(np.ones_like(focus), focus, ("FGFR3",), width_px0=800, height_px0=400, slide_mpp=0.25)
    thumbnail = Thumbnail(np.full((50, 100, 3), 255, np.uint8), Box(0, 0, 800, 400))
    mask = make_signal_mask(thumbnail, truth)
    assert mask[10:30, 50:80].all()
    assert mask.sum() == 20 * 30
    outlined = draw_outlines(thumbnail.pixels, mask)
    assert (outlined[20, 50] < 128).all()  # left edge
    assert (outlined[20, 65] == 255).all()  # inside
    assert (outlined[40, 65] == 255).all()  # below


def test_results_mark_the_method_chosen_on_validation(tmp_path):
    """The fine-tuned encoder is better on validation slides, TAPFM on held-out slides."""
    folder = DemoFolder(tmp_path)
    results = make_results(make_study(), (0.5, 2.0), validation=(2.5, 0.5))
    folder.study.mkdir()
    folder.auc_table.write_text(table_csv(tidy_table(compare_study(results))))
    folder.state.write_text(json.dumps({"seconds": {"study": 60.0}}))
    measured = {cohort: measure_cohort(cohort, []) for cohort in ("test", "external")}
    folder.attention_check.write_text(json.dumps(measured))
    aucs = read_results(folder).aucs
    titles = [column.title for column in aucs.columns]
    assert titles == ["", "validation (20 patients)", "held-out (30 patients)", "external (30 patients)"]
    assert [row.cells[0].value for row in aucs.rows] == ["fine-tuned encoder + ABMIL *", "TAPFM"]
    finetune, tapfm_run = ([cell.value.value for cell in row.cells[1:]] for row in aucs.rows)
    assert finetune[0] > tapfm_run[0]
    assert finetune[1] < tapfm_run[1]
    (note,) = aucs.notes
    assert note.startswith("* chosen on validation: highest validation AUC")
