"""ABMIL, CLAM-SB and DSMIL against torchmil's, on copied weights, in float64: forward, losses and every gradient.

torchmil's pool the features as they are. Ours project them first, so the projection is made the identity here.
"""

import pytest
import torch
from support import randomise
from torch import nn

from tapfm.aggregators.abmil import Abmil
from tapfm.aggregators.clam import Clam
from tapfm.aggregators.dsmil import Dsmil
from tapfm.aggregators.torchmil_models import _SmoothSvm as SmoothSvm
from tapfm.tasks.binary import BinaryTask
from tapfm.tasks.cross_entropy import encode_labels
from tapfm.tasks.weights import ClassWeights

models = pytest.importorskip("torchmil.models")

SIZE, TILES = 8, 25
EXACT = {"rtol": 1e-10, "atol": 1e-12}
UNWEIGHTED = BinaryTask("FGFR3", ClassWeights(1.0, 1.0, 1.0))  # as torchmil's cross-entropy


@pytest.fixture(autouse=True)
def in_double(monkeypatch):
    """torchmil computes its losses in float32 whatever it is given."""
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)


def features():
    return torch.randn(TILES, SIZE, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def copy_pool(scores, pool):
    pairs = {scores.content[0]: pool.fc1.module, scores.score: pool.fc2}
    if scores.gate is not None:
        pairs[scores.gate[0]] = pool.fc_gated.module
    return pairs


def copied(pairs, ours, theirs):
    """Copy theirs to ours, and say which parameter is which."""
    randomise(theirs)
    same = {}
    with torch.no_grad():
        for mine, yours in pairs.items():
            for name, parameter in mine.named_parameters():
                parameter.copy_(yours.get_parameter(name).view_as(parameter))
                same[parameter] = yours.get_parameter(name)
    assert set(same) == set(ours.parameters())
    assert set(same.values()) == set(theirs.parameters())
    return same


def assert_same_gradients(ours, theirs, same, label):
    """Of the whole loss, at the features and at every parameter."""
    z_KD, x = features().requires_grad_(), features().requires_grad_()
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
    for mine, yours in same.items():
        torch.testing.assert_close(mine.grad, yours.grad.view_as(mine), **EXACT)
        assert mine.grad.norm() > 0


@pytest.mark.parametrize("gated", [True, False], ids=["gated", "plain"])
@pytest.mark.parametrize("label", [0, 1])
def test_abmil(gated, label):
    ours = Abmil(SIZE, hidden=SIZE, attention=4, gated=gated).double()
    ours.project = nn.Identity()
    theirs = models.ABMIL(in_shape=(SIZE,), att_dim=4, gated=gated).double()
    pairs = copy_pool(ours.scores, theirs.pool) | {ours.classifier: theirs.classifier.module}
    same = copied(pairs, ours, theirs)
    output, (logit, scores) = ours(features(), None), theirs(features()[None], return_att=True)
    torch.testing.assert_close(output.logits_C, logit, **EXACT)
    torch.testing.assert_close(output.tile_weights, scores[0].softmax(0), **EXACT)
    assert_same_gradients(ours, theirs, same, label)


def two_clams(margin):
    # theirs adds what is learnt of either class to the slide's loss; ours, as the original, has the mean of the two
    ours = Clam(SIZE, hidden=SIZE, attention=4, instances=6, instance_weight=2 / 3, margin=margin).double()
    ours.project = nn.Identity()
    theirs = models.CLAM_SB(in_shape=(SIZE,), att_dim=4, gated=True, k_sample=6).double()
    return ours, theirs


def copied_clam(ours, theirs):
    """Ours has its two classifiers of tiles, for slides of label 0 and 1, in one layer."""
    instance = ours.instance_classifiers
    del ours.instance_classifiers  # compared by hand
    pairs = copy_pool(ours.scores, theirs.pool) | {ours.classifier: theirs.classifier.module}
    others = theirs.inst_classifiers
    del theirs.inst_classifiers
    same = copied(pairs, ours, theirs)
    ours.instance_classifiers, theirs.inst_classifiers = instance, others
    randomise(others, seed=1)
    with torch.no_grad():
        instance.weight.copy_(torch.cat([each.module.weight for each in others]))
        instance.bias.copy_(torch.cat([each.module.bias for each in others]))
    return same


@pytest.mark.parametrize("label", [0, 1])
@pytest.mark.parametrize("margin", [0.0, 1.0], ids=["cross-entropy", "smooth SVM"])
def test_clam_of_one_branch(label, margin):
    """Their two instance losses do not run as they are meant to (see `SmoothSvm`), so they are given working ones."""
    ours, theirs = two_clams(margin)
    same = copied_clam(ours, theirs)
    theirs.inst_loss_fn = SmoothSvm() if margin else CrossEntropy()
    output, (logit, scores) = ours(features(), None), theirs(features()[None], return_att=True)
    torch.testing.assert_close(output.logits_C, logit, **EXACT)
    torch.testing.assert_close(output.tile_weights, scores[0].softmax(0), **EXACT)
    targets, labels = encode_labels([label]), torch.tensor([float(label)])
    instance_loss = theirs.compute_inst_loss(scores, features()[None], labels)
    torch.testing.assert_close(output.extra_loss(UNWEIGHTED, targets), instance_loss, **EXACT)
    assert_same_gradients(ours, theirs, same, label)
    gradients = [each.module.weight.grad for each in theirs.inst_classifiers]
    torch.testing.assert_close(ours.instance_classifiers.weight.grad, torch.cat(gradients), **EXACT)


class CrossEntropy(nn.Module):
    def forward(self, logits, classes):
        return nn.functional.cross_entropy(logits, classes.squeeze(-1).long())


def test_the_smooth_svm_is_cross_entropy_that_asks_for_a_lead_of_one():
    logits = torch.randn(6, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for label in (0, 1):
        lead = logits[:, label] - logits[:, 1 - label]
        ours = SmoothSvm()(logits, torch.full((6, 1), float(label)))
        torch.testing.assert_close(ours, torch.log1p(torch.exp(1 - lead)).mean())


@pytest.mark.parametrize("nonlinear", [True, False], ids=["two layers", "one layer"])
@pytest.mark.parametrize("values", [True, False], ids=["values", "no values"])
@pytest.mark.parametrize("label", [0, 1])
def test_dsmil(nonlinear, values, label):
    ours = Dsmil(SIZE, attention=4, nonlinear=nonlinear, values=values).double()
    theirs = models.DSMIL(in_shape=(SIZE,), att_dim=4, nonlinear_q=nonlinear, nonlinear_v=values).double()
    pairs = {ours.instance_classifier: theirs.inst_classifier, ours.classifier: theirs.bag_classifier}
    pairs |= {ours.query: theirs.q_nn, ours.value: theirs.v_nn}
    same = copied(pairs, ours, theirs)
    output, (logit, weights) = ours(features(), None), theirs(features()[None], return_att=True)
    torch.testing.assert_close(output.logits_C, logit, **EXACT)
    torch.testing.assert_close(output.tile_weights[0], weights[0, :, 0], **EXACT)
    assert_same_gradients(ours, theirs, same, label)
