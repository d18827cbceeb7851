"""From an options dataclass to a command of typer."""

from __future__ import annotations

import inspect
import signal
import types
import typing
from collections.abc import Callable
from dataclasses import MISSING, Field, fields
from typing import Annotated, Any

import typer

from tapfm.cli.console import stderr_console
from tapfm.errors import Interrupted
from tapfm.runtime.options import Argument, Option, format_flag, is_union, item_type


def command(make: type, *, stopped: str = "") -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Decorate a function that takes options, and perhaps parameters of typer that only the command line has.

    stopped: what to print after Ctrl-C or SIGTERM. The exit code is 128 + the number of the signal then.
    """

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        _, *own = inspect.signature(function, eval_str=True).parameters.values()
        hints = typing.get_type_hints(make, include_extras=True)
        parameters = [_parameter(each, hints[each.name]) for each in fields(make)]

        def run(**values: Any) -> None:
            given = {each.name: values.pop(each.name) for each in parameters}
            empty = {name for name, value in given.items() if value is None and item_type(_bare(hints[name]))}
            chosen = make(**{name: () if name in empty else value for name, value in given.items()})
            try:
                function(chosen, **values)
            except (KeyboardInterrupt, Interrupted, SystemExit) as error:
                code = _exit_code(error)
                if code > 128 and stopped:
                    stderr_console().print(f"Stopped. {stopped}", markup=False, soft_wrap=True)
                raise typer.Exit(code) from None

        run.__name__, run.__doc__ = function.__name__, function.__doc__
        everything = [*parameters, *(each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in own)]
        run.__signature__ = inspect.Signature(everything)  # type: ignore[attr-defined]
        run.__annotations__ = {each.name: each.annotation for each in everything}
        return run

    return decorate


def _exit_code(stop: KeyboardInterrupt | Interrupted | SystemExit) -> int:
    if isinstance(stop, Interrupted):
        return 128 + stop.signal_number
    if isinstance(stop, SystemExit):  # SIGTERM: `main` turns it into this
        return stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    return 128 + signal.SIGINT


def _bare(hint: Any) -> Any:
    return typing.get_args(hint)[0]


def _parameter(each: Field[Any], hint: Any) -> inspect.Parameter:
    """Return the parameter that typer makes an argument or option of."""
    kind, shown = typing.get_args(hint)
    default = inspect.Parameter.empty if each.default is MISSING else each.default
    item = item_type(kind)
    if is_union(kind):
        first, *others = typing.get_args(kind)
        kind = first | None if type(None) in others else first  # the other types are for Python
    if item is not None:
        kind = types.GenericAlias(list, (item,))
        if default is not inspect.Parameter.empty:
            kind, default = kind | None, default or None
    if isinstance(shown, Argument):
        info: Any = typer.Argument(metavar=shown.metavar, help=shown.help)
    else:
        assert isinstance(shown, Option)
        info = typer.Option(
            format_flag(each.name, shown),
            metavar=shown.metavar,
            help=shown.help,
            show_default=True if shown.default is None else shown.default,
        )
    return inspect.Parameter(
        each.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, info]
    )
