"""Predictions: read and write tables, average ensembles, pool by patient, and compute scores."""

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
    read_target_kinds,
    write_predictions,
)
from tapfm.evaluation.predictions import (
    _pool_by_patient as pool_by_patient,
)
from tapfm.tasks.binary_target import _sigmoid as sigmoid
from tapfm.tasks.catalog import target_kinds

LOGITS = st.floats(-1e300, 1e300)


def make_prediction(slide_id="007", *, patient_id=None, logit=0.5, label: int | None = 1, target="FGFR3", **fields):
    defaults = {"split": "test", "cohort": "blca", "tiles": 120, "tiles_failed": 2}
    return Prediction(
        slide_id=slide_id,
        patient_id=patient_id or f"p{slide_id}",
        labels={target: label},
        logits={target: logit},
        **(defaults | fields),
    )


def predict_two_targets(slide_id, labels, logits, **fields):
    names = ("EGFR", "KRAS")
    return replace(
        make_prediction(slide_id, **fields),
        labels=dict(zip(names, labels, strict=True)),
        logits=dict(zip(names, logits, strict=True)),
    )


@given(logits=st.tuples(LOGITS, LOGITS), labels=st.tuples(*[st.sampled_from([0, 1, None])] * 2))
def test_table_round_trip(tmp_path_factory, logits, labels):
    path = tmp_path_factory.mktemp("table") / "predictions.csv"
    written = [
        predict_two_targets("007", labels, logits),
        predict_two_targets('a,"b"', labels, logits, split=None, cohort=None),
    ]
    write_predictions(path, written)
    assert read_predictions(path) == written


def test_contents_of_a_table(tmp_path):
    path = tmp_path / "new" / "predictions.csv"
    one = predict_two_targets("007", (1, None), (0.0, np.float32(-0.5)), patient_id="42")
    write_predictions(path, [one])
    assert path.read_text().splitlines() == [
        "patient_id,slide_id,cohort,split,target,label,positive_class,probability,logit,tiles,tiles_failed",
        "42,007,blca,test,EGFR,1,1,0.5,0.0,120,2",
        f"42,007,blca,test,KRAS,,1,{sigmoid(-0.5)!r},-0.5,120,2",
    ]


@given(st.lists(st.floats(0, 1), min_size=1, max_size=20, unique=True))
def test_logits_from_probabilities_keep_their_order(tmp_path_factory, probabilities):
    path = tmp_path_factory.mktemp("table") / "others.csv"
    rows = [f"p{i},s{i},A,1,{p!r}" for i, p in enumerate(probabilities)]
    path.write_text("\n".join(["patient_id,slide_id,target,label,probability", *rows]))
    read = read_predictions(path)
    assert [sigmoid(each.logits["A"]) for each in read] == pytest.approx(probabilities, rel=1e-9)
    assert all(math.isfinite(each.logits["A"]) for each in read)
    ranked = [each.logits["A"] for _, each in sorted(zip(probabilities, read, strict=True), key=lambda both: both[0])]
    assert ranked == sorted(ranked)


def test_table_of_another_tool_needs_five_columns_in_any_order(tmp_path):
    path = tmp_path / "others.csv"
    path.write_text("target,label,probability,slide_id,patient_id,site\nA,1.0,0.5,s,p,x\nB,,1,s,p,x\n")
    assert read_predictions(path) == [
        Prediction("s", "p", None, None, {"A": 1, "B": None}, {"A": 0.0, "B": pytest.approx(36.7, abs=0.1)}, 0)
    ]


def test_slides_and_targets_keep_the_order_of_the_table(tmp_path):
    path = tmp_path / "mixed.csv"
    lines = ["patient_id,slide_id,target,label,probability", "p,2,Z,1,.5", "p,1,A,0,.5", "p,1,Z,0,.5", "p,2,A,1,.5"]
    path.write_text("\n".join(lines))
    read = read_predictions(path)
    assert [(each.slide_id, list(each.logits), list(each.labels)) for each in read] == [
        ("2", ["Z", "A"], ["Z", "A"]),
        ("1", ["Z", "A"], ["Z", "A"]),
    ]


