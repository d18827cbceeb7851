"""Compare models on the same patients: paired differences, excluded patients, and rejected input."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tapfm.errors import InputError, UnknownNameError
from tapfm.evaluation.model_comparison import compare_models
from tapfm.evaluation.predictions import Prediction
from tapfm.metrics.delong import auc_difference
from tapfm.metrics.holm import holm_correction
from tapfm.metrics.ranking import auc
from tapfm.tasks.catalog import target_kinds


def predict_patients(noise, *, count=80, targets=("A",), seed=0, start=0, cohort="c"):
    """Return predictions of a model for the same patients; less noise gives a higher AUC."""
    shared, own = np.random.default_rng(7), np.random.default_rng((seed, int(noise * 100)))
    found = []
    for number in range(count):
        labels = {target: int(shared.random() < 0.4) for target in targets}
        logits = {target: float(labels[target] + own.normal() * noise + shared.normal() * 0.5) for target in targets}
        found.append(Prediction(f"s{number}", f"p{number:03}", "test", cohort, labels, logits, 10))
    return found[start:]


def test_difference_and_delong_p_value():
    a, b = predict_patients(0.5), predict_patients(2.0)
    found = compare_models({"good": [a], "poor": [b]}, target_kinds(["A"]), "patient", resamples=500)
    labels = np.array([each.labels["A"] == 1 for each in a])
    of_a, of_b = (np.array([each.logits["A"] for each in one]) for one in (a, b))
    (pair,) = found.pairs
    test = auc_difference(labels, of_a, of_b)
    assert (pair.first, pair.second, pair.target, pair.reason) == ("good", "poor", "A", "")
    assert pair.difference.value == pytest.approx(auc(labels, of_a) - auc(labels, of_b))
    assert pair.p_delong == pair.p_holm == test.p < 0.05
    assert pair.p_bootstrap == pytest.approx(test.p, abs=0.02)
    assert pair.difference.low == pytest.approx(test.difference.low, abs=0.04)
    assert pair.difference.high == pytest.approx(test.difference.high, abs=0.04)
    assert found.aucs["good", "A"].value == auc(labels, of_a)
    assert found.aucs["good", "A"].low < found.aucs["good", "A"].value < found.aucs["good", "A"].high
    assert (found.models, found.targets, found.unit, found.patient_count) == (("good", "poor"), ("A",), "patient", 80)
    assert found.excluded == {"good": (), "poor": ()}
    assert found.partial_labels == ()


def test_paired_interval_is_narrower_than_that_of_an_auc():
    a = predict_patients(0.5)
    b = [replace(each, logits={"A": each.logits["A"] + 0.2 * (number % 3)}) for number, each in enumerate(a)]
    found = compare_models({"a": [a], "b": [b]}, target_kinds(["A"]), "patient", resamples=500)
    (pair,) = found.pairs
    of_a = found.aucs["a", "A"]
    assert pair.difference.high - pair.difference.low < 0.6 * (of_a.high - of_a.low)


@settings(max_examples=25)
@given(st.lists(st.tuples(st.booleans(), st.integers(-3, 3), st.integers(-3, 3)), min_size=2, max_size=20))
def test_differences_are_antisymmetric_and_zero_for_equal_models(units):
    a, b = (
        [Prediction(f"s{i}", f"p{i}", None, None, {"A": int(each[0])}, {"A": float(each[k])}, 1)
         for i, each in enumerate(units)]
        for k in (1, 2)
    )  # fmt: skip
    one = compare_models({"a": [a], "b": [b], "c": [a]}, target_kinds(["A"]), "slide", resamples=60)
    other = compare_models({"b": [b], "a": [a]}, target_kinds(["A"]), "slide", resamples=60).pairs[0]
    by_pair = {(pair.first, pair.second): pair for pair in one.pairs}
    forward, itself = by_pair["a", "b"], by_pair["a", "c"]
    if forward.difference.value is None:
        assert forward.difference.reason
        assert forward.p_bootstrap is forward.p_delong is forward.p_holm is None
        return
    assert forward.difference.value == -other.difference.value
    assert (forward.p_bootstrap, forward.p_delong) == (other.p_bootstrap, other.p_delong)
    if forward.difference.low is not None:
        assert forward.difference.low <= forward.difference.value <= forward.difference.high
        assert forward.difference.low == pytest.approx(-other.difference.high)
    assert itself.difference.value == 0
    assert itself.p_bootstrap in (1, None)
    assert itself.p_delong in (1, None)


def test_all_pairs_or_pairs_against_one_model():
    models = {name: [predict_patients(noise)] for name, noise in (("x", 0.5), ("y", 1.0), ("z", 2.0))}
    found = compare_models(models, target_kinds(["A"]), "patient", resamples=100)
    assert [(pair.first, pair.second) for pair in found.pairs] == [("x", "y"), ("x", "z"), ("y", "z")]
    assert [pair.p_holm for pair in found.pairs] == holm_correction([pair.p_delong for pair in found.pairs])
    assert all(pair.p_holm >= pair.p_delong for pair in found.pairs)
    against = compare_models(models, target_kinds(["A"]), "patient", resamples=100, against="y")
    assert [(pair.first, pair.second) for pair in against.pairs] == [("x", "y"), ("z", "y")]
    assert against.pairs[0].difference == found.pairs[0].difference
    assert against.pairs[1].difference.value == -found.pairs[2].difference.value


def test_mean_over_targets_is_compared_and_corrected_separately():
    models = {
        name: [predict_patients(noise, targets=("A", "B"))] for name, noise in (("x", 0.5), ("y", 1.0), ("z", 2.0))
    }
    found = compare_models(models, target_kinds(["A", "B"]), "patient", resamples=300)
    assert [pair.target for pair in found.pairs] == ["A"] * 3 + ["B"] * 3 + ["macro"] * 3
    for name in models:
        mean = (found.aucs[name, "A"].value + found.aucs[name, "B"].value) / 2
        assert found.aucs[name, "macro"].value == pytest.approx(mean)
    macro = found.pairs[6:]
    assert all(pair.p_delong is None and "single target" in pair.reason for pair in macro)
    assert [pair.p_holm for pair in macro] == holm_correction([pair.p_bootstrap for pair in macro])
    widths = {t: found.aucs["x", t].high - found.aucs["x", t].low for t in ("A", "B", "macro")}
    assert widths["macro"] < max(widths["A"], widths["B"])


def test_auc_of_several_seeds_is_their_mean():
    seeds = [predict_patients(0.8, seed=seed) for seed in range(3)]
    other = predict_patients(1.5)
    found = compare_models({"many": seeds, "one": [other]}, target_kinds(["A"]), "patient", resamples=200)
    labels = np.array([each.labels["A"] == 1 for each in other])
    mean = np.mean([auc(labels, np.array([each.logits["A"] for each in one])) for one in seeds])
    (pair,) = found.pairs
    assert found.aucs["many", "A"].value == pytest.approx(mean)
    assert pair.difference.value == pytest.approx(mean - auc(labels, np.array([each.logits["A"] for each in other])))
    assert (pair.p_delong, pair.p_holm) == (None, pair.p_bootstrap)
    assert "means over seeds" in pair.reason
    shuffled = compare_models({"a": seeds, "b": seeds[::-1]}, target_kinds(["A"]), "patient", resamples=200).pairs[0]
    assert shuffled.difference.value == pytest.approx(0, abs=1e-15)
    assert shuffled.p_bootstrap == 1


def test_patients_that_a_model_lacks_are_excluded():
    a, b = predict_patients(0.5), predict_patients(1.0)
    found = compare_models({"a": [a[3:], a[2:]], "b": [b[:-1]]}, target_kinds(["A"]), "patient", resamples=50)
    assert found.patient_count == 76
    assert found.excluded == {"a": ("p002", "p079"), "b": ("p000", "p001", "p002")}
    alone = compare_models({"a": [a[3:-1], a[3:-1]], "b": [b[3:-1]]}, target_kinds(["A"]), "patient", resamples=50)
    assert alone.pairs == found.pairs
    other_split = [replace(each, split="all") for each in b[:-1]]
    assert (
        compare_models({"a": [a[3:], a[2:]], "b": [other_split]}, target_kinds(["A"]), "patient", resamples=50) == found
    )


def test_slides_are_matched_if_the_unit_is_slide():
    a = [replace(each, slide_id=f"{each.slide_id}-{k}") for each in predict_patients(0.5, count=40) for k in range(2)]
    b = [replace(each, slide_id=f"{each.slide_id}-{k}") for each in predict_patients(1.0, count=40) for k in range(2)]
    found = compare_models({"a": [a], "b": [b[1:]]}, target_kinds(["A"]), "slide", resamples=50)
    assert found.patient_count == 40
    assert found.excluded == {"a": ("p000 (slide s0-0)",), "b": ()}
    assert found.pairs[0].p_delong is None
    assert "independent" in found.pairs[0].reason


def test_patient_is_pooled_from_the_same_slides_in_all_models():
    """The slides of a patient may have different labels, so the patient label depends on the slides used."""
    a, b = (
        [
            replace(each, slide_id=f"{each.slide_id}-{k}", labels={"A": each.labels["A"] * k}, logits=logits)
            for each in predict_patients(noise, count=40)
            for k in range(2)
            for logits in ({"A": each.logits["A"] + 3 * k},)
        ]
        for noise in (0.5, 1.0)
    )
    positive = next(number for number, each in enumerate(a) if each.labels["A"])
    del b[positive]
    found = compare_models({"a": [a], "b": [b]}, target_kinds(["A"]), "patient", resamples=50)
    excluded = a.pop(positive)
    assert found.excluded == {"a": (f"{excluded.patient_id} (slide {excluded.slide_id})",), "b": ()}
    assert found.pairs == compare_models({"a": [a], "b": [b]}, target_kinds(["A"]), "patient", resamples=50).pairs
    other_slides = [replace(each, slide_id=f"{each.slide_id} again") for each in b]
    no_shared_slides = compare_models({"a": [a], "b": [other_slides]}, target_kinds(["A"]), "patient", resamples=50)
    assert (no_shared_slides.pairs, no_shared_slides.excluded) == (found.pairs, {"a": (), "b": ()}), (
        "patients without a shared slide keep all their slides"
    )


def test_different_labels_are_rejected_and_missing_labels_filled():
    a, b = predict_patients(0.5), predict_patients(1.0)
    wrong = [replace(each, labels={"A": 1 - each.labels["A"]}) if n < 12 else each for n, each in enumerate(b)]
    with pytest.raises(InputError, match=r"different labels for A of p000 \(slide s0\), .* and 2 more") as error:
        compare_models({"a": [a], "b": [wrong]}, target_kinds(["A"]), "slide")
    assert "same cohort table" in error.value.hint
    with pytest.raises(InputError, match="A of p000"):
        compare_models({"a": [a], "b": [wrong]}, target_kinds(["A"]), "patient")
    unknown = [replace(each, labels={"A": None}) if n == 5 else each for n, each in enumerate(b)]
    found = compare_models({"a": [a], "b": [unknown]}, target_kinds(["A"]), "patient", resamples=50)
    assert found.partial_labels == ("p005: A",)
    assert found.pairs == compare_models({"a": [a], "b": [b]}, target_kinds(["A"]), "patient", resamples=50).pairs


def test_invalid_comparisons_are_rejected():
    a = predict_patients(0.5)
    with pytest.raises(InputError, match="No patient is in all") as error:
        compare_models({"a": [a], "b": [predict_patients(1.0, cohort="tcga")]}, target_kinds(["A"]), "patient")
    assert "b: patient 'p000' of cohort 'tcga'" in error.value.hint
    with pytest.raises(InputError, match="No patient") as error:
        compare_models({"a": [a], "b": [[]]}, target_kinds(["A"]), "patient")
    assert "b: no patients" in error.value.hint
    other_slides = [replace(each, slide_id=f"{each.slide_id} again") for each in a]
    with pytest.raises(InputError, match="No slide is in all") as error:
        compare_models({"a": [a], "b": [other_slides]}, target_kinds(["A"]), "slide")
    assert "--unit patient" in error.value.hint
    with pytest.raises(InputError, match="at least two models; got 1"):
        compare_models({"a": [a]}, target_kinds(["A"]), "patient")
    with pytest.raises(InputError, match="'b' has no predictions"):
        compare_models({"a": [a], "b": []}, target_kinds(["A"]), "patient")
    with pytest.raises(InputError, match="'b' has two predictions for slide 's0'"):
        compare_models({"a": [a], "b": [[a[0], replace(a[0], split="val")]]}, target_kinds(["A"]), "patient")
    with pytest.raises(UnknownNameError, match="named 'c'"):
        compare_models({"a": [a], "b": [a]}, target_kinds(["A"]), "patient", against="c")


def test_no_test_with_one_class_or_one_positive_patient():
    a, b = ([replace(e, labels={"A": 0}) for e in predict_patients(noise)] for noise in (0.5, 1.0))
    found = compare_models({"a": [a], "b": [b]}, target_kinds(["A"]), "patient", resamples=20)
    assert found.aucs["a", "A"].reason == found.pairs[0].difference.reason == "no positive patient among 80"
    a, b = (
        [replace(e, labels={"A": int(e.slide_id == "s0")}) for e in predict_patients(noise)] for noise in (0.5, 1.0)
    )
    (pair,) = compare_models({"a": [a], "b": [b]}, target_kinds(["A"]), "patient", resamples=20).pairs
    assert pair.difference.value is not None
    assert (pair.difference.low, pair.p_bootstrap, pair.p_delong) == (None, None, None)
    assert pair.difference.reason == "no confidence interval: only one positive patient"
    assert "positive patient" in pair.reason


def test_p_values_of_equally_good_models_are_rarely_significant():
    p_values = []
    for seed in range(60):
        rng = np.random.default_rng(seed)
        labels = np.repeat([0, 1], 30)
        a, b = (
            [Prediction(f"{i}", f"{i}", None, None, {"A": int(label)}, {"A": float(label + rng.normal())}, 1)
             for i, label in enumerate(labels)]
            for _ in "ab"
        )  # fmt: skip
        p_values.append(
            compare_models({"a": [a], "b": [b]}, target_kinds(["A"]), "patient", resamples=200).pairs[0].p_bootstrap
        )
    assert np.mean(np.array(p_values) <= 0.05) <= 0.12
    assert 0.3 <= np.mean(p_values) <= 0.7
