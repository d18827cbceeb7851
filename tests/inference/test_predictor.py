"""The predictor: logits and tile scores of a slide, ensembles, out-of-memory retry, failures."""

import gc
import threading
import weakref

import numpy as np
import pytest
import torch
from support import randomise, small_encoder, some_tiles
from training_slides import make_bags, make_learner, write_slides

from tapfm.aggregators.catalog import build_aggregator
from tapfm.encoders.inference import prepare_encoder
from tapfm.errors import DeviceMemoryError, InputError, Interrupted, NonFiniteError, TileStoreError
from tapfm.inference import bags as bags_module
from tapfm.inference.bags import Bag, BagRequest, SlideFailed
from tapfm.inference.predictor import InferenceModel, Predictor
from tapfm.inference.predictor import _tee as share
from tapfm.runs.model import SlideModel
from tapfm.tasks.binary_target import _sigmoid as sigmoid
from tapfm.tasks.catalog import build_task

TARGETS = ("EGFR", "KRAS")


def model(seed=0, aggregator="cls-attention", targets=TARGETS, family="registers", **settings):
    encoder = small_encoder(family, seed=seed, dtype=torch.float32)
    torch.manual_seed(seed)
    built = build_aggregator(aggregator, encoder.feature_size, len(targets), **settings)
    randomise(built, seed)
    return SlideModel(encoder, built, build_task({target: [0, 1] for target in targets}))


class TilesInMemory:
    """Bags of tiles that are in memory, in parts; reads nothing."""

    waited_s = 0.0

    def __init__(self, slides, part=4, missing=None):
        self.slides, self.part, self.missing = slides, part, missing or {}
        self.plan, self.closed = [], False

    def start(self, plan):
        self.plan = list(plan)

    def read_parts(self, visit):
        missing = self.missing.get(visit.slide_id, {})
        tiles = self.slides[visit.slide_id]
        for start in range(0, len(tiles), self.part):
            rows = [row for row in range(start, min(start + self.part, len(tiles))) if row not in missing]
            lost = {row: why for row, why in missing.items() if start <= row < start + self.part}
            yield Bag(tiles[rows], np.array(rows, np.int64), lost)

    def skip_rest(self):
        pass

    def close(self):
        self.closed = True


def prepared(one):
    one.train(False)
    return InferenceModel(prepare_encoder(one.encoder), one)


def predicted(*models, tiles=9, batch=4):
    predictor = Predictor([prepared(each) for each in models], batch=batch)
    bags = TilesInMemory({"S1": some_tiles(models[0].encoder, tiles)}, part=4)
    slide = predictor.encode_slide(bags, BagRequest("inference", "S1"))
    return predictor.predict("S1", slide), slide, predictor


@pytest.mark.parametrize("layer_norm", [False, True])
def test_one_model_gives_its_own_logits_and_the_contribution_of_each_tile(layer_norm):
    one = model(layer_norm=layer_norm)
    output, slide, predictor = predicted(one)
    alone = one.aggregator_for()(*prepare_encoder(one.encoder).encode(some_tiles(one.encoder, 9), 4)).logits_C
    assert list(output.logits.values()) == alone.double().tolist()
    assert predictor.predict_logits("S1", slide) == output.logits
    assert list(output.columns) == ["attention", "weight", "contribution.EGFR", "contribution.KRAS"]
    assert output.columns["attention"].tolist() == slide.by_model[0].r_K.double().tolist()
    assert output.columns["weight"].sum() == pytest.approx(1, abs=1e-6)
    for target in TARGETS:
        total = output.constants[target] + output.columns[f"contribution.{target}"].sum()
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
    output, _, _ = predicted(model(aggregator=aggregator))
    assert list(output.columns) == columns
    assert all(len(values) == 9 and np.isfinite(values).all() for values in output.columns.values())
    assert (output.constants["EGFR"] is None) == (aggregator == "max")


def test_the_weights_of_a_single_target_have_no_target_in_their_name():
    output, _, _ = predicted(model(aggregator="cls-gated", targets=("FGFR3",)))
    assert list(output.columns) == ["attention", "weight", "contribution.FGFR3"]


def test_an_ensemble_averages_probabilities_and_tile_scores():
    members = [model(0), model(1), model(2, "max")]
    output, slide, predictor = predicted(*members)
    alone = [predicted(each)[0] for each in members]
    for target in TARGETS:
        mean = np.mean([sigmoid(each.logits[target]) for each in alone])
        assert sigmoid(output.logits[target]) == pytest.approx(mean, abs=1e-12)
        assert output.constants[target] is None
    assert predictor.predict_logits("S1", slide) == output.logits
    assert list(output.columns) == ["attention"]  # the only column of the third member that the others have
    np.testing.assert_array_equal(
        output.columns["attention"], np.mean([each.columns["attention"] for each in alone], 0)
    )


