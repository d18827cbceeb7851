"""Contents of a study folder that a report shows: tables, figures, and the runs to show in detail."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tapfm.config.study import StudyConfig, load_study
from tapfm.errors import InputError
from tapfm.report.content import PageSection
from tapfm.report.reported_run import ReportedRun, read_run, read_table
from tapfm.report.result_folders import STUDY_TOML
from tapfm.results.document import read_sections_json
from tapfm.runs.ensemble import is_run
from tapfm.runtime.messages import format_command
from tapfm.study.headline import RESULT_TITLE, HeadlineRow, read_headline_rows
from tapfm.study.runs import PlannedRun, list_runs

_AUC_TABLES = ("table_binary.csv", "table_multilabel.csv")
_STUDY_JSON = "study.json"
CsvRow = Mapping[str, str]


@dataclass(frozen=True)
class ReportedStudy:
    """Contents of a study folder, finished or not."""

    folder: Path
    config: StudyConfig
    runs: Mapping[str, ReportedRun]  # the runs that were started, by name
    planned_runs: Sequence[PlannedRun]  # all runs of the study, started or not
    auc_rows: Sequence[CsvRow]  # of table_*.csv
    status_rows: Sequence[CsvRow]  # of status.csv

    @property
    def finished_runs(self) -> list[ReportedRun]:
        return [run for run in self.runs.values() if run.finished]

    @property
    def has_sections(self) -> bool:
        """Whether the study has written its tables and figures for reports."""
        return (self.folder / _STUDY_JSON).is_file()

    @property
    def tables_command(self) -> str:
        """Command that writes the tables and figures of the finished runs."""
        return format_command("study", "--tables", "--out", self.folder)

    @property
    def headline_rows(self) -> list[HeadlineRow]:
        """The AUCs of each model; empty without tables."""
        return read_headline_rows(self.auc_rows)

    @property
    def failed_steps(self) -> list[CsvRow]:
        """Rows of status.csv for steps that failed."""
        return [row for row in self.status_rows if row.get("state") == "failed"]


def is_study(folder: Path) -> bool:
    """Return whether a folder is a study folder."""
    return (folder / STUDY_TOML).is_file()


def read_study(folder: Path) -> ReportedStudy:
    """Read a study folder, with the runs that were started so far."""
    config = load_study(folder / STUDY_TOML)
    planned_runs = list_runs(config)
    run_folders = {run.name: folder / "runs" / run.name for run in planned_runs}
    hint = f"Write the tables again: {format_command('study', '--tables', '--out', folder)}"
    auc_rows = [row for name in _AUC_TABLES for row in _read_table(folder / name, hint)]
    status_rows = _read_table(folder / "status.csv", "Delete this file. tapfm study --resume writes it again.")
    runs = {name: read_run(path, name) for name, path in run_folders.items() if is_run(path)}
    return ReportedStudy(folder, config, runs, planned_runs, auc_rows, status_rows)


def _read_table(path: Path, hint: str) -> list[dict[str, str]]:
    try:
        return read_table(path)
    except (OSError, ValueError) as error:
        raise InputError(f"{path} cannot be read ({error}).", hint=hint) from error


def select_runs(
    study: ReportedStudy, names: Sequence[str], weights_digests: Collection[str]
) -> tuple[list[ReportedRun], str]:
    """Return the runs to show in detail, and the reason.

    These are the runs with these names; or else the runs with these weights; or else, for each set of targets, the run
    with the highest validation AUC of the model that is chosen on validation.
    """
    for name in names:
        if name not in study.runs:
            raise InputError(
                f"The study {study.folder} has no run {name}, or has not started it.",
                hint=f"Started runs: {', '.join(study.runs) or 'none'}",
            )
    of_chosen_models = _list_runs_of_chosen_models(study)
    if names or weights_digests:
        passed = [study.runs[name] for name in names] or [
            run for run in study.runs.values() if run.best_checkpoint_sha256 in weights_digests
        ]
        if passed:
            others = of_chosen_models and not any(run in of_chosen_models for run in passed)
            reasons = ["selected by --run" if names else "its evaluations or predictions were passed"]
            return passed, ", ".join([*reasons, *(["not the model that is chosen on validation"] if others else [])])
    best: dict[tuple[str, ...], ReportedRun] = {}
    for run in of_chosen_models or study.finished_runs:
        previous = best.setdefault(run.targets, run)
        if (run.validation_auc or 0.0) > (previous.validation_auc or 0.0):
            best[run.targets] = run
    return list(best.values()), "highest validation AUC"


def _list_runs_of_chosen_models(study: ReportedStudy) -> list[ReportedRun]:
    """Return the finished runs of the models that are chosen on validation."""
    chosen = {
        (row["encoder"], row["method"], row["aggregator"], row["variant"], target)
        for row in study.auc_rows
        if row.get("chosen") == "1"
        for target in (row["target"], None)  # None: one model predicts all targets
    }
    return [
        study.runs[planned.name]
        for planned in study.planned_runs
        if planned.name in study.runs
        and study.runs[planned.name].finished
        and (model := planned.model)
        and (model.encoder, model.method, model.aggregator, model.variant or "", model.target) in chosen
    ]


def read_study_sections(study: ReportedStudy) -> list[PageSection]:
    """Read the tables and figures of a study from study.json, without the headline, which is at the top of the page."""
    if not study.has_sections:
        return []
    sections = read_sections_json(study.folder / _STUDY_JSON, hint=f"Create it again: {study.tables_command}")
    return [PageSection(each.title, each.blocks) for each in sections if each.title != RESULT_TITLE]
