"""Run a study: each command in a child process, one after another or several at the same time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from rich.console import Console

from tapfm.config.study import StudyConfig, format_study
from tapfm.config.text import format_toml
from tapfm.encoders.catalog import encoder_card
from tapfm.runtime.commands import run_child_command
from tapfm.runtime.files import write_atomically
from tapfm.runtime.interrupts import StopSignalHandler
from tapfm.runtime.messages import format_command
from tapfm.runtime.output_folder import lock_folder, remove_unfinished
from tapfm.runtime.step_bars import StepBars
from tapfm.runtime.steps import Step, StepResult, StepRunner
from tapfm.runtime.workers import available_cores
from tapfm.study.folder import StudyFolder
from tapfm.study.plan import check_folder, check_slides, plan_study
from tapfm.study.runs import run_tables
from tapfm.study.status import write_status
from tapfm.study.steps import finished_steps, study_steps, write_ensembles

_MAX_THREADS = 4  # for encoders that come with tapfm
RunCommand = Callable[[Sequence[str], Path, Callable[[], int | None]], int]  # as `run_child_command`


@dataclass(frozen=True)
class StudyStepResults:
    """How the steps of a study ended, by their keys."""

    folder: Path
    steps: Mapping[str, StepResult]
    stopped_by: int | None = None  # number of a signal

    @property
    def failed(self) -> dict[str, str]:
        """Failed steps and the reason of each."""
        return {key: result.reason for key, result in self.steps.items() if result.state == "failed"}


def run_study_steps(
    study: StudyConfig,
    out: Path,
    only: Sequence[str],
    *,
    resume: bool,
    resume_hint: str,
    console: Console,
    jobs: int = 1,
) -> StudyStepResults:
    """Run the steps of a study that are not done yet. A failure costs only the steps that need the failed one."""
    out = out.absolute()  # paths in configurations and status.csv are valid from any folder
    folder = StudyFolder(out)
    plan = plan_study(study, folder, only)
    check_slides(study)
    with lock_folder(out, "tapfm study"), StopSignalHandler(console.print) as stop:
        remove_unfinished(out)
        check_folder(study, folder, plan, resume=resume, resume_hint=resume_hint)
        write_atomically(folder.study, format_study(study.as_tables()).encode())
        for run in plan.runs:
            tables = run_tables(study, run, folder.features(run.method.encoder))
            write_atomically(folder.config(run), format_toml(tables).encode())
        for name, problem in plan.problems.items():
            console.print(f"{name} is left out. {problem}", markup=False, soft_wrap=True)
        run_command = partial(run_child_command, environment=_thread_settings(study, jobs))
        results = run_steps(study_steps(study, folder, plan), folder, stop, console, run_command, jobs=jobs)
        write_ensembles(study, folder)
        return StudyStepResults(out, results, stop.signal_number())


def run_steps(
    steps: Sequence[Step],
    folder: StudyFolder,
    stop: StopSignalHandler,
    console: Console,
    run_command: RunCommand = run_child_command,
    *,
    jobs: int = 1,
) -> dict[str, StepResult]:
    """Run steps in the folder of a study, with progress bars and status.csv; return their results by key."""
    runs = [step.group for step in steps if step.name == "train"]
    groups = dict.fromkeys(runs or [step.group for step in steps])
    done = finished_steps(steps)
    with StepBars(console, steps, done, groups=groups, noun="run" if runs else "part") as bars:
        return StepRunner(
            steps,
            lambda step, check: run_command(step.arguments, step.log, check),
            record=partial(write_status, folder, steps),
            display=bars,
            signal_number=stop.signal_number,
            jobs=jobs,
        ).run(done)


def _thread_settings(study: StudyConfig, jobs: int = 1) -> dict[str, str]:
    """Return environment variables that give small encoders few threads, which sleep while they wait.

    With more threads they mostly wait for each other, and threads that wait by spinning slow down other processes.
    """
    small = all(encoder_card(name).packaged for name in study.encoders)
    threads = str(max(1, min(_MAX_THREADS, available_cores() // jobs)))
    return {"OMP_NUM_THREADS": threads, "OMP_WAIT_POLICY": "passive"} if small else {}


def resume_command(folder: Path) -> str:
    """Return the command that resumes the study in a folder."""
    return format_command("study", folder / "study.toml", "--out", folder, "--resume")
