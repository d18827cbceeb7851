"""What a model says of slides, beside what is known of them: kept as a table, pooled by patient, scored."""

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
from tapfm.tasks.catalog import target_kinds
from tapfm.tasks.target import Label, TargetKinds

Unit = Literal["slide", "patient"]

SlideKey = tuple[str | None, str | None, str]  # cohort, split, slide_id

COLUMNS = (
    "patient_id",
    "slide_id",
    "cohort",
    "split",
    "target",
    "label",
    "probability",
    "logit",
    "tiles",
    "tiles_failed",
)
_NEEDED = ("patient_id", "slide_id", "target", "label", "probability")  # the tables of other tools have no more


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
        """Return the prediction of this slide."""
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
    """One slide, or one patient when pooled; labels and logits by target, a missing label is None."""

    slide_id: str
    patient_id: str
    split: str | None
    cohort: str | None
    labels: Mapping[str, Label]
    logits: Mapping[str, float]
    tiles: int
    tiles_failed: int = 0


@dataclass(frozen=True)
class AucScores:
    """AUC of each target, and their mean over the targets that have one."""

    unit: Unit
    count: int  # slides or patients
    auc: Mapping[str, float | None]
    undefined_reasons: Mapping[str, str]  # the targets without an AUC
    macro: float | None


def write_predictions(path: Path, predictions: Sequence[Prediction], targets: TargetKinds | None = None) -> None:
    """Write a table with a line for each slide and target; numbers come back as they were.

    targets: None: those of the predictions, of the usual kind.
    """
    targets = targets or target_kinds(collect_targets(predictions))
    if twice := find_duplicates([slide_key(each) for each in predictions]):
        raise InputError(f"Slide '{twice[0][-1]}' has two predictions; a table keeps one of each slide.")
    write_csv(path, COLUMNS, [_csv_cells(each, target, targets) for each in predictions for target in targets])


def _csv_cells(prediction: Prediction, target: str, targets: TargetKinds) -> list[str | int | None]:
    return [
        *(prediction.patient_id, prediction.slide_id, prediction.cohort, prediction.split, target),
        *targets[target].format_prediction(prediction.labels.get(target), float(prediction.logits[target])),
        *(prediction.tiles, prediction.tiles_failed),
    ]


def read_predictions(path: Path, targets: TargetKinds | None = None) -> list[Prediction]:
    """Read a table of predictions; the logits count, and follow from the probabilities where a table has none.

    targets: None: those that the table names, of the usual kind.
    """
    hint = (
        f"It has to be a CSV with a line for each slide and target: {','.join(COLUMNS)}. "
        f"Needed are {', '.join(_NEEDED)}."
    )
    slides: dict[SlideKey, Prediction] = {}
    first_lines: dict[tuple[SlideKey, str], int] = {}
    try:
        lines = csv.DictReader(io.StringIO(path.read_text(encoding="utf-8-sig"), newline=""), strict=True)
        if missing := [name for name in _NEEDED if name not in (lines.fieldnames or [])]:
            raise InputError(f"{path} lacks the columns {', '.join(missing)}.", hint=hint)
        for line in lines:
            try:
                _add_line(line, lines.line_num, slides, first_lines, targets)
            except ValueError as error:
                raise InputError(f"{path}, line {lines.line_num}: {error}.", hint=hint) from error
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise InputError(f"{path} cannot be read ({error}).", hint=hint) from error
    return _in_order_of_targets(path, list(slides.values()), list(dict.fromkeys(target for _, target in first_lines)))


def _add_line(
    line: Mapping[str, str],
    number: int,
    slides: dict[SlideKey, Prediction],
    first_lines: dict[tuple[SlideKey, str], int],
    targets: TargetKinds | None,
) -> None:
    """Add one line of a table to the slides read so far; a ValueError says what is wrong with it."""
    said = _prediction_of(line, targets)
    key, target = slide_key(said), line["target"]
    if (key, target) in first_lines:
        raise ValueError(
            f"slide '{said.slide_id}' has a prediction of {target} already, on line {first_lines[key, target]}"
        )
    first_lines[key, target] = number
    before = slides.get(key, said)
    if (before.patient_id, before.tiles, before.tiles_failed) != (said.patient_id, said.tiles, said.tiles_failed):
        raise ValueError(f"slide '{said.slide_id}' has another patient_id or other tiles on an earlier line")
    slides[key] = replace(before, labels={**before.labels, **said.labels}, logits={**before.logits, **said.logits})


def _prediction_of(line: Mapping[str, str], targets: TargetKinds | None) -> Prediction:
    """Read one line of a table, one target of a slide; a ValueError says what is wrong with it."""
    if None in line or None in line.values():
        raise ValueError("as many fields as columns are needed")
    if empty := [name for name in ("patient_id", "slide_id", "target") if not line[name]]:
        raise ValueError(f"{empty[0]} is empty")
    kinds = target_kinds([line["target"]]) if targets is None else targets
    if line["target"] not in kinds:
        raise ValueError(f"{line['target']} is none of the targets {', '.join(kinds)}")
    kind = kinds[line["target"]]
    label, logit = kind.parse_prediction(line["label"], line["probability"], line.get("logit") or "")
    return Prediction(
        slide_id=line["slide_id"],
        patient_id=line["patient_id"],
        split=line.get("split") or None,
        cohort=line.get("cohort") or None,
        labels={line["target"]: label},
        logits={line["target"]: logit},
        tiles=int(line.get("tiles") or 0),
        tiles_failed=int(line.get("tiles_failed") or 0),
    )


