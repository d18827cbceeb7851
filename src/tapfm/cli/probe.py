"""`tapfm probe`."""

from __future__ import annotations

from tapfm.cli.command import command
from tapfm.cli.console import print_line, stderr_console
from tapfm.workflows import probe as workflow


@command(workflow.ProbeOptions)
def probe(options: workflow.ProbeOptions) -> None:
    """Test a run's encoder on tiles of another task, before and after adaptation.

    \b
    tapfm probe runs/first --tiles tissue-types --out probe.json

    A linear probe is fitted on frozen features. `tapfm study` summarises the probes
    of a forgetting study.
    """
    result = workflow.probe.run(options, stderr_console())
    print_line(
        stderr_console(),
        f"{result.tiles:,} tiles of {len(result.classes)} classes: cosine distance of the features "
        f"{result.values['cosine_distance']:.4f}, linear CKA {result.values['linear_cka']:.4f}. Written: {options.out}",
    )
