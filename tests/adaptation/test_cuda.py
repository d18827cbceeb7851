"""Training on a GPU: random state, memory, compiled kernels, tiles in host memory."""

from dataclasses import replace
from typing import get_args

import numpy as np
import pytest
import torch
from support import cls_attention, random_tiles, relative_difference, small_encoder, step_gradient
from training_slides import TrainingRecorder, label_slides, make_learner, run_fit, write_slides

from tapfm.adaptation.chunked import Chunking
from tapfm.encoders.blocks import Recompute
from tapfm.errors import Interrupted
from tapfm.inference.bags import Bag
from tapfm.runs.run_progress import RunProgress
from tapfm.runtime.device_memory import release_cached_memory
from tapfm.tasks.cross_entropy import encode_labels

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")


def models_on_gpu(**settings):
    encoder = small_encoder(**settings).cuda()
    return encoder, cls_attention(encoder).cuda()


@pytest.mark.parametrize("pinned", [True, False])
def test_chunks_of_host_tiles_give_the_one_pass_gradient(pinned):
    encoder, aggregator = models_on_gpu()
    tiles = random_tiles(encoder, 11)
    tiles = tiles.pin_memory() if pinned else tiles
    one_pass = step_gradient(encoder, aggregator, tiles)
    for keep in (0, 2):
        chunked = step_gradient(encoder, aggregator, tiles, chunking=Chunking(4, keep))
        assert relative_difference(chunked, one_pass) < 1e-9


def test_second_pass_uses_the_dropout_masks_of_the_first():
    encoder, aggregator = models_on_gpu(depth=3, drop_path_rate=0.5, proj_drop_rate=0.2)
    encoder.train()
    tiles = random_tiles(encoder, 11)

    def gradient(keep, seed=7):
        torch.manual_seed(seed)
        return step_gradient(encoder, aggregator, tiles, chunking=Chunking(4, keep))

    graphs_kept = gradient(3)
    assert relative_difference(gradient(0), graphs_kept) < 1e-9
    assert relative_difference(gradient(3, seed=8), graphs_kept) > 1e-3


@pytest.mark.filterwarnings("default")  # the compiler issues warnings
def test_compiled_blocks_give_the_same_gradient():
    encoder, aggregator = models_on_gpu(dtype=torch.float32, depth=3)
    tiles = random_tiles(encoder, 12)
    eager = step_gradient(encoder, aggregator, tiles)
    encoder.compile_blocks()
    for level in get_args(Recompute):
        encoder.recompute = (level,) * len(encoder.vit.blocks)
        for keep in (0, 1):
            compiled = step_gradient(encoder, aggregator, tiles, chunking=Chunking(5, keep))
            assert relative_difference(compiled, eager) < 1e-4


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("recompute", get_args(Recompute))
def test_other_bag_sizes_do_not_recompile(recompute):
    encoder, aggregator = models_on_gpu(dtype=torch.float32, depth=3)
    encoder.recompute = (recompute,) * len(encoder.vit.blocks)
    encoder.compile_blocks()
    step_gradient(encoder, aggregator, random_tiles(encoder, 12), chunking=Chunking(4))
    with torch._dynamo.config.patch(error_on_recompile=True):
        for tiles in (3, 7, 12, 30):
            step_gradient(encoder, aggregator, random_tiles(encoder, tiles), chunking=Chunking(5))


@pytest.mark.parametrize("slides_per_step", [1, 2])
@pytest.mark.parametrize("weights_dtype", [None, torch.bfloat16])
def test_train_step_does_not_synchronise(weights_dtype, slides_per_step):
    learner = make_learner(device="cuda", weights_dtype=weights_dtype, clip_norm=1.0, slides_per_step=slides_per_step)
    learner.start_epoch(0)
    tiles = random_tiles(learner.model.encoder, 40).pin_memory()

    def train(number):
        update = number % slides_per_step == slides_per_step - 1
        return learner.train_step(Bag(tiles, np.arange(40)), encode_labels([1]), update=update, slide_id="s")

    for number in range(2):  # initialisation may synchronise
        train(number)
    torch.cuda.set_sync_debug_mode("error")
    try:
        reports = [train(number) for number in range(2)]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(report.loss_agg.isfinite() for report in reports)


