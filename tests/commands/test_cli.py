"""The command line in its own process: imports, help, and `tapfm encoders`."""

import inspect
import json
import os
import re
import subprocess
import sys

import pytest
from safetensors.torch import save_file

from tapfm import __version__
from tapfm.cli.main import app
from tapfm.encoders.build import build_vit
from tapfm.encoders.catalog import find_encoder_card, load_encoder_cards

# Prints the help of every command, and which slow libraries were imported.
HELP = """
import sys
import typer
from tapfm.cli.main import app
root = typer.main.get_command(app)
for arguments in ([], *([name] for name in root.commands)):
    assert not root.main([*arguments, "--help"], prog_name="tapfm", standalone_mode=False)
print("imported:", *(name for name in ("torch", "scipy", "sklearn") if name in sys.modules))
"""
# Runs main(), then prints whether torch was imported.
PROGRAM = """
import sys
from tapfm.cli.main import main
try:
    main()
finally:
    print("torch imported:", "torch" in sys.modules, file=sys.stderr)
"""


def tapfm(*arguments, **environment):
    return subprocess.run(
        [sys.executable, "-c", PROGRAM, *arguments],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["--help"], 0),
        ([], 2),
        (["--version"], 0),
        (["inspect", "absent.svs"], 2),
        (["tile", "absent.csv", "--out", "absent"], 2),
        (["tile", "pyproject.toml", "--out", "absent", "--size", "0"], 2),
        (["synth", "absent", "--task", "absent"], 2),
        (["split", "absent.csv", "--out", "split.csv"], 2),
        (["config"], 0),
        (["config", "--recipe", "reference", "--encoder", "virchow2", "--method", "fixed"], 0),
        (["config", "--encoder", "virchwo2"], 2),
        (["config", "absent.toml"], 2),
        (["config", "pyproject.toml"], 2),
        (["plan", "absent.toml"], 2),
        (["evaluate", "absent", "--out", "absent"], 2),
        (["compare", "absent.csv", "other.csv", "--out", "absent"], 2),
        (["study", "absent.toml", "--out", "absent"], 2),
        (["study", "--preset", "paper-table1", "--scale", "mini", "--list"], 0),
        (["probe", "absent", "--tiles", "absent", "--out", "absent"], 2),
        (["report", "absent", "--out", "absent.html"], 2),
        (["view", "absent"], 2),
        (["bench", "absent.toml"], 2),
        (["bench", "--tiles", "absent"], 2),
        (["bench", "--cohort", "absent.csv", "--tiles", "absent"], 2),
        (["bench", "--scope", "lora"], 2),
        (["bench", "--encoder", "virchwo2"], 2),
        (["encoders"], 0),
        (["encoders", "--json"], 0),
        (["encoders", "virchow2"], 0),
        (["encoders", "virchwo2"], 2),
        (["encoders", "conch"], 2),
        (["encoders", "--check"], 2),
        (["nonsense"], 2),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_help_and_input_errors_do_not_import_torch(arguments, code):
    result = tapfm(*arguments)
    assert result.returncode == code, result.stderr
    assert "torch imported: False" in result.stderr
    assert "Traceback" not in result.stderr


def test_help_of_every_command_does_not_import_slow_libraries():
    result = subprocess.run([sys.executable, "-c", HELP], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    shown = set(re.findall(r"Usage: tapfm (\w+)", result.stdout))
    assert shown == {each.callback.__name__ for each in app.registered_commands}
    assert result.stdout.endswith("imported:\n")


@pytest.mark.parametrize("command", app.registered_commands, ids=lambda command: command.callback.__name__)
def test_examples_and_output_files_in_help_fit_into_80_columns(command):
    blocks = inspect.getdoc(command.callback).split("\b\n")[1:]  # until an empty line, typer does not wrap them
    lines = [line for block in blocks for line in block.split("\n\n")[0].splitlines()]
    assert [line for line in lines if len(line) > 78] == []


def test_version():
    assert tapfm("--version").stdout.strip() == f"tapfm {__version__}"


def test_encoder_list_has_one_line_per_encoder():
    lines = tapfm("encoders").stdout.splitlines()
    for key, card in load_encoder_cards().items():
        (line,) = [line for line in lines if line.split()[:1] == [key]]
        assert f"{card.parameters / 1e6:,.1f}M" in line
        assert str(card.feature_size) in line


def test_encoder_list_as_json_is_complete():
    listed = json.loads(tapfm("encoders", "--json").stdout)
    assert [entry["key"] for entry in listed] == list(load_encoder_cards())
    assert listed[0]["parameters"] == find_encoder_card("uni").parameters
    one = json.loads(tapfm("encoders", "uni", "--json").stdout)
    assert one == listed[0]


def test_encoder_details_show_all_fields():
    shown = tapfm("encoders", "h-optimus-0").stdout
    card = find_encoder_card("h-optimus-0")
    for fact in (
        card.architecture,
        "init_values=1e-05",
        f"{card.parameters:,}",
        "5 (CLS + 4 registers)",
        "0.707223",
        "0.177517",
        "224 px at 0.5 um/px",
        "Apache-2.0",
        card.page,
        card.revision,
        card.sha256,
    ):
        assert fact in shown, fact


def test_unknown_encoder_suggests_similar_names():
    error = tapfm("encoders", "virchwo2").stderr
    assert "There is no encoder named 'virchwo2'" in error
    assert "Did you mean: virchow2" in error


def test_check_loads_weights_and_encodes_a_tile(tmp_path):
    vit = build_vit(find_encoder_card("sp22m"))
    file = tmp_path / "mine.safetensors"
    save_file(vit.state_dict(), file)
    result = tapfm("encoders", "sp22m", "--check", "--weights", str(file), TAPFM_CACHE=str(tmp_path))
    assert result.returncode == 0, result.stderr
    assert "does NOT match the published file" in result.stdout
    assert "21,665,664, all loaded from the file" in result.stdout
    assert "feature of size 384" in result.stdout
    as_json = tapfm("encoders", "sp22m", "--check", "--weights", str(file), "--json", TAPFM_CACHE=str(tmp_path))
    assert json.loads(as_json.stdout)["weights"] == str(file)


def test_check_of_missing_weights_names_the_file(tmp_path):
    result = tapfm("encoders", "uni", "--check", "--weights", str(tmp_path / "absent.bin"))
    assert result.returncode == 2
    assert "absent.bin" in result.stderr
    assert "Traceback" not in result.stderr


def test_weights_without_check_suggests_the_command():
    result = tapfm("encoders", "uni", "--weights", "x.bin")
    assert result.returncode == 2
    assert "tapfm encoders uni --check --weights x.bin" in result.stderr


def test_markup_in_a_message_is_printed_literally():
    assert "There is no encoder named '[red]uni'" in tapfm("encoders", "[red]uni").stderr


def test_help_lists_all_commands():
    commands = re.findall(r"^[│|] (\w+)", tapfm("--help").stdout.split("Commands")[1], re.MULTILINE)
    assert commands == [
        "inspect",
        "tile",
        "synth",
        "demo",
        "split",
        "embed",
        "config",
        "plan",
        "train",
        "evaluate",
        "compare",
        "study",
        "export",
        "predict",
        "report",
        "view",
        "bench",
        "encoders",
        "doctor",
    ]
