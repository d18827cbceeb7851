"""Where the file of a predicted slide is: where it was then, or where the user says that slides are now."""

from __future__ import annotations

from pathlib import Path

from tapfm.cohort.manifest import SlideFinder
from tapfm.errors import InputError
from tapfm.prediction.folder import PredictedSlide


def finder_of(folder: Path | None) -> SlideFinder | None:
    """Look for moved slides below a folder; None where there is none to look in."""
    if folder is not None and not folder.is_dir():
        raise InputError(f"There is no folder {folder}.", hint="--slides is a folder with the slides' files.")
    return None if folder is None else SlideFinder(folder, asked_for=True)


def find_slide_file(predicted: PredictedSlide, finder: SlideFinder | None) -> Path | None:
    """Find a slide's file: where it was, or the only one of its name where the user says they are now."""
    if predicted.path.exists():
        return predicted.path
    same = [] if finder is None else finder.find(predicted.path.name)
    if len(same) > 1:
        raise InputError(
            f"There are several files for {predicted.slide_id}: {', '.join(map(str, same))}.",
            hint="Give --slides a folder that has each slide once.",
        )
    return same[0] if same else None
