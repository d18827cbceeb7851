"""What only a GPU can show: its random generator, its memory, compiled kernels, host tiles."""

import pytest
import torch
from support import cls_attention, relative_difference, small_encoder, some_tiles, step_gradient

from tapfm.adaptation.chunked import Chunking

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
