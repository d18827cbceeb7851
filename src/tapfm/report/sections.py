"""Sections of a report: slides and labels, training, results, predictions, heatmaps, tiles and failures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from tapfm.evaluation.figures import build_target_panels
from tapfm.evaluation.metric_tables import build_baseline_tables, build_metric_table, build_subgroup_tables
from tapfm.evaluation.predictions import describe_few_tiles, few_tiles_warning
from tapfm.prediction.folder import PredictionFolder
from tapfm.prediction.slide_files import make_slide_finder
from tapfm.report.appendix import build_failures_table
from tapfm.report.content import Block, Collapsible, PageSection, PredictionRow, PredictionTable
from tapfm.report.heatmap_blocks import ImageBudget, ImageSelection, build_heatmap_blocks, build_tile_blocks
from tapfm.report.reported_run import ReportedRun, describe_run
from tapfm.report.result_folders import ResultFolder
from tapfm.report.slide_counts import build_slide_count_blocks
from tapfm.report.slide_set_results import SlideSetResults
from tapfm.report.sources import ReportSources
from tapfm.results.document import Paragraph
from tapfm.results.figure import Figure
from tapfm.results.formatting import format_duration, format_number
from tapfm.runs.curves import build_training_figure
from tapfm.runtime.messages import format_count
from tapfm.runtime.progress import SlideProgress
from tapfm.tasks.target import Label, TargetKind

_SET_TITLES = {"test": "Test slides", "validation": "Validation slides"}
_MAX_PROBABILITY_DIFFERENCE = 1e-3  # of the same slide in an evaluation and in a prediction folder
_MAX_ROWS = 20_000  # browsers can sort this many rows quickly


def build_cohort_section(sources: ReportSources) -> PageSection:
    """Return the number of slides and labels of each run; runs with the same slides are shown once."""
    distinct: dict[str, list[Block]] = {}
    for run in sources.runs:
        counts = build_slide_count_blocks(run, sources.results[run.name])
        if run.slides and counts not in distinct.values():
            distinct[run.name] = counts
    blocks: list[Block] = [block for counts in distinct.values() for block in counts]
    if len(distinct) > 1:
        blocks = [Collapsible(name, counts, open=True) for name, counts in distinct.items()]
    intro = "The number of slides in each split, and how many of the slides with a label are positive."
    return PageSection("Slides and labels", blocks, intro)


def build_training_section(sources: ReportSources) -> PageSection:
    """Return the training curves of each run; for a study, also how each run that is shown was trained."""
    blocks: list[Block] = []
    for index, run in enumerate(sources.runs):
        if run.history:
            best_epoch = None if run.best_epoch_row is None else int(run.best_epoch_row["epoch"])
            figure = build_training_figure(run.history, best_epoch, "")
            seconds = sum(float(row.get("seconds", 0.0)) for row in run.history)
            epochs = format_count(len(run.history), "epoch")
            shown: list[Block] = [figure, Paragraph(f"{epochs} in {format_duration(seconds)}, including validation.")]
            if sources.study is not None:  # otherwise, this is at the top of the page
                shown.insert(0, Paragraph(describe_run(run)))
            blocks += [Collapsible(run.name, shown, open=index == 0)] if sources.names_runs else shown
    return PageSection("Training", blocks)


def build_results_section(sources: ReportSources) -> PageSection:
    """Return the figures and metrics of each set of slides."""
    blocks: list[Block] = []
    for index, (run_name, result) in enumerate(sources.named_results()):
        result_blocks: list[Block] = [Paragraph(result.description)]
        result_blocks += [Paragraph(result.warning, warning=True)] if result.warning else []
        result_blocks += [Paragraph(note, warning=True) for note in result.results.notes]
        result_blocks += _build_result_figures(result)
        result_blocks.append(build_metric_table(result.results))
        result_blocks += [replace(table, title="Colour baseline") for table in build_baseline_tables(result.results)]
        result_blocks += [replace(table, title="Subgroups") for table in build_subgroup_tables(result.results)]
        set_title = _SET_TITLES.get(result.title, result.title)
        title = f"{set_title}, {run_name}" if run_name else set_title
        blocks.append(Collapsible(title, result_blocks, _describe_main_metric(result), open=index == 0))
    intro = "Metrics on each set of slides. If a value is missing, a footnote gives the reason."
    return PageSection("Results", blocks, intro)


def _build_result_figures(result: SlideSetResults) -> list[Figure]:
    """Return a figure for each target. With several targets, the target is the title."""
    evaluated, several_targets = result.to_evaluated_predictions(), len(result.targets) > 1
    return [
        Figure(target if several_targets else "", list(build_target_panels(evaluated, target, kind).values()))
        for target, kind in result.targets.items()
    ]


def _describe_main_metric(result: SlideSetResults) -> str:
    """Return the AUC, or the mean AUC of several targets, which is visible if the block is collapsed."""
    main_metric = result.results.main_metrics[0]
    value = result.metrics.get((result.results.targets_and_mean[-1], main_metric))
    if value is None or value.estimate.value is None:
        return ""
    mean = "mean " if len(result.targets) > 1 else ""
    return f"{mean}{result.results.metric_names[main_metric]} {format_number(value.estimate.value)}"


def _describe_call(kind: TargetKind, call: Label, label: Label) -> dict[str, str]:
    """Return call, label and outcome as text, empty if they are missing."""
    values = {"call": call, "label": label}
    texts = {name: "" if value is None else kind.describe_label(value) for name, value in values.items()}
    return texts | {"outcome": kind.describe_outcome(call, label)}


def build_predictions_section(sources: ReportSources) -> PageSection:
    """Return a row for each slide and target, from the results and from prediction folders with other slides."""
    rows = [
        row
        for run in sources.runs
        for result in sources.results[run.name]
        for row in _list_evaluated_predictions(run, result)
    ]
    evaluated = {(row.model, row.slide_id, row.target): row.probability for row in rows}
    for folder in sources.predictions:
        for row in _list_folder_predictions(sources.runs, folder):
            probability = evaluated.get((row.model, row.slide_id, row.target))
            # a different probability means another slide with the same name, or other tiles
            if probability is None or abs(probability - row.probability) > _MAX_PROBABILITY_DIFFERENCE:
                rows.append(row)
    title = "Predictions by slide"
    if not rows:
        return PageSection(title, [])
    table = PredictionTable(rows[:_MAX_ROWS])
    blocks: list[Block] = [table]
    intro = "The predicted probability of each slide. The mark in a bar is the threshold, chosen on validation slides."
    if sources.names_runs and len(table.models) == 1:  # then the table has no column "Model"
        intro += f" Model: {table.models[0]}."
    if len(table.slide_sets) == 1:  # then the table has no column "Set"
        intro += f" Set of slides: {table.slide_sets[0]}."
    if few := len({(row.model, row.slide_set, row.slide_id) for row in rows if row.warning}):
        blocks.insert(0, Paragraph(describe_few_tiles(few), warning=True))
    if len(rows) > _MAX_ROWS:
        note = f"{len(rows) - _MAX_ROWS:,} rows are not shown. The predictions*.csv files contain all rows."
        blocks.append(Paragraph(note, warning=True))
    return PageSection(title, blocks, intro)


def _list_evaluated_predictions(run: ReportedRun, result: SlideSetResults) -> list[PredictionRow]:
    targets, thresholds = result.targets, result.thresholds
    return [
        PredictionRow(
            slide_id=each.slide_id,
            patient_id=each.patient_id,
            slide_set=result.title,
            target=target,
            probability=targets[target].activate(logit),
            threshold=thresholds.get(target),
            **_describe_call(
                targets[target], targets[target].apply_threshold(logit, thresholds.get(target)), each.labels.get(target)
            ),
            tiles=each.tiles,
            warning=few_tiles_warning(each.tiles),
            model=result.model or run.name,
        )
        for each in result.predictions
        for target, logit in each.logits.items()
    ]


def _list_folder_predictions(runs: Sequence[ReportedRun], folder: ResultFolder) -> list[PredictionRow]:
    model = next((run.name for run in runs if folder.is_result_of(run.best_checkpoint_sha256)), Path(folder.model).name)
    return [
        PredictionRow(
            slide_id=slide.slide_id,
            patient_id=slide.patient_id,
            slide_set=folder.path.name,
            target=target,
            probability=prediction.probability,
            threshold=prediction.threshold,
            **_describe_call(slide.kinds[target], prediction.call, prediction.label),
            tiles=slide.tiles,
            warning=slide.warning,
            model=model,
        )
        for slide in PredictionFolder(folder.path).slides()
        for target, prediction in slide.targets.items()
    ]


def build_image_sections(
    sources: ReportSources, selection: ImageSelection, budget: ImageBudget, console: Console
) -> list[PageSection]:
    """Return two sections: heatmaps, and most influential tiles, of all prediction folders."""
    finder = make_slide_finder(selection.slides_folder)
    heatmaps: list[Block] = []
    tiles: list[Block] = []
    for folder in sources.predictions:
        prediction_folder = PredictionFolder(folder.path)
        slides = prediction_folder.slides()
        heading = [Paragraph(f"From {folder.path.name}:")] if len(sources.predictions) > 1 else []
        if selection.max_heatmaps:
            count = min(selection.max_heatmaps, sum(len(slide.targets) for slide in slides))
            with SlideProgress(console, "drawing heatmaps", slides=count) as progress:
                blocks = build_heatmap_blocks(prediction_folder, slides, selection, finder, budget, progress)
            heatmaps += [*heading, *blocks] if blocks else []
        if selection.max_tiles:
            blocks = build_tile_blocks(prediction_folder, slides, selection, finder, budget)
            tiles += [*heading, *blocks] if blocks else []
    heatmap_intro = (
        "Each slide without and with its heatmap. Slides alternate between the outcomes, starting with wrong calls. "
        "Within an outcome, slides with a probability further from the threshold come first."
    )
    tile_intro = (
        "The tiles with the strongest influence on the predictions. Before you trust the model, check that they show "
        "relevant tissue and not artefacts such as pen marks, folds or blur."
    )
    return [
        PageSection("Heatmaps", heatmaps, heatmap_intro),
        PageSection("Most influential tiles", tiles, tile_intro),
    ]


def build_failures_section(sources: ReportSources) -> PageSection:
    """Return a table of failed slides and study steps."""
    study_steps = [] if sources.study is None else sources.study.failed_steps
    table = build_failures_table(sources.runs, sources.evaluations, sources.predictions, study_steps)
    return PageSection("Failures", [table] if table is not None else [])
