"""What `tapfm bench` measures with, and what it makes of it."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from cohort_files import rows_of
from slide_files import section, write_slide
from training_lab import POSITIONS, make_lab

from tapfm.bench import computing
from tapfm.bench.computing import EncodingSpeed, StepSpeed, encoding_speed, step_speed, tiles_of_step
from tapfm.bench.computing import _chunk_of as chunk_of
from tapfm.bench.expectations import Speeds, TileCounts, expect
from tapfm.bench.measure import _speeds_of as speeds_of
from tapfm.bench.models import BenchSubject, forward_gflop, settings_for
from tapfm.bench.peak import copy_speed, matrix_peak
from tapfm.bench.reading import _LEAST as LEAST
from tapfm.bench.reading import _REQUEST as REQUEST
from tapfm.bench.reading import ReadingSpeed, painted_file, reading_speed
from tapfm.bench.slides import (
    SlideFile,
    slides_of_cohort,
    slides_of_paper,
    slides_of_run,
    work_of,
)
from tapfm.bench.slides import (
    _share_out as share_out,
)
from tapfm.bench.slides import (
    _spread as spread,
)
from tapfm.bench.timing import _is_out_of_memory as is_out_of_memory
from tapfm.bench.timing import time_repeated, within_memory
from tapfm.config.loading import load_config
from tapfm.encoders.catalog import encoder_card, encoder_cards
from tapfm.errors import CohortError, InputError
from tapfm.slides.opening import open_slide
from tapfm.tiles.store import TileSet

CPU = torch.device("cpu")
WORK = TileCounts(training_tiles=1000, validation_tiles=200, held_out_tiles=600, epochs=3, slide_tiles=50)


def pocket(**changes):
    config = settings_for("tapfm-pocket", "auto")
    return BenchSubject(config.model_copy(update={"adaptation": config.adaptation.model_copy(update=changes)}), CPU)


# --- expectations


def test_beside_a_gpu_the_slower_of_reading_and_computing_decides():
    rows = expect(WORK, Speeds(reading=100, encoding=50, step=20), shared_cores=False)
    assert [row.seconds for row in rows] == [50, 4, 12, 3 * (50 + 4) + 12, 1]
    assert [row.bound for row in rows] == ["computing", "computing", "computing", None, "computing"]
    assert [row.tiles for row in rows] == [1000, 200, 600, 3 * 1200 + 600, 50]


def test_slow_reading_is_named_as_what_bounds():
    epoch, validation, held_out, whole, slide = expect(WORK, Speeds(10, 50, 20), shared_cores=False)
    assert (epoch.seconds, validation.seconds, held_out.seconds, slide.seconds) == (100, 20, 60, 5)
    assert whole.seconds == 3 * 120 + 60
    assert {row.bound for row in (epoch, validation, held_out, slide)} == {"reading"}


def test_on_the_same_cores_times_add_up():
    rows = expect(WORK, Speeds(reading=100, encoding=50, step=20), shared_cores=True)
    assert [row.seconds for row in rows] == [60, 6, 18, 3 * (60 + 6) + 18, 1.5]


def test_what_was_not_measured_is_not_expected():
    epoch, validation, _, whole, slide = expect(WORK, Speeds(100, 50, None), shared_cores=False)
    assert epoch.seconds is whole.seconds is None
    assert validation.seconds == 4
    assert slide.seconds == 1
    assert all(row.seconds is None for row in expect(WORK, Speeds(None, 50, 20), shared_cores=False))


def test_without_validation_slides_nothing_is_waited_for():
    work = TileCounts(training_tiles=1000, validation_tiles=0, held_out_tiles=0, epochs=2, slide_tiles=50)
    _, validation, held_out, whole, _ = expect(work, Speeds(100, 50, 20), shared_cores=False)
    assert validation.seconds == held_out.seconds == 0
    assert whole.seconds == 100


def test_a_run_reads_with_all_processes_and_steps_in_the_faster_way_that_fits():
    reading = [ReadingSpeed(1, 1, True, 100, 1.0), ReadingSpeed(8, 1, True, 500, 1.0)]
    encoding = EncodingSpeed(64, 0.5, 1.0, 0.5, None, None)
    steps = [
        StepSpeed("one pass", "full", 300, None, None, None, None, "out of memory"),
        StepSpeed("chunked", "full", 300, 64, 10.0, None, None),
        StepSpeed("one pass", "lora:16", 300, None, 1.0, None, None),
    ]
    assert speeds_of(reading, encoding, steps, "full") == Speeds(500, 128, 30)
    assert speeds_of(reading, encoding, steps[:1], "full").step is None


# --- timing


def test_the_first_time_is_kept_apart_and_the_median_taken():
    clock = SimpleNamespace(now=0.0)
    takes = iter([10.0, 2.0, 1.0, 6.0, 0.0, 0.0])

    def work():
        clock.now += next(takes)

    timing = time_repeated(work, CPU, budget_s=9.0, least=2, clock=lambda: clock.now)
    assert (timing.seconds, timing.repeats, timing.first_s, timing.began_s) == (2.0, 3, 10.0, 8.0)


def test_repeats_end_when_there_are_enough():
    done = []
    assert time_repeated(lambda: done.append(1), CPU, budget_s=1e9, least=2, most=5, clock=lambda: 0.0).repeats == 5
    assert len(done) == 6


def test_only_memory_that_does_not_suffice_is_passed_by():
    def fail(error):
        raise error

    assert within_memory(lambda: 3, CPU) == 3
    assert within_memory(lambda: fail(torch.OutOfMemoryError("CUDA out of memory")), CPU) is None
    assert within_memory(lambda: fail(MemoryError()), CPU) is None
    assert is_out_of_memory(RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"))
    with pytest.raises(RuntimeError, match="another"):
        within_memory(lambda: fail(RuntimeError("another")), CPU)


# --- slides


@pytest.fixture(scope="module")
def bench_lab(tmp_path_factory):
    return make_lab(tmp_path_factory.mktemp("bench"))


def test_the_papers_cohort_is_counted_by_the_recipe():
    slides = slides_of_paper()
    assert (slides.count, slides.files) == (2030, ())
    work = work_of(slides, settings_for("uni", "auto"))
    assert work == TileCounts(
        training_tiles=1624 * 300,
        validation_tiles=203 * 10_000,
        held_out_tiles=406 * 10_000,
        epochs=20,
        slide_tiles=10_000,
    )


def test_a_runs_slides_are_counted_by_its_settings(bench_lab):
    changes = ["adaptation.tiles_per_slide=3", "schedule.epochs=7", 'selection.validation_tiles="all"']
    config = load_config(bench_lab / "run.toml", changes)
    slides = slides_of_run(config)
    assert slides.source == "run"
    assert len(slides.files) == 3
    assert work_of(slides, config) == TileCounts(
        training_tiles=4 * 3, validation_tiles=2 * 4, held_out_tiles=6 * 4, epochs=7, slide_tiles=4
    )


def test_a_run_on_stored_features_is_refused(bench_lab):
    config = load_config(bench_lab / "run.toml", ["adaptation.method=fixed"])
    with pytest.raises(InputError, match="stored features"):
        slides_of_run(config)


def test_a_cohort_keeps_its_splits(bench_lab):
    slides = slides_of_cohort(bench_lab / "cohort.csv", bench_lab / "tiles")
    assert {split: len(tiles) for split, tiles in slides.tiles_of.items()} == {"train": 4, "val": 2, "test": 4}
    assert (slides.mean_tiles, slides.without_tiles) == (4, 0)


def test_a_cohort_without_splits_is_shared_out_and_slides_without_tiles_are_counted(bench_lab, tmp_path):
    rows = rows_of(bench_lab / "cohort.csv")
    lines = [f"{row['slide_id']},{bench_lab / row['path']}" for row in rows] + [f"other,{bench_lab / '0.svs'}"]
    (tmp_path / "plain.csv").write_text("\n".join(["slide_id,path", *lines]) + "\n")
    slides = slides_of_cohort(tmp_path / "plain.csv", bench_lab / "tiles")
    assert {split: len(tiles) for split, tiles in slides.tiles_of.items()} == {"train": 8, "val": 1, "test": 1}
    assert slides.without_tiles == 1


def test_a_cohort_without_any_tiles_says_what_to_type(bench_lab, tmp_path):
    with pytest.raises(CohortError) as refused:
        slides_of_cohort(bench_lab / "cohort.csv", tmp_path)
    assert refused.value.hint == f"Make them: tapfm tile {bench_lab / 'cohort.csv'} --out {tmp_path}"


def test_slides_to_read_come_from_all_over_the_table():
    assert spread(list("abcdefg")) == ("a", "d", "g")
    assert spread(list("ab")) == ("a", "b")


def test_few_slides_are_all_trained_on():
    assert share_out([5, 6]) == [("train", 5), ("train", 6)]


# --- reading


def test_reading_counts_tiles_after_the_processes_have_started(bench_lab):
    file = slides_of_cohort(bench_lab / "cohort.csv", bench_lab / "tiles").files[0]
    ticks = iter(range(1000))
    row = reading_speed([file], 224, workers=0, budget_s=0, painted=False, clock=lambda: float(next(ticks)))
    assert row.tiles == LEAST * len(POSITIONS)  # each request has all four tiles
    assert row.seconds == LEAST  # a tick for each
    assert row.tiles_per_second == len(POSITIONS)


def test_slides_that_cannot_be_read_are_told_and_do_not_hang(tmp_path):
    (tmp_path / "broken.svs").write_bytes(b"nothing")
    file = SlideFile(tmp_path / "broken.svs", TileSet("broken", POSITIONS, 224, 224))
    row = reading_speed([file], 224, workers=0, budget_s=0, painted=False)
    assert row.tiles_per_second is None
    assert row.problem == "no tile can be read"
    assert row.reason.startswith("broken.svs is not a slide")


def test_a_slide_of_which_some_tiles_cannot_be_read_counts_the_others(tmp_path):
    write_slide(tmp_path / "part.svs", section(448, 448, seed=0), tile_px=224, downsamples=(1,))
    beyond = np.array([[0, 0], [100_000, 0]])
    file = SlideFile(tmp_path / "part.svs", TileSet("part", beyond, 224, 224))
    row = reading_speed([file], 224, workers=0, budget_s=0, painted=False)
    assert 0 < row.tiles <= 2 * LEAST


def test_the_painted_slide_is_at_40x_and_its_tiles_lie_on_tissue(tmp_path):
    file = painted_file(tmp_path, 224)
    slide = open_slide(file.path)
    assert file.tiles.side_px0 in (448, 449, 450, 451, 452)
    assert len(file.tiles) > REQUEST // 2
    assert (
        file.tiles.positions + file.tiles.side_px0 <= np.array([slide.metadata.width_px0, slide.metadata.height_px0])
    ).all()
    tiles = [slide.read(x, y, file.tiles.side_px0, 32) for x, y in file.tiles.positions.tolist()]
    assert np.mean([tile.mean() for tile in tiles]) < 225  # glass is brighter


# --- computing


@pytest.mark.parametrize("card", encoder_cards().values(), ids=lambda card: card.key)
def test_flop_of_a_forward_are_those_of_the_card(card):
    assert card.gflops is not None
    assert forward_gflop(card) == pytest.approx(card.gflops, abs=0.051)


def test_flop_are_counted_where_a_card_has_none():
    assert encoder_card("timm:vit_small_patch16_224").gflops is None
    assert forward_gflop(encoder_card("timm:vit_small_patch16_224")) == pytest.approx(9.2, abs=0.051)


def test_the_matrix_product_has_a_speed_and_a_cpu_nothing_to_copy_to(monkeypatch):
    monkeypatch.setattr("tapfm.bench.peak._SIDE", {"cpu": 64})
    peak = matrix_peak(CPU, torch.float32, budget_s=0.0)
    assert (peak.precision, peak.side) == ("float32", 64)
    assert peak.tflops > 0
    assert copy_speed(CPU, budget_s=0.0) is None


def test_encoding_is_compared_with_the_matrix_product(one_thread):  # noqa: ARG001
    row = encoding_speed(pocket(), matrix_tflops=0.003, budget_s=0.0)
    assert row.tiles == 2  # 0.3 of 3 GFLOP a second, at 0.44 a tile
    assert row.tiles_per_second == pytest.approx(row.tiles / row.seconds)
    assert row.peak_share == pytest.approx(row.tiles_per_second * row.gflop_per_tile / 3)
    assert row.peak_gib is row.compiling_s is row.problem is None


@pytest.mark.parametrize("aggregator", ["cls-attention", "abmil"])
@pytest.mark.parametrize(("way", "chunk"), [("one pass", None), ("chunked", 2)])
def test_a_step_is_taken_both_ways(one_thread, way, chunk, aggregator):  # noqa: ARG001
    subject = pocket()
    section_of = subject.config.aggregator.model_copy(update={"name": aggregator, "options": {}})
    subject = BenchSubject(subject.config.model_copy(update={"aggregator": section_of}), CPU)
    row = step_speed(subject, way, "last:1", 4, budget_s=0.0)
    assert (row.way, row.scope, row.tiles, row.chunk, row.problem) == (way, "last:1", 4, chunk, None)
    assert row.seconds > 0
    assert row.tiles_per_second == pytest.approx(4 / row.seconds)


def test_a_step_that_does_not_fit_is_a_row_that_says_so(monkeypatch):
    def too_large(*_, **__):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(computing, "learn_once", too_large)
    row = step_speed(pocket(), "one pass", "full", 4, budget_s=0.0)
    assert (row.problem, row.tiles_per_second) == ("out of memory", None)
    monkeypatch.undo()
    monkeypatch.setattr("tapfm.adaptation.learner.two_graph_step", too_large)
    for way in ("one pass", "chunked"):  # training would go on in smaller chunks
        assert step_speed(pocket(chunk=1), way, "full", 4, budget_s=0.0).problem == "out of memory"
    monkeypatch.setattr(computing, "build_inference_encoder", too_large)
    assert encoding_speed(pocket(), 0.1, budget_s=0.0).problem == "out of memory"


def test_tiles_of_a_step_are_the_recipes_where_there_is_time():
    fast, slow = EncodingSpeed(64, 0.001, 1.0, 0.5, None, None), EncodingSpeed(64, 64.0, 1.0, 0.5, None, None)
    assert tiles_of_step(pocket(), 4000, fast, step_s=2.0) == 300
    assert tiles_of_step(pocket(tiles_per_slide="all"), 4000, fast, step_s=2.0) == 4000
    assert tiles_of_step(pocket(tiles_per_slide="all"), 40_000, fast, step_s=2.0) == 4096
    assert tiles_of_step(pocket(), 4000, slow, step_s=80.0) == 20  # a tile a second, a step costs four
    assert tiles_of_step(pocket(), 4000, slow, step_s=2.0) == 4
    on_gpu = BenchSubject(pocket().config, torch.device("cuda"))
    assert tiles_of_step(on_gpu, 4000, slow, step_s=2.0) == 300


def test_chunks_are_the_configurations_or_make_several_of_a_small_bag():
    assert chunk_of(pocket(chunk=5), 300) == 5
    assert chunk_of(pocket(), 300) == 64
    assert chunk_of(pocket(), 20) == 10
