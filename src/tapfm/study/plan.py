"""Check a study before anything runs: its runs and their settings, its slides and tiles, its folder."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tapfm.cohort.cohort_table import read_cohort
from tapfm.config.settings import RunConfig
from tapfm.config.study import SlidesSection, StudyConfig
from tapfm.errors import InputError, RunError, SettingError
from tapfm.runtime.messages import format_command, format_count
from tapfm.runtime.output_folder import check_no_other_files
from tapfm.study.folder import StudyFolder
from tapfm.study.runs import PlannedRun, list_runs, run_config, select_runs
from tapfm.tasks.catalog import target_kinds
from tapfm.tasks.labels import read_labels

_SHOWN = 10  # runs that a message names
_PREPARED = {"synthetic", "tiles", "probe-tiles", "logs", "status.csv"}  # made by --scale mini before the study starts


@dataclass(frozen=True)
class StudyPlan:
    """The runs of a study, with the configuration or the problem of each by its name."""

    runs: list[PlannedRun]
    configs: dict[str, RunConfig]
    problems: dict[str, str]


def plan_study(study: StudyConfig, folder: StudyFolder, only: Sequence[str] = ()) -> StudyPlan:
    """Resolve the settings of every run. Raises SettingError if no run is possible."""
    runs = select_runs(list_runs(study), only)
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
    return StudyPlan(runs, configs, problems)


def override_machine_settings(study: StudyConfig, **options: str | int | None) -> StudyConfig:
    """Return the study with other machine settings; None keeps one as it is."""
    given = {name: value for name, value in options.items() if value is not None}
    machine = dict(study.settings.get("machine", {})) | given
    return study.model_copy(update={"settings": dict(study.settings) | {"machine": machine}}) if given else study


def check_slides(study: StudyConfig) -> None:
    """Raise InputError for what would make every run fail: missing tables, targets or tiles."""
    read_labels(read_cohort(study.cohort.table, study.cohort.slides, must_exist=False), target_kinds(study.targets))
    _check_tiles(study.cohort)
    if study.external is not None:
        read_cohort(study.external.table, study.external.slides, must_exist=False)
        _check_tiles(study.external)
    if study.probe is not None and not study.probe.tiles.is_dir():
        raise InputError(f"There is no folder {study.probe.tiles}.", hint="[probe] tiles: a folder for each class.")


def _check_tiles(slides: SlidesSection) -> None:
    if not slides.tiles.is_dir():
        where = [] if slides.slides is None else ["--slides", str(slides.slides)]
        make = format_command("tile", slides.table, *where, "--out", slides.tiles)
        raise InputError(f"There is no folder {slides.tiles}.", hint=f"Make it: {make}")


def check_folder(study: StudyConfig, folder: StudyFolder, plan: StudyPlan, *, resume: bool, resume_hint: str) -> None:
    """Raise RunError if the folder has other files, a study that is not resumed, or runs with different settings."""
    if not folder.study.exists():
        hint = "Give a new folder with --out, for example studies/first."
        check_no_other_files(folder.path, allowed=_PREPARED, hint=hint)
    elif not resume:
        raise RunError(
            f"{folder.path} has a study already.", hint=f"Resume it: {resume_hint}\nOr start another with --out."
        )
    changed = {
        run.name: changes
        for run in plan.runs
        if run.name in plan.configs and (changes := folder.changes(run, plan.configs[run.name]))
    }
    if changed:
        lines = [f"{name}: {'; '.join(changes)}" for name, changes in list(changed.items())[:_SHOWN]]
        if len(changed) > _SHOWN:
            lines.append(f"... and {format_count(len(changed) - _SHOWN, 'run')} more")
        raise RunError(
            f"{study.name} has changed for runs that were started before:\n  " + "\n  ".join(lines),
            hint="Restore the settings, add another variant, or start again with another --out.",
        )
