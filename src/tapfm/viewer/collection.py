"""The slides that the viewer shows. Clients request them by key, never by path."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tapfm.cohort.cohort_table import read_cohort
from tapfm.cohort.slide_search import SlideFinder
from tapfm.cohort.table_options import TableOptions
from tapfm.errors import CohortError, InputError
from tapfm.prediction.folder import PredictedSlide, PredictionFolder
from tapfm.prediction.slide_files import find_slide_file, make_slide_finder
from tapfm.prediction.tile_table import TileTable
from tapfm.runtime.files import file_identity, fingerprint
from tapfm.slides.opening import list_slide_files

_KEY_LENGTH = 16  # hexadecimal digits


@dataclass(frozen=True)
class ViewerSlide:
    """A slide of the collection, with its prediction if there is one."""

    key: str  # changes with the file and the prediction, so that browsers can cache responses permanently
    slide_id: str
    path: Path | None  # None if the file is missing
    mpp: float | None = None  # from the cohort table or the prediction
    prediction: PredictedSlide | None = None
    prediction_folder: PredictionFolder | None = None

    def read_tiles(self) -> TileTable | None:
        """Read the tile values. Returns None if the slide has no prediction."""
        return None if self.prediction_folder is None else self.prediction_folder.tiles(self.slide_id)


@dataclass(frozen=True)
class SlideCollection:
    """All slides that the viewer shows."""

    slides: tuple[ViewerSlide, ...]

    @property
    def targets(self) -> list[str]:
        """Names of all predicted targets, in the order in which they first occur in the predictions."""
        predictions = (slide.prediction for slide in self.slides if slide.prediction is not None)
        return list(dict.fromkeys(target for prediction in predictions for target in prediction.targets))

    @property
    def missing_slide_ids(self) -> list[str]:
        """Ids of the slides whose file is missing."""
        return [slide.slide_id for slide in self.slides if slide.path is None]


def collect_slides(sources: Sequence[Path], slides_folder: Path | None = None) -> SlideCollection:
    """Collect the slides of prediction folders, slide folders, cohort tables and slide files.

    `slides_folder` is searched for the files of cohort tables, and for files that were moved after their prediction.
    """
    finder = make_slide_finder(slides_folder)
    slides: list[ViewerSlide] = []
    for source in sources:
        folder = PredictionFolder(source)
        slides += _predicted_slides(folder, finder) if folder.exists else _unpredicted_slides(source, slides_folder)
    unique = _remove_duplicates(slides)
    if not unique:
        raise InputError(
            f"No finished slides in {', '.join(map(str, sources))}.",
            hint="A slide appears in a prediction folder when tapfm predict has finished it; failures.csv lists slides "
            "that failed.",
        )
    return SlideCollection(tuple(unique))


def _predicted_slides(folder: PredictionFolder, finder: SlideFinder | None) -> list[ViewerSlide]:
    folder.read_metadata()  # raises if it cannot be read
    slides = []
    for prediction in folder.slides():
        path = find_slide_file(prediction, finder)
        key = _slide_key(prediction.slide_id, path, prediction.key, str(folder.path.resolve()))
        slides.append(ViewerSlide(key, prediction.slide_id, path, prediction.mpp, prediction, folder))
    return slides


def _unpredicted_slides(source: Path, slides_folder: Path | None) -> list[ViewerSlide]:
    rows = read_cohort(source, TableOptions(slides=slides_folder)).rows
    return [ViewerSlide(_slide_key(row.slide_id, row.path), row.slide_id, row.path, row.mpp) for row in rows]


def _remove_duplicates(slides: Iterable[ViewerSlide]) -> list[ViewerSlide]:
    """Keep each file once, preferably with its prediction. Raises if several files or predictions have the same id."""
    slides_by_id: dict[str, list[ViewerSlide]] = defaultdict(list)
    for slide in slides:
        same_id = slides_by_id[slide.slide_id]
        duplicate = next((each for each in same_id if _is_same_file(each.path, slide.path)), None)
        if duplicate is None or (duplicate.prediction is not None and slide.prediction is not None):
            same_id.append(slide)
        elif slide.prediction is not None:
            same_id[same_id.index(duplicate)] = slide
    if repeated := [slide_id for slide_id, same_id in slides_by_id.items() if len(same_id) > 1]:
        listed = ", ".join(repeated[:5]) + (", ..." if len(repeated) > 5 else "")
        raise CohortError(
            f"Several slides or predictions have the same id: {listed}.",
            hint="Pass only one of the folders or tables that contain these slides. "
            "If slides have moved since their prediction, pass their new folder to --slides.",
        )
    return [slide for same_id in slides_by_id.values() for slide in same_id]


def _is_same_file(first: Path | None, second: Path | None) -> bool:
    return first is not None and second is not None and first.resolve() == second.resolve()


def _slide_key(slide_id: str, path: Path | None, *prediction: str) -> str:
    """Return an opaque key that changes when the slide's files or its prediction change."""
    file_identities: list[tuple[str, int, int]] = []
    if path is not None:
        with contextlib.suppress(OSError):  # a broken link is reported when the slide is opened
            file_identities = [file_identity(file) for file in list_slide_files(path)]
    return fingerprint(slide_id, str(path and path.resolve()), file_identities, prediction)[:_KEY_LENGTH]
