"""Steps: order, dependencies, failures, signals and progress."""

import io
import signal
import threading
import time

import pytest
from rich.console import Console

from tapfm.errors import InputError
from tapfm.runtime.interrupts import StopSignalHandler
from tapfm.runtime.step_bars import StepBars
from tapfm.runtime.steps import Step, StepResult, StepRunner


class RecordingDisplay:
    """Records which steps are shown."""

    def __init__(self):
        self.started, self.finished = [], []

    def show_start(self, step):
        assert threading.current_thread() is threading.main_thread()
        self.started.append(step.key)

    def show_progress(self):
        assert threading.current_thread() is threading.main_thread()

    def show_result(self, step, result):
        assert threading.current_thread() is threading.main_thread()
        self.finished.append((step.key, result.state))


class FakeStudy:
    """Steps of two runs with the same features, and their evaluations. Commands are replaced by calls of `during`."""

    def __init__(self, folder, during=lambda step, check: 0):  # noqa: ARG005
        self.folder, self.during, self.display = folder, during, RecordingDisplay()
        self.started, self.running, self.max_running, self.recorded = [], set(), 0, []
        self._lock = threading.Lock()

    def step(self, group, name, *needs, **more):
        log = self.folder / "logs" / f"{group}-{name}"
        return Step(
            name, (name, group), log, group, expected_outputs=(self.folder / f"{group} {name}",), needs=needs, **more
        )

    def steps(self):
        return [
            self.step("features", "embed"),
            *(self.step(run, "train", "features: embed") for run in ("a", "b")),
            *(self.step(run, "evaluate", f"{run}: train") for run in ("a", "b")),
        ]

    def command(self, step, check):
        with self._lock:
            self.started.append(step.key)
            self.running.add(step.key)
            self.max_running = max(self.max_running, len(self.running))
        step.log.parent.mkdir(parents=True, exist_ok=True)
        code = self.during(step, check)
        step.log.write_text("error: it is broken\n" if code else "")
        with self._lock:
            self.running.remove(step.key)
        if code == 0:
            step.expected_outputs[0].touch()
        return code

    def run(self, steps=None, done=(), **options):
        runner = StepRunner(
            self.steps() if steps is None else steps,
            self.command,
            save_results=lambda results: self.recorded.append(dict(results)),
            display=self.display,
            **options,
        )
        return runner.run(done)


def test_steps_run_in_order_and_results_are_recorded(tmp_path):
    study = FakeStudy(tmp_path)
    results = study.run()
    keys = ["features: embed", "a: train", "b: train", "a: evaluate", "b: evaluate"]
    assert study.started == study.display.started == list(results) == keys
    assert study.max_running == 1
    assert [[result.state for result in each.values()].count("done") for each in study.recorded] == [0, 1, 2, 3, 4, 5]
    assert study.recorded[-1] == results


def test_done_steps_are_not_repeated(tmp_path):
    study = FakeStudy(tmp_path)
    results = study.run(done=["features: embed", "a: train"])
    assert study.started == ["b: train", "a: evaluate", "b: evaluate"]
    assert {result.state for result in results.values()} == {"done"}


@pytest.mark.parametrize("jobs", [1, 2])
def test_failure_blocks_only_dependent_steps(tmp_path, jobs):
    study = FakeStudy(tmp_path, lambda step, check: 2 if step.key == "a: train" else 0)  # noqa: ARG005
    results = study.run(jobs=jobs)
    assert results["a: train"] == StepResult("failed", "it is broken")
    assert results["a: train"].exit_code == 2
    assert results["a: evaluate"].state == "not run"
    assert "a: train" in results["a: evaluate"].reason
    assert results["b: evaluate"].state == "done"
    assert "a: evaluate" not in study.display.started
    assert ("a: evaluate", "not run") in study.display.finished


def test_failure_stops_a_chain_of_dependent_steps(tmp_path):
    study = FakeStudy(tmp_path, lambda step, check: 3 if step.group == "b" else 0)  # noqa: ARG005
    results = study.run([study.step("a", "x"), study.step("b", "x", "a: x"), study.step("c", "x", "b: x")])
    assert [result.state for result in results.values()] == ["done", "failed", "not run"]
    assert study.started == ["a: x", "b: x"]


def test_step_with_a_problem_or_an_unknown_dependency_does_not_run(tmp_path):
    study = FakeStudy(tmp_path)
    results = study.run([study.step("a", "train", config_error="lambda is 2"), study.step("b", "evaluate", "b: train")])
    assert results["a: train"] == StepResult("failed", "lambda is 2")
    assert results["b: evaluate"].state == "not run"
    assert "b: train" in results["b: evaluate"].reason
    assert not study.started


def test_command_without_output_files_has_failed(tmp_path):
    study = FakeStudy(tmp_path)
    step = study.step("a", "train", check_done=lambda: False)
    assert "output files are missing" in study.run([step])["a: train"].reason


def test_function_is_called_after_prepare(tmp_path):
    study, calls = FakeStudy(tmp_path), []
    step = Step(
        "f", (), tmp_path / "f.log", prepare=lambda: calls.append("prepare"), function=lambda: calls.append("f")
    )
    assert study.run([step]) == {"f": StepResult("done")}
    assert calls == ["prepare", "f"]


