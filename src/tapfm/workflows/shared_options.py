"""Options that several commands share: one name, one meaning, one line of help."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from tapfm.runtime.options import Option

Device = Annotated[str, Option("auto, cpu, cuda, cuda:1, ...")]
Workers = Annotated[
    int | None,
    Option("Worker processes; 0: none, all work in this process.", metavar="N", default="one per core", at_least=0),
]
AllowFailures = Annotated[int, Option("Exit with 0 when no more than N slides failed.", metavar="N", at_least=0)]
Only = Annotated[tuple[str, ...], Option("Only this slide; repeatable.", metavar="ID")]
SlidesFolder = Annotated[
    Path | None, Option("Where to look for slides that a table names without a path, or that moved.", metavar="DIR")
]
Compiled = Annotated[
    bool | None,
    Option("Compile the encoder first.", flags="--compile/--no-compile", default="when there is much to do"),
]
Resamples = Annotated[int, Option("Bootstrap resamples for confidence intervals.", metavar="N", at_least=1)]
