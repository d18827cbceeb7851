"""The command `tapfm bench`."""

import json
import platform
import tempfile

import pytest
import torch
from command_line import tapfm

from tapfm.bench import measure
from tapfm.encoders.precision import can_compile_on_gpu

KEYS = [
    *("tapfm", "date", "encoder", "precision", "compiled", "quick", "machine", "matrix_product", "copy_to_gpu"),
    *("reading", "encoding", "steps", "slides", "tile_counts", "estimates"),
]
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")


@pytest.fixture(scope="module")
def bench(workspace):
    """JSON file and printed output of a quick measurement for a run."""
    out = workspace / "results" / "bench.json"
    result = tapfm("bench", workspace / "run.toml", "--quick", "--scope", "last:1", "--workers", 1, "--out", out)
    assert result.returncode == 0, result.output
    return json.loads(out.read_text()), result.output


def test_json_contains_all_measurements(bench):
    values, _ = bench
    assert list(values) == KEYS
    assert (values["encoder"], values["precision"], values["quick"]) == ("tapfm-pocket", "float32", True)
    assert values["compiled"] is False
    assert values["copy_to_gpu"] is None
    assert values["matrix_product"]["tflops"] > 0
    assert [row["workers"] for row in values["reading"]] == [1]
    for row in [*values["reading"], values["encoding"], *values["steps"]]:
        assert row["problem"] is None
        assert row["tiles_per_second"] == pytest.approx(row["tiles"] / row["seconds"])
    steps = [(row["strategy"], row["scope"]) for row in values["steps"]]
    assert steps == [("one pass", "full"), ("chunked", "full"), ("one pass", "last:1"), ("chunked", "last:1")]
    encoding = values["encoding"]
    speed = encoding["tiles_per_second"] * encoding["gflop_per_tile"]
    assert encoding["peak_fraction"] == pytest.approx(speed / 1e3 / values["matrix_product"]["tflops"])


def test_estimates_follow_from_speeds_and_slides_of_the_run(bench):
    values, _ = bench
    assert values["slides"] == {
        "source": "run",
        "by_split": {"train": 4, "val": 2, "test": 4},
        "mean_tiles": 4,
        "without_tiles": 0,
    }
    assert values["tile_counts"]["training_tiles"] == 16
    reading = values["reading"][-1]["tiles_per_second"]
    step = max(row["tiles_per_second"] for row in values["steps"] if row["scope"] == "full")
    epoch = values["estimates"][0]
    assert epoch["seconds"] == pytest.approx(16 / reading + 16 / step)
    assert [row["task"] for row in values["estimates"]] == [
        "training, per epoch",
        "validation, per epoch",
        "validation and test slides, at the end",
        "whole training, 1 epoch",
        "prediction, per slide",
    ]


def test_printed_tables_show_measurements_and_slides(bench):
    _, output = bench
    for text in (
        "tapfm-pocket in float32",
        "measuring: step, chunked, full",
        "1 process, 3 slides",
        "matrix product",
        "GFLOP per tile",
        "step, one pass",
        "last:1",
        "your run",
        "10 slides",
        "4 for training",
        "times are added",
        "--quick",
    ):
        assert text in output, text


def test_json_contains_no_paths_slides_or_host_name(bench, workspace):
    text = json.dumps(bench[0])
    for private in (str(workspace), "case-0", "Doe", "FGFR3", "cohort.csv", platform.node()):
        assert private not in text, private


def test_ctrl_c_leaves_no_files(tmp_path, monkeypatch):
    def press_ctrl_c(*_, **__):
        raise KeyboardInterrupt

    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    monkeypatch.setattr(measure, "measure_reading", press_ctrl_c)
    result = tapfm("bench", "--quick", "--device", "cpu", "--out", tmp_path / "bench.json")
    assert result.returncode == 130
    assert "written" in result.output
    assert [path.name for path in tmp_path.rglob("*")] == ["temporary"]


