"""`tapfm export`."""

from __future__ import annotations

from tapfm.cli.command import command
from tapfm.cli.console import stderr_console
from tapfm.workflows import export as workflow


@command(workflow.ExportOptions)
def export(options: workflow.ExportOptions) -> None:
    """Export the model of a run: the adapted encoder for timm, the aggregator, and a model card.

    The exported model is loaded again and compared with the run before the
    command ends. With --push-to-hub it is also uploaded to the Hugging Face
    Hub, to a private repository unless --public is given.

    \b
    Examples:
      tapfm export runs/first --out exported
      tapfm export runs/first --out exported --push-to-hub my-lab/uni-fgfr3

    \b
    Output files:
      model.safetensors, config.json       encoder, for timm.create_model
      aggregator.safetensors, tapfm.json   aggregator, and how to load it
      README.md                            model card: data, metrics, licence
    """
    workflow.export.run(options, stderr_console())
