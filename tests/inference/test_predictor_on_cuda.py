"""The predictor on a GPU: a batch that does not fit is halved, with the same result."""

import numpy as np
import pytest
import torch
from support import randomise

from tapfm.aggregators.catalog import build_aggregator
from tapfm.encoders.build import build_vit
from tapfm.encoders.catalog import find_encoder_card
from tapfm.encoders.inference import wrap_encoder
from tapfm.encoders.vit import VitEncoder
from tapfm.inference.bags import Bag, BagRequest
from tapfm.inference.predictor import InferenceModel, Predictor
from tapfm.runs.model import SlideModel
from tapfm.tasks.binary import BinaryTask

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def build_model(compute_dtype=None):
    card = find_encoder_card("uni")
    torch.manual_seed(0)
    vit = build_vit(card, extra={"depth": 4})
    encoder = VitEncoder(vit, mean=card.mean, std=card.std, feature=card.feature).cuda()
    aggregator = build_aggregator("cls-attention", encoder.feature_size, 1).cuda()
    randomise(aggregator)
    return SlideModel(encoder, aggregator, BinaryTask.from_training_labels("FGFR3", [0, 1]), compute_dtype)


def random_tiles(count):
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, 256, (count, 3, 224, 224), generator=generator, dtype=torch.uint8)


class OneBag:
    def read_parts(self, request):  # noqa: ARG002
        yield Bag(random_tiles(512), np.arange(512))


def predict(model, batch, **settings):
    model.train(False)
    predictor = Predictor(
        [InferenceModel(wrap_encoder(model.encoder, model.compute_dtype), model)], batch=batch, **settings
    )
    return predictor.predict("S1", predictor.encode_slide(OneBag(), BagRequest("inference", "S1")))


def test_batch_is_halved_until_it_fits_into_memory():
    model, messages = build_model(), []
    expected = predict(model, 16)
    free, total = torch.cuda.mem_get_info()
    torch.cuda.empty_cache()
    room = torch.cuda.memory_reserved() + 2**30
    assert room < free
    torch.cuda.set_per_process_memory_fraction(room / total)
    try:
        found = predict(model, 512, on_retry=messages.append)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert messages
    assert all(f"retrying with {256 >> i}." in message for i, message in enumerate(messages))
    assert found.logits["FGFR3"] == pytest.approx(expected.logits["FGFR3"], abs=1e-3)


def test_bfloat16_logits_are_similar_and_contributions_sum_to_the_logit():
    exact, fast = (predict(build_model(dtype), 64) for dtype in (None, torch.bfloat16))
    assert fast.logits["FGFR3"] == pytest.approx(exact.logits["FGFR3"], abs=0.05)
    for output in (exact, fast):
        total = output.logit_constants["FGFR3"] + output.columns["contribution.FGFR3"].sum()
        assert total == pytest.approx(output.logits["FGFR3"], abs=1e-4)
