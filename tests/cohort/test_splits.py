"""Splits by patient: those a table brings are checked, those we make are alike."""

from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tapfm.cohort.cohort_table import Cohort, SlideRow, read_cohort
from tapfm.cohort.splits import (
    SPLITS,
    TEST,
    TRAIN,
    VALIDATION,
    Patient,
    assign_folds,
    assign_splits,
    group_patients,
    parse_split,
    read_splits,
)
from tapfm.cohort.splits import (
    _check_patient_overlap as check_patient_overlap,
)
from tapfm.errors import CohortError, SettingError
from tapfm.runtime.seeding import make_rng

PAPER = (0.8, 0.1, 0.1)


def row(slide_id, patient_id, split=None, **folds):
    return SlideRow(slide_id, Path(f"{slide_id}.svs"), patient_id, split=split, folds=folds)


def cohort_of(*rows, source=None):
    return Cohort(tuple(rows), "tapfm", source=source)


def many_patients(count, prevalence, seed=0):
    """Draw patients with labels of these prevalences (one in ten unknown), scans and numbers of slides."""
    rng = make_rng(seed, "patients")
    return [
        Patient(
            f"P{i}",
            int(rng.geometric(0.6)),
            {name: str(int(rng.random() < share)) for name, share in prevalence.items() if rng.random() < 0.9},
            ("40x" if rng.random() < 0.3 else "20x",),
        )
        for i in range(count)
    ]


def members(patients, splits):
    return {name: [patient for patient in patients if splits[patient.patient_id] == name] for name in SPLITS}


@pytest.mark.parametrize(
    ("text", "name"),
    [
        *((text, TRAIN) for text in ("train", " Training ")),
        *((text, VALIDATION) for text in ("VAL", "valid", "validation", "Tune", "dev")),
        *((text, TEST) for text in ("Test", "testing", "holdout")),
    ],
)
def test_usual_spellings_are_understood(text, name):
    assert parse_split(text) == name


def test_splits_of_a_table_in_its_own_spelling():
    cohort = cohort_of(row("a", "P1", "Training"), row("b", "P2", "tune"), row("c", "P3"), row("d", "P4", "test"))
    assert read_splits(cohort) == {"a": "train", "b": "val", "d": "test"}


def test_values_that_are_no_splits_are_told_all_at_once():
    cohort = cohort_of(row("a", "P1", "train"), row("b", "P2", "B"), row("c", "P3", "C"), row("d", "P4", "B"))
    with pytest.raises(CohortError) as error:
        read_splits(cohort)
    assert "'B': b, d\n  'C': c" in error.value.message
    assert "val, valid, validation, tune, dev" in error.value.hint


def test_a_fold_is_read_from_its_column(tmp_path):
    table = tmp_path / "k=all.tsv"
    table.write_text("case_id\tslide_id\tfold_0\tFold_1\nP1\ts1\ttrain\ttest\nP2\ts2\ttest\t\n")
    cohort = read_cohort(table, must_exist=False)
    assert cohort.label_names == ()
    assert read_splits(cohort, 0) == {"s1": "train", "s2": "test"}
    assert read_splits(cohort, 1) == {"s1": "test"}
    with pytest.raises(CohortError, match="has no fold_2") as error:
        read_splits(cohort, 2)
    assert error.value.hint.startswith("Choose one of fold_0, fold_1")


def test_a_cohort_without_splits_says_what_to_type():
    with pytest.raises(CohortError, match="has no split") as error:
        read_splits(cohort_of(row("a", "P1"), source=Path("my data/cohort.csv")))
    assert error.value.hint == "Type: tapfm split 'my data/cohort.csv' --out 'my data/cohort-split.csv'"


def test_a_patient_in_two_splits_is_named_with_slides_and_splits():
    cohort = cohort_of(
        row("a", "P1", "test"),
        row("b", "P1", "training"),
        row("c", "P2", "val"),
        row("d", "P1", "train"),
        row("e", "P3"),
    )
    with pytest.raises(CohortError) as error:
        read_splits(cohort)
    assert "1 patient is in more than one split" in error.value.message
    assert "P1: train has b, d; test has a" in error.value.message
    assert "P2" not in error.value.message
    assert "tapfm split" in error.value.hint


def test_spellings_of_one_split_are_no_leak():
    assert len(read_splits(cohort_of(row("a", "P1", "val"), row("b", "P1", "Validation")))) == 2


def test_of_many_leaking_patients_the_first_are_named_and_all_counted():
    torn = [(row(f"{patient}-{split}", f"P{patient}"), split) for patient in range(30) for split in (TRAIN, TEST)]
    with pytest.raises(CohortError) as error:
        check_patient_overlap(torn)
    assert "30 patients are in more than one split" in error.value.message
    assert "P19: train has 19-train; test has 19-test\n  ... and 10 more patients" in error.value.message


