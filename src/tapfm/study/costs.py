"""Epochs, time and memory of each method, from the histories of finished runs."""

from __future__ import annotations

from statistics import fmean

from tapfm.results.table import Column, Row, Table, table_row
from tapfm.study.results import MethodResult, StudyResults, find_best_epoch

_COLUMNS = (
    Column("Model", "model", text=True),
    Column("runs", "runs"),
    Column("epochs", "epochs", form=".4g"),
    Column("best epoch", "best_epoch", form=".4g"),
    Column("seconds per epoch", "seconds_per_epoch", form=",.1f"),
    Column("seconds", "seconds", form=",.0f"),
    Column("peak memory, GiB", "peak_memory_gib", form=".2f"),
    Column("tiles per second", "tiles_per_second", shown=False),
)
_NOTE = (
    "Means over runs, with the validation of each epoch. Peak memory is the highest of any run: that of the GPU if one "
    "was used, otherwise that of the process. The time to store the features of fixed encoders is not included."
)


def costs_table(results: StudyResults) -> Table:
    """Return what the runs of each method needed."""
    return Table(_COLUMNS, [_method_row(each) for each in results.methods], notes=[_NOTE])


def _method_row(result: MethodResult) -> Row:
    histories = list(result.histories.values())
    epochs = [epoch for history in histories for epoch in history]
    return table_row(
        result.method.full_title,
        len(histories),
        fmean(map(len, histories)),
        fmean(find_best_epoch(history)["epoch"] for history in histories),
        fmean(epoch["seconds"] for epoch in epochs),
        fmean(sum(epoch["seconds"] for epoch in history) for history in histories),
        max(epoch["peak_memory_gib"] for epoch in epochs),
        fmean(epoch["tiles_per_second"] for epoch in epochs),
    )
