"""The tables of what was measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tapfm.evaluation.measures import MACRO, target_title
from tapfm.report.charts import whisker, whisker_scale
from tapfm.report.content import Cell, Column, Note, Row, Table
from tapfm.report.numbers import estimate_cell, format_interval, format_number
from tapfm.report.result import MetricsByTarget, SplitResult
from tapfm.tasks.binary_metrics import BESIDE, BY_CHOSEN, BY_YOUDEN, NAMES, THRESHOLD_FREE


def headline(results: Sequence[tuple[str, SplitResult]]) -> Table:
    """Show the AUC of each target on each set; results come with the name of their model, where there are several."""
    rows: list[Row] = []
    for model, result in results:
        several = len(result.columns) > 1
        name = f"{model}, {result.title}" if model else result.title
        if several:
            rows.append(Row(heading=name))
        for target in result.columns:
            found = result.measured.get((target, "auc"))
            if found is None:
                continue
            estimate, line = found.estimate, target_title(target) if several else name
            said = f"AUC {format_number(estimate.value)}" + (
                f", 95% interval {format_interval(estimate)}" if format_interval(estimate) else ""
            )
            rows.append(
                Row(
                    [
                        Cell(line),
                        Cell(format_number(estimate.value), mark="best"),
                        Cell("", picture=whisker(estimate.value, estimate.low, estimate.high, said)),
                        Cell("", format_interval(estimate), estimate.why),
                        Cell("" if found.positives is None else f"{found.positives:,} of {found.units:,}"),
                    ]
                )
            )
    units = {f"{result.unit}s" for _, result in results}
    positive = f"Positive {units.pop()}" if len(units) == 1 else "Positive"
    columns = [Column("", words=True), Column("AUC"), Column("", words=True, picture=whisker_scale())]
    return Table([*columns, Column("95% interval", words=True), Column(positive)], rows)


def metric_blocks(result: SplitResult) -> list[Table | Note]:
    """Show everything that was measured of a set: whatever the threshold, then at thresholds."""
    counts = [result.measured.get((target, "auc")) for target in result.columns]
    cells = [
        Cell("" if each is None or each.positives is None else f"{each.positives:,} of {each.units:,}")
        for each in counts
    ]
    rows = [Row([Cell(f"positive {result.unit}s"), *cells]), *_metric_rows(result, THRESHOLD_FREE)]
    chosen = any(value is not None for value in [*result.youden.values(), *result.at_sensitivity.values()])
    if chosen:
        rows.append(Row(heading="At Youden's threshold, where sensitivity + specificity was highest on validation"))
        rows += [_threshold_row(result, result.youden), *_metric_rows(result, BY_YOUDEN)]
        rows.append(
            Row(heading=f"At the threshold that had a sensitivity of {result.sensitivity:g} or more on validation")
        )
        rows += [_threshold_row(result, result.at_sensitivity), *_metric_rows(result, BY_CHOSEN)]
    where = f"Thresholds were chosen on {result.chosen_on}." if chosen else f"No threshold: {result.chosen_on}."
    several = len(result.columns) > 1
    columns = [Column("", words=True), *(Column(target_title(target) if several else "") for target in result.columns)]
    blocks: list[Table | Note] = [Table(columns, rows, notes=[where])]
    if result.baseline_measured:
        blocks.append(_baseline_table(result))
    if result.subgroups:
        blocks.append(_subgroup_table(result))
    return blocks


def _metric_rows(result: SplitResult, metrics: Sequence[str]) -> list[Row]:
    """Write a line for each metric, a cell for each target."""
    rows = []
    for metric in metrics:
        found = [result.measured.get((target, metric)) for target in result.columns]
        cells = [estimate_cell(None if each is None else each.estimate) for each in found]
        rows.append(Row([Cell(NAMES[metric]), *cells]))
        if any(each is not None and each.delong is not None for each in found):
            by_delong = [None if each is None else each.delong for each in found]
            cells = [Cell("") if each is None else Cell("", format_interval(each), each.why) for each in by_delong]
            rows.append(Row([Cell(f"{NAMES[metric]}, interval by DeLong"), *cells]))
    return rows


def _threshold_row(result: SplitResult, thresholds: Mapping[str, float | None]) -> Row:
    """Write the thresholds themselves."""
    cells = [Cell("" if target == MACRO else format_number(thresholds.get(target))) for target in result.columns]
    return Row([Cell("threshold"), *cells])


def _baseline_table(result: SplitResult) -> Table:
    """Put the model beside colours and tile count."""
    rows = []
    for metric in BESIDE:
        for target in result.columns:
            both = [of.get((target, metric)) for of in (result.measured, result.baseline_measured)]
            name = NAMES[metric] + (f", {target_title(target)}" if len(result.columns) > 1 else "")
            rows.append(Row([Cell(name), *(estimate_cell(None if each is None else each.estimate) for each in both)]))
    note = "A model that is not clearly above it may have learnt stain, scanner or section size."
    columns = [Column("", words=True), Column("model"), Column("colours and tile count")]
    return Table(columns, rows, "Beside colours and tile count", [note])


def _subgroup_table(result: SplitResult) -> Table:
    """Write a line for each subgroup and target."""
    rows = []
    for name, of_group in result.subgroups.items():
        for target in result.columns:
            if (auc := of_group.get((target, "auc"))) is None:
                continue
            cells = [_subgroup_cell(of_group, target, metric) for metric in BESIDE]
            positives = "" if auc.positives is None else f"{auc.positives:,}"
            rows.append(Row([Cell(name), Cell(target_title(target)), Cell(f"{auc.units:,}"), Cell(positives), *cells]))
    columns = [Column("", words=True), Column("target", words=True), Column(f"{result.unit}s"), Column("positive")]
    return Table([*columns, *(Column(NAMES[metric]) for metric in BESIDE)], rows, "Subgroups")


def _subgroup_cell(of_group: MetricsByTarget, target: str, metric: str) -> Cell:
    """Write one metric of a subgroup."""
    found = of_group.get((target, metric))
    return estimate_cell(None if found is None else found.estimate)
