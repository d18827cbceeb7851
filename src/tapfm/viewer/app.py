"""The viewer's web application: the page, the slide list, images of the slides, and tile values.

    GET /                                          the page
    GET /assets/NAME                               its scripts and styles
    GET /api/collection                            all slides with their predictions, and the colour palettes
    GET /api/slides/KEY                            one slide: size, scale, layers
    GET /api/slides/KEY/tile-values                positions and values of its tiles (see tile_values.py)
    GET /api/slides/KEY/thumbnail.jpeg
    GET /api/slides/KEY/images/LEVEL/COL_ROW.jpeg  an image of the pyramid (see deep_zoom.py)
    GET /api/slides/KEY/tiles/INDEX.jpeg           a tile at full resolution

Images and tile values of a key do not change while the version of tapfm stays the same, so browsers cache them for a
year.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import asdict
from functools import lru_cache, partial
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp

from tapfm.errors import ScaleError, TapfmError, TileReadError, UnreadableSlideError
from tapfm.prediction.folder import PredictedSlide
from tapfm.prediction.tile_squares import is_same_slide
from tapfm.slides.scale import resolve_scale
from tapfm.slides.slide import SlideMetadata
from tapfm.version import __version__
from tapfm.viewer.access_control import AccessControlMiddleware, AccessPolicy
from tapfm.viewer.assets import INDEX_PAGE, Asset
from tapfm.viewer.collection import SlideCollection, ViewerSlide
from tapfm.viewer.deep_zoom import DeepZoomPyramid
from tapfm.viewer.slide_images import SlideImageReader
from tapfm.viewer.tile_values import colour_palettes, describe_layer, pack_tile_values

_CACHE_FOREVER = "private, max-age=31536000, immutable"
_REVALIDATE = "private, no-cache"  # browsers keep the response but check its ETag before each use
_CACHED_TILE_TABLES = 16
_FILE_MISSING = "The slide file was not found. If it has moved, restart tapfm view with --slides and its new folder."
_FILE_CHANGED = (
    "The slide file has a different size or different bounds than the predicted slide. Tiles are not shown. "
    "Run tapfm predict again."
)
_NO_MPP = (
    "The microns per pixel of this slide are unknown: the values in the slide file are missing, implausible or "
    "contradictory. Lengths are in pixels."
)

_log = logging.getLogger(__name__)


def create_app(
    collection: SlideCollection,
    assets: Mapping[str, Asset],
    policy: AccessPolicy | None = None,
    reader: SlideImageReader | None = None,
) -> ASGIApp:
    """Create the web application. It serves only the slides of the collection and the assets."""
    service = _SlideService(collection, reader or SlideImageReader())

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        service.reader.close()

    # FastAPI's documentation pages are disabled because they load scripts from other servers.
    app = FastAPI(lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None)

    @app.exception_handler(HTTPException)
    async def handle_http_error(_: Request, error: HTTPException) -> Response:
        return JSONResponse({"error": error.detail}, error.status_code)

    @app.exception_handler(RequestValidationError)
    async def handle_invalid_url(_: Request, __: RequestValidationError) -> Response:
        return JSONResponse({"error": "This address does not exist."}, 404)

    @app.exception_handler(TapfmError)
    async def handle_slide_error(_: Request, error: TapfmError) -> Response:
        _log.warning("%s", error.message)  # may contain paths, which must not be sent to clients
        return JSONResponse({"error": _public_message(error)}, 422)

    @app.exception_handler(Exception)
    async def handle_unexpected_error(_: Request, __: Exception) -> Response:
        return JSONResponse({"error": "Internal error. The terminal of tapfm view shows the details."}, 500)

    @app.get("/")
    async def get_index_page(request: Request) -> Response:
        return _asset_response(request, assets[INDEX_PAGE])

    @app.get("/assets/{name}")
    async def get_asset(request: Request, name: str) -> Response:
        if name not in assets:
            raise HTTPException(404, "The pages of tapfm view have no file of this name.")
        return _asset_response(request, assets[name])

    @app.get("/api/collection")
    async def get_collection() -> Response:
        return JSONResponse(service.describe_collection(), headers={"Cache-Control": _REVALIDATE})

    @app.get("/api/slides/{key}")
    async def get_slide(key: str) -> Response:
        slide = service.find_slide(key)
        return JSONResponse(await service.reader.run_in_thread(partial(service.describe_slide, slide)))

    @app.get("/api/slides/{key}/tile-values")
    async def get_tile_values(request: Request, key: str) -> Response:
        create = partial(service.read_tile_values, service.find_slide(key))
        return await _cached_response(request, service, (key, "tile-values"), create, "application/octet-stream")

    @app.get("/api/slides/{key}/thumbnail.jpeg")
    async def get_thumbnail(request: Request, key: str) -> Response:
        create = partial(service.read_thumbnail, service.find_slide(key))
        return await _cached_response(request, service, (key, "thumbnail"), create)

    @app.get("/api/slides/{key}/images/{level}/{column}_{row}.jpeg")
    async def get_image(request: Request, key: str, level: int, column: int, row: int) -> Response:
        create = partial(service.read_image, service.find_slide(key), level, column, row)
        return await _cached_response(request, service, (key, level, column, row), create)

    @app.get("/api/slides/{key}/tiles/{index}.jpeg")
    async def get_tile(request: Request, key: str, index: int) -> Response:
        create = partial(service.read_tile, service.find_slide(key), index)
        return await _cached_response(request, service, (key, "tile", index), create)

    return AccessControlMiddleware(app, policy or AccessPolicy())


async def _cached_response(
    request: Request,
    service: _SlideService,
    cache_key: tuple[str | int, ...],
    create: Callable[[], bytes],
    media_type: str = "image/jpeg",
) -> Response:
    """Respond with cached data, which `create` computes if it is missing, or with 304 if the browser has it already."""
    etag = f'"{"-".join(map(str, cache_key))}-{__version__}"'
    headers = {"ETag": etag, "Cache-Control": _CACHE_FOREVER}
    if _browser_has(request, etag):
        return Response(status_code=304, headers=headers)
    return Response(await service.reader.get_or_create(cache_key, create), media_type=media_type, headers=headers)


def _asset_response(request: Request, asset: Asset) -> Response:
    headers = {"ETag": asset.etag, "Cache-Control": _REVALIDATE}
    if _browser_has(request, asset.etag):
        return Response(status_code=304, headers=headers)
    return Response(asset.data, media_type=asset.media_type, headers=headers)


def _browser_has(request: Request, etag: str) -> bool:
    """Return whether the browser's cache contains the version with this ETag."""
    known = request.headers.get("if-none-match", "")
    return etag in (each.strip().removeprefix("W/") for each in known.split(","))


