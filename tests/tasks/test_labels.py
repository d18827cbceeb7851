"""Read labels of a cohort table; values other than 0, 1 or empty are an error with examples."""

from pathlib import Path

import pytest

from tapfm.cohort.cohort_table import Cohort, SlideRow
from tapfm.errors import LabelError, UnknownNameError
from tapfm.tasks.catalog import target_kinds
from tapfm.tasks.labels import check_training_labels, find_binary_columns, patient_strata, read_labels


def make_cohort(**columns):
    count = len(next(iter(columns.values())))
    rows = [
        SlideRow(f"s{i}", Path(f"s{i}.svs"), f"P{i}", labels={name: values[i] for name, values in columns.items()})
        for i in range(count)
    ]
    return Cohort(tuple(rows), "tapfm", tuple(columns))


def test_labels_are_in_row_order():
    cohort = make_cohort(FGFR3=["1", "", "0"], KRAS=["0.0", "1.0", ""])
    assert read_labels(cohort, target_kinds(["KRAS", "FGFR3"])) == {"KRAS": (0, 1, None), "FGFR3": (1, None, 0)}


@pytest.mark.parametrize("value", ["2", "-1", "0.5", "yes", "NA", "01", "True"])
def test_invalid_label_error_contains_the_slide(value):
    with pytest.raises(LabelError, match=rf"FGFR3 has '{value}' \(s1\) in 1 of 3 rows"):
        read_labels(make_cohort(FGFR3=["1", value, "0"]), target_kinds(["FGFR3"]))


def test_all_invalid_columns_are_in_one_error():
    cohort = make_cohort(
        stage=["I", "II", "III", "IV", "I"], response=["0", "1", "x", "", "x"], FGFR3=["0", "1", "", "0", "1"]
    )
    with pytest.raises(LabelError) as error:
        read_labels(cohort, target_kinds(["stage", "FGFR3", "response"]))
    assert "stage has 'I' (s0), 'II' (s1), 'III' (s2), ... in 5 of 5 rows" in error.value.message
    assert "response has 'x' (s2) in 2 of 5 rows" in error.value.message
    assert "FGFR3" not in error.value.message
    assert error.value.hint.endswith("Usable columns: FGFR3")


def test_unknown_target_error_suggests_similar_columns():
    with pytest.raises(UnknownNameError, match="no label column named 'fgfr'") as error:
        read_labels(make_cohort(FGFR3=["1", "0"], site=["a", "b"]), target_kinds(["fgfr"]))
    assert error.value.hint == "Did you mean: FGFR3? Available: FGFR3, site"


def test_binary_columns_contain_only_both_classes():
    cohort = make_cohort(
        FGFR3=["1", "", "0"], floats=["1.0", "0.0", ""], ones=["1", "1", ""], empty=["", "", ""], site=["0", "1", "b"]
    )
    assert find_binary_columns(cohort) == ("FGFR3", "floats")


def test_patient_is_positive_if_any_slide_is():
    rows = [SlideRow(name, Path(f"{name}.svs"), patient) for name, patient in (("a", "P1"), ("b", "P1"), ("c", "P2"))]
    cohort = Cohort(tuple(rows), "tapfm")
    labels = {"FGFR3": (0, 1, 0), "KRAS": (None, 0, None)}
    assert patient_strata(cohort, labels, target_kinds(labels)) == {
        "FGFR3": ["1", "1", "0"],
        "KRAS": ["0", "0", None],
    }


def test_targets_without_both_classes_in_training_are_rejected():
    cohort = Cohort(tuple(SlideRow(f"s{i}", Path(f"s{i}.svs"), f"P{i}") for i in range(4)), "tapfm")
    splits = {"s0": "train", "s1": "train", "s2": "test"}
    labels = {"both": (0, 1, 0, 0), "never": (0, 0, 1, 1), "unknown": (None, None, 1, 0), "always": (1, 1, 0, 0)}
    with pytest.raises(LabelError) as error:
        check_training_labels(cohort, splits, labels, target_kinds(labels))
    assert error.value.message.splitlines()[1:] == [
        "  never: 0 positive and 2 negative slides",
        "  unknown: 0 positive and 0 negative slides",
        "  always: 2 positive and 0 negative slides",
    ]
    check_training_labels(cohort, splits, {"both": labels["both"]}, target_kinds(labels))
