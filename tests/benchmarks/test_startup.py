"""The benchmark of start-up times, with one round."""

import json
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "startup.py"


def test_help_starts_faster_than_torch(tmp_path):
    command = [sys.executable, str(SCRIPT), "--rounds", "1", "--json", str(tmp_path / "rows.json")]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert result.returncode == 0, result.stderr
    rows = json.loads((tmp_path / "rows.json").read_text())
    seconds = {row["command"]: row["median_s"] for row in rows}
    assert list(seconds) == ["python -c pass", "tapfm --help", "tapfm tile --help", "python -c 'import torch'"]
    assert 0 < seconds["python -c pass"] < seconds["tapfm --help"] < seconds["python -c 'import torch'"]
    assert "| `tapfm tile --help` |" in result.stdout
