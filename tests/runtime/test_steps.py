"""Steps: finished ones are kept, each waits for what it needs, a failure costs what needs it, a signal stops all."""

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


class Display:
    """Notes which steps are shown."""

    def __init__(self):
        self.started, self.finished = [], []

    def start(self, step):
        assert threading.current_thread() is threading.main_thread()
        self.started.append(step.key)

    def update(self):
        assert threading.current_thread() is threading.main_thread()

    def finish(self, step, result):
        assert threading.current_thread() is threading.main_thread()
        self.finished.append((step.key, result.state))


class Lab:
    """Two runs that need the same features, and an evaluation of each. Commands are calls of `during`."""

    def __init__(self, folder, during=lambda step, check: 0):  # noqa: ARG005
        self.folder, self.during, self.display = folder, during, Display()
        self.began, self.running, self.most, self.recorded = [], set(), 0, []
        self._lock = threading.Lock()

    def step(self, group, name, *needs, **more):
        log = self.folder / "logs" / f"{group}-{name}"
        return Step(name, (name, group), log, group, files=(self.folder / f"{group} {name}",), needs=needs, **more)

    def steps(self):
        return [
            self.step("features", "embed"),
            *(self.step(run, "train", "features: embed") for run in ("a", "b")),
            *(self.step(run, "evaluate", f"{run}: train") for run in ("a", "b")),
        ]

    def command(self, step, check):
        with self._lock:
            self.began.append(step.key)
            self.running.add(step.key)
            self.most = max(self.most, len(self.running))
        step.log.parent.mkdir(parents=True, exist_ok=True)
        code = self.during(step, check)
        step.log.write_text("error: it is broken\n" if code else "")
        with self._lock:
            self.running.remove(step.key)
        if code == 0:
            step.files[0].touch()
        return code

    def run(self, steps=None, done=(), **options):
        runner = StepRunner(
            self.steps() if steps is None else steps,
            self.command,
            record=lambda results: self.recorded.append(dict(results)),
            display=self.display,
            **options,
        )
        return runner.run(done)


def test_steps_run_in_their_order_and_each_result_is_recorded_as_it_comes(tmp_path):
    lab = Lab(tmp_path)
    results = lab.run()
    keys = ["features: embed", "a: train", "b: train", "a: evaluate", "b: evaluate"]
    assert lab.began == lab.display.started == list(results) == keys
    assert lab.most == 1
    assert [[result.state for result in each.values()].count("done") for each in lab.recorded] == [0, 1, 2, 3, 4, 5]
    assert lab.recorded[-1] == results


def test_done_steps_are_kept(tmp_path):
    lab = Lab(tmp_path)
    results = lab.run(done=["features: embed", "a: train"])
    assert lab.began == ["b: train", "a: evaluate", "b: evaluate"]
    assert {result.state for result in results.values()} == {"done"}


@pytest.mark.parametrize("jobs", [1, 2])
def test_a_failure_costs_what_needs_it_and_no_more(tmp_path, jobs):
    lab = Lab(tmp_path, lambda step, check: 2 if step.key == "a: train" else 0)  # noqa: ARG005
    results = lab.run(jobs=jobs)
    assert results["a: train"] == StepResult("failed", "it is broken")
    assert results["a: train"].code == 2
    assert results["a: evaluate"] == StepResult("not run", "needs a: train")
    assert results["b: evaluate"].state == "done"
    assert "a: evaluate" not in lab.display.started
    assert ("a: evaluate", "not run") in lab.display.finished


def test_where_each_step_needs_the_one_before_a_failure_ends_the_sequence(tmp_path):
    lab = Lab(tmp_path, lambda step, check: 3 if step.group == "b" else 0)  # noqa: ARG005
    results = lab.run([lab.step("a", "x"), lab.step("b", "x", "a: x"), lab.step("c", "x", "b: x")])
    assert [result.state for result in results.values()] == ["done", "failed", "not run"]
    assert lab.began == ["a: x", "b: x"]


def test_a_step_with_a_problem_or_an_unknown_need_does_not_run(tmp_path):
    lab = Lab(tmp_path)
    results = lab.run([lab.step("a", "train", problem="lambda is 2"), lab.step("b", "evaluate", "b: train")])
    assert results["a: train"] == StepResult("failed", "lambda is 2")
    assert results["b: evaluate"] == StepResult("not run", "needs b: train")
    assert not lab.began


def test_a_command_that_wrote_nothing_has_failed(tmp_path):
    lab = Lab(tmp_path)
    step = lab.step("a", "train", check_done=lambda: False)
    assert "is not there" in lab.run([step])["a: train"].reason


def test_a_function_is_called_after_what_comes_before_it(tmp_path):
    lab, calls = Lab(tmp_path), []
    step = Step("f", (), tmp_path / "f.log", before=lambda: calls.append("before"), function=lambda: calls.append("f"))
    assert lab.run([step]) == {"f": StepResult("done")}
    assert calls == ["before", "f"]


