"""`tapfm study`: all runs of a comparison one after another, each in a process of its own; what fails is told."""

from __future__ import annotations

import csv
import io
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Literal, Protocol

from rich.console import Console

from tapfm.cohort.labels import read_labels
from tapfm.cohort.manifest import read_cohort
from tapfm.config.settings import RunConfig
from tapfm.config.study import SlidesSection, StudyConfig, study_text
from tapfm.config.text import toml_text
from tapfm.encoders.catalog import encoder_card
from tapfm.errors import InputError, RunError, SettingError
from tapfm.runtime.commands import LOOK_EVERY_S, reason_of, run_child
from tapfm.runtime.files import write_atomically
from tapfm.runtime.interrupts import StopRequests
from tapfm.runtime.messages import command, counted
from tapfm.runtime.output_folder import locked, remove_unfinished
from tapfm.runtime.workers import available_cores
from tapfm.study.display import StudyWatcher
from tapfm.study.folder import StudyFolder
from tapfm.study.runs import PlannedRun, chosen, run_config, run_tables, runs_of
from tapfm.study.steps import Step, steps_of, write_ensembles

State = Literal["done", "failed", "not run"]
SHOWN = 10
MOST_THREADS = 4  # of an encoder that comes with tapfm
MADE_BEFORE = {
    "painted",
    "tiles",
    "probe-tiles",
    "logs",
    "status.csv",
}  # what --scale mini makes before the study begins


@dataclass(frozen=True)
class Ended:
    """What became of a step."""

    state: State
    reason: str = ""


@dataclass(frozen=True)
class Outcome:
    """What became of a study."""

    folder: Path
    ended: Mapping[str, Ended]  # by key of step
    stopped_by: int | None = None  # the number of a signal

    @property
    def failed(self) -> dict[str, str]:
        """Steps that failed, and why."""
        return {key: each.reason for key, each in self.ended.items() if each.state == "failed"}


class Start(Protocol):
    """Runs a command and gives its exit code."""

    def __call__(self, words: Sequence[str], log: Path, look: Callable[[], int | None]) -> int:
        """Run it; `look` gives the number of a signal to pass on."""


@dataclass(frozen=True)
class Planned:
    """What a study comes to: its runs, their configurations, and which cannot be."""

    runs: list[PlannedRun]
    configs: dict[str, RunConfig]  # by name of run
    problems: dict[str, str]


def plan(study: StudyConfig, folder: StudyFolder, only: Sequence[str] = ()) -> Planned:
    """Resolve every run; a study of which no run is possible is refused."""
    runs = chosen(runs_of(study), only)
    configs: dict[str, RunConfig] = {}
    problems: dict[str, str] = {}
    for run in runs:
        try:
            configs[run.name] = run_config(study, run, folder.features(run.method.encoder))
        except InputError as error:
            problems[run.name] = error.message
    if not configs:
        raise SettingError(
            f"No run of {study.name} is possible. {next(iter(problems.values()))}",
            hint="All settings of a run, with what they mean: tapfm config",
        )
    return Planned(runs, configs, problems)


def conduct(
    study: StudyConfig,
    out: Path,
    *,
    resume: bool,
    only: Sequence[str] = (),
    console: Console,
    go_on: str | None = None,
    start: Start | None = None,
    jobs: int = 1,
) -> Outcome:
    """Do what is left to do. Runs that are finished are kept; failures cost what depends on them, and no more."""
    out = out.absolute()  # what is written into configurations and status.csv means the same from anywhere
    folder = StudyFolder(out)
    planned = plan(study, folder, only)
    check_slides(study)
    with locked(out, "tapfm study"), StopRequests(console.print) as stop:
        remove_unfinished(out)
        refuse_wrong_start(study, folder, planned, resume=resume, go_on=go_on or resume_command(out))
        write_atomically(folder.study, study_text(study.as_tables()).encode())
        for run in planned.runs:
            tables = run_tables(study, run, folder.features(run.method.encoder))
            write_atomically(folder.config(run), toml_text(tables).encode())
        for name, problem in planned.problems.items():
            console.print(f"{name} is left out. {problem}", markup=False, soft_wrap=True)
        steps = steps_of(study, folder, planned.runs, planned.configs, planned.problems)
        begin = start or partial(run_child, environment=threads_for(study, jobs))
        ended = do_steps(steps, folder, stop, console, begin, jobs=jobs)
        write_ensembles(study, folder)
        return Outcome(out, ended, stop.asked())


