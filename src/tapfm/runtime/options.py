"""Command options as a dataclass that defines both the command line and the Python function.

@options
class TileOptions:
    cohort: Annotated[Path, Argument("Cohort table.", metavar="COHORT.csv")]
    _: KW_ONLY
    out: Annotated[Path, Option("Output folder.", metavar="DIR")]
    workers: Annotated[int | None, Option("Worker processes.", show_default="one per core")] = None

@command_function(TileOptions)
def tile(options: TileOptions, console: Console) -> SlideTable: ...

tile("cohort.csv", out="tiles")                         # from Python
tile.run(TileOptions("cohort.csv", out="tiles"), console)   # from the command line
"""

from __future__ import annotations

import difflib
import inspect
import types
import typing
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Generic, TypeVar, dataclass_transform

from rich.console import Console

from tapfm.errors import InputError, Interrupted

Class = TypeVar("Class")
Options = TypeVar("Options")
Result = TypeVar("Result")


@dataclass(frozen=True)
class Argument:
    """A positional argument of a command. Name, type and default are those of the dataclass field."""

    help: str
    metavar: str | None = None


@dataclass(frozen=True)
class Option:
    """An option of a command. Name, type and default are those of the dataclass field."""

    help: str
    flag: str | None = None  # "--" and the field's name if None; a bool may have a pair, such as "--force/--resume"
    metavar: str | None = None
    show_default: str | None = None  # text shown as the default in --help, if the value itself would not be clear
    at_least: int | None = None  # limits of a number
    at_most: int | None = None


@dataclass_transform(frozen_default=True)
def options(cls: type[Class]) -> type[Class]:
    """Turn a class into a frozen dataclass that converts and checks its values.

    Each value is converted to the type of its field, for example a string to a path, or a list or a single value to a
    tuple. A value of the wrong type or outside the limits of its option raises InputError. Then the method `check` is
    called, if the class has one.
    """
    check = cls.__dict__.get("check")

    def convert_and_check_fields(self: Any) -> None:
        type_hints = typing.get_type_hints(type(self), include_extras=True)
        for each in fields(self):
            type_hint, parameter = typing.get_args(type_hints[each.name])
            flag = format_flag(each.name, parameter)
            value = _convert(flag, getattr(self, each.name), type_hint)
            if isinstance(parameter, Argument) and value == ():
                raise InputError(f"{parameter.metavar or each.name} is missing.", hint=parameter.help)
            if isinstance(parameter, Option):
                _check_limits(flag, value, parameter)
            object.__setattr__(self, each.name, value)
        if check is not None:
            check(self)

    cls.__post_init__ = convert_and_check_fields  # type: ignore[attr-defined]
    return dataclass(frozen=True)(cls)


def format_flag(name: str, parameter: Argument | Option) -> str:
    """Return the name of a field in messages: the flag of an option, such as "--out", or the metavar of an argument."""
    if isinstance(parameter, Argument):
        return parameter.metavar or name
    return parameter.flag or f"--{name.replace('_', '-')}"


def _convert(flag: str, value: Any, type_hint: Any) -> Any:
    """Convert a value to the type of its field, or to the first matching type of a union."""
    kinds = typing.get_args(type_hint) if is_union(type_hint) else (type_hint,)
    if value is None and type(None) in kinds:
        return None
    for kind in kinds:
        converted = _convert_to(flag, value, kind)
        if converted is not None:
            return converted
    names = {"str": "text", "int": "a whole number", "float": "a number", "bool": "True or False", "Path": "a path"}
    expected = [names.get(getattr(kind, "__name__", ""), str(kind)) for kind in kinds if kind is not type(None)]
    raise InputError(f"{flag} is {value!r}, which has the wrong type.", hint=f"It must be {' or '.join(expected)}.")


