"""`tapfm config`: the text of a configuration; and configurations made in Python."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from rich.console import Console

from tapfm.errors import InputError
from tapfm.runtime.options import Argument, Option, command_function, options
from tapfm.workflows.run_file import Changes

if TYPE_CHECKING:
    from tapfm.config.settings import RunConfig


@options
class ConfigOptions:
    """Options of `tapfm config`."""

    run: Annotated[Path | None, Argument("Print this one with everything filled in.", metavar="RUN.toml")] = None
    recipe: Annotated[str | None, Option("paper, or reference (its authors' scripts).", default="paper")] = None
    encoder: Annotated[str | None, Option("One of `tapfm encoders`.", default="uni")] = None
    method: Annotated[str | None, Option("tapfm, finetune or fixed.", default="tapfm")] = None
    cohort: Annotated[Path | None, Option("The cohort table.", metavar="CSV", default="cohort.csv")] = None
    tiles: Annotated[Path | None, Option("Output folder of `tapfm tile`.", metavar="DIR", default="tiles")] = None
    features: Annotated[Path | None, Option("Output folder of `tapfm embed`, for method fixed.", metavar="DIR")] = None
    target: Annotated[
        tuple[str, ...], Option("Label column; repeatable.", metavar="NAME", default="those of the table")
    ] = ()
    out: Annotated[
        Path | None, Option("Write it to this file; paths in it are relative to its folder.", metavar="FILE")
    ] = None
    set: Changes = ()

    def check(self) -> None:
        """Refuse options that contradict each other."""
        named = ("recipe", "encoder", "method", "cohort", "tiles", "features", "target", "out")
        given = [f"--{name}" for name in named if getattr(self, name) not in (None, ())]
        if self.run is not None and given:
            raise InputError(
                f"{', '.join(given)} starts a new file, but {self.run} is one already.",
                hint=f"Change it with --set, for example: tapfm config {self.run} --set schedule.epochs=5",
            )
        if self.run is None and self.set:
            raise InputError("--set changes a file.", hint="For example: tapfm config run.toml --set schedule.epochs=5")
        if self.out is not None and self.out.exists():
            raise InputError(f"{self.out} already exists.", hint="Give another name to --out, or remove it first.")


@command_function(ConfigOptions)
def config(options: ConfigOptions, console: Console) -> str:  # noqa: ARG001 - every command gets one
    """Return a configuration as text: one to start from, or a file with everything filled in; write it to `out`."""
    from tapfm.config import text as config_text
    from tapfm.config.loading import load_config
    from tapfm.runtime.files import write_atomically

    if options.run is not None:
        return config_text.format_config(load_config(options.run, options.set))
    text = config_text.starter_config(
        recipe=options.recipe or "paper",
        encoder=options.encoder or "uni",
        method=options.method or "tapfm",
        cohort=options.cohort,
        tiles=options.tiles,
        features=options.features,
        targets=options.target,
        folder=options.out.parent if options.out is not None else None,
    )
    if options.out is not None:
        try:
            write_atomically(options.out, text.encode())
        except OSError as error:
            raise InputError(
                f"{options.out} cannot be written ({error.strerror}).", hint="Give another file to --out."
            ) from error
    return text


def configure(*files: str | Path, **settings: Any) -> RunConfig:
    """Make a configuration, from RUN.toml or from nothing, with settings such as `schedule={"epochs": 5}`."""
    from tapfm.config.loading import load_config, merge_tables, resolve_config, resolve_paths

    tables: dict[str, Any] = {}
    for file in files:
        merge_tables(tables, load_config(Path(file)).as_tables())
    given = {name: dict(value) if isinstance(value, Mapping) else value for name, value in settings.items()}
    for section in given.values():
        if isinstance(section, dict):
            section.update({key: str(value) for key, value in section.items() if isinstance(value, Path)})
    resolve_paths(given, Path())
    merge_tables(tables, given)
    return resolve_config(tables)
