"""Draw heatmaps and write QuPath files of predicted slides in worker processes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from rich.console import Console

from tapfm.prediction.folder import PredictedSlide, PredictionFolder
from tapfm.prediction.layers import DRAWING_VERSION
from tapfm.runtime.claims import SlideClaims
from tapfm.runtime.cohort_job import Failure, process_slides
from tapfm.runtime.files import fingerprint, write_atomically
from tapfm.runtime.output_folder import remove_unfinished_files
from tapfm.runtime.progress import SlideProgress

_DRAWN_JSON = ".drawn.json"  # in a slide's folder: fingerprint of the inputs, and output files by kind
_Files = dict[str, list[str]]  # file names by kind of output


@dataclass(frozen=True)
class OutputOptions:
    """Optional outputs of each slide."""

    heatmaps: bool = False
    geojson: bool = False

    @property
    def any(self) -> bool:
        return self.heatmaps or self.geojson


@dataclass(frozen=True)
class _DrawingJob:
    """One slide to draw, sent to a worker."""

    folder: Path
    missing: tuple[str, ...]  # kinds of outputs
    key: str  # fingerprint of everything that the outputs depend on
    existing: _Files


def draw_slides(
    folder: PredictionFolder,
    slide_ids: Sequence[str],
    outputs: OutputOptions,
    *,
    workers: int,
    claims: SlideClaims,
    console: Console,
) -> dict[str, Failure]:
    """Write the outputs that do not exist yet. Returns the slides that failed."""
    jobs = {}
    if outputs.any:
        for slide_id in slide_ids:
            job = _plan_drawing(folder.slide_folder(slide_id), outputs)
            if job is not None:
                jobs[slide_id] = job
    failed: dict[str, Failure] = {}
    if not jobs:
        return failed
    with SlideProgress(console, "drawing", slides=len(jobs)) as progress:
        for slide_id, result in process_slides(_run_drawing_job, jobs, workers=workers, claims=claims):
            if isinstance(result, Failure):
                failed[slide_id] = replace(result, stage="draw")
            progress.finish_slide(slide_id, failure=result.reason if isinstance(result, Failure) else "")
    return failed


def _plan_drawing(folder: Path, outputs: OutputOptions) -> _DrawingJob | None:
    """Return a job for the requested outputs that are missing or outdated, or None if all are up to date."""
    slide = PredictedSlide.read(folder)
    key = fingerprint(DRAWING_VERSION, slide.key, {target: asdict(each) for target, each in slide.targets.items()})
    existing = _find_drawn_files(folder, key)
    missing = tuple(name for name, wanted in asdict(outputs).items() if wanted and name not in existing)
    return _DrawingJob(folder, missing, key, existing) if missing else None


def _find_drawn_files(folder: Path, key: str) -> _Files:
    """Return the complete and up-to-date output files of a slide, by kind."""
    try:
        stored = json.loads((folder / _DRAWN_JSON).read_text("utf-8"))
        files = dict(stored["files"]) if stored["about"] == key else {}
    except (OSError, ValueError, LookupError, TypeError):
        return {}
    return {name: each for name, each in files.items() if all((folder / file).is_file() for file in each)}


def _run_drawing_job(job: _DrawingJob) -> None:
    """Write the outputs of one slide. Runs in a worker."""
    from tapfm.prediction.slide_outputs import write_slide_outputs

    remove_unfinished_files(job.folder)
    slide = PredictedSlide.read(job.folder)
    files = dict(job.existing)
    for name in job.missing:
        files[name] = [
            path.name for path in write_slide_outputs(slide, job.folder, **asdict(OutputOptions(**{name: True})))
        ]
    write_atomically(job.folder / _DRAWN_JSON, json.dumps({"about": job.key, "files": files}, sort_keys=True).encode())
