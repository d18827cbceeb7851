"""Which reader gets which file, and what counts as a slide in a folder."""

from __future__ import annotations

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
    *(".svs", ".tif", ".tiff", ".ndpi", ".mrxs", ".scn", ".bif", ".vms", ".vmu", ".svslide", ".czi", ".dcm"),
    *image.SUFFIXES,
)


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
    if tiff and (vendor in PLAIN_TIFF or has_ome_metadata(file)):
        try:
            return TiffSlide(file, cache_bytes)
        except NotOursError as reason:
            refusal = f"a TIFF with {reason}"
    if vendor is not None:
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
    """Find all slides below a folder; a folder of DICOM files is one slide."""
    found: set[Path] = set()
    for path in folder.rglob("*"):
        if path.name.startswith(".") or path.suffix.lower() not in SLIDE_SUFFIXES or not path.is_file():
            continue
        if path.suffix.lower() == ".dcm":
            found.add(path.parent)
        elif not belongs_to_another(path):
            found.add(path)
    return sorted(found)


def belongs_to_another(path: Path) -> bool:
    """Say whether a picture is a part of a slide: of a Hamamatsu VMS (beside it), of an MRXS (in its folder)."""
    if path.parent.with_suffix(".mrxs").exists():
        return True
    if path.suffix.lower() in (".jpg", ".jpeg"):
        return any(path.name.startswith(index.stem) for index in path.parent.glob("*.vms"))
    return False