def test_leaks_are_found_in_folds_too():
    cohort = cohort_of(row("a", "P1", fold_0="train", fold_1="train"), row("b", "P1", fold_0="train", fold_1="test"))
    assert len(read_splits(cohort, 0)) == 2
    with pytest.raises(CohortError, match="column fold_1"):
        read_splits(cohort, 1)


def test_patients_have_the_strata_of_their_rows_where_these_are_known():
    cohort = cohort_of(row("a", "P1"), row("b", "P1"), row("c", "P2"), row("d", "P2"))
    strata = {"FGFR3": ("1", "1", "0", "0"), "KRAS": (None, None, "0", "0")}
    assert group_patients(cohort, strata, {"a": "40x", "b": "20x", "c": "20x"}) == [
        Patient("P1", 2, {"FGFR3": "1"}, ("20x", "40x")),
        Patient("P2", 2, {"FGFR3": "0", "KRAS": "0"}, ("20x",)),
    ]


def test_splits_are_alike_in_labels_scans_and_slides():
    prevalence = {"EGFR": 0.26, "KRAS": 0.27, "MET": 0.04, "ALK": 0.03}
    patients = many_patients(500, prevalence)
    parts = members(patients, assign_splits(patients, PAPER, 0))
    assert {name: len(part) for name, part in parts.items()} == {TRAIN: 400, VALIDATION: 50, TEST: 50}
    for share, part in zip(PAPER, parts.values(), strict=True):
        for target in prevalence:
            for label in ("0", "1"):
                expected = share * sum(each.strata.get(target) == label for each in patients)
                assert sum(each.strata.get(target) == label for each in part) == pytest.approx(expected, abs=4)
        at_40x = share * sum("40x" in each.resolutions for each in patients)
        assert sum("40x" in each.resolutions for each in part) == pytest.approx(at_40x, abs=2)
        slides = share * sum(each.slides for each in patients)
        assert sum(each.slides for each in part) == pytest.approx(slides, abs=10)


@pytest.mark.parametrize(
    ("positives", "expected"),
    [(1, [1, 0, 0]), (2, [1, 1, 0]), (3, [1, 1, 1]), (5, [3, 1, 1]), (10, [8, 1, 1]), (20, [16, 2, 2])],
)
def test_few_positives_reach_training_first_then_validation_then_test(positives, expected):
    patients = [Patient(f"P{i}", 1, {"ALK": str(int(i < positives))}) for i in range(100)]
    parts = members(patients, assign_splits(patients, PAPER, 0))
    assert [sum(each.strata["ALK"] == "1" for each in part) for part in parts.values()] == expected
    assert [len(part) for part in parts.values()] == [80, 10, 10]


def test_training_gets_a_class_whose_patients_are_also_wanted_elsewhere():
    # both patients with "r" (rare) are the second choice of training for the classes that come first by name
    patients = [Patient(f"P{i}", 1, dict.fromkeys(each, "1")) for i, each in enumerate(("acd", "ar", "bef", "br"))]
    train = members(patients, assign_splits(patients, (0.5, 0.25, 0.25), 0))[TRAIN]
    assert any("r" in each.strata for each in train)


def test_a_small_split_grows_until_it_has_both_classes():
    patients = [Patient(f"P{i}", 1, {"FGFR3": str(i % 2)}) for i in range(10)]
    parts = members(patients, assign_splits(patients, PAPER, 0))
    counts = [Counter(each.strata["FGFR3"] for each in part) for part in parts.values()]
    assert counts == [{"0": 3, "1": 3}, {"0": 1, "1": 1}, {"0": 1, "1": 1}]


@pytest.mark.parametrize(("count", "sizes"), [(1, [1, 0, 0]), (2, [1, 1, 0]), (3, [1, 1, 1]), (5, [3, 1, 1])])
def test_cohorts_of_a_few_patients(count, sizes):
    patients = [Patient(f"P{i}", 1, {}) for i in range(count)]
    assert [len(part) for part in members(patients, assign_splits(patients, PAPER, 0)).values()] == sizes


def test_a_fraction_of_zero_leaves_a_split_empty():
    patients = many_patients(20, {"FGFR3": 0.5})
    assert set(assign_splits(patients, (0.75, 0.25, 0), 0).values()) == {TRAIN, VALIDATION}


