"""Splits by patient: check the splits of a table, and create balanced splits and folds."""

from collections import Counter
from dataclasses import replace
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
from tapfm.errors import CohortError, SettingError
from tapfm.runtime.seeding import make_rng

PAPER = (0.8, 0.1, 0.1)


def row(slide_id, patient_id, split=None, **folds):
    return SlideRow(slide_id, Path(f"{slide_id}.svs"), patient_id, split=split, folds=folds)


def make_cohort(*rows, source=None):
    return Cohort(tuple(rows), "tapfm", table_path=source)


def make_patients(count, prevalence, seed=0):
    """Sample patients with random labels (one in ten unknown), resolutions and numbers of slides."""
    rng = make_rng(seed, "patients")
    return [
        Patient(
            f"P{i}",
            int(rng.geometric(0.6)),
            {name: str(int(rng.random() < fraction)) for name, fraction in prevalence.items() if rng.random() < 0.9},
            ("40x" if rng.random() < 0.3 else "20x",),
        )
        for i in range(count)
    ]


def patients_by_split(patients, splits):
    return {name: [patient for patient in patients if splits[patient.patient_id] == name] for name in SPLITS}


@pytest.mark.parametrize(
    ("text", "name"),
    [
        *((text, TRAIN) for text in ("train", " Training ")),
        *((text, VALIDATION) for text in ("VAL", "valid", "validation", "Tune", "dev")),
        *((text, TEST) for text in ("Test", "testing", "holdout")),
    ],
)
def test_parse_spellings_of_splits(text, name):
    assert parse_split(text) == name


def test_read_splits_normalises_spelling():
    cohort = make_cohort(row("a", "P1", "Training"), row("b", "P2", "tune"), row("c", "P3"), row("d", "P4", "test"))
    assert read_splits(cohort) == {"a": "train", "b": "val", "d": "test"}


def test_all_invalid_splits_are_in_one_error():
    slides = [("a", "train"), ("b", "B"), ("c", "C"), ("d", "B")]
    cohort = make_cohort(
        *(replace(row(name, name, split), row=number) for number, (name, split) in enumerate(slides, start=2))
    )
    with pytest.raises(CohortError) as error:
        read_splits(cohort)
    assert "rows 3 and 5: 'B' in column split" in error.value.message
    assert "row 4: 'C' in column split" in error.value.message
    assert "val, valid, validation, tune, dev" in error.value.hint


def test_read_splits_of_a_fold(tmp_path):
    table = tmp_path / "k=all.tsv"
    table.write_text("case_id\tslide_id\tfold_0\tFold_1\nP1\ts1\ttrain\ttest\nP2\ts2\ttest\t\n")
    cohort = read_cohort(table)
    assert cohort.label_names == ()
    assert read_splits(cohort, 0) == {"s1": "train", "s2": "test"}
    assert read_splits(cohort, 1) == {"s1": "test"}
    with pytest.raises(CohortError, match="no column fold_2") as error:
        read_splits(cohort, 2)
    assert "cohort.fold to a fold of the table (0, 1)" in error.value.hint
    assert "--force" in error.value.hint  # the table has folds already


def test_missing_splits_error_contains_split_command():
    with pytest.raises(CohortError, match="no column split") as error:
        read_splits(make_cohort(row("a", "P1"), source=Path("my data/cohort.csv")))
    assert "tapfm split 'my data/cohort.csv' --out 'my data/cohort-split.csv'" in error.value.hint


def test_patient_in_two_splits_error_lists_slides():
    cohort = make_cohort(
        row("a", "P1", "test"),
        row("b", "P1", "training"),
        row("c", "P2", "val"),
        row("d", "P1", "train"),
        row("e", "P3"),
    )
    with pytest.raises(CohortError) as error:
        read_splits(cohort)
    assert "has 1 problem" in error.value.message
    assert "patient P1 is in more than one split (column split): train has b, d; test has a" in error.value.message
    assert "P2" not in error.value.message
    assert "tapfm split" in error.value.hint


def test_spellings_of_one_split_do_not_overlap():
    assert len(read_splits(make_cohort(row("a", "P1", "val"), row("b", "P1", "Validation")))) == 2


