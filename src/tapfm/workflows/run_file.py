"""Arguments of commands that take the configuration of a run: RUN.toml, or in Python a `RunConfig`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from tapfm.errors import InputError
from tapfm.runtime.options import Argument, Option

if TYPE_CHECKING:
    from tapfm.config.settings import RunConfig

# Any is a RunConfig; importing its module here would slow down `tapfm --help`
RunFile = Annotated[Path | Any, Argument("Configuration of the run, as written by `tapfm config`.", metavar="RUN.toml")]
Overrides = Annotated[
    tuple[str, ...],
    Option(
        "Override a setting of RUN.toml, such as adaptation.lambda=0.5. Paths are relative to the current folder. "
        "Repeatable.",
        metavar="KEY=VALUE",
    ),
]


def read_run_config(run: Path | RunConfig, overrides: Sequence[str]) -> RunConfig:
    """Return the configuration of a run with `--set` overrides applied."""
    from tapfm.config.loading import load_config, override_settings
    from tapfm.config.settings import RunConfig

    if isinstance(run, Path):
        return load_config(run, overrides)
    if isinstance(run, RunConfig):
        return override_settings(run, overrides)
    raise InputError(
        f"An object of type {type(run).__name__} is not a configuration.",
        hint="Pass the path of RUN.toml, or the result of tapfm.configure(...).",
    )
