"""`tapfm study`: run all trainings and evaluations of a study, and write its tables."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from rich.console import Console

from tapfm.errors import CommandFailedError, InputError, Interrupted, RunError
from tapfm.runtime.messages import format_command, format_count
from tapfm.runtime.options import Argument, Option, command_function, options

if TYPE_CHECKING:
    from tapfm.config.study import StudyConfig
    from tapfm.results.table import Table
    from tapfm.study.preset_studies import PresetOptions

_DATA_OPTIONS = ("cohort", "slides", "tiles", "external", "external_slides", "external_tiles", "probe_tiles")


@options
class StudyOptions:
    """Options of `tapfm study`."""

    study: Annotated[
        Path | Any | None,  # Any is a StudyConfig; importing its module here would slow down `tapfm --help`
        Argument("Configuration of the study. Pass this file, --preset or --tables.", metavar="STUDY.toml"),
    ] = None
    _: KW_ONLY
    out: Annotated[Path | None, Option("Folder of the study, for runs, tables and plots.", metavar="DIR")] = None
    preset: Annotated[
        str | None,
        Option(
            "Use a predefined study: paper-table1, paper-table2, ablation-lambda, ablation-tiles, ablation-cosine, "
            "stability, layers or forgetting. 'all', only with --scale mini, runs the first five one after another.",
            metavar="NAME",
        ),
    ] = None
    scale: Annotated[
        str,
        Option("With --preset: full (your slides), or mini (synthetic slides and a small encoder, to try it out)."),
    ] = "full"
    cohort: Annotated[
        Path | None,
        Option("With --preset: cohort table with labels and splits; optional with --write.", metavar="CSV"),
    ] = None
    slides: Annotated[
        Path | None, Option("Folder of the slides of --cohort, if the cohort table has no paths.", metavar="DIR")
    ] = None
    tiles: Annotated[
        Path | None, Option("Output folder of `tapfm tile` for --cohort.", metavar="DIR", show_default="tiles")
    ] = None
    external: Annotated[
        Path | None,
        Option("With --preset: table of an external cohort, which is only used for evaluation.", metavar="CSV"),
    ] = None
    external_slides: Annotated[
        Path | None, Option("Folder of the slides of --external, if that table has no paths.", metavar="DIR")
    ] = None
    external_tiles: Annotated[
        Path | None,
        Option("Output folder of `tapfm tile` for --external.", metavar="DIR", show_default="tiles-external"),
    ] = None
    target: Annotated[
        tuple[str, ...],
        Option("With --preset: label column to predict. Repeatable.", metavar="NAME", show_default="as in the preset"),
    ] = ()
    encoder: Annotated[
        tuple[str, ...],
        Option(
            "With --preset: encoder to compare, from `tapfm encoders`. Repeatable.",
            metavar="NAME",
            show_default="as in the preset",
        ),
    ] = ()
    seed: Annotated[
        tuple[int, ...],
        Option(
            "With --preset: random seed. Repeatable: one run of each model per seed.",
            metavar="N",
            show_default="0; several for stability",
            at_least=0,
        ),
    ] = ()
    fold: Annotated[
        tuple[int, ...],
        Option(
            "With --preset: use the column fold_N of the table as the split. Repeatable: one run per fold.",
            metavar="N",
            show_default="the column split",
            at_least=0,
        ),
    ] = ()
    probe_tiles: Annotated[
        Path | None,
        Option(
            "With --preset forgetting: tile images of another task, a folder with one subfolder per class.",
            metavar="DIR",
        ),
    ] = None
    write: Annotated[
        Path | None, Option("Write the preset to this file, to edit it, and stop.", metavar="STUDY.toml")
    ] = None
    resume: Annotated[bool, Option("Resume the study in --out: finished runs are kept.")] = False
    only: Annotated[
        tuple[str, ...],
        Option(
            "Only runs whose name matches this pattern, such as 'uni/tapfm/*'. Repeatable.",
            metavar="PATTERN",
            show_default="all runs",
        ),
    ] = ()
    list: Annotated[bool, Option("List the runs, with --out also their state, and stop.")] = False
    tables: Annotated[bool, Option("Only write the tables again, from the finished runs in --out.")] = False
    device: Annotated[
        str | None,
        Option(
            "Device to compute on: auto (the GPU if there is one), cpu, cuda, or cuda:1 for the second GPU.",
            show_default="as in STUDY.toml, else auto",
        ),
    ] = None
    workers: Annotated[
        int | None,
        Option(
            "Number of worker processes of each run. 0: do all work in the main process of the run.",
            metavar="N",
            show_default="as in STUDY.toml, else one per CPU core",
            at_least=0,
        ),
    ] = None
    allow_failures: Annotated[
        int | None,
        Option(
            "Number of slides that may fail in each run and each evaluation.",
            metavar="N",
            show_default="as in STUDY.toml, else 0",
            at_least=0,
        ),
    ] = None
    jobs: Annotated[
        int,
        Option(
            "Number of runs at the same time. More than 1 is useful for small encoders without a GPU.",
            metavar="N",
            at_least=1,
        ),
    ] = 1

    @property
    def mini(self) -> bool:
        """Whether the study uses synthetic slides."""
        return self.scale == "mini"

    def check(self) -> None:
        """Raise InputError if options contradict each other, or if there is no study to run."""
        if self.scale not in ("full", "mini"):
            raise InputError(f"--scale must be full or mini; got '{self.scale}'.")
        has_study = self.study is not None or self.preset is not None
        if not has_study and not self.tables:
            raise InputError(
                "STUDY.toml or --preset is missing.",
                hint="To create STUDY.toml: tapfm study --preset paper-table1 --write study.toml",
            )
        names = [name for name in (*_DATA_OPTIONS, "target", "encoder") if getattr(self, name) not in (None, ())]
        data_options = [f"--{name.replace('_', '-')}" for name in names]
        preset_options = [*data_options, *(f"--{name}" for name in ("seed", "fold", "preset") if getattr(self, name))]
        preset_options += ["--scale mini"] if self.mini else []
        if self.study is not None and preset_options:
            source = self.study if isinstance(self.study, Path) else "a StudyConfig"
            raise InputError(
                f"{', '.join(preset_options)} cannot be combined with {source}, which already defines the study.",
                hint=f"Change {source} instead.",
            )
        if self.mini and (conflicts := [*data_options, *(["--fold"] if self.fold else [])]):
            raise InputError(
                f"--scale mini cannot be combined with {', '.join(conflicts)}: it has its own slides and encoder.",
                hint="Remove these options, or use --scale full.",
            )
        if self.write is not None:
            if self.preset is None or self.mini:
                raise InputError(
                    "--write needs --preset with --scale full.",
                    hint="For example: tapfm study --preset paper-table1 --write study.toml",
                )
            if self.write.exists():
                raise InputError(
                    f"{self.write} already exists.", hint="Choose another name with --write, or delete the file first."
                )
        elif self.out is None and not (self.list and has_study):
            raise InputError("--out is missing.", hint="Add the folder of the study, for example: --out studies/first")
        if self.out is not None and self.out.is_file():
            raise InputError(f"{self.out} is a file, not a folder.", hint="Choose another folder with --out.")


@dataclass(frozen=True)
class ListedRun:
    """A run of a study, and its state."""

    name: str
    state: str  # finished, started, to do, or the reason why it is impossible; empty for a possible run without --out


@dataclass(frozen=True)
class StudyResult:
    """Result of one study."""

    name: str
    folder: Path
    table: Table | None = None  # AUCs of the finished runs; None if runs are only listed
    headline: Table | None = None  # a row for each model; the one that is chosen on validation is marked
    failed: Mapping[str, str] = field(default_factory=dict)  # reason by step
    runs: tuple[ListedRun, ...] = ()  # with --list


@command_function(StudyOptions)
def run_study(options: StudyOptions, console: Console) -> tuple[StudyResult, ...]:
    """Run a study and write its tables.

    Each run has its own process. After Ctrl-C, finished runs are saved. `study` may be a `StudyConfig`. Returns one
    result, several for `--preset all`, or none with `--write`.
    """
    from tapfm.study.preset_studies import PresetOptions, expand_preset_name, format_preset_toml

    data = {name: getattr(options, name) for name in _DATA_OPTIONS}
    preset_options = PresetOptions(
        **data, targets=options.target, encoders=options.encoder, seeds=options.seed, folds=options.fold
    )
    if options.write is not None:
        assert options.preset is not None
        name = expand_preset_name(options.preset, mini=False)[0]
        _write_preset(options.write, format_preset_toml(name, preset_options, options.write))
        return ()
    studies = _find_studies(options, preset_options)
    if options.list:
        return tuple(_list_runs(config, folder, options) for folder, config in studies.items())
    if options.tables:
        return tuple(_write_tables(config, folder, console) for folder, config in studies.items())
    assert options.out is not None
    resume_hint = None
    if options.mini:
        _prepare_mini(options.preset or "", studies, options.out, resume=options.resume, console=console)
        if options.preset == "all":
            arguments = ("--preset", "all", "--scale", "mini", "--out", options.out, "--resume")
            resume_hint = format_command("study", *arguments)
    return tuple(_run_steps(config, folder, options, resume_hint, console) for folder, config in studies.items())


def _write_preset(path: Path, text: str) -> None:
    from tapfm.runtime.files import write_atomically

    try:
        write_atomically(path, text.encode())
    except OSError as error:
        hint = "Choose another file with --write."
        raise InputError(f"{path} cannot be written ({error.strerror}).", hint=hint) from error


def _find_studies(options: StudyOptions, preset_options: PresetOptions) -> dict[Path, StudyConfig]:
    """Return the studies to run, by folder, with the machine settings of the command line."""
    from tapfm.config.study import StudyConfig, load_study
    from tapfm.study.folder import StudyFolder
    from tapfm.study.preset_studies import build_mini_study, build_preset_study, expand_preset_name
    from tapfm.study.study_plan import override_machine_settings

    folder = options.out or Path("STUDY")
    if isinstance(options.study, StudyConfig):
        studies = {folder: options.study}
    elif options.preset is None:
        if not isinstance(options.study, Path | None):
            kind, hint = type(options.study).__name__, "Pass the path of STUDY.toml, or a StudyConfig."
            raise InputError(f"An object of type {kind} is not a study.", hint=hint)
        if options.study is None:
            _check_study_folder(folder)
        studies = {folder: load_study(options.study or StudyFolder(folder).study)}
    elif options.mini:
        names = expand_preset_name(options.preset, mini=True)
        folders = {name: folder / name if options.preset == "all" else folder for name in names}
        studies = {each: build_mini_study(name, folder, preset_options.seeds) for name, each in folders.items()}
    else:
        studies = {folder: build_preset_study(expand_preset_name(options.preset, mini=False)[0], preset_options)}
    machine = {"device": options.device, "workers": options.workers, "allow_failures": options.allow_failures}
    return {folder: override_machine_settings(config, **machine) for folder, config in studies.items()}


def _prepare_mini(
    preset: str, studies: Mapping[Path, StudyConfig], out: Path, *, resume: bool, console: Console
) -> None:
    """Generate and tile the synthetic slides of mini studies."""
    from tapfm.study import mini_data
    from tapfm.study.preset_studies import expand_preset_name
    from tapfm.study.presets import PRESETS

    if not resume and any((folder / "study.toml").exists() for folder in studies):
        raise RunError(
            f"{out} already contains a study.",
            hint="To resume it, run the same command with --resume. Or choose a new folder with --out.",
        )
    names = expand_preset_name(preset, mini=True)
    for name, config in zip(names, studies.values(), strict=True):
        console.print(f"{name}: {config.notes[1]}", markup=False, soft_wrap=True)
    console.print("A mini study tests the commands. It does not show which method is better.", markup=False)
    tasks = list(dict.fromkeys(PRESETS[name].synth_task for name in names))
    results = mini_data.prepare_mini_data(out, tasks, console=console)
    if results.stopped_by is not None:
        console.print("Stopped. Finished steps are saved. To resume, run the same command with --resume.")
        raise Interrupted(results.stopped_by)
    if results.failed:
        step, reason = next(iter(results.failed.items()))
        raise CommandFailedError(f"{step} failed: {reason}", hint=f"Its output is in {out / 'logs'}.", exit_code=3)
    for name in names:
        if PRESETS[name].study.get("report") == "forgetting":
            mini_data.extract_probe_tiles(out, PRESETS[name].synth_task)


def _run_steps(
    config: StudyConfig, out: Path, options: StudyOptions, resume_hint: str | None, console: Console
) -> StudyResult:
    """Run the unfinished steps of one study, and write its tables."""
    # imported first, because tapfm may be updated before the runs finish
    import tapfm.study.study_tables  # noqa: F401
    from tapfm.study.runner import resume_command, run_study_steps
    from tapfm.study.runs import list_runs, select_runs

    runs = select_runs(list_runs(config), options.only)
    resume_hint = resume_hint or resume_command(out)
    _check_tables_exist(config)
    console.print(f"{config.name}: {format_count(len(runs), 'run')} in {out}", markup=False, soft_wrap=True)
    results = run_study_steps(
        config, out, options.only, resume=options.resume, resume_hint=resume_hint, console=console, jobs=options.jobs
    )
    if results.stopped_by is not None:
        console.print(f"Stopped. Finished steps are saved. To resume: {resume_hint}", markup=False, soft_wrap=True)
        raise Interrupted(results.stopped_by)
    written = _write_tables(config, out, console)
    if results.failed:
        _print_failures(results.failed, results.folder, resume_hint, console)
    return replace(written, failed=results.failed)


def _check_tables_exist(config: StudyConfig) -> None:
    """Raise InputError if a cohort table does not exist, as in an unedited preset or a study that was moved."""
    for name, section in {"cohort": config.cohort, "external": config.external}.items():
        if section is not None and not section.table.exists():
            alternative = ", or remove [external]" if name == "external" else ""
            hint = f"Correct {name}.table in the study's TOML file{alternative}. With --preset, correct --{name}."
            raise InputError(f"The table of [{name}] does not exist: {section.table}", hint=hint)


def _print_failures(failed: Mapping[str, str], folder: Path, resume_hint: str, console: Console) -> None:
    console.print(f"{format_count(len(failed), 'step')} failed:", style="bold red")
    for step, reason in failed.items():
        console.print(f"  {step}: {reason}", markup=False, soft_wrap=True)
    status = f"The command of each step is in {folder / 'status.csv'}. To retry the failed steps: {resume_hint}"
    console.print(status, markup=False, soft_wrap=True)


def _write_tables(config: StudyConfig, out: Path, console: Console) -> StudyResult:
    """Write the tables of finished runs."""
    from tapfm.study.folder import StudyFolder
    from tapfm.study.study_tables import write_study_tables

    _check_study_folder(out)
    _check_tables_exist(config)
    aucs, headline = write_study_tables(config, StudyFolder(out))
    console.print(f"Results: {out / 'study.md'}", markup=False, soft_wrap=True)
    return StudyResult(config.name, out, aucs, headline)


def _check_study_folder(folder: Path) -> None:
    """Raise InputError if this is not the folder of a study."""
    from tapfm.study.folder import StudyFolder

    if not StudyFolder(folder).study.exists():
        raise InputError(
            f"{folder} is not the folder of a study: it has no study.toml.",
            hint=f"To start a study: {format_command('study', 'STUDY.toml', '--out', folder)}",
        )


def _list_runs(config: StudyConfig, out: Path, options: StudyOptions) -> StudyResult:
    """Return the runs of a study. Without --out, only the state of impossible runs is known."""
    from tapfm.study.folder import StudyFolder
    from tapfm.study.study_plan import plan_study

    folder = StudyFolder(out)
    planned = plan_study(config, folder, options.only)
    listed = []
    for run in planned.runs:
        state = ""
        if problem := planned.problems.get(run.name):
            state = f"impossible: {' '.join(problem.split())}"
        elif options.out is not None:
            started = (folder.run(run) / "config.toml").exists()
            finished = folder.is_finished(run, planned.configs[run.name].machine.allow_failures)
            state = "finished" if finished else "started" if started else "to do"
        listed.append(ListedRun(run.name, state))
    return StudyResult(config.name, out, runs=tuple(listed))