def test_another_seed_makes_other_splits():
    patients = many_patients(60, {"FGFR3": 0.3})
    assert assign_splits(patients, PAPER, 0) == assign_splits(patients, PAPER, 0)
    assert assign_splits(patients, PAPER, 0) != assign_splits(patients, PAPER, 1)
    assert assign_folds(patients, 5, 0) != assign_folds(patients, 5, 1)


PATIENTS = st.lists(
    st.builds(
        lambda slides, labels, scans: (slides, labels, tuple(sorted(scans))),
        st.integers(1, 9),
        st.dictionaries(st.sampled_from(["EGFR", "KRAS", "ALK"]), st.sampled_from(["0", "1"])),
        st.sets(st.sampled_from(["20x", "40x"])),
    ),
    min_size=1,
    max_size=60,
).map(lambda drawn: [Patient(f"P{i}", *each) for i, each in enumerate(drawn)])
FRACTIONS = st.sampled_from([PAPER, (0.6, 0.2, 0.2), (0.5, 0.5, 0), (0.9, 0, 0.1), (1, 0, 0)])


@settings(max_examples=60)
@given(PATIENTS, FRACTIONS, st.integers(0, 3), st.randoms())
def test_every_patient_gets_one_split_in_any_order_of_the_table(patients, fractions, seed, order):
    splits = assign_splits(patients, fractions, seed)
    assert set(splits) == {patient.patient_id for patient in patients}
    shuffled = order.sample(patients, len(patients))
    assert assign_splits(shuffled, fractions, seed) == splits


@settings(max_examples=60)
@given(PATIENTS, FRACTIONS, st.integers(0, 3))
def test_training_has_both_classes_where_the_cohort_has_and_sizes_give_way_to_that_only(patients, fractions, seed):
    parts = members(patients, assign_splits(patients, fractions, seed))
    for target in ("EGFR", "KRAS", "ALK"):
        for label in ("0", "1"):
            assert any(each.strata.get(target) == label for each in parts[TRAIN]) == any(
                each.strata.get(target) == label for each in patients
            )
    for fraction, part in zip(fractions, parts.values(), strict=True):
        assert bool(part) <= (fraction > 0)
        # a patient for each class of the three targets at most, in each of two small splits
        assert abs(len(part) - fraction * len(patients)) <= 2 * 6


@settings(max_examples=60)
@given(st.integers(1, 80), st.sampled_from([PAPER, (0.6, 0.2, 0.2), (0.5, 0.5, 0)]), st.integers(0, 3))
def test_without_labels_sizes_are_those_of_the_fractions(count, fractions, seed):
    patients = [Patient(f"P{i}", 1 + i % 3, {}) for i in range(count)]
    for fraction, part in zip(
        fractions, members(patients, assign_splits(patients, fractions, seed)).values(), strict=True
    ):
        assert abs(len(part) - fraction * count) <= 2


def test_every_patient_is_tested_once_and_validates_once():
    patients = many_patients(61, {"EGFR": 0.3, "ALK": 0.2})
    folds = assign_folds(patients, 5, 0)
    for patient in patients:
        roles = [fold[patient.patient_id] for fold in folds]
        assert Counter(roles) == {TEST: 1, VALIDATION: 1, TRAIN: 3}
        assert roles[roles.index(TEST) - 1] == VALIDATION  # the part after a fold's own, around the end
    tests = [members(patients, fold)[TEST] for fold in folds]
    assert sorted(map(len, tests)) == [12, 12, 12, 12, 13]
    for target in ("EGFR", "ALK"):
        counts = [sum(each.strata.get(target) == "1" for each in part) for part in tests]
        assert min(counts) >= 1
        assert max(counts) - min(counts) <= 1


def test_as_many_folds_as_patients_leave_nobody_out():
    patients = [Patient(f"P{i}", 1, {"FGFR3": str(int(i < 3))}) for i in range(6)]
    assert [Counter(fold.values())[TEST] for fold in assign_folds(patients, 6, 0)] == [1] * 6


@pytest.mark.parametrize("fractions", [(0.8, 0.1, 0.2), (0, 0.5, 0.5), (1.2, -0.1, -0.1), (float("nan"), 0, 0)])
def test_fractions_that_are_no_split(fractions):
    with pytest.raises(SettingError, match="are no split") as error:
        assign_splits(many_patients(9, {}), fractions, 0)
    assert "--fractions 0.8 0.1 0.1" in error.value.hint


def test_numbers_of_folds_that_cannot_be():
    for folds in (1, 2, 21):
        with pytest.raises(SettingError, match=f"{folds} folds cannot be made") as error:
            assign_folds(many_patients(30, {}), folds, 0)
        assert "From 3 " in error.value.hint
    with pytest.raises(SettingError, match="4 patients are too few for 5 folds"):
        assign_folds(many_patients(4, {}), 5, 0)
