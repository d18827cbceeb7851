"""metrics.csv, metrics.json and metrics.md: what was measured, for programs and for people."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tapfm.cohort.splits import ALL, VALIDATION
from tapfm.evaluation.comparing import PairedComparison
from tapfm.evaluation.estimate_text import escape_cell, format_estimate, format_p_value, interval_text, number
from tapfm.evaluation.measures import MACRO, ChosenThresholds, MetricValue, target_title
from tapfm.metrics.estimate import Estimate
from tapfm.runtime.csv_files import csv_text
from tapfm.runtime.messages import counted
from tapfm.tasks.binary_metrics import BESIDE, BY_CHOSEN, BY_YOUDEN, NAMES, THRESHOLD_FREE

MODEL = "model"
_COLUMNS = (
    *("model", "subgroup", "target", "metric", "value", "low", "high"),
    *("delong_low", "delong_high", "units", "positives", "why"),
)


@dataclass(frozen=True)
class MetricRow:
    """A line of metrics.csv."""

    model: str  # the model, or the baseline
    subgroup: str  # nothing: all
    measured: MetricValue


@dataclass(frozen=True)
class EvaluationResults:
    """Everything that an evaluation found."""

    about: Mapping[str, Any]  # evaluation.json
    rows: Sequence[MetricRow]
    chosen: ChosenThresholds
    baseline_said: str
    differences: Sequence[PairedComparison] = ()  # model - baseline
    notes: Sequence[str] = ()
    absent_targets: Sequence[str] = ()
    without_label: Sequence[str] = ()
    failed: Mapping[str, str] = field(default_factory=dict)
    tiles_skipped: int = 0
    slides: int = 0
    patients: int = 0

    def of(self, model: str, subgroup: str = "") -> dict[tuple[str, str], MetricValue]:
        """Find what was measured of a model, by target and metric."""
        return {
            (row.measured.target, row.measured.metric): row.measured
            for row in self.rows
            if (row.model, row.subgroup) == (model, subgroup)
        }

    @property
    def models(self) -> list[str]:
        """The model, and the baseline if there is one."""
        return list(dict.fromkeys(row.model for row in self.rows))

    @property
    def columns(self) -> list[str]:
        """The targets, and their mean where there are several."""
        return list(dict.fromkeys(row.measured.target for row in self.rows))


def metrics_csv(results: EvaluationResults) -> bytes:
    """Return a line for each metric, and for each difference of AUC."""
    units = {target: each.units for (target, _), each in results.of(MODEL).items()}
    differences = [
        MetricRow(
            f"{pair.first} - {pair.second}",
            "",
            MetricValue(pair.target, "auc", pair.difference, None, units[pair.target], None),
        )
        for pair in results.differences
    ]
    return csv_text(_COLUMNS, [_csv_cells(row) for row in [*results.rows, *differences]]).encode()


def _csv_cells(row: MetricRow) -> list[Any]:
    each, delong = row.measured, row.measured.delong
    numbers = [each.estimate.value, each.estimate.low, each.estimate.high]
    numbers += [None, None] if delong is None else [delong.low, delong.high]
    cells = ["" if number is None else repr(float(number)) for number in numbers]
    return [row.model, row.subgroup, each.target, each.metric, *cells, each.units, each.positives, _why_of(each)]


def _why_of(each: MetricValue) -> str:
    """Say what is missing of a metric."""
    reasons = [each.estimate.why]
    if each.delong is not None and each.delong.why and each.delong.why not in reasons:
        reasons.append(f"DeLong: {each.delong.why.removeprefix('DeLong ')}")
    return "; ".join(reason for reason in reasons if reason)


def metrics_json(results: EvaluationResults) -> bytes:
    """Write all of it, nested by model, subgroup, target and metric."""
    models: dict[str, Any] = {}
    for row in results.rows:
        each = row.measured
        of_group = models.setdefault(row.model, {}).setdefault(row.subgroup or "all", {})
        entry = _estimate_json(each.estimate) | {"units": each.units, "positives": each.positives}
        if each.delong is not None:
            entry["delong"] = _estimate_json(each.delong)
        of_group.setdefault(each.target, {})[each.metric] = entry
    thresholds = results.chosen.thresholds
    written = {
        "evaluation": results.about,
        "slides": results.slides,
        "patients": results.patients,
        "notes": list(results.notes),
        "failed": dict(results.failed),
        "without_label": list(results.without_label),
        "thresholds": {
            "chosen_on": results.chosen.where,
            "youden": None if thresholds is None else dict(thresholds.youden),
            "at_sensitivity": None if thresholds is None else dict(thresholds.chosen),
            "sensitivity": results.about["sensitivity"],
        },
        "models": models,
        "baseline": results.baseline_said,
        "model_minus_baseline": {pair.target: _pair_json(pair) for pair in results.differences},
    }
    return (json.dumps(written, indent=2, allow_nan=False) + "\n").encode()


def _estimate_json(estimate: Estimate) -> dict[str, Any]:
    """Write an estimate; the reason only where there is one."""
    numbers = {"value": estimate.value, "low": estimate.low, "high": estimate.high}
    return numbers | ({"why": estimate.why} if estimate.why else {})


def _pair_json(pair: PairedComparison) -> dict[str, Any]:
    """Write a difference and its tests."""
    tests = {"p_delong": pair.p_delong, "p_bootstrap": pair.p_bootstrap, "p_holm": pair.p_holm}
    return _estimate_json(pair.difference) | tests | ({"why_no_delong": pair.why} if pair.why else {})


def metrics_md(results: EvaluationResults) -> bytes:
    """Write one page."""
    about = results.about
    lines = [
        f"# {', '.join(about['targets'])}: {about['model']}",
        "",
        _what_was_evaluated(results),
        "",
        *(line for note in results.notes for line in (f"**{note}**", "")),
        "## Figures",
        "",
        *_figure_lines(results),
        *_threshold_lines(results),
        *_reason_lines(results),
        *_baseline_lines(results),
        *_subgroup_lines(results),
        *_failure_lines(results),
        "## Pictures",
        "",
        "![ROC](roc.png)",
        "![precision and recall](pr.png)",
        "![reliability](reliability.png)",
        "![scores](scores.png)",
        "",
    ]
    return "\n".join(lines).encode()


def _what_was_evaluated(results: EvaluationResults) -> str:
    """Say what was evaluated on what, and how the intervals come about."""
    about = results.about
    if about["cohort"] == "own":
        of = f"the split {about['split']} of its own cohort (`{about['table']}`)"
    else:
        of = f"another cohort, `{about['table']}`" + (f", split {about['split']}" if about["split"] else "")
    count = f"{counted(results.slides, 'slide')} of {counted(results.patients, 'patient')}"
    return (
        f"The {about['kind']} `{about['model']}` on {of}: {count}, all tiles of each. Figures count each "
        f"{about['unit']} once. In brackets: 95% intervals, by {about['resamples']:,} resamples of patients."
    )


def _figure_lines(results: EvaluationResults) -> list[str]:
    """Write the table of the model: a line for each metric, a column for each target."""
    found = results.of(MODEL)
    lines = _heading("", results.columns)
    lines += [_metric_line(NAMES[name], found, name, results.columns) for name in THRESHOLD_FREE]
    delong = [
        "" if (each := found.get((target, "auc"))) is None or each.delong is None else interval_text(each.delong)
        for target in results.columns
    ]
    lines.insert(3, f"| AUC, interval by DeLong | {' | '.join(delong)} |")
    positives = [found[target, "auc"] for target in results.columns if target != MACRO]
    counts = [f"{each.positives or 0:,} of {each.units:,}" for each in positives]
    lines.append(f"| positive {results.about['unit']}s | {' | '.join(counts + [''] * (MACRO in results.columns))} |")
    return [*lines, ""]


def _heading(first: str, columns: Sequence[str]) -> list[str]:
    """Begin a table."""
    names = map(target_title, columns)
    return [f"| {first} | {' | '.join(names)} |", "|---|" + "--:|" * len(columns)]


def _metric_line(name: str, found: Mapping[tuple[str, str], MetricValue], metric: str, columns: Sequence[str]) -> str:
    """Write a metric of all targets."""
    cells = [
        "" if (each := found.get((target, metric))) is None else format_estimate(each.estimate) for target in columns
    ]
    return f"| {name} | {' | '.join(cells)} |"


def _threshold_lines(results: EvaluationResults) -> list[str]:
    """Write what depends on thresholds, and where these come from."""
    thresholds, found = results.chosen.thresholds, results.of(MODEL)
    lines = ["## At a threshold", ""]
    if thresholds is None:
        return [*lines, f"None was chosen: {results.chosen.where}. Nothing is chosen on what is evaluated.", ""]
    chosen_on_these = results.about["cohort"] == "own" and results.about["split"] in (VALIDATION, ALL)
    warning = (
        "; as these are evaluated here, the figures flatter" if chosen_on_these else ", never on what is evaluated"
    )
    lines += [f"Chosen on {results.chosen.where}{warning}.", ""]
    targets = results.about["targets"]
    for said, values, metrics in (
        ("Youden's (sensitivity + specificity highest)", thresholds.youden, BY_YOUDEN),
        (f"Sensitivity {thresholds.sensitivity:g} on validation", thresholds.chosen, BY_CHOSEN),
    ):
        shown = [number(values.get(target)) for target in targets]
        shown += [""] * (MACRO in results.columns)
        lines += [*_heading(said, results.columns), f"| threshold | {' | '.join(shown)} |"]
        lines += [_metric_line(NAMES[name], found, name, results.columns) for name in metrics]
        lines.append("")
    return lines


def _reason_lines(results: EvaluationResults) -> list[str]:
    """List what the page lacks, and why, once for all metrics that lack the same; metrics.csv has the baseline's."""
    reasons: dict[tuple[str, str, str], list[str]] = {}
    for row in results.rows:
        each = row.measured
        on_page = row.model == MODEL or each.metric in BESIDE
        if on_page and not row.subgroup and (why := _why_of(each)):
            reasons.setdefault((row.model, each.target, why), []).append(each.metric)
    if not reasons:
        return []
    lines = ["## What is missing", ""]
    for (model, target, why), metrics in reasons.items():
        of = f"{model}, " if model != MODEL else ""
        lines.append(f"- {of}{target_title(target)}: {', '.join(metrics)}: {why}")
    return [*lines, ""]


