"""metrics.json: the results of an evaluation, complete, to be read by programs and by `tapfm report`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tapfm.errors import InputError
from tapfm.evaluation.method_comparison import PairedComparison
from tapfm.evaluation.metric_tables import MODEL, EvaluationResults, MetricRow
from tapfm.evaluation.metric_values import ChosenThresholds, MetricValue, Thresholds
from tapfm.results.estimate import Estimate
from tapfm.tasks.catalog import target_kinds

_ALL = "all"  # slides, in place of a subgroup
_NEEDED = ("targets", "unit", "cohort", "split", "table", "sensitivity", "resamples", "seed")


def metrics_json(results: EvaluationResults) -> bytes:
    """Return all results, nested by model, subgroup, target and metric."""
    models: dict[str, Any] = {}
    for row in results.rows:
        each = row.metric_value
        of_group = models.setdefault(row.model, {}).setdefault(row.subgroup or _ALL, {})
        entry = _estimate_entry(each.estimate) | {"units": each.units, "positives": each.positives}
        if each.delong is not None:
            entry["delong"] = _estimate_entry(each.delong)
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
            "chosen_on": results.chosen.source,
            "youden": None if thresholds is None else dict(thresholds.youden),
            "at_sensitivity": None if thresholds is None else dict(thresholds.at_sensitivity),
            "sensitivity": results.about["sensitivity"],
        },
        "models": models,
        "baseline": results.baseline_note,
        "model_minus_baseline": {pair.target: _pair_entry(pair) for pair in results.differences},
    }
    return (json.dumps(written, indent=2, allow_nan=False) + "\n").encode()


def _estimate_entry(estimate: Estimate) -> dict[str, Any]:
    """Return an estimate; the reason only where there is one."""
    numbers = {"value": estimate.value, "low": estimate.low, "high": estimate.high}
    return numbers | ({"reason": estimate.reason} if estimate.reason else {})


def _pair_entry(pair: PairedComparison) -> dict[str, Any]:
    tests = {"p_delong": pair.p_delong, "p_bootstrap": pair.p_bootstrap, "p_holm": pair.p_holm}
    return _estimate_entry(pair.difference) | tests | ({"why_no_delong": pair.reason} if pair.reason else {})


def read_metrics_json(path: Path) -> EvaluationResults:
    """Read the results of a finished evaluation."""
    try:
        found = json.loads(path.read_text("utf-8"))
        about = dict(found["evaluation"])
        if missing := [name for name in _NEEDED if name not in about]:
            raise ValueError(f"it does not say {', '.join(missing)}")
        about |= {"resamples": int(about["resamples"]), "seed": int(about["seed"])}
        thresholds = found["thresholds"]
        chosen = None
        if thresholds["youden"] is not None:
            chosen = Thresholds(
                dict(thresholds["youden"]), dict(thresholds["at_sensitivity"]), float(thresholds["sensitivity"])
            )
        others = [model for model in found["models"] if model != MODEL]
        return EvaluationResults(
            about=about,
            kinds=target_kinds(about["targets"]),
            rows=[
                MetricRow(model, "" if subgroup == _ALL else subgroup, _metric_value(target, metric, entry))
                for model, of_model in found["models"].items()
                for subgroup, of_group in of_model.items()
                for target, of_target in of_group.items()
                for metric, entry in of_target.items()
            ],
            chosen=ChosenThresholds(chosen, str(thresholds["chosen_on"])),
            baseline_note=str(found["baseline"]),
            differences=[
                _pair(target, entry, others[0]) for target, entry in found["model_minus_baseline"].items() if others
            ],
            notes=list(found["notes"]),
            without_label=list(found["without_label"]),
            failed=dict(found["failed"]),
            slides=int(found["slides"]),
            patients=int(found["patients"]),
        )
    except (OSError, LookupError, TypeError, ValueError, AttributeError) as error:
        raise InputError(
            f"{path} cannot be read ({error}).", hint="Evaluate again into another folder: tapfm evaluate"
        ) from error


def _metric_value(target: str, metric: str, entry: Mapping[str, Any]) -> MetricValue:
    delong = _estimate(entry["delong"]) if "delong" in entry else None
    return MetricValue(target, metric, _estimate(entry), delong, int(entry["units"]), entry["positives"])


def _estimate(entry: Mapping[str, Any]) -> Estimate:
    return Estimate(entry["value"], entry["low"], entry["high"], entry.get("reason", ""))


def _pair(target: str, entry: Mapping[str, Any], baseline: str) -> PairedComparison:
    tests = entry["p_bootstrap"], entry["p_delong"], entry["p_holm"]
    return PairedComparison(MODEL, baseline, target, _estimate(entry), *tests, entry.get("why_no_delong", ""))
