"""Draw the pictures of predicted slides in worker processes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from rich.console import Console

from tapfm.prediction.folder import PredictedSlide, PredictionFolder
from tapfm.prediction.layers import DRAWING_VERSION
from tapfm.runtime.claims import SlideClaims
from tapfm.runtime.cohort_job import Failure, run_slides
from tapfm.runtime.files import fingerprint, write_atomically
from tapfm.runtime.output_folder import remove_unfinished
from tapfm.runtime.progress import SlideProgress

_DRAWN = ".drawn.json"  # in a slide's folder: what its pictures were made of, and their files by kind
_Files = dict[str, list[str]]  # names, by kind of picture


@dataclass(frozen=True)
class PictureOptions:
    """What to draw of each slide."""

    heatmaps: bool = False
    geojson: bool = False

    @property
    def any(self) -> bool:
        """Whether there is anything to draw."""
        return self.heatmaps or self.geojson


@dataclass(frozen=True)
class _DrawingJob:
    """One slide to draw; is sent to a worker."""

    folder: Path
    missing: tuple[str, ...]  # kinds of pictures
    about: str  # fingerprint of everything that decides the pictures
    before: _Files  # pictures that exist


def draw_slides(
    folder: PredictionFolder,
    slide_ids: Sequence[str],
    pictures: PictureOptions,
    *,
    workers: int,
    claims: SlideClaims,
    console: Console,
) -> dict[str, Failure]:
    """Draw the pictures that do not exist yet; returns the slides that failed."""
    jobs = {}
    if pictures.any:
        for slide_id in slide_ids:
            job = _make_job(folder.folder_of(slide_id), pictures)
            if job is not None:
                jobs[slide_id] = job
    failed: dict[str, Failure] = {}
    if not jobs:
        return failed
    with SlideProgress(console, "drawing", slides=len(jobs)) as progress:
        for slide_id, result in run_slides(_run_drawing_job, jobs, workers=workers, claims=claims):
            if isinstance(result, Failure):
                failed[slide_id] = replace(result, stage="draw")
            progress.finish_slide(slide_id, failure=result.reason if isinstance(result, Failure) else "")
    return failed


def _make_job(folder: Path, pictures: PictureOptions) -> _DrawingJob | None:
    """Return what is left to draw of a slide; None where everything exists."""
    slide = PredictedSlide.read(folder)
    about = fingerprint(DRAWING_VERSION, slide.key, {target: asdict(said) for target, said in slide.targets.items()})
    before = _recall_pictures(folder, about)
    missing = tuple(name for name, wanted in asdict(pictures).items() if wanted and name not in before)
    return _DrawingJob(folder, missing, about, before) if missing else None


def _recall_pictures(folder: Path, about: str) -> _Files:
    """Return the pictures of a slide that exist, complete and up to date, by kind."""
    try:
        noted = json.loads((folder / _DRAWN).read_text("utf-8"))
        files = dict(noted["files"]) if noted["about"] == about else {}
    except (OSError, ValueError, LookupError, TypeError):
        return {}
    return {name: each for name, each in files.items() if all((folder / file).is_file() for file in each)}


def _run_drawing_job(job: _DrawingJob) -> None:
    """Draw one slide. Runs in a worker."""
    from tapfm.prediction.pictures import draw_slide

    remove_unfinished(job.folder)
    slide = PredictedSlide.read(job.folder)
    files = dict(job.before)
    for name in job.missing:
        files[name] = [path.name for path in draw_slide(slide, job.folder, **asdict(PictureOptions(**{name: True})))]
    write_atomically(job.folder / _DRAWN, json.dumps({"about": job.about, "files": files}, sort_keys=True).encode())
