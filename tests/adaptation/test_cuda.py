"""What only a GPU can show: its random generator, its memory, compiled kernels, host tiles."""

import pytest
import torch
from support import cls_attention, relative_difference, small_encoder, some_tiles, step_gradient
from training_slides import Memory, labelled, make_learner, run, write_slides

from tapfm.adaptation.chunked import Chunking
from tapfm.adaptation.progress import Progress
from tapfm.adaptation.trainer import Interrupted

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")


def on_gpu(**settings):
    encoder = small_encoder(**settings).cuda()
    return encoder, cls_attention(encoder).cuda()


@pytest.mark.parametrize("pinned", [True, False])
def test_pieces_give_the_one_pass_gradient_from_tiles_on_the_host(pinned):
    encoder, aggregator = on_gpu()
    tiles = some_tiles(encoder, 11)
    tiles = tiles.pin_memory() if pinned else tiles
    one_pass = step_gradient(encoder, aggregator, tiles)
    for keep in (0, 2, "fit"):
        pieces = step_gradient(encoder, aggregator, tiles, chunking=Chunking(4, keep))
        assert relative_difference(pieces, one_pass) < 1e-9


def test_the_second_pass_replays_the_masks_of_the_gpus_generator():
    encoder, aggregator = on_gpu(depth=3, drop_path_rate=0.5, proj_drop_rate=0.2)
    encoder.train()
    tiles = some_tiles(encoder, 11)

    def gradient(keep, seed=7):
        torch.manual_seed(seed)
        return step_gradient(encoder, aggregator, tiles, chunking=Chunking(4, keep))

    graphs_kept = gradient(3)
    assert relative_difference(gradient(0), graphs_kept) < 1e-9
    assert relative_difference(gradient(3, seed=8), graphs_kept) > 1e-3


@pytest.mark.filterwarnings("default")  # the compiler has warnings of its own
def test_compiled_blocks_give_the_eager_gradient():
    encoder, aggregator = on_gpu(dtype=torch.float32, depth=3)
    tiles = some_tiles(encoder, 12)
    eager = step_gradient(encoder, aggregator, tiles)
    for block in encoder.vit.blocks[:-1]:
        block.compile()
    for keep in (0, 1):
        compiled = step_gradient(encoder, aggregator, tiles, chunking=Chunking(4, keep))
        assert relative_difference(compiled, eager) < 1e-4


@pytest.mark.parametrize("checkpointed", [False, True])
def test_peak_memory_does_not_grow_with_the_number_of_tiles(checkpointed):
    encoder, aggregator = on_gpu(dtype=torch.float32, depth=4)
    encoder.checkpoint_blocks = checkpointed

    def peak(tiles):
        bag = some_tiles(encoder, tiles)
        step_gradient(encoder, aggregator, bag[:16], chunking=Chunking(16))
        torch.cuda.reset_peak_memory_stats()
        step_gradient(encoder, aggregator, bag, chunking=Chunking(16))
        return torch.cuda.max_memory_allocated()

    assert peak(512) == pytest.approx(peak(32), rel=0.05)


def test_a_run_learns_stops_and_goes_on_as_on_the_cpu(tmp_path):
    slides = write_slides(tmp_path, 6)
    train = {name: slides[name] for name in list(slides)[:4]}
    validation = {name: slides[name] for name in list(slides)[4:]}
    arguments = {"training": labelled(train), "validation": labelled(validation, "val"), "workers": 2}
    on_cpu = run(make_learner(), slides, **arguments).history
    memory, learner = Memory(), make_learner(device="cuda")
    signals = [15, None, None, None]
    with pytest.raises(Interrupted):
        run(learner, slides, memory=memory, asked_to_stop=signals.pop, **arguments)
    learner = make_learner(seed=1, device="cuda")
    learner.restore(memory.last[0])
    on_gpu = run(learner, slides, progress=Progress.from_json(memory.last[1]), **arguments).history
    for cpu_row, gpu_row in zip(on_cpu, on_gpu, strict=True):
        assert gpu_row["loss_agg"] == pytest.approx(cpu_row["loss_agg"], rel=2e-2)
        assert gpu_row["val_loss"] == pytest.approx(cpu_row["val_loss"], rel=2e-2)
        assert gpu_row["peak_memory_gib"] > 0
