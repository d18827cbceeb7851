"""Run an evaluation: predict the slides, compute metrics with confidence intervals, and draw plots."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from tapfm.baselines.colour_baseline import can_read_colours, find_baseline_slides, predict_baseline
from tapfm.baselines.slide_colours import load_or_create_colour_table, read_colours
from tapfm.cohort.splits import ALL
from tapfm.errors import Interrupted, RunError, SlidesFailedError
from tapfm.evaluation.figures import EvaluatedPredictions, build_evaluation_figures
from tapfm.evaluation.metric_tables import MODEL, EvaluationResults, build_all_metrics_table, build_evaluation_sections
from tapfm.evaluation.metrics_json import format_metrics_json
from tapfm.evaluation.model_evaluation import (
    BaselinePredictions,
    EvaluatedTable,
    EvaluationSettings,
    evaluate_predictions,
)
from tapfm.evaluation.predictions import Prediction, average_predictions, write_predictions
from tapfm.evaluation.subgroups import build_subgroups
from tapfm.inference.member_predictions import predict_member
from tapfm.results.document import Section
from tapfm.results.estimate import Estimate
from tapfm.results.figure_drawing import write_png
from tapfm.results.markdown import markdown_sections
from tapfm.results.table import table_csv
from tapfm.runs.evaluation_data import EvaluationRequest, EvaluationSlides, read_evaluation_slides
from tapfm.runs.folder import format_failures
from tapfm.runs.model_folder import ModelFolder, is_finished, open_model_folder
from tapfm.runs.thresholds import choose_model_thresholds
from tapfm.runtime.files import digest_files, write_atomically
from tapfm.runtime.interrupts import StopSignalHandler
from tapfm.runtime.messages import format_count
from tapfm.runtime.output_folder import check_no_other_files, lock_folder, remove_unfinished_files
from tapfm.tasks.target import TargetKinds
from tapfm.tiles.reading import SkippedTiles

_DESCRIPTION = "evaluation.json"  # marks the folder of an evaluation
_METRICS = "metrics.json"  # written last
BASELINE_PREDICTIONS_FILE = "predictions-baseline.csv"
# Must be the same when an evaluation is resumed. Settings of the metrics may change.
_FIXED_KEYS = ("kind", "members", "targets", "cohort", "table", "split", "from")


@dataclass(frozen=True)
class Evaluation:
    """Result of an evaluation."""

    folder: Path
    results: EvaluationResults
    predictions: tuple[Prediction, ...]

    @property
    def failed(self) -> dict[str, str]:
        """Failed slides: the reason by slide_id."""
        return dict(self.results.failed)

    @property
    def auc(self) -> dict[str, Estimate]:
        """AUC of each target, with its confidence interval."""
        return {
            target: each.estimate
            for (target, metric), each in self.results.select_metrics(MODEL).items()
            if metric == "auc"
        }


def run_evaluation(
    model_path: Path,
    request: EvaluationRequest,
    settings: EvaluationSettings,
    folder: Path,
    *,
    device: str,
    workers: int,
    colours: Path | None,
    resume: bool,
    console: Console,
) -> Evaluation:
    """Evaluate a run, an export or an ensemble, and write the results. Raises `Interrupted` after a signal."""
    model = open_model_folder(model_path)
    data = read_evaluation_slides(model, request)
    unfinished = [
        f"The training of {member.folder} is not finished; the best epoch so far is evaluated."
        for member in model.members
        if not is_finished(member)
    ]
    config = model.config
    settings = replace(settings, unit=settings.unit or ("slide" if config is None else config.selection.unit))
    columns = {name: {slide.row.slide_id: slide.column_value(name) for slide in data.slides} for name in settings.by}
    groups, subgroup_notes = build_subgroups(columns)
    description = _describe_evaluation(model, data, settings)
    with lock_folder(folder, "tapfm evaluate"), StopSignalHandler(console.print) as stop:
        remove_unfinished_files(folder)
        _prepare_folder(folder, description, resume=resume)
        if colours is not None:
            load_or_create_colour_table(colours)  # fail before slides are read if --colours cannot be used
        _print_start(model, data, [*unfinished, *data.notes], console)
        try:
            predictions, failed, skipped = _predict(model, data, folder, device, workers, stop.signal_number, console)
            baseline = _predict_baseline(
                model, data, colours or folder / "colours.csv", workers, stop.signal_number, console
            )
        except Interrupted:
            console.print("Stopped. Finished slides are saved. To resume, run the same command with --resume.")
            raise
        write_predictions(folder / "predictions.csv", predictions, model.targets)
        write_atomically(folder / "failures.csv", format_failures(failed, skipped))
        if not predictions:
            raise _make_all_failed_error(folder, failed)
        assert settings.unit is not None
        results = evaluate_predictions(
            predictions,
            model.targets,
            settings,
            thresholds=choose_model_thresholds(model, settings.unit, settings.sensitivity),
            groups=groups,
            baseline=baseline,
            table=EvaluatedTable(data.cohort_table.name, data.missing_targets, data.slides_without_label),
            about=description,
        )
        results = replace(
            results,
            notes=(*unfinished, *data.notes, *data.table_warnings, *subgroup_notes),
            failed=failed,
            tiles_skipped=sum(len(each.tiles) for each in skipped.values()),
        )
        write_results(folder, results, predictions, baseline.predictions, model.targets)
    return Evaluation(folder, results, tuple(predictions))


def _describe_evaluation(model: ModelFolder, data: EvaluationSlides, settings: EvaluationSettings) -> dict[str, Any]:
    """Return the content of evaluation.json: the model, the slides and the settings."""
    return {
        **model.build_identifying_metadata(),
        "cohort": "own" if data.is_run_cohort else "external",
        "table": data.cohort_table.name,
        "table_sha256": digest_files(data.cohort_table, data.clini),
        "split": data.split,
        "from": "tiles" if data.features_folder is None else "features",
        "unit": settings.unit,
        "sensitivity": settings.sensitivity,
        "by": list(settings.by),
        "resamples": settings.resamples,
        "seed": settings.seed,
    }


def _prepare_folder(folder: Path, description: dict[str, Any], *, resume: bool) -> None:
    """Write evaluation.json.

    Raises RunError if the folder already contains an evaluation, unless `resume` is true and its model and slides are
    the same.
    """
    path = folder / _DESCRIPTION
    if path.exists():
        try:
            before = dict(json.loads(path.read_text("utf-8")))
        except (OSError, ValueError, TypeError):
            before = {}
        if not resume:
            state = "an" if (folder / _METRICS).exists() else "an unfinished"
            raise RunError(
                f"{folder} already contains {state} evaluation of {before.get('model', 'a model')}.",
                hint="To resume it or to compute its metrics again, run the same command with --resume. "
                "Or choose a new folder with --out.",
            )
        changed = [name for name in _FIXED_KEYS if description[name] != before.get(name)]
        if changed:
            lines = [
                f"{'model' if name == 'members' else name} was {_format_fixed_value(name, before)} and is now "
                f"{_format_fixed_value(name, description)}"
                for name in changed
            ]
            raise RunError(
                f"{folder} contains a different evaluation, which cannot be resumed:\n  " + "\n  ".join(lines),
                hint="Choose a new folder with --out.",
            )
    else:
        check_no_other_files(folder, hint="Choose a new folder with --out, such as evaluations/first.")
    write_description(folder, description)


def write_description(folder: Path, description: Mapping[str, Any]) -> None:
    """Write evaluation.json, and delete the metrics, which no longer belong to it."""
    (folder / _METRICS).unlink(missing_ok=True)
    write_atomically(folder / _DESCRIPTION, (json.dumps(description, indent=2) + "\n").encode())


def _format_fixed_value(name: str, description: Mapping[str, Any]) -> str:
    """Format a value of evaluation.json for a message."""
    value = description.get(name)
    if name == "members":
        weights = [str(each["weights_sha256"])[:12] for each in value or ()]
        return f"{description.get('model')} (weights {', '.join(weights)})"
    if isinstance(value, list):
        return ", ".join(map(str, value))
    return "all" if name == "split" and value is None else str(value)


def _print_start(model: ModelFolder, data: EvaluationSlides, warnings: Sequence[str], console: Console) -> None:
    """Print the model, the number of slides, and warnings."""
    split = "all splits" if data.split == ALL else f"{data.split} split"
    source = f"{split} of its own cohort" if data.is_run_cohort else data.cohort_table.name
    members = f" ({format_count(len(model.members), 'member')})" if model.ensemble else ""
    lines = [
        f"Evaluating the {model.kind} {model.path}{members} for {', '.join(model.targets)} on "
        f"{format_count(len(data.slides), 'slide')} ({source})."
    ]
    if data.slides_without_label:
        lines.append(
            f"Skipping {format_count(len(data.slides_without_label), 'slide')} without a label of these targets."
        )
    if data.failed:
        missing = "tiles" if data.features_folder is None else "features"
        lines.append(
            f"Skipping {format_count(len(data.failed), 'slide')} without {missing}; they are listed in failures.csv."
        )
    for line in [*data.table_notes, *lines]:
        console.print(line, markup=False, soft_wrap=True)
    for warning in [*(f"WARNING: {each}" for each in data.table_warnings), *warnings]:
        console.print(warning, style="bold yellow", markup=False, soft_wrap=True)


def _predict(
    model: ModelFolder,
    data: EvaluationSlides,
    folder: Path,
    device: str,
    workers: int,
    stop_signal: Callable[[], int | None],
    console: Console,
) -> tuple[list[Prediction], dict[str, str], dict[str, SkippedTiles]]:
    """Predict the slides. For an ensemble, return the mean of its members on the slides that all of them could read."""
    failed, skipped = dict(data.failed), dict[str, SkippedTiles]()
    by_member: list[list[Prediction]] = []
    for number, member in enumerate(model.members, start=1):
        position = f", member {number} of {len(model.members)}" if model.ensemble else ""
        result = predict_member(
            member,
            data,
            folder / f".predictions-{number}.jsonl",
            device=device,
            workers=workers,
            description=f"all tiles{position}",
            console=console,
            stop_signal=stop_signal,
        )
        failed |= result.failed
        skipped |= result.skipped
        by_member.append(result.predictions)
    readable = [[each for each in predictions if each.slide_id not in failed] for predictions in by_member]
    return average_predictions(readable, model.targets) if len(readable) > 1 else readable[0], failed, skipped


def _make_all_failed_error(folder: Path, failed: dict[str, str]) -> SlidesFailedError:
    slide_id, reason = next(iter(failed.items()))
    return SlidesFailedError(
        f"All {format_count(len(failed), 'slide')} failed, so there are no metrics. For example {slide_id}: {reason}",
        hint=f"The reasons for all slides are in {folder / 'failures.csv'}.",
    )


def _predict_baseline(
    model: ModelFolder,
    data: EvaluationSlides,
    table: Path,
    workers: int,
    stop_signal: Callable[[], int | None],
    console: Console,
) -> BaselinePredictions:
    """Predict the same slides from their colours and number of tiles only."""
    slides = find_baseline_slides(model, data)
    colours = None
    if not slides.unavailable_reason and can_read_colours(slides):
        colours = read_colours(slides.all, table, workers=workers, console=console, stop_signal=stop_signal)
    return predict_baseline(slides, model.targets, colours)


def write_results(
    folder: Path,
    results: EvaluationResults,
    predictions: Sequence[Prediction],
    baseline: Sequence[Prediction],
    targets: TargetKinds,
    more_sections: Sequence[Section] = (),
) -> None:
    """Write plots and tables. metrics.json is written last, because it marks a finished evaluation.

    baseline: predictions of the baseline, also for slides that were not evaluated. more_sections: added to metrics.md.
    """
    about = results.about
    title = f"{Path(about['model']).resolve().name}, {about['split'] if about['cohort'] == 'own' else about['table']}"
    slides = {each.slide_id for each in predictions}
    baseline_predictions = [each for each in baseline if each.slide_id in slides]
    thresholds = results.chosen_thresholds.thresholds
    evaluated = EvaluatedPredictions(
        predictions,
        baseline_predictions,
        about["unit"],
        results.select_metrics(MODEL),
        {} if thresholds is None else thresholds.youden,
        about["resamples"],
        about["seed"],
    )
    figures = build_evaluation_figures(evaluated, targets, title)
    for name, figure in figures.items():
        write_png(folder / f"{name}.png", figure)
    baseline_file = folder / BASELINE_PREDICTIONS_FILE
    if baseline_predictions:
        write_predictions(baseline_file, baseline_predictions, targets)
    else:
        baseline_file.unlink(missing_ok=True)
    sections = [*build_evaluation_sections(results), *more_sections, Section("Figures", list(figures.values()))]
    heading = f"{', '.join(about['targets'])}: {about['model']}"
    page = markdown_sections(heading, sections, {figure.title: f"{name}.png" for name, figure in figures.items()})
    write_atomically(folder / "metrics.csv", table_csv(build_all_metrics_table(results)).encode())
    write_atomically(folder / "metrics.md", page.encode())
    write_atomically(folder / _METRICS, format_metrics_json(results))
