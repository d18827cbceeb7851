"""Results of an evaluation as tables, for metrics.csv, metrics.md, the report and the terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tapfm.cohort.splits import ALL, VALIDATION
from tapfm.evaluation.metric_values import MACRO, ChosenThresholds, MetricValue, target_title
from tapfm.evaluation.model_comparison import PairedComparison
from tapfm.results.document import Block, Paragraph, Section
from tapfm.results.estimate import Estimate
from tapfm.results.formatting import MISSING, format_interval, format_p_value
from tapfm.results.table import Cell, Column, Row, Table, table_row
from tapfm.runtime.messages import format_count
from tapfm.tasks.target import BASELINE, TargetKinds

MODEL = "model"
OUT_OF_FOLD = "out-of-fold"  # in place of a split: the test slides of all folds of a cross-validation
_BASELINE_NOTE = (
    "A model that is not clearly better than this baseline may rely on stain, scanner or section size instead of "
    "tissue morphology."
)
_CSV_COLUMNS = (
    "model",
    "subgroup",
    "target",
    "metric",
    "value",
    "ci_low",
    "ci_high",
    "delong_low",
    "delong_high",
    "units",
    "positives",
    "reason",
)
MetricsByTarget = Mapping[tuple[str, str], MetricValue]  # by target and metric


@dataclass(frozen=True)
class MetricRow:
    """A metric of the model or of the baseline, on all slides or on a subgroup."""

    model: str
    subgroup: str  # empty: all slides
    metric_value: MetricValue


@dataclass(frozen=True)
class EvaluationResults:
    """All results of an evaluation."""

    about: Mapping[str, Any]  # contents of evaluation.json
    targets: TargetKinds
    rows: Sequence[MetricRow]
    chosen_thresholds: ChosenThresholds
    baseline_note: str
    differences: Sequence[PairedComparison] = ()  # model - baseline
    notes: Sequence[str] = ()
    slides_without_label: Sequence[str] = ()
    failed: Mapping[str, str] = field(default_factory=dict)  # reason by slide id
    tiles_skipped: int = 0
    slide_count: int = 0
    patient_count: int = 0

    def select_metrics(self, model: str, subgroup: str = "") -> dict[tuple[str, str], MetricValue]:
        """Return the metrics of a model by target and metric."""
        return {
            (row.metric_value.target, row.metric_value.metric): row.metric_value
            for row in self.rows
            if (row.model, row.subgroup) == (model, subgroup)
        }

    @property
    def metric_names(self) -> dict[str, str]:
        """Names of all metrics in tables."""
        return {metric: name for kind in self.targets.values() for metric, name in kind.metrics.items()}

    @property
    def main_metrics(self) -> list[str]:
        """Metrics for short tables; models are compared by the first."""
        return list(dict.fromkeys(metric for kind in self.targets.values() for metric in kind.main_metrics))

    @property
    def models(self) -> list[str]:
        """The model, and the baseline if there is one."""
        return list(dict.fromkeys(row.model for row in self.rows))

    @property
    def targets_and_mean(self) -> list[str]:
        """The targets, followed by their mean if there are several."""
        return list(dict.fromkeys(row.metric_value.target for row in self.rows))


def build_all_metrics_table(results: EvaluationResults) -> Table:
    """Return the table for metrics.csv: a row for each metric and for each AUC difference."""
    units = {target: each.units for (target, _), each in results.select_metrics(MODEL).items()}
    rows = [_csv_row(row) for row in results.rows]
    for pair in results.differences:
        difference = MetricValue(pair.target, "auc", pair.difference, None, units[pair.target], None)
        rows.append(_csv_row(MetricRow(f"{pair.first} - {pair.second}", "", difference)))
    return Table([Column(name) for name in _CSV_COLUMNS], rows)


def _csv_row(row: MetricRow) -> Row:
    each, estimate, delong = row.metric_value, row.metric_value.estimate, row.metric_value.delong
    reasons = [estimate.reason]
    if delong is not None and delong.reason and delong.reason not in reasons:
        reasons.append(delong.reason if "DeLong" in delong.reason else f"no DeLong interval: {delong.reason}")
    return table_row(
        *(row.model, row.subgroup, each.target, each.metric, estimate.value, estimate.low, estimate.high),
        *((None, None) if delong is None else (delong.low, delong.high)),
        *(each.units, each.positives, "; ".join(reason for reason in reasons if reason)),
    )


def build_evaluation_sections(results: EvaluationResults) -> list[Section]:
    """Return the sections of metrics.md, without title and figures."""
    first = [Paragraph(_describe_evaluation(results)), *(Paragraph(note, warning=True) for note in results.notes)]
    baseline: list[Block] = [Paragraph(results.baseline_note)]
    sections = [
        Section("", first),
        Section("Metrics", [build_metric_table(results)]),
        Section("Colour baseline", [*baseline, *build_baseline_tables(results)]),
    ]
    if tables := build_subgroup_tables(results):
        sections.append(Section("Subgroups", tables))
    if lines := _list_excluded(results):
        sections.append(Section("Excluded slides and tiles", [Paragraph("\n".join(lines))]))
    return sections


def _describe_evaluation(results: EvaluationResults) -> str:
    """Return text about the model, the slides and the confidence intervals."""
    about = results.about
    count = f"{format_count(results.slide_count, 'slide')} of {format_count(results.patient_count, 'patient')}"
    intervals = describe_intervals(about["unit"], about["resamples"])
    if about["split"] == OUT_OF_FOLD:
        return (
            f"Out-of-fold results of the cross-validation `{about['model']}` (`{about['table']}`): {count}, with all "
            "tiles of each slide. Each patient is predicted by the model of the fold that used this patient neither "
            f"for training nor for validation. {intervals}"
        )
    part = "all slides" if about["split"] in (None, ALL) else f"the split `{about['split']}`"
    cohort = "its own cohort" if about["cohort"] == "own" else "a cohort given with `--cohort`"
    return (
        f"The {about['kind']} `{about['model']}` was evaluated on {part} of {cohort} (`{about['table']}`): {count}, "
        f"with all tiles of each slide. {intervals}"
    )


def describe_intervals(unit: str, resamples: int) -> str:
    """Return text about the unit of the metrics and about the confidence intervals."""
    return (
        f"Each {unit} counts once. Ranges are 95% confidence intervals from {resamples:,} bootstrap resamples of "
        "patients."
    )


def build_metric_table(results: EvaluationResults) -> Table:
    """Return every metric of the model: a row for each metric, a column for each target."""
    found, targets, names = results.select_metrics(MODEL), results.targets_and_mean, results.metric_names
    by_threshold: dict[str, list[str]] = {"": [], "youden": [], "at_sensitivity": []}
    for kind in results.targets.values():
        for metric in kind.metrics:
            if metric not in by_threshold[kind.threshold_name(metric)]:
                by_threshold[kind.threshold_name(metric)].append(metric)
    first = results.main_metrics[0]
    counts = ["" if target == MACRO else _format_positives(found.get((target, first))) for target in targets]
    rows = [table_row(f"positive {results.about['unit']}s", *counts)]
    for metric in by_threshold[""]:
        rows += [_metric_row(found, metric, names[metric], targets), *_delong_interval_rows(found, metric, targets)]
    chosen = results.chosen_thresholds
    if chosen.thresholds is None:
        notes = [f"There are no metrics at a threshold, because no threshold was chosen: {chosen.source}."]
    else:
        for heading, thresholds, name in (
            ("At Youden's threshold (highest sensitivity + specificity)", chosen.thresholds.youden, "youden"),
            (
                f"At the threshold for a sensitivity of {chosen.thresholds.sensitivity:g}",
                chosen.thresholds.at_sensitivity,
                "at_sensitivity",
            ),
        ):
            rows.append(Row(heading=heading))
            rows.append(table_row("threshold", *(None if t == MACRO else thresholds.get(t) for t in targets)))
            rows += [_metric_row(found, metric, names[metric], targets) for metric in by_threshold[name]]
        notes = [f"Thresholds were chosen on {chosen.source}.{_threshold_warning(results)}"]
    titles = [Column(target_title(target)) for target in targets]
    return Table([Column("", text=True), *titles], rows, notes=notes)


def _threshold_warning(results: EvaluationResults) -> str:
    """Return a warning if thresholds are evaluated on the slides they were chosen on; empty otherwise."""
    if results.about["split"] == OUT_OF_FOLD:
        return (
            " The validation slides of each fold are test slides of another fold, so the metrics at these thresholds "
            "are slightly optimistic. The evaluation of each fold has its own thresholds, without this overlap."
        )
    if results.about["cohort"] != "own" or results.about["split"] not in (VALIDATION, ALL):
        return ""
    return " These slides are also evaluated here, so the metrics at these thresholds are optimistic."


def _format_positives(each: MetricValue | None) -> str:
    return "" if each is None or each.positives is None else f"{each.positives:,} of {each.units:,}"


def _metric_row(found: MetricsByTarget, metric: str, name: str, targets: Sequence[str]) -> Row:
    return table_row(name, *(_select_estimates(found, target, [metric])[0] for target in targets))


def _select_estimates(found: MetricsByTarget, target: str, metrics: Sequence[str]) -> list[Estimate | None]:
    """Return the estimate of each metric for one target; None if the target does not have the metric."""
    return [None if (each := found.get((target, metric))) is None else each.estimate for metric in metrics]


def _delong_interval_rows(found: MetricsByTarget, metric: str, targets: Sequence[str]) -> list[Row]:
    """Return a row with DeLong's confidence intervals, or nothing if the metric has none."""
    cells = []
    for target in targets:
        each = found.get((target, metric))
        delong = None if each is None else each.delong
        cells.append(Cell() if delong is None else Cell("", format_interval(delong), delong.reason))
    if not any(each.detail or each.reason for each in cells):
        return []
    return [Row([Cell("AUC, DeLong's confidence interval"), *cells])]


