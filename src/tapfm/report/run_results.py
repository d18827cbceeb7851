"""Results of a run: from its evaluations, or measured here from the predictions it wrote when it finished."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from tapfm.cohort.splits import ALL, TEST, TRAIN, VALIDATION
from tapfm.evaluation.metric_tables import describe_intervals
from tapfm.evaluation.metric_values import ChosenThresholds, choose_thresholds
from tapfm.evaluation.metrics_json import read_metrics_json
from tapfm.evaluation.predictions import Prediction, read_predictions
from tapfm.evaluation.results import BaselinePredictions, EvaluatedTable, EvaluationSettings, evaluate_predictions
from tapfm.report.finding import ResultFolder
from tapfm.report.result import EvaluatedSlideSet
from tapfm.report.runs import ReportedRun
from tapfm.runtime.messages import format_count
from tapfm.tasks.catalog import target_kinds

_TITLES = {VALIDATION: "validation", TEST: "test"}
_CHOSEN_HERE = "The epoch and the thresholds were chosen on these slides, so these metrics are optimistic."
_OPTIMISTIC = {  # splits of a run's own cohort
    VALIDATION: _CHOSEN_HERE,
    TRAIN: "The model was trained on these slides, so these metrics are optimistic.",
    ALL: "The model was trained on some of these slides, and the epoch and the thresholds were chosen on others, so "
    "these metrics are optimistic.",
}


def _result_of_split(run: ReportedRun, split: str, resamples: int) -> EvaluatedSlideSet:
    """Measure what a finished run predicted for one of its splits."""
    predictions, validation = run.predictions[split], run.predictions.get(VALIDATION, ())
    settings, kinds = EvaluationSettings(run.unit, resamples=resamples), target_kinds(run.targets)
    chosen = choose_thresholds(validation, kinds, run.unit, settings.sensitivity) if validation else None
    where = f"{format_count(len(validation), 'validation slide')} of the run" if validation else ""
    results = evaluate_predictions(
        predictions,
        kinds,
        settings,
        thresholds=ChosenThresholds(chosen, where or "the run has no predictions of validation slides"),
        groups=(),
        baseline=BaselinePredictions((), (), ""),
        table=EvaluatedTable("split.csv", (), ()),
        about={
            "targets": list(run.targets),
            "unit": run.unit,
            "cohort": "own",
            "split": split,
            "sensitivity": settings.sensitivity,
            "resamples": settings.resamples,
            "seed": settings.seed,
        },
    )
    return EvaluatedSlideSet(
        title=_TITLES.get(split, split),
        about=f"{_size(predictions)} of the run's own cohort, all tiles of each, measured for this page from "
        f"predictions-{split}.csv. {describe_intervals(run.unit, resamples)}",
        results=results,
        predictions=predictions,
        warning=_CHOSEN_HERE if split == VALIDATION else "",
    )


def _result_of_evaluation(found: ResultFolder, run: ReportedRun) -> EvaluatedSlideSet:
    """Read what `tapfm evaluate` measured; the title names a model that is not the run."""
    results = read_metrics_json(found.path / "metrics.json")
    about = results.about
    own, split, table = about["cohort"] == "own", about["split"], about["table"]
    title = _TITLES.get(split, split) if own else table + (f", {split}" if split else "")
    cohort = f"the run's own cohort ({table})" if own else "another cohort"
    intervals = describe_intervals(about["unit"], about["resamples"])
    predictions = read_predictions(found.path / "predictions.csv")
    model = "" if found.made_by(run.weights_sha256) else Path(found.model).name
    another = [f"By {found.maker}, not by the run {run.name}."] if model else []
    return EvaluatedSlideSet(
        title=f"{title}, by {model}" if model else title,
        about=f"{_size(predictions)} of {cohort}, all tiles of each, by tapfm evaluate ({found.path.name}). "
        f"{intervals}",
        results=replace(results, notes=(*another, *results.notes)),
        predictions=predictions,
        baseline=_baseline_of(found.path) if len(results.models) > 1 else (),
        warning=_OPTIMISTIC.get(split, "") if own else "",
        own=own,
        model=model,
    )


def _baseline_of(folder: Path) -> list[Prediction]:
    """Read the predictions of the colour baseline, if they were kept."""
    path = folder / "predictions-baseline.csv"
    return read_predictions(path) if path.is_file() else []


def _size(predictions: Sequence[Prediction]) -> str:
    """Count slides and patients."""
    patients = len({(each.cohort, each.patient_id) for each in predictions})
    return f"{format_count(len(predictions), 'slide')} of {format_count(patients, 'patient')}"


def read_run_results(run: ReportedRun, evaluations: list[ResultFolder], resamples: int) -> list[EvaluatedSlideSet]:
    """Gather the results of a run: test first, then other cohorts, what something was chosen on last.

    A split that was evaluated is not measured again.
    """
    evaluated = [(each.path.name, _result_of_evaluation(each, run)) for each in evaluations]
    own = {result.title for _, result in evaluated if result.own and not result.model}
    measured = [("", _result_of_split(run, split, resamples)) for split in run.predictions if _TITLES[split] not in own]
    return _told_apart(
        sorted([*measured, *evaluated], key=lambda each: (bool(each[1].warning), each[1].title != _TITLES[TEST]))
    )


def _told_apart(named: Sequence[tuple[str, EvaluatedSlideSet]]) -> list[EvaluatedSlideSet]:
    """Add their folders to the titles that several results have, as where a split was evaluated twice."""
    titles = [result.title for _, result in named]
    return [
        result
        if titles.count(result.title) == 1
        else replace(result, title=f"{result.title} ({folder})", group=result.title)
        for folder, result in named
    ]
