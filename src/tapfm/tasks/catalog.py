"""Catalogue of tasks and target kinds. It can be imported without torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Literal

from tapfm.errors import SettingError
from tapfm.tasks.binary_target import BinaryTarget
from tapfm.tasks.class_weights import Weighting
from tapfm.tasks.target import Label, TargetKind, TargetKinds

if TYPE_CHECKING:
    from tapfm.contracts import Task

TaskKind = Literal["binary", "multilabel"]


ClassTexts = Mapping[str, Mapping[str, Sequence[str]]]  # texts of the classes of each target, by class and target


def target_kinds(names: Iterable[str], labels: ClassTexts | None = None) -> dict[str, TargetKind]:
    """Return the kind of each target, in the given order. All targets are binary.

    labels: texts of the classes of targets whose labels are not 0 and 1, as in [task.labels] of RUN.toml.
    """
    return {name: _build_binary_target((labels or {}).get(name)) for name in names}


def _build_binary_target(texts: Mapping[str, Sequence[str]] | None) -> BinaryTarget:
    return BinaryTarget(tuple(texts["negative"]), tuple(texts["positive"])) if texts else BinaryTarget()


def target_arguments(targets: Mapping[str, TargetKind]) -> list[str]:
    """Return targets and the texts of their classes as arguments of `tapfm split` and `tapfm config`."""
    arguments = [part for name in targets for part in ("--target", name)]
    for name, texts in class_texts(targets).items():
        arguments += [
            part
            for each in ("positive", "negative")
            for text in texts[each]
            for part in (f"--{each}", f"{name}={text}")
        ]
    return arguments


def class_texts(targets: Mapping[str, TargetKind]) -> dict[str, dict[str, list[str]]]:
    """Return the texts of the classes of targets whose labels are not 0 and 1, as `target_kinds` takes them."""
    return {
        name: {each: list(texts) for each, texts in kind.label_texts.items()}
        for name, kind in targets.items()
        if kind.label_texts
    }


def _select_task_kind(targets: int) -> TaskKind:
    if targets < 1:
        raise SettingError("No target was given.", hint="Name at least one label column of the cohort table.")
    return "binary" if targets == 1 else "multilabel"


def build_task(
    training_labels: Mapping[str, Sequence[Label]],
    *,
    smoothing: float = 0.0,
    weighting: Weighting = "balanced",
    kinds: TargetKinds | None = None,
) -> Task:
    """Build the task of these targets, with class weights from the labels of the training split.

    kinds: None if all labels are 0 and 1.
    """
    kinds = target_kinds(training_labels) if kinds is None else kinds
    if _select_task_kind(len(training_labels)) == "binary":
        from tapfm.tasks.binary import BinaryTask

        ((target, labels),) = training_labels.items()
        return BinaryTask.from_training_labels(
            target, labels, smoothing=smoothing, weighting=weighting, kind=kinds[target]
        )
    from tapfm.tasks.multilabel import MultiLabelTask

    return MultiLabelTask.from_training_labels(training_labels, smoothing=smoothing, weighting=weighting, kinds=kinds)
