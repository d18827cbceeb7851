"""Tissue that a person drew or corrected: GeoJSON polygons or a mask picture, and our own outlines for them to edit.

GeoJSON is in level-0 pixels. QuPath counts from the corner of the scanned bounds, others from the slide's corner; the
two differ on MRXS-like slides, and QuPath's objects are known by their `objectType`.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cv2
import numpy as np
from numpy.typing import NDArray

from tapfm.errors import SlideError
from tapfm.slides.readers.image import open_picture
from tapfm.slides.slide import Box, Colour, SlideFacts, Thumbnail
from tapfm.slides.tissue import Mask

Ring = NDArray[np.float64]  # (points, 2), level-0 pixels
GEOJSON_SUFFIXES = (".geojson", ".json")
MASK_SUFFIXES = (".png", ".tif", ".tiff")
_SUBPIXEL_BITS = 4
_FAR_PX = 1e6  # farther than any picture; cv2 counts in 32 bits
_ASPECT_TOLERANCE = 0.02


def drawn_tissue(path: Path, facts: SlideFacts, thumbnail: Thumbnail) -> Mask:
    """Read tissue that a person gave, on the grid of the thumbnail."""
    if path.suffix.lower() in GEOJSON_SUFFIXES:
        return _rasterise(_read_polygons(path, facts.bounds), thumbnail)
    return _read_mask(path, facts, thumbnail)


def _read_polygons(path: Path, bounds: Box) -> list[list[Ring]]:
    """Read the polygons of a GeoJSON file, each as its outer ring and its holes."""
    try:
        document = json.loads(path.read_text(encoding="utf-8-sig"))
        polygons = list(_polygons_of(document, bounds))
    except (OSError, ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
        raise SlideError(
            f"{path} is not GeoJSON with polygons ({type(error).__name__}: {error}).",
            hint="Export the annotations from QuPath as a FeatureCollection, in level-0 pixels.",
        ) from error
    if not polygons:
        raise SlideError(
            f"{path} has no polygon in it.", hint="Draw the tissue as polygons, rectangles or brush areas."
        )
    return polygons


def _polygons_of(node: Any, bounds: Box) -> Iterator[list[Ring]]:
    """Walk a GeoJSON document: collections, features, geometries."""
    if isinstance(node, list):
        for each in node:
            yield from _polygons_of(each, bounds)
        return
    kind = node["type"]
    if kind == "FeatureCollection":
        yield from _polygons_of(node["features"], bounds)
    elif kind == "GeometryCollection":
        yield from _polygons_of(node["geometries"], bounds)
    elif kind == "Feature":
        properties = node.get("properties") or {}
        kind_of_tissue = properties.get("classification")
        ignored = isinstance(kind_of_tissue, dict) and str(kind_of_tissue.get("name")).endswith("*")  # QuPath's mark
        if node["geometry"] is None or ignored:
            return
        corner = (bounds.x_px0, bounds.y_px0) if "objectType" in properties else (0, 0)
        for rings in _polygons_of(node["geometry"], bounds):
            yield [ring + np.array(corner, float) for ring in rings]
    elif kind in ("Polygon", "MultiPolygon"):
        for rings in [node["coordinates"]] if kind == "Polygon" else node["coordinates"]:
            yield [_ring_of(ring) for ring in rings]


def _ring_of(points: Any) -> Ring:
    """Check a ring: three points or more, all of them somewhere."""
    ring = np.array([point[:2] for point in points], float)
    if len(ring) < 3 or not np.isfinite(ring).all():
        raise ValueError("a ring without three points")
    return ring


def _rasterise(polygons: list[list[Ring]], thumbnail: Thumbnail) -> Mask:
    """Paint polygons onto the grid of a thumbnail."""
    canvas = np.zeros(thumbnail.pixels.shape[:2], np.uint8)
    corner = np.array([thumbnail.box.x_px0, thumbnail.box.y_px0])
    for rings in polygons:
        # cv2 counts from the centre of a pixel
        in_px = [(ring - corner) / thumbnail.downsample - 0.5 for ring in rings]
        points = [np.rint(np.clip(ring, -_FAR_PX, _FAR_PX) * 2**_SUBPIXEL_BITS).astype(np.int32) for ring in in_px]
        one = np.zeros_like(canvas)
        cv2.fillPoly(one, points, 1, shift=_SUBPIXEL_BITS)  # even-odd: holes stay empty
        canvas |= one
    return canvas.astype(bool)


def _read_mask(path: Path, facts: SlideFacts, thumbnail: Thumbnail) -> Mask:
    """Read a picture of the whole slide in which tissue is not black."""
    with open_picture(path) as image:
        # what is transparent is not painted
        painted = np.asarray(image.convert("RGBA"))
    grey = np.where(painted[..., 3] > 0, painted[..., :3].max(axis=2), 0)
    height_px, width_px = grey.shape
    aspect = (width_px / height_px) / (facts.width_px0 / facts.height_px0)
    if abs(aspect - 1) > _ASPECT_TOLERANCE:
        raise SlideError(
            f"{path} has {width_px} x {height_px} pixels, another shape than the slide's "
            f"{facts.width_px0:,} x {facts.height_px0:,}.",
            hint="A mask shows the whole slide (level 0), at any size.",
        )
    # each pixel of the thumbnail looks up the mask at its centre
    box, (step_x, step_y) = thumbnail.box, thumbnail.downsample
    rows, columns = thumbnail.pixels.shape[:2]
    x = ((box.x_px0 + (np.arange(columns) + 0.5) * step_x) * width_px / facts.width_px0).astype(int)
    y = ((box.y_px0 + (np.arange(rows) + 0.5) * step_y) * height_px / facts.height_px0).astype(int)
    return np.asarray(grey[np.ix_(np.clip(y, 0, height_px - 1), np.clip(x, 0, width_px - 1))] > 0)


def outlines(mask: Mask) -> list[list[NDArray[np.int32]]]:
    """Trace the pieces of a mask, each as its outer ring and its holes, in pixels."""
    rings, hierarchy = cv2.findContours(mask.astype(np.uint8), cv2.RETR_CCOMP, cv2.CHAIN_APPROX_SIMPLE)
    pieces: dict[int, list[NDArray[np.int32]]] = {}
    for index, ring in enumerate(rings):
        parent = int(hierarchy[0][index][3])
        piece = pieces.setdefault(index if parent < 0 else parent, [])
        piece.insert(0 if parent < 0 else len(piece), ring[:, 0])
    return list(pieces.values())


def geojson_of(mask: Mask, thumbnail: Thumbnail, facts: SlideFacts, slide_id: str) -> bytes:
    """Write the outlines of a mask as QuPath opens them, to look at and to correct."""
    corner = (facts.bounds.x_px0, facts.bounds.y_px0)
    features = features_of(mask, thumbnail, corner, slide_id, "Tissue", (0, 160, 80))
    for number, feature in enumerate(features):
        feature["properties"]["tissue_id"] = number
    return json.dumps({"type": "FeatureCollection", "features": features}).encode()


def features_of(
    mask: Mask, thumbnail: Thumbnail, origin_px0: tuple[int, int], slide_id: str, name: str, colour: Colour
) -> list[dict[str, Any]]:
    """Make an annotation of QuPath's of each piece of a mask; QuPath counts from `origin_px0`."""
    corner = np.array([thumbnail.box.x_px0, thumbnail.box.y_px0])
    features = []
    # one or two pixels in a row have an outline, but no area: no polygon
    pieces = [[ring for ring in rings if len(ring) >= 3] for rings in outlines(mask) if len(rings[0]) >= 3]
    for number, rings in enumerate(pieces):
        coordinates = []
        for ring in rings:
            points = (ring + 0.5) * thumbnail.downsample + corner - np.array(origin_px0)
            coordinates.append([[round(float(x), 1), round(float(y), 1)] for x, y in [*points, points[0]]])
        features.append(
            {
                "type": "Feature",
                "id": str(uuid.uuid5(uuid.NAMESPACE_OID, f"{slide_id}/{name}/{number}")),
                "geometry": {"type": "Polygon", "coordinates": coordinates},
                "properties": {
                    "objectType": "annotation",
                    "classification": {"name": name, "color": list(colour)},
                },
            }
        )
    return features
