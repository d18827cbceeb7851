"""Predictions for slides with their labels: read and write tables, average ensembles, pool by patient, score."""

from __future__ import annotations

import csv
import io
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, get_args

from tapfm.errors import InputError, LabelError, SettingError
from tapfm.runtime.csv_files import write_csv
from tapfm.runtime.messages import format_count
from tapfm.tasks.catalog import target_kinds
from tapfm.tasks.target import Label, TargetKind, TargetKinds

Unit = Literal["slide", "patient"]

SlideKey = tuple[str | None, str | None, str]  # cohort, split, slide_id

COLUMNS = (
    "patient_id",
    "slide_id",
    "cohort",
    "split",
    "target",
    "label",
    "positive_class",
    "probability",
    "logit",
    "tiles",
    "tiles_failed",
)
_FEW_TILES = 20  # a prediction from fewer tiles gets a warning
_REQUIRED = ("patient_id", "slide_id", "target", "label", "probability")  # tables of other tools may have only these
_TABLE_HINT = (
    f"Use a CSV file with a row for each slide and target, and the columns {', '.join(COLUMNS)}. "
    f"Required columns: {', '.join(_REQUIRED)}."
)
_NUMBERS = (("0", "0.0"), ("1", "1.0"))  # the labels 0 and 1


@dataclass(frozen=True)
class LabelledSlide:
    """A slide with its labels by target; a missing label is None."""

    slide_id: str
    patient_id: str
    labels: Mapping[str, Label]
    split: str
    cohort: str | None = None

    def prediction(
        self, targets: Iterable[str], logits: Sequence[float], tiles: int, tiles_failed: int = 0
    ) -> Prediction:
        """Return a prediction for this slide."""
        return Prediction(
            slide_id=self.slide_id,
            patient_id=self.patient_id,
            split=self.split,
            cohort=self.cohort,
            labels=self.labels,
            logits=dict(zip(targets, logits, strict=True)),
            tiles=tiles,
            tiles_failed=tiles_failed,
        )


@dataclass(frozen=True)
class Prediction:
    """Prediction for a slide, or for a patient after pooling; labels and logits by target, a missing label is None."""

    slide_id: str  # after pooling: the patient_id
    patient_id: str
    split: str | None
    cohort: str | None
    labels: Mapping[str, Label]
    logits: Mapping[str, float]
    tiles: int
    tiles_failed: int = 0


@dataclass(frozen=True)
class AucScores:
    """AUC of each target, and the mean over the targets that have one."""

    unit: Unit
    count: int  # number of slides or patients
    auc: Mapping[str, float | None]
    undefined_reasons: Mapping[str, str]  # by target, for targets without an AUC
    macro: float | None


def few_tiles_warning(tiles: int) -> str:
    """Return "only 7 tiles", or an empty string if there are enough tiles or their number is unknown (0)."""
    return f"only {format_count(tiles, 'tile')}" if 0 < tiles < _FEW_TILES else ""


def describe_few_tiles(slides: int) -> str:
    """Return the sentence about a number of slides with `few_tiles_warning`."""
    verb = "has" if slides == 1 else "have"
    few = f"{format_count(slides, 'slide')} {verb} fewer than {_FEW_TILES} tiles."
    return f"{few} Predictions from so few tiles are unreliable."


def write_predictions(path: Path, predictions: Sequence[Prediction], targets: TargetKinds | None = None) -> None:
    """Write a table with a row for each slide and target, in full precision.

    targets: if None, the targets of the predictions, as binary targets.
    """
    targets = targets or target_kinds(collect_targets(predictions))
    if duplicates := find_duplicates([slide_key(each) for each in predictions]):
        raise InputError(
            f"Slide '{duplicates[0][-1]}' has two predictions, so {path} was not written.",
            hint="Pass one prediction for each slide of a cohort and split.",
        )
    write_csv(path, COLUMNS, [_csv_cells(each, target, targets) for each in predictions for target in targets])


def _csv_cells(prediction: Prediction, target: str, targets: TargetKinds) -> list[str | int | None]:
    return [
        *(prediction.patient_id, prediction.slide_id, prediction.cohort, prediction.split, target),
        *targets[target].format_prediction(prediction.labels.get(target), float(prediction.logits[target])),
        *(prediction.tiles, prediction.tiles_failed),
    ]


def read_predictions(path: Path, targets: TargetKinds | None = None) -> list[Prediction]:
    """Read a table of predictions. Without a column `logit`, logits are computed from the probabilities.

    targets: if None, the targets in the table.
    """
    slides: dict[SlideKey, Prediction] = {}
    first_rows: dict[tuple[SlideKey, str], int] = {}
    rows = _read_rows(path)
    kinds = _find_target_kinds(rows) if targets is None else targets
    for number, row in rows:
        try:
            _add_row(row, number, slides, first_rows, kinds)
        except ValueError as error:
            raise InputError(f"{path}, row {number}: {error}.", hint=_TABLE_HINT) from error
    return _order_targets(path, list(slides.values()), list(dict.fromkeys(target for _, target in first_rows)))


