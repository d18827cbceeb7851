"""Options that several commands share: one name, one meaning, one line of help."""

from __future__ import annotations

from typing import Annotated

import typer

Device = Annotated[str, typer.Option("--device", help="auto, cpu, cuda, cuda:1, ...")]
ReadingWorkers = Annotated[
    int | None, typer.Option("--workers", min=0, help="Processes that read tiles.", show_default="one for each core")
]
INFERENCE_PRECISIONS_HELP = "float32, bfloat16, float16, float8."
Compiled = Annotated[
    bool | None,
    typer.Option("--compile/--no-compile", help="Compile the encoder first.", show_default="when there is much to do"),
]
AllowFailures = Annotated[
    int, typer.Option("--allow-failures", metavar="N", min=0, help="Exit with 0 when no more than N slides failed.")
]
