"""Table of the epochs, time and memory that each model needed."""

from __future__ import annotations

from statistics import fmean

from tapfm.results.table import Column, Row, Table, table_row
from tapfm.study.results import ModelResult, StudyResults, find_best_epoch

_COLUMNS = (
    Column("Model", "model", text=True),
    Column("runs", "runs"),
    Column("epochs", "epochs", float_format=".4g"),
    Column("best epoch", "best_epoch", float_format=".4g"),
    Column("seconds per epoch", "seconds_per_epoch", float_format=",.1f"),
    Column("seconds per run", "seconds", float_format=",.0f"),
    Column("peak memory, GiB", "peak_memory_gib", float_format=".2f"),
    Column("tiles per second", "tiles_per_second", shown=False),
)
_NOTE = (
    "Values are means over runs, with two exceptions: seconds per epoch is the mean over all epochs of these runs, and "
    "peak memory is the maximum. Times include validation, but not the computation of the features of fixed "
    "encoders. Peak memory is GPU memory if a GPU was used, otherwise memory of the process."
)


def costs_table(results: StudyResults) -> Table:
    return Table(_COLUMNS, [_model_row(each) for each in results.models], notes=[_NOTE])


def _model_row(result: ModelResult) -> Row:
    histories = list(result.histories.values())
    epochs = [epoch for history in histories for epoch in history]
    return table_row(
        result.model.full_title,
        len(histories),
        fmean(map(len, histories)),
        fmean(find_best_epoch(history)["epoch"] for history in histories),
        fmean(epoch["seconds"] for epoch in epochs),
        fmean(sum(epoch["seconds"] for epoch in history) for history in histories),
        max(epoch["peak_memory_gib"] for epoch in epochs),
        fmean(epoch["tiles_per_second"] for epoch in epochs),
    )