def test_error_lists_first_50_overlapping_patients():
    rows = [row(f"{patient}-{split}", f"P{patient}", split) for patient in range(60) for split in (TRAIN, TEST)]
    with pytest.raises(CohortError) as error:
        read_splits(make_cohort(*rows))
    assert "has 60 problems" in error.value.message
    assert error.value.message.endswith("train has 49-train; test has 49-test\n  ... and 10 more")


def test_patient_overlap_in_a_fold_is_rejected():
    cohort = make_cohort(row("a", "P1", fold_0="train", fold_1="train"), row("b", "P1", fold_0="train", fold_1="test"))
    assert len(read_splits(cohort, 0)) == 2
    with pytest.raises(CohortError, match="column fold_1"):
        read_splits(cohort, 1)


def test_group_patients_omits_unknown_strata():
    cohort = make_cohort(row("a", "P1"), row("b", "P1"), row("c", "P2"), row("d", "P2"))
    strata = {"FGFR3": ("1", "1", "0", "0"), "KRAS": (None, None, "0", "0")}
    assert group_patients(cohort, strata, {"a": "40x", "b": "20x", "c": "20x"}) == [
        Patient("P1", 2, {"FGFR3": "1"}, ("20x", "40x")),
        Patient("P2", 2, {"FGFR3": "0", "KRAS": "0"}, ("20x",)),
    ]


def test_splits_are_balanced_in_labels_resolutions_and_slides():
    prevalence = {"EGFR": 0.26, "KRAS": 0.27, "MET": 0.04, "ALK": 0.03}
    patients = make_patients(500, prevalence)
    parts = patients_by_split(patients, assign_splits(patients, PAPER, 0))
    assert {name: len(part) for name, part in parts.items()} == {TRAIN: 400, VALIDATION: 50, TEST: 50}
    for fraction, part in zip(PAPER, parts.values(), strict=True):
        for target in prevalence:
            for label in ("0", "1"):
                expected = fraction * sum(each.strata.get(target) == label for each in patients)
                assert sum(each.strata.get(target) == label for each in part) == pytest.approx(expected, abs=4)
        at_40x = fraction * sum("40x" in each.resolutions for each in patients)
        assert sum("40x" in each.resolutions for each in part) == pytest.approx(at_40x, abs=2)
        slides = fraction * sum(each.slide_count for each in patients)
        assert sum(each.slide_count for each in part) == pytest.approx(slides, abs=10)


@pytest.mark.parametrize(
    ("positives", "expected"),
    [(1, [1, 0, 0]), (2, [1, 1, 0]), (3, [1, 1, 1]), (5, [3, 1, 1]), (10, [8, 1, 1]), (20, [16, 2, 2])],
)
def test_few_positives_go_to_training_then_validation_then_test(positives, expected):
    patients = [Patient(f"P{i}", 1, {"ALK": str(int(i < positives))}) for i in range(100)]
    parts = patients_by_split(patients, assign_splits(patients, PAPER, 0))
    assert [sum(each.strata["ALK"] == "1" for each in part) for part in parts.values()] == expected
    assert [len(part) for part in parts.values()] == [80, 10, 10]


def test_training_gets_a_rare_class_despite_competing_classes():
    # both patients with "r" (rare) are the second choice of the training split for the classes "a" and "b"
    patients = [Patient(f"P{i}", 1, dict.fromkeys(each, "1")) for i, each in enumerate(("acd", "ar", "bef", "br"))]
    train = patients_by_split(patients, assign_splits(patients, (0.5, 0.25, 0.25), 0))[TRAIN]
    assert any("r" in each.strata for each in train)


def test_small_splits_grow_until_they_have_both_classes():
    patients = [Patient(f"P{i}", 1, {"FGFR3": str(i % 2)}) for i in range(10)]
    parts = patients_by_split(patients, assign_splits(patients, PAPER, 0))
    counts = [Counter(each.strata["FGFR3"] for each in part) for part in parts.values()]
    assert counts == [{"0": 3, "1": 3}, {"0": 1, "1": 1}, {"0": 1, "1": 1}]


@pytest.mark.parametrize(("count", "sizes"), [(1, [1, 0, 0]), (2, [1, 1, 0]), (3, [1, 1, 1]), (5, [3, 1, 1])])
def test_split_sizes_of_very_small_cohorts(count, sizes):
    patients = [Patient(f"P{i}", 1, {}) for i in range(count)]
    assert [len(part) for part in patients_by_split(patients, assign_splits(patients, PAPER, 0)).values()] == sizes


