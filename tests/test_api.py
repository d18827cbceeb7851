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
NOT_COMMANDS = ("__version__", "configure", "load")
COMMAND_LINE_ONLY = {"as_json"}
FUNCTIONS = [name for name in tapfm.__all__ if name not in NOT_COMMANDS]


def test_package_import_is_lightweight():
    program = "import sys, tapfm; dir(tapfm); print(*sorted(sys.modules), sep='\\n')"
    modules = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True).stdout.split()
    assert "tapfm" in modules
    assert not [name for name in modules if name.split(".")[0] in ("torch", "numpy", "pydantic", "rich", "typer")]
    assert not [name for name in modules if name.startswith("tapfm.workflows")]


def test_all_public_names_can_be_imported():
    assert dir(tapfm) == tapfm.__all__
    for name in tapfm.__all__:
        assert getattr(tapfm, name) is not None
    with pytest.raises(AttributeError, match="learn"):
        tapfm.learn  # noqa: B018


@pytest.mark.parametrize("name", FUNCTIONS)
def test_function_has_the_options_of_its_command(name):
    command = typer.main.get_command(app).commands[COMMANDS.get(name, name)]
    options = {each.name: each for each in command.params if each.name not in COMMAND_LINE_ONLY}
    parameters = inspect.signature(getattr(tapfm, name)).parameters
    assert list(parameters) == list(options)
    for parameter, option in options.items():
        default = parameters[parameter].default
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


def test_run_config_can_replace_the_file(tmp_path):
    config = configure(tmp_path, adaptation={"tiles_per_slide": 20})
    assert isinstance(config, RunConfig)
    planned = tapfm.plan(config, gpu_memory=24)
    assert (planned.tiles, len(planned.gpus)) == (20, 1)
    changed = tapfm.plan(config, gpu_memory=[8, 24], set=["adaptation.tiles_per_slide=30", "adaptation.scope=last:2"])
    assert (changed.tiles, len(changed.gpus), changed.config.adaptation.scope) == (30, 2, "last:2")
    assert changed.config.cohort == config.cohort
    assert tapfm.plan(configure(tmp_path, adaptation={"method": "fixed"})) is None


def test_defaults_follow_the_recipe_encoder_and_method_that_replace_those_of_the_file(tmp_path):
    file = tmp_path / "run.toml"
    file.write_text(
        'cohort.table = "cohort.csv"\ntiles = { folder = "tiles", features = "features" }\n'
        'encoder.name = "uni"\ntask.targets = ["FGFR3"]\n'
    )
    config = tapfm.configure(file, recipe="reference", encoder={"name": "h-optimus-0"})
    assert (config.adaptation.tau, config.adaptation.tiles_per_slide) == (0.1, 75)
    assert config.cohort.table == tmp_path / "cohort.csv"
    fixed = tapfm.configure(file, adaptation={"method": "fixed"})
    assert (fixed.aggregator.name, fixed.schedule.epochs) == ("abmil", 50)


def test_invalid_study_object_raises_input_error(tmp_path):
    with pytest.raises(InputError, match="dict is not a study"):
        tapfm.run_study({"name": "first"}, out=tmp_path / "study")


def test_subpackage_name_suggests_the_function():
    code = "import tapfm\ntry: tapfm.study\nexcept AttributeError as error: print(error)"
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert "use tapfm.run_study" in output


def test_invalid_configuration_raises_input_error(tmp_path):
    with pytest.raises(InputError, match="dict is not a configuration"):
        tapfm.train({"encoder": "uni"}, out=tmp_path / "run")
    with pytest.raises(InputError, match=r"absent\.toml does not exist"):
        tapfm.train(str(tmp_path / "absent.toml"), out=tmp_path / "run")
    with pytest.raises(InputError, match=r"schedule\.epochs"):
        tapfm.train(configure(tmp_path), out=tmp_path / "run", set=["schedule.epochs=-1"])
    assert not (tmp_path / "run").exists()
