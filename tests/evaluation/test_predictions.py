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
    pool_by_patient,
    read_predictions,
    scores,
    sigmoid,
    write_predictions,
)

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
        "slide_id,patient_id,cohort,split,tiles,tiles_failed,"
        "EGFR_label,EGFR_probability,EGFR_logit,KRAS_label,KRAS_probability,KRAS_logit",
        f"007,42,blca,test,120,2,1,0.5,0.0,,{sigmoid(-0.5)!r},-0.5",
    ]


def test_no_predictions_are_an_empty_table(tmp_path):
    write_predictions(tmp_path / "none.csv", [])
    assert read_predictions(tmp_path / "none.csv") == []


@pytest.mark.parametrize("order", [1, -1])
def test_predictions_of_different_targets_do_not_share_a_table(tmp_path, order):
    mixed = [two_targets("1", (1, 0), (0.1, 0.2)), prediction("2", target="EGFR")][::order]
    with pytest.raises(LabelError, match="Slide '2' has no prediction of KRAS"):
        write_predictions(tmp_path / "mixed.csv", mixed)
    assert not (tmp_path / "mixed.csv").exists()


HEADER = "slide_id,patient_id,cohort,split,tiles,tiles_failed,A_label,A_probability,A_logit\n"


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (None, "cannot be read"),
        (b"\xff\xfe\x00", "cannot be read"),
        (b"", "lacks the columns slide_id"),
        (HEADER.replace("A_label,", "").encode(), "lacks the columns A_label"),
        ((HEADER + "s,p,c,test,10,0,2,0.5,0.0\n").encode(), r"line 2: a label must be 0, 1 or empty, got '2'"),
        ((HEADER + "s,p,c,test,10,0,1,0.5,0.0\ns,p,c,test,ten,0,1,0.5,0.0\n").encode(), "line 3: .*'ten'"),
        ((HEADER + "s,p,c,test,10\n").encode(), "line 2: as many fields"),
        ((HEADER + "s,p,c,test,10,0,1,0.5,0.0,9\n").encode(), "line 2: as many fields"),
    ],
)
def test_a_table_that_cannot_be_used_is_refused_with_the_place(tmp_path, content, problem):
    path = tmp_path / "predictions.csv"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(InputError, match=problem) as refusal:
        read_predictions(path)
    assert "T_logit" in refusal.value.hint


def test_probabilities_are_sigmoids_also_far_out():
    one = two_targets("1", (1, 0), (2.0, -800.0))
    assert one.probabilities == {"EGFR": pytest.approx(1 / (1 + math.exp(-2))), "KRAS": 0.0}
    assert sigmoid(800.0) == 1.0


def test_a_patients_slides_become_one_by_the_mean_of_their_probabilities():
    slides = [
        two_targets("1", (0, None), (2.0, -1.0), patient_id="ann", tiles=10, tiles_failed=1),
        two_targets("3", (1, 0), (0.3, 0.4), patient_id="bob"),
        two_targets("2", (1, None), (-0.5, -3.0), patient_id="ann", tiles=20, tiles_failed=2),
    ]
    ann, bob = pool_by_patient(slides)
    assert (ann.slide_id, ann.patient_id, ann.split, ann.cohort) == ("ann", "ann", "test", "blca")
    assert (ann.tiles, ann.tiles_failed) == (30, 3)
    assert ann.labels == {"EGFR": 1, "KRAS": None}
    assert ann.probabilities["EGFR"] == pytest.approx((sigmoid(2.0) + sigmoid(-0.5)) / 2)
    assert ann.probabilities["KRAS"] == pytest.approx((sigmoid(-1.0) + sigmoid(-3.0)) / 2)
    assert bob == replace(slides[1], slide_id="bob")  # a single slide keeps its logit to the last digit


def test_a_patient_is_negative_where_slides_are_labelled_and_none_is_positive():
    slides = [prediction("1", patient_id="ann", label=None), prediction("2", patient_id="ann", label=0)]
    assert pool_by_patient(slides)[0].labels == {"FGFR3": 0}


@given(st.lists(st.floats(-2000, 2000), min_size=1, max_size=6), st.randoms())
def test_pooled_logits_are_finite_between_their_ends_and_in_any_order(logits, random):
    slides = [prediction(str(i), patient_id="ann", logit=logit) for i, logit in enumerate(logits)]
    pooled = pool_by_patient(slides)[0].logits["FGFR3"]
    assert min(logits) - 1e-9 <= pooled <= max(logits) + 1e-9
    random.shuffle(slides)
    assert pool_by_patient(slides)[0].logits["FGFR3"] == pooled


def test_the_same_patient_id_in_another_cohort_or_split_is_another_patient():
    same = prediction("1", patient_id="1")
    assert len(pool_by_patient([same, replace(same, cohort="tcga"), replace(same, split="val"), same])) == 3


def test_scores_of_slides_and_of_patients():
    slides = [
        prediction("1", patient_id="ann", label=1, logit=3.0),
        prediction("2", patient_id="ann", label=1, logit=-3.0),  # alone it is below cal
        prediction("3", patient_id="bob", label=0, logit=-4.0),
        prediction("4", patient_id="cal", label=0, logit=-1.0),
        prediction("5", patient_id="dan", label=None, logit=9.0),
    ]
    by_slide, by_patient = (scores(slides, ["FGFR3"], unit) for unit in ("slide", "patient"))
    assert (by_slide.unit, by_slide.count, by_slide.auc) == ("slide", 5, {"FGFR3": 0.75})
    assert (by_patient.unit, by_patient.count, by_patient.auc) == ("patient", 4, {"FGFR3": 1.0})
    assert by_patient.why_undefined == {}


def test_logits_whose_probabilities_are_equal_in_floats_still_have_an_order():
    slides = [prediction("1", label=0, logit=50.0), prediction("2", label=1, logit=51.0)]
    assert slides[0].probabilities == slides[1].probabilities
    assert scores(slides, ["FGFR3"], "slide").auc == {"FGFR3": 1.0}


def test_the_macro_mean_is_over_targets_that_have_an_auc_and_the_others_say_why_not():
    slides = [
        two_targets("1", (1, 0), (1.0, 0.0)),
        two_targets("2", (0, 0), (2.0, 1.0)),
        two_targets("3", (0, None), (0.0, 2.0)),
    ]
    result = scores(slides, ["EGFR", "KRAS"], "slide")
    assert result.auc == {"EGFR": 0.5, "KRAS": None}
    assert result.macro == 0.5
    assert result.why_undefined == {"KRAS": "no positive slide among 2"}
    with_kras = [replace(slides[0], labels={"EGFR": 1, "KRAS": 1}), *slides[1:]]
    assert scores(with_kras, ["EGFR", "KRAS"], "slide").macro == 0.25


def test_nothing_to_score_has_no_macro_mean():
    result = scores([prediction(label=0)], ["FGFR3"], "patient")
    assert result.macro is None
    assert result.why_undefined == {"FGFR3": "no positive patient among 1"}
    assert scores([], ["FGFR3"], "slide").why_undefined == {"FGFR3": "no labelled slide among 0"}


def test_a_target_without_predictions_and_an_unknown_unit_are_refused():
    with pytest.raises(LabelError, match="no prediction of MET") as refusal:
        scores([prediction()], ["MET"], "slide")
    assert "FGFR3" in refusal.value.hint
    with pytest.raises(SettingError, match="'slide' or 'patient'"):
        scores([prediction()], ["FGFR3"], "biopsy")
