"""The predictor: logits and tile scores of a slide, ensembles, out-of-memory retry, failures."""

import gc
import threading
import weakref

import numpy as np
import pytest
import torch
from support import random_tiles, randomise, small_encoder
from training_slides import make_bags, make_learner, write_slides

from tapfm.aggregators.catalog import build_aggregator
from tapfm.encoders.inference import prepare_encoder
from tapfm.errors import DeviceMemoryError, InputError, Interrupted, NonFiniteError, TileStoreError
from tapfm.inference import bags as bags_module
from tapfm.inference.bags import Bag, BagRequest, SlideFailed
from tapfm.inference.predictor import InferenceModel, Predictor
from tapfm.inference.predictor import _tee as tee
from tapfm.runs.model import SlideModel
from tapfm.tasks.binary_target import _sigmoid as sigmoid
from tapfm.tasks.catalog import build_task

TARGETS = ("EGFR", "KRAS")


def build_model(seed=0, aggregator="cls-attention", targets=TARGETS, family="registers", **settings):
    encoder = small_encoder(family, seed=seed, dtype=torch.float32)
    torch.manual_seed(seed)
    built = build_aggregator(aggregator, encoder.feature_size, len(targets), **settings)
    randomise(built, seed)
    return SlideModel(encoder, built, build_task({target: [0, 1] for target in targets}))


class TilesInMemory:
    """Bags of tiles in memory; yields them in parts."""

    waited_s = 0.0

    def __init__(self, slides, part=4, unreadable=None):
        self.slides, self.part, self.unreadable_tiles = slides, part, unreadable or {}
        self.requests, self.closed = [], False

    def start(self, requests):
        self.requests = list(requests)

    def read_parts(self, request):
        unreadable = self.unreadable_tiles.get(request.slide_id, {})
        tiles = self.slides[request.slide_id]
        for start in range(0, len(tiles), self.part):
            rows = [row for row in range(start, min(start + self.part, len(tiles))) if row not in unreadable]
            unreadable_in_part = {row: reason for row, reason in unreadable.items() if start <= row < start + self.part}
            yield Bag(tiles[rows], np.array(rows, np.int64), unreadable_in_part)

    def skip_rest(self):
        pass

    def close(self):
        self.closed = True


def prepare(model):
    model.train(False)
    return InferenceModel(prepare_encoder(model.encoder), model)


def predict(*models, tiles=9, batch=4):
    predictor = Predictor([prepare(each) for each in models], batch=batch)
    bags = TilesInMemory({"S1": random_tiles(models[0].encoder, tiles)}, part=4)
    slide = predictor.encode_slide(bags, BagRequest("inference", "S1"))
    return predictor.predict("S1", slide), slide, predictor


@pytest.mark.parametrize("layer_norm", [False, True])
def test_single_model_gives_logits_and_contributions(layer_norm):
    model = build_model(layer_norm=layer_norm)
    output, slide, predictor = predict(model)
    encoded = prepare_encoder(model.encoder).encode(random_tiles(model.encoder, 9), 4)
    expected = model.aggregator_for()(*encoded).logits_C
    assert list(output.logits.values()) == expected.double().tolist()
    assert predictor.predict_logits("S1", slide) == output.logits
    assert list(output.columns) == ["attention", "weight", "contribution.EGFR", "contribution.KRAS"]
    assert output.columns["attention"].tolist() == slide.by_model[0].r_K.double().tolist()
    assert output.columns["weight"].sum() == pytest.approx(1, abs=1e-6)
    for target in TARGETS:
        total = output.logit_constants[target] + output.columns[f"contribution.{target}"].sum()
        assert total == pytest.approx(output.logits[target], abs=1e-5)


