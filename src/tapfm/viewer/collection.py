"""Which slides the viewer shows. Everything it serves is asked for by a key of this list, never by a path."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tapfm.cohort.cohort_table import SlideFinder, read_cohort
from tapfm.errors import CohortError, InputError
from tapfm.prediction.folder import PredictedSlide, PredictionFolder
from tapfm.prediction.slide_files import find_slide_file, make_slide_finder
from tapfm.prediction.tile_table import TileTable
from tapfm.runtime.files import file_identity, fingerprint
from tapfm.slides.opening import list_slide_files

_KEY_LENGTH = 16  # hexadecimal digits


@dataclass(frozen=True)
class ViewedSlide:
    """A slide of the list, with what was predicted for it, if anything was."""

    key: str  # changes with the file and the prediction: what a browser has kept under it stays right
    slide_id: str
    path: Path | None  # None where the file is not there any more
    mpp: float | None = None  # as a table states it
    prediction: PredictedSlide | None = None
    folder: PredictionFolder | None = None

    def tiles(self) -> TileTable | None:
        """Read the numbers of its tiles."""
        return None if self.folder is None else self.folder.tiles(self.slide_id)


@dataclass(frozen=True)
class Collection:
    """The slides that are shown."""

    slides: tuple[ViewedSlide, ...]

    @property
    def targets(self) -> list[str]:
        """Name all targets that were predicted, in their order."""
        said = (slide.prediction.targets for slide in self.slides if slide.prediction is not None)
        return list(dict.fromkeys(target for targets in said for target in targets))

    @property
    def lost(self) -> list[str]:
        """Name the slides whose files are not there."""
        return [slide.slide_id for slide in self.slides if slide.path is None]


def collect_viewed_slides(sources: Sequence[Path], slides_folder: Path | None = None) -> Collection:
    """Gather the slides of folders of predictions, of folders and tables of slides, and of files."""
    finder = make_slide_finder(slides_folder)
    found: list[ViewedSlide] = []
    for source in sources:
        folder = PredictionFolder(source)
        found += _predicted_slides(folder, finder) if folder.exists else _plain_slides(source, slides_folder)
    unique = _without_repetition(found)
    if not unique:
        raise InputError(
            f"There is no slide in {', '.join(map(str, sources))} yet.",
            hint="A slide is there as soon as its prediction is done.",
        )
    return Collection(tuple(unique))


def _predicted_slides(folder: PredictionFolder, finder: SlideFinder | None) -> list[ViewedSlide]:
    """List the slides of a prediction; a file that moved is looked for where the user says."""
    folder.read_metadata()  # raises if it cannot be read
    slides = []
    for prediction in folder.slides():
        path = find_slide_file(prediction, finder)
        key = _key_of(prediction.slide_id, path, prediction.key, str(folder.path.resolve()))
        slides.append(ViewedSlide(key, prediction.slide_id, path, prediction.mpp, prediction, folder))
    return slides


def _plain_slides(source: Path, slides_folder: Path | None) -> list[ViewedSlide]:
    """List slides without a prediction."""
    rows = read_cohort(source, slides_folder).rows
    return [ViewedSlide(_key_of(row.slide_id, row.path), row.slide_id, row.path, row.mpp) for row in rows]


def _without_repetition(slides: Iterable[ViewedSlide]) -> list[ViewedSlide]:
    """Keep each slide once, with its prediction where one has it; two slides with one id are refused."""
    by_id: dict[str, list[ViewedSlide]] = defaultdict(list)
    for slide in slides:
        same = by_id[slide.slide_id]
        twin = next((each for each in same if _is_same_file(each.path, slide.path)), None)
        if twin is None or (twin.prediction is not None and slide.prediction is not None):
            same.append(slide)
        elif slide.prediction is not None:
            same[same.index(twin)] = slide
    if clashing := [slide_id for slide_id, same in by_id.items() if len(same) > 1]:
        raise CohortError(
            f"Several slides are called {', '.join(clashing[:5])}{', ...' if len(clashing) > 5 else ''}.",
            hint="Look at them one after the other; where slides have moved since their prediction, use --slides.",
        )
    return [slide for same in by_id.values() for slide in same]


def _is_same_file(one: Path | None, other: Path | None) -> bool:
    """Say whether two paths lead to one file."""
    return one is not None and other is not None and one.resolve() == other.resolve()


def _key_of(slide_id: str, path: Path | None, *more: str) -> str:
    """Make a key of a slide: opaque, and another one when its file changes."""
    files: list[tuple[str, int, int]] = []
    if path is not None:
        with contextlib.suppress(OSError):  # a link that leads nowhere: told when the slide is opened
            files = [file_identity(file) for file in list_slide_files(path)]
    return fingerprint(slide_id, str(path and path.resolve()), files, more)[:_KEY_LENGTH]
