"""Main result of a study or of several runs: a row for each model, a column for each set of slides.

The model that is chosen on validation slides is marked. Its AUC on test slides is the result, not the highest AUC on
test slides: that AUC would be too high, because it is the best of several on the slides that it is measured on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tapfm.evaluation.metric_values import MACRO, target_title
from tapfm.results.estimate import Estimate
from tapfm.results.formatting import format_estimate
from tapfm.results.table import Cell, Column, Row, Table
from tapfm.runtime.messages import format_count
from tapfm.study.comparison import COHORT_TITLES
from tapfm.study.validation import CHOICE_RULE
from tapfm.tasks.target import BASELINE

RESULT_TITLE = "Result"  # of the section of study.md and study.json with the headline
VALIDATION_TITLE = "Validation"
CHOSEN = "chosen on validation"
OPTIMISTIC = "Epochs were selected on the validation slides, so validation AUCs are optimistic."
# shown with the title of a model, as in the paper, which names the method only if it is TAPFM
METHOD_DETAILS = {"fixed": "fixed encoder", "finetune": "fine-tuned encoder", BASELINE: "no encoder"}
CsvRow = Mapping[str, str]


@dataclass(frozen=True)
class MeasuredAuc:
    """An AUC and the number of patients and slides that it was measured on."""

    auc: Estimate
    patients: int
    slides: int | None = None

    def describe_size(self) -> str:
        """Return the number of patients, and that of slides if it differs."""
        patients = format_count(self.patients, "patient")
        return patients if self.slides in (None, self.patients) else f"{patients}, {format_count(self.slides, 'slide')}"


@dataclass(frozen=True)
class HeadlineRow:
    """The AUCs of one model for one target."""

    model: str
    target: str  # or "macro"
    aucs: Mapping[str, MeasuredAuc]  # by title of the set of slides
    detail: str = ""
    chosen: bool = False

    @property
    def validation_auc(self) -> float | None:
        return self.aucs[VALIDATION_TITLE].auc.value if VALIDATION_TITLE in self.aucs else None


def build_headline(rows: Sequence[HeadlineRow], notes: Sequence[str] = (), *, metric: str = "AUC") -> Table:
    """Return the table. Validation is the first column; targets are headings if there are several."""
    titles = list(dict.fromkeys(title for row in rows for title in row.aucs))
    titles.sort(key=lambda title: title != VALIDATION_TITLE)
    by_target: dict[str, list[HeadlineRow]] = {}
    for row in rows:
        by_target.setdefault(row.target, []).append(row)
    table_rows = []
    for target, of_target in by_target.items():
        if len(by_target) > 1:
            table_rows.append(Row(heading=target_title(target)))
        table_rows += [_table_row(row, titles, bold=row.chosen or len(of_target) == 1) for row in of_target]
    columns = [Column("Model", text=True), *(Column(f"{title} {metric} (95% CI)") for title in titles)]
    return Table(columns, table_rows, notes=notes)


def _table_row(row: HeadlineRow, titles: Sequence[str], *, bold: bool) -> Row:
    detail = ", ".join(part for part in (CHOSEN if row.chosen else "", row.detail) if part)
    cells = [Cell(row.model, detail, rank=int(bold))]
    for title in titles:
        if (measured := row.aucs.get(title)) is None:
            cells.append(Cell())
        else:
            cells.append(Cell(measured.auc, measured.describe_size(), rank=int(bold and title != VALIDATION_TITLE)))
    return Row(cells)


def read_headline_rows(csv_rows: Sequence[CsvRow]) -> list[HeadlineRow]:
    """Return the models of a study from the rows of its table_*.csv; with several targets in one model, their mean."""
    if any(row["target"] == MACRO for row in csv_rows):
        csv_rows = [row for row in csv_rows if row["target"] == MACRO]
    grouped: dict[tuple[str, str], list[CsvRow]] = {}
    for row in csv_rows:
        grouped.setdefault((row["target"], row["model"]), []).append(row)
    targets = list(dict.fromkeys(row["target"] for row in csv_rows))
    ordered = sorted(grouped.items(), key=lambda item: targets.index(item[0][0]))
    return [_read_model(model, target, rows) for (target, model), rows in ordered]


def _read_model(model: str, target: str, rows: Sequence[CsvRow]) -> HeadlineRow:
    first = rows[0]
    aucs = {}
    if first.get("validation_patients"):
        aucs[VALIDATION_TITLE] = _read_auc(first, "validation_")
    aucs |= {COHORT_TITLES.get(row["cohort"], row["cohort"]): _read_auc(row, "") for row in rows}
    runs = int(first.get("runs") or 1)
    detail = [METHOD_DETAILS.get(first["method"], ""), *([f"{runs} runs"] if runs > 1 else [])]
    return HeadlineRow(model, target, aucs, ", ".join(filter(None, detail)), first.get("chosen") == "1")


def _read_auc(row: CsvRow, prefix: str) -> MeasuredAuc:
    """Return an AUC of a row; files of older versions have no number of slides."""
    names = (f"{prefix}auc", f"{prefix}ci_low", f"{prefix}ci_high")
    value, low, high = (float(row[name]) if row[name] else None for name in names)
    slides = row.get(f"{prefix}slides")
    estimate = Estimate(value, low, high, row[f"{prefix}reason"])
    return MeasuredAuc(estimate, int(row[f"{prefix}patients"]), int(slides) if slides else None)


def build_study_headline(rows: Sequence[HeadlineRow], *, with_choice: bool) -> Table:
    """Return the headline of a study, with a note on how the model was chosen, and optionally on which one."""
    if not rows:
        return build_headline(rows)
    return build_headline(rows, [*(describe_choice(rows) if with_choice else []), _describe_rule(rows)])


def _describe_rule(rows: Sequence[HeadlineRow]) -> str:
    """Return how the marked model was chosen, or why there is none."""
    if any(row.chosen for row in rows):
        return f"How the model is chosen: {CHOICE_RULE}. Test and external slides are not used. {OPTIMISTIC}"
    if not any(row.validation_auc is not None for row in rows):
        return "No model is chosen, because there are no validation AUCs."
    return OPTIMISTIC


def describe_choice(rows: Sequence[HeadlineRow]) -> list[str]:
    """Return for each target the chosen model, or the only one, and its AUC on each set of slides."""
    by_target: dict[str, list[HeadlineRow]] = {}
    for row in rows:
        if row.chosen or row.validation_auc is not None:
            by_target.setdefault(row.target, []).append(row)
    sentences = []
    for target, of_target in by_target.items():
        row = next((row for row in of_target if row.chosen), of_target[0])
        if row.chosen or len(of_target) == 1:
            label = f"{CHOSEN.capitalize()}{f' for {target}' if len(by_target) > 1 else ''}: " if row.chosen else ""
            measured = "; ".join(_describe_auc(title, each) for title, each in row.aucs.items())
            sentences.append(f"{label}{row.model}. AUC: {measured}.")
    return sentences


def _describe_auc(title: str, measured: MeasuredAuc) -> str:
    return f"{title.lower()} {format_estimate(measured.auc)}, {measured.describe_size()}"