def test_same_slide_id_in_another_cohort_or_split_is_a_different_slide(tmp_path):
    same = make_prediction()
    written = [same, replace(same, cohort="tcga"), replace(same, split="val")]
    write_predictions(tmp_path / "three.csv", written)
    assert read_predictions(tmp_path / "three.csv") == written
    with pytest.raises(InputError, match="Slide '007' has two predictions"):
        write_predictions(tmp_path / "two.csv", [same, same])
    assert not (tmp_path / "two.csv").exists()


def test_empty_table(tmp_path):
    write_predictions(tmp_path / "none.csv", [])
    assert read_predictions(tmp_path / "none.csv") == []


@pytest.mark.parametrize("order", [1, -1])
def test_write_rejects_predictions_with_different_targets(tmp_path, order):
    mixed = [predict_two_targets("1", (1, 0), (0.1, 0.2)), make_prediction("2", target="EGFR")][::order]
    with pytest.raises(LabelError, match="Slide '2' has no prediction for KRAS"):
        write_predictions(tmp_path / "mixed.csv", mixed)
    assert not (tmp_path / "mixed.csv").exists()


HEADER = "patient_id,slide_id,cohort,split,target,label,probability,logit,tiles,tiles_failed\n"
ROW = "p,s,c,test,A,1,0.5,0.0,10,0\n"


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (None, "cannot be read"),
        (b"\xff\xfe\x00", "cannot be read"),
        (b"", "lacks the columns patient_id"),
        ("slide_id,patient_id,A_label,A_probability,A_logit\n", "lacks the columns target, label, probability"),
        (HEADER.replace("label,", ""), "lacks the columns label"),
        (HEADER + ROW.replace(",1,", ",2,"), "row 2: a label must be 0, 1 or empty; got '2'"),
        (HEADER + ROW + ROW.replace("s", "t").replace("10", "ten"), "row 3: .*'ten'"),
        (HEADER + "p,s,c,test,A\n", "row 2: the number of fields"),
        (HEADER + ROW.replace("\n", ",9\n"), "row 2: the number of fields"),
        (HEADER + ROW.replace("0.5", "1.5"), "row 2: a probability must be from 0 to 1; got 1.5"),
        (HEADER + ROW.replace("0.5", "nan"), "row 2: a probability must be from 0 to 1; got nan"),
        (HEADER + ROW.replace("0.5,0.0", "0.5,nan"), "row 2: logit nan"),
        (
            HEADER + ROW.replace("0.5,0.0", "0.5,3.0"),
            "row 2: logit 3.0 means probability 0.952574, not 0.5",
        ),
        (HEADER + ROW.replace("p,", ","), "row 2: patient_id is empty"),
        (HEADER + ROW + ROW, "row 3: duplicate prediction for slide 's' and target A, also in row 2"),
        (HEADER + ROW + ROW.replace("p,", "q,").replace("A", "B"), "row 3: slide 's' has a different patient_id"),
        (HEADER + ROW + ROW.replace("s", "t") + ROW.replace("A", "B"), "slide 't' has no row for B"),
    ],
)
def test_invalid_table_error_contains_the_row(tmp_path, content, problem):
    path = tmp_path / "predictions.csv"
    if content is not None:
        path.write_bytes(content.encode() if isinstance(content, str) else content)
    with pytest.raises(InputError, match=problem) as error:
        read_predictions(path)
    assert "a row" in error.value.hint


