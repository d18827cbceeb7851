"""`tapfm probe`: test the encoder of a run on tiles of another task, before and after adaptation."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Annotated, Any

from rich.console import Console

from tapfm.runtime.options import Argument, Option, command_function, options
from tapfm.workflows.shared_options import Device


@options
class ProbeOptions:
    """Options of `tapfm probe`."""

    run: Annotated[Path, Argument("Run folder of `tapfm train` with method tapfm or finetune.", metavar="RUN")]
    _: KW_ONLY
    tiles: Annotated[
        Path,
        Option(
            "Folder with one subfolder of images per class, or with train/ and test/ that have such subfolders.",
            metavar="DIR",
        ),
    ]
    out: Annotated[Path, Option("JSON file for the results.", metavar="FILE")]
    seed: Annotated[int, Option("Random seed for choosing the test tiles, if --tiles has no test/.", at_least=0)] = 0
    device: Device = "auto"


@dataclass(frozen=True)
class ProbeResult:
    """Result of a probe."""

    tiles: int  # number of test tiles
    classes: tuple[str, ...]
    values: dict[str, Any]  # content of the JSON file


@command_function(ProbeOptions)
def probe(options: ProbeOptions, console: Console) -> ProbeResult:  # noqa: ARG001 - required by command_function
    """Fit a linear probe on the features of the original and of the adapted encoder, and compare both."""
    from tapfm.runtime.devices import choose_device
    from tapfm.study.probe_tiles import find_probe_tiles

    tiles = find_probe_tiles(options.tiles, options.seed)
    device = choose_device(options.device)

    from tapfm.study.probe import probe_run, write_probe

    values = probe_run(options.run, tiles, device)
    write_probe(options.out, values)
    return ProbeResult(len(tiles.test), tiles.classes, values)
