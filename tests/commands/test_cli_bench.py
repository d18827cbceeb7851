"""`tapfm bench` as a user types it."""

import json
import platform
import tempfile

import pytest
import torch
from command_line import tapfm

from tapfm.bench import measure
from tapfm.encoders.precision import can_compile

KEYS = [
    *("tapfm", "made_on", "encoder", "precision", "compiled", "quick", "machine", "matrix", "copying", "reading"),
    *("encoding", "steps", "slides", "work", "expected"),
]
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")


@pytest.fixture(scope="module")
def bench(lab):
    """A quick measurement for a run, and what was said."""
    out = lab / "figures" / "bench.json"
    result = tapfm("bench", lab / "run.toml", "--quick", "--scope", "last:1", "--workers", 1, "--out", out)
    assert result.returncode == 0, result.said
    return json.loads(out.read_text()), result.said


def test_all_figures_are_there_and_agree_with_each_other(bench):
    figures, _ = bench
    assert list(figures) == KEYS
    assert (figures["encoder"], figures["precision"], figures["quick"]) == ("tapfm-pocket", "float32", True)
    assert figures["compiled"] is False
    assert figures["copying"] is None
    assert figures["matrix"]["tflops"] > 0
    assert [row["workers"] for row in figures["reading"]] == [1]
    for row in [*figures["reading"], figures["encoding"], *figures["steps"]]:
        assert row["problem"] is None
        assert row["tiles_per_second"] == pytest.approx(row["tiles"] / row["seconds"])
    ways = [(row["way"], row["scope"]) for row in figures["steps"]]
    assert ways == [("one pass", "full"), ("chunked", "full"), ("one pass", "last:1"), ("chunked", "last:1")]
    encoding = figures["encoding"]
    speed = encoding["tiles_per_second"] * encoding["gflop_per_tile"]
    assert encoding["peak_share"] == pytest.approx(speed / 1e3 / figures["matrix"]["tflops"])


def test_times_follow_from_speeds_and_the_runs_slides(bench):
    figures, _ = bench
    assert figures["slides"] == {
        "source": "run",
        "by_split": {"train": 4, "val": 2, "test": 4},
        "mean_tiles": 4,
        "without_tiles": 0,
    }
    assert figures["work"]["training_tiles"] == 16
    reading = figures["reading"][-1]["tiles_per_second"]
    step = max(row["tiles_per_second"] for row in figures["steps"] if row["scope"] == "full")
    epoch = figures["expected"][0]
    assert epoch["seconds"] == pytest.approx(16 / reading + 16 / step)
    assert [row["what"] for row in figures["expected"]] == [
        "training, an epoch",
        "validation, an epoch",
        "held-out slides, at the end",
        "the whole training, 1 epoch",
        "prediction of a slide",
    ]


def test_the_table_says_what_was_measured_and_for_whom(bench):
    _, said = bench
    for words in (
        "tapfm-pocket in float32, random weights",
        "measuring: step, chunked, full",
        "matrix product",
        "1 process, 3 slides of yours",
        "of the matrix product's speed",
        "step, one pass",
        "last:1",
        "Expected for your run: 10 slides (4 to train on) of 4 tiles each",
        "their times are added",
        "Quick: these measurements are rough.",
    ):
        assert words in said, words


def test_nothing_private_is_written(bench, lab):
    text = json.dumps(bench[0])
    for private in (str(lab), "case-0", "Doe", "FGFR3", "cohort.csv", platform.node()):
        assert private not in text, private


def test_ctrl_c_leaves_nothing(tmp_path, monkeypatch):
    def pressed(*_, **__):
        raise KeyboardInterrupt

    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    monkeypatch.setattr(measure, "reading_speed", pressed)
    result = tapfm("bench", "--quick", "--device", "cpu", "--out", tmp_path / "bench.json")
    assert result.returncode == 130
    assert "Stopped. Nothing was written." in result.said
    assert [path.name for path in tmp_path.rglob("*")] == ["temporary"]