@pytest.mark.parametrize(
    ("settings", "tolerance"),
    [({"weights_dtype": torch.bfloat16}, 0.02), ({"compute_dtype": torch.float16}, 0.005)],
    ids=["bfloat16", "float16"],
)
def test_loss_in_low_precision_follows_float32(settings, tolerance):
    def losses(**settings):
        learner = make_learner(device="cuda", rate=1e-4, **settings)
        learner.start_epoch(0)
        values = []
        for step in range(12):
            tiles = random_tiles(learner.model.encoder, 20, seed=step % 3)
            bag = Bag(tiles, np.arange(20))
            values.append(learner.train_step(bag, encode_labels([step % 2]), update=True, slide_id="s").loss_agg)
        return torch.stack(values)

    plain = losses()
    assert plain.std() > 10 * tolerance, "the loss must change for this test"
    torch.testing.assert_close(losses(**settings), plain, rtol=0, atol=tolerance)


def test_out_of_memory_is_retried_with_half_the_chunk_size():
    """Limit the GPU memory so that one pass does not fit, but half of the tiles do."""
    other = make_learner(device="cuda")  # its step lets libraries allocate their workspaces
    other.start_epoch(0)
    tiles = random_tiles(other.model.encoder, 512)
    other.train_step(Bag(tiles[:4], np.arange(4)), encode_labels([1]), update=True, slide_id="s")
    learner, reported = make_learner(device="cuda"), []
    learner.on_smaller_chunks, learner.adaptation = reported.append, replace(learner.adaptation, chunking=Chunking())
    learner.start_epoch(0)
    release_cached_memory(learner.model.device)
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    one_pass = learner.train_step(Bag(tiles, np.arange(512)), encode_labels([1]), update=True, slide_id="s")
    needed = torch.cuda.max_memory_allocated() - before
    one_pass.checks.raise_if_not_finite("s", 0)

    learner = make_learner(device="cuda")
    learner.on_smaller_chunks, learner.adaptation = reported.append, replace(learner.adaptation, chunking=Chunking())
    learner.start_epoch(0)
    release_cached_memory(learner.model.device)
    limit = torch.cuda.memory_allocated() + 0.6 * needed
    torch.cuda.set_per_process_memory_fraction(limit / torch.cuda.mem_get_info()[1])
    try:
        report = learner.train_step(Bag(tiles, np.arange(512)), encode_labels([1]), update=True, slide_id="s")
        torch.testing.assert_close(report.loss_agg, one_pass.loss_agg, rtol=1e-3, atol=1e-4)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert reported
    assert reported[0] == 256


@pytest.mark.parametrize("recompute", ["nothing", "block"])
def test_peak_memory_does_not_grow_with_the_number_of_tiles(recompute):
    encoder, aggregator = models_on_gpu(dtype=torch.float32, depth=4)
    encoder.recompute = (recompute,) * len(encoder.vit.blocks)

    def peak_bytes(tiles):
        bag = random_tiles(encoder, tiles)
        step_gradient(encoder, aggregator, bag[:16], chunking=Chunking(16))
        torch.cuda.reset_peak_memory_stats()
        step_gradient(encoder, aggregator, bag, chunking=Chunking(16))
        return torch.cuda.max_memory_allocated()

    assert peak_bytes(512) == pytest.approx(peak_bytes(32), rel=0.05)


def test_interrupted_run_on_a_gpu_follows_the_cpu(tmp_path):
    slides = write_slides(tmp_path, 6)
    train = {name: slides[name] for name in list(slides)[:4]}
    validation = {name: slides[name] for name in list(slides)[4:]}
    arguments = {"training": label_slides(train), "validation": label_slides(validation, "val"), "workers": 2}
    on_cpu = run_fit(make_learner(), slides, **arguments).history
    recorder, learner = TrainingRecorder(), make_learner(device="cuda")
    signals = [15, None, None, None]
    with pytest.raises(Interrupted):
        run_fit(learner, slides, recorder=recorder, stop_signal=signals.pop, **arguments)
    learner = make_learner(seed=1, device="cuda")
    learner.restore(recorder.last[0])
    on_gpu = run_fit(learner, slides, progress=RunProgress.from_json(recorder.last[1]), **arguments).history
    for cpu_row, gpu_row in zip(on_cpu, on_gpu, strict=True):
        assert gpu_row["loss_agg"] == pytest.approx(cpu_row["loss_agg"], rel=2e-2)
        assert gpu_row["val_loss"] == pytest.approx(cpu_row["val_loss"], rel=2e-2)
        assert gpu_row["peak_memory_gib"] > 0
