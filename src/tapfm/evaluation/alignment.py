"""Align the predictions of several models: the units that all have, in the same order, with the same labels."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace

from tapfm.cohort.splits import format_names
from tapfm.errors import InputError
from tapfm.evaluation.patients import PatientKey, patient_key
from tapfm.evaluation.predictions import Prediction, Unit, find_duplicates, pool_by_unit, slide_key
from tapfm.tasks.target import Label, TargetKinds

SeedPredictions = Sequence[Sequence[Prediction]]  # one list of predictions for each seed
_UnitKey = tuple[str, str, str]  # cohort, patient_id, slide_id
_MAX_LISTED = 10  # units listed in an error message


@dataclass(frozen=True)
class AlignedPredictions:
    """The units that all models have, and the predictions of each model for them in the same order."""

    units: list[Prediction]
    slide_count: int
    seeds: Mapping[str, list[list[Prediction]]]  # by model, a list for each seed
    excluded: Mapping[str, tuple[str, ...]]  # by model, patients and slides that other models lack
    partial_labels: tuple[str, ...]  # units and targets with a label in only some models

    @property
    def patient_count(self) -> int:
        return len({patient_key(each) for each in self.units})


def align_predictions(models: Mapping[str, SeedPredictions], targets: TargetKinds, unit: Unit) -> AlignedPredictions:
    """Keep the units that every seed of every model has. Raises InputError if their labels differ."""
    slides = {name: [_index_slides(name, each) for each in model] for name, model in models.items()}
    shared = set.intersection(*(set(each) for model in slides.values() for each in model))
    used = {name: [_drop_unshared_slides(each, shared) for each in model] for name, model in slides.items()}
    units = {name: [_index_units(each, targets, unit) for each in model] for name, model in used.items()}
    all_seeds = [each for model in units.values() for each in model]
    common = sorted(set.intersection(*(set(each) for each in all_seeds)))
    if not common:
        raise _nothing_in_common_error(units)
    patients = {key[:2] for key in common}
    first_used = next(iter(used.values()))[0]
    labels = {key: _collect_labels([each[key] for each in all_seeds], targets) for key in common}
    _check_labels_agree(labels, targets)
    return AlignedPredictions(
        units=[
            replace(all_seeds[0][key], labels={t: next(iter(labels[key][t]), None) for t in targets}) for key in common
        ],
        slide_count=len(common) if unit == "slide" else sum(patient_key(each) in patients for each in first_used),
        seeds={name: [[each[key] for key in common] for each in model] for name, model in units.items()},
        excluded={name: _list_excluded(model, used[name], common) for name, model in slides.items()},
        partial_labels=tuple(
            f"{_unit_name(key)}: {target}"
            for key in common
            for target in targets
            if len({each[key].labels.get(target) for each in all_seeds}) > 1
        ),
    )


def _index_slides(name: str, predictions: Sequence[Prediction]) -> dict[_UnitKey, Prediction]:
    """Return predictions by cohort, patient and slide. The split is ignored: models may have different splits."""
    without_split = [replace(each, split=None) for each in predictions]
    if duplicates := find_duplicates([slide_key(each) for each in without_split]):
        raise InputError(
            f"'{name}' has two predictions for slide '{duplicates[0][-1]}'.",
            hint="Use a table that contains each slide once, for example the slides of one split.",
        )
    return {(*patient_key(each), each.slide_id): each for each in without_split}


def _drop_unshared_slides(slides: Mapping[_UnitKey, Prediction], shared: Set[_UnitKey]) -> list[Prediction]:
    """Drop the slides that only some models have. A patient without any shared slide keeps all slides.

    Otherwise, models would pool different slides of the same patient, possibly with different labels.
    """
    patients_with_shared = {key[:2] for key in shared}
    return [each for key, each in slides.items() if key in shared or key[:2] not in patients_with_shared]


def _index_units(slides: Sequence[Prediction], targets: TargetKinds, unit: Unit) -> dict[_UnitKey, Prediction]:
    """Return the predictions of slides, or of patients, by key."""
    return {(*patient_key(each), each.slide_id): each for each in pool_by_unit(slides, targets, unit)}


def _collect_labels(predictions: Iterable[Prediction], targets: Iterable[str]) -> dict[str, set[Label]]:
    """Return the known labels of one unit in all models, by target."""
    known: dict[str, set[Label]] = {target: set() for target in targets}
    for each in predictions:
        for target in targets:
            if (label := each.labels.get(target)) is not None:
                known[target].add(label)
    return known


def _check_labels_agree(labels: Mapping[_UnitKey, Mapping[str, set[Label]]], targets: Iterable[str]) -> None:
    """Raise InputError if a unit has different labels in different models."""
    conflicts = [
        f"{target} of {_unit_name(key)}"
        for key, known in labels.items()
        for target in targets
        if len(known[target]) > 1
    ]
    if conflicts:
        raise InputError(
            f"The models have different labels for {format_names(conflicts, _MAX_LISTED)}.",
            hint="Correct the labels, or predict again with the same cohort table for all models.",
        )


def _list_excluded(
    model: Sequence[Mapping[_UnitKey, Prediction]], used: Sequence[Sequence[Prediction]], common: Sequence[_UnitKey]
) -> tuple[str, ...]:
    """Return the excluded patients of a model, and the excluded slides of the other patients."""
    kept_patients = {key[:2] for key in common}
    kept = {
        (*patient_key(slide), slide.slide_id) for each in used for slide in each if patient_key(slide) in kept_patients
    }
    excluded = {key for each in model for key in each if key not in kept}
    patients = sorted({key[:2] for key in excluded if key[:2] not in kept_patients})
    slides = sorted(key for key in excluded if key[:2] in kept_patients)
    return (*(patient for _, patient in patients), *(_unit_name(key) for key in slides))


def _nothing_in_common_error(units: Mapping[str, Sequence[Mapping[_UnitKey, Prediction]]]) -> InputError:
    """Return the error for models without a common slide or patient, with an example from each model."""
    if set.intersection(*({key[:2] for key in each} for seeds in units.values() for each in seeds)):
        return InputError(
            "No slide is in all models, although they have patients in common.",
            hint="Slides are matched by cohort, patient_id and slide_id. To match only patients, pass --unit patient.",
        )
    examples = []
    for name, seeds in units.items():
        first: PatientKey | None = min((key[:2] for each in seeds for key in each), default=None)
        examples.append(f"{name}: " + (f"patient '{first[1]}' of cohort '{first[0]}'" if first else "no patients"))
    return InputError(
        "No patient is in all models.",
        hint=f"Patients are matched by cohort and patient_id. The first patient of each model: {'; '.join(examples)}. "
        "Compare predictions of the same cohort table and split.",
    )


def _unit_name(key: _UnitKey) -> str:
    """Return the name of a slide or patient for messages."""
    _, patient, slide = key
    return patient if patient == slide else f"{patient} (slide {slide})"
