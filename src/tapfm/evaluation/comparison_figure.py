"""differences.png: each difference of AUC with its interval, a panel for each target."""

from __future__ import annotations

import io
from pathlib import Path

from tapfm.evaluation.comparing import Comparison
from tapfm.evaluation.measures import target_title
from tapfm.runtime.files import write_atomically

_CLEAR, _UNCLEAR = "#c8553d", "0.45"


def draw_differences(path: Path, compared: Comparison) -> None:
    """Draw the differences; those whose interval leaves 0 out stand out."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    targets = list(dict.fromkeys(pair.target for pair in compared.pairs))
    names = list(dict.fromkeys(f"{pair.first} - {pair.second}" for pair in compared.pairs))
    longest = max(map(len, names))
    figure = Figure(figsize=(3.4 * len(targets) + 0.09 * longest, 1.2 + 0.4 * len(names)), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, len(targets), squeeze=False, sharey=True)[0]
    for axes, target in zip(panels, targets, strict=True):
        axes.axvline(0, color="0.7", lw=1, ls=":")
        for pair in compared.pairs:
            if pair.target != target or pair.difference.value is None:
                continue
            place = names.index(f"{pair.first} - {pair.second}")
            low, high = pair.difference.low, pair.difference.high
            clear = low is not None and high is not None and not low <= 0 <= high
            colour = _CLEAR if clear else _UNCLEAR
            if low is not None and high is not None:
                axes.plot([low, high], [place, place], color=colour, lw=2)
            axes.plot(pair.difference.value, place, marker="o", ms=6, color=colour)
        axes.set(title=target_title(target), xlabel="difference of AUC, 95% interval", ylim=(len(names) - 0.5, -0.5))
        axes.title.set_fontsize(10)
        axes.set_yticks(range(len(names)), names, fontsize=9)
        axes.spines[["top", "right", "left"]].set_visible(False)
        axes.tick_params(axis="y", length=0)
        axes.margins(x=0.1)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=140, metadata={"Software": None})  # the same picture, byte for byte
    write_atomically(path, buffer.getvalue())
