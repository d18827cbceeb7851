"""Read tissue annotations (GeoJSON polygons or a mask image), and write masks as GeoJSON for QuPath.

GeoJSON coordinates are level-0 pixels. QuPath counts from the corner of the scanned bounds, other tools from the corner
of the slide. The two differ for formats such as MRXS. Objects from QuPath are recognised by their `objectType`.
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
from tapfm.slides.readers.image import open_image
from tapfm.slides.slide import Box, Colour, SlideMetadata, Thumbnail
from tapfm.slides.tissue import Mask

Ring = NDArray[np.float64]  # (points, 2), level-0 pixels
GEOJSON_SUFFIXES = (".geojson", ".json")
MASK_SUFFIXES = (".png", ".tif", ".tiff")
_SUBPIXEL_BITS = 4
_CLIP_COORDINATES_PX = 1e6  # thumbnail pixels, outside any thumbnail; cv2 uses 32-bit coordinates
_ASPECT_TOLERANCE = 0.02


def read_tissue_annotation(path: Path, metadata: SlideMetadata, thumbnail: Thumbnail) -> Mask:
    """Read a GeoJSON file or mask image as a tissue mask with the shape of the thumbnail."""
    if path.suffix.lower() in GEOJSON_SUFFIXES:
        return _rasterise(_read_polygons(path, metadata.bounds), thumbnail)
    return _read_mask(path, metadata, thumbnail)


def _read_polygons(path: Path, bounds: Box) -> list[list[Ring]]:
    """Return the polygons of a GeoJSON file, each as an outer ring followed by its holes."""
    try:
        document = json.loads(path.read_text(encoding="utf-8-sig"))
        polygons = list(_iterate_polygons(document, bounds))
    except (OSError, ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
        raise SlideError(
            f"The polygons in {path} cannot be read ({type(error).__name__}: {error}).",
            hint="Export the annotations from QuPath again, as a FeatureCollection in level-0 pixels.",
        ) from error
    if not polygons:
        raise SlideError(
            f"{path} contains no polygon.",
            hint="Annotate the tissue with polygons, rectangles or the brush. Classes that end with * are ignored.",
        )
    return polygons


def _iterate_polygons(node: Any, bounds: Box) -> Iterator[list[Ring]]:
    """Yield the polygons of a GeoJSON node and of the nodes in it."""
    if isinstance(node, list):
        for each in node:
            yield from _iterate_polygons(each, bounds)
        return
    kind = node["type"]
    if kind == "FeatureCollection":
        yield from _iterate_polygons(node["features"], bounds)
    elif kind == "GeometryCollection":
        yield from _iterate_polygons(node["geometries"], bounds)
    elif kind == "Feature":
        properties = node.get("properties") or {}
        classification = properties.get("classification")
        # QuPath ignores classes that end with *
        ignored = isinstance(classification, dict) and str(classification.get("name")).endswith("*")
        if node["geometry"] is None or ignored:
            return
        corner = (bounds.x_px0, bounds.y_px0) if "objectType" in properties else (0, 0)
        for rings in _iterate_polygons(node["geometry"], bounds):
            yield [ring + np.array(corner, float) for ring in rings]
    elif kind in ("Polygon", "MultiPolygon"):
        for rings in [node["coordinates"]] if kind == "Polygon" else node["coordinates"]:
            yield [_parse_ring(ring) for ring in rings]


def _parse_ring(points: Any) -> Ring:
    """Return the points of a ring; raise ValueError if there are fewer than three, or if one is not finite."""
    ring = np.array([point[:2] for point in points], float)
    if len(ring) < 3 or not np.isfinite(ring).all():
        raise ValueError("a ring has fewer than three points, or a coordinate that is not a finite number")
    return ring


def _rasterise(polygons: list[list[Ring]], thumbnail: Thumbnail) -> Mask:
    """Rasterise polygons to a mask with the shape of a thumbnail."""
    canvas = np.zeros(thumbnail.pixels.shape[:2], np.uint8)
    corner = np.array([thumbnail.box.x_px0, thumbnail.box.y_px0])
    for rings in polygons:
        # coordinates of cv2 start at the centre of the first pixel
        in_px = [(ring - corner) / thumbnail.downsample - 0.5 for ring in rings]
        points = [
            np.rint(np.clip(ring, -_CLIP_COORDINATES_PX, _CLIP_COORDINATES_PX) * 2**_SUBPIXEL_BITS).astype(np.int32)
            for ring in in_px
        ]
        one = np.zeros_like(canvas)
        cv2.fillPoly(one, points, 1, shift=_SUBPIXEL_BITS)  # even-odd rule: holes stay empty
        canvas |= one
    return canvas.astype(bool)


def _read_mask(path: Path, metadata: SlideMetadata, thumbnail: Thumbnail) -> Mask:
    """Read a mask image of the whole slide; pixels that are not black are tissue."""
    with open_image(path) as image:
        rgba = np.asarray(image.convert("RGBA"))
    grey = np.where(rgba[..., 3] > 0, rgba[..., :3].max(axis=2), 0)  # transparent pixels are background
    height_px, width_px = grey.shape
    aspect = (width_px / height_px) / (metadata.width_px0 / metadata.height_px0)
    if abs(aspect - 1) > _ASPECT_TOLERANCE:
        raise SlideError(
            f"The mask {path} has {width_px} x {height_px} pixels; its aspect ratio differs from that of the slide, "
            f"{metadata.width_px0:,} x {metadata.height_px0:,}.",
            hint="Use a mask image that covers the whole slide (level 0), at any resolution.",
        )
    # look up the mask at the centre of each thumbnail pixel
    box, (step_x, step_y) = thumbnail.box, thumbnail.downsample
    rows, columns = thumbnail.pixels.shape[:2]
    x = ((box.x_px0 + (np.arange(columns) + 0.5) * step_x) * width_px / metadata.width_px0).astype(int)
    y = ((box.y_px0 + (np.arange(rows) + 0.5) * step_y) * height_px / metadata.height_px0).astype(int)
    return np.asarray(grey[np.ix_(np.clip(y, 0, height_px - 1), np.clip(x, 0, width_px - 1))] > 0)


def trace_outlines(mask: Mask) -> list[list[NDArray[np.int32]]]:
    """Return the outlines of a mask's components, each as an outer ring followed by its holes, in mask pixels."""
    rings, hierarchy = cv2.findContours(mask.astype(np.uint8), cv2.RETR_CCOMP, cv2.CHAIN_APPROX_SIMPLE)
    pieces: dict[int, list[NDArray[np.int32]]] = {}
    for index, ring in enumerate(rings):
        parent = int(hierarchy[0][index][3])
        piece = pieces.setdefault(index if parent < 0 else parent, [])
        piece.insert(0 if parent < 0 else len(piece), ring[:, 0])
    return list(pieces.values())


def encode_tissue_geojson(mask: Mask, thumbnail: Thumbnail, metadata: SlideMetadata, slide_id: str) -> bytes:
    """Encode the outlines of a tissue mask as GeoJSON for QuPath."""
    corner = (metadata.bounds.x_px0, metadata.bounds.y_px0)
    features = build_qupath_features(mask, thumbnail, corner, slide_id, "Tissue", (0, 160, 80))
    for number, feature in enumerate(features):
        feature["properties"]["tissue_id"] = number
    return json.dumps({"type": "FeatureCollection", "features": features}).encode()


def build_qupath_features(
    mask: Mask, thumbnail: Thumbnail, origin_px0: tuple[int, int], slide_id: str, name: str, colour: Colour
) -> list[dict[str, Any]]:
    """Return a QuPath annotation for each component of a mask, except single pixels and lines.

    Coordinates are relative to `origin_px0`.
    """
    corner = np.array([thumbnail.box.x_px0, thumbnail.box.y_px0])
    features = []
    # an outline of one or two points has no area and is not a valid polygon
    pieces = [[ring for ring in rings if len(ring) >= 3] for rings in trace_outlines(mask) if len(rings[0]) >= 3]
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
