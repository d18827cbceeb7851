"""What a model says of slides, beside what is known of them: kept as a table, pooled by patient, scored."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, get_args

import numpy as np

from tapfm.errors import InputError, LabelError, SettingError
from tapfm.evaluation.ranking import auc, why_undefined
from tapfm.storage import write_atomically

Unit = Literal["slide", "patient"]

COLUMNS = ("slide_id", "patient_id", "cohort", "split", "tiles", "tiles_failed")
OF_A_TARGET = ("_label", "_probability", "_logit")


@dataclass(frozen=True)
class Prediction:
    """One slide, or one patient when pooled; labels and logits by target, a missing label is None."""

    slide_id: str
    patient_id: str
    split: str | None
    cohort: str | None
    labels: Mapping[str, int | None]
    logits: Mapping[str, float]
    tiles: int
    tiles_failed: int = 0

    @property
    def probabilities(self) -> dict[str, float]:
        """Sigmoid of the logits."""
        return {target: sigmoid(logit) for target, logit in self.logits.items()}


@dataclass(frozen=True)
class Scores:
    """AUC of each target, and their mean over the targets that have one."""

    unit: Unit
    count: int  # slides or patients
    auc: Mapping[str, float | None]
    why_undefined: Mapping[str, str]  # the targets without an AUC
    macro: float | None


def sigmoid(logit: float) -> float:
    """Turn a logit into a probability, without overflow."""
    small = math.exp(-abs(logit))
    return 1 / (1 + small) if logit >= 0 else small / (1 + small)


def write_predictions(path: Path, predictions: Sequence[Prediction]) -> None:
    """Write a table with a line for each prediction; numbers come back as they were."""
    targets = all_targets(predictions)
    text = io.StringIO(newline="")
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([*COLUMNS, *(target + ending for target in targets for ending in OF_A_TARGET)])
    for each in predictions:
        row = [each.slide_id, each.patient_id, each.cohort or "", each.split or "", each.tiles, each.tiles_failed]
        for target in targets:
            label = each.labels.get(target)
            logit = float(each.logits[target])
            row += ["" if label is None else int(label), repr(sigmoid(logit)), repr(logit)]
        writer.writerow(row)
    write_atomically(path, text.getvalue().encode())


def read_predictions(path: Path) -> list[Prediction]:
    """Read a table of predictions; the logits count, the probabilities follow from them."""
    hint = f"It has to be a CSV with {', '.join(COLUMNS)} and, for each target T, T_label, T_probability, T_logit."
    try:
        lines = csv.DictReader(io.StringIO(path.read_text(encoding="utf-8-sig"), newline=""), strict=True)
        names = list(lines.fieldnames or [])
        targets = [name.removesuffix("_logit") for name in names if name.endswith("_logit")]
        needed = [*COLUMNS, *(target + ending for target in targets for ending in OF_A_TARGET)]
        if missing := [name for name in needed if name not in names]:
            raise InputError(f"{path} lacks the columns {', '.join(missing)}.", hint=hint)
        predictions = []
        for line in lines:
            try:
                predictions.append(prediction_of(line, targets))
            except ValueError as error:
                raise InputError(f"{path}, line {lines.line_num}: {error}.", hint=hint) from error
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise InputError(f"{path} cannot be read ({error}).", hint=hint) from error
    return predictions


def prediction_of(line: Mapping[str, str], targets: Sequence[str]) -> Prediction:
    """Read one line of a table; a ValueError says what is wrong with it."""
    if None in line or None in line.values():
        raise ValueError("as many fields as columns are needed")
    labels = {target: line[f"{target}_label"] for target in targets}
    if wrong := [label for label in labels.values() if label not in ("", "0", "1")]:
        raise ValueError(f"a label must be 0, 1 or empty, got {wrong[0]!r}")
    return Prediction(
        slide_id=line["slide_id"],
        patient_id=line["patient_id"],
        split=line["split"] or None,
        cohort=line["cohort"] or None,
        labels={target: int(label) if label else None for target, label in labels.items()},
        logits={target: float(line[f"{target}_logit"]) for target in targets},
        tiles=int(line["tiles"]),
        tiles_failed=int(line["tiles_failed"]),
    )


def pool_by_patient(predictions: Sequence[Prediction]) -> list[Prediction]:
    """Make one prediction of a patient's slides: the mean of probabilities, positive where any slide is.

    The same patient_id in another cohort or split is another patient.
    """
    slides: dict[tuple[str | None, str | None, str], list[Prediction]] = {}
    for each in predictions:
        slides.setdefault((each.cohort, each.split, each.patient_id), []).append(each)
    return [pooled(of_patient) for of_patient in slides.values()]


def pooled(slides: Sequence[Prediction]) -> Prediction:
    """Pool the slides of one patient."""
    targets = all_targets(slides)
    return replace(
        slides[0],
        slide_id=slides[0].patient_id,
        labels={target: any_positive([each.labels.get(target) for each in slides]) for target in targets},
        logits={target: logit_of_mean([each.logits[target] for each in slides]) for target in targets},
        tiles=sum(each.tiles for each in slides),
        tiles_failed=sum(each.tiles_failed for each in slides),
    )


def any_positive(labels: Sequence[int | None]) -> int | None:
    """Label a patient: 1 where any slide is, None where none is labelled."""
    return max((label for label in labels if label is not None), default=None)


def logit_of_mean(logits: Sequence[float]) -> float:
    """Find the logit of the mean of probabilities, in any order and also where those round to 0 or 1."""
    if len(set(logits)) == 1:
        return float(logits[0])
    ordered = np.sort(np.asarray(logits, dtype=np.float64))
    log_positive = np.logaddexp.reduce(-np.logaddexp(0, -ordered))
    log_negative = np.logaddexp.reduce(-np.logaddexp(0, ordered))
    return float(log_positive - log_negative)


def scores(predictions: Sequence[Prediction], targets: Sequence[str], unit: Unit) -> Scores:
    """Score predictions, slide by slide or patient by patient."""
    if unit not in get_args(Unit):
        raise SettingError(f"unit must be 'slide' or 'patient'; got {unit!r}.")
    for each in predictions:
        check_targets(each, targets)
    units = pool_by_patient(predictions) if unit == "patient" else predictions
    by_target: dict[str, float | None] = {}
    reasons: dict[str, str] = {}
    for target in targets:
        labels = [each.labels.get(target) for each in units]
        # logits rather than probabilities: those near 0 and 1 are rounded to ties
        by_target[target] = auc(labels, [each.logits[target] for each in units])
        if by_target[target] is None:
            reasons[target] = why_undefined(labels, unit)
    defined = [value for value in by_target.values() if value is not None]
    return Scores(unit, len(units), by_target, reasons, sum(defined) / len(defined) if defined else None)


def all_targets(predictions: Sequence[Prediction]) -> list[str]:
    """List the targets, which all predictions must have."""
    targets = list(dict.fromkeys(target for each in predictions for target in each.logits))
    for each in predictions:
        check_targets(each, targets)
    return targets


def check_targets(prediction: Prediction, targets: Sequence[str]) -> None:
    """Refuse a prediction that says nothing of a target."""
    if missing := [target for target in targets if target not in prediction.logits]:
        raise LabelError(
            f"Slide '{prediction.slide_id}' has no prediction of {', '.join(missing)}.",
            hint=f"It has predictions of: {', '.join(prediction.logits)}.",
        )