def build_overview_table(results: EvaluationResults, metrics: Sequence[str]) -> Table:
    """Return some metrics of each target, the AUC of the baseline and the difference: a row for each target."""
    found = results.select_metrics(MODEL)
    baseline = next((results.select_metrics(model) for model in results.models if model != MODEL), {})
    differences = {pair.target: pair for pair in results.differences}
    rows, names, first = [], results.metric_names, results.main_metrics[0]
    for target in results.targets_and_mean:
        pair, any_metric = differences.get(target), next(each for (name, _), each in found.items() if name == target)
        p = None if pair is None else pair.p_bootstrap if pair.p_delong is None else pair.p_delong
        detail = "" if p is None else f"p {format_p_value(p)}"
        rows.append(
            table_row(
                *(target_title(target), any_metric.units, any_metric.positives),
                *_select_estimates(found, target, metrics),
                *(_select_estimates(baseline, target, [first]) if baseline else [MISSING]),
                MISSING if pair is None else Cell(pair.difference, detail),
            )
        )
    columns = [Column("target", text=True), Column(f"{results.about['unit']}s"), Column("positive")]
    columns += [Column(names[metric], text=True) for metric in metrics]
    columns += [Column(f"baseline {names[first]}", text=True), Column("difference", float_format="+.3f", text=True)]
    return Table(columns, rows)


