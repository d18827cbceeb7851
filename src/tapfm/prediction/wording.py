"""What pictures of a slide say in words: what the model said of it, and numbers as people read them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from tapfm.prediction.folder import PredictedSlide
from tapfm.prediction.layers import ColourScale, Layer, Values

_MOST_TARGETS = 6  # of which a title tells


def format_value(value: float, *, signed: bool = False) -> str:
    """Write a number with three digits that count."""
    if value == 0:
        return "0"
    sign = "+" if signed else ""
    # 0.0312, not 3.12e-02
    text = f"{value:{sign}#.3g}".rstrip(".") if 1e-4 <= abs(value) < 1e3 else f"{value:{sign}.2e}"
    return text.replace("-", "−")


def tick_texts(ticks: Sequence[float]) -> list[str]:
    """Write the ticks of a colour bar, all with as many digits as their steps need."""
    step = min((abs(b - a) for a, b in itertools.pairwise(ticks)), default=1.0)
    digits = next((n for n in range(7) if abs(round(step, n) - step) < step * 1e-6), None)
    if digits is None or max(map(abs, ticks), default=0.0) >= 1e6:
        return [f"{tick:.2g}" for tick in ticks]
    return [f"{tick + 0.0:,.{digits}f}".replace("-", "−") for tick in ticks]


def heading(layer: Layer, *, percentile: bool) -> str:
    """Say which layer it is."""
    return layer.title[:1].upper() + layer.title[1:] + (", as percentile" if percentile else "")


def prediction_lines(predicted: PredictedSlide, layer: Layer) -> list[str]:
    """Say probability, threshold and call: of the layer's target, or of all that share the layer."""
    targets = [layer.target] if layer.target is not None else list(predicted.targets)
    parts = []
    for target in targets[:_MOST_TARGETS]:
        said = predicted.targets[target]
        part = f"{target}: probability {said.probability:.3f}"
        if said.threshold is not None:
            part += f", threshold {said.threshold:.3f}"
        if said.call is not None:
            part += f", called {predicted.kinds[target].describe_label(said.call)}"
        parts.append(part)
    more = len(targets) - len(parts)
    return [*parts, f"and {more} more targets"] if more > 0 else parts


def sum_line(predicted: PredictedSlide, layer: Layer, values: Values) -> str:
    """Say how contributions add up to the logit; nothing for other layers."""
    said = predicted.targets.get(layer.target) if layer.target is not None else None
    if layer.kind != "contribution" or said is None:
        return ""
    total = format_value(math.fsum(values.tolist()), signed=True)
    if said.constant is None:  # of an ensemble: its logit is that of the mean probability
        return f"The tiles add up to {total}: the mean of the members' logits, less their constants."
    return (
        f"The tiles add up to {total}; with the constant {format_value(said.constant, signed=True)} "
        f"this is the logit {format_value(said.logit, signed=True)}."
    )


def beyond_line(values: Values, scale: ColourScale) -> str:
    """Say which values share the colour of an end of the scale."""
    parts = []
    below, above = values[values < scale.low], values[values > scale.high]
    if len(below):
        parts.append(f"{tiles(len(below))} below {format_value(scale.low)} (down to {format_value(below.min())})")
    if len(above):
        parts.append(f"{tiles(len(above))} above {format_value(scale.high)} (up to {format_value(above.max())})")
    if not parts:
        return ""
    text = " and ".join(parts)
    return f"{text} {'shares' if len(below) + len(above) == 1 else 'share'} the end's colour."


def tiles(count: int) -> str:
    """Count tiles."""
    return f"{count:,} tile{'' if count == 1 else 's'}"


def end_words(layer: Layer, *, percentile: bool) -> tuple[str, str]:
    """Say what the ends of the colour bar stand for."""
    if percentile:
        return "lowest", "highest"
    return ("speaks against", "speaks for") if layer.kind == "contribution" else ("low", "high")
