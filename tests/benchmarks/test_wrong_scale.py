"""The measurement of wrong scales, in small."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest
from command_line import tapfm

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "wrong_scale.py"


@pytest.fixture
def wrong_scale(monkeypatch):
    """The script; of the commands that it types, those that load torch are run in this process, which has it."""
    spec = importlib.util.spec_from_file_location("wrong_scale", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "wrong_scale", module)  # its dataclass looks for it there
    spec.loader.exec_module(module)
    in_a_process = module.command

    def command(*words):
        if words[0] not in ("train", "predict"):
            return in_a_process(*words)
        done = tapfm(*words)
        assert done.returncode == 0, done.said
        return None

    monkeypatch.setattr(module, "command", command)
    return module


def test_a_wrong_scale_is_measured_against_the_true_one(wrong_scale, tmp_path, monkeypatch, capsys):
    options = ["--slides", "6", "--tiles", "10", "--epochs", "1", "--factors", "2"]
    monkeypatch.setattr(sys, "argv", ["wrong_scale.py", "--json", str(tmp_path / "rows.json"), *options])
    wrong_scale.main()
    true, as_20x, doubled = json.loads((tmp_path / "rows.json").read_text())
    assert (true["wrong"], true["change"], true["calls_changed"]) == (0, 0, 0)
    assert 0 <= as_20x["wrong"] < doubled["wrong"]
    assert doubled["tiles"] > 2 * true["tiles"], "half as wide, four times as many, less those at the edge"
    assert doubled["change"] > 0
    assert "| all x 2 |" in capsys.readouterr().out


def test_a_command_that_fails_ends_the_script_with_what_it_said(wrong_scale, tmp_path):
    with pytest.raises(SystemExit, match=r"tapfm tile ended with code 2:\n(?s:.*)absent"):
        wrong_scale.command("tile", tmp_path / "absent.csv", "--out", tmp_path / "tiles")