def _baseline_lines(results: EvaluationResults) -> list[str]:
    """Put the model beside the baseline."""
    lines = ["## Beside colours and tile count", "", results.baseline_said, ""]
    others = [model for model in results.models if model != MODEL]
    if not others:
        return lines
    found, baseline = results.of(MODEL), results.of(others[0])
    lines += ["|  | model | baseline | difference | p (DeLong) | p (bootstrap) |", "|---|--:|--:|--:|--:|--:|"]
    differences = {pair.target: pair for pair in results.differences}
    for target in results.columns:
        pair = differences.get(target)
        cells = [format_estimate(each[target, "auc"].estimate) for each in (found, baseline)]
        cells += ["", "", ""] if pair is None else [format_estimate(pair.difference, sign=True), *_tests(pair)]
        lines.append(f"| AUC {target_title(target)} | {' | '.join(cells)} |")
    for name in BESIDE[1:]:
        for target in results.columns:
            both = [format_estimate(each[target, name].estimate) for each in (found, baseline)]
            lines.append(f"| {NAMES[name]} {target_title(target)} | {' | '.join(both)} |  |  |  |")
    lines += ["", "A model that is not clearly above it may have learnt stain, scanner or section size."]
    return [*lines, ""]


def _tests(pair: PairedComparison) -> list[str]:
    """Write the p values of a difference."""
    return [format_p_value(pair.p_delong), format_p_value(pair.p_bootstrap)]


