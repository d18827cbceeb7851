"""The viewer's server: a page, the list of slides, their pictures and the numbers of their tiles.

    GET /                                       the page
    GET /assets/NAME                            its script and style
    GET /api/collection                         all slides and what was predicted, the colours
    GET /api/slides/KEY                         a slide: size, scale, layers
    GET /api/slides/KEY/numbers                 its tiles (see tile_numbers.py)
    GET /api/slides/KEY/thumbnail.jpeg
    GET /api/slides/KEY/pictures/LEVEL/X_Y.jpeg a part of it (see deep_zoom.py)
    GET /api/slides/KEY/tiles/NUMBER.jpeg       a tile at the slide's own resolution

Answers that belong to a key do not change under it, so browsers may keep them.
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
from tapfm.viewer.assets import PAGE, Asset
from tapfm.viewer.collection import Collection, ViewedSlide
from tapfm.viewer.deep_zoom import DeepZoom
from tapfm.viewer.gate import Admission, Gate
from tapfm.viewer.pictures import SlideReaders
from tapfm.viewer.tile_numbers import describe, pack, palettes

_KEEP = "private, max-age=31536000, immutable"
_ASK_AGAIN = "private, no-cache"  # kept, but only used after asking whether it is still right
_TABLES_KEPT = 16  # of tiles, in memory
_NOT_THERE = "The slide's file is not where it was when it was predicted: tapfm view --slides says where it is now."
_NOT_THE_SAME = (
    "The slide's file has another size, or other bounds, than the one that was predicted: no tiles are shown."
)

_log = logging.getLogger(__name__)


def make_server(
    collection: Collection,
    assets: Mapping[str, Asset],
    admission: Admission | None = None,
    reading: SlideReaders | None = None,
) -> ASGIApp:
    """Make the application that serves these slides, and nothing else."""
    desk = _SlideService(collection, reading or SlideReaders())

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        desk.reading.close()

    # its own pages about the interface would be fetched from elsewhere
    app = FastAPI(lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None)

    @app.exception_handler(HTTPException)
    async def refused(_: Request, error: HTTPException) -> Response:
        return JSONResponse({"error": error.detail}, error.status_code)

    @app.exception_handler(RequestValidationError)
    async def misspelled(_: Request, __: RequestValidationError) -> Response:
        return JSONResponse({"error": "There is nothing at this address."}, 404)

    @app.exception_handler(TapfmError)
    async def failed(_: Request, error: TapfmError) -> Response:
        _log.warning("%s", error.message)  # it may name paths: for the terminal, not for the page
        return JSONResponse({"error": _reason_of(error)}, 422)

    @app.exception_handler(Exception)
    async def broken(_: Request, __: Exception) -> Response:
        return JSONResponse({"error": "Something went wrong: see the terminal."}, 500)

    @app.get("/")
    async def page(request: Request) -> Response:
        return _asset_answer(request, assets[PAGE])

    @app.get("/assets/{name}")
    async def asset(request: Request, name: str) -> Response:
        if name not in assets:
            raise HTTPException(404, "There is no such file.")
        return _asset_answer(request, assets[name])

    @app.get("/api/collection")
    async def whole_collection() -> Response:
        return JSONResponse(desk.overview(), headers={"Cache-Control": _ASK_AGAIN})

    @app.get("/api/slides/{key}")
    async def slide(key: str) -> Response:
        found = desk.slide(key)
        return JSONResponse(await desk.reading.in_thread(partial(desk.details, found)))

    @app.get("/api/slides/{key}/numbers")
    async def numbers(request: Request, key: str) -> Response:
        found = desk.slide(key)
        make = partial(desk.numbers, found)
        return await _kept(request, desk, (key, "numbers"), make, "application/octet-stream")

    @app.get("/api/slides/{key}/thumbnail.jpeg")
    async def thumbnail(request: Request, key: str) -> Response:
        make = partial(desk.thumbnail, desk.slide(key))
        return await _kept(request, desk, (key, "thumbnail"), make)

    @app.get("/api/slides/{key}/pictures/{level}/{column}_{row}.jpeg")
    async def picture(request: Request, key: str, level: int, column: int, row: int) -> Response:
        make = partial(desk.picture, desk.slide(key), level, column, row)
        return await _kept(request, desk, (key, level, column, row), make)

    @app.get("/api/slides/{key}/tiles/{number}.jpeg")
    async def tile(request: Request, key: str, number: int) -> Response:
        make = partial(desk.tile, desk.slide(key), number)
        return await _kept(request, desk, (key, "tile", number), make)

    return Gate(app, admission or Admission())


async def _kept(
    request: Request,
    desk: _SlideService,
    what: tuple[str | int, ...],
    make: Callable[[], bytes],
    media_type: str = "image/jpeg",
) -> Response:
    """Answer with what belongs to a key; a browser that has it already is told so before anything is read."""
    etag = f'"{"-".join(map(str, what))}-{__version__}"'
    headers = {"ETag": etag, "Cache-Control": _KEEP}
    if _has_already(request, etag):
        return Response(status_code=304, headers=headers)
    return Response(await desk.reading.picture(what, make), media_type=media_type, headers=headers)


def _asset_answer(request: Request, asset: Asset) -> Response:
    """Answer with a file of the page."""
    headers = {"ETag": asset.etag, "Cache-Control": _ASK_AGAIN}
    if _has_already(request, asset.etag):
        return Response(status_code=304, headers=headers)
    return Response(asset.data, media_type=asset.media_type, headers=headers)


def _has_already(request: Request, etag: str) -> bool:
    """Say whether the browser has this very answer."""
    asked = request.headers.get("if-none-match", "")
    return etag in (each.strip().removeprefix("W/") for each in asked.split(","))


class _SlideService:
    """What can be asked about the slides of a collection."""

    def __init__(self, collection: Collection, reading: SlideReaders) -> None:
        self.collection, self.reading = collection, reading
        self._by_key = {slide.key: slide for slide in collection.slides}
        self.table_of = lru_cache(_TABLES_KEPT)(lambda key: self._by_key[key].tiles())

    def slide(self, key: str) -> ViewedSlide:
        """Find a slide of the collection."""
        if key not in self._by_key:
            raise HTTPException(404, "There is no such slide.")
        return self._by_key[key]

    def overview(self) -> dict[str, Any]:
        """Say what the list shows."""
        return {
            "version": __version__,
            "targets": self.collection.targets,
            "palettes": palettes(),
            "slides": [_line_of(slide) for slide in self.collection.slides],
        }

    def details(self, slide: ViewedSlide) -> dict[str, Any]:
        """Say what a slide is and what can be drawn on it."""
        metadata = None if slide.path is None else self.reading.metadata(slide.path)
        prediction = slide.prediction
        notes = [_NOT_THERE] if metadata is None else []
        layers: list[dict[str, Any]] = []
        if prediction is not None and metadata is not None and not is_same_slide(metadata, prediction):
            notes.append(_NOT_THE_SAME)
        elif prediction is not None and (table := self.table_of(slide.key)) is not None and len(table):
            layers = [describe(layer, table) for layer in prediction.layers]
        bounds = _bounds_of(metadata, prediction)
        mpp = _mpp_of(slide, metadata)
        if mpp is None:
            notes.append("The file does not say its microns per pixel: lengths are in pixels.")
        return {
            **_line_of(slide),
            "width_px0": metadata.width_px0 if metadata else (prediction.width_px0 if prediction else 0),
            "height_px0": metadata.height_px0 if metadata else (prediction.height_px0 if prediction else 0),
            "bounds": asdict(bounds.bounds),
            "last_level": bounds.last_level,
            "picture_px": bounds.picture_px,
            "mpp": mpp,
            "format": metadata.format if metadata else None,
            "side_px0": prediction.side_px0 if prediction else None,
            "tile_px": prediction.tile_px if prediction else None,
            "layers": layers,
            "notes": notes,
        }

    def numbers(self, slide: ViewedSlide) -> bytes:
        """Give the numbers of all tiles."""
        table = self.table_of(slide.key)
        if table is None or slide.prediction is None:
            raise HTTPException(404, "Nothing was predicted for this slide.")
        return pack(table, slide.prediction.layers)

    def thumbnail(self, slide: ViewedSlide) -> bytes:
        """Make the picture for the list."""
        if slide.path is None:
            raise HTTPException(404, _NOT_THERE)
        return self.reading.thumbnail(slide.path)

    def picture(self, slide: ViewedSlide, level: int, column: int, row: int) -> bytes:
        """Make a part of the pyramid."""
        if slide.path is None:
            raise HTTPException(404, _NOT_THERE)
        picture = DeepZoom(self.reading.metadata(slide.path).bounds).picture(level, column, row)
        if picture is None:
            raise HTTPException(404, "There is no such part of the slide.")
        return self.reading.part(slide.path, picture)

    def tile(self, slide: ViewedSlide, number: int) -> bytes:
        """Read one of the tiles that were predicted."""
        table = self.table_of(slide.key)
        if table is None or slide.prediction is None or not 0 <= number < len(table):
            raise HTTPException(404, "There is no such tile.")
        if slide.path is None or not is_same_slide(self.reading.metadata(slide.path), slide.prediction):
            raise HTTPException(404, _NOT_THERE if slide.path is None else _NOT_THE_SAME)
        x_px0, y_px0 = (int(each) for each in table.positions[number])
        return self.reading.tile(slide.path, x_px0, y_px0, slide.prediction.side_px0)


def _reason_of(error: TapfmError) -> str:
    """Say what is wrong without saying where on this machine."""
    if isinstance(error, UnreadableSlideError):
        return "This slide's file is damaged, or of no format that tapfm reads."
    if isinstance(error, TileReadError):
        return "This part of the slide cannot be decoded: the file is damaged."
    return "This slide cannot be shown: see the terminal."


def _line_of(slide: ViewedSlide) -> dict[str, Any]:
    """Say what the list shows of a slide; its path stays here."""
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
        "targets": {target: asdict(said) for target, said in prediction.targets.items()} if prediction else {},
    }


def _bounds_of(metadata: SlideMetadata | None, prediction: PredictedSlide | None) -> DeepZoom:
    """Find the bounds that are shown: the file's; without it those that were noted when it was predicted."""
    if metadata is not None:
        return DeepZoom(metadata.bounds)
    assert prediction is not None, "a slide without prediction is in the list only where its file is"
    return DeepZoom(prediction.bounds)


def _mpp_of(slide: ViewedSlide, metadata: SlideMetadata | None) -> float | None:
    """Decide the scale as everywhere; None where it cannot be known."""
    if slide.mpp is not None or metadata is None:
        return slide.mpp
    try:
        return resolve_scale(metadata).mpp
    except ScaleError:
        return None
