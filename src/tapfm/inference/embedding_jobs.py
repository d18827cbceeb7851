"""Jobs of `tapfm embed`: the slides to embed, their tiles, and whether their features already exist."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import h5py

from tapfm.cohort.cohort_table import SlideRow
from tapfm.encoders.features import FEATURES_VERSION, FINGERPRINT_ATTRIBUTE, read_fingerprint
from tapfm.encoders.inference import Precision
from tapfm.encoders.weights import LoadedEncoder
from tapfm.errors import InputError, TileStoreError, UnreadableSlideError
from tapfm.runtime.cohort_job import Failure
from tapfm.runtime.files import file_identity, fingerprint
from tapfm.runtime.messages import format_count
from tapfm.slides.opening import list_slide_files
from tapfm.tiles.store import TileSet, read_slide_tiles

_NOT_IN_KEY = ("name", "licence", "gate", "notes")  # fields of a card that do not affect features


@dataclass(frozen=True)
class EmbeddingSettings:
    """Settings of `tapfm embed`. The encoder is already on its device."""

    loaded: LoadedEncoder
    precision: Precision = "float32"
    batch: int | None = None  # tiles at a time; None: chosen by the size of the encoder
    compiled: bool | None = None  # None: chosen by the number of tiles


@dataclass(frozen=True)
class EmbeddingJob:
    """One slide to embed."""

    row: SlideRow
    tiles: TileSet
    path: Path  # of the feature file
    key: str  # fingerprint of everything that the features depend on


@dataclass(frozen=True)
class EmbeddingRecord:
    """The result of embedding one slide: a row of summary.csv."""

    slide_id: str
    status: str  # ok, failed, or "not embedded" (excluded by --only, without results)
    reason: str = ""
    tiles: int = 0
    tiles_failed: int | None = None
    seconds: float | None = None
    hint: str = ""


def make_job(
    row: SlideRow, tiles_folder: Path, folder: Path, settings: EmbeddingSettings, tile_command: str
) -> EmbeddingJob | Failure:
    """Return the job of a slide, keyed by everything that its features depend on; a Failure if it has no tiles."""
    try:
        row.check_file()
        tiles = read_slide_tiles(tiles_folder, row.slide_id)
        files = [file_identity(file) for file in list_slide_files(row.path)]
    except UnreadableSlideError as error:
        return Failure(error.message, error.hint)
    except TileStoreError as error:
        return Failure(error.message, f"{tile_command} --only {shlex.quote(row.slide_id)}")
    except OSError as error:
        return Failure(f"{row.path} cannot be read ({error})", "Check the file permissions.")
    key = fingerprint(FEATURES_VERSION, _feature_settings(settings), row.slide_id, tiles.content_digest, files)
    return EmbeddingJob(row, tiles, folder / f"{row.slide_id}.h5", key)


def _feature_settings(settings: EmbeddingSettings) -> tuple[object, ...]:
    """Return everything that features depend on except the slide; the batch size does not matter."""
    loaded = settings.loaded
    card = {name: value for name, value in asdict(loaded.card).items() if name not in _NOT_IN_KEY}
    return card, loaded.provenance.sha256, loaded.encoder.tile_px, loaded.encoder.feature, settings.precision


def find_finished(job: EmbeddingJob) -> EmbeddingRecord | None:
    """Return the record of a slide whose features exist and are up to date, or None."""
    if read_fingerprint(job.path) != job.key:
        return None
    with h5py.File(job.path, "r") as file:
        tiles = len(file["features"])
    return EmbeddingRecord(job.row.slide_id, "ok", tiles=tiles, tiles_failed=len(job.tiles) - tiles)


def check_no_overwriting(folder: Path, rows: Sequence[SlideRow]) -> None:
    """Raise InputError if files of another tool would be overwritten."""
    names = [f"{row.slide_id}.h5" for row in rows]
    foreign = [name for name in names if (folder / name).exists() and not _may_replace(folder / name)]
    if foreign:
        raise InputError(
            f"tapfm embed would overwrite {format_count(len(foreign), 'file')} of another tool in {folder}, "
            f"such as {foreign[0]}.",
            hint="Choose another folder with --out.",
        )


def _may_replace(path: Path) -> bool:
    """Return whether tapfm wrote the file, or it is not a readable HDF5 file."""
    try:
        with h5py.File(path, "r") as file:
            return "features" in file and FINGERPRINT_ATTRIBUTE in file["features"].attrs
    except OSError:
        return True
