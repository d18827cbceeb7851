"""The load test of the viewer, with few clients."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tapfm.viewer.assets import _STATIC_FOLDER as STATIC_FOLDER

ROOT = Path(__file__).parents[2]


@pytest.mark.skipif(not (STATIC_FOLDER / "index.html").exists(), reason="the viewer's pages are not built: make setup")
def test_clients_load_all_images_cold_and_cached(tmp_path):
    command = [sys.executable, str(ROOT / "benchmarks" / "viewer.py"), "--json", str(tmp_path / "rows.json")]
    command += ["--clients", "3", "--steps", "4", "--width", "4096", "--height", "2048"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    cold, cached = json.loads((tmp_path / "rows.json").read_text())
    assert cold["requests"] == cached["requests"] > 3
    assert "| cached |" in done.stdout