def threads_for(study: StudyConfig, jobs: int = 1) -> dict[str, str]:
    """Give small encoders few threads, which sleep while they wait.

    More of them mostly wait for each other; and where others use the cores too, those that wait by spinning take much
    longer.
    """
    small = all(encoder_card(name).packaged for name in study.encoders)
    threads = str(max(1, min(MOST_THREADS, available_cores() // jobs)))
    return {"OMP_NUM_THREADS": threads, "OMP_WAIT_POLICY": "passive"} if small else {}


def resume_command(folder: Path) -> str:
    """Say what to type to go on; the folder has its own study."""
    return command("study", folder / "study.toml", "--out", folder, "--resume")


def check_slides(study: StudyConfig) -> None:
    """Find what would make every run fail: tables, targets, tiles that are not there."""
    read_labels(read_cohort(study.cohort.table, study.cohort.slides, must_exist=False), study.targets)
    check_tiles(study.cohort)
    if study.external is not None:
        read_cohort(study.external.table, study.external.slides, must_exist=False)
        check_tiles(study.external)
    if study.probe is not None and not study.probe.tiles.is_dir():
        raise InputError(f"There is no folder {study.probe.tiles}.", hint="[probe] tiles: a folder for each class.")


def check_tiles(slides: SlidesSection) -> None:
    """Refuse to begin without tiles."""
    if not slides.tiles.is_dir():
        where = [] if slides.slides is None else ["--slides", str(slides.slides)]
        make = command("tile", slides.table, *where, "--out", slides.tiles)
        raise InputError(f"There is no folder {slides.tiles}.", hint=f"Make it: {make}")


def refuse_wrong_start(study: StudyConfig, folder: StudyFolder, planned: Planned, *, resume: bool, go_on: str) -> None:
    """Keep a study from being written over, or gone on with as another."""
    if not folder.study.exists():
        names = [path.name for path in folder.path.iterdir()]
        if others := [name for name in names if not name.startswith(".") and name not in MADE_BEFORE]:
            raise RunError(
                f"{folder.path} has other files in it, such as {others[0]}.",
                hint="Give a new folder with --out, for example studies/first.",
            )
        return
    if not resume:
        raise RunError(f"{folder.path} holds a study.", hint=f"Go on with it: {go_on}\nOr begin another with --out.")
    changed = {
        name: folder.changes(run, planned.configs[run.name])
        for run in planned.runs
        if (name := run.name) in planned.configs
    }
    changed = {name: lines for name, lines in changed.items() if lines}
    if changed:
        lines = [f"{name}: {'; '.join(each)}" for name, each in list(changed.items())[:SHOWN]]
        if len(changed) > SHOWN:
            lines.append(f"... and {counted(len(changed) - SHOWN, 'run')} more")
        raise RunError(
            f"{study.name} has changed for runs that were begun:\n  " + "\n  ".join(lines),
            hint="Put the settings back, add another variant, or begin anew with another --out.",
        )


def do_steps(
    steps: Sequence[Step],
    folder: StudyFolder,
    stop: StopRequests,
    console: Console,
    start: Start | None = None,
    *,
    jobs: int = 1,
) -> dict[str, Ended]:
    """Do one step after another, or some side by side, until all are done or a signal comes."""
    ended = {step.key: Ended("done") if step.done() else Ended("not run") for step in steps}
    for step in steps:  # features that nobody will read again need not be there
        users = [each for each in steps if step.key in each.needs]
        if step.what == "embed" and all(ended[each.key].state == "done" for each in users):
            ended[step.key] = Ended("done")
    # what is counted: runs, with all that is done to each; where there are none, whatever is prepared
    runs = [step.of for step in steps if step.what == "train"]
    left = {
        part: {step.key for step in steps if step.of == part} for part in dict.fromkeys(runs or (s.of for s in steps))
    }
    for part in left:
        left[part] -= {key for key, each in ended.items() if each.state == "done"}
    complete = sum(not keys for keys in left.values())
    noun = "run" if runs else "part"
    if complete:
        console.print(f"{complete} of {counted(len(left), noun)} done already.")
    write_status(folder, steps, ended)
    with closing(StudyWatcher(console, f"{noun}s", len(left), complete)) as watcher:

        def settle(step: Step, found: Ended) -> None:
            ended[step.key] = found
            if found.state == "failed":
                watcher.say(f"failed {step.key}: {found.reason}")
            write_status(folder, steps, ended)
            of_part = left.get(step.of, set())
            of_part.discard(step.key)
            if step.of in left and not of_part and stop.asked() is None:
                watcher.finished()

        to_do = [step for step in steps if ended[step.key].state != "done"]
        work = Work(ended, watcher, stop, start or run_child)
        if jobs > 1:
            side_by_side(to_do, work, settle, jobs)
            return ended
        for step in to_do:
            if stop.asked() is not None:
                break
            settle(step, do_step(step, work))
    return ended


@dataclass(frozen=True)
class Work:
    """What every step of a study shares."""

    ended: Mapping[str, Ended]
    watcher: StudyWatcher
    stop: StopRequests
    start: Start
    given_up: threading.Event = field(default_factory=threading.Event)

    def look(self) -> int | None:
        """Give the number of a signal to pass on, if one came; ends what is at work when all is given up."""
        if self.given_up.is_set():
            raise SystemExit
        if threading.current_thread() is threading.main_thread():
            self.watcher.look()
        return self.stop.asked()


def side_by_side(steps: Sequence[Step], work: Work, settle: Callable[[Step, Ended], None], jobs: int) -> None:
    """Do steps as soon as what they need is settled, so many at a time."""
    waiting, at_work = list(steps), dict[Future[Ended], Step]()
    with ThreadPoolExecutor(jobs) as pool:
        try:
            while at_work or (waiting and work.stop.asked() is None):
                unsettled = {step.key for step in (*waiting, *at_work.values())}
                ready = [step for step in waiting if not unsettled & set(step.needs)]
                for step in ready[: jobs - len(at_work)] if work.stop.asked() is None else []:
                    waiting.remove(step)
                    at_work[pool.submit(do_step, step, work)] = step
                done, _ = wait(at_work, LOOK_EVERY_S, FIRST_COMPLETED)
                work.look()
                for future in done:
                    settle(at_work.pop(future), future.result())
        except BaseException:  # a second signal: the pool waits for its threads, and they for their commands
            work.given_up.set()
            raise


def do_step(step: Step, work: Work) -> Ended:
    """Run one command, if what it needs is there."""
    if step.problem:
        return Ended("failed", step.problem)
    if lacking := [key for key in step.needs if work.ended.get(key, Ended("not run")).state != "done"]:
        return Ended("not run", f"needs {lacking[0]}")
    if step.before is not None:
        step.before()
    since_bytes = step.log.stat().st_size if step.log.exists() else 0
    with work.watcher.watching(step.key, step.history, step.epochs):
        code = work.start(step.words, step.log, work.look)
    if code == 0 and step.done():
        return Ended("done")
    if work.stop.asked() is not None:
        return Ended("not run", "stopped")
    if code == 0:
        return Ended("failed", "it ended without an error, but what it should have written is not there")
    return Ended("failed", reason_of(code, step.log, since_bytes))


def write_status(folder: StudyFolder, steps: Sequence[Step], ended: Mapping[str, Ended]) -> None:
    """Write status.csv: what became of each step, and what to type to repeat it. Other runs' lines are kept."""
    rows = read_status(folder)
    for step in steps:
        each = ended[step.key]
        log = step.log.relative_to(folder.path).as_posix()
        rows[step.of, step.what] = [step.of, step.what, each.state, each.reason, command(*step.words), log]
    text = io.StringIO(newline="")
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["run", "step", "state", "reason", "command", "log"])
    writer.writerows(rows.values())
    write_atomically(folder.status, text.getvalue().encode())


def read_status(folder: StudyFolder) -> dict[tuple[str, str], list[str]]:
    """Read status.csv, by run and step."""
    if not folder.status.exists():
        return {}
    with folder.status.open(newline="", encoding="utf-8") as file:
        return {(row[0], row[1]): row for row in list(csv.reader(file))[1:]}


def with_machine(study: StudyConfig, **options: str | int | None) -> StudyConfig:
    """Lay what was typed about the machine over the study's settings."""
    given = {name: value for name, value in options.items() if value is not None}
    machine = dict(study.settings.get("machine", {})) | given
    return study.model_copy(update={"settings": dict(study.settings) | {"machine": machine}}) if given else study
