"""The benchmark from a slide file to its prediction, on a small slide and the CPU."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def test_stages_add_up_to_less_than_the_total(tmp_path):
    out = tmp_path / "results.json"
    command = [sys.executable, str(BENCHMARKS / "slide_to_prediction.py"), "--encoder", "tapfm-pocket", "--tiles", "80"]
    command += ["--times", "1", "--workers", "1", "--device", "cpu", "--quiet", "--json", str(out)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert run.returncode == 0, run.stderr
    (row,) = json.loads(out.read_text())["rows"]
    assert row["tiles"] == pytest.approx(80, rel=0.1)
    stages = [row[name] for name in ("tiling_s", "encoding_s", "predicting_s")]
    assert all(seconds > 0 for seconds in stages)
    assert sum(stages) < row["seconds"]
    assert row["waiting_s"] < row["encoding_s"]
    assert f"| first | {row['tiles']} |" in run.stdout
