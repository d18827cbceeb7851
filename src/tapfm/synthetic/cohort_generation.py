"""Paint the slides of a cohort in worker processes, with its tables and its ground truth."""

from __future__ import annotations

import io
import json
import os
import re
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import cv2
import numpy as np
from PIL import Image, ImageDraw
from rich.console import Console

from tapfm.errors import InputError, TapfmError
from tapfm.runtime.claims import SlideClaims
from tapfm.runtime.cohort_job import RESUME_HINT, Failure, run_slides
from tapfm.runtime.csv_files import csv_text
from tapfm.runtime.files import fingerprint, write_atomically
from tapfm.runtime.output_folder import lock_folder, remove_unfinished
from tapfm.runtime.progress import SlideProgress
from tapfm.slides.opening import CONTACT_SHEET, open_slide
from tapfm.synthetic.cohort import ASPECT_RATIO, SYNTHETIC_VERSION, CohortName, CohortSpec, PlannedSlide, plan_cohort
from tapfm.synthetic.section import MAP_MPP
from tapfm.synthetic.slide_file import encode_svs
from tapfm.synthetic.slides import render_slide
from tapfm.synthetic.truth import (
    SIGNAL_THRESHOLD,
    SlideTruth,
    encode_tile_table,
    encode_truth_geojson,
    encode_truth_image,
    read_truth,
    tile_rows,
    truth_metadata,
)
from tapfm.tiles.grid import TileSpec
from tapfm.version import __version__

_SETTINGS = "synth.json"
_SLIDES: dict[CohortName, str] = {"development": "slides", "external": "external"}  # folders
COHORT_TABLES: dict[CohortName, str] = {"development": "cohort.csv", "external": "external.csv"}
_TRUTH = "truth"
_SLIDE_NAME = re.compile(r"(slides/S|external/X)\d{3,}\.svs")
README = "README.md"
_MAX_SHOWN = 40  # slides on the contact sheet
_BYTES_PER_PIXEL = 55  # of a slide that is being painted: a little more than the peak of 20x and 40x slides
_FAILURE_HINT = f"{RESUME_HINT} If memory was short: --workers 1, or fewer --tiles."


@dataclass(frozen=True)
class _GenerationJob:
    """One slide to paint; travels to a worker."""

    planned: PlannedSlide
    folder: Path

    @property
    def name(self) -> str:
        """Its slide as the tables name it, from the cohort's folder on."""
        return f"{_SLIDES[self.planned.cohort]}/{self.planned.slide_id}.svs"

    @property
    def slide_path(self) -> Path:
        """Where its slide goes."""
        return self.folder / self.name


def parse_cohort_spec(
    slides: int,
    external: int,
    task: str,
    difficulty: str,
    prevalence: Sequence[str],
    fractions: tuple[float, float, float],
    tiles: int,
    seed: int,
) -> CohortSpec:
    """Read what was typed; a prevalence without a target's name is for all that have none of their own."""
    plain = CohortSpec(slides, external, task, difficulty, seed, tiles, fractions)
    names = {each.name.lower(): each.name for each in plain.targets}
    asked: dict[str, float] = {}
    for text in sorted(prevalence, key=lambda each: "=" in each):
        name, _, value = text.rpartition("=")
        try:
            number = float(value)
        except ValueError as error:
            raise InputError(
                f"--prevalence {text} is not understood.",
                hint=f"A share between 0 and 1: --prevalence 0.4, or --prevalence {plain.targets[0].name}=0.4",
            ) from error
        asked |= {names.get(name.lower(), name): number} if name else dict.fromkeys(names.values(), number)
    return replace(plain, prevalence=asked)


def generate_cohort(
    spec: CohortSpec, folder: Path, *, workers: int, force: bool, console: Console
) -> list[PlannedSlide]:
    """Paint all slides that do not exist yet, then write the tables."""
    planned = plan_cohort(spec)
    jobs = [_GenerationJob(each, folder) for each in planned]
    key = fingerprint(SYNTHETIC_VERSION, asdict(spec))
    earlier = _check_folder(folder, key, force=force)
    with lock_folder(folder, "tapfm synth", "give another folder"), SlideClaims(folder) as claims:
        try:
            remove_unfinished(folder, *(folder / name for name in (*_SLIDES.values(), _TRUTH)))
            _remove_earlier_cohort(folder, earlier)
            about_itself = {"key": key, "settings": asdict(spec), "slides": [job.name for job in jobs]}
            write_atomically(folder / _SETTINGS, json.dumps(about_itself, indent=1).encode())
            todo = [job for job in jobs if force or not _is_complete(job)]
            if len(todo) < len(jobs):
                console.print(f"{len(jobs) - len(todo):,} of {len(jobs):,} slides are already painted.")
            _generate_slides(todo, _limit_workers(todo, workers, console), claims, console)
            _write_tables(spec, planned, folder)
        except OSError as error:
            raise TapfmError(f"The cohort could not be written ({error}).", hint=_FAILURE_HINT) from error
    return planned


