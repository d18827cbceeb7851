"""The patients of predictions, and bootstrap resamples of them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tapfm.evaluation.predictions import Prediction
from tapfm.metrics.bootstrap import RESAMPLES, UNLABELLED, Pattern, Resamples, draw_resamples
from tapfm.tasks.target import TargetKinds

PatientKey = tuple[str, str]  # cohort, patient_id


def patient_key(prediction: Prediction) -> PatientKey:
    """Return the key of a patient; it includes the cohort, because cohorts may use the same patient_id."""
    return prediction.cohort or "", prediction.patient_id


def resample_patients(
    units: Sequence[Prediction], targets: TargetKinds, *, resamples: int = RESAMPLES, seed: int = 0
) -> Resamples:
    """Resample patients within strata of their labels, independent of the order of the units."""
    patients = sorted({patient_key(each) for each in units})
    index = {patient: number for number, patient in enumerate(patients)}
    patient_index = np.array([index[patient_key(each)] for each in units], dtype=np.intp)
    return draw_resamples(patient_index, _label_patterns(units, patients, targets), resamples=resamples, seed=seed)


def _label_patterns(units: Sequence[Prediction], patients: Sequence[PatientKey], targets: TargetKinds) -> list[Pattern]:
    """Return, for each patient, the label stratum of every target."""
    by_patient: dict[PatientKey, list[Prediction]] = {patient: [] for patient in patients}
    for each in units:
        by_patient[patient_key(each)].append(each)
    return [
        tuple(
            kind.stratum(kind.pool_labels([each.labels.get(target) for each in by_patient[patient]])) or UNLABELLED
            for target, kind in targets.items()
        )
        for patient in patients
    ]