def test_members_with_different_encoders_each_get_their_own_features():
    first, second = model(0), model(1, family="SwiGLU")
    _, slide, _ = predicted(first, second, tiles=7, batch=3)
    for each, encoded in zip((first, second), slide.by_model, strict=True):
        own = predicted(each, tiles=7, batch=3)[1].by_model[0]
        assert torch.equal(encoded.z_KD, own.z_KD)
        assert torch.equal(encoded.r_K, own.r_K)


def test_members_with_different_tile_sizes_are_refused():
    with pytest.raises(InputError, match="different sizes: 42, 48 px"):
        Predictor([prepared(model(0)), prepared(model(1, family="plain ViT"))])


def test_without_a_model_the_features_are_the_result():
    one = model()
    predictor = Predictor([InferenceModel(prepare_encoder(one.encoder), None)], batch=4)
    bags = TilesInMemory({"S1": some_tiles(one.encoder, 9)})
    [encoded] = predictor.encode_slide(bags, BagRequest("inference", "S1")).by_model
    assert torch.equal(encoded.z_KD, predicted(one)[1].by_model[0].z_KD)


def test_the_batch_is_halved_until_it_fits(monkeypatch):
    one, tried, messages = prepared(model()), [], []
    encode = one.encoder.encode

    def with_little_memory(tiles, batch):
        tried.append(batch)
        if batch > 3:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return encode(tiles, batch)

    monkeypatch.setattr(one.encoder, "encode", with_little_memory)
    predictor = Predictor([one], batch=16, on_retry=messages.append)
    bags = TilesInMemory({"S1": some_tiles(one.encoder.encoder, 9)}, part=9)
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
def test_memory_that_runs_out_in_a_library_is_retried_too_also_in_validation(monkeypatch, error):
    one, seen = model(), []
    one.train(False)
    bags = TilesInMemory({"S1": some_tiles(one.encoder, 9)}, part=9)
    expected = Predictor.for_training(one).encode_slide(bags, BagRequest("inference", "S1")).by_model[0]
    forward = one.encoder.forward

    def small(tiles):
        seen.append(len(tiles))
        if len(tiles) > 2:
            raise error
        return forward(tiles)

    monkeypatch.setattr(one.encoder, "forward", small)
    found = Predictor.for_training(one).encode_slide(bags, BagRequest("inference", "S1")).by_model[0]
    torch.testing.assert_close(found.z_KD, expected.z_KD)
    assert seen == [9, 9, 9, 8, 4, 2, 2, 2, 2, 1]  # 64, 32, 16, 8, 4, then 2 tiles per batch


def test_one_tile_that_does_not_fit_stops_the_whole_run(monkeypatch):
    one = prepared(model())

    def no_memory(*_):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(one.encoder, "encode", no_memory)
    bags = TilesInMemory({name: some_tiles(one.encoder.encoder, 3) for name in ("S1", "S2")})
    with pytest.raises(DeviceMemoryError, match="one tile at a time"):
        Predictor([one], batch=4).run(["S1", "S2"], bags, lambda *_: None)
    assert bags.closed


def test_logits_that_are_not_finite_are_an_error_of_the_slide():
    one = model()
    with torch.no_grad():
        one.aggregator.classifier.bias[0] = torch.nan
    with pytest.raises(NonFiniteError, match="'S1'"):
        predicted(one)
    predictor = Predictor([prepared(one)], batch=4)
    bags = TilesInMemory({name: some_tiles(one.encoder, 3) for name in ("S1", "S2")})
    failed = predictor.run(["S1", "S2"], bags, predictor.predict)
    assert {slide_id: failure.stage for slide_id, failure in failed.items()} == {"S1": "predict", "S2": "predict"}


MISSING = {"all": dict.fromkeys(range(9), "damaged"), "many": {4: "damaged"}}