def test_ensemble_averages_probabilities():
    first = [predict_two_targets("1", (1, None), (2.0, 0.0)), predict_two_targets("2", (0, 1), (-1.0, 3.0))]
    second = [predict_two_targets("2", (0, 1), (1.0, 3.0), tiles=7), predict_two_targets("1", (1, None), (-2.0, 1.0))]
    one, two = average_predictions([first, second], target_kinds(["EGFR", "KRAS"]))
    assert (one.slide_id, two.slide_id, two.tiles, one.labels) == ("1", "2", 120, {"EGFR": 1, "KRAS": None})
    probabilities = [sigmoid(logit) for logit in one.logits.values()]
    assert probabilities == [pytest.approx(0.5), pytest.approx((0.5 + sigmoid(1.0)) / 2)]
    assert two.logits["KRAS"] == 3.0  # equal logits are kept exactly
    assert average_predictions([first], target_kinds(["EGFR", "KRAS"])) == first


@pytest.mark.parametrize(
    ("members", "problem"),
    [
        ([], "at least one member"),
        (
            [[make_prediction("1"), make_prediction("2")], [make_prediction("1")]],
            "Members 1 and 2 have different slides: 2",
        ),
        (
            [[make_prediction("1")], [make_prediction("1"), make_prediction("1")]],
            "Member 2 has two predictions for slide '1'",
        ),
        ([[make_prediction("1", label=0)], [make_prediction("1", label=1)]], "Slide '1' has different labels"),
        ([[make_prediction("1")], [make_prediction("1", target="MET")]], "no prediction for FGFR3"),
    ],
)
def test_ensemble_rejects_different_slides_labels_or_targets(members, problem):
    with pytest.raises(InputError, match=problem):
        average_predictions(members, target_kinds(["FGFR3"]))


def test_sigmoid_of_large_logits():
    assert [sigmoid(logit) for logit in (2.0, -800.0, 800.0)] == [pytest.approx(1 / (1 + math.exp(-2))), 0.0, 1.0]


def test_pool_by_patient_averages_probabilities():
    slides = [
        predict_two_targets("1", (0, None), (2.0, -1.0), patient_id="ann", tiles=10, tiles_failed=1),
        predict_two_targets("3", (1, 0), (0.3, 0.4), patient_id="bob"),
        predict_two_targets("2", (1, None), (-0.5, -3.0), patient_id="ann", tiles=20, tiles_failed=2),
    ]
    ann, bob = pool_by_patient(slides, target_kinds(["EGFR", "KRAS"]))
    assert (ann.slide_id, ann.patient_id, ann.split, ann.cohort) == ("ann", "ann", "test", "blca")
    assert (ann.tiles, ann.tiles_failed) == (30, 3)
    assert ann.labels == {"EGFR": 1, "KRAS": None}
    assert sigmoid(ann.logits["EGFR"]) == pytest.approx((sigmoid(2.0) + sigmoid(-0.5)) / 2)
    assert sigmoid(ann.logits["KRAS"]) == pytest.approx((sigmoid(-1.0) + sigmoid(-3.0)) / 2)
    assert bob == replace(slides[1], slide_id="bob")  # the logit of a single slide is kept exactly


def test_patient_label_ignores_missing_labels():
    slides = [make_prediction("1", patient_id="ann", label=None), make_prediction("2", patient_id="ann", label=0)]
    assert pool_by_patient(slides, target_kinds(["FGFR3"]))[0].labels == {"FGFR3": 0}


@given(st.lists(st.floats(-2000, 2000), min_size=1, max_size=6), st.randoms())
def test_pooled_logit_is_within_range_and_independent_of_order(logits, random):
    slides = [make_prediction(str(i), patient_id="ann", logit=logit) for i, logit in enumerate(logits)]
    pooled = pool_by_patient(slides, target_kinds(["FGFR3"]))[0].logits["FGFR3"]
    assert min(logits) - 1e-9 <= pooled <= max(logits) + 1e-9
    random.shuffle(slides)
    assert pool_by_patient(slides, target_kinds(["FGFR3"]))[0].logits["FGFR3"] == pooled


def test_same_patient_id_in_another_cohort_or_split_is_a_different_patient():
    same = make_prediction("1", patient_id="1")
    slides = [same, replace(same, cohort="tcga"), replace(same, split="val"), same]
    assert len(pool_by_patient(slides, target_kinds(["FGFR3"]))) == 3


