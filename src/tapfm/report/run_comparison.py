"""Comparison of several runs on the sets of slides that they share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tapfm.evaluation.comparison_tables import build_differences_table
from tapfm.evaluation.metric_values import target_title
from tapfm.evaluation.model_comparison import compare_models
from tapfm.evaluation.predictions import Prediction, slide_key
from tapfm.report.content import Block
from tapfm.report.reported_run import ReportedRun
from tapfm.report.slide_set_results import SlideSetResults
from tapfm.results.document import Paragraph
from tapfm.results.table import Column, Table, table_row
from tapfm.tasks.target import Label

ResultsByRun = Mapping[str, Sequence[SlideSetResults]]  # by name of the run


def build_comparison_blocks(runs: Sequence[ReportedRun], results: ResultsByRun) -> list[Block]:
    """Return the AUCs of all runs on each shared set of slides, and paired tests."""
    blocks: list[Block] = []
    every_result = [result for run in runs for result in results[run.name]]
    held_out = [result for result in every_result if not result.warning]
    for title in dict.fromkeys(_set_title(result) for result in held_out or every_result):
        all_by_run = {run.name: [each for each in results[run.name] if _set_title(each) == title] for run in runs}
        first_by_run = {name: found[0] for name, found in all_by_run.items() if found}
        if len(first_by_run) < 2:
            continue
        blocks += [_build_auc_table(title, first_by_run), _build_differences(title, first_by_run)]
        if any(len(found) > 1 for found in all_by_run.values()):
            note = f"A run has several evaluations of the set {title}. Only the first one is compared."
            blocks.append(Paragraph(note))
    return blocks or [Paragraph("The runs were not evaluated on a common set of slides.")]


def _set_title(result: SlideSetResults) -> str:
    return result.title_without_folder or result.title


def _build_auc_table(title: str, results: Mapping[str, SlideSetResults]) -> Table:
    """Return the AUCs: a row for each run, a column for each target and, if there are several, for their mean."""
    targets = list(dict.fromkeys(target for result in results.values() for target in result.results.targets_and_mean))
    rows = []
    for name, result in results.items():
        values = [result.metrics.get((target, "auc")) for target in targets]
        rows.append(table_row(name, *(None if value is None else value.estimate for value in values)))
    columns = [Column("", text=True), *(Column(target_title(target)) for target in targets)]
    return Table(columns, rows, f"AUC, {title}")


def _build_differences(title: str, results: Mapping[str, SlideSetResults]) -> Block:
    """Return paired tests if all runs have the same slides, labels, targets and unit; otherwise a note."""
    first = next(iter(results.values()))
    if not have_same_slides(list(results.values())):
        return Paragraph(
            f"The runs have different slides, labels, targets or units in the set {title}, so their AUCs cannot be "
            "compared directly. The command tapfm compare compares them on the patients that all of them have."
        )
    models = {name: [list(result.predictions)] for name, result in results.items()}
    about = first.results.about
    return build_differences_table(
        compare_models(models, first.targets, first.unit, resamples=about["resamples"], seed=about["seed"])
    )


def have_same_slides(results: Sequence[SlideSetResults]) -> bool:
    """Return whether all results have the same slides, labels, targets and unit."""
    first, *others = results
    return all(
        _labels_by_slide(other.predictions) == _labels_by_slide(first.predictions)
        and list(other.targets) == list(first.targets)
        and other.unit == first.unit
        for other in others
    )


def _labels_by_slide(predictions: Sequence[Prediction]) -> dict[object, dict[str, Label]]:
    return {slide_key(each): dict(each.labels) for each in predictions}
