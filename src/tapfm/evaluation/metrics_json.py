"""metrics.json: all results of an evaluation, for other programs and for `tapfm report`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tapfm.errors import InputError
from tapfm.evaluation.metric_tables import MODEL, EvaluationResults, MetricRow
from tapfm.evaluation.metric_values import ChosenThresholds, MetricValue, Thresholds
from tapfm.evaluation.model_comparison import PairedComparison
from tapfm.results.estimate import Estimate
from tapfm.tasks.catalog import target_kinds

_ALL_SLIDES = "all"  # in place of a subgroup
_REQUIRED = ("targets", "unit", "cohort", "split", "table", "sensitivity", "resamples", "seed")


def format_metrics_json(results: EvaluationResults) -> bytes:
    """Return all results, nested by model, subgroup, target and metric."""
    models: dict[str, Any] = {}
    for row in results.rows:
        each = row.metric_value
        targets = models.setdefault(row.model, {}).setdefault(row.subgroup or _ALL_SLIDES, {})
        entry = _estimate_entry(each.estimate) | {"units": each.units, "positives": each.positives}
        if each.delong is not None:
            entry["delong"] = _estimate_entry(each.delong)
        targets.setdefault(each.target, {})[each.metric] = entry
    thresholds = results.chosen_thresholds.thresholds
    contents = {
        "evaluation": results.about,
        "slides": results.slide_count,
        "patients": results.patient_count,
        "notes": list(results.notes),
        "failed": dict(results.failed),
        "without_label": list(results.slides_without_label),
        "thresholds": {
            "chosen_on": results.chosen_thresholds.source,
            "youden": None if thresholds is None else dict(thresholds.youden),
            "at_sensitivity": None if thresholds is None else dict(thresholds.at_sensitivity),
            "sensitivity": results.about["sensitivity"],
        },
        "models": models,
        "baseline": results.baseline_note,
        "model_minus_baseline": {pair.target: _pair_entry(pair) for pair in results.differences},
    }
    return (json.dumps(contents, indent=2, allow_nan=False) + "\n").encode()


def _estimate_entry(estimate: Estimate) -> dict[str, Any]:
    """Return an estimate, with the reason for missing values if there is one."""
    values = {"value": estimate.value, "low": estimate.low, "high": estimate.high}
    return values | ({"reason": estimate.reason} if estimate.reason else {})


def _pair_entry(pair: PairedComparison) -> dict[str, Any]:
    p_values = {"p_delong": pair.p_delong, "p_bootstrap": pair.p_bootstrap, "p_holm": pair.p_holm}
    return _estimate_entry(pair.difference) | p_values | ({"why_no_delong": pair.reason} if pair.reason else {})


def read_metrics_json(path: Path) -> EvaluationResults:
    """Read the results of a finished evaluation."""
    try:
        contents = json.loads(path.read_text("utf-8"))
        about = dict(contents["evaluation"])
        if missing := [name for name in _REQUIRED if name not in about]:
            raise ValueError(f"missing in 'evaluation': {', '.join(missing)}")
        about |= {"resamples": int(about["resamples"]), "seed": int(about["seed"])}
        entry = contents["thresholds"]
        thresholds = None
        if entry["youden"] is not None:
            thresholds = Thresholds(dict(entry["youden"]), dict(entry["at_sensitivity"]), float(entry["sensitivity"]))
        others = [model for model in contents["models"] if model != MODEL]
        return EvaluationResults(
            about=about,
            targets=target_kinds(about["targets"], about.get("labels")),
            rows=[
                MetricRow(
                    model, "" if subgroup == _ALL_SLIDES else subgroup, _parse_metric_value(target, metric, value)
                )
                for model, subgroups in contents["models"].items()
                for subgroup, targets in subgroups.items()
                for target, metrics in targets.items()
                for metric, value in metrics.items()
            ],
            chosen_thresholds=ChosenThresholds(thresholds, str(entry["chosen_on"])),
            baseline_note=str(contents["baseline"]),
            differences=[
                _parse_pair(target, pair, others[0])
                for target, pair in contents["model_minus_baseline"].items()
                if others
            ],
            notes=list(contents["notes"]),
            slides_without_label=list(contents["without_label"]),
            failed=dict(contents["failed"]),
            slide_count=int(contents["slides"]),
            patient_count=int(contents["patients"]),
        )
    except (OSError, LookupError, TypeError, ValueError, AttributeError) as error:
        raise InputError(
            f"{path} cannot be read ({error}).",
            hint="To write it again, run the same tapfm evaluate command with --resume.",
        ) from error


def _parse_metric_value(target: str, metric: str, entry: Mapping[str, Any]) -> MetricValue:
    delong = _parse_estimate(entry["delong"]) if "delong" in entry else None
    return MetricValue(target, metric, _parse_estimate(entry), delong, int(entry["units"]), entry["positives"])


def _parse_estimate(entry: Mapping[str, Any]) -> Estimate:
    return Estimate(entry["value"], entry["low"], entry["high"], entry.get("reason", ""))


def _parse_pair(target: str, entry: Mapping[str, Any], baseline: str) -> PairedComparison:
    p_values = entry["p_bootstrap"], entry["p_delong"], entry["p_holm"]
    return PairedComparison(MODEL, baseline, target, _parse_estimate(entry), *p_values, entry.get("why_no_delong", ""))
