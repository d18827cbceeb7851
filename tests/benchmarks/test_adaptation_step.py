"""The benchmark of the adaptation step, with a few tiles."""

import json
from pathlib import Path

import pytest
from command_line import run_script

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "adaptation_step.py"


def test_all_strategies_are_timed_and_give_the_same_gradient(tmp_path):
    out = tmp_path / "step.json"
    result = run_script(SCRIPT, "--tiles", 6, "--chunk", 2, "--repeats", 2, "--json", out)
    assert result.returncode == 0, result.stderr
    rows = json.loads(out.read_text())["rows"]
    assert [row["strategy"] for row in rows] == ["one pass", "chunked, kept graphs", "chunked"]
    for row in rows:
        assert 0 < row["fastest_s"] <= row["median_s"] <= row["slowest_s"]
        assert row["tiles_per_second"] == pytest.approx(6 / row["median_s"])
        assert row["gradient_difference"] < 1e-5
        assert f"| {row['strategy']} |" in result.stdout


def test_option_below_one_is_an_error():
    result = run_script(SCRIPT, "--chunk", 0)
    assert result.returncode == 2
    assert "must be at least 1, got 0" in result.stderr
