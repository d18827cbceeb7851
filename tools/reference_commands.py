"""commands.md: every command of tapfm, from the tree of commands that typer makes."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

import typer
from reference_text import any_of, code, indented, page, paragraph, prose, table
from typer.models import ParameterInfo

from tapfm.cli.main import app
from tapfm.errors import InputError, SlidesFailedError, TapfmError

# what an exit code means; those of errors are theirs
EXIT_CODES: dict[int, str] = {
    0: "done; slides that failed were no more than `--allow-failures`",
    TapfmError.exit_code: "something went wrong while it worked: the message says what, and what to type next",
    InputError.exit_code: "something that was given is wrong, or does not fit together: the message says what is valid",
    SlidesFailedError.exit_code: "some slides failed, the rest are done: see `failures.csv`",
    130: "stopped by Ctrl-C; what was done is kept",
    143: "stopped by SIGTERM, as schedulers send it; what was done is kept",
}
VALUES: dict[Any, str] = {int: "whole number", float: "number", str: "text", Path: "path", bool: "switch"}


def commands_page() -> str:
    """Write commands.md."""
    tree: Any = typer.main.get_command(app)
    shown = {name: command for name, command in tree.commands.items() if not command.hidden}
    rows = [[f"[`tapfm {name}`](#tapfm-{name})", prose(first_of(each.help))] for name, each in shown.items()]
    blocks: list[list[str]] = [
        ["# Commands"],
        ["What `tapfm COMMAND --help` says, on one page. It is written from the commands themselves by `make docs`."],
        table(["command", "what it does"], rows),
        ["`tapfm --version` prints the version. `-h` and `--help` print the help of any command."],
        ["## Exit codes"],
        table(["code", "meaning"], [[code(str(number)), words] for number, words in sorted(exit_codes().items())]),
    ]
    for name, command in shown.items():
        blocks += command_blocks(name, command)
    return page(*blocks)


def exit_codes() -> dict[int, str]:
    """Give the meaning of every exit code; an error with a code of its own needs one here."""
    if unknown := {each.exit_code for each in all_errors(TapfmError)} - EXIT_CODES.keys():
        raise ValueError(f"EXIT_CODES does not say what these mean: {unknown}")
    return EXIT_CODES


def all_errors(error: type[TapfmError]) -> Iterator[type[TapfmError]]:
    """Go through the tree of errors."""
    yield error
    for below in error.__subclasses__():
        yield from all_errors(below)


def command_blocks(name: str, command: Any) -> Iterator[list[str]]:
    """Write one command: its help, its arguments and its options."""
    yield [f"## tapfm {name}"]
    yield from help_blocks(command.help or "")
    hints = get_type_hints(inspect.unwrap(command.callback), include_extras=True)
    arguments = [each for each in command.params if not each.opts[0].startswith("-")]
    options = [each for each in command.params if each.opts[0].startswith("-") and not each.hidden]
    if arguments:
        rows = [[either(each.metavar or each.name.upper()), needed(each), meaning_of(name, each)] for each in arguments]
        yield table(["argument", "needed", "meaning"], rows)
    if options:
        rows = [[*name_and_value(each, hints[each.name]), default_of(each), meaning_of(name, each)] for each in options]
        yield table(["option", "value", "default", "meaning"], rows)


def first_of(text: str | None) -> str:
    """Take the first paragraph of a help."""
    return (text or "").partition("\n\n")[0]


def help_blocks(text: str) -> Iterator[list[str]]:
    """Write a help: paragraphs as words, and those that are marked for it as they are."""
    for part in text.split("\n\n"):
        lines = part.strip("\n").splitlines()
        if lines and lines[0].strip() == "\b":
            yield indented("\n".join(lines[1:]))
        elif lines:
            yield paragraph(part)


def either(metavar: str) -> str:
    """Write what may be given; a bar would be a border of the table, or be shown with its escape."""
    return " or ".join(code(each) for each in metavar.split("|") if each)


def needed(argument: Any) -> str:
    """Say whether an argument has to be given."""
    return "yes" if argument.required else "no"


def meaning_of(name: str, parameter: Any) -> str:
    """Take what the help says; nothing is no help."""
    if not parameter.help:
        raise ValueError(f"tapfm {name}: {parameter.opts[0]} has no help")
    return prose(parameter.help)


def name_and_value(option: Any, hint: Any) -> tuple[str, str]:
    """Write an option as it is typed, and what it takes."""
    names = " ".join(code(each) for each in (*option.opts, *option.secondary_opts))
    kind, info = kind_of(hint)
    if kind is bool:
        return names, VALUES[bool]
    one = option.metavar and "|" not in option.metavar
    shown = code(f"{names.strip('`')} {option.metavar}") if one else f"{names} {either(option.metavar or '')}".strip()
    several = ", repeatable" if option.multiple else ""
    count = f"{option.nargs} " if option.nargs > 1 else ""
    return shown, f"{count}{value_text(kind, info)}{'s' if count else ''}{several}"


def kind_of(hint: Any) -> tuple[Any, ParameterInfo | None]:
    """Find the type of one value, and what typer was told of it."""
    info = next((each for each in getattr(hint, "__metadata__", ()) if isinstance(each, ParameterInfo)), None)
    kind = getattr(hint, "__origin__", hint) if info is not None else hint
    if get_origin(kind) in (Union, UnionType):
        (kind,) = (each for each in get_args(kind) if each is not NoneType)
    if get_origin(kind) in (list, tuple):
        kind = get_args(kind)[0]
    return kind, info


def value_text(kind: Any, info: ParameterInfo | None) -> str:
    """Say what a value is, and within which bounds."""
    if hasattr(kind, "__members__"):
        return any_of(str(each.value) for each in kind)
    if get_args(kind):  # a Literal
        return any_of(map(str, get_args(kind)))
    low, high = (None, None) if info is None else (info.min, info.max)
    bounds: Mapping[bool, str] = {
        low is not None and high is None: f", from {low}",
        low is None and high is not None: f", to {high}",
        low is not None and high is not None: f", {low} to {high}",
    }
    return VALUES[kind] + bounds.get(True, "")


def default_of(option: Any) -> str:
    """Say what holds where an option is not given."""
    if option.required:
        return "needed"
    if isinstance(option.show_default, str):
        return prose(option.show_default)
    default = option.default
    if default is None or default is False or default == ():
        return "-"
    if isinstance(default, bool):
        return code(option.opts[0])
    values = default if isinstance(default, tuple | list) else [default]
    return code(" ".join(map(str, values)))
