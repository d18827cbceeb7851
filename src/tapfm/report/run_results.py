"""Results of a run: its evaluations, and metrics of its own predictions for splits without an evaluation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from tapfm.cohort.splits import ALL, TEST, TRAIN, VALIDATION
from tapfm.evaluation.metric_tables import describe_intervals
from tapfm.evaluation.metric_values import ChosenThresholds, choose_thresholds
from tapfm.evaluation.metrics_json import read_metrics_json
from tapfm.evaluation.model_evaluation import (
    BaselinePredictions,
    EvaluatedTable,
    EvaluationSettings,
    evaluate_predictions,
)
from tapfm.evaluation.predictions import Prediction, read_predictions
from tapfm.report.reported_run import ReportedRun
from tapfm.report.result_folders import ResultFolder
from tapfm.report.slide_set_results import SlideSetResults
from tapfm.runtime.messages import format_count

VALIDATION_TITLE = "validation"
_TITLES = {VALIDATION: VALIDATION_TITLE, TEST: "test"}
_USED_FOR_SELECTION = "The epoch and the thresholds were chosen on these slides, so these metrics are optimistic."
_WARNINGS = {  # for splits of the run's own cohort
    VALIDATION: _USED_FOR_SELECTION,
    TRAIN: "The model was trained on these slides, so these metrics are optimistic.",
    ALL: "The model was trained on some of these slides, and the epoch and the thresholds were chosen on others, so "
    "these metrics are optimistic.",
}


def _evaluate_split(run: ReportedRun, split: str, resamples: int) -> SlideSetResults:
    """Compute the metrics of a split from the predictions in the run folder."""
    predictions, validation = run.predictions[split], run.predictions.get(VALIDATION, ())
    settings, targets = EvaluationSettings(run.unit, resamples=resamples), run.kinds
    thresholds = choose_thresholds(validation, targets, run.unit, settings.sensitivity) if validation else None
    thresholds_source = (
        f"{format_count(len(validation), 'validation slide')} of the run"
        if validation
        else "the run has no validation predictions"
    )
    results = evaluate_predictions(
        predictions,
        targets,
        settings,
        thresholds=ChosenThresholds(thresholds, thresholds_source),
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
    return SlideSetResults(
        title=_TITLES.get(split, split),
        description=f"{describe_size(predictions)} from the run's own cohort, with all tiles. The metrics were "
        f"computed for this report from predictions-{split}.csv. {describe_intervals(run.unit, resamples)}",
        results=results,
        predictions=predictions,
        warning=_USED_FOR_SELECTION if split == VALIDATION else "",
    )


def read_evaluation_results(folder: ResultFolder, run_name: str, *, is_own: bool) -> SlideSetResults:
    """Read the results of `tapfm evaluate`. The title contains the model if it is not the reported run.

    is_own: whether the evaluated model is the reported one.
    """
    results = read_metrics_json(folder.path / "metrics.json")
    about = results.about
    own_cohort, split, table = about["cohort"] == "own", about["split"], about["table"]
    title = _TITLES.get(split, split) if own_cohort else table + (f", {split}" if split else "")
    intervals = describe_intervals(about["unit"], about["resamples"])
    predictions = read_predictions(folder.path / "predictions.csv")
    model = "" if is_own else Path(folder.model).name
    own_name = f"the cohort of {model}" if model else "the run's own cohort"
    cohort = f"{own_name} ({table})" if own_cohort else f"the cohort table {table}"
    model_notes = [f"These are results of {folder.describe_model()}, not of the run {run_name}."] if model else []
    return SlideSetResults(
        title=f"{title}, by {model}" if model else title,
        description=f"{describe_size(predictions)} from {cohort}, with all tiles. The metrics were computed by "
        f"tapfm evaluate (folder {folder.path.name}). {intervals}",
        results=replace(results, notes=(*model_notes, *results.notes)),
        predictions=predictions,
        baseline=_read_baseline(folder.path) if len(results.models) > 1 else (),
        warning=_WARNINGS.get(split, "") if own_cohort else "",
        own_cohort=own_cohort,
        model=model,
    )


def _read_baseline(folder: Path) -> list[Prediction]:
    """Read the predictions of the colour baseline; return an empty list if there is no file."""
    path = folder / "predictions-baseline.csv"
    return read_predictions(path) if path.is_file() else []


def describe_size(predictions: Sequence[Prediction]) -> str:
    """Return the number of slides and patients."""
    patients = len({(each.cohort, each.patient_id) for each in predictions})
    return f"{format_count(len(predictions), 'slide')} of {format_count(patients, 'patient')}"


def read_run_results(run: ReportedRun, evaluations: list[ResultFolder], resamples: int) -> list[SlideSetResults]:
    """Return the results of a run: test first, then other cohorts, and sets with optimistic metrics last.

    Metrics are computed here only for splits without an evaluation.
    """
    sha256 = run.best_checkpoint_sha256
    evaluated = [
        (folder.path.name, read_evaluation_results(folder, run.name, is_own=folder.is_result_of(sha256)))
        for folder in evaluations
    ]
    evaluated_splits = {result.title for _, result in evaluated if result.own_cohort and not result.model}
    computed = [
        ("", _evaluate_split(run, split, resamples))
        for split in run.predictions
        if _TITLES[split] not in evaluated_splits
    ]
    in_order = sorted([*computed, *evaluated], key=lambda pair: (bool(pair[1].warning), pair[1].title != _TITLES[TEST]))
    return _make_titles_unique(in_order)


def _make_titles_unique(results: Sequence[tuple[str, SlideSetResults]]) -> list[SlideSetResults]:
    """Add the folder name to titles that occur more than once.

    results: pairs of folder name and result.
    """
    titles = [result.title for _, result in results]
    return [
        result
        if titles.count(result.title) == 1
        else replace(result, title=f"{result.title} ({folder})", title_without_folder=result.title)
        for folder, result in results
    ]
