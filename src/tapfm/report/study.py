"""A study as a report sees it: the tables it wrote, how its methods converged, and the runs to show in full."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tapfm.config.study import StudyConfig, load_study
from tapfm.errors import InputError
from tapfm.evaluation.estimate_text import format_p_value
from tapfm.evaluation.measures import MACRO, target_title
from tapfm.report.charts import whisker, whisker_scale
from tapfm.report.content import Block, Cell, Column, Note, RankMark, Row, Section, Table
from tapfm.report.figures import methods_figures
from tapfm.report.finding import STUDY
from tapfm.report.markdown import blocks_of, inline
from tapfm.report.numbers import format_interval, format_number
from tapfm.report.runs import ReportedRun, read_run, read_table
from tapfm.results.estimate import Estimate
from tapfm.runs.ensemble import is_run
from tapfm.runtime.messages import counted
from tapfm.study.comparison import BLOCKS, COHORT_TITLES
from tapfm.study.results import BASELINE
from tapfm.study.runs import PlannedRun, runs_of

_MARKS: dict[str, RankMark] = {"1": "best", "2": "second"}  # by rank
_TABLES = ("table_binary", "table_multilabel")
# parts that only some studies have, and what they are called
_PARTS = {
    "ablation": "Log-linear fit of the training loss",
    "stability": "Stability",
    "forgetting": "Forgetting",
}
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
    def failed(self) -> list[Line]:
        """List the steps that failed."""
        return [line for line in self.status if line.get("state") == "failed"]


def is_study(folder: Path) -> bool:
    """Say whether it is the folder of a study."""
    return (folder / STUDY).is_file()


def read_study(folder: Path) -> ReportedStudy:
    """Read what a study came to so far."""
    config = load_study(folder / STUDY)
    planned = runs_of(config)
    places = {run.name: folder / "runs" / run.name for run in planned}
    try:
        lines = [line for name in _TABLES for line in read_table(folder / f"{name}.csv")]
        status = read_table(folder / "status.csv")
    except (OSError, ValueError) as error:
        raise InputError(f"A table of {folder} cannot be read ({error}).", hint="Make the tables again.") from error
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
        found = _estimate_of(best[0])
        others = f" and {counted(len(best) - 1, 'other')}" if len(best) > 1 else ""
        rows.append(
            Row(
                [
                    Cell(_column_title(cohort, target), f"N = {best[0]['patients']}"),
                    Cell(format_number(found.value), mark="best"),
                    Cell("", picture=whisker(found.value, found.low, found.high, f"AUC {format_number(found.value)}")),
                    Cell("", format_interval(found), found.why),
                    Cell(f"{best[0]['model']}{others}", f"highest of {len(of_column)}"),
                ]
            )
        )
    columns = [Column("", words=True), Column("AUC"), Column("", words=True, picture=whisker_scale())]
    columns += [Column("95% interval", words=True), Column("Model", words=True)]
    return Table(columns, rows) if rows else None


def comparison_sections(study: ReportedStudy) -> list[Section]:
    """Show what the study compared: AUCs, curves, costs, and what else it asked."""
    sections = []
    if study.lines:
        intro = (
            f"AUC, each {study.config.unit} counted once; best bold, second underlined. 95% intervals by resampling "
            "patients. p: paired test against the best of the column, Holm-corrected."
        )
        sections.append(Section("Comparison", _comparison_tables(study), intro))
    for name, title in _PARTS.items():
        if blocks := _part_of(study.folder / f"{name}.md"):
            sections.append(Section(title, blocks))
    if convergence := _convergence_blocks(study):
        sections.append(Section("Convergence, time and memory", convergence))
    return sections


def _columns_of(study: ReportedStudy) -> list[tuple[str, str]]:
    """List the columns: cohorts within targets."""
    return list(dict.fromkeys((line["cohort"], line["target"]) for line in study.lines))


def _column_title(cohort: str, target: str) -> str:
    """Name a column."""
    return f"{target_title(target)}, {COHORT_TITLES.get(cohort, cohort).lower()}"


def _comparison_tables(study: ReportedStudy) -> list[Table]:
    """Write a table for each target, the mean of targets first: a line for each method, a column for each cohort."""
    targets = list(dict.fromkeys(line["target"] for line in study.lines))
    targets.sort(key=lambda target: target != MACRO)
    return [
        _comparison_table([line for line in study.lines if line["target"] == target], titled=len(targets) > 1)
        for target in targets
    ]


def _comparison_table(lines: Sequence[Line], *, titled: bool) -> Table:
    """Write the lines of one target, with a whisker in every cell."""
    patients = {line["cohort"]: line["patients"] for line in lines}
    methods: dict[tuple[str, ...], dict[str, Line]] = {}
    for line in lines:
        key = tuple(line[name] for name in ("model", "encoder", "regime", "aggregator", "variant"))
        methods.setdefault(key, {})[line["cohort"]] = line
    rows, block = [], ""
    for (model, _, regime, *_), cells in methods.items():
        of_block = BLOCKS.get(regime, BLOCKS[BASELINE])
        if of_block != block:
            block = of_block
            rows.append(Row(heading=block))
        rows.append(Row([Cell(model), *(_comparison_cell(cells.get(cohort)) for cohort in patients)]))
    titles = [f"{COHORT_TITLES.get(cohort, cohort)} (N = {count})" for cohort, count in patients.items()]
    columns = [Column("", words=True), *(Column(title, words=True) for title in titles)]
    return Table(columns, rows, target_title(lines[0]["target"]) if titled else "")


def _comparison_cell(line: Line | None) -> Cell:
    """Write one AUC with its interval and test."""
    if line is None or not line["auc"]:
        return Cell("", why="" if line is None else line["why"])
    found = _estimate_of(line)
    test = f"p {format_p_value(float(line['p_holm']))}" if line["p_holm"] else ""
    detail = ", ".join(part for part in (format_interval(found), test) if part)
    mark = _MARKS.get(line["rank"], "")
    picture = whisker(found.value, found.low, found.high, f"AUC {format_number(found.value)}")
    return Cell(format_number(found.value), detail, line["why"], mark, picture)


def _estimate_of(line: Line) -> Estimate:
    """Read an AUC of a line."""
    value, low, high = (float(line[name]) if line[name] else None for name in ("auc", "low", "high"))
    return Estimate(value, low, high, line["why"])


def _convergence_blocks(study: ReportedStudy) -> list[Block]:
    """Draw validation AUC and loss of all methods, and show what they cost."""
    by_method: dict[str, list[ReportedRun]] = {}
    for planned in study.planned:
        if (run := study.runs.get(planned.name)) is not None and run.finished:
            by_method.setdefault(planned.method.name, []).append(run)
    methods = [(name, runs[0].method, [run.history for run in runs]) for name, runs in by_method.items()]
    figures = methods_figures(methods)
    return [*([figures] if figures.figures else []), *_part_of(study.folder / "costs.md")]


def _part_of(path: Path) -> list[Block]:
    """Read a part of a study that was written as Markdown; nothing where it has none."""
    return blocks_of(path.read_text("utf-8", errors="replace")) if path.is_file() else []


def notes_of(study: ReportedStudy) -> list[Block]:
    """Show what the study says a reader should know."""
    return [Note(inline(note)) for note in study.config.notes]