def _is_complete(job: _GenerationJob) -> bool:
    """Say whether a slide and its truth are there and can be read."""
    files = _truth_files(job.folder, job.planned.slide_id).values()
    if not all(path.is_file() for path in (job.slide_path, *files)):
        return False
    try:
        read_truth(job.folder / _TRUTH, job.planned.slide_id)
        with closing(open_slide(job.slide_path)) as slide:
            slide.thumbnail(64)
    except TapfmError:
        return False
    return True


def _limit_workers(jobs: Sequence[_GenerationJob], workers: int, console: Console) -> int:
    """Lower the number of processes where memory would not do for the largest slides side by side."""
    if not workers or not jobs or not hasattr(os, "sysconf") or "SC_AVPHYS_PAGES" not in os.sysconf_names:
        return workers
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    largest_um2 = max(job.planned.section.width_um * job.planned.section.height_um for job in jobs)
    pixels = largest_um2 / min(job.planned.scanner.mpp for job in jobs) ** 2
    fitting = max(1, min(workers, int(free / (_BYTES_PER_PIXEL * pixels))))
    if fitting < workers:
        console.print(f"Free memory is enough for {fitting} of {workers} processes side by side.")
    return fitting


def _check_folder(folder: Path, key: str, *, force: bool) -> list[str]:
    """Refuse a folder that holds something else; list the slides of an earlier cohort that has to go."""
    if folder.exists() and not folder.is_dir():
        raise InputError(f"{folder} is a file.", hint="Give a folder that is new, or that tapfm synth painted.")
    try:
        if not folder.exists() or not any(not path.name.startswith(".") for path in folder.iterdir()):
            return []
        text = (folder / _SETTINGS).read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise InputError(
            f"{folder} is not empty, and was not painted by tapfm synth.", hint="Give a new folder."
        ) from error
    except OSError as error:
        raise InputError(f"{folder} cannot be read ({error}).", hint="Give another folder.") from error
    try:
        before = json.loads(text)
        key_before, names = str(before["key"]), [str(name) for name in before["slides"]]
        if not all(_SLIDE_NAME.fullmatch(name) for name in names):
            raise ValueError("a name that tapfm synth never gave")
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(
            f"{folder / _SETTINGS} is damaged: {error}.",
            hint="Give a new folder, or remove this one and paint it anew.",
        ) from error
    if key_before == key:
        return []
    if not force:
        raise InputError(
            f"{folder} holds a cohort that was painted with other settings, or by another version.",
            hint="Give another folder, or paint it anew with --force.",
        )
    return names


def _remove_earlier_cohort(folder: Path, names: Sequence[str]) -> None:
    """Remove an earlier cohort's slides, truth and tables, and nothing else."""
    for name in names:
        for path in (folder / name, *_truth_files(folder, Path(name).stem).values()):
            if not path.parent.is_symlink():
                path.unlink(missing_ok=True)
    if names:
        for name in (*COHORT_TABLES.values(), CONTACT_SHEET, README, f"{_TRUTH}/tiles.csv"):
            (folder / name).unlink(missing_ok=True)


def _truth_files(folder: Path, slide_id: str) -> dict[str, Path]:
    """Name the files of a slide's truth."""
    return {suffix: folder / _TRUTH / f"{slide_id}.{suffix}" for suffix in ("png", "json", "geojson")}


def _generate_slides(jobs: Sequence[_GenerationJob], workers: int, claims: SlideClaims, console: Console) -> None:
    """Paint slides in worker processes. A slide that fails ends the command: the cohort would lack it."""
    by_id = {job.planned.slide_id: job for job in jobs}
    with SlideProgress(console, "painting", slides=len(jobs)) as progress:
        for slide_id, result in run_slides(_generate_and_write, by_id, workers=workers, claims=claims):
            if isinstance(result, Failure):
                raise TapfmError(f"Slide {slide_id} could not be painted: {result.reason}.", hint=_FAILURE_HINT)
            progress.finish_slide(slide_id)


def _generate_and_write(job: _GenerationJob) -> None:
    """Paint one slide and write its files, the slide last: one that exists is complete. Runs in a worker."""
    cv2.setNumThreads(1)  # slides are what runs side by side
    planned = job.planned
    painted = render_slide(planned)
    files = _truth_files(job.folder, planned.slide_id)
    accidents = {"Fold": painted.scan.fold, "Out of focus": painted.scan.blurred, "Pen": painted.scan.pen}
    write_atomically(files["png"], encode_truth_image(painted.truth))
    write_atomically(files["json"], json.dumps(truth_metadata(painted.truth)).encode())
    write_atomically(files["geojson"], encode_truth_geojson(painted.truth, accidents, planned.slide_id))
    write_atomically(job.slide_path, encode_svs(painted.scan.pixels, planned.scanner, planned.slide_id))


