"""Which reader gets which file, and what counts as a slide in a folder."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import openslide

from tapfm.errors import InputError, UnreadableSlideError
from tapfm.runtime.output_folder import OUTPUT_MARK
from tapfm.slides.readers import image
from tapfm.slides.readers.openslide import OpenSlideSlide
from tapfm.slides.readers.tiff import TiffSlide
from tapfm.slides.readers.tiff_structure import UnsupportedTiffError, has_ome_metadata, is_tiff
from tapfm.slides.slide import CACHE_BYTES, Slide

# Vendors whose files are plain tiled TIFF; what others hide in a TIFF (Leica, Ventana, Philips, NDPI) OpenSlide knows.
_PLAIN_TIFF = (None, "aperio", "generic-tiff")
SLIDE_SUFFIXES = (
    *(".svs", ".tif", ".tiff", ".qptiff", ".ndpi", ".mrxs", ".scn", ".bif", ".vms", ".vmu", ".svslide", ".czi", ".dcm"),
    *image.SUFFIXES,
)
# in such a folder: pictures that are no slides
PER_SLIDE = "per-slide"  # heatmaps, of which some are TIFF
OUTPUT_FOLDERS = ("overlays", "patches", "tissue", "truth", PER_SLIDE)
CONTACT_SHEET = "contact-sheet.jpg"


def open_slide(path: Path, cache_bytes: int = CACHE_BYTES) -> Slide:
    """Open a slide with the fastest reader that is sure of it; a DICOM slide may be given as its folder."""
    if not path.exists():
        raise UnreadableSlideError(f"There is no file {path}.", hint="Check the path; relative ones start at the CSV.")
    file = _dicom_file(path) if path.is_dir() else path
    if file.suffix.lower() in image.SUFFIXES:
        return image.ImageSlide(file)
    refusal = ""
    try:
        vendor = openslide.OpenSlide.detect_format(file)
        tiff = is_tiff(file)
    except OSError as error:
        raise UnreadableSlideError(f"{path.name} cannot be read ({error}).", hint="Check who may read it.") from error
    ome = tiff and has_ome_metadata(file)
    if ome or (tiff and vendor in _PLAIN_TIFF):
        try:
            return TiffSlide(file, cache_bytes)
        except UnsupportedTiffError as reason:
            refusal = f"a TIFF with {reason}"
    if vendor is not None and not ome:  # OpenSlide takes the first plane of an OME-TIFF for the whole
        return OpenSlideSlide(file, cache_bytes)
    raise UnreadableSlideError(
        f"{path.name} is {refusal or 'not a slide in any format that OpenSlide or tapfm reads, or it is damaged'}.",
        hint="Copy it again from where it was scanned, or convert it to a tiled RGB TIFF.",
    )


def _dicom_file(folder: Path) -> Path:
    """Pick a file of a DICOM slide; OpenSlide finds the others of its series beside it."""
    files = _dicom_files(folder)
    if not files:
        raise UnreadableSlideError(
            f"{folder} is a folder without .dcm files, so not a DICOM slide.", hint=f"Try: tapfm inspect {folder}"
        )
    series = {_series_of(file) for file in files} - {None}
    if len(series) > 1:
        raise UnreadableSlideError(
            f"{folder} has {len(series)} DICOM series: which slide is meant?",
            hint="Give each series a folder of its own, or name a .dcm file of each in the column `path`.",
        )
    return files[0]


def _dicom_files(folder: Path) -> list[Path]:
    """List the DICOM files of a folder."""
    return sorted(path for path in folder.iterdir() if path.suffix.lower() == ".dcm" and path.is_file())


def _series_of(file: Path) -> bytes | None:
    """Read the SeriesInstanceUID (0020,000E) of a DICOM file, which stands in front of its pixels."""
    with file.open("rb") as opened:
        found = re.search(rb"\x20\x00\x0e\x00UI..([0-9.]+)", opened.read(2**20), re.DOTALL)
    return found.group(1) if found else None


@contextmanager
def strict_reader(slide: Slide) -> Iterator[Slide]:
    """Read a slide so that damaged pixels are refused: our own decoder passes over what libjpeg only warns of."""
    try:
        strict = OpenSlideSlide(slide.facts.path) if slide.facts.reader == "tiff" else None
    except UnreadableSlideError:  # a TIFF that only we read
        strict = None
    if strict is None:
        yield slide
    else:
        with closing(strict):
            yield strict


def find_slides(folder: Path) -> list[Path]:
    """Find all slides below a folder; a folder of DICOM files is one slide. Our own results are left out."""
    found: set[Path] = set()
    entered: set[str] = set()
    for parent, folders, names in os.walk(folder, followlinks=True, onerror=_refuse):
        real = os.path.realpath(parent)
        if real in entered:  # a link may lead back up
            folders.clear()
            continue
        entered.add(real)
        ours = (*OUTPUT_FOLDERS, CONTACT_SHEET) if OUTPUT_MARK in names else ()
        folders[:] = [name for name in folders if not name.startswith(".") and name not in ours]
        slides = [Path(parent, name) for name in names if is_slide_name(name) and name not in ours]
        if any(path.suffix.lower() == ".dcm" for path in slides):
            found.add(Path(parent))
        parts = _parts_of_slides(Path(parent))
        found.update(path for path in slides if path.suffix.lower() != ".dcm" and not parts(path))
    return sorted(found)


def _refuse(error: OSError) -> None:
    """Say that a folder cannot be looked into: slides in it would be missed without a word."""
    raise InputError(f"{error.filename} cannot be read ({error.strerror}).", hint="Check who may read it.") from error


def is_slide_name(name: str) -> bool:
    """Tell by its name whether a file may be a slide."""
    return not name.startswith(".") and Path(name).suffix.lower() in SLIDE_SUFFIXES


def _parts_of_slides(folder: Path) -> Callable[[Path], bool]:
    """Say which pictures of a folder are parts of a slide: of an MRXS beside the folder, of a Hamamatsu VMS in it."""
    here = folder.resolve()
    if here.with_name(here.name + ".mrxs").exists():
        return lambda _: True
    stems = [index.stem for index in folder.glob("*.vms")]
    return lambda path: path.suffix.lower() in (".jpg", ".jpeg") and path.name.startswith(tuple(stems))


def files_of(slide: Path) -> list[Path]:
    """List the files that a slide consists of."""
    suffix = slide.suffix.lower()
    if slide.is_dir():
        return _dicom_files(slide)
    if suffix == ".dcm":
        return _dicom_files(slide.parent)
    if suffix == ".mrxs":
        return [slide, *sorted(path for path in slide.with_suffix("").rglob("*") if path.is_file())]
    if suffix in (".vms", ".vmu"):
        return sorted(path for path in slide.parent.glob("*") if path.name.startswith(slide.stem) and path.is_file())
    return [slide]
