"""Heatmaps of slides and the most influential tiles, drawn from the slides that `tapfm predict` predicted.

A slide that is gone, or cannot be read, costs its own pictures only. Nothing but pixels of the pyramid is read: labels
and macro images carry names.
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

from tapfm.cohort.cohort_table import SlideFinder
from tapfm.errors import InputError
from tapfm.prediction.folder import PredictedSlide, PredictionFolder, TargetPrediction
from tapfm.prediction.gallery import read_tile_image
from tapfm.prediction.heatmap import overlay_tiles
from tapfm.prediction.heatmap_text import colour_bar_labels, format_value, layer_heading
from tapfm.prediction.layers import UNITS, ColourScale, Layer, layer_values, palette
from tapfm.prediction.slide_files import find_slide_file
from tapfm.prediction.tile_squares import check_same_slide, is_same_slide
from tapfm.prediction.tile_table import TileTable
from tapfm.report.content import (
    Block,
    ColourBar,
    HeatmapGallery,
    Picture,
    SlideHeatmaps,
    TileGallery,
    TilePicture,
)
from tapfm.results.document import Paragraph
from tapfm.results.formatting import format_bytes, format_number
from tapfm.runtime.messages import format_count
from tapfm.runtime.progress import SlideProgress
from tapfm.slides.opening import open_slide
from tapfm.slides.slide import Slide
from tapfm.tiles.reading import format_error

_LONGEST_PX = 480
_TILE_PX = 224  # at most
_QUALITY = 80
_COLOURS = 32  # of a colour bar
_TILES_OF_A_SLIDE = 3  # in a gallery: one slide must not fill it


@dataclass
class PictureBudget:
    """How many bytes of pictures a page may have; what does not fit is counted."""

    most: int
    used: int = 0
    left_out: int = 0

    def embed(self, picture: Image.Image, said: str) -> Picture | None:
        """Make a picture of the page; None where there is no room left."""
        buffer = io.BytesIO()
        picture.convert("RGB").save(buffer, "WEBP", quality=_QUALITY)
        data = "data:image/webp;base64," + base64.b64encode(buffer.getvalue()).decode()
        if self.used + len(data) > self.most:
            self.left_out += 1
            return None
        self.used += len(data)
        return Picture(data, picture.width, picture.height, said)


@dataclass(frozen=True)
class PictureSettings:
    """How many pictures, and where to look for slides that moved."""

    heatmaps: int = 12
    tiles: int = 12
    slides: Path | None = None


@dataclass(frozen=True)
class _ChosenSlide:
    """A slide whose map is shown, and why it was chosen."""

    predicted: PredictedSlide
    target: str
    outcome: str
    wrong: bool = False


@dataclass(frozen=True, order=True)
class _Outcome:
    """How right a call is, in the order in which heatmaps are shown: wrong calls first, slides without a call last."""

    priority: int
    text: str

    @classmethod
    def of(cls, predicted: PredictedSlide, target: str) -> _Outcome:
        said, kind = predicted.targets[target], predicted.kinds[target]
        if said.call is None:
            return cls(3, "")
        outcome, call = kind.describe_outcome(said.call, said.label), kind.describe_label(said.call)
        if not outcome:
            return cls(2, f"called {call}")
        return cls(1, f"correct, {call}") if outcome == "correct" else cls(0, outcome)


def _choose_slides(slides: Sequence[PredictedSlide], targets: Sequence[str], count: int) -> list[_ChosenSlide]:
    """Take the most certain of each outcome of each target in turn: wrong calls first, since they teach most."""
    queues: dict[tuple[_Outcome, str], list[tuple[float, PredictedSlide]]] = {}
    for slide in slides:
        for target in targets:
            if (said := slide.targets.get(target)) is None:
                continue
            outcome = _Outcome.of(slide, target)
            certainty = abs(said.probability - (0.5 if said.threshold is None else said.threshold))
            queues.setdefault((outcome, target), []).append((certainty, slide))
    for queue in queues.values():
        queue.sort(key=lambda each: (-each[0], each[1].slide_id))
    chosen: list[_ChosenSlide] = []
    for place in range(max(map(len, queues.values()), default=0)):
        for (outcome, target), queue in sorted(
            queues.items(), key=lambda each: (each[0][0], targets.index(each[0][1]))
        ):
            if place < len(queue) and len(chosen) < count:
                chosen.append(_ChosenSlide(queue[place][1], target, outcome.text, outcome.priority == 0))
    return sorted(chosen, key=lambda each: targets.index(each.target))  # as they came, target by target


def _targets_of(folder: PredictionFolder) -> list[str]:
    """Name the targets of a folder, in their order."""
    return [str(each) for each in folder.read_metadata().get("targets", [])]


def _layer_of(predicted: PredictedSlide, target: str) -> Layer | None:
    """Take the layer that says most of a target."""
    of_target = [layer for layer in predicted.layers if layer.target in (target, None)]
    return of_target[0] if of_target else None


def heatmap_blocks(
    folder: PredictionFolder,
    slides: Sequence[PredictedSlide],
    settings: PictureSettings,
    finder: SlideFinder | None,
    budget: PictureBudget,
    progress: SlideProgress,
) -> list[Block]:
    """Draw the maps of some slides of a folder."""
    chosen = _choose_slides(slides, _targets_of(folder), settings.heatmaps)
    heats: list[SlideHeatmaps] = []
    bars: dict[ColourBar, None] = {}  # each once, in their order
    left_out = 0
    for each in chosen:
        layer = _layer_of(each.predicted, each.target)
        if layer is None:
            continue
        drawn = _heat_of(folder, each, layer, finder, budget)
        if drawn is None:
            left_out += 1
        else:
            heat, scale = drawn
            heats.append(heat)
            if scale is not None:
                bars[_bar_of(layer, scale)] = None
        progress.finish_slide(each.predicted.slide_id)
    blocks: list[Block] = [HeatmapGallery(heats, list(bars))] if heats else []
    others = len({slide.slide_id for slide in slides}) - len({each.predicted.slide_id for each in chosen})
    notes = []
    if others:
        notes.append(f"{format_count(others, 'slide')} of this folder {'is' if others == 1 else 'are'} not shown")
    if left_out:
        notes.append(
            f"{format_count(left_out, 'map')} left out: the pictures of this page have {format_bytes(budget.most)} at most"
        )
    return [*blocks, *(Paragraph(f"{note}.") for note in notes)]


def _heat_of(
    folder: PredictionFolder, chosen: _ChosenSlide, layer: Layer, finder: SlideFinder | None, budget: PictureBudget
) -> tuple[SlideHeatmaps, ColourScale | None] | None:
    """Draw one slide as it is and with its map, in the colours of a scale; None where there is no room for it."""
    predicted, said = chosen.predicted, chosen.predicted.targets[chosen.target]
    words = f"probability {format_number(said.probability)}"
    words += "" if said.threshold is None else f", threshold {format_number(said.threshold)}"
    words += "" if said.label is None else f", label {predicted.kinds[chosen.target].describe_label(said.label)}"
    facts = [words]
    pictures: list[Picture] = []
    try:
        table = folder.tiles(predicted.slide_id)
        _, scale = layer_values(table.values[layer.column], layer.kind)
        low, high = (format_value(end, signed=scale.diverging) for end in (scale.low, scale.high))
        facts.append(f"colours from {low} to {high}, {format_count(len(table), 'tile')}")
        with closing(open_slide(_there(finder, predicted))) as slide:
            drawn = _pictures_of(slide, predicted, table, layer)
    except Exception as error:  # also what libraries raise over damage
        why = f"No picture: {format_error(error)}"
        return SlideHeatmaps(
            predicted.slide_id, chosen.target, chosen.outcome, facts, pictures, why, chosen.wrong
        ), None
    for picture, what in zip(drawn, ("as it is", layer.title), strict=True):
        embedded = budget.embed(picture, f"Slide {predicted.slide_id}, {what}")
        if embedded is None:
            return None
        pictures.append(embedded)
    return SlideHeatmaps(predicted.slide_id, chosen.target, chosen.outcome, facts, pictures, wrong=chosen.wrong), scale


def _there(finder: SlideFinder | None, predicted: PredictedSlide) -> Path:
    """Find the file of a slide, or say that it is gone."""
    path = find_slide_file(predicted, finder)
    if path is None:
        raise InputError(f"{predicted.path.name} is gone; --slides says where to look for slides that moved.")
    return path


def _pictures_of(slide: Slide, predicted: PredictedSlide, table: TileTable, layer: Layer) -> list[Image.Image]:
    """Draw the slide as it is, and with its map."""
    check_same_slide(slide.metadata, predicted)
    thumbnail = slide.thumbnail(_LONGEST_PX)
    return [Image.fromarray(pixels) for pixels in (thumbnail.pixels, overlay_tiles(thumbnail, predicted, table, layer))]


def _bar_of(layer: Layer, scale: ColourScale) -> ColourBar:
    """Say what the colours of a layer mean; every slide has ends of its own."""
    colours = palette(diverging=scale.diverging)
    steps = [colours[round(place * 255 / (_COLOURS - 1))] for place in range(_COLOURS)]
    low, high = colour_bar_labels(layer, percentile=False)
    kind = Layer(layer.column, layer.kind)
    # of contributions the words at the ends tell that
    middle = ", 0 in the middle" if scale.diverging and layer.kind != "contribution" else ""
    name = layer_heading(kind, percentile=False) + middle
    said = f"{name} ({scale.unit}); every slide has ends of its own, under its picture."
    return ColourBar(tuple("#{:02x}{:02x}{:02x}".format(*step) for step in steps), low, high, said)


@dataclass(frozen=True, order=True)
class _GalleryTile:
    """A tile for a gallery; larger keys are shown first."""

    key: float
    slide_id: str
    place: int
    value: float = field(compare=False)


def gallery_blocks(
    folder: PredictionFolder,
    slides: Sequence[PredictedSlide],
    settings: PictureSettings,
    finder: SlideFinder | None,
    budget: PictureBudget,
) -> list[Block]:
    """Show the tiles that spoke loudest for each target in slides called positive, and against it in the others."""
    targets = _targets_of(folder)
    usable: dict[str, PredictedSlide] = {}
    best: dict[tuple[str, int], list[_GalleryTile]] = {}
    most = {target: _most_of_a_slide(slides, target, settings.tiles) for target in targets}
    for slide in slides:
        try:
            path, table = _there(finder, slide), folder.tiles(slide.slide_id)
        except InputError:
            continue  # counted below
        usable[slide.slide_id] = replace(slide, path=path)
        for target in targets:
            _add_candidates(best, slide, table, target, settings.tiles, most[target])
    blocks: list[Block] = []
    if gone := len(slides) - len(usable):
        blocks.append(Paragraph(f"Without {format_count(gone, 'slide')} whose file or table of tiles is gone."))
    for target in targets:
        for side in (1, 0):
            found = heapq.nlargest(settings.tiles, best.get((target, side), []))
            if found:
                blocks.append(_gallery_of(folder, target, side, found, usable, budget, most[target][side]))
    return blocks


def _most_of_a_slide(slides: Sequence[PredictedSlide], target: str, count: int) -> tuple[int, int]:
    """Say how many tiles of one slide a gallery takes, of negative and positive calls: more where slides are few."""
    sides = [_side_of(slide.targets[target]) for slide in slides if target in slide.targets]
    negative, positive = (max(_TILES_OF_A_SLIDE, -(-count // max(1, sides.count(side)))) for side in (0, 1))
    return negative, positive


def _add_candidates(
    best: dict[tuple[str, int], list[_GalleryTile]],
    slide: PredictedSlide,
    table: TileTable,
    target: str,
    count: int,
    most: tuple[int, int],
) -> None:
    """Offer the loudest tiles of one slide."""
    said, layer = slide.targets.get(target), _layer_of(slide, target)
    if said is None or layer is None or layer.column not in table.values:
        return
    side = _side_of(said)
    sign = -1.0 if side == 0 and _signed_layer(layer) else 1.0
    values = table.values[layer.column]
    loudest = np.argsort(-sign * values, kind="stable")[: most[side]]
    kept = best.setdefault((target, side), [])
    kept += [_GalleryTile(sign * float(values[i]), slide.slide_id, int(i), float(values[i])) for i in loudest]
    kept[:] = heapq.nlargest(count, kept)


def _side_of(said: TargetPrediction) -> int:
    """Say on which side a slide counts: as it is called, or without a threshold by its probability."""
    return int(bool(said.call)) if said.call is not None else int(said.probability >= 0.5)


def _signed_layer(layer: Layer) -> bool:
    """Say whether a low value speaks against a target; low attention speaks for nothing."""
    return layer.kind in ("contribution", "score")


def _gallery_of(
    folder: PredictionFolder,
    target: str,
    side: int,
    found: Sequence[_GalleryTile],
    slides: dict[str, PredictedSlide],
    budget: PictureBudget,
    most_of_one: int,
) -> TileGallery:
    """Read and embed the tiles of one side."""
    layer = _layer_of(slides[found[0].slide_id], target)
    assert layer is not None
    tiles, left_out, torn = [], budget.left_out, 0
    pictures = dict(_read_tiles(folder, found, slides))
    for each in found:
        if (picture := pictures.get((each.slide_id, each.place))) is None:
            torn += 1
            continue
        embedded = budget.embed(picture, f"Tile of slide {each.slide_id}")
        if embedded is not None:
            value = format_value(each.value, signed=_signed_layer(layer))
            tiles.append(TilePicture(embedded, each.slide_id, value))
    most = "highest" if side or not _signed_layer(layer) else "lowest"
    kind = Layer(layer.column, layer.kind).title
    title = f"{target}: {most} in slides called {slides[found[0].slide_id].kinds[target].describe_label(side)}"
    note = f"By {kind} ({UNITS[layer.kind]}); of a slide at most {most_of_one} tiles."
    if budget.left_out > left_out:
        note += f" {format_count(budget.left_out - left_out, 'tile')} left out: no room."
    if torn:
        note += f" {format_count(torn, 'tile')} left out: a slide is damaged, or another one than was predicted."
    return TileGallery(title, tiles, note)


def _read_tiles(
    folder: PredictionFolder, found: Sequence[_GalleryTile], slides: dict[str, PredictedSlide]
) -> Iterator[tuple[tuple[str, int], Image.Image]]:
    """Read tiles slide by slide, each opened once; those of a slide that is none, or another one now, are left out."""
    by_slide: dict[str, list[int]] = {}
    for each in found:
        by_slide.setdefault(each.slide_id, []).append(each.place)
    for slide_id, places in by_slide.items():
        predicted, table = slides[slide_id], folder.tiles(slide_id)
        try:
            slide = open_slide(predicted.path)
        except Exception:  # also what libraries raise over damage
            continue
        with closing(slide):
            for place in places if is_same_slide(slide.metadata, predicted) else ():
                x, y = (int(value) for value in table.positions[place])
                picture = read_tile_image(slide, predicted, x, y)
                picture.thumbnail((_TILE_PX, _TILE_PX), Image.Resampling.LANCZOS)
                yield (slide_id, place), picture
