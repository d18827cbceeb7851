"""`tapfm probe`."""

from __future__ import annotations

from tapfm.cli.command import command
from tapfm.cli.console import print_line, stderr_console
from tapfm.workflows import probe as workflow


@command(workflow.ProbeOptions)
def probe(options: workflow.ProbeOptions) -> None:
    """Test the encoder of a run on tiles of another task, before and after adaptation.

    Fits a linear probe on frozen features of each encoder. Writes the class
    probabilities of the test tiles and the change of the features to a JSON
    file. `tapfm study` runs this command for forgetting studies and summarises
    the results.

    \b
    Example:
      tapfm probe runs/first --tiles tissue-types --out probe.json
    """
    result = workflow.probe.run(options, stderr_console())
    print_line(
        stderr_console(),
        f"{result.tiles:,} test tiles of {len(result.classes)} classes: cosine distance of the features "
        f"{result.values['cosine_distance']:.4f}, linear CKA {result.values['linear_cka']:.4f}. Wrote {options.out}",
    )
