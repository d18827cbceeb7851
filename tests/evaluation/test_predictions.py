"""Predictions: a table that comes back as it was, patients pooled, scores with a reason where there is none."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tapfm.errors import InputError, LabelError, SettingError
from tapfm.evaluation.predictions import (
    Prediction,
    average_predictions,
    compute_scores,
    read_predictions,
    write_predictions,
)
from tapfm.evaluation.predictions import (
    _pool_by_patient as pool_by_patient,
)
from tapfm.tasks.binary_target import _sigmoid as sigmoid
from tapfm.tasks.catalog import target_kinds

LOGITS = st.floats(-1e300, 1e300)


def prediction(slide_id="007", *, patient_id=None, logit=0.5, label: int | None = 1, target="FGFR3", **fields):
    defaults = {"split": "test", "cohort": "blca", "tiles": 120, "tiles_failed": 2}
    return Prediction(
        slide_id=slide_id,
        patient_id=patient_id or f"p{slide_id}",
        labels={target: label},
        logits={target: logit},
        **(defaults | fields),
    )


def two_targets(slide_id, labels, logits, **fields):
    names = ("EGFR", "KRAS")
    return replace(
        prediction(slide_id, **fields),
        labels=dict(zip(names, labels, strict=True)),
        logits=dict(zip(names, logits, strict=True)),
    )


@given(logits=st.tuples(LOGITS, LOGITS), labels=st.tuples(*[st.sampled_from([0, 1, None])] * 2))
def test_a_table_comes_back_as_it_was(tmp_path_factory, logits, labels):
    path = tmp_path_factory.mktemp("table") / "predictions.csv"
    written = [two_targets("007", labels, logits), two_targets('a,"b"', labels, logits, split=None, cohort=None)]
    write_predictions(path, written)
    assert read_predictions(path) == written


def test_a_table_says_what_it_holds(tmp_path):
    path = tmp_path / "new" / "predictions.csv"
    one = two_targets("007", (1, None), (0.0, np.float32(-0.5)), patient_id="42")
    write_predictions(path, [one])
    assert path.read_text().splitlines() == [
        "patient_id,slide_id,cohort,split,target,label,probability,logit,tiles,tiles_failed",
        "42,007,blca,test,EGFR,1,0.5,0.0,120,2",
        f"42,007,blca,test,KRAS,,{sigmoid(-0.5)!r},-0.5,120,2",
    ]


@given(st.lists(st.floats(0, 1), min_size=1, max_size=20, unique=True))
def test_probabilities_alone_keep_their_order_also_at_0_and_1(tmp_path_factory, probabilities):
    path = tmp_path_factory.mktemp("table") / "others.csv"
    rows = [f"p{i},s{i},A,1,{p!r}" for i, p in enumerate(probabilities)]
    path.write_text("\n".join(["patient_id,slide_id,target,label,probability", *rows]))
    read = read_predictions(path)
    assert [sigmoid(each.logits["A"]) for each in read] == pytest.approx(probabilities, rel=1e-9)
    assert all(math.isfinite(each.logits["A"]) for each in read)
    ranked = [each.logits["A"] for _, each in sorted(zip(probabilities, read, strict=True), key=lambda both: both[0])]
    assert ranked == sorted(ranked)


def test_a_table_of_another_tool_needs_five_columns_in_any_order(tmp_path):
    path = tmp_path / "others.csv"
    path.write_text("target,label,probability,slide_id,patient_id,site\nA,1.0,0.5,s,p,x\nB,,1,s,p,x\n")
    assert read_predictions(path) == [
        Prediction("s", "p", None, None, {"A": 1, "B": None}, {"A": 0.0, "B": pytest.approx(36.7, abs=0.1)}, 0)
    ]


def test_slides_and_targets_keep_the_order_in_which_a_table_names_them(tmp_path):
    path = tmp_path / "mixed.csv"
    lines = ["patient_id,slide_id,target,label,probability", "p,2,Z,1,.5", "p,1,A,0,.5", "p,1,Z,0,.5", "p,2,A,1,.5"]
    path.write_text("\n".join(lines))
    read = read_predictions(path)
    assert [(each.slide_id, list(each.logits), list(each.labels)) for each in read] == [
        ("2", ["Z", "A"], ["Z", "A"]),
        ("1", ["Z", "A"], ["Z", "A"]),
    ]


def test_the_same_slide_in_another_cohort_or_split_is_another_slide(tmp_path):
    same = prediction()
    written = [same, replace(same, cohort="tcga"), replace(same, split="val")]
    write_predictions(tmp_path / "three.csv", written)
    assert read_predictions(tmp_path / "three.csv") == written
    with pytest.raises(InputError, match="Slide '007' has two predictions"):
        write_predictions(tmp_path / "two.csv", [same, same])
    assert not (tmp_path / "two.csv").exists()


def test_no_predictions_are_an_empty_table(tmp_path):
    write_predictions(tmp_path / "none.csv", [])
    assert read_predictions(tmp_path / "none.csv") == []


@pytest.mark.parametrize("order", [1, -1])
def test_predictions_of_different_targets_do_not_share_a_table(tmp_path, order):
    mixed = [two_targets("1", (1, 0), (0.1, 0.2)), prediction("2", target="EGFR")][::order]
    with pytest.raises(LabelError, match="Slide '2' has no prediction of KRAS"):
        write_predictions(tmp_path / "mixed.csv", mixed)
    assert not (tmp_path / "mixed.csv").exists()


HEADER = "patient_id,slide_id,cohort,split,target,label,probability,logit,tiles,tiles_failed\n"
LINE = "p,s,c,test,A,1,0.5,0.0,10,0\n"


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (None, "cannot be read"),
        (b"\xff\xfe\x00", "cannot be read"),
        (b"", "lacks the columns patient_id"),
        ("slide_id,patient_id,A_label,A_probability,A_logit\n", "lacks the columns target, label, probability"),
        (HEADER.replace("label,", ""), "lacks the columns label"),
        (HEADER + LINE.replace(",1,", ",2,"), r"line 2: a label must be 0, 1 or empty, got '2'"),
        (HEADER + LINE + LINE.replace("s", "t").replace("10", "ten"), "line 3: .*'ten'"),
        (HEADER + "p,s,c,test,A\n", "line 2: as many fields"),
        (HEADER + LINE.replace("\n", ",9\n"), "line 2: as many fields"),
        (HEADER + LINE.replace("0.5", "1.5"), "line 2: a probability must be from 0 to 1, got 1.5"),
        (HEADER + LINE.replace("0.5", "nan"), "line 2: a probability must be from 0 to 1, got nan"),
        (HEADER + LINE.replace("0.5,0.0", "0.5,nan"), "line 2: a logit of nan"),
        (
            HEADER + LINE.replace("0.5,0.0", "0.5,3.0"),
            "line 2: a logit of 3.0 is a probability of 0.952574, not of 0.5",
        ),
        (HEADER + LINE.replace("p,", ","), "line 2: patient_id is empty"),
        (HEADER + LINE + LINE, r"line 3: slide 's' has a prediction of A already, on line 2"),
        (HEADER + LINE + LINE.replace("p,", "q,").replace("A", "B"), "line 3: slide 's' has another patient_id"),
        (HEADER + LINE + LINE.replace("s", "t") + LINE.replace("A", "B"), "slide 't' has no line of B"),
    ],
)
def test_a_table_that_cannot_be_used_is_refused_with_the_place(tmp_path, content, problem):
    path = tmp_path / "predictions.csv"
    if content is not None:
        path.write_bytes(content.encode() if isinstance(content, str) else content)
    with pytest.raises(InputError, match=problem) as refusal:
        read_predictions(path)
    assert "a line" in refusal.value.hint


def test_an_ensemble_is_the_mean_of_probabilities_slide_by_slide():
    first = [two_targets("1", (1, None), (2.0, 0.0)), two_targets("2", (0, 1), (-1.0, 3.0))]
    second = [two_targets("2", (0, 1), (1.0, 3.0), tiles=7), two_targets("1", (1, None), (-2.0, 1.0))]
    one, two = average_predictions([first, second], target_kinds(["EGFR", "KRAS"]))
    assert (one.slide_id, two.slide_id, two.tiles, one.labels) == ("1", "2", 120, {"EGFR": 1, "KRAS": None})
    probabilities = [sigmoid(logit) for logit in one.logits.values()]
    assert probabilities == [pytest.approx(0.5), pytest.approx((0.5 + sigmoid(1.0)) / 2)]
    assert two.logits["KRAS"] == 3.0  # agreement is kept to the last digit
    assert average_predictions([first], target_kinds(["EGFR", "KRAS"])) == first


@pytest.mark.parametrize(
    ("members", "problem"),
    [
        ([], "at least one member"),
        ([[prediction("1"), prediction("2")], [prediction("1")]], "Member 2 has other slides than the first: 2"),
        ([[prediction("1")], [prediction("1"), prediction("1")]], "Member 2 has two predictions of slide '1'"),
        ([[prediction("1", label=0)], [prediction("1", label=1)]], "Slide '1' has different labels"),
        ([[prediction("1")], [prediction("1", target="MET")]], "no prediction of FGFR3"),
    ],
)
def test_members_that_do_not_fit_make_no_ensemble(members, problem):
    with pytest.raises(InputError, match=problem):
        average_predictions(members, target_kinds(["FGFR3"]))


def test_probabilities_are_sigmoids_also_far_out():
    assert [sigmoid(logit) for logit in (2.0, -800.0, 800.0)] == [pytest.approx(1 / (1 + math.exp(-2))), 0.0, 1.0]


def test_a_patients_slides_become_one_by_the_mean_of_their_probabilities():
    slides = [
        two_targets("1", (0, None), (2.0, -1.0), patient_id="ann", tiles=10, tiles_failed=1),
        two_targets("3", (1, 0), (0.3, 0.4), patient_id="bob"),
        two_targets("2", (1, None), (-0.5, -3.0), patient_id="ann", tiles=20, tiles_failed=2),
    ]
    ann, bob = pool_by_patient(slides, target_kinds(["EGFR", "KRAS"]))
    assert (ann.slide_id, ann.patient_id, ann.split, ann.cohort) == ("ann", "ann", "test", "blca")
    assert (ann.tiles, ann.tiles_failed) == (30, 3)
    assert ann.labels == {"EGFR": 1, "KRAS": None}
    assert sigmoid(ann.logits["EGFR"]) == pytest.approx((sigmoid(2.0) + sigmoid(-0.5)) / 2)
    assert sigmoid(ann.logits["KRAS"]) == pytest.approx((sigmoid(-1.0) + sigmoid(-3.0)) / 2)
    assert bob == replace(slides[1], slide_id="bob")  # a single slide keeps its logit to the last digit


def test_a_patient_is_negative_where_slides_are_labelled_and_none_is_positive():
    slides = [prediction("1", patient_id="ann", label=None), prediction("2", patient_id="ann", label=0)]
    assert pool_by_patient(slides, target_kinds(["FGFR3"]))[0].labels == {"FGFR3": 0}


@given(st.lists(st.floats(-2000, 2000), min_size=1, max_size=6), st.randoms())
def test_pooled_logits_are_finite_between_their_ends_and_in_any_order(logits, random):
    slides = [prediction(str(i), patient_id="ann", logit=logit) for i, logit in enumerate(logits)]
    pooled = pool_by_patient(slides, target_kinds(["FGFR3"]))[0].logits["FGFR3"]
    assert min(logits) - 1e-9 <= pooled <= max(logits) + 1e-9
    random.shuffle(slides)
    assert pool_by_patient(slides, target_kinds(["FGFR3"]))[0].logits["FGFR3"] == pooled


def test_the_same_patient_id_in_another_cohort_or_split_is_another_patient():
    same = prediction("1", patient_id="1")
    slides = [same, replace(same, cohort="tcga"), replace(same, split="val"), same]
    assert len(pool_by_patient(slides, target_kinds(["FGFR3"]))) == 3


def test_scores_of_slides_and_of_patients():
    slides = [
        prediction("1", patient_id="ann", label=1, logit=3.0),
        prediction("2", patient_id="ann", label=1, logit=-3.0),  # alone it is below cal
        prediction("3", patient_id="bob", label=0, logit=-4.0),
        prediction("4", patient_id="cal", label=0, logit=-1.0),
        prediction("5", patient_id="dan", label=None, logit=9.0),
    ]
    by_slide, by_patient = (compute_scores(slides, target_kinds(["FGFR3"]), unit) for unit in ("slide", "patient"))
    assert (by_slide.unit, by_slide.count, by_slide.auc) == ("slide", 5, {"FGFR3": 0.75})
    assert (by_patient.unit, by_patient.count, by_patient.auc) == ("patient", 4, {"FGFR3": 1.0})
    assert by_patient.undefined_reasons == {}


def test_logits_whose_probabilities_are_equal_in_floats_still_have_an_order():
    slides = [prediction("1", label=0, logit=50.0), prediction("2", label=1, logit=51.0)]
    assert sigmoid(50.0) == sigmoid(51.0)
    assert compute_scores(slides, target_kinds(["FGFR3"]), "slide").auc == {"FGFR3": 1.0}


def test_the_macro_mean_is_over_targets_that_have_an_auc_and_the_others_say_why_not():
    slides = [
        two_targets("1", (1, 0), (1.0, 0.0)),
        two_targets("2", (0, 0), (2.0, 1.0)),
        two_targets("3", (0, None), (0.0, 2.0)),
    ]
    result = compute_scores(slides, target_kinds(["EGFR", "KRAS"]), "slide")
    assert result.auc == {"EGFR": 0.5, "KRAS": None}
    assert result.macro == 0.5
    assert result.undefined_reasons == {"KRAS": "no positive slide among 2"}
    with_kras = [replace(slides[0], labels={"EGFR": 1, "KRAS": 1}), *slides[1:]]
    assert compute_scores(with_kras, target_kinds(["EGFR", "KRAS"]), "slide").macro == 0.25


def test_nothing_to_score_has_no_macro_mean():
    result = compute_scores([prediction(label=0)], target_kinds(["FGFR3"]), "patient")
    assert result.macro is None
    assert result.undefined_reasons == {"FGFR3": "no positive patient among 1"}
    assert compute_scores([], target_kinds(["FGFR3"]), "slide").undefined_reasons == {
        "FGFR3": "no labelled slide among 0"
    }


def test_a_target_without_predictions_and_an_unknown_unit_are_refused():
    with pytest.raises(LabelError, match="no prediction of MET") as refusal:
        compute_scores([prediction()], target_kinds(["MET"]), "slide")
    assert "FGFR3" in refusal.value.hint
    with pytest.raises(SettingError, match="'slide' or 'patient'"):
        compute_scores([prediction()], target_kinds(["FGFR3"]), "biopsy")
