"""Choose targets, read labels as numbers or text, and list all values that are not labels."""

from pathlib import Path

import pytest

from tapfm.cohort.cohort_table import Cohort, SlideRow
from tapfm.cohort.table_options import DEFAULT_TABLE_OPTIONS, TableOptions
from tapfm.errors import CohortError, InputError, LabelError
from tapfm.tasks.catalog import class_texts, target_kinds
from tapfm.tasks.label_columns import TargetRequest, find_target_kinds, needs_number_labels, parse_class_options
from tapfm.tasks.label_columns import _find_target_candidates as find_target_candidates
from tapfm.tasks.labels import (
    check_training_labels,
    patient_strata,
    read_labelled_cohort,
    read_labels,
)


def make_cohort(options=DEFAULT_TABLE_OPTIONS, **columns):
    count = len(next(iter(columns.values())))
    rows = [
        SlideRow(
            f"s{i}",
            Path(f"s{i}.svs"),
            f"P{i}",
            labels={name: values[i] for name, values in columns.items()},
            row=i + 2,
        )
        for i in range(count)
    ]
    return Cohort(tuple(rows), "tapfm", tuple(columns), options=options)


def write_table(folder, *rows, header="slide_id,patient_id,EGFR"):
    path = folder / "cohort.csv"
    path.write_text("\n".join([header, *rows]) + "\n")
    return path


def problems_of(cohort, *targets, **texts):
    return [str(each) for each in find_target_kinds(cohort, TargetRequest(targets, texts))[1]]


def test_labels_are_in_row_order():
    cohort = make_cohort(FGFR3=["1", "", "0"], KRAS=["0.0", "1.0", ""])
    assert read_labels(cohort, target_kinds(["KRAS", "FGFR3"])) == {"KRAS": (0, 1, None), "FGFR3": (1, None, 0)}


@pytest.mark.parametrize("text", ["NA", "n/a", "NaN", "NULL", "Unknown", ".", "", "none", "#N/A"])
def test_common_texts_of_missing_values_are_missing(text):
    cohort = make_cohort(FGFR3=["1", text, "0"])
    assert find_target_candidates(cohort) == ["FGFR3"]
    assert read_labels(cohort, target_kinds(["FGFR3"])) == {"FGFR3": (1, None, 0)}


def test_texts_of_missing_values_are_configurable():
    values = ["1", "?", "0"]
    assert problems_of(make_cohort(FGFR3=values), "FGFR3")
    assert not problems_of(make_cohort(TableOptions(missing_values=("?",)), FGFR3=values), "FGFR3")
    assert problems_of(make_cohort(TableOptions(missing_values=("?",)), FGFR3=["1", "NA", "0"]), "FGFR3")


@pytest.mark.parametrize("value", ["2", "-1", "0.5", "yes", "01", "True"])
def test_invalid_labels_are_listed_by_row(value):
    cohort = make_cohort(FGFR3=["1", value, "0"])
    (problem,) = problems_of(cohort, "FGFR3")
    assert problem.startswith(f"row 3: FGFR3 is '{value}'")
    with pytest.raises(LabelError):
        read_labels(cohort, target_kinds(["FGFR3"]))


def test_all_invalid_columns_are_listed():
    cohort = make_cohort(
        stage=["I", "II", "III", "IV", "I"], response=["0", "1", "x", "", "x"], FGFR3=["0", "1", "", "0", "1"]
    )
    problems = problems_of(cohort, "stage", "FGFR3", "response")
    assert [each.split(" is ")[0] for each in problems] == [
        *("rows 2 and 6: stage", "row 3: stage", "row 4: stage", "row 5: stage"),
        "rows 4 and 6: response",
    ]


def test_unknown_target_suggests_similar_columns():
    _, (problem,) = find_target_kinds(make_cohort(FGFR3=["1", "0"], site=["a", "b"]), TargetRequest(("fgfr",)))
    assert problem.text == "no label column 'fgfr'"
    assert problem.hint == "Did you mean: FGFR3? Available columns: FGFR3, site"


def test_candidates_have_two_classes():
    cohort = make_cohort(
        FGFR3=["1", "", "0"],
        floats=["1.0", "0.0", ""],
        ones=["1", "1", ""],
        empty=["", "", ""],
        dirty=["0", "1", "b"],
        text=["WT", "MUT", "wt"],
        stage=["I", "II", "III"],
        objective=["20x", "40x", "20x"],
    )
    assert find_target_candidates(cohort) == ["FGFR3", "floats", "dirty", "text"]


def test_the_only_candidate_is_the_target():
    kinds, problems = find_target_kinds(make_cohort(FGFR3=["1", "0", ""], stage=["I", "II", "III"]), TargetRequest())
    assert (list(kinds), problems) == (["FGFR3"], [])


def test_with_several_candidates_none_is_chosen():
    cohort = make_cohort(sex=["0", "1", "1"], EGFR=["MUT", "WT", "NA"])
    kinds, (problem,) = find_target_kinds(cohort, TargetRequest())
    assert not kinds
    assert "sex: 0 (1), 1 (2)" in problem.text
    assert "EGFR: MUT (1), WT (1); 1 missing (NA: 1)" in problem.text
    assert "--target sex" in problem.hint


def test_without_a_candidate_all_columns_are_described():
    _, (problem,) = find_target_kinds(make_cohort(stage=["I", "II", "III"], age=["51", "62", "70"]), TargetRequest())
    assert "stage: I (1), II (1), III (1)" in problem.text
    assert "age: 51 (1), 62 (1), 70 (1)" in problem.text


