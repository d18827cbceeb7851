"""Heatmaps and most influential tiles of the slides in a prediction folder.

If a slide is missing or cannot be read, only its own images are omitted. Label and macro images, which may contain
patient names, are never read.
"""

from __future__ import annotations

import base64
import heapq
import io
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
from PIL import Image

from tapfm.cohort.slide_search import SlideFinder
from tapfm.errors import InputError
from tapfm.prediction.folder import PredictedSlide, PredictionFolder, TargetPrediction
from tapfm.prediction.gallery import read_tile_image
from tapfm.prediction.heatmap import overlay_tiles
from tapfm.prediction.heatmap_text import colour_bar_labels, format_layer_heading, format_value
from tapfm.prediction.layers import UNITS, ColourScale, Layer, layer_values, palette
from tapfm.prediction.slide_files import find_slide_file
from tapfm.prediction.tile_squares import check_same_slide, is_same_slide
from tapfm.prediction.tile_table import TileTable
from tapfm.report.content import (
    Block,
    ColourBar,
    EmbeddedImage,
    HeatmapGallery,
    SlideHeatmap,
    TileGallery,
    TileImage,
)
from tapfm.results.document import Paragraph
from tapfm.results.formatting import format_bytes, format_number
from tapfm.runtime.messages import format_count
from tapfm.runtime.progress import SlideProgress
from tapfm.slides.opening import open_slide
from tapfm.slides.slide import Slide
from tapfm.tasks.target import TargetKind
from tapfm.tiles.reading import format_error

_MAX_SLIDE_PX = 480  # longest side of a slide's image
_MAX_TILE_PX = 224
_WEBP_QUALITY = 80
_COLOUR_BAR_STEPS = 32
_MAX_TILES_PER_SLIDE = 3  # in a gallery; more if there are too few slides to fill it


@dataclass
class ImageBudget:
    """Limit for the total size of the images on a page. Images beyond the limit are counted."""

    max_bytes: int
    used_bytes: int = 0
    omitted: int = 0

    def embed(self, image: Image.Image, alt_text: str) -> EmbeddedImage | None:
        """Return an image for the page, or None if it would exceed the limit."""
        buffer = io.BytesIO()
        image.convert("RGB").save(buffer, "WEBP", quality=_WEBP_QUALITY)
        data_uri = "data:image/webp;base64," + base64.b64encode(buffer.getvalue()).decode()
        if self.used_bytes + len(data_uri) > self.max_bytes:
            self.omitted += 1
            return None
        self.used_bytes += len(data_uri)
        return EmbeddedImage(data_uri, image.width, image.height, alt_text)


@dataclass(frozen=True)
class ImageSelection:
    """How many heatmaps and tiles the report shows, and where to search for moved slides."""

    max_heatmaps: int = 12  # per prediction folder
    max_tiles: int = 12  # per gallery
    slides_folder: Path | None = None


@dataclass(frozen=True)
class _ChosenSlide:
    """A slide and a target whose heatmap is shown."""

    predicted: PredictedSlide
    target: str
    outcome: str
    is_wrong: bool = False


@dataclass(frozen=True, order=True)
class _Outcome:
    """Outcome of a call. `_choose_slides` takes one slide per outcome and target in turn, in the order of `priority`.

    The order is: wrong, correct, without label, without call.
    """

    priority: int
    text: str

    @classmethod
    def from_prediction(cls, predicted: PredictedSlide, target: str) -> _Outcome:
        prediction, kind = predicted.targets[target], predicted.kinds[target]
        if prediction.call is None:
            return cls(3, "")
        outcome, call = kind.describe_outcome(prediction.call, prediction.label), kind.describe_label(prediction.call)
        if not outcome:
            return cls(2, f"called {call}")
        return cls(1, f"correct, {call}") if outcome == "correct" else cls(0, outcome)