def read_target_kinds(path: Path) -> dict[str, TargetKind]:
    """Return the kind of each target of a table of predictions, from its labels and the column `positive_class`."""
    return _find_target_kinds(_read_rows(path))


def _find_target_kinds(rows: Sequence[tuple[int, Mapping[str, str]]]) -> dict[str, TargetKind]:
    """Return the kind of each target. Labels other than the positive class are the negative class."""
    names = dict.fromkeys(row["target"] for _, row in rows if row["target"])
    with_texts = {
        row["target"]
        for _, row in rows
        if (row.get("positive_class") or "1") not in _NUMBERS[1]
        or (row["label"] or "") not in ("", *_NUMBERS[0], *_NUMBERS[1])
    }
    texts: dict[str, dict[str, list[str]]] = {}
    for _, row in rows:
        positive = row.get("positive_class") or ""  # without it, labels other than 0 and 1 are an error
        if positive and row["target"] in with_texts:
            classes = texts.setdefault(row["target"], {"positive": [positive], "negative": []})
            label = row["label"] or ""
            if label and label != positive and label not in classes["negative"]:
                classes["negative"].append(label)
    for classes in texts.values():
        classes["negative"] = classes["negative"][:1] or [f"not {classes['positive'][0]}"]
    return target_kinds(names, texts)


def _read_rows(path: Path) -> list[tuple[int, dict[str, str]]]:
    """Return the rows of a table of predictions with their numbers."""
    try:
        reader = csv.DictReader(io.StringIO(path.read_text(encoding="utf-8-sig"), newline=""), strict=True)
        if missing := [name for name in _REQUIRED if name not in (reader.fieldnames or [])]:
            raise InputError(f"{path} lacks the columns {', '.join(missing)}.", hint=_TABLE_HINT)
        return [(reader.line_num, row) for row in reader]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise InputError(f"{path} cannot be read ({error}).", hint=_TABLE_HINT) from error


def _add_row(
    row: Mapping[str, str],
    number: int,
    slides: dict[SlideKey, Prediction],
    first_rows: dict[tuple[SlideKey, str], int],
    targets: TargetKinds,
) -> None:
    """Add a row of a table to the slides read so far. Raises ValueError if it is invalid."""
    prediction = _parse_row(row, targets)
    key, target = slide_key(prediction), row["target"]
    if (key, target) in first_rows:
        raise ValueError(
            f"duplicate prediction for slide '{prediction.slide_id}' and target {target}, "
            f"also in row {first_rows[key, target]}"
        )
    first_rows[key, target] = number
    earlier = slides.get(key, prediction)
    for name in ("patient_id", "tiles", "tiles_failed"):
        if getattr(earlier, name) != getattr(prediction, name):
            raise ValueError(f"slide '{prediction.slide_id}' has a different {name} in an earlier row")
    slides[key] = replace(
        earlier,
        labels={**earlier.labels, **prediction.labels},
        logits={**earlier.logits, **prediction.logits},
    )


def _parse_row(row: Mapping[str, str], kinds: TargetKinds) -> Prediction:
    """Parse the prediction for one slide and target. Raises ValueError if it is invalid."""
    if None in row or None in row.values():
        raise ValueError("the number of fields differs from the number of columns")
    if empty := [name for name in ("patient_id", "slide_id", "target") if not row[name]]:
        raise ValueError(f"{empty[0]} is empty")
    if row["target"] not in kinds:
        raise ValueError(f"unknown target {row['target']}; expected one of {', '.join(kinds)}")
    kind = kinds[row["target"]]
    label, logit = kind.parse_prediction(row["label"], row["probability"], row.get("logit") or "")
    return Prediction(
        slide_id=row["slide_id"],
        patient_id=row["patient_id"],
        split=row.get("split") or None,
        cohort=row.get("cohort") or None,
        labels={row["target"]: label},
        logits={row["target"]: logit},
        tiles=int(row.get("tiles") or 0),
        tiles_failed=int(row.get("tiles_failed") or 0),
    )


def _order_targets(path: Path, slides: Sequence[Prediction], targets: Sequence[str]) -> list[Prediction]:
    """Return slides with their targets in this order. Raises InputError if a slide lacks a target."""
    for each in slides:
        if missing := [target for target in targets if target not in each.logits]:
            raise InputError(
                f"{path}: slide '{each.slide_id}' has no row for {', '.join(missing)}.",
                hint="Each slide needs a row for each target. Leave the label empty if it is unknown.",
            )
    return [
        replace(
            each,
            labels={target: each.labels[target] for target in targets},
            logits={target: each.logits[target] for target in targets},
        )
        for each in slides
    ]


def slide_key(prediction: Prediction) -> SlideKey:
    """Return the key of a slide; the same slide_id in another cohort or split is a different slide."""
    return prediction.cohort, prediction.split, prediction.slide_id


