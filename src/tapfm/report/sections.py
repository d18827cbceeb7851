"""The sections of a page: slides and labels, training, results, every slide, pictures, and what failed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from tapfm.evaluation.figures import target_panels
from tapfm.evaluation.metric_tables import baseline_tables, metric_table, subgroup_tables
from tapfm.prediction.folder import PredictionFolder
from tapfm.prediction.slide_files import make_slide_finder
from tapfm.report import background, cohorts
from tapfm.report.content import Block, Collapsible, PageSection, SlideLine, SlidesBlock
from tapfm.report.finding import ResultFolder
from tapfm.report.result import EvaluatedSlideSet
from tapfm.report.runs import ReportedRun
from tapfm.report.slide_pictures import PictureBudget, PictureSettings, gallery_blocks, heatmap_blocks
from tapfm.report.sources import ReportSources
from tapfm.results.document import Paragraph
from tapfm.results.figure import Figure
from tapfm.results.formatting import format_duration, format_number
from tapfm.runs.curves import training_figure
from tapfm.runtime.messages import format_count
from tapfm.runtime.progress import SlideProgress
from tapfm.tasks.target import Label, TargetKind

_SETS = {"test": "Test slides", "validation": "Validation slides"}
_SAME_PROBABILITY = 1e-3
_MOST_LINES = 20_000  # of the table of slides; a browser sorts them still


def cohort_blocks(gathered: ReportSources) -> list[Block]:
    """Count the slides of each run; runs of the same slides once."""
    blocks: list[Block] = []
    seen: list[object] = []
    for run in gathered.runs:
        found = cohorts.cohort_blocks(run, gathered.results[run.name])
        if run.slides and found not in seen:
            seen.append(found)
            blocks += [Collapsible(run.name, found, open=True)] if len(seen) > 1 else found
    return blocks


def training_blocks(runs: Sequence[ReportedRun]) -> list[Block]:
    """Draw the curves of each run."""
    blocks: list[Block] = []
    for number, run in enumerate(runs):
        if run.history:
            best = None if run.best is None else int(run.best["epoch"])
            figure = training_figure(run.history, best, "")
            seconds = sum(float(row.get("seconds", 0.0)) for row in run.history)
            epochs = format_count(len(run.history), "epoch")
            note = Paragraph(f"{epochs} in {format_duration(seconds)}, including validation.")
            blocks += [Collapsible(run.name, [figure, note], open=number == 0)] if len(runs) > 1 else [figure, note]
    return blocks


def results_intro(gathered: ReportSources) -> str:
    """Say what the figures are of."""
    if not any(gathered.results.values()):
        return ""
    return "By set of slides. What cannot be computed is empty and says why."


def result_blocks(gathered: ReportSources) -> list[Block]:
    """Show each set of slides: figures, then pictures of each target."""
    blocks: list[Block] = []
    for number, (name, result) in enumerate(gathered.every_result):
        inner: list[Block] = [Paragraph(result.about)]
        inner += [Paragraph(result.warning, warning=True)] if result.warning else []
        inner += [Paragraph(note, warning=True) for note in result.results.notes]
        inner += _result_figures(result)
        inner.append(metric_table(result.results))
        inner += [replace(table, title="Colour baseline") for table in baseline_tables(result.results)]
        inner += [replace(table, title="Subgroups") for table in subgroup_tables(result.results)]
        of = _SETS.get(result.title, result.title)
        title = f"{of}, {name}" if name else of
        blocks.append(Collapsible(title, inner, _auc_text(result), open=number == 0))
    return blocks


def _result_figures(result: EvaluatedSlideSet) -> list[Figure]:
    """Return the figures of each target; with several targets their names are titles."""
    evaluated, several = result.evaluated_predictions(), len(result.targets) > 1
    return [
        Figure(target if several else "", list(target_panels(evaluated, target, kind).values()))
        for target, kind in result.targets.items()
    ]


def _auc_text(result: EvaluatedSlideSet) -> str:
    """Write the AUC for the line that is seen while a part is shut."""
    first = result.results.main_metrics[0]
    found = result.metrics.get((result.results.columns[-1], first))
    if found is None or found.estimate.value is None:
        return ""
    mean = "mean " if len(result.targets) > 1 else ""
    return f"{mean}{result.results.metric_names[first]} {format_number(found.estimate.value)}"


def _call_texts(kind: TargetKind, call: Label, label: Label) -> dict[str, str]:
    """Return a call, a label and their agreement as words; empty where there is none."""
    values = {"call": call, "label": label}
    texts = {name: "" if value is None else kind.describe_label(value) for name, value in values.items()}
    return texts | {"outcome": kind.describe_outcome(call, label)}


def slides_section(gathered: ReportSources) -> PageSection:
    """Return a line per slide and target: from the results, then from predictions that no result contains."""
    lines = [line for run in gathered.runs for result in gathered.results[run.name] for line in _lines_of(run, result)]
    seen = {(line.model, line.slide_id, line.target): line.probability for line in lines}
    for found in gathered.predictions:
        for line in _predicted_lines(gathered.runs, found):
            evaluated = seen.get((line.model, line.slide_id, line.target))
            # another probability by the same weights is another slide of the same name, or other tiles
            if evaluated is None or abs(evaluated - line.probability) > _SAME_PROBABILITY:
                lines.append(line)
    if not lines:
        return PageSection("Slides", [])
    intro = "Every slide and target. The mark in a bar is the threshold, chosen on validation slides."
    blocks: list[Block] = [shown := SlidesBlock(lines[:_MOST_LINES])]
    if len(shown.places) == 1:  # the table has no column of it
        intro += f" All of them: {shown.places[0]}."
    if len(lines) > _MOST_LINES:
        left = len(lines) - _MOST_LINES
        note = f"{left:,} lines are left out: the tables predictions.csv have all of them."
        blocks.append(Paragraph(note, warning=True))
    return PageSection("Slides", blocks, intro)


def _lines_of(run: ReportedRun, result: EvaluatedSlideSet) -> list[SlideLine]:
    """List the slides of a result."""
    kinds, thresholds = result.targets, result.thresholds
    return [
        SlideLine(
            slide_id=each.slide_id,
            patient_id=each.patient_id,
            where=result.title,
            target=target,
            probability=kinds[target].activate(logit),
            threshold=thresholds.get(target),
            **_call_texts(
                kinds[target], kinds[target].apply_threshold(logit, thresholds.get(target)), each.labels.get(target)
            ),
            tiles=each.tiles,
            model=result.model or run.name,
        )
        for each in result.predictions
        for target, logit in each.logits.items()
    ]


def _predicted_lines(runs: Sequence[ReportedRun], found: ResultFolder) -> list[SlideLine]:
    """List the slides of a folder of predictions."""
    model = next((run.name for run in runs if found.made_by(run.weights_sha256)), Path(found.model).name)
    return [
        SlideLine(
            slide_id=slide.slide_id,
            patient_id=slide.patient_id,
            where=found.path.name,
            target=target,
            probability=said.probability,
            threshold=said.threshold,
            **_call_texts(slide.kinds[target], said.call, said.label),
            tiles=slide.tiles,
            model=model,
        )
        for slide in PredictionFolder(found.path).slides()
        for target, said in slide.targets.items()
    ]


def picture_sections(
    gathered: ReportSources, settings: PictureSettings, budget: PictureBudget, console: Console
) -> list[PageSection]:
    """Draw maps and galleries of each folder of predictions."""
    finder = make_slide_finder(settings.slides)
    maps: list[Block] = []
    galleries: list[Block] = []
    for found in gathered.predictions:
        folder = PredictionFolder(found.path)
        slides = folder.slides()
        of = [Paragraph(f"From {found.path.name}:")] if len(gathered.predictions) > 1 else []
        if settings.heatmaps:
            maps_possible = sum(len(slide.targets) for slide in slides)
            most = min(settings.heatmaps, maps_possible)
            with SlideProgress(console, "drawing heatmaps", slides=most) as progress:
                if drawn := heatmap_blocks(folder, slides, settings, finder, budget, progress):
                    maps += [*of, *drawn]
        if settings.tiles and (shown := gallery_blocks(folder, slides, settings, finder, budget)):
            galleries += [*of, *shown]
    intro = (
        "Each slide as it is, and with what each tile adds to the logit or how much it counts. Of every outcome the "
        "slides furthest from the threshold, wrong calls first."
    )
    tiles = "The tiles that moved the model most: they are what to look at before believing it."
    return [PageSection("Maps of slides", maps, intro), PageSection("Most influential tiles", galleries, tiles)]


def failures_section(gathered: ReportSources) -> PageSection:
    """List what failed."""
    steps = [] if gathered.study is None else gathered.study.failed
    table = background.failures_table(gathered.runs, [*gathered.evaluations, *gathered.predictions], steps)
    return PageSection("What failed", [table] if table is not None else [])
