"""What methods cost: epochs until the best, seconds, and memory; from the histories of finished runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from tapfm.runtime.csv_files import csv_text
from tapfm.study.results import MethodResult, StudyResults, best_row

_COLUMNS = ("runs", "epochs", "best_epoch", "seconds_per_epoch", "seconds", "peak_memory_gib", "tiles_per_second")


@dataclass(frozen=True)
class Cost:
    """Means over the runs of a method; the memory is the most of any."""

    title: str
    numbers: Mapping[str, float]


def costs_of(results: StudyResults) -> list[Cost]:
    """Add up what each method took."""
    return [Cost(title_of(results, each), _numbers_of(list(each.histories.values()))) for each in results.methods]


def title_of(results: StudyResults, result: MethodResult) -> str:
    """Name a method; of one model for each target with its target."""
    target = result.method.target
    return (
        result.method.title if target is None or len(results.study.targets) == 1 else f"{target}: {result.method.title}"
    )


def _numbers_of(histories: Sequence[Sequence[Mapping[str, Any]]]) -> dict[str, float]:
    """Sum up the epochs of runs."""
    rows = [row for history in histories for row in history]
    return {
        "runs": len(histories),
        "epochs": fmean(len(history) for history in histories),
        "best_epoch": fmean(best_row(history)["epoch"] for history in histories),
        "seconds_per_epoch": fmean(row["seconds"] for row in rows),
        "seconds": fmean(sum(row["seconds"] for row in history) for history in histories),
        "peak_memory_gib": max(row["peak_memory_gib"] for row in rows),
        "tiles_per_second": fmean(row["tiles_per_second"] for row in rows),
    }


def costs_csv(costs: Sequence[Cost]) -> str:
    """Return a line for each method."""
    rows = [[cost.title, *(repr(cost.numbers[name]) for name in _COLUMNS)] for cost in costs]
    return csv_text(["model", *_COLUMNS], rows)


def costs_markdown(costs: Sequence[Cost]) -> str:
    """Write it to be read."""
    if not costs:
        return "No run is finished yet.\n"
    lines = [
        "| Model | runs | best epoch | of epochs | seconds per epoch | seconds | peak memory, GiB |",
        "|---|--:|--:|--:|--:|--:|--:|",
    ]
    for cost in costs:
        n = cost.numbers
        best, epochs = f"{n['best_epoch']:.3g}", f"{n['epochs']:.3g}"
        lines.append(
            f"| {cost.title} | {n['runs']:.0f} | {best} | {epochs} | {n['seconds_per_epoch']:,.1f} | "
            f"{n['seconds']:,.0f} | {n['peak_memory_gib']:.2f} |"
        )
    lines += [
        "",
        "Means over runs, with validation each epoch; memory: the most of any run, of the GPU where one was used, else "
        "of the process. A fixed encoder's features were stored before, which is not counted.",
    ]
    return "\n".join(lines) + "\n"
