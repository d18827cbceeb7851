"""An evaluation: from a model and slides to predictions, metrics with confidence intervals, and plots."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from tapfm.baselines.colour_baseline import find_baseline_slides, has_readable_colours, predict_baseline
from tapfm.baselines.slide_colours import open_colour_table as begin_colours
from tapfm.baselines.slide_colours import read_colours
from tapfm.errors import Interrupted, RunError, SlidesFailedError
from tapfm.evaluation.figures import EvaluatedPredictions, evaluation_figures
from tapfm.evaluation.metric_tables import MODEL, EvaluationResults, all_metrics_table, evaluation_sections
from tapfm.evaluation.metrics_json import metrics_json
from tapfm.evaluation.predictions import Prediction, average_predictions, write_predictions
from tapfm.evaluation.results import BaselinePredictions, EvaluatedTable, EvaluationSettings, evaluate_predictions
from tapfm.evaluation.subgroups import build_subgroups
from tapfm.inference.member_predictions import predict_member
from tapfm.results.document import Section
from tapfm.results.drawing import write_png
from tapfm.results.estimate import Estimate
from tapfm.results.markdown import markdown_sections
from tapfm.results.table import table_csv
from tapfm.runs.evaluation_data import EvaluatedSlides, EvaluationRequest, read_evaluated_slides
from tapfm.runs.folder import failures_table
from tapfm.runs.model_folder import ModelFolder, is_finished, open_model_folder
from tapfm.runs.thresholds import choose_model_thresholds
from tapfm.runtime.files import file_sha256, write_atomically
from tapfm.runtime.interrupts import StopSignalHandler
from tapfm.runtime.messages import format_count
from tapfm.runtime.output_folder import check_no_other_files, lock_folder, remove_unfinished
from tapfm.tasks.target import TargetKinds
from tapfm.tiles.reading import SkippedTiles

_ABOUT = "evaluation.json"  # marks a folder of an evaluation
_DONE = "metrics.json"  # is written last
_IDENTITY = ("kind", "members", "targets", "cohort", "table", "split", "from")  # how metrics are computed may change


@dataclass(frozen=True)
class Evaluation:
    """Result of an evaluation."""

    folder: Path
    results: EvaluationResults
    predictions: tuple[Prediction, ...]

    @property
    def failed(self) -> dict[str, str]:
        """Slides that could not be evaluated, and why."""
        return dict(self.results.failed)

    @property
    def auc(self) -> dict[str, Estimate]:
        """The AUC of each target, with its interval."""
        return {
            target: each.estimate
            for (target, metric), each in self.results.select_metrics(MODEL).items()
            if metric == "auc"
        }


def run_evaluation(
    path: Path,
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
    """Evaluate a run, an export or an ensemble. Raises `Interrupted` after a signal."""
    evaluated = open_model_folder(path)
    data = read_evaluated_slides(evaluated, request)
    unfinished = [
        f"{member.folder} is not finished: this is the best of its epochs so far."
        for member in evaluated.members
        if not is_finished(member)
    ]
    config = evaluated.config
    settings = replace(settings, unit=settings.unit or ("slide" if config is None else config.selection.unit))
    columns = {name: {slide.row.slide_id: slide.column(name) for slide in data.slides} for name in settings.by}
    groups, cuts = build_subgroups(columns)
    about = _describe_evaluation(evaluated, data, settings)
    with lock_folder(folder, "tapfm evaluate"), StopSignalHandler(console.print) as stop:
        remove_unfinished(folder)
        _begin(folder, about, resume=resume)
        if colours is not None:
            begin_colours(colours)  # an unusable file is refused before slides are read
        _print_start(evaluated, data, [*unfinished, *data.notes], console)
        try:
            predictions, failed, skipped = _predict(
                evaluated, data, folder, device, workers, stop.signal_number, console
            )
            baseline = _predict_baseline(
                evaluated, data, colours or folder / "colours.csv", workers, stop.signal_number, console
            )
        except Interrupted:
            console.print("Stopped; what is finished is kept. To resume: the same command with --resume")
            raise
        write_predictions(folder / "predictions.csv", predictions, evaluated.targets)
        write_atomically(folder / "failures.csv", failures_table(failed, skipped))
        if not predictions:
            raise _all_failed(folder, failed)
        assert settings.unit is not None
        results = evaluate_predictions(
            predictions,
            evaluated.targets,
            settings,
            thresholds=choose_model_thresholds(evaluated, settings.unit, settings.sensitivity),
            groups=groups,
            baseline=baseline,
            table=EvaluatedTable(data.table.name, data.absent_targets, data.without_label),
            about=about,
        )
        results = replace(
            results,
            notes=(*unfinished, *data.notes, *cuts),
            failed=failed,
            tiles_skipped=sum(len(each.tiles) for each in skipped.values()),
        )
        _write_results(folder, results, predictions, baseline, evaluated.targets, settings)
    return Evaluation(folder, results, tuple(predictions))


def _describe_evaluation(evaluated: ModelFolder, data: EvaluatedSlides, settings: EvaluationSettings) -> dict[str, Any]:
    """Describe what is evaluated on what; the same inputs give the same description."""
    return {
        **evaluated.describe(),
        "cohort": "own" if data.own else "external",
        "table": data.table.name,
        "table_sha256": file_sha256(data.table),
        "split": data.split,
        "from": "tiles" if data.features is None else "features",
        "unit": settings.unit,
        "sensitivity": settings.sensitivity,
        "by": list(settings.by),
        "resamples": settings.resamples,
        "seed": settings.seed,
    }


def _begin(folder: Path, about: dict[str, Any], *, resume: bool) -> None:
    """Mark the folder; refuse to overwrite an evaluation, or to resume that of another model or other slides."""
    path = folder / _ABOUT
    if path.exists():
        try:
            before = dict(json.loads(path.read_text("utf-8")))
        except (OSError, ValueError, TypeError):
            before = {}
        if not resume:
            raise RunError(
                f"{folder} holds {'an' if (folder / _DONE).exists() else 'an unfinished'} evaluation of "
                f"{before.get('model', 'something')}.",
                hint="Resume it, or write its tables again: the same command with --resume\nOr give a new --out.",
            )
        changed = [name for name in _IDENTITY if about[name] != before.get(name)]
        if changed:
            lines = [
                f"{'model' if name == 'members' else name} was {_identity_text(name, before)}, "
                f"is {_identity_text(name, about)}"
                for name in changed
            ]
            raise RunError(
                f"{folder} holds an evaluation of something else:\n  " + "\n  ".join(lines), hint="Give a new --out."
            )
    else:
        check_no_other_files(folder, hint="Give a new folder with --out, such as evaluations/first.")
    (folder / _DONE).unlink(missing_ok=True)
    write_atomically(path, (json.dumps(about, indent=2) + "\n").encode())


def _identity_text(name: str, about: Mapping[str, Any]) -> str:
    """Write one item of an evaluation's identity."""
    value = about.get(name)
    if name == "members":
        weights = [str(each["weights_sha256"])[:12] for each in value or ()]
        return f"{about.get('model')} (weights {', '.join(weights)})"
    if isinstance(value, list):
        return ", ".join(map(str, value))
    return "every slide" if name == "split" and value is None else str(value)


