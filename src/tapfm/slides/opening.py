"""Which reader gets which file, and what counts as a slide in a folder."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import openslide

from tapfm.errors import UnreadableSlideError
from tapfm.slides.readers import image
from tapfm.slides.readers.openslide import OpenSlideSlide
from tapfm.slides.readers.tiff import NotOursError, TiffSlide, has_ome_metadata, is_tiff
from tapfm.slides.slide import CACHE_BYTES, Slide

# Vendors whose files are plain tiled TIFF; what others hide in a TIFF (Leica, Ventana, Philips, NDPI) OpenSlide knows.
PLAIN_TIFF = (None, "aperio", "generic-tiff")
SLIDE_SUFFIXES = (
    *(".svs", ".tif", ".tiff", ".qptiff", ".ndpi", ".mrxs", ".scn", ".bif", ".vms", ".vmu", ".svslide", ".czi", ".dcm"),
    *image.SUFFIXES,
)
OUTPUT_MARK = ".tapfm-tiles"  # a file in folders that `tapfm tile` writes to: the pictures there are no slides


def open_slide(path: Path, cache_bytes: int = CACHE_BYTES) -> Slide:
    """Open a slide with the fastest reader that is sure of it; a DICOM slide may be given as its folder."""
    if not path.exists():
        raise UnreadableSlideError(f"There is no file {path}.", hint="Check the path; relative ones start at the CSV.")
    file = dicom_file(path) if path.is_dir() else path
    if file.suffix.lower() in image.SUFFIXES:
        return image.ImageSlide(file)
    refusal = ""
    try:
        vendor = openslide.OpenSlide.detect_format(file)
        tiff = is_tiff(file)
    except OSError as error:
        raise UnreadableSlideError(f"{path.name} cannot be read ({error}).", hint="Check who may read it.") from error
    ome = tiff and has_ome_metadata(file)
    if ome or (tiff and vendor in PLAIN_TIFF):
        try:
            return TiffSlide(file, cache_bytes)
        except NotOursError as reason:
            refusal = f"a TIFF with {reason}"
    if vendor is not None and not ome:  # OpenSlide takes the first plane of an OME-TIFF for the whole
        return OpenSlideSlide(file, cache_bytes)
    raise UnreadableSlideError(
        f"{path.name} is {refusal or 'not a slide in any format that OpenSlide or tapfm reads, or it is damaged'}.",
        hint="Copy it again from where it was scanned, or convert it to a tiled RGB TIFF.",
    )


def dicom_file(folder: Path) -> Path:
    """Pick a file of a DICOM slide; OpenSlide finds the others of its series beside it."""
    files = sorted(folder.glob("*.dcm"))
    if not files:
        raise UnreadableSlideError(
            f"{folder} is a folder without .dcm files, so not a DICOM slide.", hint=f"Try: tapfm inspect {folder}"
        )
    return files[0]


def find_slides(folder: Path) -> list[Path]:
    """Find all slides below a folder; a folder of DICOM files is one slide. Our own results are left out."""
    found: set[Path] = set()
    entered: set[str] = set()
    for parent, folders, names in os.walk(folder, followlinks=True):
        real = os.path.realpath(parent)
        if OUTPUT_MARK in names or real in entered:  # a link may lead back up
            folders.clear()
            continue
        entered.add(real)
        folders[:] = [name for name in folders if not name.startswith(".")]
        slides = [Path(parent, name) for name in names if is_slide_name(name)]
        if any(path.suffix.lower() == ".dcm" for path in slides):
            found.add(Path(parent))
        parts = parts_of_slides(Path(parent))
        found.update(path for path in slides if path.suffix.lower() != ".dcm" and not parts(path))
    return sorted(found)


def is_slide_name(name: str) -> bool:
    """Tell by its name whether a file may be a slide."""
    return not name.startswith(".") and Path(name).suffix.lower() in SLIDE_SUFFIXES


def parts_of_slides(folder: Path) -> Callable[[Path], bool]:
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
        return sorted(slide.glob("*.dcm"))
    if suffix == ".dcm":
        return sorted(slide.parent.glob("*.dcm"))
    if suffix == ".mrxs":
        return [slide, *sorted(path for path in slide.with_suffix("").rglob("*") if path.is_file())]
    if suffix in (".vms", ".vmu"):
        return sorted(path for path in slide.parent.glob("*") if path.name.startswith(slide.stem) and path.is_file())
    return [slide]