def _convert_to(flag: str, value: Any, kind: Any) -> Any:
    """Convert a value to a type that is not a union, or return None if the value does not match."""
    item = item_type(kind)
    if item is not None:
        is_single = isinstance(value, str | Path) or not isinstance(value, Iterable)
        values = () if value is None else (value,) if is_single else value
        return tuple(_convert(flag, each, item) for each in values)
    if typing.get_origin(kind) is tuple:
        kinds = typing.get_args(kind)
        if isinstance(value, str) or not isinstance(value, Sequence) or len(value) != len(kinds):
            return None
        return tuple(_convert(flag, each, item_kind) for each, item_kind in zip(value, kinds, strict=True))
    if kind is Path:
        return Path(value) if isinstance(value, str | Path) else None
    if kind is bool or isinstance(value, bool):
        return value if kind in (bool, Any) and isinstance(value, bool) else None
    if kind is str:
        return str(value) if isinstance(value, str | int | float | Path) else None
    if kind is float:
        return float(value) if isinstance(value, int | float) else None
    return value if kind is Any or isinstance(value, kind) else None


def _check_limits(flag: str, value: Any, option: Option) -> None:
    for number in value if isinstance(value, tuple) else (value,):
        if not isinstance(number, int | float):
            continue
        if option.at_least is not None and number < option.at_least:
            raise InputError(f"{flag} must be at least {option.at_least}; got {number}.", hint=option.help)
        if option.at_most is not None and number > option.at_most:
            raise InputError(f"{flag} must be at most {option.at_most}; got {number}.", hint=option.help)


def is_union(type_hint: Any) -> bool:
    """Return whether a type is a union, X | Y."""
    return typing.get_origin(type_hint) in (types.UnionType, typing.Union)


def item_type(type_hint: Any) -> Any:
    """Return X for tuple[X, ...], and None for other types."""
    arguments = typing.get_args(type_hint)
    return arguments[0] if typing.get_origin(type_hint) is tuple and arguments[1:] == (...,) else None


class CommandFunction(Generic[Options, Result]):
    """A command as a Python function that takes the arguments and options of the command line."""

    def __init__(self, options_class: Callable[..., Options], run: Callable[[Options, Console], Result]) -> None:
        self.options_class, self.run = options_class, run
        self.__name__, self.__module__ = run.__name__, run.__module__
        hints = typing.get_type_hints(options_class, include_extras=True)
        declared = {name: typing.get_args(hint) for name, hint in hints.items() if name != "_"}
        signature = inspect.signature(options_class)
        self.__signature__ = signature.replace(
            parameters=[each.replace(annotation=declared[name][0]) for name, each in signature.parameters.items()],
            return_annotation=run.__annotations__.get("return", inspect.Signature.empty),
        )
        lines = [f"    {name}: {parameter.help}" for name, (_, parameter) in declared.items()]
        self.__doc__ = "\n".join([f"{self.__name__}{self.__signature__}", "", run.__doc__ or "", "", *lines])

    def __repr__(self) -> str:
        return f"<function tapfm.{self.__name__}>"

    def __call__(self, *args: Any, **options: Any) -> Result:
        """Run the command. Messages and progress go to stderr.

        After Ctrl-C, finished work is saved and KeyboardInterrupt is raised.
        """
        for name in options:
            if name not in self.__signature__.parameters:
                matches = difflib.get_close_matches(name, self.__signature__.parameters, n=1)
                suggestion = f" Did you mean '{matches[0]}'?" if matches else ""
                raise TypeError(f"tapfm.{self.__name__}() has no option '{name}'.{suggestion}")
        try:
            return self.run(self.options_class(*args, **options), Console(stderr=True, highlight=False))
        except Interrupted as interrupt:
            raise KeyboardInterrupt from interrupt


def command_function(
    options_class: Callable[..., Options],
) -> Callable[[Callable[[Options, Console], Result]], CommandFunction[Options, Result]]:
    """Decorate a function that takes options and a console for messages, to make it a `CommandFunction`."""
    return lambda run: CommandFunction(options_class, run)
