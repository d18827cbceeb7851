"""Sources of a report: runs or a study, with their evaluations and predictions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tapfm.errors import InputError
from tapfm.report.reported_cross_validation import ReportedCrossValidation, read_cross_validation
from tapfm.report.reported_run import ReportedRun, read_run
from tapfm.report.reported_study import ReportedStudy, is_study, read_study, select_runs
from tapfm.report.result_folders import (
    ResultFolder,
    find_evaluations,
    find_predictions,
    read_evaluation_folder,
    read_prediction_folder,
    remove_duplicates,
)
from tapfm.report.run_results import read_run_results
from tapfm.report.slide_set_results import SlideSetResults
from tapfm.runs.cross_validation import is_cross_validation


@dataclass(frozen=True)
class ReportSources:
    """Runs, study, evaluations and predictions that a report shows."""

    runs: Sequence[ReportedRun]  # shown in detail
    study: ReportedStudy | None
    results: Mapping[str, Sequence[SlideSetResults]]  # by name of the run
    evaluations: Sequence[ResultFolder]
    predictions: Sequence[ResultFolder]
    selection_reason: str = ""  # why these runs of a study are shown in detail
    cross_validation: ReportedCrossValidation | None = None  # the runs are its folds

    @property
    def names_runs(self) -> bool:
        """Whether results need the name of their run: the report is about a study or several runs."""
        return self.study is not None or len(self.runs) > 1

    def named_results(self) -> list[tuple[str, SlideSetResults]]:
        """Return all results with the names of their runs, which are empty if the report is about a single run.

        The results of all folds of a cross-validation together come first, without a name.
        """
        pooled = () if self.cross_validation is None else self.cross_validation.results
        by_run = [
            (run.name if self.names_runs else "", result) for run in self.runs for result in self.results[run.name]
        ]
        return [*(("", result) for result in pooled), *by_run]

    def is_reported(self, folder: ResultFolder) -> bool:
        """Return whether these are results of a reported run, or of all folds of the reported cross-validation."""
        if any(folder.is_result_of(run.best_checkpoint_sha256) for run in self.runs):
            return True
        pooled = self.cross_validation
        return pooled is not None and folder.weights_digests() == {run.best_checkpoint_sha256 for run in pooled.runs}


def read_report_sources(
    paths: Sequence[Path],
    *,
    evaluations: Sequence[Path],
    predictions: Sequence[Path],
    run_names: Sequence[str],
    resamples: int,
) -> ReportSources:
    """Read runs, a study or a cross-validation, and find their evaluations and predictions.

    run_names: runs of a study to show in detail. If empty, `select_runs` chooses them.
    resamples: bootstrap resamples for metrics that are computed for the report.
    """
    study_paths = [path for path in paths if is_study(path)]
    fold_paths = [path for path in paths if is_cross_validation(path)]
    for path, kind in [
        *((path, "study") for path in study_paths),
        *((path, "cross-validation") for path in fold_paths),
    ]:
        if len(paths) > 1:
            hint = f"Pass either one {kind} folder, or one or several run folders."
            raise InputError(f"{path} is a {kind}, which cannot be combined with other folders.", hint=hint)
    if run_names and not study_paths:
        hint = "Pass the run folders instead: tapfm report runs/first runs/second --out report.html"
        raise InputError("--run only applies to a study.", hint=hint)
    study = read_study(study_paths[0]) if study_paths else None
    cross_validation = read_cross_validation(fold_paths[0]) if fold_paths else None
    passed_evaluations = [read_evaluation_folder(path) for path in evaluations]
    passed_predictions = [read_prediction_folder(path) for path in predictions]
    selection_reason = ""
    if study is not None:
        digests = {
            digest for folder in [*passed_evaluations, *passed_predictions] for digest in folder.weights_digests()
        }
        runs, selection_reason = select_runs(study, run_names, digests)
    elif cross_validation is not None:
        runs = list(cross_validation.runs)
    else:
        folders = list({path.resolve(): path for path in paths}.values())
        runs = _make_names_unique([read_run(folder) for folder in folders])
    results, all_evaluations, all_predictions = {}, list(passed_evaluations), list(passed_predictions)
    if cross_validation is not None:
        all_evaluations += cross_validation.evaluations
        all_predictions += cross_validation.predictions
    for index, run in enumerate(runs):
        run_evaluations = [each for each in passed_evaluations if _is_shown_with(each, runs, index)]
        run_evaluations += find_evaluations(run.folder, run.best_checkpoint_sha256)
        run_evaluations = remove_duplicates(run_evaluations)
        all_evaluations += run_evaluations
        all_predictions += find_predictions(run.folder, run.best_checkpoint_sha256)
        results[run.name] = read_run_results(run, run_evaluations, resamples)
    return ReportSources(
        runs,
        study,
        results,
        remove_duplicates(all_evaluations),
        remove_duplicates(all_predictions),
        selection_reason,
        cross_validation,
    )


def _is_shown_with(evaluation: ResultFolder, runs: Sequence[ReportedRun], index: int) -> bool:
    """Return whether an evaluation is shown with this run. Evaluations of other models are shown with the first run."""
    if evaluation.is_result_of(runs[index].best_checkpoint_sha256):
        return True
    return index == 0 and not any(evaluation.is_result_of(run.best_checkpoint_sha256) for run in runs)


def _make_names_unique(runs: Sequence[ReportedRun]) -> list[ReportedRun]:
    """Use the folder as the name of runs that have the same name."""
    names = [run.name for run in runs]
    return [run if names.count(run.name) == 1 else replace(run, name=str(run.folder)) for run in runs]


def describe_source_folders(sources: ReportSources) -> list[str]:
    """Return a line for each folder that the report uses, such as "run runs/first"."""
    lines = [] if sources.study is None else [f"study {sources.study.folder}"]
    lines += [] if sources.cross_validation is None else [f"cross-validation {sources.cross_validation.folder}"]
    lines += [f"run {run.folder}" for run in sources.runs]
    lines += [f"evaluation {folder.path}" for folder in sources.evaluations]
    return lines + [f"predictions {folder.path}" for folder in sources.predictions]
