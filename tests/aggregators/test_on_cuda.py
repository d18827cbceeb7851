"""Every aggregator on a GPU, against the CPU: nothing of it stays behind on the host."""

import copy

import pytest
import torch
from bags_of_tiles import KINDS, THREE_TARGETS, bag, built
from support import POSITIVE, TASK, whole_loss

from tapfm.aggregators.catalog import build_aggregator
from tapfm.aggregators.torchmil_catalog import TORCHMIL_MODELS
from tapfm.contracts import Targets
from tapfm.runs.model import SlideModel
from tapfm.tasks.cross_entropy import encode_labels

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")


def compare(aggregator, task, targets, z_KD, r_K, places=None):
    on_gpu = copy.deepcopy(aggregator).cuda()
    outputs = []
    for module, device in ((aggregator, "cpu"), (on_gpu, "cuda")):
        leaf = z_KD.detach().to(device).requires_grad_()  # of its own: a tensor made from a leaf is none
        labels = Targets(targets.labels_C.to(device), targets.known_C.to(device))
        output = SlideModel(None, module, task).aggregator_for(places)(leaf, r_K.to(device))
        loss = whole_loss(output, task, labels)
        loss.backward()
        outputs.append(
            (output.logits_C.detach().cpu(), output.heatmap_scores.detach().cpu(), loss.detach().cpu(), leaf.grad.cpu())
        )
    for ours, theirs in zip(*outputs, strict=True):
        torch.testing.assert_close(theirs, ours, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_a_gpu_gives_what_a_cpu_gives(kind):
    compare(built(kind), THREE_TARGETS, encode_labels([1, None, 0]), *bag(50))


@pytest.mark.parametrize("model", TORCHMIL_MODELS)
def test_a_model_of_torchmil_on_a_gpu_gives_what_it_gives_on_a_cpu(model):
    pytest.importorskip("torchmil")
    torch.manual_seed(0)
    aggregator = build_aggregator(f"torchmil:{model}", 8, 1).eval()
    z_KD, r_K = (each.float() for each in bag(50))
    places = torch.stack([torch.arange(50) % 7, torch.arange(50) // 7], 1).float()
    compare(aggregator, TASK, POSITIVE, z_KD, r_K, places)


@pytest.mark.parametrize("tiles", [1, 13, 1000, 3001])
def test_cls_gated_starts_as_cls_attention_bit_for_bit(tiles):
    logits = []
    for name in ("cls-gated", "cls-attention"):
        torch.manual_seed(0)
        aggregator = build_aggregator(name, 384, 3).cuda()
        logits.append(aggregator(*(each.float().cuda() for each in bag(tiles, 384))).logits_C)
    assert torch.equal(*logits)
