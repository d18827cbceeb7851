"""Check a study before it starts: the settings of its runs, its input files and its output folder."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from tapfm.cohort.cohort_table import read_cohort
from tapfm.cohort.splits import find_split_problems
from tapfm.config.settings import RunConfig
from tapfm.config.study import SlidesSection, StudyConfig
from tapfm.errors import InputError, RunError, SettingError
from tapfm.runtime.messages import format_command, format_count
from tapfm.runtime.output_folder import check_no_other_files
from tapfm.study.folder import StudyFolder
from tapfm.study.runs import PlannedRun, list_runs, resolve_run_config, select_runs
from tapfm.tasks.catalog import class_texts
from tapfm.tasks.label_columns import TargetRequest
from tapfm.tasks.labels import read_labelled_cohort

_MAX_LISTED_RUNS = 10  # in an error message
_MINI_FILES = {"synthetic", "tiles", "probe-tiles", "logs", "status.csv"}  # written by --scale mini before the study


@dataclass(frozen=True)
class StudyPlan:
    """Runs of a study. The name of each run is a key of `configs`, or of `problems` if its settings are invalid."""

    runs: list[PlannedRun]
    configs: dict[str, RunConfig]
    problems: dict[str, str]


def plan_study(study: StudyConfig, folder: StudyFolder, only: Sequence[str] = ()) -> StudyPlan:
    """Resolve the settings of the selected runs. Raises SettingError if none of them has valid settings."""
    runs = select_runs(list_runs(study), only)
    configs: dict[str, RunConfig] = {}
    problems: dict[str, str] = {}
    for run in runs:
        try:
            configs[run.name] = resolve_run_config(study, run, folder.features(run.model.encoder))
        except InputError as error:
            problems[run.name] = error.message
    if not configs:
        raise SettingError(
            f"No selected run of the study {study.name} has valid settings. {next(iter(problems.values()))}",
            hint="To list all settings of a run: tapfm config",
        )
    return StudyPlan(runs, configs, problems)


def override_machine_settings(study: StudyConfig, **options: str | int | None) -> StudyConfig:
    """Return the study with settings of [machine] replaced by command-line options. None keeps a setting."""
    given = {name: value for name, value in options.items() if value is not None}
    machine = dict(study.settings.get("machine", {})) | given
    return study.model_copy(update={"settings": dict(study.settings) | {"machine": machine}}) if given else study


def check_input_files(study: StudyConfig) -> None:
    """Raise InputError if tables, targets or tiles are missing, because every run would fail."""
    texts = class_texts(study.target_kinds)
    splits: list[int | None] = [*study.folds] or [None]
    read_labelled_cohort(
        study.cohort.table,
        study.cohort.table_options,
        TargetRequest(tuple(study.targets), texts),
        unit=study.unit,
        checks=[partial(find_split_problems, fold=fold) for fold in splits],
    )
    _check_tiles(study.cohort)
    if study.external is not None:
        read_cohort(study.external.table, study.external.table_options)
        _check_tiles(study.external)
    if study.probe is not None and not study.probe.tiles.is_dir():
        raise InputError(
            f"There is no folder {study.probe.tiles}.",
            hint="Set tiles in [probe], or --probe-tiles, to a folder with one folder of images per class.",
        )


def _check_tiles(slides: SlidesSection) -> None:
    if not slides.tiles.is_dir():
        option = [] if slides.slides is None else ["--slides", str(slides.slides)]
        tile_command = format_command("tile", slides.table, *option, "--out", slides.tiles)
        raise InputError(f"There is no folder {slides.tiles}.", hint=f"To create the tiles: {tile_command}")


def check_folder(study: StudyConfig, folder: StudyFolder, plan: StudyPlan, *, resume: bool, resume_hint: str) -> None:
    """Raise RunError if the folder has other files, a study (unless `resume`), or runs with different settings."""
    if not folder.study.exists():
        hint = "Use a new folder with --out, for example studies/first."
        check_no_other_files(folder.path, allowed=_MINI_FILES, hint=hint)
    elif not resume:
        raise RunError(
            f"{folder.path} already contains a study.",
            hint=f"To resume it: {resume_hint}\nTo start another study, use another folder with --out.",
        )
    changed = {
        run.name: changes
        for run in plan.runs
        if run.name in plan.configs and (changes := folder.list_changes(run, plan.configs[run.name]))
    }
    if changed:
        lines = [f"{name}: {'; '.join(changes)}" for name, changes in list(changed.items())[:_MAX_LISTED_RUNS]]
        if len(changed) > _MAX_LISTED_RUNS:
            lines.append(f"... and {format_count(len(changed) - _MAX_LISTED_RUNS, 'run')} more")
        raise RunError(
            f"The settings of {study.name} have changed for runs that were already started:\n  " + "\n  ".join(lines),
            hint="Restore these settings, add a variant with the new ones, or use another folder with --out.",
        )