def _choose_slides(slides: Sequence[PredictedSlide], targets: Sequence[str], count: int) -> list[_ChosenSlide]:
    """Choose slides from each outcome of each target in turn, those furthest from the threshold first."""
    queues: dict[tuple[_Outcome, str], list[tuple[float, PredictedSlide]]] = {}
    for slide in slides:
        for target in targets:
            if (prediction := slide.targets.get(target)) is None:
                continue
            outcome = _Outcome.from_prediction(slide, target)
            threshold = 0.5 if prediction.threshold is None else prediction.threshold
            distance = abs(prediction.probability - threshold)
            queues.setdefault((outcome, target), []).append((distance, slide))
    for queue in queues.values():
        queue.sort(key=lambda item: (-item[0], item[1].slide_id))
    in_order = sorted(queues.items(), key=lambda item: (item[0][0], targets.index(item[0][1])))
    chosen: list[_ChosenSlide] = []
    for index in range(max(map(len, queues.values()), default=0)):
        for (outcome, target), queue in in_order:
            if index < len(queue) and len(chosen) < count:
                chosen.append(_ChosenSlide(queue[index][1], target, outcome.text, outcome.priority == 0))
    return sorted(chosen, key=lambda each: targets.index(each.target))  # stable: keeps the order within a target


def _read_targets(folder: PredictionFolder) -> list[str]:
    return [str(target) for target in folder.read_metadata().get("targets", [])]


def _main_layer(predicted: PredictedSlide, target: str) -> Layer | None:
    """Return the most informative layer of a target, or None if the slide has no layers."""
    layers = [layer for layer in predicted.layers if layer.target in (target, None)]
    return layers[0] if layers else None


def build_heatmap_blocks(
    folder: PredictionFolder,
    slides: Sequence[PredictedSlide],
    selection: ImageSelection,
    finder: SlideFinder | None,
    budget: ImageBudget,
    progress: SlideProgress,
) -> list[Block]:
    """Return the heatmaps of some slides of a prediction folder."""
    chosen = _choose_slides(slides, _read_targets(folder), selection.max_heatmaps)
    heatmaps: list[SlideHeatmap] = []
    colour_bars: dict[ColourBar, None] = {}  # an ordered set
    omitted = 0
    for each in chosen:
        layer = _main_layer(each.predicted, each.target)
        if layer is None:
            continue
        drawn = _draw_heatmap(folder, each, layer, finder, budget)
        if drawn is None:
            omitted += 1
        else:
            heatmap, scale = drawn
            heatmaps.append(heatmap)
            if scale is not None:
                colour_bars[_build_colour_bar(layer, scale)] = None
        progress.finish_slide(each.predicted.slide_id)
    blocks: list[Block] = [HeatmapGallery(heatmaps, list(colour_bars))] if heatmaps else []
    others = len({slide.slide_id for slide in slides}) - len({each.predicted.slide_id for each in chosen})
    if others:
        verb = "is" if others == 1 else "are"
        blocks.append(Paragraph(f"{format_count(others, 'other slide')} of this folder {verb} not shown."))
    if omitted:
        limit = format_bytes(budget.max_bytes)
        blocks.append(Paragraph(f"{format_count(omitted, 'heatmap')} omitted: images are limited to {limit} in total."))
    return blocks


def _draw_heatmap(
    folder: PredictionFolder, chosen: _ChosenSlide, layer: Layer, finder: SlideFinder | None, budget: ImageBudget
) -> tuple[SlideHeatmap, ColourScale | None] | None:
    """Return a slide without and with its heatmap, and its colour scale; None if the images exceed the limit."""
    predicted, prediction = chosen.predicted, chosen.predicted.targets[chosen.target]
    heatmap = SlideHeatmap(
        predicted.slide_id,
        chosen.target,
        chosen.outcome,
        [_describe_prediction(prediction, predicted.kinds[chosen.target]), _describe_mpp(predicted)],
        images=[],
        is_wrong=chosen.is_wrong,
        warning=predicted.warning,
    )
    try:
        table = folder.tiles(predicted.slide_id)
        _, scale = layer_values(table.values[layer.column], layer.kind)
        heatmap = replace(heatmap, details=[*heatmap.details, _describe_scale(scale, len(table))])
        with closing(open_slide(_find_file(finder, predicted))) as slide:
            drawn = _draw_slide(slide, predicted, table, layer)
    except Exception as error:  # libraries may raise any exception for damaged files
        return replace(heatmap, missing_reason=f"No image: {format_error(error)}"), None
    images: list[EmbeddedImage] = []
    for image, content in zip(drawn, ("without heatmap", layer.title), strict=True):
        embedded = budget.embed(image, f"Slide {predicted.slide_id}, {content}")
        if embedded is None:
            return None
        images.append(embedded)
    return replace(heatmap, images=images), scale


