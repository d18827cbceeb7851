"""Contents of a cross-validation folder that a report shows: its folds, and the results of all folds together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tapfm.evaluation.fold_table import build_fold_table
from tapfm.evaluation.metric_tables import OUT_OF_FOLD, describe_intervals
from tapfm.evaluation.metrics_json import read_metrics_json
from tapfm.report.content import PageSection
from tapfm.report.reported_run import ReportedRun, read_run
from tapfm.report.result_folders import (
    ResultFolder,
    find_ensemble_evaluations,
    find_ensemble_predictions,
    read_evaluation_folder,
)
from tapfm.report.run_results import describe_size, read_evaluation_results
from tapfm.report.slide_set_results import SlideSetResults
from tapfm.results.table import Table
from tapfm.runs.cross_validation import EVALUATION_FOLDER, find_fold_runs

_INTRO = (
    "Each patient is predicted by the model of the fold that tests this patient. These are the out-of-fold predictions."
)


@dataclass(frozen=True)
class ReportedCrossValidation:
    """Contents of the folder of a finished cross-validation."""

    folder: Path
    runs: Sequence[ReportedRun]  # one for each fold
    table: Table  # AUCs of the folds, and of the out-of-fold predictions
    evaluations: Sequence[ResultFolder]  # the out-of-fold results, then evaluations of the ensemble on other cohorts
    predictions: Sequence[ResultFolder]  # of the ensemble
    results: Sequence[SlideSetResults]  # of the evaluations

    @property
    def name(self) -> str:
        return self.folder.resolve().name


def read_cross_validation(folder: Path) -> ReportedCrossValidation:
    """Read the folder of a cross-validation, and find results of the ensemble of its folds."""
    runs = [read_run(path, path.name) for path in find_fold_runs(folder)]
    digests = {run.best_checkpoint_sha256 for run in runs if run.best_checkpoint_sha256 is not None}
    evaluations = [read_evaluation_folder(folder), *find_ensemble_evaluations(folder, digests)]
    by_fold = {run.name: read_metrics_json(run.folder / EVALUATION_FOLDER / "metrics.json") for run in runs}
    pooled, *others = [read_evaluation_results(each, folder.name, is_own=True) for each in evaluations]
    about = pooled.results.about
    pooled = replace(
        pooled,
        title=OUT_OF_FOLD,
        description=f"{describe_size(pooled.predictions)} ({about['table']}), with all tiles. {_INTRO} "
        f"{describe_intervals(about['unit'], about['resamples'])}",
    )
    table = build_fold_table(by_fold, pooled.results)
    predictions = find_ensemble_predictions(folder, digests)
    return ReportedCrossValidation(folder, runs, table, evaluations, predictions, [pooled, *others])


def build_cross_validation_section(cross_validation: ReportedCrossValidation) -> PageSection:
    """Return the table of the folds."""
    return PageSection("Cross-validation", [cross_validation.table], _INTRO)


def summarise_cross_validation(cross_validation: ReportedCrossValidation) -> str:
    """Return a paragraph about the folds and their models."""
    runs = cross_validation.runs
    first, slides = runs[0], {row.get("slide_id") for run in runs for row in run.slides}
    patients = {(row.get("cohort"), row.get("patient_id")) for run in runs for row in run.slides}
    encoder = (
        f"The encoder {first.encoder} was not adapted; the aggregator {first.aggregator} was trained on its features."
        if first.method == "fixed"
        else f"The encoder {first.encoder} was adapted with the method {first.method} and the aggregator "
        f"{first.aggregator}."
    )
    return (
        f"Cross-validation with {len(runs)} folds: {len(slides):,} slides of {len(patients):,} patients. The models "
        f"predict {', '.join(first.targets)}. {encoder}"
    )