class _SlideService:
    """Reads and describes the slides of a collection. Raises HTTPException 404 if a requested item does not exist."""

    def __init__(self, collection: SlideCollection, reader: SlideImageReader) -> None:
        self.collection, self.reader = collection, reader
        self._by_key = {slide.key: slide for slide in collection.slides}
        self.read_tile_table = lru_cache(_CACHED_TILE_TABLES)(lambda key: self._by_key[key].read_tiles())

    def find_slide(self, key: str) -> ViewerSlide:
        if key not in self._by_key:
            raise HTTPException(404, "This slide does not exist. Reload the page if tapfm view was restarted.")
        return self._by_key[key]

    def describe_collection(self) -> dict[str, Any]:
        return {
            "version": __version__,
            "targets": self.collection.targets,
            "palettes": colour_palettes(),
            "slides": [_slide_summary(slide) for slide in self.collection.slides],
        }

    def describe_slide(self, slide: ViewerSlide) -> dict[str, Any]:
        """Return the slide's size, scale and prediction, the layers of its heatmap, and notes for the user."""
        metadata = None if slide.path is None else self.reader.read_metadata(slide.path)
        prediction = slide.prediction
        notes = [_FILE_MISSING] if metadata is None else []
        layers: list[dict[str, Any]] = []
        if prediction is not None and metadata is not None and not is_same_slide(metadata, prediction):
            notes.append(_FILE_CHANGED)
        elif prediction is not None and (table := self.read_tile_table(slide.key)) is not None and len(table):
            layers = [describe_layer(layer, table) for layer in prediction.layers]
        pyramid = _make_pyramid(metadata, prediction)
        mpp = _resolve_mpp(slide, metadata)
        if mpp is None:
            notes.append(_NO_MPP)
        return {
            **_slide_summary(slide),
            "width_px0": metadata.width_px0 if metadata else (prediction.width_px0 if prediction else 0),
            "height_px0": metadata.height_px0 if metadata else (prediction.height_px0 if prediction else 0),
            "bounds": asdict(pyramid.bounds),
            "last_level": pyramid.last_level,
            "image_px": pyramid.image_px,
            "mpp": mpp,
            "mpp_source": prediction.mpp_source if prediction else None,
            "format": metadata.format if metadata else None,
            "side_px0": prediction.side_px0 if prediction else None,
            "tile_px": prediction.tile_px if prediction else None,
            "layers": layers,
            "notes": notes,
        }

    def read_tile_values(self, slide: ViewerSlide) -> bytes:
        table = self.read_tile_table(slide.key)
        if table is None or slide.prediction is None:
            raise HTTPException(404, "This slide has no prediction.")
        return pack_tile_values(table, slide.prediction.layers)

    def read_thumbnail(self, slide: ViewerSlide) -> bytes:
        if slide.path is None:
            raise HTTPException(404, _FILE_MISSING)
        return self.reader.read_thumbnail(slide.path)

    def read_image(self, slide: ViewerSlide, level: int, column: int, row: int) -> bytes:
        if slide.path is None:
            raise HTTPException(404, _FILE_MISSING)
        image = DeepZoomPyramid(self.reader.read_metadata(slide.path).bounds).find_image(level, column, row)
        if image is None:
            raise HTTPException(404, "The slide has no image at this level and position.")
        return self.reader.read_image(slide.path, image)

    def read_tile(self, slide: ViewerSlide, index: int) -> bytes:
        table = self.read_tile_table(slide.key)
        if table is None or slide.prediction is None or not 0 <= index < len(table):
            raise HTTPException(404, "This tile does not exist.")
        if slide.path is None or not is_same_slide(self.reader.read_metadata(slide.path), slide.prediction):
            raise HTTPException(404, _FILE_MISSING if slide.path is None else _FILE_CHANGED)
        x_px0, y_px0 = (int(position) for position in table.positions[index])
        return self.reader.read_tile(slide.path, x_px0, y_px0, slide.prediction.side_px0)