def find_duplicates(keys: Sequence[SlideKey]) -> list[SlideKey]:
    """Return the keys that occur more than once."""
    return [key for key, count in Counter(keys).items() if count > 1]


def average_predictions(members: Sequence[Sequence[Prediction]], targets: TargetKinds) -> list[Prediction]:
    """Return the predictions of an ensemble: for each slide, the mean over the members.

    Raises InputError unless all members have the same slides and labels. The order is that of the first member.
    """
    if not members:
        raise InputError("An ensemble needs at least one member.")
    by_key = [{slide_key(each): each for each in member} for member in members]
    for number, (member, indexed) in enumerate(zip(members, by_key, strict=True), start=1):
        if duplicates := find_duplicates([slide_key(each) for each in member]):
            raise InputError(
                f"Member {number} has two predictions for slide '{duplicates[0][-1]}'.",
                hint="Pass one prediction for each slide of a cohort and split.",
            )
        if differing := [key[-1] for key in indexed.keys() ^ by_key[0].keys()]:
            raise InputError(
                f"Members 1 and {number} have different slides: {', '.join(sorted(differing)[:5])}.",
                hint="Predict the same slides with every member of the ensemble.",
            )
    return [_average_slide([indexed[slide_key(each)] for indexed in by_key], targets) for each in members[0]]


def _average_slide(predictions: Sequence[Prediction], targets: TargetKinds) -> Prediction:
    """Return the mean of the predictions of several models for one slide."""
    first = predictions[0]
    for each in predictions:
        _check_targets(each, targets)
        if any(each.labels.get(target) != first.labels.get(target) for target in targets):
            raise LabelError(
                f"Slide '{first.slide_id}' has different labels in the members of the ensemble.",
                hint="Use members that were trained with the same labels.",
            )
    return replace(first, logits=_combine_logits(predictions, targets))


def _combine_logits(predictions: Sequence[Prediction], targets: TargetKinds) -> dict[str, float]:
    return {
        target: kind.combine_logits([each.logits[target] for each in predictions]) for target, kind in targets.items()
    }


def _pool_by_patient(predictions: Sequence[Prediction], targets: TargetKinds) -> list[Prediction]:
    """Return one prediction for each patient.

    The same patient_id in another cohort or split is a different patient.
    """
    slides: dict[tuple[str | None, str | None, str], list[Prediction]] = {}
    for each in predictions:
        slides.setdefault((each.cohort, each.split, each.patient_id), []).append(each)
    return [_pool_slides(each, targets) for each in slides.values()]


def _pool_slides(slides: Sequence[Prediction], targets: TargetKinds) -> Prediction:
    """Return the prediction for a patient from the patient's slides."""
    return replace(
        slides[0],
        slide_id=slides[0].patient_id,
        labels={
            target: kind.pool_labels([each.labels.get(target) for each in slides]) for target, kind in targets.items()
        },
        logits=_combine_logits(slides, targets),
        tiles=sum(each.tiles for each in slides),
        tiles_failed=sum(each.tiles_failed for each in slides),
    )


def compute_scores(predictions: Sequence[Prediction], targets: TargetKinds, unit: Unit) -> AucScores:
    """Return the AUC of each target over slides or patients."""
    units = pool_by_unit(predictions, targets, unit)
    by_target: dict[str, float | None] = {}
    reasons: dict[str, str] = {}
    for target, kind in targets.items():
        labels = [each.labels.get(target) for each in units]
        by_target[target] = kind.compute_score(*kind.select_labelled(labels, [each.logits[target] for each in units]))
        if by_target[target] is None:
            reasons[target] = kind.explain_undefined(labels, unit)
    defined = [value for value in by_target.values() if value is not None]
    return AucScores(unit, len(units), by_target, reasons, sum(defined) / len(defined) if defined else None)


def pool_by_unit(predictions: Sequence[Prediction], targets: TargetKinds, unit: Unit) -> Sequence[Prediction]:
    """Return the predictions for slides unchanged, or pooled by patient. Raises LabelError if a target is missing."""
    if unit not in get_args(Unit):
        raise SettingError(f"unit must be 'slide' or 'patient'; got {unit!r}.")
    for each in predictions:
        _check_targets(each, targets)
    return _pool_by_patient(predictions, targets) if unit == "patient" else predictions


def collect_targets(predictions: Sequence[Prediction]) -> list[str]:
    """Return the targets of predictions. Raises LabelError unless all predictions have the same targets."""
    targets = list(dict.fromkeys(target for each in predictions for target in each.logits))
    for each in predictions:
        _check_targets(each, targets)
    return targets


def _check_targets(prediction: Prediction, targets: Iterable[str]) -> None:
    """Raise LabelError if a prediction lacks a target."""
    if missing := [target for target in targets if target not in prediction.logits]:
        raise LabelError(
            f"Slide '{prediction.slide_id}' has no prediction for {', '.join(missing)}.",
            hint=f"Use a model that predicts all targets. The predictions contain: {', '.join(prediction.logits)}.",
        )
