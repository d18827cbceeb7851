"""Eq. 4: weighted cross-entropy, with weights from the training split and without missing labels."""

import math

import pytest
import torch

from tapfm.errors import LabelError
from tapfm.tasks.binary import BinaryTask
from tapfm.tasks.class_weights import ClassWeights
from tapfm.tasks.cross_entropy import encode_labels
from tapfm.tasks.multilabel import MultiLabelTask


def log_sigmoid(x):
    return -math.log(1 + math.exp(-x))


def test_class_weights_count_only_labelled_slides():
    weights = ClassWeights.from_labels("FGFR3", [1, 0, 0, 0, None, None])  # M = 4, P = 1
    assert weights == ClassWeights(positive=4 / 2, negative=4 / 6, alpha=4)


def test_binary_loss_has_class_weights():
    task = BinaryTask.from_training_labels("FGFR3", [1, 0, 0, 0])
    logit = torch.tensor([0.7], dtype=torch.float64)
    assert task.loss(logit, encode_labels([1])).item() == pytest.approx(-2 * log_sigmoid(0.7))
    assert task.loss(logit, encode_labels([0])).item() == pytest.approx(-(2 / 3) * log_sigmoid(-0.7))
    assert task.target_kinds["FGFR3"].activate(0.7) == pytest.approx(math.exp(log_sigmoid(0.7)))


def test_both_classes_have_the_same_total_weight():
    labels = [1] * 16 + [0] * 84
    task = BinaryTask.from_training_labels("FGFR3", labels)
    zero = torch.zeros(1)
    by_class = {y: sum(task.loss(zero, encode_labels([y])).item() for label in labels if label == y) for y in (0, 1)}
    assert by_class[0] == pytest.approx(by_class[1])


def test_multi_label_loss_is_the_sum_over_targets_with_alpha():
    task = MultiLabelTask.from_training_labels({"EGFR": [1, 0, 0, 0], "ALK": [0, 1, None, 1]})
    assert tuple(task.target_kinds) == ("EGFR", "ALK")
    logits = torch.tensor([0.3, -1.2], dtype=torch.float64)
    egfr = 4 * 2 * -log_sigmoid(0.3)  # M = 4, P = 1: alpha 4, w_1 2
    alk = 1.5 * 1.5 * -log_sigmoid(1.2)  # M = 3, P = 2: alpha 1.5, w_0 1.5
    assert task.loss(logits, encode_labels([1, 0])).item() == pytest.approx(egfr + alk)


def test_missing_label_does_not_change_loss_or_gradient():
    task = MultiLabelTask.from_training_labels({"EGFR": [1, 0], "KRAS": [1, 0]})
    logits = torch.tensor([0.3, -1.2], requires_grad=True)
    loss = task.loss(logits, encode_labels([1, None]))
    (gradient,) = torch.autograd.grad(loss, logits)
    assert loss.item() == pytest.approx(2 * 1 * -log_sigmoid(0.3))
    assert gradient[1] == 0 != gradient[0]


def test_extreme_logits_give_a_finite_loss():
    task = BinaryTask.from_training_labels("FGFR3", [1, 0])
    assert task.loss(torch.tensor([-500.0]), encode_labels([1])).item() == pytest.approx(500)


@pytest.mark.parametrize(
    ("labels", "missing"), [([0, 0, None], "no positive"), ([1, 1], "no negative"), ([None], "no ")]
)
def test_training_labels_of_one_class_are_an_error(labels, missing):
    with pytest.raises(LabelError, match=missing) as caught:
        ClassWeights.from_labels("MET", labels)
    assert "MET" in str(caught.value)


def test_labels_other_than_0_and_1_are_an_error():
    with pytest.raises(LabelError, match="got 2"):
        ClassWeights.from_labels("MET", [0, 1, 2])
    with pytest.raises(LabelError, match=r"got 0\.5"):
        encode_labels([0.5])
