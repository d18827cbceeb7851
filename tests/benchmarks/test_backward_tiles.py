"""The comparison of sampling methods for the backward pass, with small slides."""

import json
from pathlib import Path

from command_line import run_script

ROOT = Path(__file__).parents[2]


def test_every_sampling_method_is_measured(tmp_path):
    options = ("--tiles", 10, "--training-slides", 2, "--steps", 4, "--samples", 50, "--json", tmp_path / "subset.json")
    result = run_script(ROOT / "benchmarks" / "backward_tiles.py", *options)
    assert result.returncode == 0, result.stderr
    rows = json.loads((tmp_path / "subset.json").read_text())
    assert len(rows) == 3 * 2 * 4
    assert {row["label"] for row in rows} == {0, 1}
    assert all(row["uniform"] > 0 and row["by_importance"] >= 0 and row["lower_bound"] >= 0 for row in rows)
    for few, many in zip(rows[::4], rows[3::4], strict=True):
        assert few["sampled"] < many["sampled"] < many["tiles"]
        assert many["uniform"] < few["uniform"], "more tiles give a better estimate"
    assert result.stdout.count("| abmil |") == 8
