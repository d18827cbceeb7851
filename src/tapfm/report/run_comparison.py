"""Several runs side by side, on the same slides."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tapfm.evaluation.comparison_tables import differences_table
from tapfm.evaluation.method_comparison import compare_methods
from tapfm.evaluation.metric_values import target_title
from tapfm.evaluation.predictions import Prediction, slide_key
from tapfm.report.content import Block
from tapfm.report.result import EvaluatedSlideSet
from tapfm.report.runs import ReportedRun
from tapfm.results.document import Paragraph
from tapfm.results.table import Column, Table, table_row
from tapfm.tasks.target import Label

ResultsByRun = Mapping[str, Sequence[EvaluatedSlideSet]]  # by name of the run


def side_by_side(runs: Sequence[ReportedRun], results: ResultsByRun) -> list[Block]:
    """Compare the AUCs of runs on the sets of slides that they share."""
    blocks: list[Block] = []
    every = [result for run in runs for result in results[run.name]]
    held_out = [result for result in every if not result.warning]
    for title in dict.fromkeys(_set_name(result) for result in held_out or every):
        of_runs = {run.name: [each for each in results[run.name] if _set_name(each) == title] for run in runs}
        having = {name: found[0] for name, found in of_runs.items() if found}
        if len(having) < 2:
            continue
        blocks += [_auc_table(title, having), _differences(title, having)]
        if any(len(found) > 1 for found in of_runs.values()):
            blocks.append(Paragraph(f"A run has several evaluations of {title}: the first one is compared."))
    return blocks or [Paragraph("The runs have no set of slides in common.")]


def _set_name(result: EvaluatedSlideSet) -> str:
    """Name the set of slides, which runs may share."""
    return result.group or result.title


def _auc_table(title: str, having: Mapping[str, EvaluatedSlideSet]) -> Table:
    """Return a row for each run, a column for each target."""
    targets = list(dict.fromkeys(target for result in having.values() for target in result.results.columns))
    rows = []
    for name, result in having.items():
        found = [result.metrics.get((target, "auc")) for target in targets]
        rows.append(table_row(name, *(None if each is None else each.estimate for each in found)))
    return Table([Column("", text=True), *(Column(target_title(each)) for each in targets)], rows, f"AUC, {title}")


def _differences(title: str, having: Mapping[str, EvaluatedSlideSet]) -> Block:
    """Test pairs of runs, if all of them have the same slides, labels and targets."""
    first, *others = having.values()
    same = all(
        _labels_of(each.predictions) == _labels_of(first.predictions)
        and list(each.targets) == list(first.targets)
        and each.unit == first.unit
        for each in others
    )
    if not same:
        return Paragraph(
            f"The runs have different slides or labels in {title}, so their AUCs cannot be compared directly. "
            "tapfm compare uses the patients that all of them have."
        )
    methods = {name: [list(result.predictions)] for name, result in having.items()}
    about = first.results.about
    return differences_table(
        compare_methods(methods, first.targets, first.unit, resamples=about["resamples"], seed=about["seed"])
    )


def _labels_of(predictions: Sequence[Prediction]) -> dict[object, dict[str, Label]]:
    """Return the labels of each slide."""
    return {slide_key(each): dict(each.labels) for each in predictions}
