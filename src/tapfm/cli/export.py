"""`tapfm export`."""

from __future__ import annotations

from tapfm.cli.command import command
from tapfm.cli.console import stderr_console
from tapfm.workflows import export as workflow


@command(workflow.ExportOptions)
def export(options: workflow.ExportOptions) -> None:
    """Write the adapted encoder for timm, the aggregator, and a model card.

    \b
    tapfm export runs/first --out exported
    tapfm export runs/first --out exported --push-to-hub my-lab/uni-fgfr3

    \b
    model.safetensors, config.json       the encoder, as a local-dir of timm
    aggregator.safetensors, tapfm.json   from tiles to the slide
    README.md                            data, metrics, licence of the base model

    The folder is loaded again and compared before the command ends. What is
    pushed is private unless --public is given.
    """
    workflow.export.run(options, stderr_console())
