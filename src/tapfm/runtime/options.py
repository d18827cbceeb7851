"""Command options as a dataclass that defines both the command line and the Python function.

@options
class TileOptions:
    cohort: Annotated[Path, Argument("Cohort table.", metavar="COHORT.csv")]
    _: KW_ONLY
    out: Annotated[Path, Option("Output folder.", metavar="DIR")]
    workers: Annotated[int | None, Option("Worker processes.", default="one per core")] = None

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
    """A positional argument of a command. Name, type and default are those of the field."""

    help: str
    metavar: str | None = None


@dataclass(frozen=True)
class Option:
    """An option of a command. Name, type and default are those of the field."""

    help: str
    flags: str | None = None  # None: the field's name with dashes; for a switch also a pair: "--force/--resume"
    metavar: str | None = None
    default: str | None = None  # description of the default, if its value is not clear
    at_least: int | None = None
    at_most: int | None = None


@dataclass_transform(frozen_default=True)
def options(cls: type[Class]) -> type[Class]:
    """Turn a class into a frozen dataclass that converts and checks its values.

    A string becomes a path, and a list or a single value becomes a tuple. A value of the wrong type or outside the
    limits of its option raises InputError. Then the method `check` of the class is called, if there is one.
    """
    check = cls.__dict__.get("check")

    def convert_and_check(self: Any) -> None:
        hints = typing.get_type_hints(type(self), include_extras=True)
        for each in fields(self):
            hint, parameter = typing.get_args(hints[each.name])
            flag = format_flag(each.name, parameter)
            value = _convert(flag, getattr(self, each.name), hint)
            if isinstance(parameter, Argument) and value == ():
                raise InputError(f"{parameter.metavar or each.name} is missing.", hint=parameter.help)
            if isinstance(parameter, Option):
                _check_limits(flag, value, parameter)
            object.__setattr__(self, each.name, value)
        if check is not None:
            check(self)

    cls.__post_init__ = convert_and_check  # type: ignore[attr-defined]
    return dataclass(frozen=True)(cls)


def format_flag(name: str, parameter: Argument | Option) -> str:
    """Return the command-line spelling of a field: --name, a pair such as --force/--resume, or a metavar."""
    if isinstance(parameter, Argument):
        return parameter.metavar or name
    return parameter.flags or f"--{name.replace('_', '-')}"


def _convert(flag: str, value: Any, hint: Any) -> Any:
    """Convert a value to the type of its field, or to the first matching type of a union."""
    kinds = typing.get_args(hint) if is_union(hint) else (hint,)
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
    """Convert a value to one type, or return None if it does not match."""
    item = item_type(kind)
    if item is not None:
        single = isinstance(value, str | Path) or not isinstance(value, Iterable)
        values = () if value is None else (value,) if single else value
        return tuple(_convert(flag, each, item) for each in values)
    if typing.get_origin(kind) is tuple:
        kinds = typing.get_args(kind)
        if isinstance(value, str) or not isinstance(value, Sequence) or len(value) != len(kinds):
            return None
        return tuple(_convert(flag, each, one) for each, one in zip(value, kinds, strict=True))
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


def is_union(hint: Any) -> bool:
    """Return whether a type is X | Y. The command line uses the first of them."""
    return typing.get_origin(hint) in (types.UnionType, typing.Union)


def item_type(hint: Any) -> Any:
    """Return X for tuple[X, ...], and None for other types."""
    arguments = typing.get_args(hint)
    return arguments[0] if typing.get_origin(hint) is tuple and arguments[1:] == (...,) else None


class CommandFunction(Generic[Options, Result]):
    """A command as a Python function that takes the options of the command line as keyword arguments."""

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
        """Run the command. Messages and progress go to stderr. After Ctrl-C, finished work is saved."""
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
