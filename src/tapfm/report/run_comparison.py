"""Several runs side by side, on the same slides."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tapfm.evaluation.comparing import PairedComparison, compare_methods
from tapfm.evaluation.estimate_text import format_p_value
from tapfm.evaluation.measures import target_title
from tapfm.evaluation.predictions import Prediction, slide_key
from tapfm.report.content import Block, Cell, Column, Note, Row, Table
from tapfm.report.numbers import ABSENT, estimate_cell, format_interval, signed
from tapfm.report.result import SplitResult
from tapfm.report.runs import ReportedRun
from tapfm.tasks.catalog import target_kinds
from tapfm.tasks.target import Label

ResultsByRun = Mapping[str, Sequence[SplitResult]]  # by run


def side_by_side(runs: Sequence[ReportedRun], results: ResultsByRun) -> list[Block]:
    """Compare the AUCs of runs on the sets that they share."""
    blocks: list[Block] = []
    every = [result for run in runs for result in results[run.name]]
    held_out = [result for result in every if not result.warning]  # nothing was chosen on them
    titles = dict.fromkeys(_group_of(result) for result in held_out or every)
    for title in titles:
        of_runs = {run.name: [each for each in results[run.name] if _group_of(each) == title] for run in runs}
        having = {name: found[0] for name, found in of_runs.items() if found}
        if len(having) < 2:
            continue
        blocks.append(_auc_table(title, having))
        blocks += _differences(title, having)
        if any(len(found) > 1 for found in of_runs.values()):
            blocks.append(Note(f"Of a run with several evaluations of {title} the first is compared."))
    return blocks or [Note("The runs have no set of slides in common.")]


def _group_of(result: SplitResult) -> str:
    """Name the set of slides, which runs may share."""
    return result.group or result.title


def _auc_table(title: str, having: Mapping[str, SplitResult]) -> Table:
    """Write a line for each run, a column for each target."""
    columns = list(dict.fromkeys(column for result in having.values() for column in result.columns))
    rows = []
    for name, result in having.items():
        found = [result.measured.get((column, "auc")) for column in columns]
        rows.append(Row([Cell(name), *(estimate_cell(None if each is None else each.estimate) for each in found)]))
    return Table([Column("", words=True), *(Column(target_title(each)) for each in columns)], rows, f"AUC, {title}")


def _differences(title: str, having: Mapping[str, SplitResult]) -> list[Block]:
    """Test pairs of runs, where all of them have the same slides, labels and targets."""
    first, *others = having.values()
    same = all(
        _labels_of(each.predictions) == _labels_of(first.predictions)
        and each.targets == first.targets
        and each.unit == first.unit
        for each in others
    )
    if not same:
        said = f"The runs have other slides or labels in {title}: their AUCs are not to be compared one by one."
        return [Note(f"{said} `tapfm compare` takes the patients that all of them have.")]
    methods = {name: [list(result.predictions)] for name, result in having.items()}
    compared = compare_methods(
        methods, target_kinds(first.targets), first.unit, resamples=first.resamples, seed=first.seed
    )
    rows = [
        Row([Cell(f"{pair.first} − {pair.second}"), Cell(target_title(pair.target)), *_cells(pair)])
        for pair in compared.pairs
    ]
    columns = [Column("", words=True), Column("target", words=True), Column("difference of AUC"), Column("p")]
    note = "Paired, on the same patients; p by DeLong's test or the bootstrap, corrected by Holm's method."
    return [Table(columns, rows, notes=[note])]


def _cells(pair: PairedComparison) -> list[Cell]:
    """Write a difference and its test."""
    found = pair.difference
    p = ABSENT if pair.p_holm is None else format_p_value(pair.p_holm)
    return [Cell(ABSENT if found.value is None else signed(found.value), format_interval(found), found.why), Cell(p)]


def _labels_of(predictions: Sequence[Prediction]) -> dict[object, dict[str, Label]]:
    """Give the labels of each slide."""
    return {slide_key(each): dict(each.labels) for each in predictions}
