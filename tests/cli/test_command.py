"""Commands of typer that are made of options dataclasses."""

import importlib
import inspect
import signal
import typing
from dataclasses import KW_ONLY, MISSING, fields
from pathlib import Path
from typing import Annotated

import pytest
import typer
from typer.testing import CliRunner

from tapfm.cli.command import command
from tapfm.cli.main import app
from tapfm.errors import InputError, Interrupted
from tapfm.runtime.options import Argument, CommandFunction, Option, is_union, item_type, options

COMMANDS = {each.callback.__name__: each.callback for each in app.registered_commands}
PARAMETERS = {name: each.params for name, each in typer.main.get_command(app).commands.items()}
ONLY_ON_THE_COMMAND_LINE = {"as_json", "help"}  # they decide what is printed


def options_class(name):
    module = importlib.import_module(f"tapfm.workflows.{name}")
    return getattr(module, f"{name.capitalize()}Options")


def type_for_typer(hint, optional):
    """Return the type of a field as typer has to know it: a list for several values, the first of two types."""
    if item_type(hint):
        return list[item_type(hint)] | None if optional else list[item_type(hint)]
    if is_union(hint):
        first, *others = typing.get_args(hint)
        return first | None if type(None) in others else first  # the other types are for Python
    return hint


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_the_options_of_its_dataclass(name):
    make = options_class(name)
    hints = typing.get_type_hints(make, include_extras=True)
    signature = inspect.signature(COMMANDS[name]).parameters
    parameters = {each.name: each for each in PARAMETERS[name]}
    assert parameters.keys() - ONLY_ON_THE_COMMAND_LINE == {each.name for each in fields(make)}
    for field in fields(make):
        parameter, (hint, described) = parameters[field.name], typing.get_args(hints[field.name])
        required = field.default is MISSING
        assert typing.get_args(signature[field.name].annotation)[0] == type_for_typer(hint, not required), field.name
        assert parameter.required == required, field.name
        if not required:
            assert parameter.default == field.default or (parameter.default, field.default) == (None, ()), field.name
        assert (parameter.help, parameter.metavar) == (described.help, described.metavar), field.name
        flags = [f"--{field.name.replace('_', '-')}"] if isinstance(described, Option) else [field.name]
        if isinstance(described, Option) and described.flags:
            flags = described.flags.split("/")
        assert [*parameter.opts, *parameter.secondary_opts] == flags, field.name


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_is_a_module_that_runs_a_workflow_with_the_same_options(name):
    assert COMMANDS[name] is getattr(importlib.import_module(f"tapfm.cli.{name}"), name)
    workflow = importlib.import_module(f"tapfm.workflows.{name}")
    if name == "demo":  # a demo runs commands: only the command line can
        assert list(inspect.signature(workflow.demo).parameters) == ["options", "console", "run_command"]
    else:
        [function] = [each for each in vars(workflow).values() if isinstance(each, CommandFunction)]
        assert function.options_class is options_class(name)


@options
class CopyOptions:
    """Options of the command below."""

    sources: Annotated[tuple[Path, ...], Argument("Files to copy.", metavar="FILE...")]
    _: KW_ONLY
    out: Annotated[Path, Option("Folder for the copies.", metavar="DIR")]
    only: Annotated[tuple[str, ...], Option("Only these.", default="all")] = ()
    fractions: Annotated[tuple[float, float], Option("Two shares.")] = (0.5, 0.5)
    dry_run: Annotated[bool, Option("Copy nothing.")] = False
    workers: Annotated[int | None, Option("Worker processes.", default="one per core", at_least=0, at_most=9)] = None
    force: Annotated[bool | None, Option("Copy again / keep.", flags="--force/--resume")] = None


def copy(*arguments, stop=None):
    """Run a command; gives its result and the options that it got."""
    own, given = typer.Typer(), []

    @own.command()
    @command(CopyOptions, stopped="Copies are kept.")
    def copy(
        options: CopyOptions, as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False
    ) -> None:
        """Copy files."""
        given.append((options, as_json))
        if stop is not None:
            raise stop

    return CliRunner().invoke(own, list(arguments)), given


def test_options_that_are_not_given_have_their_defaults():
    result, given = copy("a", "b", "--out", "there")
    assert result.exit_code == 0, result.output
    assert given == [(CopyOptions(("a", "b"), out="there"), False)]
    assert given[0][0].only == ()


def test_options_that_are_given_reach_the_dataclass():
    words = ("--only", "x", "--only", "y", "--fractions", "0.1", "0.9", "--dry-run", "--workers", "0", "--resume")
    _, given = copy("a", "--out", "there", *words, "--json")
    expected = CopyOptions(
        "a", out="there", only=("x", "y"), fractions=(0.1, 0.9), dry_run=True, workers=0, force=False
    )
    assert given == [(expected, True)]


@pytest.mark.parametrize(
    "words",
    [("--out", "there"), ("a",), ("a", "--out", "there", "--workers", "-1"), ("a", "--out", "b", "--workers", "10")],
)
def test_what_is_missing_or_out_of_range_ends_with_2(words):
    result, given = copy(*words)
    # typer ends by itself where something is missing; `main` ends with the code of an error of tapfm
    code = result.exception.exit_code if isinstance(result.exception, InputError) else result.exit_code
    assert (code, given) == (2, [])


def test_help_is_that_of_the_dataclass(monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    result, _ = copy("--help")
    shown = " ".join(result.output.split())
    for text in (
        "Copy files.",
        "FILE...",
        "Folder for the copies.",
        "default: (one per core)",
        "--resume",
        "--dry-run",
    ):
        assert text in shown
    assert "--no-dry-run" not in shown


@pytest.mark.parametrize(
    ("stop", "code"),
    [
        (KeyboardInterrupt(), 130),
        (Interrupted(signal.SIGINT), 130),
        (Interrupted(signal.SIGTERM), 143),
        (SystemExit(143), 143),
    ],
    ids=repr,
)
def test_a_signal_decides_the_exit_code_and_what_was_stopped_is_told(stop, code):
    result, _ = copy("a", "--out", "there", stop=stop)
    assert result.exit_code == code
    assert result.stderr == "Stopped. Copies are kept.\n"


@pytest.mark.parametrize(
    ("stop", "code"), [(SystemExit(3), 3), (SystemExit(), 0), (SystemExit("no"), 1), (typer.Exit(4), 4)]
)
def test_other_exits_keep_their_code_and_say_nothing(stop, code):
    result, _ = copy("a", "--out", "there", stop=stop)
    assert (result.exit_code, result.stderr) == (code, "")
