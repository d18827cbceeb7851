"""`tapfm probe`: the features of a run's encoder on tiles of another task, before and after adaptation."""

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

    run: Annotated[Path, Argument("Run folder of `tapfm train`, not of method fixed.", metavar="RUN")]
    _: KW_ONLY
    tiles: Annotated[Path, Option("A folder of pictures for each class; or train/ and test/.", metavar="DIR")]
    out: Annotated[Path, Option("Write the result to this JSON file.", metavar="FILE")]
    seed: Annotated[int, Option("Seed that chooses the test tiles, without test/.", at_least=0)] = 0
    device: Device = "auto"


@dataclass(frozen=True)
class ProbeResult:
    """Result of a probe."""

    tiles: int  # tested on
    classes: tuple[str, ...]
    values: dict[str, Any]  # as in the JSON file


@command_function(ProbeOptions)
def probe(options: ProbeOptions, console: Console) -> ProbeResult:  # noqa: ARG001 - every command gets one
    """Fit a linear probe on features of the original and of the adapted encoder, and compare them."""
    from tapfm.runtime.devices import choose_device
    from tapfm.study.probe_tiles import find_probe_tiles

    pictures = find_probe_tiles(options.tiles, options.seed)
    device = choose_device(options.device)

    from tapfm.study.probe import probe_run, write_probe

    values = probe_run(options.run, pictures, device)
    write_probe(options.out, values)
    return ProbeResult(len(pictures.test), pictures.classes, values)
