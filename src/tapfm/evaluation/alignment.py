"""Several methods on the same units: whom all of them have, in one order, with one set of labels."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace

from tapfm.errors import InputError
from tapfm.evaluation.patients import PatientKey, patient_key
from tapfm.evaluation.predictions import Prediction, Unit, find_duplicates, pool_by_unit, slide_key
from tapfm.tasks.target import Label, TargetKinds

SeedPredictions = Sequence[Sequence[Prediction]]  # one list of predictions for each seed
_UnitKey = tuple[str, str, str]  # cohort, patient_id, slide_id
_LISTED = 10  # of those that differ, in a message


@dataclass(frozen=True)
class AlignedPredictions:
    """The units that all methods have, and each method's predictions of them in the same order."""

    units: list[Prediction]
    seeds: Mapping[str, list[list[Prediction]]]  # by method, a list for each seed
    excluded: Mapping[str, tuple[str, ...]]
    label_conflicts: tuple[str, ...]

    @property
    def patients(self) -> int:
        """How many patients the units are of."""
        return len({patient_key(each) for each in self.units})


def align(methods: Mapping[str, SeedPredictions], targets: TargetKinds, unit: Unit) -> AlignedPredictions:
    """Keep what every seed of every method has; different labels of the same unit are refused."""
    slides = {name: [_by_slide(name, each) for each in method] for name, method in methods.items()}
    shared = set.intersection(*(set(each) for method in slides.values() for each in method))
    used = {name: [_same_slides(each, shared) for each in method] for name, method in slides.items()}
    keyed = {name: [_by_key(each, targets, unit) for each in method] for name, method in used.items()}
    everyone = [each for method in keyed.values() for each in method]
    common = sorted(set.intersection(*(set(each) for each in everyone)))
    if not common:
        raise _nothing_in_common(keyed)
    labels = {key: _merged_labels([each[key] for each in everyone], targets) for key in common}
    _refuse_conflicts(labels, targets)
    return AlignedPredictions(
        units=[
            replace(everyone[0][key], labels={t: next(iter(labels[key][t]), None) for t in targets}) for key in common
        ],
        seeds={name: [[each[key] for key in common] for each in method] for name, method in keyed.items()},
        excluded={name: _list_excluded(method, used[name], common) for name, method in slides.items()},
        label_conflicts=tuple(
            f"{_named(key)}: {target}"
            for key in common
            for target in targets
            if len({each[key].labels.get(target) for each in everyone}) > 1
        ),
    )


def _by_slide(name: str, predictions: Sequence[Prediction]) -> dict[_UnitKey, Prediction]:
    """Find predictions by cohort, patient and slide; which split a table says they are of does not count."""
    without_split = [replace(each, split=None) for each in predictions]
    if twice := find_duplicates([slide_key(each) for each in without_split]):
        raise InputError(
            f"'{name}' has two predictions of slide '{twice[0][-1]}'.",
            hint="Compare tables that have each slide once, for example those of one split.",
        )
    return {(*patient_key(each), each.slide_id): each for each in without_split}


def _same_slides(slides: Mapping[_UnitKey, Prediction], shared: Set[_UnitKey]) -> list[Prediction]:
    """Leave out a patient's slides that some method lacks; one of whom no slide is shared keeps all of them.

    Else a patient would be pooled from other slides in one method than in another, and might even have another label.
    """
    of_shared = {key[:2] for key in shared}
    return [each for key, each in slides.items() if key in shared or key[:2] not in of_shared]


def _by_key(slides: Sequence[Prediction], targets: TargetKinds, unit: Unit) -> dict[_UnitKey, Prediction]:
    """Find what is counted as one, slides or patients, in the same way."""
    return {(*patient_key(each), each.slide_id): each for each in pool_by_unit(slides, targets, unit)}


def _merged_labels(same: Iterable[Prediction], targets: Iterable[str]) -> dict[str, set[Label]]:
    """Collect the labels that are known of one unit."""
    known: dict[str, set[Label]] = {target: set() for target in targets}
    for each in same:
        for target in targets:
            if (label := each.labels.get(target)) is not None:
                known[target].add(label)
    return known


def _refuse_conflicts(labels: Mapping[_UnitKey, Mapping[str, set[Label]]], targets: Iterable[str]) -> None:
    """Refuse units that have one label in one method's table and another in another's."""
    conflicts = [
        f"{_named(key)} ({target})" for key, known in labels.items() for target in targets if len(known[target]) > 1
    ]
    if conflicts:
        raise InputError(
            f"The methods do not agree on the labels of {_listed(conflicts)}.",
            hint="Methods can be compared on the same truth only: predict with the same table of labels.",
        )


def _list_excluded(
    method: Sequence[Mapping[_UnitKey, Prediction]], used: Sequence[Sequence[Prediction]], common: Sequence[_UnitKey]
) -> tuple[str, ...]:
    """Name the patients of a method that others lack, and single slides of the patients that are compared."""
    kept_patients = {key[:2] for key in common}
    kept = {
        (*patient_key(slide), slide.slide_id) for each in used for slide in each if patient_key(slide) in kept_patients
    }
    lost = {key for each in method for key in each if key not in kept}
    patients = sorted({key[:2] for key in lost if key[:2] not in kept_patients})
    slides = sorted(key for key in lost if key[:2] in kept_patients)
    return (*(patient for _, patient in patients), *(_named(key) for key in slides))


def _nothing_in_common(keyed: Mapping[str, Sequence[Mapping[_UnitKey, Prediction]]]) -> InputError:
    """Say that no patient is in all methods, with an example of each."""
    examples = []
    for name, seeds in keyed.items():
        first: PatientKey | None = min((key[:2] for each in seeds for key in each), default=None)
        examples.append(f"{name}: " + (f"patient '{first[1]}' of cohort '{first[0]}'" if first else "nobody"))
    return InputError(
        "No patient is in all of the methods.",
        hint=f"Patients are matched by cohort and patient_id. The first of each: {'; '.join(examples)}.",
    )


def _named(key: _UnitKey) -> str:
    """Name a unit for a reader."""
    _, patient, slide = key
    return patient if patient == slide else f"{patient} (slide {slide})"


def _listed(names: Sequence[str]) -> str:
    """List the first of many."""
    more = len(names) - _LISTED
    return ", ".join(names[:_LISTED]) + (f" and {more} more" if more > 0 else "")
