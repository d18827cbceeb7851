"""Label smoothing and class weights, including those of the authors' scripts, with known values."""

import math

import pytest
import torch

from tapfm.errors import LabelError, SettingError
from tapfm.tasks.binary import BinaryTask
from tapfm.tasks.class_weights import ClassWeights
from tapfm.tasks.class_weights import _reference_weights as reference_weights
from tapfm.tasks.cross_entropy import encode_labels
from tapfm.tasks.multilabel import MultiLabelTask

QUARTER = [1, 0, 0, 0, None]  # p = 1/4
HALF = [1, 0, 0, 1, None]  # p = 1/2


def cross_entropy(label, logit):
    probability = 1 / (1 + math.exp(-logit))
    return -label * math.log(probability) - (1 - label) * math.log(1 - probability)


def make_logits(*values):
    return torch.tensor(values, dtype=torch.float64, requires_grad=True)


@pytest.mark.parametrize(("label", "weight", "smoothed"), [(1, 2.0, 0.95), (0, 2 / 3, 0.05)])
def test_balanced_weights_do_not_depend_on_smoothing(label, weight, smoothed):
    task = BinaryTask.from_training_labels("FGFR3", QUARTER, smoothing=0.1)
    loss = task.loss(make_logits(0.7), encode_labels([label]))
    assert loss.item() == pytest.approx(weight * cross_entropy(smoothed, 0.7))


# p = 1/4. Hard labels: 1 - p and p. Smoothed by 0.1: 0.95 x 0.75 + 0.05 x 0.25 and 0.05 x 0.75 + 0.95 x 0.25.
@pytest.mark.parametrize(
    ("smoothing", "label", "weight", "smoothed"),
    [(0.0, 1, 0.75, 1), (0.0, 0, 0.25, 0), (0.1, 1, 0.725, 0.95), (0.1, 0, 0.275, 0.05)],
)
def test_reference_weights_depend_on_smoothing(smoothing, label, weight, smoothed):
    task = BinaryTask.from_training_labels("FGFR3", QUARTER, smoothing=smoothing, weighting="reference")
    loss = task.loss(make_logits(0.7), encode_labels([label]))
    assert loss.item() == pytest.approx(weight * cross_entropy(smoothed, 0.7))


def test_reference_alphas_have_mean_1():
    # 1/p = 4 and 2: c = 4 x 2/6 and 2 x 2/6
    task = MultiLabelTask.from_training_labels({"EGFR": QUARTER, "KRAS": HALF}, smoothing=0.1, weighting="reference")
    loss = task.loss(make_logits(0.3, -1.2), encode_labels([1, 0]))
    egfr, kras = 4 / 3 * 0.725 * cross_entropy(0.95, 0.3), 2 / 3 * 0.5 * cross_entropy(0.05, -1.2)
    assert loss.item() == pytest.approx(egfr + kras)


def test_reference_alpha_of_a_single_target_is_1():
    weights = reference_weights({"FGFR3": QUARTER}, 0.0)["FGFR3"]
    assert weights == ClassWeights(positive=0.75, negative=0.25, alpha=1.0)
    labels = {"FGFR3": QUARTER}
    one = MultiLabelTask.from_training_labels(labels, smoothing=0.1, weighting="reference")
    binary = BinaryTask.from_training_labels("FGFR3", QUARTER, smoothing=0.1, weighting="reference")
    assert torch.equal(
        one.loss(make_logits(0.7), encode_labels([1])), binary.loss(make_logits(0.7), encode_labels([1]))
    )


@pytest.mark.parametrize("weighting", ["balanced", "reference"])
def test_gradient_is_the_difference_to_the_smoothed_label(weighting):
    task = BinaryTask.from_training_labels("FGFR3", HALF, smoothing=0.2, weighting=weighting)
    for label, smoothed, weight in [(1, 0.9, task.weights.positive), (0, 0.1, task.weights.negative)]:
        logit = make_logits(0.7)
        (gradient,) = torch.autograd.grad(task.loss(logit, encode_labels([label])), logit)
        assert gradient.item() == pytest.approx(weight * (1 / (1 + math.exp(-0.7)) - smoothed))
        at_smoothed_label = make_logits(math.log(smoothed / (1 - smoothed)))  # the minimum of the loss
        (gradient,) = torch.autograd.grad(task.loss(at_smoothed_label, encode_labels([label])), at_smoothed_label)
        assert gradient.item() == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize("weighting", ["balanced", "reference"])
def test_missing_label_has_no_loss_and_no_gradient(weighting):
    task = MultiLabelTask.from_training_labels({"EGFR": QUARTER, "KRAS": HALF}, smoothing=0.1, weighting=weighting)
    both = make_logits(0.3, -1.2)
    loss = task.loss(both, encode_labels([None, 1]))
    (gradient,) = torch.autograd.grad(loss, both)
    weights = task.weights[1]
    assert loss.item() == pytest.approx(weights.alpha * weights.positive * cross_entropy(0.95, -1.2))
    assert gradient[0] == 0 != gradient[1]


@pytest.mark.parametrize("smoothing", [-0.1, 1.0, float("nan")])
def test_invalid_smoothing_is_rejected(smoothing):
    with pytest.raises(SettingError, match="less than 1"):
        BinaryTask.from_training_labels("FGFR3", HALF, smoothing=smoothing)
    with pytest.raises(SettingError, match="less than 1"):
        MultiLabelTask.from_training_labels({"FGFR3": HALF}, smoothing=smoothing, weighting="reference")


def test_unknown_weighting_is_rejected():
    with pytest.raises(SettingError, match="'balanced' or 'reference'; got 'none'"):
        BinaryTask.from_training_labels("FGFR3", HALF, weighting="none")


def test_reference_weights_need_both_classes():
    with pytest.raises(LabelError, match="'MET' has no positive"):
        MultiLabelTask.from_training_labels({"EGFR": HALF, "MET": [0, 0]}, weighting="reference")
