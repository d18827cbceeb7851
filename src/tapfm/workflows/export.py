"""`tapfm export`: write the adapted encoder for timm, the aggregator and a model card."""

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
    out: Annotated[Path, Option("Output folder for the model.", metavar="DIR")]
    push_to_hub: Annotated[
        str | None,
        Option("Upload the model to this repository on the Hugging Face Hub.", metavar="OWNER/NAME"),
    ] = None
    public: Annotated[bool, Option("With --push-to-hub: create a public repository. By default it is private.")] = False
    force: Annotated[bool, Option("Overwrite the export of another run in --out.")] = False
    owner_permission: Annotated[
        bool,
        Option(
            "With --push-to-hub: the owners of the base model gave you permission to share adapted versions. Needed if "
            "the licence forbids them."
        ),
    ] = False

    def check(self) -> None:
        """Raise InputError if an option was given that needs --push-to-hub, or if `run` is not a run folder."""
        if self.push_to_hub is None and (self.public or self.owner_permission):
            option = "--public" if self.public else "--owner-permission"
            raise InputError(f"{option} needs --push-to-hub.", hint="Add the repository: --push-to-hub OWNER/NAME")
        if (self.run / "ensemble.json").is_file():
            raise InputError(
                f"{self.run} is an ensemble of several runs, which cannot be exported as one model.",
                hint="Pass the folder of one of its runs. ensemble.json lists them.",
            )
        if not (self.run / "config.toml").is_file():
            raise InputError(
                f"{self.run} is not a run folder: it has no config.toml.",
                hint="Pass the folder that was given to `tapfm train --out`.",
            )


@command_function(ExportOptions)
def export(options: ExportOptions, console: Console) -> Path:
    """Write the encoder, the aggregator and a model card, verify them, and return the folder."""
    from tapfm.runs.export import export_run

    export_run(
        options.run,
        options.out,
        push_to=options.push_to_hub,
        owner_permission=options.owner_permission,
        private=not options.public,
        force=options.force,
        console=console,
    )
    return options.out
