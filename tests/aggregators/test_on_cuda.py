"""Every aggregator gives the same output on a GPU as on the CPU."""

import copy

import pytest
import torch
from example_bags import THREE_TARGETS, VARIANTS, build_variant, random_bag
from support import POSITIVE, TASK, total_loss

from tapfm.aggregators.catalog import build_aggregator
from tapfm.aggregators.torchmil_catalog import TORCHMIL_MODELS
from tapfm.contracts import Targets
from tapfm.runs.model import SlideModel
from tapfm.tasks.cross_entropy import encode_labels

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")


def compare_gpu_with_cpu(aggregator, task, targets, z_KD, r_K, positions=None):
    on_gpu = copy.deepcopy(aggregator).cuda()
    outputs = []
    for module, device in ((aggregator, "cpu"), (on_gpu, "cuda")):
        leaf = z_KD.detach().to(device).requires_grad_()  # a new leaf on this device
        labels = Targets(targets.labels_C.to(device), targets.known_C.to(device))
        output = SlideModel(None, module, task).aggregator_for(positions)(leaf, r_K.to(device))
        loss = total_loss(output, task, labels)
        loss.backward()
        outputs.append(
            (output.logits_C.detach().cpu(), output.heatmap_scores.detach().cpu(), loss.detach().cpu(), leaf.grad.cpu())
        )
    for ours, theirs in zip(*outputs, strict=True):
        torch.testing.assert_close(theirs, ours, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("variant", VARIANTS)
def test_aggregator(variant):
    compare_gpu_with_cpu(build_variant(variant), THREE_TARGETS, encode_labels([1, None, 0]), *random_bag(50))


@pytest.mark.parametrize("model", TORCHMIL_MODELS)
def test_torchmil_model(model):
    pytest.importorskip("torchmil")
    torch.manual_seed(0)
    aggregator = build_aggregator(f"torchmil:{model}", 8, 1).eval()
    z_KD, r_K = (each.float() for each in random_bag(50))
    positions = torch.stack([torch.arange(50) % 7, torch.arange(50) // 7], 1).float()
    compare_gpu_with_cpu(aggregator, TASK, POSITIVE, z_KD, r_K, positions)


@pytest.mark.parametrize("tiles", [1, 13, 1000, 3001])
def test_untrained_cls_gated_is_bit_identical_to_cls_attention(tiles):
    logits = []
    for name in ("cls-gated", "cls-attention"):
        torch.manual_seed(0)
        aggregator = build_aggregator(name, 384, 3).cuda()
        logits.append(aggregator(*(each.float().cuda() for each in random_bag(tiles, 384))).logits_C)
    assert torch.equal(*logits)
