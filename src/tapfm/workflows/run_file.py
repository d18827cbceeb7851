"""The configuration of a run as an argument of commands: RUN.toml, or in Python a `RunConfig`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from tapfm.errors import InputError
from tapfm.runtime.options import Argument, Option

if TYPE_CHECKING:
    from tapfm.config.settings import RunConfig

# Any: a RunConfig, whose module would slow down `tapfm --help`
RunFile = Annotated[Path | Any, Argument("The configuration; `tapfm config` writes one.", metavar="RUN.toml")]
Changes = Annotated[
    tuple[str, ...],
    Option(
        "Change a setting, such as adaptation.lambda=0.5; repeatable. A path starts in the current folder.",
        metavar="KEY=VALUE",
    ),
]


def read_run_config(run: Path | RunConfig, changes: Sequence[str]) -> RunConfig:
    """Return the configuration of a run, with `--set` changes on top."""
    from tapfm.config.loading import load_config, override_settings
    from tapfm.config.settings import RunConfig

    if isinstance(run, Path):
        return load_config(run, changes)
    if isinstance(run, RunConfig):
        return override_settings(run, changes)
    raise InputError(
        f"An object of type {type(run).__name__} is not a configuration.",
        hint="Give RUN.toml, or tapfm.configure(...).",
    )
