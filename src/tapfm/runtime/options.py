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

import inspect
import types
import typing
from collections.abc import Callable, Iterable
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
    """Make a frozen dataclass of options, which takes text for paths, and a list or one value for a tuple."""
    checked = cls.__dict__.get("check")

    def convert(self: Any) -> None:
        hints = typing.get_type_hints(type(self), include_extras=True)
        for each in fields(self):
            hint, shown = typing.get_args(hints[each.name])
            value = _convert_value(getattr(self, each.name), hint)
            _check_limits(each.name, value, shown)
            object.__setattr__(self, each.name, value)
        if checked is not None:
            checked(self)

    cls.__post_init__ = convert  # type: ignore[attr-defined]
    return dataclass(frozen=True)(cls)


def _convert_value(value: Any, hint: Any) -> Any:
    """Return a value as the type of its field: text as a path, a list or a single value as a tuple.

    Where the type is `Path | Any`, a value that is neither text nor a path stays as it is.
    """
    if is_union(hint):
        hint, *others = (each for each in typing.get_args(hint) if each is not type(None))
        if value is None or (Any in others and not isinstance(value, str)):
            return value
    item = item_type(hint)
    if item is not None:
        if value is None:
            return ()
        single = isinstance(value, str | Path) or not isinstance(value, Iterable)
        return tuple(_convert_value(each, item) for each in ((value,) if single else value))
    if typing.get_origin(hint) is tuple:
        return tuple(value)
    return Path(value) if hint is Path else value


def _check_limits(name: str, value: Any, shown: Argument | Option) -> None:
    """Refuse numbers outside the limits of an option; the command line has refused them before."""
    if isinstance(shown, Argument):
        return
    for number in value if isinstance(value, tuple) else (value,):
        if not isinstance(number, int | float):
            continue
        if shown.at_least is not None and number < shown.at_least:
            raise InputError(f"{name} is {number}.", hint=f"It has to be at least {shown.at_least}.")
        if shown.at_most is not None and number > shown.at_most:
            raise InputError(f"{name} is {number}.", hint=f"It has to be at most {shown.at_most}.")


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
        self.__name__ = run.__name__
        hints = typing.get_type_hints(make, include_extras=True)
        shown = {name: typing.get_args(hint) for name, hint in hints.items() if name != "_"}
        signature = inspect.signature(make)
        self.__signature__ = signature.replace(
            parameters=[each.replace(annotation=shown[name][0]) for name, each in signature.parameters.items()],
            return_annotation=inspect.Signature.empty,
        )
        lines = [f"{name}: {described.help}" for name, (_, described) in shown.items()]
        self.__doc__ = "\n".join([run.__doc__ or "", "", *lines])

    def __call__(self, *args: Any, **options: Any) -> Result:
        """Run it; messages and progress go to stderr. Ctrl-C keeps what is finished."""
        try:
            return self.run(self.make(*args, **options), Console(stderr=True, highlight=False))
        except Interrupted as stopped:
            raise KeyboardInterrupt from stopped


def verb(
    make: Callable[..., Chosen],
) -> Callable[[Callable[[Chosen, Console], Result]], Verb[Chosen, Result]]:
    """Make a `Verb` of a function that takes options and a console for messages."""
    return lambda run: Verb(make, run)
