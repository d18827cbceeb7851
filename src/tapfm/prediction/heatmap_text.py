"""Text on heatmaps and galleries: predictions, headings, legends and formatted values."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from tapfm.prediction.folder import PredictedSlide
from tapfm.prediction.layers import ColourScale, Layer, Values
from tapfm.runtime.messages import format_count

_MAX_TARGETS = 6  # listed in a title


def format_value(value: float, *, signed: bool = False, digits: int = 3) -> str:
    """Return a number with `digits` significant digits."""
    if value == 0:
        return "0"
    sign = "+" if signed else ""
    # 0.0312, not 3.12e-02
    is_moderate = 1e-4 <= abs(value) < 1e3
    text = f"{value:{sign}#.{digits}g}".rstrip(".") if is_moderate else f"{value:{sign}.{digits - 1}e}"
    return text.replace("-", "−")


def format_ticks(ticks: Sequence[float]) -> list[str]:
    """Return the tick labels of a colour bar, all with the same number of decimals if possible."""
    step = min((abs(b - a) for a, b in itertools.pairwise(ticks)), default=1.0)
    digits = next((n for n in range(7) if abs(round(step, n) - step) < step * 1e-6), None)
    if digits is None or max(map(abs, ticks), default=0.0) >= 1e6:
        return [f"{tick:.2g}" for tick in ticks]
    return [f"{tick + 0.0:,.{digits}f}".replace("-", "−") for tick in ticks]


def format_layer_heading(layer: Layer, *, percentile: bool) -> str:
    """Return the title of a layer with a capital letter, and "(percentiles)" if it shows percentiles."""
    return layer.title[:1].upper() + layer.title[1:] + (" (percentiles)" if percentile else "")


def describe_predictions(predicted: PredictedSlide, layer: Layer) -> list[str]:
    """Return a line with probability, threshold and call for the layer's target, or for all targets that share it."""
    targets = [layer.target] if layer.target is not None else list(predicted.targets)
    lines = []
    for target in targets[:_MAX_TARGETS]:
        prediction = predicted.targets[target]
        line = f"{target}: probability {prediction.probability:.3f}"
        if prediction.threshold is not None:
            line += f", threshold {prediction.threshold:.3f}"
        if prediction.call is not None:
            line += f", called {predicted.kinds[target].describe_label(prediction.call)}"
        if predicted.warning:
            line += f" ({predicted.warning})"
        lines.append(line)
    more = len(targets) - len(lines)
    return [*lines, f"and {format_count(more, 'more target')}"] if more > 0 else lines


def describe_sum(predicted: PredictedSlide, layer: Layer, values: Values) -> str:
    """Return how the contributions add up to the logit, or an empty string for other layers."""
    prediction = predicted.targets.get(layer.target) if layer.target is not None else None
    if layer.kind != "contribution" or prediction is None:
        return ""
    total = format_value(math.fsum(values.tolist()), signed=True)
    if prediction.constant is None:  # an ensemble: its logit is that of the mean probability
        return f"Sum of all tiles: {total}. This is the mean logit of the ensemble members without their constants."
    return (
        f"Logit of the slide: {format_value(prediction.logit, signed=True)} = "
        f"sum of all tiles ({total}) + constant ({format_value(prediction.constant, signed=True)})."
    )


def describe_clipped_tiles(values: Values, scale: ColourScale) -> str:
    """Return how many tiles have values outside the colour scale, or an empty string if there are none."""
    parts = []
    below, above = values[values < scale.low], values[values > scale.high]
    if len(below):
        limit, lowest = _format_distinct(scale.low, below.min())
        parts.append(f"{format_count(len(below), 'tile')} below {limit} (minimum {lowest})")
    if len(above):
        limit, highest = _format_distinct(scale.high, above.max())
        parts.append(f"{format_count(len(above), 'tile')} above {limit} (maximum {highest})")
    if not parts:
        return ""
    return f"Outside the colour scale, drawn in its first or last colour: {' and '.join(parts)}."


def _format_distinct(first: float, second: float) -> tuple[str, str]:
    """Format two values with three significant digits, or with up to six if the texts would be equal."""
    for digits in range(3, 7):
        texts = format_value(first, digits=digits), format_value(second, digits=digits)
        if texts[0] != texts[1]:
            break
    return texts


def colour_bar_labels(layer: Layer, *, percentile: bool) -> tuple[str, str]:
    """Return the labels at the low and the high end of the colour bar."""
    if percentile:
        return "lowest", "highest"
    return ("lowers the logit", "raises the logit") if layer.kind == "contribution" else ("low", "high")
