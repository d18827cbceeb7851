"""Check that evaluated patients and slides were not used for training or validation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tapfm.cohort.patients import normalise_id
from tapfm.cohort.splits import TEST, format_names
from tapfm.errors import CohortError
from tapfm.runs.data import RunSlide
from tapfm.runs.model_folder import ModelFolder
from tapfm.runtime.messages import format_count

_MAX_LISTED = 10  # patients listed in a message


def check_patient_overlap(
    model_folder: ModelFolder, slides: Sequence[RunSlide], *, is_run_cohort: bool, allow_overlap: bool
) -> list[str]:
    """Raise CohortError if patients of these slides were used for training or validation, unless `allow_overlap`.

    In the cohort of the run, only test slides are checked. Returns notes for the report: about an allowed overlap, and
    about exports, which have no patient ids to check.
    """
    seen = model_folder.find_seen_patients()
    has_export = any(member.config is None for member in model_folder.members)
    notes = [
        "tapfm cannot check whether the evaluated patients were used for training: an export contains no patient ids."
    ] * has_export
    shared = {
        slide.row.patient_id: seen[slide.row.patient_id]
        for slide in slides
        if slide.row.patient_id in seen and (not is_run_cohort or slide.split == TEST)
    }
    if not is_run_cohort:  # the table of another cohort may have other patient ids, or none
        notes += _describe_equal_slides(model_folder.find_seen_slides(), slides, shared)
        notes += _describe_similar_patients(seen, slides)
    if not shared:
        return notes
    named = [f"{patient} ({split})" for patient, split in sorted(shared.items())]
    if not allow_overlap:
        raise CohortError(
            f"{model_folder.path} was trained or validated on {format_count(len(shared), 'patient')} of this cohort: "
            f"{format_names(named, _MAX_LISTED)}.",
            hint="Metrics on these patients would be optimistic. If they are different people with the same ids, pass "
            "--allow-overlap.",
        )
    return [*notes, f"OVERLAP allowed: {format_count(len(shared), 'patient')} also in training or validation."]


def _describe_equal_slides(seen: Mapping[str, str], slides: Sequence[RunSlide], shared: Mapping[str, str]) -> list[str]:
    """Return a note if slides of other patients have the ids of training slides; `shared` are the known patients."""
    equal = [
        f"{slide.row.slide_id} ({seen[slide.row.slide_id]})"
        for slide in slides
        if slide.row.slide_id in seen and slide.row.patient_id not in shared
    ]
    if not equal:
        return []
    return [
        f"POSSIBLE OVERLAP: {format_count(len(equal), 'slide')} with the id of a slide of training or validation, "
        f"under other patients: {format_names(equal, _MAX_LISTED)}."
    ]


def _describe_similar_patients(seen: Mapping[str, str], slides: Sequence[RunSlide]) -> list[str]:
    """Return a note if patient ids differ from those of training only in case, zeros or punctuation."""
    normalised = {normalise_id(patient): patient for patient in seen}
    similar = {
        slide.row.patient_id: normalised[normalise_id(slide.row.patient_id)]
        for slide in slides
        if slide.row.patient_id not in seen and normalise_id(slide.row.patient_id) in normalised
    }
    if not similar:
        return []
    listed = format_names([f"{patient} and {trained}" for patient, trained in sorted(similar.items())], _MAX_LISTED)
    return [f"POSSIBLE OVERLAP: some patient ids are similar to those of training or validation: {listed}."]