def build_baseline_tables(results: EvaluationResults) -> list[Table]:
    """Return a list with one table, which compares the model with the baseline; an empty list without a baseline."""
    others = [model for model in results.models if model != MODEL]
    if not others:
        return []
    found, baseline = results.select_metrics(MODEL), results.select_metrics(others[0])
    differences = {pair.target: pair for pair in results.differences}
    targets = results.targets_and_mean
    rows = []
    for metric in results.main_metrics:
        for target in targets:
            title = results.metric_names[metric] + (f", {target_title(target)}" if len(targets) > 1 else "")
            both = [*_select_estimates(found, target, [metric]), *_select_estimates(baseline, target, [metric])]
            pair = differences.get(target) if metric == results.main_metrics[0] else None
            tests = [Cell()] * 3
            if pair is not None:
                p_values = pair.p_delong, pair.p_bootstrap
                tests = [Cell(pair.difference), *(Cell("" if p is None else format_p_value(p)) for p in p_values)]
            rows.append(table_row(title, *both, *tests))
    columns = [Column("", text=True), Column(MODEL), Column(BASELINE)]
    columns += [Column("difference", float_format="+.3f"), Column("p (DeLong)"), Column("p (bootstrap)")]
    return [Table(columns, rows, notes=[_BASELINE_NOTE])]


def build_subgroup_tables(results: EvaluationResults) -> list[Table]:
    """Return a list with one table, with a row for each subgroup and target; an empty list without subgroups."""
    rows = []
    for name in dict.fromkeys(row.subgroup for row in results.rows if row.subgroup):
        found = results.select_metrics(MODEL, name)
        for target, each in {target: each for (target, _), each in found.items()}.items():
            estimates = _select_estimates(found, target, results.main_metrics)
            rows.append(table_row(name, target_title(target), each.units, each.positives, *estimates))
    columns = [Column("subgroup", text=True), Column("target", text=True)]
    columns += [Column(f"{results.about['unit']}s"), Column("positive")]
    columns += [Column(results.metric_names[metric]) for metric in results.main_metrics]
    return [Table(columns, rows)] if rows else []


def _list_excluded(results: EvaluationResults) -> list[str]:
    """Return lines about slides and tiles that were not evaluated."""
    lines = [f"- {slide_id}: {' '.join(reason.split())}" for slide_id, reason in results.failed.items()]
    if results.slides_without_label:
        lines.append(f"- {format_count(len(results.slides_without_label), 'slide')} without a label")
    if results.tiles_skipped:
        lines.append(f"- {format_count(results.tiles_skipped, 'tile')} that could not be read (`failures.csv`)")
    return lines
