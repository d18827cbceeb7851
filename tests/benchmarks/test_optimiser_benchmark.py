"""The benchmark of optimisers, with few steps and without torchao and bitsandbytes."""

import json
import os
import subprocess
import sys
from pathlib import Path

CHECKOUT = Path(__file__).parents[2]


def test_optimisers_are_timed_and_compared_with_float64(tmp_path):
    for name in ("torchao", "bitsandbytes"):
        (tmp_path / f"{name}.py").write_text(f"raise ModuleNotFoundError('no', name='{name}')\n")
    out = tmp_path / "optimisers.json"
    result = subprocess.run(
        [
            *(sys.executable, str(CHECKOUT / "benchmarks" / "optimisers.py"), "--encoder", "tapfm-pocket"),
            *("--weights", "bfloat16", "--optimiser", "float32$", "int8$", "--rounds", "1", "--steps", "1"),
            *("--check-steps", "30", "--json", str(out)),
        ],
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(CHECKOUT / "src")])},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert "torchao is not installed" in result.stdout
    assert "pip install torchao\n" in result.stdout
    assert "bitsandbytes is not installed" in result.stdout
    results = json.loads(out.read_text())
    names = ["torch, fused", "tapfm, float32", "tapfm, int8"]
    assert [row["optimiser"] for row in results["speed"]] == names
    assert [row["optimiser"] for row in results["accuracy"]] == names
    for row in results["speed"]:
        assert row["step_s"] > 0
        assert f"| {row['optimiser']} |" in result.stdout
    state = {row["optimiser"]: row["state_bytes"] / row["parameters"] for row in results["speed"]}
    assert 12 <= state["torch, fused"] <= state["tapfm, float32"] < 12.5
    assert 6 < state["tapfm, int8"] < 6.5
    for row in results["accuracy"]:
        assert row["resumed_exactly"]
        assert row["even"] < (0.1 if "int8" in row["optimiser"] else 1e-3)
