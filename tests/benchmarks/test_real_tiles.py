"""The comparison on real tiles with a few bags: every model, every stage, and the tables."""

import importlib.util
import json
import sys
from pathlib import Path

import numpy as np
import pytest
from command_line import run_script
from PIL import Image

ROOT = Path(__file__).parents[2]
REAL_TILES = ROOT.parent / "shared" / "data" / "tiles" / "crc"
COLOURS = {"AC": (90, 60, 140), "H": (230, 150, 180), "S": (210, 120, 160), "T": (180, 110, 170), "V": (200, 160, 200)}


@pytest.fixture
def tiles(tmp_path):
    """A few tiles in one folder per class: real tiles if they are next to the checkout, else random ones."""
    folder, rng = tmp_path / "tiles", np.random.default_rng(0)
    for split, count in (("train", 12), ("test", 6)):
        for name, colour in COLOURS.items():
            (folder / split / name).mkdir(parents=True)
            if REAL_TILES.exists():
                for file in sorted((REAL_TILES / split / name).iterdir())[:count]:
                    (folder / split / name / file.name).symlink_to(file)
                continue
            for number in range(count):
                pixels = np.clip(rng.normal(colour, 30, (64, 64, 3)), 0, 255).astype(np.uint8)
                Image.fromarray(pixels).save(folder / split / name / f"{number:04}.webp")
    return folder


def run_real_tiles(action, tiles, results, *more):
    options = (
        action,
        "--quick",
        "--device",
        "cpu",
        "--tiles",
        tiles,
        "--results",
        results,
        "--encoder",
        "tapfm-pocket",
    )
    done = run_script(ROOT / "benchmarks" / "real_tiles.py", *options, "--tile-px", 64, *more)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_model_is_trained_once_and_reported(tiles, tmp_path):
    results = tmp_path / "results.jsonl"
    run_real_tiles("train", tiles, results, "--stages", "rates", "--minutes", "0")
    assert not results.exists(), "no job is started after the time limit"
    run_real_tiles("train", tiles, results)
    rows = [json.loads(line) for line in results.read_text().splitlines()]
    assert {row["stage"] for row in rows} == {"rates", "binary", "large", "multilabel"}
    assert len({(row["method"], row["aggregator"]) for row in rows if row["stage"] == "binary"}) == 10
    assert all(0 <= row["tile_auc_after"] <= 1 and len(row["test_logits"]) == 8 for row in rows)
    before = results.read_bytes()
    run_real_tiles("train", tiles, results)
    assert results.read_bytes() == before, "finished jobs are not repeated"
    page = run_real_tiles("report", tiles, results)
    for model in ("tapfm + cls-gated", "finetune + cls-attention", "colour statistics"):
        assert f"| {model} |" in page


def test_float8_is_compared_with_float32(tiles, tmp_path):
    out = tmp_path / "float8.json"
    options = ("--tiles", tiles, "--device", "cpu", "--encoder", "tapfm-pocket", "--tile-px", 64, "--bag-tiles", 10)
    options += ("--training-bags", 4, "--test-bags", 8, "--epochs", 1, "--json", out)
    done = run_script(ROOT / "benchmarks" / "float8.py", *options)
    assert done.returncode == 0, done.stderr
    rows = json.loads(out.read_text())
    assert len(rows) == 3 * (done.stdout.count("\n| ") - 1) == 3 * 4
    for exact, half, quarter in zip(rows[::3], rows[1::3], rows[2::3], strict=True):
        assert [row["precision"] for row in (exact, half, quarter)] == ["float32", "bfloat16", "float8"]
        assert exact["largest_change"] == 0
        assert 0 < half["largest_change"] < quarter["largest_change"] < 0.05


def test_partial_line_is_ignored(tmp_path, monkeypatch):
    spec = importlib.util.spec_from_file_location("real_tiles", ROOT / "benchmarks" / "real_tiles.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "real_tiles", module)  # needed by its dataclasses
    spec.loader.exec_module(module)
    path = tmp_path / "results.jsonl"
    path.write_text('{"stage": "rates"}\n{"stage": "bin')  # the process was killed while writing
    results = module.Results(path)
    for stage in ("binary", "large"):
        results.add({"stage": stage})
    assert module.Results(path).rows == [{"stage": "rates"}, {"stage": "binary"}, {"stage": "large"}]