def test_fraction_of_zero_gives_an_empty_split():
    patients = make_patients(20, {"FGFR3": 0.5})
    assert set(assign_splits(patients, (0.75, 0.25, 0), 0).values()) == {TRAIN, VALIDATION}


def test_splits_depend_on_the_seed():
    patients = make_patients(60, {"FGFR3": 0.3})
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
).map(lambda sampled: [Patient(f"P{i}", *each) for i, each in enumerate(sampled)])
FRACTIONS = st.sampled_from([PAPER, (0.6, 0.2, 0.2), (0.5, 0.5, 0), (0.9, 0, 0.1), (1, 0, 0)])


@settings(max_examples=60)
@given(PATIENTS, FRACTIONS, st.integers(0, 3), st.randoms())
def test_splits_do_not_depend_on_table_order(patients, fractions, seed, order):
    splits = assign_splits(patients, fractions, seed)
    assert set(splits) == {patient.patient_id for patient in patients}
    shuffled = order.sample(patients, len(patients))
    assert assign_splits(shuffled, fractions, seed) == splits


@settings(max_examples=60)
@given(PATIENTS, FRACTIONS, st.integers(0, 3))
def test_training_has_all_classes_of_the_cohort(patients, fractions, seed):
    parts = patients_by_split(patients, assign_splits(patients, fractions, seed))
    for target in ("EGFR", "KRAS", "ALK"):
        for label in ("0", "1"):
            assert any(each.strata.get(target) == label for each in parts[TRAIN]) == any(
                each.strata.get(target) == label for each in patients
            )
    for fraction, part in zip(fractions, parts.values(), strict=True):
        assert bool(part) <= (fraction > 0)
        # at most one additional patient for each class of the three targets, in each of two small splits
        assert abs(len(part) - fraction * len(patients)) <= 2 * 6


@settings(max_examples=60)
@given(st.integers(1, 80), st.sampled_from([PAPER, (0.6, 0.2, 0.2), (0.5, 0.5, 0)]), st.integers(0, 3))
def test_split_sizes_without_labels_match_fractions(count, fractions, seed):
    patients = [Patient(f"P{i}", 1 + i % 3, {}) for i in range(count)]
    for fraction, part in zip(
        fractions, patients_by_split(patients, assign_splits(patients, fractions, seed)).values(), strict=True
    ):
        assert abs(len(part) - fraction * count) <= 2


def test_each_patient_is_in_test_and_validation_once():
    patients = make_patients(61, {"EGFR": 0.3, "ALK": 0.2})
    folds = assign_folds(patients, 5, 0)
    for patient in patients:
        roles = [fold[patient.patient_id] for fold in folds]
        assert Counter(roles) == {TEST: 1, VALIDATION: 1, TRAIN: 3}
        assert roles[roles.index(TEST) - 1] == VALIDATION  # the next fold tests on the part that a fold validates on
    tests = [patients_by_split(patients, fold)[TEST] for fold in folds]
    assert sorted(map(len, tests)) == [12, 12, 12, 12, 13]
    for target in ("EGFR", "ALK"):
        counts = [sum(each.strata.get(target) == "1" for each in part) for part in tests]
        assert min(counts) >= 1
        assert max(counts) - min(counts) <= 1


def test_as_many_folds_as_patients():
    patients = [Patient(f"P{i}", 1, {"FGFR3": str(int(i < 3))}) for i in range(6)]
    assert [Counter(fold.values())[TEST] for fold in assign_folds(patients, 6, 0)] == [1] * 6


@pytest.mark.parametrize("fractions", [(0.8, 0.1, 0.2), (0, 0.5, 0.5), (1.2, -0.1, -0.1), (float("nan"), 0, 0)])
def test_invalid_fractions_are_rejected(fractions):
    with pytest.raises(SettingError, match="are not valid") as error:
        assign_splits(make_patients(9, {}), fractions, 0)
    assert "--fractions 0.8 0.1 0.1" in error.value.hint


def test_invalid_number_of_folds_is_rejected():
    for folds in (1, 2, 21):
        with pytest.raises(SettingError, match=f"number of folds is {folds}; it must be from 3 to 20") as error:
            assign_folds(make_patients(30, {}), folds, 0)
        assert "--folds 5" in error.value.hint
    with pytest.raises(SettingError, match="4 patients are too few for 5 folds"):
        assign_folds(make_patients(4, {}), 5, 0)