def _print_start(evaluated: ModelFolder, data: EvaluatedSlides, warnings: Sequence[str], console: Console) -> None:
    """Print what is about to be evaluated, and what to know about it."""
    of = f"its own cohort, {data.split}" if data.own else data.table.name
    members = f" ({format_count(len(evaluated.members), 'member')})" if evaluated.ensemble else ""
    lines = [
        f"{', '.join(evaluated.targets)} by the {evaluated.kind} {evaluated.path}{members}, on "
        f"{format_count(len(data.slides), 'slide')} ({of})."
    ]
    if data.without_label:
        lines.append(
            f"Not used, as they have no label of these targets: {format_count(len(data.without_label), 'slide')}."
        )
    if data.failed:
        lacking = "tiles" if data.features is None else "features"
        lines.append(f"Left out, as they have no {lacking}: {format_count(len(data.failed), 'slide')} (failures.csv).")
    for line in lines:
        console.print(line, markup=False, soft_wrap=True)
    for warning in warnings:
        console.print(warning, style="bold yellow", markup=False, soft_wrap=True)


def _predict(
    evaluated: ModelFolder,
    data: EvaluatedSlides,
    folder: Path,
    device: str,
    workers: int,
    stop_signal: Callable[[], int | None],
    console: Console,
) -> tuple[list[Prediction], dict[str, str], dict[str, SkippedTiles]]:
    """Predict with every member; for an ensemble their mean, on slides that all could read."""
    failed, skipped = dict(data.failed), dict[str, SkippedTiles]()
    of_members: list[list[Prediction]] = []
    for number, member in enumerate(evaluated.members, start=1):
        one_of = f", member {number} of {len(evaluated.members)}" if evaluated.ensemble else ""
        final = predict_member(
            member,
            data,
            folder / f".predictions-{number}.jsonl",
            device=device,
            workers=workers,
            description=f"all tiles{one_of}",
            console=console,
            stop_signal=stop_signal,
        )
        failed |= final.failed
        skipped |= final.skipped
        of_members.append(final.predictions)
    readable = [[each for each in predictions if each.slide_id not in failed] for predictions in of_members]
    return average_predictions(readable, evaluated.targets) if len(readable) > 1 else readable[0], failed, skipped


