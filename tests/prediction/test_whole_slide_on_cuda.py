"""Whole slides on a GPU: the memory that there is decides the batch, and says the same."""

import pytest
import torch
from support import randomise

from tapfm.aggregators.catalog import build_aggregator
from tapfm.encoders.build import build_vit
from tapfm.encoders.catalog import encoder_card
from tapfm.encoders.vit import VitEncoder
from tapfm.model import SlideModel
from tapfm.prediction.whole_slide import Models
from tapfm.tasks.binary import BinaryTask

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def model(compute_dtype=None):
    card = encoder_card("uni")
    torch.manual_seed(0)
    vit = build_vit(card, extra={"depth": 4})
    encoder = VitEncoder(vit, mean=card.mean, std=card.std, feature=card.feature).cuda()
    aggregator = build_aggregator("cls-attention", encoder.feature_size, 1).cuda()
    randomise(aggregator)
    return SlideModel(encoder, aggregator, BinaryTask.from_training_labels("FGFR3", [0, 1]), compute_dtype)


def tiles(count):
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, 256, (count, 3, 224, 224), generator=generator, dtype=torch.uint8)


def asked(models, count=512):
    return models.ask("S1", models.encode(tiles(count), 64), None)


def test_a_batch_that_does_not_fit_is_halved_until_it_does():
    one, told = model(), []
    expected = asked(Models([one], batch=16))
    free, total = torch.cuda.mem_get_info()
    torch.cuda.empty_cache()
    room = torch.cuda.memory_reserved() + 2**30
    assert room < free
    torch.cuda.set_per_process_memory_fraction(room / total)
    try:
        found = asked(Models([one], batch=512, may_shrink=True, shrunk=told.append))
        with pytest.raises(torch.OutOfMemoryError):
            asked(Models([one], batch=512))
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert told
    assert told == [512 >> shift for shift in range(1, len(told) + 1)]
    assert found.logits["FGFR3"] == pytest.approx(expected.logits["FGFR3"], abs=1e-3)


def test_bfloat16_says_almost_the_same_and_contributions_still_add_up():
    exact, fast = (asked(Models([model(dtype)], batch=64)) for dtype in (None, torch.bfloat16))
    assert fast.logits["FGFR3"] == pytest.approx(exact.logits["FGFR3"], abs=0.05)
    for whole in (exact, fast):
        total = whole.constants["FGFR3"] + whole.columns["contribution.FGFR3"].sum()
        assert total == pytest.approx(whole.logits["FGFR3"], abs=1e-4)
