"""The benchmark of the adaptation step, with few tiles."""

import json
from pathlib import Path

import pytest
from command_line import script

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "adaptation_step.py"


def test_all_ways_are_timed_and_give_the_same_gradient(tmp_path):
    out = tmp_path / "step.json"
    done = script(SCRIPT, "--tiles", 6, "--chunk", 2, "--repeats", 2, "--json", out)
    assert done.returncode == 0, done.stderr
    rows = json.loads(out.read_text())["rows"]
    assert [row["way"] for row in rows] == ["one pass", "chunked, kept graphs", "chunked"]
    for row in rows:
        assert 0 < row["fastest_s"] <= row["median_s"] <= row["slowest_s"]
        assert row["tiles_per_second"] == pytest.approx(6 / row["median_s"])
        assert row["gradient_difference"] < 1e-5
        assert f"| {row['way']} |" in done.stdout


def test_a_setting_below_one_is_refused():
    done = script(SCRIPT, "--chunk", 0)
    assert done.returncode == 2
    assert "must be at least 1, got 0" in done.stderr