def _write_tables(spec: CohortSpec, planned: Sequence[PlannedSlide], folder: Path) -> None:
    """Write the tables of slides, the table of tiles, a sheet of thumbnails, and what all this is."""
    targets = [each.name for each in spec.targets]
    for cohort, name in COHORT_TABLES.items():
        rows = [each for each in planned if each.cohort == cohort]
        if rows:
            write_atomically(folder / name, _cohort_table(rows, targets, folder))
    truths = {each.slide_id: read_truth(folder / _TRUTH, each.slide_id) for each in planned}
    rows_of_tiles = [row for each in planned for row in tile_rows(each.slide_id, truths[each.slide_id], targets)]
    write_atomically(folder / _TRUTH / "tiles.csv", encode_tile_table(rows_of_tiles, targets))
    write_atomically(folder / CONTACT_SHEET, _contact_sheet([_GenerationJob(each, folder) for each in planned], truths))
    write_atomically(folder / README, _format_readme(spec, targets).encode())


def _cohort_table(slides: Sequence[PlannedSlide], targets: Sequence[str], folder: Path) -> bytes:
    """Return a cohort table as `tapfm tile` and `tapfm train` read it."""
    columns = ["slide_id", "path", "patient_id", "cohort", "split", *targets, "site", "scanner", "objective"]
    rows = []
    for each in slides:
        about = [each.slide_id, _GenerationJob(each, folder).name, each.patient_id, each.cohort, each.split]
        labels = [each.labels[name] for name in targets]
        rows.append([*about, *labels, each.site, each.scanner.name, f"{each.scanner.objective}x"])
    return csv_text(columns, rows).encode()


def _contact_sheet(jobs: Sequence[_GenerationJob], truths: Mapping[str, SlideTruth]) -> bytes:
    """Put slides on one picture, each with a tile at full size; of a large cohort some of them."""
    shown = [jobs[i] for i in np.unique(np.linspace(0, len(jobs) - 1, _MAX_SHOWN).astype(int))]
    columns, words_px, gap_px, side_px = 4, 18, 8, TileSpec().tile_px
    cells = []
    for job in shown:
        truth = truths[job.planned.slide_id]
        x, y, side_px0 = _find_example_tile(truth, job.planned.positive)
        with closing(open_slide(job.slide_path)) as slide:
            cells.append((slide.thumbnail(round(side_px * ASPECT_RATIO)).pixels, slide.read(x, y, side_px0, side_px)))
    width_px = max(thumbnail.shape[1] for thumbnail, _ in cells) + side_px + 2 * gap_px
    height_px = side_px + words_px + gap_px
    sheet = Image.new("RGB", (columns * width_px, -(-len(cells) // columns) * height_px), "white")
    draw = ImageDraw.Draw(sheet)
    for index, (job, (thumbnail, tile)) in enumerate(zip(shown, cells, strict=True)):
        x, y = index % columns * width_px, index // columns * height_px
        sheet.paste(Image.fromarray(thumbnail), (x, y + words_px))
        sheet.paste(Image.fromarray(tile), (x + thumbnail.shape[1] + gap_px, y + words_px))
        planned = job.planned
        draw.text((x + 4, y + 3), f"{planned.slide_id}  {planned.scanner.objective}x  {planned.site}", "black")
        draw.text((x + thumbnail.shape[1] + gap_px, y + 3), "  ".join(planned.positive), (0, 120, 50))
    file = io.BytesIO()
    sheet.save(file, "JPEG", quality=88)
    return file.getvalue()


def _find_example_tile(truth: SlideTruth, positive: Sequence[str]) -> tuple[int, int, int]:
    """Find the tile that shows most of what is planted, or else of nests: its corner and side."""
    positions, side_px0 = truth.default_grid()
    planted = [truth.signal(name, positions, side_px0) for name in positive]
    shown = np.max(planted, axis=0) if planted else truth.coverage(truth.epithelium, positions, side_px0)
    best = int(np.argmax(shown))
    return int(positions[best, 0]), int(positions[best, 1]), side_px0


def _format_readme(spec: CohortSpec, targets: Sequence[str]) -> str:
    """Say in the folder itself what is in it."""
    settings = [f"--slides {spec.slides} --external {spec.external} --task {spec.task} --difficulty {spec.difficulty}"]
    settings += [f"--seed {spec.seed} --tiles {spec.tiles} --fractions {' '.join(map(str, spec.fractions))}"]
    settings += [f"--prevalence {name}={value}" for name, value in spec.prevalence.items()]
    return f"""# A painted cohort

Made by `tapfm synth OUT {" ".join(settings)}` (tapfm {__version__}).

No patient, no tissue: every pixel was drawn. The names of genes ({", ".join(targets)}) are names of targets, nothing
learned here says anything about them.

| file | what |
|---|---|
| `cohort.csv`, `external.csv` | slides, patients, splits, labels, site, scanner |
| `slides/`, `external/` | SVS files |
| `{CONTACT_SHEET}` | all slides at a glance |
| `truth/ID.png` | compartments and foci, {MAP_MPP:g} um per pixel; values in `truth/ID.json` |
| `truth/ID.geojson` | foci, folds, pen, parts out of focus, as annotations of QuPath |
| `truth/tiles.csv` | tiles of 224 px at 0.5 um per pixel: which part is tissue, which part shows each target |

A tile is said to carry a target's signal when at least {SIGNAL_THRESHOLD:g} of it shows it.
"""
