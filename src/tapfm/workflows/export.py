"""`tapfm export`: the adapted encoder for timm, the aggregator and a model card."""

from __future__ import annotations

from dataclasses import KW_ONLY
from pathlib import Path
from typing import Annotated

from rich.console import Console

from tapfm.errors import InputError
from tapfm.runtime.options import Argument, Option, command_function, options


@options
class ExportOptions:
    """Options of `tapfm export`."""

    run: Annotated[Path, Argument("Run folder of `tapfm train`.", metavar="RUN")]
    _: KW_ONLY
    out: Annotated[Path, Option("Folder for the model.", metavar="DIR")]
    push_to_hub: Annotated[str | None, Option("Upload it to the Hugging Face hub.", metavar="OWNER/NAME")] = None
    public: Annotated[bool, Option("With --push-to-hub: make it public.")] = False
    force: Annotated[bool, Option("Overwrite the export of another run.")] = False
    despite_no_derivatives: Annotated[
        bool,
        Option("Push although the base model's licence forbids derivatives: you have its owners' permission."),
    ] = False

    def check(self) -> None:
        """Refuse options of a push without one, and what is not a run folder."""
        if self.push_to_hub is None and (self.public or self.despite_no_derivatives):
            raise InputError("There is nothing to push.", hint="Name the repository: --push-to-hub OWNER/NAME")
        if not (self.run / "config.toml").is_file():
            raise InputError(
                f"{self.run} is not a run folder: it has no config.toml.",
                hint="Run folders are what tapfm train writes to --out.",
            )


@command_function(ExportOptions)
def export(options: ExportOptions, console: Console) -> Path:
    """Write the encoder, the aggregator and a model card; load them again and compare; push them if asked.

    Returns the folder.
    """
    from tapfm.runs.export import export_run

    export_run(
        options.run,
        options.out,
        push_to=options.push_to_hub,
        despite_no_derivatives=options.despite_no_derivatives,
        private=not options.public,
        force=options.force,
        console=console,
    )
    return options.out
