"""Steps of a study side by side: each waits for what it needs, a failure costs what needs it, a signal stops all."""

import io
import signal
import threading

import pytest
from rich.console import Console

from tapfm.config.study import load_study
from tapfm.runtime.interrupts import StopRequests
from tapfm.study import runner as study_runner
from tapfm.study.display import StudyWatcher
from tapfm.study.folder import StudyFolder
from tapfm.study.runner import Ended, do_steps, read_status, threads_for
from tapfm.study.steps import Step


class Commands:
    """Takes the place of processes: notes what is at work together; `during` is called while a command is."""

    def __init__(self, folder, during):
        self.folder, self.during = folder, during
        self.began, self.done, self.at_work, self.most = [], set(), set(), 0
        self._gate = threading.Lock()

    def __call__(self, words, log, look):
        log.parent.mkdir(parents=True, exist_ok=True)
        with self._gate:
            self.began.append(words)
            self.at_work.add(words)
            self.most = max(self.most, len(self.at_work))
        code = self.during(words, look)
        log.write_text("error: it is broken\n" if code else "")
        with self._gate:
            self.at_work.remove(words)
            if code == 0:
                self.done.add(words)
        return code

    def step(self, of, what, *needs):
        words = (what, of)
        return Step(of, what, words, lambda: words in self.done, self.folder / "logs" / f"{of}-{what}", needs)

    def steps(self):
        """Features that two runs need, both runs, an evaluation of each."""
        return [
            self.step("features", "embed"),
            *(self.step(run, "train", "features: embed") for run in ("a", "b")),
            *(self.step(run, "evaluate test", f"{run}: train") for run in ("a", "b")),
        ]

    def run(self, **options):
        said = io.StringIO()
        with StopRequests(lambda text: None) as stop:  # noqa: ARG005
            console = Console(file=said, width=200)
            return do_steps(self.steps(), StudyFolder(self.folder), stop, console, self, **options), said.getvalue()


def test_two_runs_are_at_work_at_one_time_after_what_they_need(tmp_path):
    both = threading.Barrier(2, timeout=60)

    def during(words, look):
        assert look() is None
        if words[0] == "train":
            both.wait()  # fails unless the other is at work too
        return 0

    commands = Commands(tmp_path, during)
    ended, said = commands.run(jobs=2)
    assert {each.state for each in ended.values()} == {"done"}
    assert commands.most == 2
    assert commands.began[0] == ("embed", "features")
    for run in ("a", "b"):
        assert commands.began.index(("train", run)) < commands.began.index(("evaluate test", run))
    assert [row[2] for row in read_status(StudyFolder(tmp_path)).values()] == ["done"] * 5
    assert "0 of 2 runs done; features: embed" in said


def test_a_failure_costs_what_needs_it_and_no_more(tmp_path):
    commands = Commands(tmp_path, lambda words, look: 2 if words == ("train", "a") else 0)  # noqa: ARG005
    ended, said = commands.run(jobs=2)
    assert ended["a: train"] == Ended("failed", "it is broken")
    assert ended["a: evaluate test"] == Ended("not run", "needs a: train")
    assert ended["b: evaluate test"].state == "done"
    assert "failed a: train: it is broken" in said


def test_a_signal_reaches_both_and_nothing_new_is_begun(tmp_path):
    heard, both = [], threading.Barrier(2, timeout=60)

    def during(words, look):
        if words[0] != "train":
            return 0
        if both.wait() == 0:
            signal.raise_signal(signal.SIGINT)
        while (number := look()) is None:
            pass
        heard.append((words, number))
        return 128 + number

    commands = Commands(tmp_path, during)
    ended, _ = commands.run(jobs=2)
    assert sorted(heard) == [(("train", run), signal.SIGINT) for run in ("a", "b")]
    assert ended["a: train"] == ended["b: train"] == Ended("not run", "stopped")
    assert not [words for words in commands.began if words[0].startswith("evaluate")]


def test_a_second_signal_gives_up_what_is_at_work(tmp_path):
    given_up = []

    def during(words, look):
        if words[0] == "embed":
            return 0
        try:
            while True:
                look()
        except SystemExit:
            given_up.append(words)
            raise

    commands = Commands(tmp_path, during)

    class InAHurry:
        """Signals end the main thread, once both runs are at work."""

        def asked(self):
            if threading.current_thread() is threading.main_thread() and len(commands.at_work) == 2:
                raise SystemExit(130)

    with pytest.raises(SystemExit):
        do_steps(commands.steps(), StudyFolder(tmp_path), InAHurry(), Console(quiet=True), commands, jobs=2)
    assert sorted(given_up) == [("train", "a"), ("train", "b")]


def test_small_encoders_share_the_cores_and_sleep_while_they_wait(tmp_path, monkeypatch):
    (tmp_path / "study.toml").write_text(
        'name = "s"\ntargets = ["FGFR3"]\nencoders = ["tapfm-pocket"]\n[cohort]\ntable = "c.csv"\ntiles = "tiles"\n'
    )
    study = load_study(tmp_path / "study.toml")
    monkeypatch.setattr(study_runner, "available_cores", lambda: 6)
    assert threads_for(study) == {"OMP_NUM_THREADS": "4", "OMP_WAIT_POLICY": "passive"}
    assert threads_for(study, jobs=2)["OMP_NUM_THREADS"] == "3"
    assert threads_for(study, jobs=9)["OMP_NUM_THREADS"] == "1"
    large = study.model_copy(update={"encoders": ["tapfm-pocket", "uni"]})
    assert threads_for(large) == {}


def test_steps_may_come_and_go_while_they_are_looked_at(tmp_path, monkeypatch):
    monkeypatch.setattr("tapfm.study.display.COUNT_EVERY_S", 0)
    watcher = StudyWatcher(Console(file=io.StringIO(), force_terminal=True), "runs", 2, 0)
    failed = []

    def come_and_go(name):
        try:
            for number in range(300):
                with watcher.watching(f"{name}{number}", tmp_path / "history.jsonl", 3):
                    watcher.look()
        except Exception as error:
            failed.append(error)

    threads = [threading.Thread(target=come_and_go, args=(name,)) for name in "ab"]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        watcher.look()
    watcher.close()
    assert not failed
    assert not watcher.at_work