def _public_message(error: TapfmError) -> str:
    """Return a description of an error that contains no paths."""
    if isinstance(error, UnreadableSlideError):
        return (
            "The slide file cannot be opened: it is missing, damaged or in an unsupported format. The terminal of "
            "tapfm view shows the details."
        )
    if isinstance(error, TileReadError):
        return "This region of the slide cannot be decoded. The terminal of tapfm view shows the details."
    return "The slide cannot be shown. The terminal of tapfm view shows the reason."


def _slide_summary(slide: ViewerSlide) -> dict[str, Any]:
    """Return the entry of the slide list, without the slide's path."""
    prediction = slide.prediction
    return {
        "key": slide.key,
        "slide_id": slide.slide_id,
        "has_file": slide.path is not None,
        "patient_id": prediction.patient_id if prediction else None,
        "cohort": prediction.cohort if prediction else None,
        "split": prediction.split if prediction else None,
        "tiles": prediction.tiles if prediction else None,
        "tiles_failed": prediction.tiles_failed if prediction else None,
        "warning": prediction.warning if prediction else "",
        "targets": _describe_targets(prediction) if prediction else {},
    }


def _describe_targets(prediction: PredictedSlide) -> dict[str, dict[str, Any]]:
    """Return the prediction of each target, with the names of the called class and of the label."""
    described = {}
    for target, result in prediction.targets.items():
        kind = prediction.kinds[target]
        names = {
            name: "" if value is None else kind.describe_label(value)
            for name, value in (("call_name", result.call), ("label_name", result.label))
        }
        described[target] = asdict(result) | names
    return described


def _make_pyramid(metadata: SlideMetadata | None, prediction: PredictedSlide | None) -> DeepZoomPyramid:
    """Return the pyramid over the bounds of the file, or over the bounds in the prediction if the file is missing."""
    if metadata is not None:
        return DeepZoomPyramid(metadata.bounds)
    assert prediction is not None, "a slide without a prediction always has a file"
    return DeepZoomPyramid(prediction.bounds)


def _resolve_mpp(slide: ViewerSlide, metadata: SlideMetadata | None) -> float | None:
    """Return the microns per pixel, or None if they are unknown."""
    if slide.mpp is not None or metadata is None:
        return slide.mpp
    try:
        return resolve_scale(metadata).mpp
    except ScaleError:
        return None