@pytest.mark.parametrize(
    ("aggregator", "columns"),
    [
        ("cls-gated", ["attention", "weight.EGFR", "weight.KRAS", "contribution.EGFR", "contribution.KRAS"]),
        ("max", ["attention", "score.EGFR", "score.KRAS"]),
        ("mean", ["attention", "score.EGFR", "score.KRAS", "contribution.EGFR", "contribution.KRAS"]),
        ("abmil", ["attention", "weight", "contribution.EGFR", "contribution.KRAS"]),
    ],
)
def test_columns_depend_on_the_aggregator(aggregator, columns):
    output, _, _ = predict(build_model(aggregator=aggregator))
    assert list(output.columns) == columns
    assert all(len(values) == 9 and np.isfinite(values).all() for values in output.columns.values())
    assert (output.logit_constants["EGFR"] is None) == (aggregator == "max")


def test_weight_column_of_a_single_target_has_no_target_name():
    output, _, _ = predict(build_model(aggregator="cls-gated", targets=("FGFR3",)))
    assert list(output.columns) == ["attention", "weight", "contribution.FGFR3"]


def test_ensemble_averages_probabilities_and_tile_scores():
    members = [build_model(0), build_model(1), build_model(2, "max")]
    output, slide, predictor = predict(*members)
    by_member = [predict(each)[0] for each in members]
    for target in TARGETS:
        mean = np.mean([sigmoid(each.logits[target]) for each in by_member])
        assert sigmoid(output.logits[target]) == pytest.approx(mean, abs=1e-12)
        assert output.logit_constants[target] is None
    assert predictor.predict_logits("S1", slide) == output.logits
    assert list(output.columns) == ["attention"]  # the only column that all members have
    np.testing.assert_array_equal(
        output.columns["attention"], np.mean([each.columns["attention"] for each in by_member], 0)
    )


def test_members_with_different_encoders_each_get_their_own_features():
    first, second = build_model(0), build_model(1, family="SwiGLU")
    _, slide, _ = predict(first, second, tiles=7, batch=3)
    for each, encoded in zip((first, second), slide.by_model, strict=True):
        own = predict(each, tiles=7, batch=3)[1].by_model[0]
        assert torch.equal(encoded.z_KD, own.z_KD)
        assert torch.equal(encoded.r_K, own.r_K)


def test_members_with_different_tile_sizes_are_an_error():
    with pytest.raises(InputError, match="different sizes: 42, 48 px"):
        Predictor([prepare(build_model(0)), prepare(build_model(1, family="plain ViT"))])


def test_without_a_model_the_features_are_the_result():
    model = build_model()
    predictor = Predictor([InferenceModel(prepare_encoder(model.encoder), None)], batch=4)
    bags = TilesInMemory({"S1": random_tiles(model.encoder, 9)})
    [encoded] = predictor.encode_slide(bags, BagRequest("inference", "S1")).by_model
    assert torch.equal(encoded.z_KD, predict(model)[1].by_model[0].z_KD)


def test_batch_is_halved_until_it_fits_into_memory(monkeypatch):
    model, tried, messages = prepare(build_model()), [], []
    encode = model.encoder.encode

    def encode_with_little_memory(tiles, batch):
        tried.append(batch)
        if batch > 3:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return encode(tiles, batch)

    monkeypatch.setattr(model.encoder, "encode", encode_with_little_memory)
    predictor = Predictor([model], batch=16, on_retry=messages.append)
    bags = TilesInMemory({"S1": random_tiles(model.encoder.encoder, 9)}, part=9)
    found = predictor.encode_slide(bags, BagRequest("inference", "S1"))
    assert torch.equal(found.by_model[0].r_K, encode(bags.slides["S1"], 2).r_K)
    assert tried == [16, 8, 4, 2]
    assert len(messages) == 3
    assert "16 tiles per batch; retrying with 8" in messages[0]
    predictor.encode_slide(bags, BagRequest("inference", "S1"))
    assert tried[4:] == [2]  # the smaller batch is kept


