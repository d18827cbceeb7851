"""`tapfm config`: write RUN.toml. `tapfm.configure`: create a configuration in Python."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from rich.console import Console

from tapfm.errors import InputError
from tapfm.runtime.messages import format_command
from tapfm.runtime.options import Argument, Option, command_function, options
from tapfm.workflows.run_file import Overrides

if TYPE_CHECKING:
    from tapfm.config.settings import RunConfig


@options
class ConfigOptions:
    """Options of `tapfm config`."""

    run: Annotated[
        Path | None,
        Argument("Print this configuration with all defaults, instead of creating a new one.", metavar="RUN.toml"),
    ] = None
    recipe: Annotated[
        str | None,
        Option("Source of the defaults: paper, or reference (the scripts of its authors).", show_default="paper"),
    ] = None
    encoder: Annotated[
        str | None, Option("Encoder to adapt, from `tapfm encoders`.", metavar="NAME", show_default="uni")
    ] = None
    method: Annotated[
        str | None,
        Option(
            "Training method: tapfm, finetune (any aggregator), or fixed (frozen encoder, stored features).",
            show_default="tapfm",
        ),
    ] = None
    cohort: Annotated[
        Path | None,
        Option("Cohort table with labels and splits, from `tapfm split`.", metavar="CSV", show_default="cohort.csv"),
    ] = None
    tiles: Annotated[Path | None, Option("Output folder of `tapfm tile`.", metavar="DIR", show_default="tiles")] = None
    features: Annotated[
        Path | None,
        Option("Output folder of `tapfm embed`, for method fixed.", metavar="DIR", show_default="features"),
    ] = None
    target: Annotated[
        tuple[str, ...],
        Option(
            "Label column to predict. Repeatable: several columns make a multi-label task.",
            metavar="NAME",
            show_default="all label columns of --cohort that contain both 0 and 1",
        ),
    ] = ()
    out: Annotated[
        Path | None,
        Option(
            "File to write; paths in it are relative to its folder.",
            metavar="FILE",
            show_default="print to the terminal",
        ),
    ] = None
    set: Overrides = ()

    def check(self) -> None:
        """Raise InputError if options contradict each other or the output file exists."""
        new_file_options = ("recipe", "encoder", "method", "cohort", "tiles", "features", "target", "out")
        given = [f"--{name}" for name in new_file_options if getattr(self, name) not in (None, ())]
        if self.run is not None and given:
            command = format_command("config", self.run, "--set", "schedule.epochs=5")
            raise InputError(
                f"{', '.join(given)} can only be used for a new configuration, not with the argument {self.run}.",
                hint=f"To change a setting, use --set: {command}"
                if self.run.exists()
                else f"{self.run} does not exist. To create it, pass its path with --out.",
            )
        if self.run is None and self.set:
            raise InputError(
                "--set needs an existing RUN.toml.",
                hint="For example: tapfm config run.toml --set schedule.epochs=5",
            )
        if self.out is not None and self.out.exists():
            raise InputError(
                f"{self.out} already exists.", hint="Choose another name with --out, or delete the file first."
            )


@command_function(ConfigOptions)
def config(options: ConfigOptions, console: Console) -> str:  # noqa: ARG001 - required by command_function
    """Return RUN.toml as text: a commented file to start from, or an existing one with all defaults.

    A new file is also written to `out`.
    """
    from tapfm.config import text as config_text
    from tapfm.config.loading import load_config
    from tapfm.runtime.files import write_atomically

    if options.run is not None:
        return config_text.format_config(load_config(options.run, options.set))
    text = config_text.format_starter_config(
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
                f"{options.out} cannot be written ({error.strerror}).", hint="Choose another file with --out."
            ) from error
    return text


def configure(*files: str | Path, **settings: Any) -> RunConfig:
    """Return a configuration: the defaults, the settings of RUN.toml files, and settings given as keyword arguments.

    For example `configure("run.toml", schedule={"epochs": 5})`. Later settings override earlier ones.
    """
    from tapfm.config.loading import merge_tables, read_toml, resolve_config, resolve_paths

    tables: dict[str, Any] = {}
    for file in map(Path, files):
        settings_of_file = read_toml(file, create_command=format_command("config", "--out", file))
        resolve_paths(settings_of_file, file.parent)
        merge_tables(tables, settings_of_file)
    given = {name: dict(value) if isinstance(value, Mapping) else value for name, value in settings.items()}
    for section in given.values():
        if isinstance(section, dict):
            section.update({key: str(value) for key, value in section.items() if isinstance(value, Path)})
    resolve_paths(given, Path())
    merge_tables(tables, given)
    return resolve_config(tables)
