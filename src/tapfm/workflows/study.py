"""`tapfm study`: every run and every evaluation of a comparison, and its tables."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from rich.console import Console

from tapfm.errors import InputError, Interrupted, RunError
from tapfm.runtime.messages import format_command, format_count
from tapfm.runtime.options import Argument, Option, command_function, options

if TYPE_CHECKING:
    from tapfm.config.study import StudyConfig
    from tapfm.results.table import Table
    from tapfm.study.preset_studies import PresetOptions

_SLIDES = ("cohort", "slides", "tiles", "external", "external_slides", "external_tiles", "probe_tiles")


@options
class StudyOptions:
    """Options of `tapfm study`."""

    study: Annotated[
        Path | Any | None,  # Any: a StudyConfig, whose module would slow down `tapfm --help`
        Argument("What is compared; or give a --preset.", metavar="STUDY.toml"),
    ] = None
    _: KW_ONLY
    out: Annotated[Path | None, Option("Folder of the study: runs, tables, plots.", metavar="DIR")] = None
    preset: Annotated[
        str | None,
        Option(
            "paper-table1, paper-table2, ablation-lambda, ablation-tiles, ablation-cosine, stability, layers, "
            "forgetting; all (mini).",
            metavar="NAME",
        ),
    ] = None
    scale: Annotated[str, Option("full; or mini: painted slides, a tiny encoder, on any computer.")] = "full"
    cohort: Annotated[Path | None, Option("With --preset: the cohort table, with a split.", metavar="CSV")] = None
    slides: Annotated[Path | None, Option("Folder of its slides.", metavar="DIR")] = None
    tiles: Annotated[Path | None, Option("Output folder of `tapfm tile` for it.", metavar="DIR", default="tiles")] = (
        None
    )
    external: Annotated[Path | None, Option("An external cohort, never trained on.", metavar="CSV")] = None
    external_slides: Annotated[Path | None, Option("Folder of its slides.", metavar="DIR")] = None
    external_tiles: Annotated[Path | None, Option("Its tiles.", metavar="DIR", default="tiles-external")] = None
    target: Annotated[tuple[str, ...], Option("Label column; repeatable.", metavar="NAME", default="the paper's")] = ()
    encoder: Annotated[
        tuple[str, ...], Option("One of `tapfm encoders`; repeatable.", metavar="NAME", default="the paper's")
    ] = ()
    seed: Annotated[tuple[int, ...], Option("Seed of a run of each method; repeatable.", metavar="N", at_least=0)] = ()
    fold: Annotated[tuple[int, ...], Option("Column fold_N of the table; repeatable.", metavar="N", at_least=0)] = ()
    probe_tiles: Annotated[Path | None, Option("For forgetting: a folder of tiles for each class.", metavar="DIR")] = (
        None
    )
    write: Annotated[
        Path | None, Option("Write the preset as STUDY.toml, to edit; nothing is run.", metavar="FILE")
    ] = None
    resume: Annotated[bool, Option("Resume the study in the folder.")] = False
    only: Annotated[tuple[str, ...], Option("Only these runs, such as 'uni/tapfm/*'; repeatable.", metavar="GLOB")] = ()
    list: Annotated[bool, Option("List the runs and the state of each; nothing is run.")] = False
    tables: Annotated[bool, Option("Only write the tables again, from the runs that are finished.")] = False
    device: Annotated[str | None, Option("auto, cpu, cuda, cuda:1, ...", default="as in STUDY.toml")] = None
    workers: Annotated[
        int | None,
        Option("Worker processes; 0: none, all work in one process.", default="as in STUDY.toml", at_least=0),
    ] = None
    allow_failures: Annotated[
        int | None,
        Option("Slides that may fail in a run or evaluation.", metavar="N", default="as in STUDY.toml", at_least=0),
    ] = None
    jobs: Annotated[
        int, Option("Runs at the same time: for small encoders without a GPU.", metavar="N", at_least=1)
    ] = 1

    @property
    def mini(self) -> bool:
        """Whether the slides are painted."""
        return self.scale == "mini"

    def check(self) -> None:
        """Refuse options that contradict each other, and what names no study."""
        if self.scale not in ("full", "mini"):
            raise InputError(f"--scale is {self.scale}.", hint="It is full or mini.")
        slides = [f"--{name.replace('_', '-')}" for name in _SLIDES if getattr(self, name) is not None]
        methods = [f"--{name}" for name in ("target", "encoder") if getattr(self, name)]
        if self.study is None and self.preset is None and not (self.tables and self.out is not None):
            raise InputError("There is no study to run.", hint="Give STUDY.toml, or --preset NAME: tapfm study --help")
        others = slides or methods or self.seed or self.fold or self.preset is not None or self.mini
        if self.study is not None and others:
            source = self.study if isinstance(self.study, Path) else "The StudyConfig"
            raise InputError(
                f"{source} defines the study; --preset, --scale and options about slides define another one.",
                hint="Change the file instead.",
            )
        if self.mini and (slides or methods):
            raise InputError(f"--scale mini has its own slides and encoder: no {', '.join(slides + methods)}.")
        if self.write is not None:
            if self.preset is None or self.mini:
                raise InputError(
                    "--write writes a preset.", hint="For example: --preset paper-table1 --write study.toml"
                )
            if self.write.exists():
                raise InputError(
                    f"{self.write} already exists.", hint="Give another name to --write, or remove it first."
                )
        elif self.out is None and not self.list:
            raise InputError("No output folder was given.", hint="Add one: --out studies/first")
        if self.out is not None and self.out.is_file():
            raise InputError(f"{self.out} is a file.", hint="Give a folder to --out.")


@dataclass(frozen=True)
class ListedRun:
    """A run of a study, and its state."""

    name: str
    state: str  # finished, started, to do, or why it is impossible; empty where the study has no folder


@dataclass(frozen=True)
class StudyResult:
    """Result of one study."""

    name: str
    folder: Path
    table: Table | None = None  # AUCs of the runs that are finished; None if runs are only listed
    failed: Mapping[str, str] = field(default_factory=dict)  # why each step failed
    runs: tuple[ListedRun, ...] = ()  # with --list


@command_function(StudyOptions)
def run_study(options: StudyOptions, console: Console) -> tuple[StudyResult, ...]:
    """Run a study and write its tables. Each run is a process of its own; Ctrl-C keeps what is finished.

    `study` may be a `StudyConfig`. Returns one result, several for `--preset all`, none with `--write`.
    """
    from tapfm.study.preset_studies import PresetOptions, expand_preset_name, format_preset_toml

    slides = {name: getattr(options, name) for name in _SLIDES}
    given = PresetOptions(
        **slides, targets=options.target, encoders=options.encoder, seeds=options.seed, folds=options.fold
    )
    if options.write is not None:
        assert options.preset is not None
        text = format_preset_toml(expand_preset_name(options.preset, mini=False)[0], given, options.write)
        _write_preset(options.write, text)
        return ()
    studies = _find_studies(options, given)
    if options.list:
        return tuple(_list_runs(config, folder, options) for folder, config in studies.items())
    if options.tables:
        return tuple(_write_tables(config, folder, console) for folder, config in studies.items())
    assert options.out is not None
    resume_command = None
    if options.mini:
        _prepare_mini(options.preset or "", studies, options.out, resume=options.resume, console=console)
        if options.preset == "all":
            resume_command = format_command(
                "study", "--preset", "all", "--scale", "mini", "--out", options.out, "--resume"
            )
    return tuple(_run_steps(config, folder, options, resume_command, console) for folder, config in studies.items())


def _write_preset(path: Path, text: str) -> None:
    from tapfm.runtime.files import write_atomically

    try:
        write_atomically(path, text.encode())
    except OSError as error:
        raise InputError(f"{path} cannot be written ({error.strerror}).", hint="Give another file.") from error


def _find_studies(options: StudyOptions, given: PresetOptions) -> dict[Path, StudyConfig]:
    """Return the studies that are meant, by their folders, with the options about the machine."""
    from tapfm.config.study import StudyConfig, load_study
    from tapfm.study.folder import StudyFolder
    from tapfm.study.plan import override_machine_settings
    from tapfm.study.preset_studies import build_mini_study, build_preset_study, expand_preset_name

    folder = options.out or Path("STUDY")
    if isinstance(options.study, StudyConfig):
        studies = {folder: options.study}
    elif options.preset is None:
        if not isinstance(options.study, Path | None):
            kind = type(options.study).__name__
            raise InputError(f"An object of type {kind} is not a study.", hint="Give STUDY.toml, or a StudyConfig.")
        studies = {folder: load_study(options.study or StudyFolder(folder).study)}
    elif options.mini:
        names = expand_preset_name(options.preset, mini=True)
        folders = {name: folder / name if options.preset == "all" else folder for name in names}
        studies = {place: build_mini_study(name, folder, given.seeds) for name, place in folders.items()}
    else:
        studies = {folder: build_preset_study(expand_preset_name(options.preset, mini=False)[0], given)}
    machine = {"device": options.device, "workers": options.workers, "allow_failures": options.allow_failures}
    return {place: override_machine_settings(config, **machine) for place, config in studies.items()}


def _prepare_mini(
    preset: str, studies: Mapping[Path, StudyConfig], out: Path, *, resume: bool, console: Console
) -> None:
    """Paint and tile the slides of small studies, and print what such a study is worth."""
    from tapfm.study import mini as study_mini
    from tapfm.study.preset_studies import expand_preset_name
    from tapfm.study.presets import PRESETS

    if not resume and any((place / "study.toml").exists() for place in studies):
        raise RunError(f"{out} holds a study.", hint="Resume it: the same command with --resume")
    names = expand_preset_name(preset, mini=True)
    for name, config in zip(names, studies.values(), strict=True):
        console.print(f"{name}: {config.notes[1]}", markup=False, soft_wrap=True)
    console.print("It shows that the commands work, not which method is better.", markup=False)
    tasks = list(dict.fromkeys(PRESETS[name].synth_task for name in names))
    results = study_mini.prepare_mini_data(out, tasks, console=console)
    if results.stopped_by is not None:
        console.print("Stopped. To resume: the same command with --resume")
        raise Interrupted(results.stopped_by)
    if results.failed:
        step, reason = next(iter(results.failed.items()))
        raise RunError(f"{step} failed: {reason}", hint=f"Its output: {out / 'logs'}")
    for name in names:
        if PRESETS[name].study.get("report") == "forgetting":
            study_mini.cut_probe_tiles(out, PRESETS[name].synth_task)


def _run_steps(
    config: StudyConfig, out: Path, options: StudyOptions, resume_hint: str | None, console: Console
) -> StudyResult:
    """Run the steps of one study that are not done yet, and write its tables."""
    # what writes the tables is imported first: in the days between, another version may be installed
    import tapfm.study.report  # noqa: F401
    from tapfm.study.runner import resume_command, run_study_steps
    from tapfm.study.runs import list_runs, select_runs

    runs = select_runs(list_runs(config), options.only)
    resuming = resume_hint or resume_command(out)
    console.print(f"{config.name}: {format_count(len(runs), 'run')}, into {out}", markup=False, soft_wrap=True)
    results = run_study_steps(
        config, out, options.only, resume=options.resume, resume_hint=resuming, console=console, jobs=options.jobs
    )
    if results.stopped_by is not None:
        console.print(f"Stopped. To resume: {resuming}", markup=False, soft_wrap=True)
        raise Interrupted(results.stopped_by)
    written = _write_tables(config, out, console)
    _print_failures(results.failed, results.folder, resuming, console)
    return StudyResult(config.name, written.folder, written.table, results.failed)


def _print_failures(failed: Mapping[str, str], folder: Path, resuming: str, console: Console) -> None:
    if not failed:
        return
    console.print(f"{format_count(len(failed), 'step')} failed:", style="bold red")
    for step, reason in failed.items():
        console.print(f"  {step}: {reason}", markup=False, soft_wrap=True)
    status = f"The command of each step is in {folder / 'status.csv'}. To retry them: {resuming}"
    console.print(status, markup=False, soft_wrap=True)


def _write_tables(config: StudyConfig, out: Path, console: Console) -> StudyResult:
    """Write the tables of finished runs."""
    from tapfm.study.folder import StudyFolder
    from tapfm.study.report import write_report

    folder = StudyFolder(out)
    if not folder.study.exists():
        raise InputError(f"{out} is not the folder of a study.", hint="Start one: tapfm study STUDY.toml --out DIR")
    table = write_report(config, folder)
    console.print(f"Results: {out / 'study.md'}", markup=False, soft_wrap=True)
    return StudyResult(config.name, out, table)


def _list_runs(config: StudyConfig, out: Path, options: StudyOptions) -> StudyResult:
    """Find the state of each run, where the folder of the study is known."""
    from tapfm.study.folder import StudyFolder
    from tapfm.study.plan import plan_study

    folder = StudyFolder(out)
    planned = plan_study(config, folder, options.only)
    listed = []
    for run in planned.runs:
        state = ""
        if problem := planned.problems.get(run.name):
            state = f"impossible: {' '.join(problem.split())}"
        elif options.out is not None:
            settings = planned.configs[run.name]
            started = (folder.run(run) / "config.toml").exists()
            finished = folder.finished(run, settings.machine.allow_failures)
            state = "finished" if finished else "started" if started else "to do"
        listed.append(ListedRun(run.name, state))
    return StudyResult(config.name, out, runs=tuple(listed))
