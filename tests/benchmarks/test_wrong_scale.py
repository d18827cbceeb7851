"""The benchmark of wrong scales, with a small cohort."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest
from command_line import tapfm

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "wrong_scale.py"


@pytest.fixture
def wrong_scale(monkeypatch):
    """The module of the script. Commands that need torch run in this process, which has imported it."""
    spec = importlib.util.spec_from_file_location("wrong_scale", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "wrong_scale", module)  # needed by its dataclass
    spec.loader.exec_module(module)
    run_in_new_process = module.run_command

    def run_command(*arguments):
        if arguments[0] not in ("train", "predict"):
            return run_in_new_process(*arguments)
        done = tapfm(*arguments)
        assert done.returncode == 0, done.output
        return None

    monkeypatch.setattr(module, "run_command", run_command)
    return module


def test_wrong_scales_are_compared_with_the_true_scale(wrong_scale, tmp_path, monkeypatch, capsys):
    options = ["--slides", "6", "--tiles", "10", "--epochs", "1", "--factors", "2"]
    monkeypatch.setattr(sys, "argv", ["wrong_scale.py", "--json", str(tmp_path / "rows.json"), *options])
    wrong_scale.main()
    true, as_20x, doubled = json.loads((tmp_path / "rows.json").read_text())
    assert (true["wrong"], true["change"], true["calls_changed"]) == (0, 0, 0)
    assert 0 <= as_20x["wrong"] < doubled["wrong"]
    assert doubled["tiles"] > 2 * true["tiles"], "half the side: up to four times as many tiles"
    assert doubled["change"] > 0
    assert "| all x 2 |" in capsys.readouterr().out


def test_failed_command_exits_with_its_output(wrong_scale, tmp_path):
    with pytest.raises(SystemExit, match=r"tapfm tile failed with exit code 2:\n(?s:.*)absent"):
        wrong_scale.run_command("tile", tmp_path / "absent.csv", "--out", tmp_path / "tiles")