def _in_order_of_targets(path: Path, slides: Sequence[Prediction], targets: Sequence[str]) -> list[Prediction]:
    """Order every slide's targets as the table first names them; a slide that lacks one is refused."""
    for each in slides:
        if missing := [target for target in targets if target not in each.logits]:
            raise InputError(
                f"{path}: slide '{each.slide_id}' has no line of {', '.join(missing)}.",
                hint="Every slide needs a line of every target; where a label is not known leave it empty.",
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
    """Tell a slide from all others: the same slide_id in another cohort or split is another slide."""
    return prediction.cohort, prediction.split, prediction.slide_id


def find_duplicates(keys: Sequence[SlideKey]) -> list[SlideKey]:
    """List the slides that come more than once."""
    return [key for key, count in Counter(keys).items() if count > 1]


def average_predictions(members: Sequence[Sequence[Prediction]], targets: TargetKinds) -> list[Prediction]:
    """Make one prediction of several models: the mean of what they say of each slide.

    All must have the same slides with the same labels; their order and tiles are those of the first.
    """
    if not members:
        raise InputError("An ensemble needs at least one member.")
    by_key = [{slide_key(each): each for each in member} for member in members]
    for number, (member, of_member) in enumerate(zip(members, by_key, strict=True), start=1):
        if twice := find_duplicates([slide_key(each) for each in member]):
            raise InputError(f"Member {number} has two predictions of slide '{twice[0][-1]}'.")
        if differing := [key[-1] for key in of_member.keys() ^ by_key[0].keys()]:
            raise InputError(
                f"Member {number} has other slides than the first: {', '.join(sorted(differing)[:5])}.",
                hint="An ensemble is the mean over the same slides: predict them with every member.",
            )
    return [_averaged([of_member[slide_key(each)] for of_member in by_key], targets) for each in members[0]]


def _averaged(same_slide: Sequence[Prediction], targets: TargetKinds) -> Prediction:
    """Average what several models say of one slide."""
    first = same_slide[0]
    for each in same_slide:
        _check_targets(each, targets)
        if any(each.labels.get(target) != first.labels.get(target) for target in targets):
            raise LabelError(f"Slide '{first.slide_id}' has different labels in the members of the ensemble.")
    return replace(first, logits=_mean_logits(same_slide, targets))


def _mean_logits(predictions: Sequence[Prediction], targets: TargetKinds) -> dict[str, float]:
    return {target: kind.mean_logit([each.logits[target] for each in predictions]) for target, kind in targets.items()}


def _pool_by_patient(predictions: Sequence[Prediction], targets: TargetKinds) -> list[Prediction]:
    """Make one prediction of a patient's slides, with label and mean as the kinds of the targets define them.

    The same patient_id in another cohort or split is another patient.
    """
    slides: dict[tuple[str | None, str | None, str], list[Prediction]] = {}
    for each in predictions:
        slides.setdefault((each.cohort, each.split, each.patient_id), []).append(each)
    return [_pooled(of_patient, targets) for of_patient in slides.values()]


def _pooled(slides: Sequence[Prediction], targets: TargetKinds) -> Prediction:
    """Pool the slides of one patient."""
    return replace(
        slides[0],
        slide_id=slides[0].patient_id,
        labels={
            target: kind.pool_labels([each.labels.get(target) for each in slides]) for target, kind in targets.items()
        },
        logits=_mean_logits(slides, targets),
        tiles=sum(each.tiles for each in slides),
        tiles_failed=sum(each.tiles_failed for each in slides),
    )


def compute_scores(predictions: Sequence[Prediction], targets: TargetKinds, unit: Unit) -> AucScores:
    """Score predictions, slide by slide or patient by patient."""
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
    """Give the slides, or their patients, that are counted as one; all must have predictions of the targets."""
    if unit not in get_args(Unit):
        raise SettingError(f"unit must be 'slide' or 'patient'; got {unit!r}.")
    for each in predictions:
        _check_targets(each, targets)
    return _pool_by_patient(predictions, targets) if unit == "patient" else predictions


def collect_targets(predictions: Sequence[Prediction]) -> list[str]:
    """List the targets, which all predictions must have."""
    targets = list(dict.fromkeys(target for each in predictions for target in each.logits))
    for each in predictions:
        _check_targets(each, targets)
    return targets


def _check_targets(prediction: Prediction, targets: Iterable[str]) -> None:
    """Refuse a prediction that says nothing of a target."""
    if missing := [target for target in targets if target not in prediction.logits]:
        raise LabelError(
            f"Slide '{prediction.slide_id}' has no prediction of {', '.join(missing)}.",
            hint=f"It has predictions of: {', '.join(prediction.logits)}.",
        )