def _all_failed(folder: Path, failed: dict[str, str]) -> SlidesFailedError:
    """Return the error for slides that all failed."""
    slide_id, reason = next(iter(failed.items()))
    return SlidesFailedError(
        f"None of {format_count(len(failed), 'slide')} could be evaluated, such as {slide_id}: {reason}",
        hint=f"All reasons: {folder / 'failures.csv'}",
    )


def _predict_baseline(
    evaluated: ModelFolder,
    data: EvaluatedSlides,
    table: Path,
    workers: int,
    stop_signal: Callable[[], int | None],
    console: Console,
) -> BaselinePredictions:
    """Predict the same slides from colours and tile count alone."""
    slides = find_baseline_slides(evaluated, data)
    colours = None
    if not slides.unavailable_reason and has_readable_colours(slides):
        colours = read_colours(slides.all, table, workers=workers, console=console, stop_signal=stop_signal)
    return predict_baseline(slides, evaluated.targets, colours)


def _write_results(
    folder: Path,
    results: EvaluationResults,
    predictions: Sequence[Prediction],
    baseline: BaselinePredictions,
    targets: TargetKinds,
    settings: EvaluationSettings,
) -> None:
    """Write plots and tables; metrics.json last, as it marks the evaluation as complete."""
    about = results.about
    title = f"{Path(about['model']).resolve().name}, {about['split'] if about['cohort'] == 'own' else about['table']}"
    slides = {each.slide_id for each in predictions}
    of_same_slides = [each for each in baseline.predictions if each.slide_id in slides]
    thresholds = results.chosen.thresholds
    evaluated = EvaluatedPredictions(
        predictions,
        of_same_slides,
        about["unit"],
        results.select_metrics(MODEL),
        {} if thresholds is None else thresholds.youden,
        settings.resamples,
        settings.seed,
    )
    figures = evaluation_figures(evaluated, targets, title)
    for name, figure in figures.items():
        write_png(folder / f"{name}.png", figure)
    of_baseline = folder / "predictions-baseline.csv"
    if of_same_slides:
        write_predictions(of_baseline, of_same_slides, targets)
    else:
        of_baseline.unlink(missing_ok=True)
    sections = [*evaluation_sections(results), Section("Figures", list(figures.values()))]
    heading = f"{', '.join(about['targets'])}: {about['model']}"
    page = markdown_sections(heading, sections, {figure.title: f"{name}.png" for name, figure in figures.items()})
    write_atomically(folder / "metrics.csv", table_csv(all_metrics_table(results)).encode())
    write_atomically(folder / "metrics.md", page.encode())
    write_atomically(folder / _DONE, metrics_json(results))