def test_a_slide_fails_alone_with_its_reason():
    one = model()
    predictor = Predictor([prepared(one)], batch=4)
    tiles = {name: some_tiles(one.encoder, 9) for name in ("good", "all", "many", "store", "memory", "defect", "last")}
    bags, finished, seen = TilesInMemory(tiles, missing=MISSING), [], []
    raised = {
        "store": TileStoreError("no such file", hint="Make it."),
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
    assert (failed["store"].reason, failed["store"].hint, failed["store"].stage) == ("no such file", "Make it.", "read")
    assert "out of memory" in failed["memory"].reason
    assert "ZeroDivisionError" in failed["defect"].reason


@pytest.mark.parametrize("stage", ["encoder", "device"])
def test_an_error_that_every_slide_would_hit_ends_the_run(monkeypatch, stage):
    one, finished = prepared(model()), []
    bags = TilesInMemory({name: some_tiles(one.encoder.encoder, 3) for name in ("S1", "S2")})

    def broken(*_):
        finished.append(1)
        raise torch.AcceleratorError("an illegal memory access was encountered")

    if stage == "encoder":
        monkeypatch.setattr(one.encoder, "encode", broken)
    with pytest.raises(torch.AcceleratorError):
        Predictor([one], batch=4).run(["S1", "S2"], bags, broken)
    assert len(finished) == 1
    assert bags.closed


def test_failures_keep_nothing_of_the_slide_in_memory():
    one, features = model(), []
    predictor = Predictor([prepared(one)], batch=4)
    bags = TilesInMemory({f"S{i}": some_tiles(one.encoder, 3) for i in range(3)})

    def finish(slide_id, slide):  # noqa: ARG001
        features.append(weakref.ref(slide.by_model[0].z_KD))
        raise torch.OutOfMemoryError("CUDA out of memory")

    failed = predictor.run(list(bags.slides), bags, finish)
    assert len(failed) == len(features) == 3
    gc.collect()
    assert [each() for each in features] == [None, None, None]


def test_a_slide_that_fails_in_the_middle_does_not_disturb_the_next(tmp_path, monkeypatch):
    """Its other parts are in the queue of the reader."""
    monkeypatch.setattr(bags_module, "_PART_TILES", 8)
    slides, learner = write_slides(tmp_path, 3), make_learner()
    learner.model.train(False)
    predictor = Predictor.for_training(learner.model)
    encode_part, calls, logits = predictor._encode_part, [], {}

    def fails_once(part):
        calls.append(part)
        if len(calls) == 2:
            raise SlideFailed("damaged in the middle")
        return encode_part(part)

    def finish(slide_id, slide):
        logits[slide_id] = predictor.predict_logits(slide_id, slide)

    assert predictor.run(list(slides), make_bags(slides), finish) == {}
    expected = dict(logits)
    logits.clear()
    monkeypatch.setattr(predictor, "_encode_part", fails_once)
    failed = predictor.run(list(slides), make_bags(slides), finish)
    assert {slide_id: failure.reason for slide_id, failure in failed.items()} == {"s00": "damaged in the middle"}
    assert logits == {slide_id: expected[slide_id] for slide_id in ("s01", "s02")}


def test_a_few_unreadable_tiles_are_skipped():
    one = model()
    predictor = Predictor([prepared(one)], batch=4)
    bags, found = TilesInMemory({"S1": some_tiles(one.encoder, 40)}, missing={"S1": {6: "a", 30: "b"}}), {}
    assert predictor.run(["S1"], bags, found.__setitem__) == {}
    assert found["S1"].tiles == 38
    assert found["S1"].skipped.tiles == [6, 30]
    assert found["S1"].skipped.reason == "a"
    assert 6 not in found["S1"].rows


def test_a_file_that_cannot_be_written_stops_the_whole_run():
    one = model()
    bags = TilesInMemory({name: some_tiles(one.encoder, 3) for name in ("S1", "S2")})

    def finish(slide_id, slide):  # noqa: ARG001
        raise PermissionError("read-only")

    with pytest.raises(PermissionError):
        Predictor([prepared(one)], batch=4).run(["S1", "S2"], bags, finish)
    assert bags.closed


def test_a_signal_stops_after_the_slide():
    one, finished = model(), []
    bags = TilesInMemory({name: some_tiles(one.encoder, 3) for name in ("S1", "S2", "S3")})
    with pytest.raises(Interrupted) as stopped:
        Predictor([prepared(one)], batch=4).run(
            ["S1", "S2", "S3"],
            bags,
            lambda slide_id, _: finished.append(slide_id),
            stop_signal=lambda: 15 if len(finished) == 2 else None,
        )
    assert stopped.value.signal_number == 15
    assert finished == ["S1", "S2"]
    assert bags.closed


def test_two_threads_share_the_same_items():
    first, second = share(iter(range(2000)))
    found = []
    thread = threading.Thread(target=lambda: found.extend(second))
    thread.start()
    assert list(first) == list(range(2000))
    thread.join()
    assert found == list(range(2000))


def test_shared_items_are_asked_for_once_and_only_when_they_are_needed():
    asked = []
    first, second = share(asked.append(number) or number for number in range(3))
    assert asked == []
    assert (next(first), next(second), next(second)) == (0, 0, 1)
    assert asked == [0, 1]


def test_an_error_of_shared_items_is_raised_on_both_sides():
    def items():
        yield 1
        raise OSError("the claim cannot be written")

    first, second = share(items())
    assert (next(first), next(second)) == (1, 1)
    for side in (first, second):
        with pytest.raises(OSError, match="the claim"):
            next(side)