def test_text_labels_with_a_named_positive_class():
    cohort = make_cohort(EGFR=["MUT", "WT", "wt", "NA", ""])
    kinds, problems = find_target_kinds(cohort, parse_class_options((), ["EGFR=mut"], []))
    assert not problems
    assert read_labels(cohort, kinds) == {"EGFR": (1, 0, 0, None, None)}
    assert class_texts(kinds) == {"EGFR": {"negative": ["WT"], "positive": ["mut"]}}
    kind = kinds["EGFR"]
    assert [kind.describe_label(label) for label in (0, 1)] == ["WT", "mut"]
    assert [kind.parse_label(kind.format_label(label)) for label in (0, 1, None)] == [0, 1, None]


def test_several_other_values_need_a_negative_class():
    cohort = make_cohort(stage=["I", "II", "III", "IV", "II"])
    assert "several other values" in problems_of(cohort, "stage", stage={"positive": ["IV"]})[0]
    texts = {"positive": ["III", "IV"], "negative": ["I", "II"]}
    kinds, problems = find_target_kinds(cohort, TargetRequest(("stage",), {"stage": texts}))
    assert not problems
    assert read_labels(cohort, kinds) == {"stage": (0, 0, 1, 1, 0)}
    assert kinds["stage"].describe_label(1) == "III/IV"
    (problem,) = problems_of(cohort, "stage", stage={"positive": ["IV"], "negative": ["I", "II"]})
    assert problem.startswith("row 4: stage is 'III'")


@pytest.mark.parametrize(
    ("texts", "problem"),
    [
        ({"positive": ["MUTANT"]}, "EGFR has several other values"),
        ({"positive": ["MUTANT"], "negative": ["WT", "MUT"]}, "EGFR has no value MUTANT"),
        ({"positive": ["MUT"], "negative": ["MUT", "WT"]}, "'mut' is both positive and negative"),
    ],
)
def test_class_names_that_do_not_match_the_column_are_rejected(texts, problem):
    assert problem in " ".join(problems_of(make_cohort(EGFR=["MUT", "WT", "WT"]), "EGFR", EGFR=texts))


@pytest.mark.parametrize(
    ("targets", "positive", "negative", "problem"),
    [
        ((), ["EGFR"], [], "does not have the form NAME=VALUE"),
        ((), ["EGFR= "], [], "does not have the form NAME=VALUE"),
        ((), [], ["EGFR=WT"], "--positive does not"),
        (("KRAS",), ["EGFR=MUT"], [], "not a target"),
    ],
)
def test_invalid_class_options_are_rejected(targets, positive, negative, problem):
    with pytest.raises(InputError, match=problem):
        parse_class_options(targets, positive, negative)


def test_contradicting_labels_of_a_patient_are_a_warning_or_a_problem(tmp_path):
    table = write_table(tmp_path, "a,P1,1", "b,P1,0", "c,P2,0", "d,P2,0", "e,P3,1")
    labelled = read_labelled_cohort(table, TableOptions(), TargetRequest(("EGFR",)))
    (warning,) = labelled.warnings
    assert "P1 (1: a; 0: b)" in warning
    with pytest.raises(CohortError, match="rows 2 and 3: patient P1 has contradicting labels of EGFR"):
        read_labelled_cohort(table, TableOptions(), TargetRequest(("EGFR",)), unit="patient")


def test_problems_of_rows_and_labels_are_in_one_error(tmp_path):
    table = write_table(tmp_path, "a,P1,1", "a,P1,0", "b,,0", "c,P2,maybe")
    with pytest.raises(CohortError) as error:
        read_labelled_cohort(table, TableOptions(), TargetRequest(("EGFR", "KRAS")))
    lines = [line.strip() for line in error.value.message.splitlines()]
    assert lines[1:5] == [
        "no label column 'KRAS'",
        "rows 2 and 3: duplicate slide_id 'a'",
        "row 4: no patient in column 'patient_id'",
        "row 5: EGFR is 'maybe', which is not 0, 1 or a missing value",
    ]


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


def test_a_named_class_is_never_missing():
    cohort = make_cohort(HER2=["high", "none", "low", "NA"])
    texts = {"positive": ["high"], "negative": ["low", "none"]}
    kinds, problems = find_target_kinds(cohort, TargetRequest(("HER2",), {"HER2": texts}))
    assert not problems
    assert read_labels(cohort, kinds) == {"HER2": (1, 0, 0, None)}


@pytest.mark.parametrize(
    ("trained", "values", "expected"),
    [
        ({"positive": ["MUT"], "negative": ["WT"]}, ["1", "0"], True),
        ({"positive": ["MUT"], "negative": ["WT"]}, ["MUT", "WT"], False),
        ({"positive": ["0"], "negative": ["1"]}, ["1", "0"], False),
        ({"positive": ["2"], "negative": ["1"]}, ["1", "1"], False),
        ({"positive": ["2"], "negative": ["0", "1"]}, ["0", "1"], False),
    ],
)
def test_texts_of_training_have_precedence_over_0_and_1(trained, values, expected):
    (kind,) = target_kinds(["EGFR"], {"EGFR": trained}).values()
    assert needs_number_labels(make_cohort(EGFR=values), "EGFR", kind) == expected
