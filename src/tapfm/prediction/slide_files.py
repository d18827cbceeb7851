"""Find the file of a predicted slide: at its recorded path, or in the folder passed as --slides."""

from __future__ import annotations

from pathlib import Path

from tapfm.cohort.slide_search import SlideFinder
from tapfm.errors import InputError
from tapfm.prediction.folder import PredictedSlide


def make_slide_finder(folder: Path | None) -> SlideFinder | None:
    """Return a `SlideFinder` that searches a folder for moved slide files, or None without a folder."""
    if folder is not None and not folder.is_dir():
        raise InputError(f"The folder {folder} does not exist.", hint="Pass the folder of the slide files to --slides.")
    return None if folder is None else SlideFinder(folder, explicit=True)


def find_slide_file(predicted: PredictedSlide, finder: SlideFinder | None) -> Path | None:
    """Return the path of a slide's file, or None if it is missing. Raises if several files have its name."""
    if predicted.path.exists():
        return predicted.path
    matches = [] if finder is None else finder.find(predicted.path.name)
    if len(matches) > 1:
        raise InputError(
            f"Several files match the slide {predicted.slide_id}: {', '.join(map(str, matches))}.",
            hint="Pass a folder to --slides that contains each slide only once.",
        )
    return matches[0] if matches else None
