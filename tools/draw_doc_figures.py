"""Draw the pictures of the docs that no command of tapfm writes.

    python tools/draw_doc_figures.py two-graphs --out docs/images/two-graphs.png
    python tools/draw_doc_figures.py truth PREDICTED TRUTH SLIDE... --out docs/images/heatmap-and-truth.jpg

`truth` puts maps of painted slides beside what was planted in them: PREDICTED is what `tapfm predict` wrote, TRUTH the
folder `truth` of `tapfm synth`. It also prints, for each slide, how well each number of a tile tells the tiles that
carry the signal from the others (AUC over tiles): on painted slides a map can be checked.
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


def draw_truth(folder: Path, truth_folder: Path, slide_ids: list[str], out: Path) -> None:
    """Draw a row for each slide: what was planted, contributions, attention as values and as percentiles."""
    predictions = PredictionFolder(folder)
    slides = {slide.slide_id: slide for slide in predictions.slides()}
    figure, axes = plt.subplots(len(slide_ids), 4, figsize=(12, 2.6 * len(slide_ids)), dpi=100, squeeze=False)
    for row, slide_id in zip(axes, slide_ids, strict=True):
        draw_slide(row, predictions, slides[slide_id], read_truth(truth_folder, slide_id))
    figure.tight_layout()
    figure.savefig(out, facecolor=PAPER, pil_kwargs=saving(out))


def saving(out: Path) -> dict[str, object]:
    """Say how a picture is made small: tissue as JPEG, lines as PNG."""
    return {"quality": 82} if out.suffix == ".jpg" else {"optimize": True}


def draw_slide(row: Any, predictions: PredictionFolder, slide: PredictedSlide, truth: SlideTruth) -> None:
    """Draw one slide, and print what its numbers say of the truth."""
    tiles, target = predictions.tiles(slide.slide_id), next(iter(slide.targets))
    said = slide.targets[target]
    file = open_slide(slide.path)
    thumbnail = make_thumbnail(file, THUMBNAIL_PX)
    file.close()
    positions = tiles.positions
    carries = truth.signal(target, positions, slide.side_px0) >= SIGNAL_THRESHOLD
    row[0].imshow(thumbnail.pixels)
    outline(row[0], truth, target, thumbnail)
    row[0].set_title(f"{slide.slide_id}, {target} {label_of(slide, target)}, p {said.probability:.2f}", fontsize=9)
    layers = {layer.kind: layer for layer in list_layers(list(tiles.values), [target])}
    ways = [(layers["contribution"], False), (layers["attention"], False), (layers["attention"], True)]
    for axis, (layer, percentile) in zip(row[1:], ways, strict=True):
        values, scale = layer_values(tiles.values[layer.column], layer.kind, percentile=percentile)
        draw_map(axis, thumbnail, positions, slide.side_px0, values, scale)
        outline(axis, truth, target, thumbnail)
        axis.set_title(title_of(layer, scale, percentile=percentile), fontsize=9)
    for axis in row:
        axis.set_axis_off()
    print(
        f"{slide.slide_id}: probability {said.probability:.3f}, {carries.sum()} of {len(tiles)} tiles carry the signal"
    )
    for layer in layers.values():
        found = auc(carries, tiles.values[layer.column])
        print(f"  {layer.column}: AUC over tiles {'-' if found is None else f'{found:.3f}'}")


def label_of(slide: PredictedSlide, target: str) -> str:
    """Say what the table says of the slide."""
    label = slide.targets[target].label
    return "not known" if label is None else ("positive" if label else "negative")


def title_of(layer: Layer, scale: ColourScale, *, percentile: bool) -> str:
    """Name what is shown, and from which number to which."""
    if percentile:
        return f"{layer.kind}, percentiles: 0 to 100"
    return f"{layer.kind}, values: {scale.low:.3g} to {scale.high:.3g}"


def outline(axis: Any, truth: SlideTruth, target: str, thumbnail: Thumbnail) -> None:
    """Draw where the target was planted."""
    if target in truth.foci:
        mask = truth.focus == truth.foci.index(target) + 1
        height, width = thumbnail.pixels.shape[:2]
        extent = (0, width, 0, height)
        axis.contour(mask, levels=[0.5], colors="#000000", linewidths=0.8, extent=extent, origin=None)


def draw_map(
    axis: Any,
    thumbnail: Thumbnail,
    positions: NDArray[np.int64],
    side_px0: int,
    values: NDArray[np.float64],
    scale: ColourScale,
) -> None:
    """Paint the tiles over the slide, in the colours that tapfm predict gives them."""
    picture = thumbnail.pixels.copy()
    across = thumbnail.downsample
    for (x, y), colour in zip(positions, scale.colours(values), strict=True):
        left, top = (
            round((place - corner) / step)
            for place, corner, step in zip((x, y), (thumbnail.box.x_px0, thumbnail.box.y_px0), across, strict=True)
        )
        side_x, side_y = (max(1, round(side_px0 / step)) for step in across)
        part = picture[max(0, top) : top + side_y, max(0, left) : left + side_x]
        part[:] = (0.3 * part + 0.7 * colour).astype(np.uint8)
    axis.imshow(picture)


def draw_two_graphs(out: Path) -> None:
    """Draw the step of Algorithm 1: two graphs, and what is handed from one to the other."""
    figure, axis = plt.subplots(figsize=(10.5, 4.6), dpi=100)
    axis.set_xlim(0, 21)
    axis.set_ylim(0, 9.2)
    axis.set_axis_off()
    panel(axis, 0.2, 0.5, 8.2, 8.2, ENCODER, "graph 2: the encoder")
    panel(axis, 12.6, 0.5, 8.2, 8.2, AGGREGATOR, "graph 1: the aggregator")
    box(axis, 0.7, 5.2, 2.2, 1.6, "K tiles")
    box(axis, 4.0, 5.2, 3.9, 1.6, "encoder\nz_i and r_i of each tile")
    box(axis, 4.0, 1.4, 3.9, 1.9, "L_PFM = Σ_i <z_i, g_zi>\n+ λ Σ_i r_i g_ri")
    box(axis, 13.1, 5.2, 3.9, 1.6, "minmax, softmax\nZ = Σ_i a_i z_i")
    box(axis, 17.9, 5.2, 2.5, 1.6, "head\nlogits")
    box(axis, 17.9, 1.4, 2.5, 1.9, "L_agg")
    for start, end in (((2.9, 6), (4.0, 6)), ((17.0, 6), (17.9, 6)), ((18.8, 5.2), (18.8, 3.3))):
        arrow(axis, start, end, INK)
    arrow(axis, (7.9, 6), (13.1, 6), INK)
    axis.text(10.5, 6.25, "z, r: numbers,\nno graph", ha="center", va="bottom", fontsize=10, color=INK)
    arrow(axis, (17.9, 2.35), (7.9, 2.35), GRADIENT)
    axis.text(
        10.5, 2.6, "g_z, g_r:\nL_agg's gradients\nat z and r, constants", ha="center", fontsize=10, color=GRADIENT
    )
    arrow(axis, (5.95, 3.3), (5.95, 5.2), GRADIENT)
    axis.text(5.7, 4.25, "updates the encoder", ha="right", va="center", fontsize=10, color=GRADIENT)
    arrow(axis, (19.6, 3.3), (19.6, 5.2), GRADIENT)
    axis.text(18.5, 4.25, "updates the\naggregator", ha="right", va="center", fontsize=10, color=GRADIENT)
    figure.tight_layout(pad=0.3)
    figure.savefig(out, facecolor=PAPER, pil_kwargs=saving(out))


def panel(axis: Any, x: float, y: float, width: float, height: float, colour: str, title: str) -> None:
    """Draw the ground of one graph."""
    axis.add_patch(mpl.patches.Rectangle((x, y), width, height, facecolor=colour, edgecolor=INK, linewidth=1))
    axis.text(x + width / 2, y + height - 0.35, title, ha="center", va="top", fontsize=12, weight="bold", color=INK)


def box(axis: Any, x: float, y: float, width: float, height: float, words: str) -> None:
    """Draw a step of the computation."""
    axis.add_patch(mpl.patches.Rectangle((x, y), width, height, facecolor=PAPER, edgecolor=INK, linewidth=1))
    axis.text(x + width / 2, y + height / 2, words, ha="center", va="center", fontsize=10, color=INK)


def arrow(axis: Any, start: tuple[float, float], end: tuple[float, float], colour: str) -> None:
    """Draw what flows from one to the other."""
    axis.annotate("", xy=end, xytext=start, arrowprops={"arrowstyle": "-|>", "color": colour, "linewidth": 1.6})


def main() -> None:
    """Draw what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ways = parser.add_subparsers(dest="what", required=True)
    graphs = ways.add_parser("two-graphs", help="the step of Algorithm 1")
    truth = ways.add_parser("truth", help="maps of painted slides beside what was planted")
    truth.add_argument("predicted", type=Path)
    truth.add_argument("truth", type=Path)
    truth.add_argument("slides", nargs="+")
    for way in (graphs, truth):
        way.add_argument("--out", type=Path, required=True)
    chosen = parser.parse_args()
    mpl.use("Agg")
    chosen.out.parent.mkdir(parents=True, exist_ok=True)
    if chosen.what == "two-graphs":
        draw_two_graphs(chosen.out)
    else:
        draw_truth(chosen.predicted, chosen.truth, chosen.slides, chosen.out)


if __name__ == "__main__":
    main()
