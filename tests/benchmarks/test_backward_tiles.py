"""The comparison of ways to draw a subset, in small."""

import json
from pathlib import Path

from command_line import script

ROOT = Path(__file__).parents[2]


def test_every_way_is_measured_for_every_aggregator_and_share(tmp_path):
    words = ("--tiles", 10, "--training-slides", 2, "--steps", 4, "--draws", 50, "--json", tmp_path / "subset.json")
    done = script(ROOT / "benchmarks" / "backward_tiles.py", *words)
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "subset.json").read_text())
    assert len(rows) == 3 * 2 * 4
    assert {row["label"] for row in rows} == {0, 1}
    assert all(row["evenly"] > 0 and row["by_size"] >= 0 and row["bound"] >= 0 for row in rows)
    for few, many in zip(rows[::4], rows[3::4], strict=True):
        assert few["drawn"] < many["drawn"] < many["tiles"]
        assert many["evenly"] < few["evenly"], "more tiles, a better estimate"
    assert done.stdout.count("| abmil |") == 8