def test_an_error_or_ctrl_c_in_this_process_is_a_result_with_its_seconds(tmp_path):
    def wrong():
        time.sleep(0.02)
        raise InputError("no such table", hint="give another")

    def interrupted():
        raise KeyboardInterrupt

    steps = [Step(f.__name__, (), tmp_path / "log", function=f) for f in (wrong, interrupted)]
    results = Lab(tmp_path).run(steps)
    assert results["wrong"] == StepResult("failed", "no such table")
    assert results["wrong"].error.hint == "give another"
    assert results["wrong"].code == 2
    assert results["wrong"].seconds >= 0.02
    assert results["interrupted"] == StepResult("not run", "stopped")
    assert results["interrupted"].code == 130


def test_two_steps_run_at_the_same_time_after_what_they_need(tmp_path):
    both = threading.Barrier(2, timeout=60)

    def during(step, check):
        assert check() is None
        if step.name == "train":
            both.wait()  # fails unless the other is running too
        return 0

    lab = Lab(tmp_path, during)
    results = lab.run(jobs=2)
    assert {result.state for result in results.values()} == {"done"}
    assert lab.most == 2
    assert lab.began[0] == "features: embed"
    for run in ("a", "b"):
        assert lab.began.index(f"{run}: train") < lab.began.index(f"{run}: evaluate")


def test_a_signal_reaches_all_that_run_and_nothing_new_is_started(tmp_path):
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

    lab = Lab(tmp_path, during)
    with StopSignalHandler(lambda text: None) as stop:  # noqa: ARG005
        results = lab.run(jobs=2, signal_number=stop.signal_number)
    assert sorted(received) == [("a: train", signal.SIGINT), ("b: train", signal.SIGINT)]
    assert results["a: train"] == results["b: train"] == StepResult("not run", "stopped")
    assert results["a: evaluate"] == StepResult("not run")
    assert lab.began[1:] in (["a: train", "b: train"], ["b: train", "a: train"])


def test_a_step_that_ends_well_after_a_signal_is_done_and_the_last(tmp_path):
    def during(step, check):  # noqa: ARG001
        signal.raise_signal(signal.SIGTERM)
        return 0

    lab = Lab(tmp_path, during)
    with StopSignalHandler(lambda text: None) as stop:  # noqa: ARG005
        results = lab.run(signal_number=stop.signal_number)
    assert [result.state for result in results.values()] == ["done", *["not run"] * 4]
    assert lab.began == ["features: embed"]


def test_a_second_signal_stops_what_runs_in_the_main_thread(tmp_path, monkeypatch):
    monkeypatch.setattr("tapfm.runtime.interrupts._DUPLICATE_SIGNAL_S", -1)

    def during(step, check):  # noqa: ARG001
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        raise AssertionError("it went on")

    lab = Lab(tmp_path, during)
    with StopSignalHandler(lambda text: None) as stop, pytest.raises(SystemExit) as stopped:  # noqa: ARG005
        lab.run(signal_number=stop.signal_number)
    assert stopped.value.code == 130
    assert {result.state for result in lab.recorded[-1].values()} == {"not run"}


def test_a_second_signal_stops_what_runs_in_threads(tmp_path):
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

    lab = Lab(tmp_path, during)

    def signal_number():
        """As signals do, end the main thread, once both runs are running."""
        if threading.current_thread() is threading.main_thread() and len(lab.running) == 2:
            raise SystemExit(130)

    with pytest.raises(SystemExit):
        lab.run(jobs=2, signal_number=signal_number)
    assert sorted(stopped) == ["a: train", "b: train"]


def bars_of(lab, output, done=(), **console):
    steps = lab.steps()
    return steps, StepBars(Console(file=output, width=200, **console), steps, done, groups=("a", "b"), noun="run")


def test_lines_where_there_is_no_terminal(tmp_path, monkeypatch):
    monkeypatch.setattr("tapfm.runtime.step_bars._UPDATE_EVERY_S", 0)
    monkeypatch.setattr("tapfm.runtime.step_bars.PRINT_EVERY_S", -1)
    output = io.StringIO()
    steps, bars = bars_of(Lab(tmp_path), output, done=["b: train", "b: evaluate"])
    training = Step("train", (), tmp_path / "log", "a", history=tmp_path / "history.jsonl", epochs=3)
    (tmp_path / "history.jsonl").write_text("{}\n")
    with bars:
        bars.start(steps[0])
        bars.finish(steps[0], StepResult("done"))
        bars.start(training)
        bars.update()
        bars.finish(training, StepResult("failed", "out of [memory]"))
        bars.finish(steps[3], StepResult("not run", "needs a: train"))
        bars.start(steps[0])
    assert output.getvalue().splitlines() == [
        "1 of 2 runs done already.",
        "1 of 2 runs done; features: embed",
        "1 of 2 runs done; a: train",
        "a: train, epoch 2/3",
        "failed a: train: out of [memory]",
        "2 of 2 runs done; features: embed",
    ]


def test_bars_at_a_terminal(tmp_path):
    output = io.StringIO()
    steps, bars = bars_of(Lab(tmp_path), output, force_terminal=True)
    with bars:
        bars.start(steps[1])
    shown = output.getvalue()
    assert "runs" in shown
    assert "0/2" in shown
    assert "a: train" in shown