def _describe_prediction(prediction: TargetPrediction, kind: TargetKind) -> str:
    text = f"probability {format_number(prediction.probability)}"
    text += "" if prediction.threshold is None else f", threshold {format_number(prediction.threshold)}"
    text += "" if prediction.label is None else f", label {kind.describe_label(prediction.label)}"
    return text


def _describe_mpp(predicted: PredictedSlide) -> str:
    source = "" if predicted.mpp_source is None else f" (from {predicted.mpp_source})"
    return f"{predicted.mpp:.4g} µm per pixel{source}"


def _describe_scale(scale: ColourScale, tiles: int) -> str:
    low, high = (format_value(limit, signed=scale.diverging) for limit in (scale.low, scale.high))
    return f"{format_count(tiles, 'tile')}, colour scale from {low} to {high}"


def _find_file(finder: SlideFinder | None, predicted: PredictedSlide) -> Path:
    """Return the path of a slide's file. Raises InputError if it is missing."""
    path = find_slide_file(predicted, finder)
    if path is None:
        raise InputError(
            f"The slide file {predicted.path.name} is missing. If it was moved, pass its folder with --slides."
        )
    return path


def _draw_slide(slide: Slide, predicted: PredictedSlide, table: TileTable, layer: Layer) -> list[Image.Image]:
    """Return the image of a slide without and with its heatmap."""
    check_same_slide(slide.metadata, predicted)
    thumbnail = slide.thumbnail(_MAX_SLIDE_PX)
    return [Image.fromarray(pixels) for pixels in (thumbnail.pixels, overlay_tiles(thumbnail, predicted, table, layer))]


def _build_colour_bar(layer: Layer, scale: ColourScale) -> ColourBar:
    """Return the colour bar of a layer, without numbers because each slide has its own scale."""
    colours = palette(diverging=scale.diverging)
    steps = [colours[round(step * 255 / (_COLOUR_BAR_STEPS - 1))] for step in range(_COLOUR_BAR_STEPS)]
    low, high = colour_bar_labels(layer, percentile=False)
    heading = format_layer_heading(Layer(layer.column, layer.kind), percentile=False)
    if layer.kind == "contribution":
        description = f"{heading}: a higher logit means a higher probability."
    else:
        description = f"{heading} ({scale.unit}){', 0 in the middle' if scale.diverging else ''}."
    description += " Each slide has its own colour scale; its range is below the images."
    return ColourBar(tuple("#{:02x}{:02x}{:02x}".format(*step) for step in steps), low, high, description)


@dataclass(frozen=True, order=True)
class _RankedTile:
    """A candidate for a gallery. Tiles with a larger `influence` are shown first."""

    influence: float  # the value; for contributions and scores in slides called negative, minus the value
    slide_id: str
    index: int  # row in the tile table
    value: float = field(compare=False)


def build_tile_blocks(
    folder: PredictionFolder,
    slides: Sequence[PredictedSlide],
    selection: ImageSelection,
    finder: SlideFinder | None,
    budget: ImageBudget,
) -> list[Block]:
    """Return the most influential tiles per target: a gallery for slides called positive, and one for the others."""
    targets = _read_targets(folder)
    readable: dict[str, PredictedSlide] = {}
    candidates: dict[tuple[str, int], list[_RankedTile]] = {}  # by target and call
    limits = {target: _tiles_per_slide(slides, target, selection.max_tiles) for target in targets}
    for slide in slides:
        try:
            path, table = _find_file(finder, slide), folder.tiles(slide.slide_id)
        except InputError:
            continue  # counted below
        readable[slide.slide_id] = replace(slide, path=path)
        for target in targets:
            _add_candidates(candidates, slide, table, target, selection.max_tiles, limits[target])
    blocks: list[Block] = []
    if missing := len(slides) - len(readable):
        reason = "slide file or tile table missing or unreadable"
        blocks.append(Paragraph(f"{format_count(missing, 'slide')} not included: {reason}."))
    for target in targets:
        for call in (1, 0):
            tiles = heapq.nlargest(selection.max_tiles, candidates.get((target, call), []))
            if tiles:
                blocks.append(_build_tile_gallery(folder, target, call, tiles, readable, budget, limits[target][call]))
    return blocks


