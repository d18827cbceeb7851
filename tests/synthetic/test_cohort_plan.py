"""Plans of synthetic cohorts: exact numbers of positive slides, and no other property that depends on the label."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from tapfm.errors import InputError
from tapfm.synthetic.cohort_plan import _SITES as SITES
from tapfm.synthetic.cohort_plan import TASKS, CohortSpec, plan_cohort
from tapfm.synthetic.cohort_plan import _allocate_counts as allocate_counts
from tapfm.synthetic.cohort_plan import _assign_splits as assign_splits
from tapfm.synthetic.cohort_plan import _sample_slides as sample_slides


def select_cohort(planned, cohort):
    return [each for each in planned if each.cohort == cohort]


def test_default_prevalences_are_those_of_the_paper():
    planned = plan_cohort(CohortSpec(slides=200, external=100))
    assert sum(each.labels["FGFR3"] for each in select_cohort(planned, "development")) == 32  # 16%
    assert sum(each.labels["FGFR3"] for each in select_cohort(planned, "external")) == 14  # 14%
    lung = plan_cohort(CohortSpec(slides=200, external=200, task="luad4"))
    assert [
        sum(each.labels[name] for each in select_cohort(lung, "development")) for name in ("EGFR", "KRAS", "MET", "ALK")
    ] == [
        *(52, 54, 8),
        6,  # 3%
    ]
    assert [
        sum(each.labels[name] for each in select_cohort(lung, "external")) for name in ("EGFR", "KRAS", "MET", "ALK")
    ] == [
        *(28, 70, 4),
        2,  # 1%
    ]


@pytest.mark.parametrize("task", list(TASKS))
@pytest.mark.parametrize("slides", [40, 60, 61])
def test_every_split_has_two_positives_of_each_target(task, slides):
    planned = plan_cohort(CohortSpec(slides=slides, external=12, task=task))
    for target in TASKS[task]:
        positives = Counter((each.cohort, each.split) for each in planned if each.labels[target.name])
        assert len(positives) == 4
        assert min(positives.values()) >= 2


def test_small_splits_have_both_classes():
    for seed in range(5):
        planned = plan_cohort(CohortSpec(slides=20, external=3, task="luad4", seed=seed))
        for split, size in (("val", 2), ("test", 2)):
            rows = [each for each in select_cohort(planned, "development") if each.split == split]
            assert len(rows) == size
            for target in TASKS["luad4"]:
                assert sum(each.labels[target.name] for each in rows) == 1
        for target in TASKS["luad4"]:
            assert sum(each.labels[target.name] for each in select_cohort(planned, "external")) == 1


@pytest.mark.parametrize("slides", range(2, 16))
def test_smallest_cohorts_have_both_classes(slides):
    planned = plan_cohort(CohortSpec(slides=slides, external=0, task="luad4"))
    for target in TASKS["luad4"]:
        positives = sum(each.labels[target.name] for each in planned)
        assert min(2, slides // 2) <= positives < slides


def test_prevalence_setting_applies_to_both_cohorts():
    planned = plan_cohort(CohortSpec(slides=50, external=20, prevalence={"FGFR3": 0.4}))
    assert sum(each.labels["FGFR3"] for each in select_cohort(planned, "development")) == 20
    assert sum(each.labels["FGFR3"] for each in select_cohort(planned, "external")) == 8


def test_split_sizes_follow_the_fractions():
    assert Counter(assign_splits(60, (0.8, 0.1, 0.1), 0)) == {"train": 48, "val": 6, "test": 6}
    assert Counter(assign_splits(60, (0.5, 0.2, 0.3), 0)) == {"train": 30, "val": 12, "test": 18}
    assert Counter(assign_splits(10, (0.5, 0.0, 0.5), 0)) == {"train": 5, "test": 5}
    assert Counter(assign_splits(6, (0.8, 0.1, 0.1), 0)) == {"train": 4, "val": 1, "test": 1}  # no split is empty
    assert len(assign_splits(2, (0.8, 0.1, 0.1), 0)) == 2


def test_allocated_counts_are_within_bounds():
    assert allocate_counts(10, [48, 6, 6], [2, 2, 2], [46, 4, 4]) == [6, 2, 2]
    assert allocate_counts(0, [48, 6, 6], [2, 2, 2], [46, 4, 4]) == [2, 2, 2]
    assert allocate_counts(99, [4, 4], [0, 0], [3, 3]) == [3, 3]
    assert sample_slides([], 0.5, 2, 0).tolist() == []


def test_30_percent_of_the_slides_are_40x():
    for cohort, count in (("development", 60), ("external", 30)):
        rows = select_cohort(plan_cohort(CohortSpec(slides=60, external=30)), cohort)
        assert sum(each.scanner.objective == 40 for each in rows) == round(0.3 * count)
        assert all(abs(each.scanner.mpp * each.scanner.objective - 10) < 0.3 for each in rows)


def without_foci(slide):
    return replace(slide, labels={}, section=replace(slide.section, foci=()))


def test_only_foci_depend_on_the_label():
    few = plan_cohort(CohortSpec(slides=40, external=20, prevalence={"FGFR3": 0.1}))
    many = plan_cohort(CohortSpec(slides=40, external=20, prevalence={"FGFR3": 0.9}))
    assert [each.labels for each in few] != [each.labels for each in many]
    assert [without_foci(each) for each in few] == [without_foci(each) for each in many]
    lookalikes = [[focus for focus in each.section.foci if focus.name != "FGFR3"] for each in (*few, *many)]
    assert lookalikes[:60] == lookalikes[60:]
    assert all(len(each) == 2 for each in lookalikes)


def test_other_properties_are_not_correlated_with_the_label():
    planned = select_cohort(plan_cohort(CohortSpec(slides=2000, external=0, prevalence={"FGFR3": 0.5})), "development")
    label = np.array([each.labels["FGFR3"] for each in planned])
    for value in (
        lambda each: each.section.tissue_fraction,
        lambda each: each.staining.eosin_strength,
        lambda each: each.staining.haematoxylin_strength,
        lambda each: each.scanner.objective,
        lambda each: each.scanner.name == "alpha",
        lambda each: each.site == "site-a",
        lambda each: each.artefacts.pen is not None,
    ):
        correlation = np.corrcoef(label, [float(value(each)) for each in planned])[0, 1]
        assert abs(correlation) < 3.5 / np.sqrt(len(planned))


def test_external_cohort_has_other_sites_scanners_and_less_tissue():
    planned = plan_cohort(CohortSpec(slides=200, external=200))
    development, external = select_cohort(planned, "development"), select_cohort(planned, "external")
    assert not set(SITES["development"]) & {each.site for each in external}
    assert not {each.scanner.name for each in development} & {each.scanner.name for each in external}
    means = [np.mean([each.section.tissue_fraction for each in rows]) for rows in (development, external)]
    assert means[0] - means[1] > 0.08


def test_cohort_depends_on_the_seed_only():
    assert plan_cohort(CohortSpec(seed=3)) == plan_cohort(CohortSpec(seed=3))
    assert plan_cohort(CohortSpec(seed=3)) != plan_cohort(CohortSpec(seed=4))


def test_more_slides_do_not_change_the_first_slides():
    few, many = plan_cohort(CohortSpec(slides=10)), plan_cohort(CohortSpec(slides=20))
    assert [each.staining for each in few[:10]] == [each.staining for each in many[:10]]


@pytest.mark.parametrize(
    ("settings", "hint"),
    [
        ({"task": "brca"}, "fgfr3"),
        ({"difficulty": "heavy"}, "easy"),
        ({"slides": 1}, "--slides must be from 2 to 9999"),
        ({"external": -1}, "--external from 0 to 9999"),
        ({"tiles": 5}, "10 to 1000"),
        ({"fractions": (0.8, 0.1, 0.2)}, "--fractions 0.8 0.1 0.1"),
        ({"fractions": (1.1, -0.2, 0.1)}, "--fractions 0.8 0.1 0.1"),
        ({"prevalence": {"FGFR3": 0.0}}, "between 0 and 1"),
        ({"prevalence": {"FGFR3": float("nan")}}, "between 0 and 1"),
        ({"prevalence": {"FGFR": 0.5}}, "FGFR3"),
    ],
)
def test_invalid_settings_are_rejected(settings, hint):
    with pytest.raises(InputError, match=hint):
        CohortSpec(**settings)