def test_scores_of_slides_and_patients():
    slides = [
        make_prediction("1", patient_id="ann", label=1, logit=3.0),
        make_prediction("2", patient_id="ann", label=1, logit=-3.0),  # below the slide of cal
        make_prediction("3", patient_id="bob", label=0, logit=-4.0),
        make_prediction("4", patient_id="cal", label=0, logit=-1.0),
        make_prediction("5", patient_id="dan", label=None, logit=9.0),
    ]
    by_slide, by_patient = (compute_scores(slides, target_kinds(["FGFR3"]), unit) for unit in ("slide", "patient"))
    assert (by_slide.unit, by_slide.count, by_slide.auc) == ("slide", 5, {"FGFR3": 0.75})
    assert (by_patient.unit, by_patient.count, by_patient.auc) == ("patient", 4, {"FGFR3": 1.0})
    assert by_patient.undefined_reasons == {}


def test_auc_uses_logits_if_probabilities_are_equal():
    slides = [make_prediction("1", label=0, logit=50.0), make_prediction("2", label=1, logit=51.0)]
    assert sigmoid(50.0) == sigmoid(51.0)
    assert compute_scores(slides, target_kinds(["FGFR3"]), "slide").auc == {"FGFR3": 1.0}


def test_macro_mean_excludes_targets_without_auc():
    slides = [
        predict_two_targets("1", (1, 0), (1.0, 0.0)),
        predict_two_targets("2", (0, 0), (2.0, 1.0)),
        predict_two_targets("3", (0, None), (0.0, 2.0)),
    ]
    result = compute_scores(slides, target_kinds(["EGFR", "KRAS"]), "slide")
    assert result.auc == {"EGFR": 0.5, "KRAS": None}
    assert result.macro == 0.5
    assert result.undefined_reasons == {"KRAS": "no positive slide among 2"}
    with_kras = [replace(slides[0], labels={"EGFR": 1, "KRAS": 1}), *slides[1:]]
    assert compute_scores(with_kras, target_kinds(["EGFR", "KRAS"]), "slide").macro == 0.25


def test_no_macro_mean_without_auc():
    result = compute_scores([make_prediction(label=0)], target_kinds(["FGFR3"]), "patient")
    assert result.macro is None
    assert result.undefined_reasons == {"FGFR3": "no positive patient among 1"}
    assert compute_scores([], target_kinds(["FGFR3"]), "slide").undefined_reasons == {
        "FGFR3": "no labelled slide among 0"
    }


def test_unknown_target_or_unit_is_rejected():
    with pytest.raises(LabelError, match="no prediction for MET") as error:
        compute_scores([make_prediction()], target_kinds(["MET"]), "slide")
    assert "FGFR3" in error.value.hint
    with pytest.raises(SettingError, match="'slide' or 'patient'"):
        compute_scores([make_prediction()], target_kinds(["FGFR3"]), "biopsy")


@pytest.mark.parametrize(
    "texts",
    [
        {"negative": ["WT"], "positive": ["MUT"]},
        {"negative": ["2"], "positive": ["1"]},
        {"negative": ["0", "2"], "positive": ["1"]},
        {"negative": ["1"], "positive": ["2"]},
    ],
)
def test_tables_with_named_classes_are_read_without_the_model(tmp_path, texts):
    kinds = target_kinds(["EGFR"], {"EGFR": texts})
    written = [
        Prediction(f"s{i}", f"P{i}", "test", None, {"EGFR": label}, {"EGFR": 0.5 * i}, 10)
        for i, label in enumerate((1, 0, None))
    ]
    write_predictions(tmp_path / "p.csv", written, kinds)
    assert read_predictions(tmp_path / "p.csv") == read_predictions(tmp_path / "p.csv", kinds) == written
    assert read_target_kinds(tmp_path / "p.csv")["EGFR"].describe_label(1) == "/".join(texts["positive"])
