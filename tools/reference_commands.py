"""Generate commands.md: every command of tapfm, read from its typer application."""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

import typer
from reference_text import (
    code,
    code_list,
    escape_text,
    format_code_block,
    format_page,
    format_paragraph,
    format_table,
)
from typer.models import ParameterInfo

from tapfm.cli.main import app
from tapfm.errors import InputError, SlidesFailedError, TapfmError

EXIT_CODES: dict[int, str] = {
    0: "success; no more slides failed than `--allow-failures` permits",
    TapfmError.exit_code: "the command failed: the message states the reason and what to do next",
    InputError.exit_code: "invalid options or input: the message states what is valid",
    SlidesFailedError.exit_code: "more slides failed than `--allow-failures` permits (`tapfm evaluate` and `tapfm "
    "predict`: or all slides failed; `tapfm inspect`: a slide has a problem; `tapfm study`: a step failed); finished "
    "work is saved",
    130: "stopped by Ctrl-C; finished work is saved",
    143: "stopped by SIGTERM, for example by a job scheduler; finished work is saved",
}
TYPE_NAMES: dict[Any, str] = {int: "integer", float: "number", str: "text", Path: "path", bool: "flag"}


def generate_commands_page() -> str:
    """Return commands.md."""
    root: Any = typer.main.get_command(app)
    commands = {name: command for name, command in root.commands.items() if not command.hidden}
    rows = [
        [f"[`tapfm {name}`](#tapfm-{name})", escape_text(_first_paragraph(command.help))]
        for name, command in commands.items()
    ]
    blocks: list[list[str]] = [
        ["# Commands"],
        ["The output of `tapfm COMMAND --help`, on one page. `make docs` generates it from the code."],
        format_table(["command", "what it does"], rows),
        ["`tapfm --version` prints the version. `-h` and `--help` print the help of any command."],
        ["## Exit codes"],
        format_table(
            ["code", "meaning"], [[code(str(number)), text] for number, text in sorted(_exit_codes().items())]
        ),
    ]
    for name, command in commands.items():
        blocks += _command_blocks(name, command)
    return format_page(*blocks)


def _exit_codes() -> dict[int, str]:
    """Return EXIT_CODES; raise ValueError if an error class has an exit code that is not in it."""
    if unknown := {error.exit_code for error in _error_classes(TapfmError)} - EXIT_CODES.keys():
        raise ValueError(f"EXIT_CODES has no meaning for {', '.join(map(str, sorted(unknown)))}.")
    return EXIT_CODES


def _error_classes(error: type[TapfmError]) -> Iterator[type[TapfmError]]:
    """Yield an error class and all of its subclasses."""
    yield error
    for subclass in error.__subclasses__():
        yield from _error_classes(subclass)


def _command_blocks(name: str, command: Any) -> Iterator[list[str]]:
    """Yield the help of a command and tables of its arguments and options."""
    yield [f"## tapfm {name}"]
    yield from _help_blocks(command.help or "")
    hints = get_type_hints(inspect.unwrap(command.callback), include_extras=True)
    arguments = [each for each in command.params if not each.opts[0].startswith("-")]
    options = [each for each in command.params if each.opts[0].startswith("-") and not each.hidden]
    if arguments:
        rows = [
            [
                _format_metavar(each.metavar or each.name.upper()),
                "yes" if each.required else "no",
                _meaning_text(name, each),
            ]
            for each in arguments
        ]
        yield format_table(["argument", "required", "meaning"], rows)
    if options:
        rows = [
            [*_name_and_value(each, hints[each.name]), _default_text(each), _meaning_text(name, each)]
            for each in options
        ]
        yield format_table(["option", "value", "default", "meaning"], rows)


def _first_paragraph(text: str | None) -> str:
    return (text or "").partition("\n\n")[0]


def _help_blocks(text: str) -> Iterator[list[str]]:
    """Yield the paragraphs of a help text. Those marked with \\b become a title and a code block."""
    for part in text.split("\n\n"):
        lines = part.strip("\n").splitlines()
        if lines and lines[0].strip() == "\b":
            _, title, *code_lines = lines
            yield [title]
            yield format_code_block(textwrap.dedent("\n".join(code_lines)))
        elif lines:
            yield format_paragraph(part)


def _format_metavar(metavar: str) -> str:
    # a table cell cannot contain a bar
    return " or ".join(code(each) for each in metavar.split("|") if each)


def _meaning_text(name: str, parameter: Any) -> str:
    if not parameter.help:
        raise ValueError(f"tapfm {name}: {parameter.opts[0]} has no help text")
    return escape_text(parameter.help)


def _name_and_value(option: Any, hint: Any) -> tuple[str, str]:
    """Return the option as it is typed, and a description of its value."""
    names = " ".join(code(each) for each in (*option.opts, *option.secondary_opts))
    kind, info = _value_type(hint)
    if kind is bool:
        return names, TYPE_NAMES[bool]
    single = option.metavar and "|" not in option.metavar
    shown = (
        code(f"{names.strip('`')} {option.metavar}")
        if single
        else f"{names} {_format_metavar(option.metavar or '')}".strip()
    )
    repeatable = ", repeatable" if option.multiple else ""
    count = f"{option.nargs} " if option.nargs > 1 else ""
    return shown, f"{count}{_value_text(kind, info)}{'s' if count else ''}{repeatable}"


def _value_type(hint: Any) -> tuple[Any, ParameterInfo | None]:
    """Return the type of a single value, and typer's information about the parameter."""
    info = next((each for each in getattr(hint, "__metadata__", ()) if isinstance(each, ParameterInfo)), None)
    kind = getattr(hint, "__origin__", hint) if info is not None else hint
    if get_origin(kind) in (Union, UnionType):
        (kind,) = (each for each in get_args(kind) if each is not NoneType)
    if get_origin(kind) in (list, tuple):
        kind = get_args(kind)[0]
    return kind, info


def _value_text(kind: Any, info: ParameterInfo | None) -> str:
    """Describe a type and its bounds."""
    if hasattr(kind, "__members__"):
        return code_list(str(each.value) for each in kind)
    if get_args(kind):  # a Literal
        return code_list(map(str, get_args(kind)))
    low, high = (None, None) if info is None else (info.min, info.max)
    bounds: Mapping[bool, str] = {
        low is not None and high is None: f", at least {low}",
        low is None and high is not None: f", at most {high}",
        low is not None and high is not None: f", {low} to {high}",
    }
    return TYPE_NAMES[kind] + bounds.get(True, "")


def _default_text(option: Any) -> str:
    if option.required:
        return "required"
    if isinstance(option.show_default, str):
        return escape_text(option.show_default)
    default = option.default
    if default is None or default is False or default == ():
        return "-"
    if isinstance(default, bool):
        return code(option.opts[0])
    values = default if isinstance(default, tuple | list) else [default]
    return code(" ".join(map(str, values)))
