"""Run the steps of a study. Each command runs in a child process, and several can run at the same time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from rich.console import Console

from tapfm.config.study import StudyConfig, format_study
from tapfm.config.text import format_toml
from tapfm.encoders.catalog import find_encoder_card
from tapfm.runtime.commands import run_child_command
from tapfm.runtime.files import write_atomically
from tapfm.runtime.interrupts import StopSignalHandler
from tapfm.runtime.messages import format_command
from tapfm.runtime.output_folder import lock_folder, remove_unfinished_files
from tapfm.runtime.step_bars import StepBars
from tapfm.runtime.steps import Step, StepResult, StepRunner
from tapfm.runtime.workers import available_cores
from tapfm.study.folder import StudyFolder
from tapfm.study.runs import build_run_tables
from tapfm.study.status import write_status
from tapfm.study.steps import find_finished_steps, list_study_steps, write_fold_ensembles
from tapfm.study.study_plan import check_folder, check_input_files, plan_study

_MAX_THREADS = 4  # for small encoders
RunCommand = Callable[[Sequence[str], Path, Callable[[], int | None]], int]  # see `run_child_command`


@dataclass(frozen=True)
class StudyStepResults:
    """Results of the steps of a study, by step key."""

    folder: Path
    steps: Mapping[str, StepResult]
    stopped_by: int | None = None  # signal number

    @property
    def failed(self) -> dict[str, str]:
        """Reason for each failed step, by step key."""
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
    """Run the steps of a study that are not done yet. If a step fails, only the steps that need it are skipped."""
    out = out.absolute()  # so that paths in RUN.toml and status.csv do not depend on the current folder
    folder = StudyFolder(out)
    plan = plan_study(study, folder, only)
    check_input_files(study)
    with lock_folder(out, "tapfm study"), StopSignalHandler(console.print) as stop:
        remove_unfinished_files(out)
        check_folder(study, folder, plan, resume=resume, resume_hint=resume_hint)
        write_atomically(folder.study, format_study(study.as_tables()).encode())
        for run in plan.runs:
            tables = build_run_tables(study, run, folder.features(run.model.encoder))
            write_atomically(folder.config(run), format_toml(tables).encode())
        for name, problem in plan.problems.items():
            console.print(f"Skipping the run {name}: {problem}", markup=False, soft_wrap=True)
        run_command = partial(run_child_command, environment=_thread_settings(study, jobs))
        results = run_steps(list_study_steps(study, folder, plan), folder, stop, console, run_command, jobs=jobs)
        write_fold_ensembles(study, folder)
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
    """Run steps with progress bars, write status.csv, and return the results by step key."""
    runs = [step.group for step in steps if step.name == "train"]
    groups = dict.fromkeys(runs or [step.group for step in steps])
    done = find_finished_steps(steps)
    with StepBars(console, steps, done, groups=groups, noun="run" if runs else "cohort") as bars:
        return StepRunner(
            steps,
            lambda step, check: run_command(step.arguments, step.log, check),
            save_results=partial(write_status, folder, steps),
            display=bars,
            signal_number=stop.signal_number,
            jobs=jobs,
        ).run(done)


def _thread_settings(study: StudyConfig, jobs: int = 1) -> dict[str, str]:
    """Return environment variables that limit the OpenMP threads of small encoders; empty for other encoders.

    With more threads, the threads of a small encoder mostly wait for each other. Waiting threads must not spin, because
    this slows down other processes.
    """
    small = all(find_encoder_card(name).packaged for name in study.encoders)
    threads = str(max(1, min(_MAX_THREADS, available_cores() // jobs)))
    return {"OMP_NUM_THREADS": threads, "OMP_WAIT_POLICY": "passive"} if small else {}


def resume_command(folder: Path) -> str:
    """Return the `tapfm study` command that resumes the study in a folder."""
    return format_command("study", folder / "study.toml", "--out", folder, "--resume")
