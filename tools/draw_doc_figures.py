"""Draw the figures of the docs that no command of tapfm writes.

    python tools/draw_doc_figures.py two-graphs --out docs/images/two-graphs.png
    python tools/draw_doc_figures.py truth PREDICTED TRUTH SLIDE... --out docs/images/heatmap-and-truth.jpg

`truth` draws heatmaps of synthetic slides next to their ground truth. PREDICTED is a folder of `tapfm predict`, TRUTH
the folder `truth` of `tapfm synth`. It also prints, for each slide and layer, the AUC over tiles: how well the values
separate the tiles with the signal from the others.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import matplotlib as mpl
import matplotlib.pyplot as plt
import numpy as np
from numpy.typing import NDArray

from tapfm.metrics.ranking import auc
from tapfm.prediction.folder import PredictedSlide, PredictionFolder
from tapfm.prediction.layers import ColourScale, Layer, layer_values, list_layers
from tapfm.slides.opening import open_slide
from tapfm.slides.region_reading import make_thumbnail
from tapfm.slides.slide import Thumbnail
from tapfm.synthetic.truth import SIGNAL_THRESHOLD, SlideTruth, read_truth

THUMBNAIL_PX = 700
INK, ENCODER, AGGREGATOR, PAPER, GRADIENT = "#222222", "#dbe9f6", "#fde8cf", "#ffffff", "#b03030"


def draw_heatmaps_and_truth(folder: Path, truth_folder: Path, slide_ids: list[str], out: Path) -> None:
    """Draw a row for each slide: ground truth, contributions, attention as values and as percentiles."""
    predictions = PredictionFolder(folder)
    slides = {slide.slide_id: slide for slide in predictions.slides()}
    figure, axes = plt.subplots(len(slide_ids), 4, figsize=(12, 2.6 * len(slide_ids)), dpi=100, squeeze=False)
    for row, slide_id in zip(axes, slide_ids, strict=True):
        draw_slide(row, predictions, slides[slide_id], read_truth(truth_folder, slide_id))
    figure.tight_layout()
    figure.savefig(out, facecolor=PAPER, pil_kwargs=image_options(out))


def image_options(out: Path) -> dict[str, object]:
    """Return the options of Pillow for small JPEG and PNG files."""
    return {"quality": 82} if out.suffix == ".jpg" else {"optimize": True}


def draw_slide(row: Any, predictions: PredictionFolder, slide: PredictedSlide, truth: SlideTruth) -> None:
    """Draw one slide, and print the AUC of each layer over its tiles."""
    tiles, target = predictions.tiles(slide.slide_id), next(iter(slide.targets))
    prediction = slide.targets[target]
    file = open_slide(slide.path)
    thumbnail = make_thumbnail(file, THUMBNAIL_PX)
    file.close()
    positions = tiles.positions
    has_signal = truth.signal_coverage(target, positions, slide.side_px0) >= SIGNAL_THRESHOLD
    row[0].imshow(thumbnail.pixels)
    draw_focus_outline(row[0], truth, target, thumbnail)
    row[0].set_title(
        f"{slide.slide_id}, {target} {describe_label(slide, target)}, p {prediction.probability:.2f}", fontsize=9
    )
    layers = {layer.kind: layer for layer in list_layers(list(tiles.values), [target])}
    shown = [(layers["contribution"], False), (layers["attention"], False), (layers["attention"], True)]
    for axis, (layer, percentile) in zip(row[1:], shown, strict=True):
        values, scale = layer_values(tiles.values[layer.column], layer.kind, percentile=percentile)
        draw_heatmap(axis, thumbnail, positions, slide.side_px0, values, scale)
        draw_focus_outline(axis, truth, target, thumbnail)
        axis.set_title(heatmap_title(layer, scale, percentile=percentile), fontsize=9)
    for axis in row:
        axis.set_axis_off()
    signal = f"{has_signal.sum()} of {len(tiles)} tiles have the signal"
    print(f"{slide.slide_id}: probability {prediction.probability:.3f}, {signal}")
    for layer in layers.values():
        found = auc(has_signal, tiles.values[layer.column])
        print(f"  {layer.column}: AUC over tiles {'-' if found is None else f'{found:.3f}'}")


def describe_label(slide: PredictedSlide, target: str) -> str:
    label = slide.targets[target].label
    return "unknown" if label is None else ("positive" if label else "negative")


def heatmap_title(layer: Layer, scale: ColourScale, *, percentile: bool) -> str:
    """Return the layer and the range of its colour scale."""
    if percentile:
        return f"{layer.kind}, percentiles: 0 to 100"
    return f"{layer.kind}, values: {scale.low:.3g} to {scale.high:.3g}"


def draw_focus_outline(axis: Any, truth: SlideTruth, target: str, thumbnail: Thumbnail) -> None:
    """Draw the outline of the region in which the signal of a target was planted."""
    if target in truth.focus_names:
        mask = truth.foci_map == truth.focus_names.index(target) + 1
        height, width = thumbnail.pixels.shape[:2]
        extent = (0, width, 0, height)
        axis.contour(mask, levels=[0.5], colors="#000000", linewidths=0.8, extent=extent, origin=None)


def draw_heatmap(
    axis: Any,
    thumbnail: Thumbnail,
    positions: NDArray[np.int64],
    side_px0: int,
    values: NDArray[np.float64],
    scale: ColourScale,
) -> None:
    """Draw the tiles over the slide, in the colours of `tapfm predict`."""
    image = thumbnail.pixels.copy()
    downsamples = thumbnail.downsample
    for (x, y), colour in zip(positions, scale.colours(values), strict=True):
        left, top = (
            round((position - corner) / downsample)
            for position, corner, downsample in zip(
                (x, y), (thumbnail.box.x_px0, thumbnail.box.y_px0), downsamples, strict=True
            )
        )
        side_x, side_y = (max(1, round(side_px0 / downsample)) for downsample in downsamples)
        region = image[max(0, top) : top + side_y, max(0, left) : left + side_x]
        region[:] = (0.3 * region + 0.7 * colour).astype(np.uint8)
    axis.imshow(image)


def draw_two_graphs(out: Path) -> None:
    """Draw the training step of Algorithm 1: both graphs, and the values passed between them."""
    figure, axis = plt.subplots(figsize=(10.5, 4.6), dpi=100)
    axis.set_xlim(0, 21)
    axis.set_ylim(0, 9.2)
    axis.set_axis_off()
    draw_panel(axis, 0.2, 0.5, 8.2, 8.2, ENCODER, "graph 2: the encoder")
    draw_panel(axis, 12.6, 0.5, 8.2, 8.2, AGGREGATOR, "graph 1: the aggregator")
    draw_box(axis, 0.7, 5.2, 2.2, 1.6, "K tiles")
    draw_box(axis, 4.0, 5.2, 3.9, 1.6, "encoder\nz_i and r_i of each tile")
    draw_box(axis, 4.0, 1.4, 3.9, 1.9, "L_PFM = Σ_i <z_i, g_zi>\n+ λ Σ_i r_i g_ri")
    draw_box(axis, 13.1, 5.2, 3.9, 1.6, "minmax, softmax\nZ = Σ_i a_i z_i")
    draw_box(axis, 17.9, 5.2, 2.5, 1.6, "head\nlogits")
    draw_box(axis, 17.9, 1.4, 2.5, 1.9, "L_agg")
    for start, end in (((2.9, 6), (4.0, 6)), ((17.0, 6), (17.9, 6)), ((18.8, 5.2), (18.8, 3.3))):
        draw_arrow(axis, start, end, INK)
    draw_arrow(axis, (7.9, 6), (13.1, 6), INK)
    axis.text(10.5, 6.25, "z, r: detached\nvalues", ha="center", va="bottom", fontsize=10, color=INK)
    draw_arrow(axis, (17.9, 2.35), (7.9, 2.35), GRADIENT)
    axis.text(
        10.5,
        2.6,
        "g_z, g_r: gradients\nof L_agg at z and r,\nused as constants",
        ha="center",
        fontsize=10,
        color=GRADIENT,
    )
    draw_arrow(axis, (5.95, 3.3), (5.95, 5.2), GRADIENT)
    axis.text(5.7, 4.25, "updates the encoder", ha="right", va="center", fontsize=10, color=GRADIENT)
    draw_arrow(axis, (19.6, 3.3), (19.6, 5.2), GRADIENT)
    axis.text(18.5, 4.25, "updates the\naggregator", ha="right", va="center", fontsize=10, color=GRADIENT)
    figure.tight_layout(pad=0.3)
    figure.savefig(out, facecolor=PAPER, pil_kwargs=image_options(out))


def draw_panel(axis: Any, x: float, y: float, width: float, height: float, colour: str, title: str) -> None:
    """Draw the background of one graph."""
    axis.add_patch(mpl.patches.Rectangle((x, y), width, height, facecolor=colour, edgecolor=INK, linewidth=1))
    axis.text(x + width / 2, y + height - 0.35, title, ha="center", va="top", fontsize=12, weight="bold", color=INK)


def draw_box(axis: Any, x: float, y: float, width: float, height: float, text: str) -> None:
    """Draw a step of the computation."""
    axis.add_patch(mpl.patches.Rectangle((x, y), width, height, facecolor=PAPER, edgecolor=INK, linewidth=1))
    axis.text(x + width / 2, y + height / 2, text, ha="center", va="center", fontsize=10, color=INK)


def draw_arrow(axis: Any, start: tuple[float, float], end: tuple[float, float], colour: str) -> None:
    axis.annotate("", xy=end, xytext=start, arrowprops={"arrowstyle": "-|>", "color": colour, "linewidth": 1.6})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    figures = parser.add_subparsers(dest="figure", required=True)
    graphs = figures.add_parser("two-graphs", help="the training step of Algorithm 1")
    truth = figures.add_parser("truth", help="heatmaps of synthetic slides next to their ground truth")
    truth.add_argument("predicted", type=Path, help="output folder of tapfm predict")
    truth.add_argument("truth", type=Path, help="folder `truth` of tapfm synth")
    truth.add_argument("slides", nargs="+", help="slide ids")
    for each in (graphs, truth):
        each.add_argument("--out", type=Path, required=True, help="image file to write")
    options = parser.parse_args()
    mpl.use("Agg")
    options.out.parent.mkdir(parents=True, exist_ok=True)
    if options.figure == "two-graphs":
        draw_two_graphs(options.out)
    else:
        draw_heatmaps_and_truth(options.predicted, options.truth, options.slides, options.out)


if __name__ == "__main__":
    main()
