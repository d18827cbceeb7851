"""Plan a synthetic cohort: an exact number of positive slides for each target, and the properties of each slide.

A slide has a focus, a part of the epithelium with altered nuclei, for each of its positive targets. Nothing else in the
plan depends on the labels: each group of other properties, such as the staining, is sampled from a separate random
stream, such as (seed, slide, "staining"). The names of the streams must not change, because they determine the slides.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, TypeAlias, cast

import numpy as np

from tapfm.errors import InputError, UnknownNameError
from tapfm.runtime.seeding import make_rng
from tapfm.synthetic.nuclei import EPITHELIAL, LOOKALIKES, MORPHOLOGIES, interpolate_kinds
from tapfm.synthetic.scanning import Artefacts, PenColour, Scanner, StainingProtocol, vary_stain_colour
from tapfm.synthetic.section import Focus, Outline, SectionSpec

CohortName: TypeAlias = Literal["development", "external"]

# Version of the synthetic slides. Increase it when the same settings give different slides or truth files. Then
# `tapfm synth` replaces a cohort of an older version only with --force. tests/versions/ fails if the output changes and
# this version does not.
SYNTHETIC_VERSION = 1

_FRACTION_AT_40X = 0.3  # fraction of the slides that are scanned at 40x; the others at 20x
# Minimum number of positive and of negative slides per target and split. `_sample_slides` says what happens in a split
# that is too small.
MIN_SLIDES_PER_CLASS_AND_SPLIT = 2
_TILE_UM = 112.0  # side of a default tile: 224 px at 0.5 um per pixel
_TYPICAL_TISSUE_FRACTION = 0.5  # fraction of the slide area; determines the size of a slide
ASPECT_RATIO = 1.28  # width of a slide over its height


@dataclass(frozen=True)
class SyntheticTarget:
    """A target of a synthetic cohort."""

    name: str
    prevalence: Mapping[CohortName, float]  # fraction of positive slides
    morphology: str  # key of MORPHOLOGIES: appearance of the nuclei in this target's focus on positive slides


@dataclass(frozen=True)
class _Difficulty:
    """Difficulty of a cohort."""

    signal_fraction_of_epithelium: float  # approximate size of the focus of each positive target
    morphology_strength: float  # of nuclei in foci; 0: like normal nuclei, 1: as in MORPHOLOGIES and LOOKALIKES
    # maximum size of the focus of each lookalike, on positive and negative slides
    max_lookalike_fraction_of_epithelium: float


def _make_target(name: str, development: float, external: float, morphology: str) -> SyntheticTarget:
    return SyntheticTarget(name, {"development": development, "external": external}, morphology)


# The prevalences are those of the TAPFM paper. The assignment of morphologies to genes is arbitrary.
TASKS: dict[str, tuple[SyntheticTarget, ...]] = {
    "fgfr3": (_make_target("FGFR3", 0.16, 0.14, "coarse"),),
    "luad4": (
        _make_target("EGFR", 0.26, 0.14, "coarse"),
        _make_target("KRAS", 0.27, 0.35, "vesicular"),
        _make_target("MET", 0.04, 0.02, "spindle"),
        _make_target("ALK", 0.03, 0.01, "paired"),
    ),
}
DIFFICULTIES: dict[str, _Difficulty] = {
    "easy": _Difficulty(
        signal_fraction_of_epithelium=0.30, morphology_strength=1.0, max_lookalike_fraction_of_epithelium=0.0
    ),
    "medium": _Difficulty(
        signal_fraction_of_epithelium=0.18, morphology_strength=0.85, max_lookalike_fraction_of_epithelium=0.10
    ),
    "hard": _Difficulty(
        signal_fraction_of_epithelium=0.10, morphology_strength=0.6, max_lookalike_fraction_of_epithelium=0.20
    ),
}

_SITES: dict[CohortName, dict[str, StainingProtocol]] = {
    "development": {
        "site-a": StainingProtocol(),
        "site-b": StainingProtocol(
            (0.62, 0.69, 0.38), (0.14, 0.86, 0.49), haematoxylin_strength=1.55, eosin_strength=0.80
        ),
        "site-c": StainingProtocol(
            (0.55, 0.74, 0.40), (0.09, 0.89, 0.45), haematoxylin_strength=1.25, eosin_strength=1.12
        ),
    },
    "external": {
        "site-x": StainingProtocol(
            (0.65, 0.68, 0.34), (0.19, 0.85, 0.48), haematoxylin_strength=1.65, eosin_strength=0.66
        ),
        "site-y": StainingProtocol(
            (0.52, 0.76, 0.39), (0.06, 0.88, 0.53), haematoxylin_strength=1.15, eosin_strength=1.28
        ),
    },
}
_SCANNERS: dict[CohortName, tuple[tuple[Scanner, Scanner], ...]] = {  # each scanner at (20x, 40x)
    "development": (
        (Scanner("alpha", 0.4990, 20), Scanner("alpha", 0.2495, 40)),
        (
            Scanner("bravo", 0.4960, 20, (238.0, 240.0, 240.0), blur_um=0.40, noise=1.0, jpeg_quality=75),
            Scanner("bravo", 0.2480, 40, (238.0, 240.0, 240.0), blur_um=0.36, noise=1.0, jpeg_quality=75),
        ),
    ),
    "external": (
        (
            Scanner("charlie", 0.4860, 20, (246.0, 243.0, 238.0), blur_um=0.36, sharpening=0.5, jpeg_quality=70),
            Scanner("charlie", 0.2430, 40, (246.0, 243.0, 238.0), blur_um=0.34, sharpening=0.4, jpeg_quality=70),
        ),
    ),
}


@dataclass(frozen=True)
class CohortSpec:
    """Settings of a synthetic cohort."""

    slides: int = 60  # number of slides in the development cohort
    external: int = 30  # number of slides in the external cohort
    task: str = "fgfr3"  # key of TASKS
    difficulty: str = "medium"  # key of DIFFICULTIES
    seed: int = 0
    tiles: int = 80  # approximate number of tissue tiles per slide
    fractions: tuple[float, float, float] = (0.8, 0.1, 0.1)  # of development slides: train, validation, test
    prevalence: Mapping[str, float] = field(default_factory=dict)  # by target; a target without entry: as in TASKS

    def __post_init__(self) -> None:
        if self.task not in TASKS:
            raise UnknownNameError.with_suggestions("task", self.task, TASKS, see=", ".join(TASKS))
        if self.difficulty not in DIFFICULTIES:
            raise UnknownNameError.with_suggestions(
                "difficulty", self.difficulty, DIFFICULTIES, see=", ".join(DIFFICULTIES)
            )
        if not (2 <= self.slides <= 9999 and 0 <= self.external <= 9999):
            raise InputError(
                f"Cannot generate {self.slides} development slides and {self.external} external slides.",
                hint="--slides must be from 2 to 9999, --external from 0 to 9999.",
            )
        if not 10 <= self.tiles <= 1000:
            raise InputError(
                f"--tiles-per-slide is {self.tiles}, but must be from 10 to 1000.",
                hint="The default is --tiles-per-slide 80.",
            )
        if not all(0 <= each <= 1 for each in self.fractions) or not abs(sum(self.fractions) - 1) <= 1e-6:
            raise InputError(
                f"--fractions {' '.join(f'{each:g}' for each in self.fractions)} is invalid: "
                "each fraction must be from 0 to 1, and the sum must be 1.",
                hint="Pass the fractions of training, validation and test slides, for example --fractions 0.8 0.1 0.1",
            )
        names = [each.name for each in self.targets]
        for name, value in self.prevalence.items():
            if name not in names:
                raise UnknownNameError.with_suggestions("target", name, names, see=", ".join(names))
            if not 0 < value < 1:
                raise InputError(
                    f"The prevalence of {name} must be larger than 0 and smaller than 1; got {value:g}.",
                    hint="Pass a fraction between 0 and 1, for example --prevalence 0.4",
                )

    @property
    def targets(self) -> tuple[SyntheticTarget, ...]:
        """Targets of the task. An entry of `self.prevalence` replaces the prevalence in TASKS, in both cohorts."""
        return tuple(
            replace(each, prevalence=dict.fromkeys(each.prevalence, self.prevalence[each.name]))
            if each.name in self.prevalence
            else each
            for each in TASKS[self.task]
        )


@dataclass(frozen=True)
class PlannedSlide:
    """A slide to generate: its row in the cohort table, and the settings of its section, staining and scan."""

    slide_id: str
    patient_id: str
    cohort: CohortName
    split: str  # "train", "val" or "test"; always "test" in the external cohort
    labels: Mapping[str, int]  # by target; 1: positive
    site: str
    section: SectionSpec
    staining: StainingProtocol
    scanner: Scanner
    artefacts: Artefacts
    cohort_seed: int

    @property
    def positive_targets(self) -> list[str]:
        return [name for name, label in self.labels.items() if label]

    @property
    def rng_key(self) -> tuple[int | str, ...]:
        """First elements of the key of each random stream that renders this slide, see `make_rng`."""
        return self.cohort_seed, self.slide_id


def plan_cohort(spec: CohortSpec) -> list[PlannedSlide]:
    """Plan the slides of the development and external cohorts."""
    slides = []
    cohorts: tuple[tuple[CohortName, int, str, str], ...] = (
        ("development", spec.slides, "S", "P"),
        ("external", spec.external, "X", "Q"),
    )
    for cohort, count, slide_letter, patient_letter in cohorts:
        splits = _assign_splits(count, spec.fractions, spec.seed) if cohort == "development" else ["test"] * count
        labels = {
            each.name: _sample_slides(
                splits, each.prevalence[cohort], MIN_SLIDES_PER_CLASS_AND_SPLIT, spec.seed, cohort, "label", each.name
            )
            for each in spec.targets
        }
        at_40x = _sample_slides(splits, _FRACTION_AT_40X, 0, spec.seed, cohort, "resolution")
        for index in range(count):
            number = f"{index + 1:0{max(3, len(str(count)))}d}"
            slides.append(
                _plan_slide(
                    spec,
                    f"{slide_letter}{number}",
                    f"{patient_letter}{number}",
                    cohort,
                    splits[index],
                    {name: int(values[index]) for name, values in labels.items()},
                    bool(at_40x[index]),
                )
            )
    return slides


def _allocate_counts(total: int, sizes: Sequence[float], minimum: Sequence[int], maximum: Sequence[int]) -> list[int]:
    """Distribute `total` over groups in proportion to their sizes; return the count of each group.

    Each count is at least the `minimum` and at most the `maximum` of its group. A total below the sum of all minima is
    raised to this sum; a total above the sum of all maxima is lowered to that sum.
    """
    counts = list(minimum)
    total = min(max(total, sum(minimum)), sum(maximum))
    for _ in range(total - sum(minimum)):
        shortfalls = [
            total * size / sum(sizes) - count if count < limit else -np.inf
            for size, count, limit in zip(sizes, counts, maximum, strict=True)
        ]
        counts[int(np.argmax(shortfalls))] += 1
    return counts


def _assign_splits(slide_count: int, fractions: tuple[float, float, float], seed: int) -> list[str]:
    """Return the split of each slide of the development cohort.

    Each split with a fraction above 0 gets at least one slide, if there are enough slides for that.
    """
    is_used = [fraction > 0 for fraction in fractions]
    minimum = [int(each and slide_count >= sum(is_used)) for each in is_used]
    sizes = _allocate_counts(slide_count, fractions, minimum, [slide_count * each for each in is_used])
    names = np.repeat(["train", "val", "test"], sizes)
    return [str(name) for name in make_rng(seed, "splits").permutation(names)]


def _sample_slides(splits: Sequence[str], fraction: float, min_per_split: int, *rng_key: int | str) -> np.ndarray:
    """Sample `fraction` of all slides, rounded, within the limits below; return a mask of the sampled slides.

    Each split has at least `min_per_split` sampled slides and at least `min_per_split` other slides. In a split that is
    too small for both, each limit is half of the split, rounded down. In total, at least `min_per_split` slides are
    sampled, or half of all slides if that is less. If the limits of the splits add up to less, the largest split
    provides the missing slides, even if it then has fewer other slides than its limit.
    """
    members = [np.flatnonzero(np.array(splits) == name) for name in dict.fromkeys(splits)]
    sizes = [len(each) for each in members]
    minimum = [min(min_per_split, size // 2) for size in sizes]
    if sizes:
        minimum[int(np.argmax(sizes))] += max(0, min(min_per_split, len(splits) // 2) - sum(minimum))
    maximum = [max(low, size - low) for size, low in zip(sizes, minimum, strict=True)]
    counts = _allocate_counts(round(fraction * len(splits)), sizes, minimum, maximum)
    sampled = np.zeros(len(splits), bool)
    rng = make_rng(*rng_key)
    for each, count in zip(members, counts, strict=True):
        sampled[rng.choice(each, count, replace=False)] = True
    return sampled


def _plan_slide(
    spec: CohortSpec,
    slide_id: str,
    patient_id: str,
    cohort: CohortName,
    split: str,
    labels: Mapping[str, int],
    at_40x: bool,
) -> PlannedSlide:
    """Sample the properties of a slide. The labels determine only which targets have a focus."""
    site = str(make_rng(spec.seed, slide_id, "site").choice(list(_SITES[cohort])))
    scanners = _SCANNERS[cohort]
    scanner = scanners[int(make_rng(spec.seed, slide_id, "scanner").integers(len(scanners)))][at_40x]
    return PlannedSlide(
        slide_id,
        patient_id,
        cohort,
        split,
        labels,
        site,
        _sample_section(spec, slide_id, cohort, labels),
        _sample_staining(_SITES[cohort][site], spec.seed, slide_id),
        scanner,
        _sample_artefacts(spec.seed, slide_id),
        spec.seed,
    )


def _sample_section(spec: CohortSpec, slide_id: str, cohort: CohortName, labels: Mapping[str, int]) -> SectionSpec:
    """Sample the settings of a slide's section, with a focus for each positive target and for lookalikes."""
    rng = make_rng(spec.seed, slide_id, "section")
    height_um = _TILE_UM * np.sqrt(spec.tiles / _TYPICAL_TISSUE_FRACTION / ASPECT_RATIO)
    min_tissue, max_tissue = (0.40, 0.62) if cohort == "development" else (0.28, 0.50)
    without_foci = SectionSpec(
        width_um=round(ASPECT_RATIO * height_um),
        height_um=round(height_um),
        tissue_fraction=rng.uniform(min_tissue, max_tissue),
        outline=cast(Outline, str(rng.choice(["resection", "chips", "cores"], p=[0.4, 0.4, 0.2]))),
        epithelium_fraction=rng.uniform(0.38, 0.5),
        lumen_probability=rng.uniform(0.25, 0.7),
        fat_fraction=rng.uniform(0, 0.1),
        lymphoid_fraction=rng.uniform(0.01, 0.06),
        inflamed_stroma_fraction=rng.uniform(0.05, 0.3),
        nuclear_scale=float(np.clip(rng.normal(1, 0.04), 0.92, 1.08)),
        extra_nuclear_spacing_scale=float(rng.uniform(0.94, 1.08)),
    )
    difficulty, foci = DIFFICULTIES[spec.difficulty], []
    for each in spec.targets:
        size_factor = make_rng(spec.seed, slide_id, "share", each.name).uniform(0.8, 1.25)
        if labels[each.name]:
            kind = interpolate_kinds(EPITHELIAL, MORPHOLOGIES[each.morphology], difficulty.morphology_strength)
            foci.append(Focus(each.name, kind, difficulty.signal_fraction_of_epithelium * size_factor))
    for name, kind in LOOKALIKES.items():
        size_factor = make_rng(spec.seed, slide_id, "share", name).uniform(0, 1)
        fraction = difficulty.max_lookalike_fraction_of_epithelium * size_factor
        if fraction > 0:
            foci.append(Focus(name, interpolate_kinds(EPITHELIAL, kind, difficulty.morphology_strength), fraction))
    return replace(without_foci, foci=tuple(foci))


def _sample_staining(protocol: StainingProtocol, seed: int, slide_id: str) -> StainingProtocol:
    """Return the staining of a slide: a random variation of `protocol`."""
    rng = make_rng(seed, slide_id, "staining")
    return replace(
        protocol,
        haematoxylin_colour=vary_stain_colour(protocol.haematoxylin_colour, rng, 0.015),
        eosin_colour=vary_stain_colour(protocol.eosin_colour, rng, 0.02),
        haematoxylin_strength=protocol.haematoxylin_strength * rng.uniform(0.86, 1.14),
        eosin_strength=protocol.eosin_strength * rng.uniform(0.84, 1.16),
    )


def _sample_artefacts(seed: int, slide_id: str) -> Artefacts:
    rng = make_rng(seed, slide_id, "what goes wrong")
    return Artefacts(
        folds=int(rng.choice([0, 1, 2], p=[0.65, 0.25, 0.1])),
        blurred_region_radius_um=float(rng.uniform(120, 220)) if rng.random() < 0.2 else 0.0,
        pen=cast(PenColour, str(rng.choice(["blue", "green", "black"]))) if rng.random() < 0.15 else None,
        dust_particles=int(rng.integers(3, 14)),
    )
