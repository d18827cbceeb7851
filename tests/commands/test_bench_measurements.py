"""Measurements and time estimates of `tapfm bench`."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from cohort_files import read_rows
from slide_files import section, write_slide
from training_workspace import POSITIONS, create_workspace

from tapfm.bench import model_speed
from tapfm.bench.bench_slides import (
    SlideFile,
    count_tiles,
    slides_from_cohort,
    slides_from_paper,
    slides_from_run,
)
from tapfm.bench.bench_slides import (
    _assign_splits as assign_splits,
)
from tapfm.bench.bench_slides import (
    _select_evenly as select_evenly,
)
from tapfm.bench.device_speed import measure_copy_speed, measure_matrix_product
from tapfm.bench.measure import _select_speeds as select_speeds
from tapfm.bench.model_speed import EncodingSpeed, StepSpeed, choose_tiles_per_step, measure_encoding, measure_step
from tapfm.bench.model_speed import _choose_chunk as choose_chunk
from tapfm.bench.models import BenchSetup, count_forward_gflop, make_default_config
from tapfm.bench.reading_speed import _MIN_REQUESTS as MIN_REQUESTS
from tapfm.bench.reading_speed import _TILES_PER_REQUEST as TILES_PER_REQUEST
from tapfm.bench.reading_speed import ReadingSpeed, measure_reading, write_synthetic_slide
from tapfm.bench.time_estimates import Speeds, TileCounts, estimate_times
from tapfm.bench.timing import _is_out_of_memory as is_out_of_memory
from tapfm.bench.timing import catch_out_of_memory, time_repeated
from tapfm.config.loading import load_config
from tapfm.encoders.catalog import find_encoder_card, load_encoder_cards
from tapfm.errors import CohortError, InputError
from tapfm.slides.opening import open_slide
from tapfm.tiles.store import TileSet

CPU = torch.device("cpu")
TILE_COUNTS = TileCounts(
    training_tiles=1000, validation_tiles=200, final_prediction_tiles=600, epochs=3, slide_tiles=50
)


def pocket(**changes):
    config = make_default_config("tapfm-pocket", "auto")
    return BenchSetup(config.model_copy(update={"adaptation": config.adaptation.model_copy(update=changes)}), CPU)


# --- time estimates


def test_with_a_gpu_the_slower_of_reading_and_computing_counts():
    rows = estimate_times(TILE_COUNTS, Speeds(reading=100, encoding=50, step=20), shared_cores=False)
    assert [row.seconds for row in rows] == [50, 4, 12, 3 * (50 + 4) + 12, 1]
    assert [row.bottleneck for row in rows] == ["computing", "computing", "computing", None, "computing"]
    assert [row.tiles for row in rows] == [1000, 200, 600, 3 * 1200 + 600, 50]


def test_slow_reading_is_the_bottleneck():
    epoch, validation, held_out, whole, slide = estimate_times(TILE_COUNTS, Speeds(10, 50, 20), shared_cores=False)
    assert (epoch.seconds, validation.seconds, held_out.seconds, slide.seconds) == (100, 20, 60, 5)
    assert whole.seconds == 3 * 120 + 60
    assert {row.bottleneck for row in (epoch, validation, held_out, slide)} == {"reading"}


def test_times_are_added_on_shared_cores():
    rows = estimate_times(TILE_COUNTS, Speeds(reading=100, encoding=50, step=20), shared_cores=True)
    assert [row.seconds for row in rows] == [60, 6, 18, 3 * (60 + 6) + 18, 1.5]


def test_no_estimate_without_a_measurement():
    epoch, validation, _, whole, slide = estimate_times(TILE_COUNTS, Speeds(100, 50, None), shared_cores=False)
    assert epoch.seconds is whole.seconds is None
    assert validation.seconds == 4
    assert slide.seconds == 1
    assert all(row.seconds is None for row in estimate_times(TILE_COUNTS, Speeds(None, 50, 20), shared_cores=False))


def test_no_validation_time_without_validation_slides():
    tile_counts = TileCounts(
        training_tiles=1000, validation_tiles=0, final_prediction_tiles=0, epochs=2, slide_tiles=50
    )
    _, validation, held_out, whole, _ = estimate_times(tile_counts, Speeds(100, 50, 20), shared_cores=False)
    assert validation.seconds == held_out.seconds == 0
    assert whole.seconds == 100


def test_estimates_use_all_workers_and_the_faster_step_that_fits():
    reading = [ReadingSpeed(1, 1, True, 100, 1.0), ReadingSpeed(8, 1, True, 500, 1.0)]
    encoding = EncodingSpeed(64, 0.5, 1.0, 0.5, None, None)
    steps = [
        StepSpeed("one pass", "full", 300, None, None, None, None, "out of memory"),
        StepSpeed("chunked", "full", 300, 64, 10.0, None, None),
        StepSpeed("one pass", "lora:16", 300, None, 1.0, None, None),
    ]
    assert select_speeds(reading, encoding, steps, "full") == Speeds(500, 128, 30)
    assert select_speeds(reading, encoding, steps[:1], "full").step is None


# --- timing


def test_timing_returns_the_median_without_the_first_run():
    clock = SimpleNamespace(now=0.0)
    durations = iter([10.0, 2.0, 1.0, 6.0, 0.0, 0.0])

    def run():
        clock.now += next(durations)

    timing = time_repeated(run, CPU, budget_s=9.0, min_repeats=2, clock=lambda: clock.now)
    assert (timing.seconds, timing.repeats, timing.first_s, timing.warmup_s) == (2.0, 3, 10.0, 8.0)


def test_number_of_repeats_is_limited():
    done = []
    assert (
        time_repeated(
            lambda: done.append(1), CPU, budget_s=1e9, min_repeats=2, max_repeats=5, clock=lambda: 0.0
        ).repeats
        == 5
    )
    assert len(done) == 6


def test_only_out_of_memory_errors_are_caught():
    def fail(error):
        raise error

    assert catch_out_of_memory(lambda: 3, CPU) == 3
    assert catch_out_of_memory(lambda: fail(torch.OutOfMemoryError("CUDA out of memory")), CPU) is None
    assert catch_out_of_memory(lambda: fail(MemoryError()), CPU) is None
    assert is_out_of_memory(RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"))
    with pytest.raises(RuntimeError, match="another"):
        catch_out_of_memory(lambda: fail(RuntimeError("another")), CPU)


# --- slides


@pytest.fixture(scope="module")
def bench_workspace(tmp_path_factory):
    return create_workspace(tmp_path_factory.mktemp("bench"))


def test_tile_counts_of_the_paper_cohort():
    slides = slides_from_paper()
    assert (slides.count, slides.files) == (2030, ())
    tile_counts = count_tiles(slides, make_default_config("uni", "auto"))
    assert tile_counts == TileCounts(
        training_tiles=1624 * 300,
        validation_tiles=203 * 10_000,
        final_prediction_tiles=406 * 10_000,
        epochs=20,
        slide_tiles=10_000,
    )


def test_tile_counts_follow_the_settings_of_a_run(bench_workspace):
    changes = ["adaptation.tiles_per_slide=3", "schedule.epochs=7", 'selection.validation_tiles="all"']
    config = load_config(bench_workspace / "run.toml", changes)
    slides = slides_from_run(config)
    assert slides.source == "run"
    assert len(slides.files) == 3
    assert count_tiles(slides, config) == TileCounts(
        training_tiles=4 * 3, validation_tiles=2 * 4, final_prediction_tiles=6 * 4, epochs=7, slide_tiles=4
    )


def test_run_with_stored_features_is_rejected(bench_workspace):
    config = load_config(bench_workspace / "run.toml", ["adaptation.method=fixed"])
    with pytest.raises(InputError, match="stored features"):
        slides_from_run(config)


def test_splits_of_the_cohort_table_are_used(bench_workspace):
    slides = slides_from_cohort(bench_workspace / "cohort.csv", bench_workspace / "tiles")
    assert {split: len(tiles) for split, tiles in slides.tiles_by_split.items()} == {"train": 4, "val": 2, "test": 4}
    assert (slides.mean_tiles, slides.slides_without_tiles) == (4, 0)


def test_cohort_without_splits_gets_default_fractions(bench_workspace, tmp_path):
    rows = read_rows(bench_workspace / "cohort.csv")
    lines = [f"{row['slide_id']},{bench_workspace / row['path']}" for row in rows] + [
        f"other,{bench_workspace / 'other.svs'}"
    ]
    (tmp_path / "plain.csv").write_text("\n".join(["slide_id,path", *lines]) + "\n")
    slides = slides_from_cohort(tmp_path / "plain.csv", bench_workspace / "tiles")
    assert {split: len(tiles) for split, tiles in slides.tiles_by_split.items()} == {"train": 8, "val": 1, "test": 1}
    assert slides.slides_without_tiles == 1


def test_hint_for_a_cohort_without_tiles_contains_the_command(bench_workspace, tmp_path):
    with pytest.raises(CohortError) as caught:
        slides_from_cohort(bench_workspace / "cohort.csv", tmp_path)
    assert f"tapfm tile {bench_workspace / 'cohort.csv'} --out {tmp_path}" in caught.value.hint
    with pytest.raises(CohortError) as caught:
        slides_from_cohort(bench_workspace / "cohort.csv", tmp_path, bench_workspace)
    assert f"--slides {bench_workspace} --out {tmp_path}" in caught.value.hint


def test_slides_without_a_split_are_not_counted_if_others_have_one(bench_workspace, tmp_path):
    first, second, *_ = read_rows(bench_workspace / "cohort.csv")
    table = tmp_path / "cohort.csv"
    lines = [f"{row['slide_id']},{bench_workspace / row['path']}" for row in (first, second)]
    table.write_text(f"slide_id,path,split\n{lines[0]},train\n{lines[1]},\n")
    slides = slides_from_cohort(table, bench_workspace / "tiles")
    assert (slides.count, slides.slides_without_tiles) == (1, 0)
    table.write_text(f"slide_id,path,split\nother,{bench_workspace / '0.svs'},train\n{lines[1]},\n")
    with pytest.raises(CohortError, match="tapfm tile"):
        slides_from_cohort(table, bench_workspace / "tiles")


def test_slides_to_read_are_spread_over_the_table():
    assert select_evenly(list("abcdefg")) == ("a", "d", "g")
    assert select_evenly(list("ab")) == ("a", "b")


def test_few_slides_are_all_for_training():
    assert assign_splits([5, 6]) == [("train", 5), ("train", 6)]


# --- reading


def test_reading_is_timed_after_the_workers_have_started(bench_workspace):
    file = slides_from_cohort(bench_workspace / "cohort.csv", bench_workspace / "tiles").files[0]
    ticks = iter(range(1000))
    row = measure_reading([file], 224, workers=0, budget_s=0, synthetic=False, clock=lambda: float(next(ticks)))
    assert row.tiles == MIN_REQUESTS * len(POSITIONS)  # each request has all four tiles
    assert row.seconds == MIN_REQUESTS  # one tick per request
    assert row.tiles_per_second == len(POSITIONS)


def test_unreadable_slide_is_reported_as_a_problem(tmp_path):
    (tmp_path / "broken.svs").write_bytes(b"nothing")
    file = SlideFile(tmp_path / "broken.svs", TileSet("broken", POSITIONS, 224, 224))
    row = measure_reading([file], 224, workers=0, budget_s=0, synthetic=False)
    assert row.tiles_per_second is None
    assert row.problem == "no tile can be read"
    assert "broken.svs" in row.reason


def test_readable_tiles_are_counted_if_others_fail(tmp_path):
    write_slide(tmp_path / "part.svs", section(448, 448, seed=0), tile_px=224, downsamples=(1,))
    beyond = np.array([[0, 0], [100_000, 0]])
    file = SlideFile(tmp_path / "part.svs", TileSet("part", beyond, 224, 224))
    row = measure_reading([file], 224, workers=0, budget_s=0, synthetic=False)
    assert 0 < row.tiles <= 2 * MIN_REQUESTS


def test_synthetic_slide_has_40x_and_tiles_on_tissue(tmp_path):
    file = write_synthetic_slide(tmp_path, 224)
    slide = open_slide(file.path)
    assert file.tiles.side_px0 in (448, 449, 450, 451, 452)
    assert len(file.tiles) > TILES_PER_REQUEST // 2
    assert (
        file.tiles.positions + file.tiles.side_px0 <= np.array([slide.metadata.width_px0, slide.metadata.height_px0])
    ).all()
    tiles = [slide.read(x, y, file.tiles.side_px0, 32) for x, y in file.tiles.positions.tolist()]
    assert np.mean([tile.mean() for tile in tiles]) < 225  # glass is brighter


# --- encoding and steps


@pytest.mark.parametrize("card", load_encoder_cards().values(), ids=lambda card: card.key)
def test_forward_gflop_match_the_encoder_card(card):
    assert card.gflops is not None
    assert count_forward_gflop(card) == pytest.approx(card.gflops, abs=0.051)


def test_forward_gflop_of_an_encoder_without_a_card_value():
    assert find_encoder_card("timm:vit_small_patch16_224").gflops is None
    assert count_forward_gflop(find_encoder_card("timm:vit_small_patch16_224")) == pytest.approx(9.2, abs=0.051)


def test_device_speed_on_a_cpu(monkeypatch):
    monkeypatch.setattr("tapfm.bench.device_speed._SIDE", {"cpu": 64})
    peak = measure_matrix_product(CPU, torch.float32, budget_s=0.0)
    assert (peak.precision, peak.side) == ("float32", 64)
    assert peak.tflops > 0
    assert measure_copy_speed(CPU, budget_s=0.0) is None


def test_encoding_speed_is_relative_to_the_matrix_product(one_thread):  # noqa: ARG001
    row = measure_encoding(pocket(), matrix_tflops=0.003, budget_s=0.0)
    assert row.tiles == 2  # 0.3 of 3 GFLOP/s, at 0.44 GFLOP per tile
    assert row.tiles_per_second == pytest.approx(row.tiles / row.seconds)
    assert row.peak_fraction == pytest.approx(row.tiles_per_second * row.gflop_per_tile / 3)
    assert row.peak_gib is row.compile_s is row.problem is None


@pytest.mark.parametrize("aggregator", ["cls-attention", "abmil"])
@pytest.mark.parametrize(("strategy", "chunk"), [("one pass", None), ("chunked", 2)])
def test_step_is_measured_with_each_strategy(one_thread, strategy, chunk, aggregator):  # noqa: ARG001
    setup = pocket()
    section_with_name = setup.config.aggregator.model_copy(update={"name": aggregator, "options": {}})
    setup = BenchSetup(setup.config.model_copy(update={"aggregator": section_with_name}), CPU)
    row = measure_step(setup, strategy, "last:1", 4, budget_s=0.0)
    assert (row.strategy, row.scope, row.tiles, row.chunk, row.problem) == (strategy, "last:1", 4, chunk, None)
    assert row.seconds > 0
    assert row.tiles_per_second == pytest.approx(4 / row.seconds)


def test_out_of_memory_is_recorded_as_a_problem(monkeypatch):
    def run_out_of_memory(*_, **__):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(model_speed, "run_train_step", run_out_of_memory)
    row = measure_step(pocket(), "one pass", "full", 4, budget_s=0.0)
    assert (row.problem, row.tiles_per_second) == ("out of memory", None)
    monkeypatch.undo()
    monkeypatch.setattr("tapfm.adaptation.learner.two_graph_step", run_out_of_memory)
    for strategy in ("one pass", "chunked"):  # training would retry with smaller chunks
        assert measure_step(pocket(chunk=1), strategy, "full", 4, budget_s=0.0).problem == "out of memory"
    monkeypatch.setattr(model_speed, "build_inference_encoder", run_out_of_memory)
    assert measure_encoding(pocket(), 0.1, budget_s=0.0).problem == "out of memory"


def test_number_of_tiles_per_step():
    fast, slow = EncodingSpeed(64, 0.001, 1.0, 0.5, None, None), EncodingSpeed(64, 64.0, 1.0, 0.5, None, None)
    assert choose_tiles_per_step(pocket(), 4000, fast, max_cpu_step_s=2.0) == 300
    assert choose_tiles_per_step(pocket(tiles_per_slide="all"), 4000, fast, max_cpu_step_s=2.0) == 4000
    assert choose_tiles_per_step(pocket(tiles_per_slide="all"), 40_000, fast, max_cpu_step_s=2.0) == 4096
    assert choose_tiles_per_step(pocket(), 4000, slow, max_cpu_step_s=80.0) == 20  # 1 tile/s, 4 forward passes per step
    assert choose_tiles_per_step(pocket(), 4000, slow, max_cpu_step_s=2.0) == 4
    on_gpu = BenchSetup(pocket().config, torch.device("cuda"))
    assert choose_tiles_per_step(on_gpu, 4000, slow, max_cpu_step_s=2.0) == 300


def test_chunk_size_is_configured_or_splits_the_bag():
    assert choose_chunk(pocket(chunk=5), 300) == 5
    assert choose_chunk(pocket(), 300) == 64
    assert choose_chunk(pocket(), 20) == 10
