"""`tapfm config`: write RUN.toml. `tapfm.configure`: create a configuration in Python."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from rich.console import Console

from tapfm.errors import InputError
from tapfm.runtime.messages import format_command
from tapfm.runtime.options import Argument, Option, command_function, options
from tapfm.workflows.run_file import Overrides
from tapfm.workflows.shared_options import (
    ClamSplits,
    Clini,
    Encoding,
    Missing,
    Negative,
    PatientColumn,
    Positive,
    SlidesArePatients,
    SlidesFolder,
    SlideTable,
    choose_table,
    print_table_notes,
    read_table_options,
    read_target_request,
)

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
    slides: SlidesFolder = None
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
            show_default="the only label column of --cohort with two classes",
        ),
    ] = ()
    positive: Positive = ()
    negative: Negative = ()
    patient_column: PatientColumn = None
    slides_are_patients: SlidesArePatients = False
    missing: Missing = ()
    encoding: Encoding = None
    clini: Clini = None
    slide_table: SlideTable = None
    splits: ClamSplits = None
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
        new_file_options = [each.name for each in fields(self) if each.name not in ("run", "set")]
        given = [f"--{name.replace('_', '-')}" for name in new_file_options if getattr(self, name)]
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
        table_options = (
            "positive",
            "negative",
            "patient_column",
            "slides_are_patients",
            "missing",
            "encoding",
        )
        if self.table is None and (
            without := [name for name in (*table_options, "slides", "splits") if getattr(self, name)]
        ):
            raise InputError(
                f"--{without[0].replace('_', '-')} needs a cohort table.", hint="Pass it too: --cohort split.csv"
            )
        if self.out is not None and self.out.exists():
            raise InputError(
                f"{self.out} already exists.", hint="Choose another name with --out, or delete the file first."
            )

    @property
    def table(self) -> Path | None:
        """Table of slides."""
        return choose_table(self.cohort, self.slide_table, self.clini, "--cohort")


@command_function(ConfigOptions)
def config(options: ConfigOptions, console: Console) -> str:
    """Return RUN.toml as text: a commented file to start from, or an existing one with all defaults.

    A new file is also written to `out`.
    """
    from tapfm.config import text as config_text
    from tapfm.config.loading import load_config
    from tapfm.runtime.files import write_atomically

    if options.run is not None:
        return config_text.format_config(load_config(options.run, options.set))
    table = options.table
    text, labelled = config_text.format_starter_config(
        recipe=options.recipe or "paper",
        encoder=options.encoder or "uni",
        method=options.method or "tapfm",
        cohort=None
        if table is None
        else config_text.StarterCohort(table, read_table_options(options), read_target_request(options)),
        targets=options.target,
        tiles=options.tiles,
        features=options.features,
        folder=options.out.parent if options.out is not None else None,
    )
    if labelled is not None:
        print_table_notes(console, labelled.notes, labelled.warnings)
        print_table_notes(console, config_text.describe_splits(labelled), ())
    if options.out is not None:
        try:
            write_atomically(options.out, text.encode())
        except OSError as error:
            raise InputError(
                f"{options.out} cannot be written ({error.strerror}).", hint="Choose another file with --out."
            ) from error
    return text


def next_commands(file: Path) -> list[str]:
    """Return the commands that train with this configuration, after those that create missing tiles and features.

    If the cohort table has no splits, return only the command that creates them: its table needs a new configuration.
    """
    from tapfm.cohort.cohort_table import read_cohort
    from tapfm.cohort.splits import fold_names
    from tapfm.config.loading import load_config
    from tapfm.runs.data import preparation_commands
    from tapfm.tasks.catalog import target_arguments, target_kinds

    config = load_config(file)
    if config.cohort.table.exists():
        cohort = read_cohort(config.cohort.table, config.cohort.table_options)
        if not fold_names(cohort) and not any(row.split for row in cohort.rows):
            arguments = target_arguments(target_kinds(config.task.targets, config.class_texts))
            options = [*cohort.options.command_arguments(), *arguments]
            return [format_command("split", config.cohort.table, "--out", "split.csv", *options)]
    return [*preparation_commands(config), format_command("train", file, "--out", "runs/first")]


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
