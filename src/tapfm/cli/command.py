"""Create a typer command from an options dataclass."""

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


def command(options_class: type, *, stop_message: str = "") -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Decorate a function that takes options, and optionally typer parameters that only the command line has.

    stop_message: printed after Ctrl-C or SIGTERM. The exit code is then 128 + the number of the signal.
    """

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        _, *extra = inspect.signature(function, eval_str=True).parameters.values()
        hints = typing.get_type_hints(options_class, include_extras=True)
        parameters = [_make_parameter(each, hints[each.name]) for each in fields(options_class)]

        def run(**values: Any) -> None:
            given = {each.name: values.pop(each.name) for each in parameters}
            # typer passes None for a repeatable option that was not given
            empty = {name for name, value in given.items() if value is None and item_type(_field_type(hints[name]))}
            options = options_class(**{name: () if name in empty else value for name, value in given.items()})
            try:
                function(options, **values)
            except (KeyboardInterrupt, Interrupted, SystemExit) as error:
                code = _exit_code(error)
                if code > 128 and stop_message:
                    stderr_console().print(f"Stopped. {stop_message}", markup=False, soft_wrap=True)
                raise typer.Exit(code) from None

        run.__name__, run.__doc__ = function.__name__, function.__doc__
        all_parameters = [*parameters, *(each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in extra)]
        run.__signature__ = inspect.Signature(all_parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {each.name: each.annotation for each in all_parameters}
        return run

    return decorate


def _exit_code(stop: KeyboardInterrupt | Interrupted | SystemExit) -> int:
    if isinstance(stop, Interrupted):
        return 128 + stop.signal_number
    if isinstance(stop, SystemExit):  # after SIGTERM, see `main`
        return stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    return 128 + signal.SIGINT


def _field_type(hint: Any) -> Any:
    return typing.get_args(hint)[0]


def _make_parameter(field: Field[Any], hint: Any) -> inspect.Parameter:
    """Return the function parameter from which typer creates the argument or option of a field."""
    kind, declared = typing.get_args(hint)
    default = inspect.Parameter.empty if field.default is MISSING else field.default
    item = item_type(kind)
    if is_union(kind):
        first, *others = typing.get_args(kind)
        # values of the command line have the first type; other types can only be passed in Python
        kind = first | None if type(None) in others else first
    if item is not None:
        kind = types.GenericAlias(list, (item,))
        if default is not inspect.Parameter.empty:
            kind, default = kind | None, default or None
    if isinstance(declared, Argument):
        info: Any = typer.Argument(metavar=declared.metavar, help=declared.help)
    else:
        assert isinstance(declared, Option)
        info = typer.Option(
            format_flag(field.name, declared),
            metavar=declared.metavar,
            help=declared.help,
            show_default=True if declared.show_default is None else declared.show_default,
        )
    return inspect.Parameter(
        field.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, info]
    )
