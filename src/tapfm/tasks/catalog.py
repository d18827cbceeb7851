"""Catalogue of tasks and target kinds. It can be imported without torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Literal

from tapfm.errors import SettingError
from tapfm.tasks.binary_target import BinaryTarget
from tapfm.tasks.class_weights import Weighting
from tapfm.tasks.target import Label, TargetKind

if TYPE_CHECKING:
    from tapfm.contracts import Task

TaskKind = Literal["binary", "multilabel"]


def target_kinds(names: Iterable[str]) -> dict[str, TargetKind]:
    """Return the kind of each target, in the given order. All targets are binary."""
    return {name: BinaryTarget() for name in names}


def _select_task_kind(targets: int) -> TaskKind:
    if targets < 1:
        raise SettingError("No target was given.", hint="Name at least one label column of the cohort table.")
    return "binary" if targets == 1 else "multilabel"


def build_task(
    training_labels: Mapping[str, Sequence[Label]], *, smoothing: float = 0.0, weighting: Weighting = "balanced"
) -> Task:
    """Build the task of these targets, with class weights from the labels of the training split."""
    if _select_task_kind(len(training_labels)) == "binary":
        from tapfm.tasks.binary import BinaryTask

        ((target, labels),) = training_labels.items()
        return BinaryTask.from_training_labels(target, labels, smoothing=smoothing, weighting=weighting)
    from tapfm.tasks.multilabel import MultiLabelTask

    return MultiLabelTask.from_training_labels(training_labels, smoothing=smoothing, weighting=weighting)