@pytest.mark.parametrize(
    "error",
    [torch.OutOfMemoryError("CUDA out of memory"), RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED")],
    ids=type,
)
def test_validation_retries_after_any_out_of_memory_error(monkeypatch, error):
    model, seen = build_model(), []
    model.train(False)
    bags = TilesInMemory({"S1": random_tiles(model.encoder, 9)}, part=9)
    expected = Predictor.for_training(model).encode_slide(bags, BagRequest("inference", "S1")).by_model[0]
    forward = model.encoder.forward

    def forward_with_little_memory(tiles):
        seen.append(len(tiles))
        if len(tiles) > 2:
            raise error
        return forward(tiles)

    monkeypatch.setattr(model.encoder, "forward", forward_with_little_memory)
    found = Predictor.for_training(model).encode_slide(bags, BagRequest("inference", "S1")).by_model[0]
    torch.testing.assert_close(found.z_KD, expected.z_KD)
    assert seen == [9, 9, 9, 8, 4, 2, 2, 2, 2, 1]  # 64, 32, 16, 8, 4, then 2 tiles per batch


def test_out_of_memory_with_one_tile_stops_the_command(monkeypatch):
    model = prepare(build_model())

    def raise_out_of_memory(*_):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(model.encoder, "encode", raise_out_of_memory)
    bags = TilesInMemory({name: random_tiles(model.encoder.encoder, 3) for name in ("S1", "S2")})
    with pytest.raises(DeviceMemoryError, match="one tile at a time"):
        Predictor([model], batch=4).run(["S1", "S2"], bags, lambda *_: None)
    assert bags.closed


def test_non_finite_logits_fail_the_slide():
    model = build_model()
    with torch.no_grad():
        model.aggregator.classifier.bias[0] = torch.nan
    with pytest.raises(NonFiniteError, match="'S1'"):
        predict(model)
    predictor = Predictor([prepare(model)], batch=4)
    bags = TilesInMemory({name: random_tiles(model.encoder, 3) for name in ("S1", "S2")})
    failed = predictor.run(["S1", "S2"], bags, predictor.predict)
    assert {slide_id: failure.stage for slide_id, failure in failed.items()} == {"S1": "predict", "S2": "predict"}


UNREADABLE = {"all": dict.fromkeys(range(9), "damaged"), "many": {4: "damaged"}}


def test_failed_slide_does_not_affect_other_slides():
    model = build_model()
    predictor = Predictor([prepare(model)], batch=4)
    tiles = {
        name: random_tiles(model.encoder, 9) for name in ("good", "all", "many", "store", "memory", "defect", "last")
    }
    bags, finished, seen = TilesInMemory(tiles, unreadable=UNREADABLE), [], []
    raised = {
        "store": TileStoreError("no such file", hint="Create it."),
        "memory": torch.OutOfMemoryError("CUDA out of memory"),
        "defect": ZeroDivisionError("by zero"),
    }

    def finish(slide_id, slide):
        if slide_id in raised:
            raise raised[slide_id]
        finished.append((slide_id, slide.tiles))

    failed = predictor.run(list(tiles), bags, finish, on_slide=lambda slide_id, result: seen.append((slide_id, result)))
    assert finished == [("good", 9), ("last", 9)]
    assert [slide_id for slide_id, _ in seen] == list(tiles)
    assert {slide_id: result for slide_id, result in seen if isinstance(result, SlideFailed)} == failed
    assert "none of 9 tiles can be read: damaged" in failed["all"].reason
    assert "1 of its 9 tiles cannot be read" in failed["many"].reason
    assert (failed["store"].reason, failed["store"].hint, failed["store"].stage) == (
        "no such file",
        "Create it.",
        "read",
    )
    assert "out of memory" in failed["memory"].reason
    assert "ZeroDivisionError" in failed["defect"].reason


@pytest.mark.parametrize("stage", ["encoder", "device"])
def test_error_that_affects_every_slide_stops_the_command(monkeypatch, stage):
    model, finished = prepare(build_model()), []
    bags = TilesInMemory({name: random_tiles(model.encoder.encoder, 3) for name in ("S1", "S2")})

    def raise_device_error(*_):
        finished.append(1)
        raise torch.AcceleratorError("an illegal memory access was encountered")

    if stage == "encoder":
        monkeypatch.setattr(model.encoder, "encode", raise_device_error)
    with pytest.raises(torch.AcceleratorError):
        Predictor([model], batch=4).run(["S1", "S2"], bags, raise_device_error)
    assert len(finished) == 1
    assert bags.closed


def test_failures_do_not_keep_features_in_memory():
    model, features = build_model(), []
    predictor = Predictor([prepare(model)], batch=4)
    bags = TilesInMemory({f"S{i}": random_tiles(model.encoder, 3) for i in range(3)})

    def finish(slide_id, slide):  # noqa: ARG001
        features.append(weakref.ref(slide.by_model[0].z_KD))
        raise torch.OutOfMemoryError("CUDA out of memory")

    failed = predictor.run(list(bags.slides), bags, finish)
    assert len(failed) == len(features) == 3
    gc.collect()
    assert [each() for each in features] == [None, None, None]


def test_remaining_parts_of_a_failed_slide_are_discarded(tmp_path, monkeypatch):
    monkeypatch.setattr(bags_module, "_PART_TILES", 8)
    slides, learner = write_slides(tmp_path, 3), make_learner()
    learner.model.train(False)
    predictor = Predictor.for_training(learner.model)
    encode_part, calls, logits = predictor._encode_part, [], {}

    def fail_once(part):
        calls.append(part)
        if len(calls) == 2:
            raise SlideFailed("damaged in the middle")
        return encode_part(part)

    def finish(slide_id, slide):
        logits[slide_id] = predictor.predict_logits(slide_id, slide)

    assert predictor.run(list(slides), make_bags(slides), finish) == {}
    expected = dict(logits)
    logits.clear()
    monkeypatch.setattr(predictor, "_encode_part", fail_once)
    failed = predictor.run(list(slides), make_bags(slides), finish)
    assert {slide_id: failure.reason for slide_id, failure in failed.items()} == {"s00": "damaged in the middle"}
    assert logits == {slide_id: expected[slide_id] for slide_id in ("s01", "s02")}


def test_few_unreadable_tiles_are_skipped():
    model = build_model()
    predictor = Predictor([prepare(model)], batch=4)
    bags, found = TilesInMemory({"S1": random_tiles(model.encoder, 40)}, unreadable={"S1": {6: "a", 30: "b"}}), {}
    assert predictor.run(["S1"], bags, found.__setitem__) == {}
    assert found["S1"].tiles == 38
    assert found["S1"].skipped.tiles == [6, 30]
    assert found["S1"].skipped.reason == "a"
    assert 6 not in found["S1"].rows


def test_error_of_writing_stops_the_command():
    model = build_model()
    bags = TilesInMemory({name: random_tiles(model.encoder, 3) for name in ("S1", "S2")})

    def finish(slide_id, slide):  # noqa: ARG001
        raise PermissionError("read-only")

    with pytest.raises(PermissionError):
        Predictor([prepare(model)], batch=4).run(["S1", "S2"], bags, finish)
    assert bags.closed


def test_stop_signal_stops_after_the_current_slide():
    model, finished = build_model(), []
    bags = TilesInMemory({name: random_tiles(model.encoder, 3) for name in ("S1", "S2", "S3")})
    with pytest.raises(Interrupted) as interrupted:
        Predictor([prepare(model)], batch=4).run(
            ["S1", "S2", "S3"],
            bags,
            lambda slide_id, _: finished.append(slide_id),
            stop_signal=lambda: 15 if len(finished) == 2 else None,
        )
    assert interrupted.value.signal_number == 15
    assert finished == ["S1", "S2"]
    assert bags.closed


def test_tee_gives_two_threads_the_same_items():
    first, second = tee(iter(range(2000)))
    found = []
    thread = threading.Thread(target=lambda: found.extend(second))
    thread.start()
    assert list(first) == list(range(2000))
    thread.join()
    assert found == list(range(2000))


def test_tee_consumes_each_item_once_and_lazily():
    consumed = []
    first, second = tee(consumed.append(number) or number for number in range(3))
    assert consumed == []
    assert (next(first), next(second), next(second)) == (0, 0, 1)
    assert consumed == [0, 1]


def test_tee_raises_an_error_in_both_iterators():
    def items():
        yield 1
        raise OSError("the claim cannot be written")

    first, second = tee(items())
    assert (next(first), next(second)) == (1, 1)
    for iterator in (first, second):
        with pytest.raises(OSError, match="the claim"):
            next(iterator)