def _tiles_per_slide(slides: Sequence[PredictedSlide], target: str, count: int) -> tuple[int, int]:
    """Return how many tiles of one slide a gallery may contain, for negative and positive calls.

    The limit is higher if there are too few slides to fill the gallery otherwise.
    """
    calls = [_call_or_default(slide.targets[target]) for slide in slides if target in slide.targets]
    negative, positive = (max(_MAX_TILES_PER_SLIDE, -(-count // max(1, calls.count(call)))) for call in (0, 1))
    return negative, positive


def _add_candidates(
    candidates: dict[tuple[str, int], list[_RankedTile]],
    slide: PredictedSlide,
    table: TileTable,
    target: str,
    count: int,
    limits: tuple[int, int],
) -> None:
    """Add the most influential tiles of a slide, and keep only the best `count` candidates."""
    prediction, layer = slide.targets.get(target), _main_layer(slide, target)
    if prediction is None or layer is None or layer.column not in table.values:
        return
    call = _call_or_default(prediction)
    sign = -1.0 if call == 0 and _is_signed(layer) else 1.0
    values = table.values[layer.column]
    most_influential = np.argsort(-sign * values, kind="stable")[: limits[call]]
    kept = candidates.setdefault((target, call), [])
    kept += [_RankedTile(sign * float(values[i]), slide.slide_id, int(i), float(values[i])) for i in most_influential]
    kept[:] = heapq.nlargest(count, kept)


def _call_or_default(prediction: TargetPrediction) -> int:
    """Return the call, or the call at a threshold of 0.5 if there is none."""
    return int(bool(prediction.call)) if prediction.call is not None else int(prediction.probability >= 0.5)


def _is_signed(layer: Layer) -> bool:
    """Return whether low values lower the probability: true for contributions and scores, not for weights."""
    return layer.kind in ("contribution", "score")


def _build_tile_gallery(
    folder: PredictionFolder,
    target: str,
    call: int,
    ranked: Sequence[_RankedTile],
    slides: dict[str, PredictedSlide],
    budget: ImageBudget,
    tiles_per_slide: int,
) -> TileGallery:
    """Return the gallery of a target for slides with the same call."""
    first_slide = slides[ranked[0].slide_id]
    layer = _main_layer(first_slide, target)
    assert layer is not None
    tiles, omitted_before, unreadable = [], budget.omitted, 0
    images = dict(_read_tiles(folder, ranked, slides))
    for each in ranked:
        if (image := images.get((each.slide_id, each.index))) is None:
            unreadable += 1
            continue
        embedded = budget.embed(image, f"Tile of slide {each.slide_id}")
        if embedded is not None:
            value = format_value(each.value, signed=_is_signed(layer))
            tiles.append(TileImage(embedded, each.slide_id, value))
    extreme = "highest" if call or not _is_signed(layer) else "lowest"
    layer_name = Layer(layer.column, layer.kind).title
    title = f"{target}: {extreme} {layer_name} in slides called {first_slide.kinds[target].describe_label(call)}"
    unit = "" if layer.kind == "contribution" else f" ({UNITS[layer.kind]})"
    note = f"Below each tile: {layer_name}{unit}, and slide. At most {format_count(tiles_per_slide, 'tile')} per slide."
    if omitted := budget.omitted - omitted_before:
        note += f" {format_count(omitted, 'tile')} omitted: the limit for images is reached."
    if unreadable:
        note += f" {format_count(unreadable, 'tile')} omitted: the slide is damaged or was replaced."
    return TileGallery(title, tiles, note)


def _read_tiles(
    folder: PredictionFolder, ranked: Sequence[_RankedTile], slides: dict[str, PredictedSlide]
) -> Iterator[tuple[tuple[str, int], Image.Image]]:
    """Yield tile images by slide and index. Slides that are damaged or were replaced are skipped."""
    indices_by_slide: dict[str, list[int]] = {}
    for each in ranked:
        indices_by_slide.setdefault(each.slide_id, []).append(each.index)
    for slide_id, indices in indices_by_slide.items():
        predicted, table = slides[slide_id], folder.tiles(slide_id)
        try:
            slide = open_slide(predicted.path)
        except Exception:  # libraries may raise any exception for damaged files
            continue
        with closing(slide):
            for index in indices if is_same_slide(slide.metadata, predicted) else ():
                x, y = (int(value) for value in table.positions[index])
                image = read_tile_image(slide, predicted, x, y)
                image.thumbnail((_MAX_TILE_PX, _MAX_TILE_PX), Image.Resampling.LANCZOS)
                yield (slide_id, index), image
