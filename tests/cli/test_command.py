"""typer commands created from options dataclasses."""

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
COMMAND_LINE_ONLY = {"as_json", "help"}


def options_class(name):
    module = importlib.import_module(f"tapfm.workflows.{name}")
    return getattr(module, f"{name.capitalize()}Options")


def expected_typer_type(hint, optional):
    """Return the type that typer needs for a field: a list for a tuple, the first type of a union."""
    if item_type(hint):
        return list[item_type(hint)] | None if optional else list[item_type(hint)]
    if is_union(hint):
        first, *others = typing.get_args(hint)
        return first | None if type(None) in others else first
    return hint


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_the_options_of_its_dataclass(name):
    cls = options_class(name)
    hints = typing.get_type_hints(cls, include_extras=True)
    signature = inspect.signature(COMMANDS[name]).parameters
    parameters = {each.name: each for each in PARAMETERS[name]}
    assert parameters.keys() - COMMAND_LINE_ONLY == {each.name for each in fields(cls)}
    for field in fields(cls):
        parameter, (hint, declared) = parameters[field.name], typing.get_args(hints[field.name])
        required = field.default is MISSING
        assert typing.get_args(signature[field.name].annotation)[0] == expected_typer_type(hint, not required), (
            field.name
        )
        assert parameter.required == required, field.name
        if not required:
            assert parameter.default == field.default or (parameter.default, field.default) == (None, ()), field.name
        assert (parameter.help, parameter.metavar) == (declared.help, declared.metavar), field.name
        flags = [f"--{field.name.replace('_', '-')}"] if isinstance(declared, Option) else [field.name]
        if isinstance(declared, Option) and declared.flag:
            flags = declared.flag.split("/")
        assert [*parameter.opts, *parameter.secondary_opts] == flags, field.name


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_a_module_and_a_workflow_with_its_options(name):
    assert COMMANDS[name] is getattr(importlib.import_module(f"tapfm.cli.{name}"), name)
    workflow = importlib.import_module(f"tapfm.workflows.{name}")
    if name == "demo":  # runs other commands, which needs the command line
        assert list(inspect.signature(workflow.demo).parameters) == ["options", "console", "run_command"]
    else:
        [function] = [each for each in vars(workflow).values() if isinstance(each, CommandFunction)]
        assert function.options_class is options_class(name)


@options
class CopyOptions:
    """Options of the test command."""

    sources: Annotated[tuple[Path, ...], Argument("Files to copy.", metavar="FILE...")]
    _: KW_ONLY
    out: Annotated[Path, Option("Folder for the copies.", metavar="DIR")]
    only: Annotated[tuple[str, ...], Option("Only these.", show_default="all")] = ()
    fractions: Annotated[tuple[float, float], Option("Two fractions.")] = (0.5, 0.5)
    dry_run: Annotated[bool, Option("Copy nothing.")] = False
    workers: Annotated[int | None, Option("Worker processes.", show_default="one per core", at_least=0, at_most=9)] = (
        None
    )
    force: Annotated[bool | None, Option("Copy again or keep.", flag="--force/--resume")] = None


def copy(*arguments, stop=None):
    """Run the test command. Return its result and the options that it received."""
    test_app, received = typer.Typer(), []

    @test_app.command()
    @command(CopyOptions, stop_message="Copies are kept.")
    def copy(
        options: CopyOptions, as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False
    ) -> None:
        """Copy files."""
        received.append((options, as_json))
        if stop is not None:
            raise stop

    return CliRunner().invoke(test_app, list(arguments)), received


def test_omitted_options_have_their_defaults():
    result, received = copy("a", "b", "--out", "copies")
    assert result.exit_code == 0, result.output
    assert received == [(CopyOptions(("a", "b"), out="copies"), False)]
    assert received[0][0].only == ()


def test_given_options_are_passed_to_the_dataclass():
    arguments = ("--only", "x", "--only", "y", "--fractions", "0.1", "0.9", "--dry-run", "--workers", "0", "--resume")
    _, received = copy("a", "--out", "copies", *arguments, "--json")
    expected = CopyOptions(
        "a", out="copies", only=("x", "y"), fractions=(0.1, 0.9), dry_run=True, workers=0, force=False
    )
    assert received == [(expected, True)]


@pytest.mark.parametrize(
    "arguments",
    [("--out", "copies"), ("a",), ("a", "--out", "copies", "--workers", "-1"), ("a", "--out", "b", "--workers", "10")],
)
def test_missing_or_out_of_range_option_exits_with_2(arguments):
    result, received = copy(*arguments)
    # typer reports missing options itself; `main` exits with the code of an InputError
    code = result.exception.exit_code if isinstance(result.exception, InputError) else result.exit_code
    assert (code, received) == (2, [])


def test_help_shows_the_texts_of_the_dataclass(monkeypatch):
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
def test_signal_sets_exit_code_and_prints_stop_message(stop, code):
    result, _ = copy("a", "--out", "copies", stop=stop)
    assert result.exit_code == code
    assert result.stderr == "Stopped. Copies are kept.\n"


@pytest.mark.parametrize(
    ("stop", "code"), [(SystemExit(3), 3), (SystemExit(), 0), (SystemExit("no"), 1), (typer.Exit(4), 4)]
)
def test_other_exits_keep_their_code_and_print_nothing(stop, code):
    result, _ = copy("a", "--out", "copies", stop=stop)
    assert (result.exit_code, result.stderr) == (code, "")