def test_other_measurements_continue_after_out_of_memory(workspace, monkeypatch):
    measure_step = measure.measure_step

    def only_in_chunks(setup, strategy, *arguments, **keywords):
        if strategy == "chunked":
            return measure_step(setup, strategy, *arguments, **keywords)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("tapfm.bench.model_speed.run_train_step", out_of_memory)
            return measure_step(setup, strategy, *arguments, **keywords)

    def out_of_memory(*_):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(measure, "measure_step", only_in_chunks)
    cohort = ("--cohort", workspace / "cohort.csv", "--tiles", workspace / "tiles")
    result = tapfm("bench", *cohort, "--quick", "--device", "cpu", "--workers", 0)
    assert result.returncode == 0, result.output
    assert "out of memory" in result.output
    assert "your cohort: 10 slides" in result.output


def test_unreadable_slide_is_printed_but_not_in_the_json(workspace_copy):
    for path in workspace_copy.glob("*.svs"):
        path.write_bytes(f"not the slide {path.name}".encode())
    out = workspace_copy / "bench.json"
    result = tapfm("bench", workspace_copy / "run.toml", "--quick", "--out", out)
    assert result.returncode == 0, result.output
    assert "0.svs" in result.output
    assert ".svs" not in out.read_text()
    assert {row["seconds"] for row in json.loads(out.read_text())["estimates"]} == {None}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run.toml", "--cohort", "cohort.csv"], "--cohort cannot be combined with run.toml"),
        (["--cohort", "cohort.csv"], "--cohort needs --tiles"),
        (["--tiles", "tiles"], "--tiles needs --cohort"),
        (["--slides", "slides"], "--slides needs --cohort"),
        (["--scope", "lora"], "scope 'lora'"),
        (["--encoder", "tapfm-pocket", "--device", "cpu", "--scope", "last:9"], "has 4"),
        (["--precision", "float8"], "'float8'"),
        (["--encoder", "unii"], "uni"),
        (["--device", "tpu"], "'tpu' is not a device"),
        (["--out", "."], "is a folder"),
    ],
)
def test_invalid_options_are_rejected(arguments, message):
    result = tapfm("bench", *arguments)
    assert result.returncode == 2, result.output
    assert message in result.output
    assert "measuring" not in result.output


@needs_gpu
@pytest.mark.filterwarnings("default")  # the compiler issues warnings
def test_gpu_measurements_include_peak_memory_and_compile_time(tmp_path):
    arguments = ("--encoder", "kaiko-s16", "--scope", "lora:8", "--quick", "--device", "cuda")
    result = tapfm("bench", *arguments, "--out", tmp_path / "bench.json")
    assert result.returncode == 0, result.output
    values = json.loads((tmp_path / "bench.json").read_text())
    assert values["copy_to_gpu"]["gb_per_second"] > 0
    assert values["machine"]["device"] == torch.cuda.get_device_name()
    assert values["compiled"] is can_compile_on_gpu(torch.device("cuda"))
    for row in (values["encoding"], *values["steps"]):
        assert row["problem"] is None
        assert row["peak_gib"] > 0
        assert (row["compile_s"] is not None) is values["compiled"]
    one_pass, chunked, lora, _ = values["steps"]
    assert one_pass["tiles"] == 300
    assert chunked["peak_gib"] < one_pass["peak_gib"]
    assert lora["peak_gib"] < one_pass["peak_gib"]
    epoch = values["estimates"][0]
    reading = values["reading"][-1]["tiles_per_second"]
    step = max(one_pass["tiles_per_second"], chunked["tiles_per_second"])
    assert epoch["seconds"] == pytest.approx(epoch["tiles"] / min(reading, step))


@needs_gpu
@pytest.mark.filterwarnings("default")  # the compiler issues warnings
def test_out_of_memory_on_a_gpu_is_recorded_in_the_row(tmp_path):
    torch.cuda.empty_cache()
    total = torch.cuda.mem_get_info()[1]
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + 4 * 2**30) / total)
    try:
        arguments = ("--encoder", "kaiko-l14", "--quick", "--device", "cuda", "--out", tmp_path / "bench.json")
        result = tapfm("bench", *arguments)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert result.returncode == 0, result.output
    values = json.loads((tmp_path / "bench.json").read_text())
    assert {row["problem"] for row in values["steps"]} == {"out of memory"}  # the moments alone need more
    assert values["estimates"][0]["seconds"] is None
    assert values["encoding"]["tiles_per_second"] > 0
