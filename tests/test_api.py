"""The public functions of the package: imported when used, with the names and defaults of the command line."""

import inspect
import subprocess
import sys

import pytest
import typer

import tapfm
from tapfm.cli.main import app
from tapfm.config.settings import RunConfig
from tapfm.errors import InputError

COMMANDS = {"run_study": "study", "make_report": "report"}  # others have the function's name
NO_COMMANDS = ("__version__", "configure", "load")
ONLY_PRINTING = {"as_json"}
FUNCTIONS = [name for name in tapfm.__all__ if name not in NO_COMMANDS]


def test_the_package_imports_nothing_heavy():
    program = "import sys, tapfm; dir(tapfm); print(*sorted(sys.modules), sep='\\n')"
    modules = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True).stdout.split()
    assert "tapfm" in modules
    assert not [name for name in modules if name.split(".")[0] in ("torch", "numpy", "pydantic", "rich", "typer")]
    assert not [name for name in modules if name.startswith("tapfm.workflows")]


def test_its_names_are_all_there_and_no_others():
    assert dir(tapfm) == tapfm.__all__
    for name in tapfm.__all__:
        assert getattr(tapfm, name) is not None
    with pytest.raises(AttributeError, match="learn"):
        tapfm.learn  # noqa: B018 - the access is what fails


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_takes_what_its_command_takes(name):
    command = typer.main.get_command(app).commands[COMMANDS.get(name, name)]
    of_command = {each.name: each for each in command.params if each.name not in ONLY_PRINTING}
    of_function = inspect.signature(getattr(tapfm, name)).parameters
    assert list(of_function) == list(of_command)
    for parameter, option in of_command.items():
        default = of_function[parameter].default
        assert option.required == (default is inspect.Parameter.empty), parameter
        if not option.required:
            assert (option.default or None) == (default or None), parameter
        for flag in (each for each in option.opts if each.startswith("--") and not option.secondary_opts):
            assert flag == f"--{parameter.replace('_', '-')}"


def configure(tmp_path, **settings):
    return tapfm.configure(
        cohort={"table": tmp_path / "cohort.csv"},
        tiles={"folder": "tiles", "features": "features"},
        task={"targets": ["FGFR3"]},
        encoder={"name": "tapfm-pocket"},
        **settings,
    )


def test_a_configuration_does_instead_of_a_file(tmp_path):
    config = configure(tmp_path, adaptation={"tiles_per_slide": 20})
    assert isinstance(config, RunConfig)
    planned = tapfm.plan(config, gpu_memory=24)
    assert (planned.tiles, len(planned.cards)) == (20, 1)
    changed = tapfm.plan(config, gpu_memory=[8, 24], set=["adaptation.tiles_per_slide=30", "adaptation.scope=last:2"])
    assert (changed.tiles, len(changed.cards), changed.config.adaptation.scope) == (30, 2, "last:2")
    assert changed.config.cohort == config.cohort
    assert tapfm.plan(configure(tmp_path, adaptation={"method": "fixed"})) is None


def test_what_is_no_study_is_refused(tmp_path):
    with pytest.raises(InputError, match="dict is not a study"):
        tapfm.run_study({"name": "first"}, out=tmp_path / "study")


def test_a_subpackage_that_is_no_function_has_a_hint():
    code = "import tapfm\ntry: tapfm.study\nexcept AttributeError as error: print(error)"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert "use tapfm.run_study" in said


def test_what_is_no_configuration_is_refused(tmp_path):
    with pytest.raises(InputError, match="dict is not a configuration"):
        tapfm.train({"encoder": "uni"}, out=tmp_path / "run")
    with pytest.raises(InputError, match=r"absent\.toml cannot be read"):
        tapfm.train(str(tmp_path / "absent.toml"), out=tmp_path / "run")
    with pytest.raises(InputError, match=r"schedule\.epochs"):
        tapfm.train(configure(tmp_path), out=tmp_path / "run", set=["schedule.epochs=-1"])
    assert not (tmp_path / "run").exists()
