"""The pictures of predicted slides, drawn side by side, each slide in a process that may fail alone."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console

from tapfm.errors import TapfmError
from tapfm.prediction.folder import PredictedSlide, PredictionFolder
from tapfm.prediction.layers import DRAWING_VERSION
from tapfm.prediction.tables import Failed
from tapfm.runtime.files import fingerprint, write_atomically
from tapfm.runtime.output_folder import remove_unfinished
from tapfm.runtime.progress import Counter
from tapfm.runtime.workers import Died, run_isolated

DRAWN = ".drawn.json"  # in a slide's folder: what its pictures were made of, and their files by wish
Files = dict[str, list[str]]  # names, by wish


@dataclass(frozen=True)
class Wishes:
    """What is to be drawn of each slide."""

    heatmaps: bool = False
    geojson: bool = False

    @property
    def any(self) -> bool:
        """Say whether there is anything to draw."""
        return self.heatmaps or self.geojson


@dataclass(frozen=True)
class Job:
    """One slide to draw; travels to a worker."""

    folder: Path
    missing: tuple[str, ...]  # wishes
    about: str  # what decides how pictures look
    before: Files  # those that are there


def draw_slides(
    folder: PredictionFolder, slide_ids: Sequence[str], wishes: Wishes, workers: int, console: Console
) -> dict[str, Failed]:
    """Draw what is asked for and is not there yet; gives the slides of which it could not be drawn."""
    if not wishes.any:
        return {}
    jobs = [job for slide_id in slide_ids if (job := job_of(folder.folder_of(slide_id), wishes)) is not None]
    failed: dict[str, Failed] = {}
    if not jobs:
        return failed
    with (
        closing(Counter(console, "drawing", len(jobs))) as counter,
        closing(run_isolated(draw_one, jobs, max(1, min(workers, len(jobs))))) as results,
    ):
        for index, answer in results:
            if isinstance(answer, Died):
                answer = Failed("draw", answer.reason, "With less memory at work: --workers 1")
            if answer is not None:
                slide_id = jobs[index].folder.name
                failed[slide_id] = answer
                counter.failed(slide_id, answer.reason)
            counter.one_more()
    return failed


def job_of(folder: Path, wishes: Wishes) -> Job | None:
    """Say what there is to draw of a slide; nothing where all of it is there."""
    slide = PredictedSlide.read(folder)
    about = fingerprint(DRAWING_VERSION, slide.key, {target: asdict(said) for target, said in slide.targets.items()})
    before = drawn_before(folder, about)
    missing = tuple(name for name, wished in asdict(wishes).items() if wished and name not in before)
    return Job(folder, missing, about, before) if missing else None


def drawn_before(folder: Path, about: str) -> Files:
    """Say which pictures of a slide are there, all of a wish, and are still right."""
    try:
        noted = json.loads((folder / DRAWN).read_text("utf-8"))
        files = dict(noted["files"]) if noted["about"] == about else {}
    except (OSError, ValueError, LookupError, TypeError):
        return {}
    return {name: each for name, each in files.items() if all((folder / file).is_file() for file in each)}


def draw_one(job: Job) -> Failed | None:
    """Draw one slide; whatever goes wrong with it is its outcome. Runs in a worker."""
    from tapfm.prediction.pictures import draw_slide

    try:
        remove_unfinished(job.folder)
        slide = PredictedSlide.read(job.folder)
        files = dict(job.before)
        for name in job.missing:
            files[name] = [path.name for path in draw_slide(slide, job.folder, **asdict(Wishes(**{name: True})))]
        write_atomically(job.folder / DRAWN, json.dumps({"about": job.about, "files": files}, sort_keys=True).encode())
    except TapfmError as error:
        return Failed("draw", error.message, error.hint)
    except Exception as error:  # a defect of ours must not cost the other slides
        return Failed("draw", f"unexpected {type(error).__name__}: {error}", "Please report it.")
    return None
