"""A study as a report sees it: the tables it wrote, how its methods converged, and the runs to show in full."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tapfm.config.study import StudyConfig, load_study
from tapfm.errors import InputError
from tapfm.evaluation.metric_values import MACRO, target_title
from tapfm.report.content import PageSection
from tapfm.report.finding import STUDY
from tapfm.report.runs import ReportedRun, read_run, read_table
from tapfm.results.document import read_sections
from tapfm.results.table import Cell, Column, Table, table_row
from tapfm.runs.ensemble import is_run
from tapfm.runtime.messages import format_command, format_count
from tapfm.study.comparison import COHORT_TITLES, parse_auc_row
from tapfm.study.runs import PlannedRun, list_runs

_TABLES = ("table_binary", "table_multilabel")
_SECTIONS = "study.json"
Line = Mapping[str, str]


@dataclass(frozen=True)
class ReportedStudy:
    """A study, its finished and unfinished runs, and the lines of its table."""

    folder: Path
    config: StudyConfig
    runs: Mapping[str, ReportedRun]  # by name, those that were begun
    planned: Sequence[PlannedRun]
    lines: Sequence[Line]  # of table_*.csv
    status: Sequence[Line]

    @property
    def finished(self) -> list[ReportedRun]:
        """List the runs that are done."""
        return [run for run in self.runs.values() if run.finished]

    @property
    def has_sections(self) -> bool:
        """Whether the study has written its tables and figures for reports."""
        return (self.folder / _SECTIONS).is_file()

    @property
    def tables_command(self) -> str:
        """The command that writes the tables and figures of the finished runs."""
        return format_command("study", "--tables", "--out", self.folder)

    @property
    def failed(self) -> list[Line]:
        """List the steps that failed."""
        return [line for line in self.status if line.get("state") == "failed"]


def is_study(folder: Path) -> bool:
    """Say whether it is the folder of a study."""
    return (folder / STUDY).is_file()


def read_study(folder: Path) -> ReportedStudy:
    """Read what a study came to so far."""
    config = load_study(folder / STUDY)
    planned = list_runs(config)
    places = {run.name: folder / "runs" / run.name for run in planned}
    try:
        lines = [line for name in _TABLES for line in read_table(folder / f"{name}.csv")]
        status = read_table(folder / "status.csv")
    except (OSError, ValueError) as error:
        again = format_command("study", "--tables", "--out", folder)
        raise InputError(f"A table of {folder} cannot be read ({error}).", hint=f"Write them again: {again}") from error
    runs = {name: read_run(place, name) for name, place in places.items() if is_run(place)}
    return ReportedStudy(folder, config, runs, planned, lines, status)


def runs_in_full(study: ReportedStudy, asked: Sequence[str], digests: Collection[str]) -> tuple[list[ReportedRun], str]:
    """Choose the runs that are shown in full, and say why.

    Those asked for; or those whose weights made what was named; or of each set of targets the best on validation,
    never on what is compared.
    """
    for name in asked:
        if name not in study.runs:
            raise InputError(
                f"The study {study.folder} has no run {name}.", hint="Its runs are: " + ", ".join(study.runs)
            )
    if asked:
        return [study.runs[name] for name in asked], ""
    if digests and (named := [run for run in study.runs.values() if run.weights_sha256 in digests]):
        return named, ""
    best: dict[tuple[str, ...], ReportedRun] = {}
    for run in study.finished:
        before = best.setdefault(run.targets, run)
        if (run.validation_auc or 0.0) > (before.validation_auc or 0.0):
            best[run.targets] = run
    return list(best.values()), "the best on validation" if len(best) == 1 else "best on validation"


def study_headline(study: ReportedStudy) -> Table | None:
    """Show the highest AUC of each column of the table."""
    rows = []
    columns_shown = _columns_of(study)
    if any(target == MACRO for _, target in columns_shown):  # of many targets their mean is what is seen first
        columns_shown = [(cohort, target) for cohort, target in columns_shown if target == MACRO]
    for cohort, target in columns_shown:
        of_column = [line for line in study.lines if (line["cohort"], line["target"]) == (cohort, target)]
        best = [line for line in of_column if line["rank"] == "1"]
        if not best:
            continue
        others = f" and {format_count(len(best) - 1, 'other')}" if len(best) > 1 else ""
        rows.append(
            table_row(
                Cell(_column_title(cohort, target), f"N = {best[0]['patients']}"),
                Cell(parse_auc_row(best[0]), rank=1),
                Cell(f"{best[0]['model']}{others}", f"highest of {len(of_column)}"),
            )
        )
    columns = [Column("", text=True), Column("AUC, 95% confidence interval"), Column("Model", text=True)]
    return Table(columns, rows) if rows else None


def study_sections(study: ReportedStudy) -> list[PageSection]:
    """Return what the study compared: AUCs, curves, costs, and its other questions."""
    if not study.has_sections:
        return []
    sections = read_sections(study.folder / _SECTIONS, hint=f"Write it again: {study.tables_command}")
    return [PageSection(each.title, each.blocks) for each in sections]


def _columns_of(study: ReportedStudy) -> list[tuple[str, str]]:
    """List the columns: cohorts within targets."""
    return list(dict.fromkeys((line["cohort"], line["target"]) for line in study.lines))


def _column_title(cohort: str, target: str) -> str:
    """Name a column."""
    return f"{target_title(target)}, {COHORT_TITLES.get(cohort, cohort).lower()}"