def test_a_way_that_does_not_fit_does_not_stop_the_others(lab, monkeypatch):
    step_speed = measure.step_speed

    def only_in_chunks(subject, way, *arguments, **keywords):
        if way == "chunked":
            return step_speed(subject, way, *arguments, **keywords)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("tapfm.bench.computing.learn_once", out_of_memory)
            return step_speed(subject, way, *arguments, **keywords)

    def out_of_memory(*_):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(measure, "step_speed", only_in_chunks)
    cohort = ("--cohort", lab / "cohort.csv", "--tiles", lab / "tiles")
    result = tapfm("bench", *cohort, "--quick", "--device", "cpu", "--workers", 0)
    assert result.returncode == 0, result.said
    assert "out of memory" in result.said
    assert "Expected for your cohort" in result.said


def test_slides_that_cannot_be_read_are_named_on_the_screen_only(own_lab):
    for path in own_lab.glob("*.svs"):
        path.write_bytes(b"nothing")
    out = own_lab / "bench.json"
    result = tapfm("bench", own_lab / "run.toml", "--quick", "--out", out)
    assert result.returncode == 0, result.said
    assert "Nothing can be read: 0.svs is not a slide" in result.said
    assert ".svs" not in out.read_text()
    assert {row["seconds"] for row in json.loads(out.read_text())["expected"]} == {None}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["run.toml", "--cohort", "cohort.csv"], "names slides and tiles, and so do --cohort"),
        (["--cohort", "cohort.csv"], "--cohort needs --tiles"),
        (["--tiles", "tiles"], "--tiles needs --cohort"),
        (["--slides", "slides"], "--slides needs --cohort"),
        (["--scope", "lora"], "There is no scope of adaptation 'lora'"),
        (["--encoder", "tapfm-pocket", "--device", "cpu", "--scope", "last:9"], "this encoder has 4"),
        (["--precision", "float8"], "There is no precision named 'float8'"),
        (["--encoder", "unii"], "Did you mean: uni"),
        (["--device", "tpu"], "'tpu' is not a device"),
        (["--out", "."], "is a folder"),
    ],
)
def test_what_cannot_be_measured_is_refused(arguments, said):
    result = tapfm("bench", *arguments)
    assert result.returncode == 2, result.said
    assert said in result.said
    assert "measuring" not in result.said


@needs_gpu
@pytest.mark.filterwarnings("default")  # the compiler has warnings of its own
def test_a_gpu_tells_its_memory_and_what_compiling_takes(tmp_path):
    arguments = ("--encoder", "kaiko-s16", "--scope", "lora:8", "--quick", "--device", "cuda")
    result = tapfm("bench", *arguments, "--out", tmp_path / "bench.json")
    assert result.returncode == 0, result.said
    figures = json.loads((tmp_path / "bench.json").read_text())
    assert figures["copying"]["gb_per_second"] > 0
    assert figures["machine"]["device"] == torch.cuda.get_device_name()
    assert figures["compiled"] is can_compile(torch.device("cuda"))
    for row in (figures["encoding"], *figures["steps"]):
        assert row["problem"] is None
        assert row["peak_gib"] > 0
        assert (row["compiling_s"] is not None) is figures["compiled"]
    one_pass, chunked, lora, _ = figures["steps"]
    assert one_pass["tiles"] == 300
    assert chunked["peak_gib"] < one_pass["peak_gib"]
    assert lora["peak_gib"] < one_pass["peak_gib"]
    epoch = figures["expected"][0]
    reading = figures["reading"][-1]["tiles_per_second"]
    step = max(one_pass["tiles_per_second"], chunked["tiles_per_second"])
    assert epoch["seconds"] == pytest.approx(epoch["tiles"] / min(reading, step))


@needs_gpu
@pytest.mark.filterwarnings("default")  # the compiler has warnings of its own
def test_what_a_gpu_has_no_memory_for_is_told_in_its_row(tmp_path):
    torch.cuda.empty_cache()
    total = torch.cuda.mem_get_info()[1]
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + 4 * 2**30) / total)
    try:
        arguments = ("--encoder", "kaiko-l14", "--quick", "--device", "cuda", "--out", tmp_path / "bench.json")
        result = tapfm("bench", *arguments)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert result.returncode == 0, result.said
    figures = json.loads((tmp_path / "bench.json").read_text())
    assert {row["problem"] for row in figures["steps"]} == {"out of memory"}  # its moments alone take more
    assert figures["expected"][0]["seconds"] is None
    assert figures["encoding"]["tiles_per_second"] > 0