def _subgroup_lines(results: EvaluationResults) -> list[str]:
    """Write a line for each subgroup and target."""
    rows = [row for row in results.rows if row.subgroup]
    if not rows:
        return []
    lines = ["## Subgroups", ""]
    lines += [f"| subgroup | target | {results.about['unit']}s | positive | AUC | average precision | Brier score | |"]
    lines += ["|---|---|--:|--:|--:|--:|--:|---|"]
    for name in dict.fromkeys(row.subgroup for row in rows):
        found = results.of(MODEL, name)
        for target in dict.fromkeys(target for target, _ in found):
            each = found[target, "auc"]
            cells = [format_estimate(found[target, metric].estimate) for metric in BESIDE]
            positives = "" if each.positives is None else f"{each.positives:,}"
            lines.append(
                f"| {escape_cell(name)} | {target_title(target)} | {each.units:,} | {positives} | "
                f"{' | '.join(cells)} | {escape_cell(each.estimate.why)} |"
            )
    return [*lines, ""]


def _failure_lines(results: EvaluationResults) -> list[str]:
    """List what could not be evaluated."""
    lines = [f"- {slide_id}: {' '.join(reason.split())}" for slide_id, reason in results.failed.items()]
    if results.without_label:
        lines.append(f"- without any label, and not used: {counted(len(results.without_label), 'slide')}")
    if results.tiles_skipped:
        lines.append(f"- skipped: {counted(results.tiles_skipped, 'tile')} (`failures.csv`)")
    return ["## What could not be evaluated", "", *lines, ""] if lines else []
