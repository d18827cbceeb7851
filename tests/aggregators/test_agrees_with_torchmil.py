"""ABMIL, CLAM-SB and DSMIL have the outputs, losses and gradients of torchmil, with the same weights, in float64.

The models of torchmil do not project the features first, so the projection of ours is replaced by the identity.
"""

import pytest
import torch
from support import randomise
from torch import nn

from tapfm.aggregators.abmil import Abmil
from tapfm.aggregators.clam import Clam
from tapfm.aggregators.dsmil import Dsmil
from tapfm.aggregators.torchmil_models import _SmoothSvmLoss as SmoothSvmLoss
from tapfm.tasks.binary import BinaryTask
from tapfm.tasks.class_weights import ClassWeights
from tapfm.tasks.cross_entropy import encode_labels

models = pytest.importorskip("torchmil.models")

SIZE, TILES = 8, 25
EXACT = {"rtol": 1e-10, "atol": 1e-12}
UNWEIGHTED = BinaryTask("FGFR3", ClassWeights(1.0, 1.0, 1.0))  # like torchmil's cross-entropy


@pytest.fixture(autouse=True)
def use_float64(monkeypatch):
    """Make torchmil compute its losses in float64: it converts every input to float32."""
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)


def random_features():
    return torch.randn(TILES, SIZE, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def pair_attention_layers(scores, pool):
    pairs = {scores.content[0]: pool.fc1.module, scores.score: pool.fc2}
    if scores.gate is not None:
        pairs[scores.gate[0]] = pool.fc_gated.module
    return pairs


def copy_weights(pairs, ours, theirs):
    """Copy the weights of torchmil's layers to ours; return the corresponding parameters."""
    randomise(theirs)
    matching = {}
    with torch.no_grad():
        for mine, yours in pairs.items():
            for name, parameter in mine.named_parameters():
                parameter.copy_(yours.get_parameter(name).view_as(parameter))
                matching[parameter] = yours.get_parameter(name)
    assert set(matching) == set(ours.parameters())
    assert set(matching.values()) == set(theirs.parameters())
    return matching


def assert_same_gradients(ours, theirs, matching, label):
    """Compare the gradients of the total loss with respect to the features and all parameters."""
    z_KD, x = random_features().requires_grad_(), random_features().requires_grad_()
    targets = encode_labels([label])
    output = ours(z_KD, torch.zeros(TILES, dtype=torch.float64))
    loss = UNWEIGHTED.loss(output.logits_C, targets)
    if output.extra_loss is not None:
        loss = loss + output.extra_loss(UNWEIGHTED, targets)
    loss.backward()
    _, losses = theirs.compute_loss(torch.tensor([float(label)]), x[None])
    sum(losses.values()).backward()
    torch.testing.assert_close(loss, sum(losses.values()), **EXACT)
    torch.testing.assert_close(z_KD.grad, x.grad, **EXACT)
    for mine, yours in matching.items():
        torch.testing.assert_close(mine.grad, yours.grad.view_as(mine), **EXACT)
        assert mine.grad.norm() > 0


@pytest.mark.parametrize("gated", [True, False], ids=["gated", "plain"])
@pytest.mark.parametrize("label", [0, 1])
def test_abmil(gated, label):
    ours = Abmil(SIZE, hidden=SIZE, attention=4, gated=gated).double()
    ours.project = nn.Identity()
    theirs = models.ABMIL(in_shape=(SIZE,), att_dim=4, gated=gated).double()
    pairs = pair_attention_layers(ours.scores, theirs.pool) | {ours.classifier: theirs.classifier.module}
    matching = copy_weights(pairs, ours, theirs)
    output, (logit, scores) = ours(random_features(), None), theirs(random_features()[None], return_att=True)
    torch.testing.assert_close(output.logits_C, logit, **EXACT)
    torch.testing.assert_close(output.tile_weights, scores[0].softmax(0), **EXACT)
    assert_same_gradients(ours, theirs, matching, label)


def build_clam_pair(margin):
    # torchmil adds the losses of both tile classifiers to the slide loss; ours, like the original, uses their mean
    ours = Clam(SIZE, hidden=SIZE, attention=4, instances=6, instance_weight=2 / 3, margin=margin).double()
    ours.project = nn.Identity()
    theirs = models.CLAM_SB(in_shape=(SIZE,), att_dim=4, gated=True, k_sample=6).double()
    return ours, theirs


def copy_clam_weights(ours, theirs):
    """Copy the weights; ours has both tile classifiers, for slide labels 0 and 1, in one layer."""
    instance = ours.instance_classifiers
    del ours.instance_classifiers  # copied and compared separately
    pairs = pair_attention_layers(ours.scores, theirs.pool) | {ours.classifier: theirs.classifier.module}
    others = theirs.inst_classifiers
    del theirs.inst_classifiers
    matching = copy_weights(pairs, ours, theirs)
    ours.instance_classifiers, theirs.inst_classifiers = instance, others
    randomise(others, seed=1)
    with torch.no_grad():
        instance.weight.copy_(torch.cat([each.module.weight for each in others]))
        instance.bias.copy_(torch.cat([each.module.bias for each in others]))
    return matching


@pytest.mark.parametrize("label", [0, 1])
@pytest.mark.parametrize("margin", [0.0, 1.0], ids=["cross-entropy", "smooth SVM"])
def test_clam_with_one_branch(label, margin):
    """The instance losses of torchmil are broken (see `_SmoothSvmLoss`), so they are replaced."""
    ours, theirs = build_clam_pair(margin)
    matching = copy_clam_weights(ours, theirs)
    theirs.inst_loss_fn = SmoothSvmLoss() if margin else CrossEntropy()
    output, (logit, scores) = ours(random_features(), None), theirs(random_features()[None], return_att=True)
    torch.testing.assert_close(output.logits_C, logit, **EXACT)
    torch.testing.assert_close(output.tile_weights, scores[0].softmax(0), **EXACT)
    targets, labels = encode_labels([label]), torch.tensor([float(label)])
    instance_loss = theirs.compute_inst_loss(scores, random_features()[None], labels)
    torch.testing.assert_close(output.extra_loss(UNWEIGHTED, targets), instance_loss, **EXACT)
    assert_same_gradients(ours, theirs, matching, label)
    gradients = [each.module.weight.grad for each in theirs.inst_classifiers]
    torch.testing.assert_close(ours.instance_classifiers.weight.grad, torch.cat(gradients), **EXACT)


class CrossEntropy(nn.Module):
    def forward(self, logits, classes):
        return nn.functional.cross_entropy(logits, classes.squeeze(-1).long())


def test_smooth_svm_loss_is_cross_entropy_with_margin_1():
    logits = torch.randn(6, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for label in (0, 1):
        difference = logits[:, label] - logits[:, 1 - label]
        ours = SmoothSvmLoss()(logits, torch.full((6, 1), float(label)))
        torch.testing.assert_close(ours, torch.log1p(torch.exp(1 - difference)).mean())


@pytest.mark.parametrize("nonlinear", [True, False], ids=["two layers", "one layer"])
@pytest.mark.parametrize("values", [True, False], ids=["values", "no values"])
@pytest.mark.parametrize("label", [0, 1])
def test_dsmil(nonlinear, values, label):
    ours = Dsmil(SIZE, attention=4, nonlinear=nonlinear, values=values).double()
    theirs = models.DSMIL(in_shape=(SIZE,), att_dim=4, nonlinear_q=nonlinear, nonlinear_v=values).double()
    pairs = {ours.instance_classifier: theirs.inst_classifier, ours.classifier: theirs.bag_classifier}
    pairs |= {ours.query: theirs.q_nn, ours.value: theirs.v_nn}
    matching = copy_weights(pairs, ours, theirs)
    output, (logit, weights) = ours(random_features(), None), theirs(random_features()[None], return_att=True)
    torch.testing.assert_close(output.logits_C, logit, **EXACT)
    torch.testing.assert_close(output.tile_weights[0], weights[0, :, 0], **EXACT)
    assert_same_gradients(ours, theirs, matching, label)
