"""The measurement of wrong scales, in small."""

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_a_wrong_scale_is_measured_against_the_true_one(tmp_path):
    command = [sys.executable, str(ROOT / "benchmarks" / "wrong_scale.py"), "--json", str(tmp_path / "rows.json")]
    command += ["--slides", "6", "--tiles", "10", "--epochs", "1", "--factors", "2"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    true, as_20x, doubled = json.loads((tmp_path / "rows.json").read_text())
    assert (true["wrong"], true["change"], true["calls_changed"]) == (0, 0, 0)
    assert 0 <= as_20x["wrong"] < doubled["wrong"]
    assert doubled["tiles"] > 2 * true["tiles"], "half as wide, four times as many, less those at the edge"
    assert doubled["change"] > 0
    assert "| all x 2 |" in done.stdout
