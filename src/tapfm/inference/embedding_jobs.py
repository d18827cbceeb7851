"""The slides to embed: their tiles, and whether their features exist already."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import h5py

from tapfm.cohort.manifest import SlideRow
from tapfm.encoders.features import FEATURES_VERSION, FINGERPRINT, stored_fingerprint
from tapfm.encoders.inference import Precision
from tapfm.encoders.weights import LoadedEncoder
from tapfm.errors import InputError, TileStoreError
from tapfm.runtime.cohort_job import Failure
from tapfm.runtime.files import file_identity, fingerprint
from tapfm.slides.opening import files_of
from tapfm.tiles.store import TileSet, find_tiles

_NOT_IN_KEY = ("name", "licence", "gate", "notes")  # words of a card that change no feature


@dataclass(frozen=True)
class EmbeddingSettings:
    """How features are made; the encoder is on its device."""

    loaded: LoadedEncoder
    precision: Precision = "float32"
    batch: int | None = None  # tiles at a time; None is chosen by the encoder's size
    compiled: bool | None = None  # None is decided by how much there is to do


@dataclass(frozen=True)
class EmbeddingJob:
    """One slide to embed."""

    row: SlideRow
    tiles: TileSet
    path: Path  # of its features
    key: str  # fingerprint of everything that decides them


@dataclass(frozen=True)
class EmbedRecord:
    """The result of embedding one slide: a line of summary.csv."""

    slide_id: str
    status: str  # ok, failed, or "not embedded" where --only leaves it out
    reason: str = ""
    tiles: int = 0
    tiles_failed: int | None = None
    seconds: float | None = None
    what_to_do: str = ""


def make_job(
    row: SlideRow, tiles_folder: Path, folder: Path, settings: EmbeddingSettings, tile_command: str
) -> EmbeddingJob | Failure:
    """Return the job of a slide, keyed by everything that its features depend on; a Failure if it has no tiles."""
    try:
        tiles = find_tiles(tiles_folder, row.slide_id)
        files = [file_identity(file) for file in files_of(row.path)]
    except TileStoreError as error:
        return Failure(error.message, f"{tile_command} --only {shlex.quote(row.slide_id)}")
    except OSError as error:
        return Failure(f"{row.path} cannot be read ({error})", "Check who may read it.")
    key = fingerprint(FEATURES_VERSION, _made_with(settings), row.slide_id, tiles.content_digest, files)
    return EmbeddingJob(row, tiles, folder / f"{row.slide_id}.h5", key)


def _made_with(settings: EmbeddingSettings) -> tuple[object, ...]:
    """List what decides features besides the slide; how many tiles are encoded at once does not."""
    loaded = settings.loaded
    card = {name: value for name, value in asdict(loaded.card).items() if name not in _NOT_IN_KEY}
    return card, loaded.provenance.sha256, loaded.encoder.tile_px, loaded.encoder.feature, settings.precision


def recall_record(job: EmbeddingJob) -> EmbedRecord | None:
    """Return the record of a slide that is embedded already, if everything it depends on is unchanged."""
    if stored_fingerprint(job.path) != job.key:
        return None
    with h5py.File(job.path, "r") as file:
        tiles = len(file["features"])
    return EmbedRecord(job.row.slide_id, "ok", tiles=tiles, tiles_failed=len(job.tiles) - tiles)


def refuse_foreign_files(folder: Path, rows: Sequence[SlideRow]) -> None:
    """Stop before features that another tool wrote would be written over."""
    names = [f"{row.slide_id}.h5" for row in rows]
    foreign = [name for name in names if (folder / name).exists() and not _may_replace(folder / name)]
    if foreign:
        raise InputError(
            f"{folder} has {len(foreign):,} files that tapfm embed did not write, such as {foreign[0]}.",
            hint="Give another folder with --out.",
        )


def _may_replace(path: Path) -> bool:
    """Say whether a file is ours, or nobody's as it cannot be read."""
    try:
        with h5py.File(path, "r") as file:
            return "features" in file and FINGERPRINT in file["features"].attrs
    except OSError:
        return True
