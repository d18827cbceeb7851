"""Options of a command: one dataclass, from which the command line and the Python function both follow.

@options
class TileOptions:
    cohort: Annotated[Path, Argument("Cohort table.", metavar="COHORT.csv")]
    _: KW_ONLY
    out: Annotated[Path, Option("Output folder.", metavar="DIR")]
    workers: Annotated[int | None, Option("Worker processes.", default="one per core")] = None

@verb(TileOptions)
def tile(options: TileOptions, console: Console) -> Tiled: ...

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
Chosen = TypeVar("Chosen")
Result = TypeVar("Result")


@dataclass(frozen=True)
class Argument:
    """A positional argument of a command; name, type and default are those of the field."""

    help: str
    metavar: str | None = None


@dataclass(frozen=True)
class Option:
    """An option of a command; its name, type and default are those of the field."""

    help: str
    flags: str | None = None  # None: the field's name with dashes; a pair for a choice of two: "--force/--resume"
    metavar: str | None = None
    default: str | None = None  # what the default means, where its value does not tell
    at_least: int | None = None
    at_most: int | None = None


@dataclass_transform(frozen_default=True)
def options(cls: type[Class]) -> type[Class]:
    """Make a frozen dataclass of options. Values are converted and checked, so that Python is as strict as a shell.

    Text becomes a path, a list or a single value becomes a tuple. A value of the wrong type, or outside the limits of
    its option, is an InputError; then the method `check` of the class is called, if it has one.
    """
    checked = cls.__dict__.get("check")

    def convert(self: Any) -> None:
        hints = typing.get_type_hints(type(self), include_extras=True)
        for each in fields(self):
            hint, shown = typing.get_args(hints[each.name])
            flag = flag_of(each.name, shown)
            value = _convert(flag, getattr(self, each.name), hint)
            if isinstance(shown, Argument) and value == ():
                raise InputError(f"No {shown.metavar or each.name} was given.", hint=shown.help)
            if isinstance(shown, Option):
                _check_limits(flag, value, shown)
            object.__setattr__(self, each.name, value)
        if checked is not None:
            checked(self)

    cls.__post_init__ = convert  # type: ignore[attr-defined]
    return dataclass(frozen=True)(cls)


def flag_of(name: str, shown: Argument | Option) -> str:
    """Return how a field is written on the command line: --name, or --yes/--no for a choice of two."""
    if isinstance(shown, Argument):
        return shown.metavar or name
    return shown.flags or f"--{name.replace('_', '-')}"


def _convert(flag: str, value: Any, hint: Any) -> Any:
    """Return a value as the type of its field; of a union the first type that takes it."""
    kinds = typing.get_args(hint) if is_union(hint) else (hint,)
    if value is None and type(None) in kinds:
        return None
    for kind in kinds:
        converted = _convert_to(flag, value, kind)
        if converted is not None:
            return converted
    names = {"str": "text", "int": "a whole number", "float": "a number", "bool": "True or False", "Path": "a path"}
    expected = [names.get(getattr(kind, "__name__", ""), str(kind)) for kind in kinds if kind is not type(None)]
    raise InputError(f"{flag} is {value!r}.", hint=f"It has to be {' or '.join(expected)}.")


def _convert_to(flag: str, value: Any, kind: Any) -> Any:
    """Return a value as one type, or None where it is not of that type."""
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


def _check_limits(flag: str, value: Any, shown: Option) -> None:
    for number in value if isinstance(value, tuple) else (value,):
        if not isinstance(number, int | float):
            continue
        if shown.at_least is not None and number < shown.at_least:
            raise InputError(f"{flag} is {number}: it has to be at least {shown.at_least}.", hint=shown.help)
        if shown.at_most is not None and number > shown.at_most:
            raise InputError(f"{flag} is {number}: it has to be at most {shown.at_most}.", hint=shown.help)


def is_union(hint: Any) -> bool:
    """Return whether a type is X | Y; the command line reads text as the first of them."""
    return typing.get_origin(hint) in (types.UnionType, typing.Union)


def item_type(hint: Any) -> Any:
    """Return X of tuple[X, ...], None for other types."""
    arguments = typing.get_args(hint)
    return arguments[0] if typing.get_origin(hint) is tuple and arguments[1:] == (...,) else None


class Verb(Generic[Chosen, Result]):
    """A command as a Python function: called with the options of the command line, by the same names."""

    def __init__(self, make: Callable[..., Chosen], run: Callable[[Chosen, Console], Result]) -> None:
        self.make, self.run = make, run
        self.__name__, self.__module__ = run.__name__, run.__module__
        hints = typing.get_type_hints(make, include_extras=True)
        shown = {name: typing.get_args(hint) for name, hint in hints.items() if name != "_"}
        signature = inspect.signature(make)
        self.__signature__ = signature.replace(
            parameters=[each.replace(annotation=shown[name][0]) for name, each in signature.parameters.items()],
            return_annotation=run.__annotations__.get("return", inspect.Signature.empty),
        )
        lines = [f"    {name}: {described.help}" for name, (_, described) in shown.items()]
        self.__doc__ = "\n".join([f"{self.__name__}{self.__signature__}", "", run.__doc__ or "", "", *lines])

    def __repr__(self) -> str:
        return f"<function tapfm.{self.__name__}>"

    def __call__(self, *args: Any, **options: Any) -> Result:
        """Run it; messages and progress go to stderr. Ctrl-C keeps what is finished."""
        for name in options:
            if name not in self.__signature__.parameters:
                near = difflib.get_close_matches(name, self.__signature__.parameters, n=1)
                meant = f" Did you mean '{near[0]}'?" if near else ""
                raise TypeError(f"tapfm.{self.__name__}() has no option '{name}'.{meant}")
        try:
            return self.run(self.make(*args, **options), Console(stderr=True, highlight=False))
        except Interrupted as stopped:
            raise KeyboardInterrupt from stopped


def verb(
    make: Callable[..., Chosen],
) -> Callable[[Callable[[Chosen, Console], Result]], Verb[Chosen, Result]]:
    """Make a `Verb` of a function that takes options and a console for messages."""
    return lambda run: Verb(make, run)
