"""Open a slide with the right reader, and find the slides of a folder."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import openslide

from tapfm.errors import InputError, UnreadableSlideError
from tapfm.runtime.output_folder import OUTPUT_MARKER
from tapfm.slides.readers import image
from tapfm.slides.readers.openslide import OpenSlideSlide
from tapfm.slides.readers.tiff import UnsupportedTiffError, has_ome_metadata, is_tiff, open_tiff
from tapfm.slides.slide import CACHE_BYTES, Slide

# Vendors whose files are plain tiled TIFF. OpenSlide reads the TIFF variants of others (Leica, Ventana, Philips, NDPI).
_PLAIN_TIFF = (None, "aperio", "generic-tiff")
SLIDE_SUFFIXES = (
    *(".svs", ".tif", ".tiff", ".qptiff", ".ndpi", ".mrxs", ".scn", ".bif", ".vms", ".vmu", ".svslide", ".czi", ".dcm"),
    *image.SUFFIXES,
)
# Output folders of tapfm. The images in them are not slides.
PER_SLIDE = "per-slide"  # heatmaps, some of them TIFF
OUTPUT_FOLDERS = ("overlays", "patches", "tissue", "truth", PER_SLIDE)
CONTACT_SHEET = "contact-sheet.jpg"


def open_slide(path: Path, cache_bytes: int = CACHE_BYTES) -> Slide:
    """Open a slide with the fastest reader that supports it.

    A DICOM slide can be given as its folder or as one of its files.
    """
    if not path.exists():
        raise UnreadableSlideError(
            f"{path} does not exist.", hint="Check the path. Paths in a cohort table are relative to its folder."
        )
    file = _find_dicom_file(path) if path.is_dir() else path
    if file.suffix.lower() in image.SUFFIXES:
        return image.ImageSlide(file)
    unsupported = ""
    try:
        vendor = openslide.OpenSlide.detect_format(file)
        tiff = is_tiff(file)
    except OSError as error:
        raise UnreadableSlideError(
            f"{path.name} cannot be read ({error}).", hint="Check the file permissions."
        ) from error
    ome = tiff and has_ome_metadata(file)
    if ome or (tiff and vendor in _PLAIN_TIFF):
        try:
            return open_tiff(file, cache_bytes)
        except UnsupportedTiffError as reason:
            unsupported = f"a TIFF with {reason}"
    if vendor == "dicom":
        return _open_dicom(file, cache_bytes)
    if vendor is not None and not ome:  # OpenSlide reads only the first plane of an OME-TIFF
        return OpenSlideSlide(file, cache_bytes)
    raise UnreadableSlideError(
        f"{path.name} is {unsupported or 'not in a slide format that OpenSlide or tapfm supports, or it is damaged'}.",
        hint="Copy the file again from the scanner, or convert it to a tiled RGB TIFF.",
    )


def _open_dicom(file: Path, cache_bytes: int) -> Slide:
    """Open a DICOM slide with OpenSlide; if OpenSlide refuses it and it is YBR_FULL, with pydicom."""
    try:
        return OpenSlideSlide(file, cache_bytes)
    except UnreadableSlideError as refusal:
        from tapfm.slides.readers.dicom import UnsupportedDicomError, open_ybr_dicom  # importing pydicom is slow

        try:
            slide = open_ybr_dicom(file, _list_dicom_files(file.parent), cache_bytes)
        except UnsupportedDicomError as error:
            raise UnreadableSlideError(
                f"{file.name} is a DICOM slide with the photometric interpretation YBR_FULL, which OpenSlide does not "
                f"read. tapfm cannot read it either: {error}.",
                hint="Convert it to an OME-TIFF, for example with Bio-Formats: bfconvert -series 0 -tilex 512 "
                f"-tiley 512 -compression JPEG {file.name} {file.stem}.ome.tiff",
            ) from error
        if slide is None:
            raise refusal
        return slide


def _find_dicom_file(folder: Path) -> Path:
    """Return one file of a DICOM slide. OpenSlide finds the other files of the series in the same folder."""
    files = _list_dicom_files(folder)
    if not files:
        raise UnreadableSlideError(
            f"{folder} contains no .dcm files, so it is not a DICOM slide.",
            hint=f"List the slides in it: tapfm inspect {folder}",
        )
    series = {_read_series_uid(file) for file in files} - {None}
    if len(series) > 1:
        raise UnreadableSlideError(
            f"{folder} contains {len(series)} DICOM series; a folder must contain one slide.",
            hint="Move each series to its own folder, or list one .dcm file of each series in the cohort table.",
        )
    return files[0]


def _list_dicom_files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.suffix.lower() == ".dcm" and path.is_file())


def _read_series_uid(file: Path) -> bytes | None:
    """Read the SeriesInstanceUID (0020,000E) of a DICOM file; it precedes the pixel data."""
    with file.open("rb") as opened:
        found = re.search(rb"\x20\x00\x0e\x00UI..([0-9.]+)", opened.read(2**20), re.DOTALL)
    return found.group(1) if found else None


@contextmanager
def open_strict_reader(slide: Slide) -> Iterator[Slide]:
    """Open a reader that raises an error for damaged pixels.

    The TIFF reader ignores damage that libjpeg only reports as a warning, so its files are read with OpenSlide here.
    Yields `slide` itself if OpenSlide does not support the file.
    """
    try:
        strict = OpenSlideSlide(slide.metadata.path) if slide.metadata.reader == "tiff" else None
    except UnreadableSlideError:  # a TIFF that OpenSlide does not support
        strict = None
    if strict is None:
        yield slide
    else:
        with closing(strict):
            yield strict


def find_slides(folder: Path) -> list[Path]:
    """Return all slides below a folder. A folder of DICOM files is one slide; outputs of tapfm are skipped."""
    found: set[Path] = set()
    visited: set[str] = set()
    for parent, folders, names in os.walk(folder, followlinks=True, onerror=_raise_unreadable_folder):
        real = os.path.realpath(parent)
        if real in visited:  # a link may point to a parent folder
            folders.clear()
            continue
        visited.add(real)
        outputs = (*OUTPUT_FOLDERS, CONTACT_SHEET) if OUTPUT_MARKER in names else ()
        folders[:] = [name for name in folders if not name.startswith(".") and name not in outputs]
        slides = [Path(parent, name) for name in names if is_slide_name(name) and name not in outputs]
        if any(path.suffix.lower() == ".dcm" for path in slides):
            found.add(Path(parent))
        is_slide_part = _make_slide_part_filter(Path(parent))
        found.update(path for path in slides if path.suffix.lower() != ".dcm" and not is_slide_part(path))
    return sorted(found)


def _raise_unreadable_folder(error: OSError) -> None:
    """Raise InputError for a folder that cannot be listed. By default, os.walk skips such folders silently."""
    raise InputError(
        f"{error.filename} cannot be read ({error.strerror}).", hint="Check the folder permissions."
    ) from error


def is_slide_name(name: str) -> bool:
    """Return whether a file name has the suffix of a slide format and does not start with a dot (hidden)."""
    return not name.startswith(".") and Path(name).suffix.lower() in SLIDE_SUFFIXES


def _make_slide_part_filter(folder: Path) -> Callable[[Path], bool]:
    """Return a function that tells whether an image is a part of an MRXS or VMS slide, not a slide itself."""
    here = folder.resolve()
    if here.with_name(here.name + ".mrxs").exists():
        return lambda _: True
    stems = [index.stem for index in folder.glob("*.vms")]
    return lambda path: path.suffix.lower() in (".jpg", ".jpeg") and path.name.startswith(tuple(stems))


def list_slide_files(slide: Path) -> list[Path]:
    """Return all files that a slide consists of."""
    suffix = slide.suffix.lower()
    if slide.is_dir():
        return _list_dicom_files(slide)
    if suffix == ".dcm":
        return _list_dicom_files(slide.parent)
    if suffix == ".mrxs":
        return [slide, *sorted(path for path in slide.with_suffix("").rglob("*") if path.is_file())]
    if suffix in (".vms", ".vmu"):
        return sorted(path for path in slide.parent.glob("*") if path.name.startswith(slide.stem) and path.is_file())
    return [slide]