def test_error_and_ctrl_c_of_a_function_are_step_results(tmp_path):
    def wrong():
        time.sleep(0.02)
        raise InputError("no such table", hint="use another table")

    def interrupted():
        raise KeyboardInterrupt

    steps = [Step(f.__name__, (), tmp_path / "log", function=f) for f in (wrong, interrupted)]
    results = FakeStudy(tmp_path).run(steps)
    assert results["wrong"] == StepResult("failed", "no such table")
    assert results["wrong"].exception.hint == "use another table"
    assert results["wrong"].exit_code == 2
    assert results["wrong"].seconds >= 0.02
    assert results["interrupted"].state == "not run"
    assert "Ctrl-C" in results["interrupted"].reason
    assert results["interrupted"].exit_code == 130


def test_two_jobs_run_two_steps_at_the_same_time(tmp_path):
    both = threading.Barrier(2, timeout=60)

    def during(step, check):
        assert check() is None
        if step.name == "train":
            both.wait()  # fails unless the other step is running as well
        return 0

    study = FakeStudy(tmp_path, during)
    results = study.run(jobs=2)
    assert {result.state for result in results.values()} == {"done"}
    assert study.max_running == 2
    assert study.started[0] == "features: embed"
    for run in ("a", "b"):
        assert study.started.index(f"{run}: train") < study.started.index(f"{run}: evaluate")


def test_signal_is_forwarded_to_running_steps_and_no_step_is_started(tmp_path):
    received, both = [], threading.Barrier(2, timeout=60)

    def during(step, check):
        if step.name != "train":
            return 0
        if both.wait() == 0:
            signal.raise_signal(signal.SIGINT)
        while (number := check()) is None:
            pass
        received.append((step.key, number))
        return 128 + number

    study = FakeStudy(tmp_path, during)
    with StopSignalHandler(lambda text: None) as stop:  # noqa: ARG005
        results = study.run(jobs=2, signal_number=stop.signal_number)
    assert sorted(received) == [("a: train", signal.SIGINT), ("b: train", signal.SIGINT)]
    assert results["a: train"] == results["b: train"]
    assert results["a: train"].state == "not run"
    assert "signal" in results["a: train"].reason
    assert results["a: evaluate"] == StepResult("not run")
    assert study.started[1:] in (["a: train", "b: train"], ["b: train", "a: train"])


def test_step_that_succeeds_after_a_signal_is_done_and_the_last(tmp_path):
    def during(step, check):  # noqa: ARG001
        signal.raise_signal(signal.SIGTERM)
        return 0

    study = FakeStudy(tmp_path, during)
    with StopSignalHandler(lambda text: None) as stop:  # noqa: ARG005
        results = study.run(signal_number=stop.signal_number)
    assert [result.state for result in results.values()] == ["done", *["not run"] * 4]
    assert study.started == ["features: embed"]


def test_second_signal_stops_a_step_in_the_main_thread(tmp_path, monkeypatch):
    monkeypatch.setattr("tapfm.runtime.interrupts._DUPLICATE_SIGNAL_WINDOW_S", -1)

    def during(step, check):  # noqa: ARG001
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        raise AssertionError("the step was not stopped")

    study = FakeStudy(tmp_path, during)
    with StopSignalHandler(lambda text: None) as stop, pytest.raises(SystemExit) as stopped:  # noqa: ARG005
        study.run(signal_number=stop.signal_number)
    assert stopped.value.code == 130
    assert {result.state for result in study.recorded[-1].values()} == {"not run"}


def test_second_signal_stops_steps_in_threads(tmp_path):
    stopped = []

    def during(step, check):
        if step.name == "embed":
            return 0
        try:
            while True:
                check()
        except SystemExit:
            stopped.append(step.key)
            raise

    study = FakeStudy(tmp_path, during)

    def signal_number():
        """Raise SystemExit in the main thread, as a second signal does, when both runs are running."""
        if threading.current_thread() is threading.main_thread() and len(study.running) == 2:
            raise SystemExit(130)

    with pytest.raises(SystemExit):
        study.run(jobs=2, signal_number=signal_number)
    assert sorted(stopped) == ["a: train", "b: train"]


def make_bars(study, output, done=(), **console):
    steps = study.steps()
    return steps, StepBars(Console(file=output, width=200, **console), steps, done, groups=("a", "b"), noun="run")


def test_step_bars_print_lines_without_a_terminal(tmp_path, monkeypatch):
    monkeypatch.setattr("tapfm.runtime.step_bars._UPDATE_INTERVAL_S", 0)
    monkeypatch.setattr("tapfm.runtime.step_bars.PRINT_INTERVAL_S", -1)
    output = io.StringIO()
    steps, bars = make_bars(FakeStudy(tmp_path), output, done=["b: train", "b: evaluate"])
    training = Step("train", (), tmp_path / "log", "a", history_file=tmp_path / "history.jsonl", epochs=3)
    (tmp_path / "history.jsonl").write_text("{}\n")
    with bars:
        bars.show_start(steps[0])
        bars.show_result(steps[0], StepResult("done"))
        bars.show_start(training)
        bars.show_progress()
        bars.show_result(training, StepResult("failed", "out of [memory]"))
        bars.show_result(steps[3], StepResult("not run", "needs a: train"))
        bars.show_start(steps[0])
    assert output.getvalue().splitlines() == [
        "1 of 2 runs already done.",
        "1 of 2 runs done; starting features: embed",
        "1 of 2 runs done; starting a: train",
        "a: train, epoch 2/3",
        "failed a: train: out of [memory]",
        "2 of 2 runs done; starting features: embed",
    ]


def test_step_bars_show_bars_in_a_terminal(tmp_path):
    output = io.StringIO()
    steps, bars = make_bars(FakeStudy(tmp_path), output, force_terminal=True)
    with bars:
        bars.show_start(steps[1])
    shown = output.getvalue()
    assert "runs" in shown
    assert "0/2" in shown
    assert "a: train" in shown
