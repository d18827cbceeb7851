"""Options that several commands share, with the same name, meaning and help text."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from tapfm.runtime.options import Option

Device = Annotated[
    str, Option("Device to compute on: auto (the GPU if there is one), cpu, cuda, or cuda:1 for the second GPU.")
]
Workers = Annotated[
    int | None,
    Option(
        "Number of worker processes. 0: do all work in the main process.",
        metavar="N",
        show_default="one per CPU core",
        at_least=0,
    ),
]
AllowFailures = Annotated[
    int, Option("Number of slides that may fail. If more fail, the exit code is 3.", metavar="N", at_least=0)
]
Only = Annotated[tuple[str, ...], Option("Process only the slide with this slide_id. Repeatable.", metavar="ID")]
SlidesFolder = Annotated[
    Path | None,
    Option("Folder to search for slides, if the cohort table has no paths or the slides were moved.", metavar="DIR"),
]
Compile = Annotated[
    bool | None,
    Option(
        "Compile the encoder with torch.compile: the start takes longer, then tiles are encoded faster.",
        flag="--compile/--no-compile",
        show_default="on a GPU, if there are enough tiles",
    ),
]
Resamples = Annotated[
    int, Option("Number of bootstrap resamples for the confidence intervals.", metavar="N", at_least=1)
]
