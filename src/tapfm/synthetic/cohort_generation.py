"""Generate the slides of a synthetic cohort in worker processes; write slides, ground truth and tables."""

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
from tapfm.runtime.cohort_job import Failure, process_slides
from tapfm.runtime.csv_files import csv_text
from tapfm.runtime.files import fingerprint, write_atomically
from tapfm.runtime.output_folder import lock_folder, remove_unfinished_files
from tapfm.runtime.progress import SlideProgress
from tapfm.slides.opening import CONTACT_SHEET, open_slide
from tapfm.synthetic.cohort_plan import (
    ASPECT_RATIO,
    SYNTHETIC_VERSION,
    CohortName,
    CohortSpec,
    PlannedSlide,
    plan_cohort,
)
from tapfm.synthetic.section import MAP_MPP
from tapfm.synthetic.slide_file import encode_svs
from tapfm.synthetic.slide_rendering import render_slide
from tapfm.synthetic.truth import (
    SIGNAL_THRESHOLD,
    SlideTruth,
    encode_tile_table,
    encode_truth_geojson,
    encode_truth_image,
    read_truth,
    tile_coverage_rows,
    truth_metadata,
)
from tapfm.tiles.grid import TileSpec
from tapfm.version import __version__

_SETTINGS_FILE = "synth.json"
_SLIDE_FOLDERS: dict[CohortName, str] = {"development": "slides", "external": "external"}
COHORT_TABLES: dict[CohortName, str] = {"development": "cohort.csv", "external": "external.csv"}
_TRUTH_FOLDER = "truth"
_SLIDE_PATH_PATTERN = re.compile(r"(slides/S|external/X)\d{3,}\.svs")
README = "README.md"
_MAX_CONTACT_SHEET_SLIDES = 40
_PEAK_BYTES_PER_PIXEL = 55  # peak memory per slide pixel while a slide is generated, with a safety margin
_FAILURE_HINT = (
    "Finished slides are saved. To resume, run the same command again, without --force. If the machine ran out of "
    "memory, use --workers 1, or another folder with a smaller --tiles-per-slide."
)


@dataclass(frozen=True)
class _GenerationJob:
    """One slide that a worker process generates."""

    planned_slide: PlannedSlide
    folder: Path  # cohort folder

    @property
    def relative_path(self) -> str:
        """Path of the slide relative to the cohort folder, as in the cohort table."""
        return f"{_SLIDE_FOLDERS[self.planned_slide.cohort]}/{self.planned_slide.slide_id}.svs"

    @property
    def slide_path(self) -> Path:
        return self.folder / self.relative_path


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
    """Return the settings of a cohort from the options of `tapfm synth`. `CohortSpec` describes most of them.

    prevalence: values of --prevalence. P sets the prevalence of all targets; TARGET=P sets the prevalence of one target
    and takes precedence over P.
    """
    spec = CohortSpec(slides, external, task, difficulty, seed, tiles, fractions)
    names = {each.name.lower(): each.name for each in spec.targets}
    prevalence_by_target: dict[str, float] = {}
    for text in sorted(prevalence, key=lambda each: "=" in each):
        name, _, value = text.rpartition("=")
        try:
            number = float(value)
        except ValueError as error:
            raise InputError(
                f"--prevalence {text}: '{value}' is not a number.",
                hint=f"Pass a fraction between 0 and 1: --prevalence 0.4 or --prevalence {spec.targets[0].name}=0.4",
            ) from error
        chosen = [names.get(name.lower(), name)] if name else list(names.values())
        prevalence_by_target |= dict.fromkeys(chosen, number)
    return replace(spec, prevalence=prevalence_by_target)


def generate_cohort(
    spec: CohortSpec, folder: Path, *, workers: int, force: bool, console: Console
) -> list[PlannedSlide]:
    """Generate a cohort in `folder` and return the plan of each slide.

    Slides that are already complete are kept, unless `force` is set.
    """
    slides = plan_cohort(spec)
    jobs = [_GenerationJob(each, folder) for each in slides]
    settings_key = fingerprint(SYNTHETIC_VERSION, asdict(spec))
    outdated_slides = _list_outdated_slides(folder, settings_key, allow_outdated=force)
    with lock_folder(folder, "tapfm synth", "choose another folder"), SlideClaims(folder) as claims:
        try:
            remove_unfinished_files(folder, *(folder / name for name in (*_SLIDE_FOLDERS.values(), _TRUTH_FOLDER)))
            _remove_outdated_cohort(folder, outdated_slides)
            settings = {"key": settings_key, "settings": asdict(spec), "slides": [job.relative_path for job in jobs]}
            write_atomically(folder / _SETTINGS_FILE, json.dumps(settings, indent=1).encode())
            todo = [job for job in jobs if force or not _is_slide_complete(job)]
            if len(todo) < len(jobs):
                console.print(
                    f"{len(jobs) - len(todo):,} of {len(jobs):,} slides already exist and are kept. "
                    "Use --force to generate all slides again."
                )
            _generate_slides(todo, _limit_workers(todo, workers, console), claims, console)
            _write_cohort_files(spec, slides, folder)
        except OSError as error:
            raise TapfmError(
                f"{folder} cannot be written ({error}).", hint=f"Check free disk space and permissions. {_FAILURE_HINT}"
            ) from error
    return slides


def _is_slide_complete(job: _GenerationJob) -> bool:
    """Return whether all files of a slide exist, and its SVS file and ground truth (PNG and JSON) can be read."""
    truth_paths = _get_truth_paths(job.folder, job.planned_slide.slide_id).values()
    if not all(path.is_file() for path in (job.slide_path, *truth_paths)):
        return False
    try:
        read_truth(job.folder / _TRUTH_FOLDER, job.planned_slide.slide_id)
        with closing(open_slide(job.slide_path)) as slide:
            slide.thumbnail(64)
    except TapfmError:
        return False
    return True


def _limit_workers(jobs: Sequence[_GenerationJob], workers: int, console: Console) -> int:
    """Return the number of workers that fit into the free memory: at least 1, at most `workers`.

    Return `workers` itself if it is 0 or if the operating system does not report the free memory.
    """
    if not workers or not jobs or not hasattr(os, "sysconf") or "SC_AVPHYS_PAGES" not in os.sysconf_names:
        return workers
    free_bytes = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    max_area_um2 = max(job.planned_slide.section.width_um * job.planned_slide.section.height_um for job in jobs)
    max_pixels = max_area_um2 / min(job.planned_slide.scanner.mpp for job in jobs) ** 2
    allowed_workers = max(1, min(workers, int(free_bytes / (_PEAK_BYTES_PER_PIXEL * max_pixels))))
    if allowed_workers < workers:
        console.print(f"Using {allowed_workers} instead of {workers} workers, because free memory is limited.")
    return allowed_workers


def _list_outdated_slides(folder: Path, settings_key: str, *, allow_outdated: bool) -> list[str]:
    """Return the paths of all slides of an outdated cohort, relative to its folder; without such a cohort, no paths.

    A cohort is outdated if the key in its synth.json is not `settings_key`. Raise InputError if the cohort is outdated
    and `allow_outdated` is not set, or if the folder contains files but no cohort.
    """
    if folder.exists() and not folder.is_dir():
        raise InputError(f"{folder} is a file.", hint="Use a new folder, or one that tapfm synth created.")
    try:
        if not folder.exists() or not any(not path.name.startswith(".") for path in folder.iterdir()):
            return []
        text = (folder / _SETTINGS_FILE).read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise InputError(
            f"{folder} is not empty and was not created by tapfm synth.", hint="Use a new folder."
        ) from error
    except OSError as error:
        raise InputError(
            f"{folder} cannot be read ({error}).", hint="Check its permissions, or use another folder."
        ) from error
    try:
        settings = json.loads(text)
        existing_key, slide_paths = str(settings["key"]), [str(path) for path in settings["slides"]]
        if not all(_SLIDE_PATH_PATTERN.fullmatch(path) for path in slide_paths):
            raise ValueError("'slides' contains an unexpected path")
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(
            f"{folder / _SETTINGS_FILE} is damaged ({type(error).__name__}: {error}).",
            hint="Use a new folder, or delete this one and run the command again.",
        ) from error
    if existing_key == settings_key:
        return []
    if not allow_outdated:
        raise InputError(
            f"{folder} contains a cohort that was generated with other settings or by another version of tapfm.",
            hint="Use another folder, or replace this cohort with --force.",
        )
    return slide_paths


def _remove_outdated_cohort(folder: Path, outdated_slides: Sequence[str]) -> None:
    """Delete the outdated slides, their ground truth, the tables, the contact sheet and the README; keep other files.

    If `slides`, `external` or `truth` is a symbolic link, the files of slides in this folder are kept.
    """
    for slide_path in outdated_slides:
        for path in (folder / slide_path, *_get_truth_paths(folder, Path(slide_path).stem).values()):
            if not path.parent.is_symlink():
                path.unlink(missing_ok=True)
    if outdated_slides:
        for name in (*COHORT_TABLES.values(), CONTACT_SHEET, README, f"{_TRUTH_FOLDER}/tiles.csv"):
            (folder / name).unlink(missing_ok=True)


def _get_truth_paths(folder: Path, slide_id: str) -> dict[str, Path]:
    """Return the paths of a slide's ground truth files by suffix. The files may not exist yet."""
    return {suffix: folder / _TRUTH_FOLDER / f"{slide_id}.{suffix}" for suffix in ("png", "json", "geojson")}


def _generate_slides(jobs: Sequence[_GenerationJob], workers: int, claims: SlideClaims, console: Console) -> None:
    """Generate slides in worker processes. Raise TapfmError at the first slide that fails."""
    by_id = {job.planned_slide.slide_id: job for job in jobs}
    with SlideProgress(console, "generating", slides=len(jobs)) as progress:
        for slide_id, result in process_slides(_generate_and_write_slide, by_id, workers=workers, claims=claims):
            if isinstance(result, Failure):
                raise TapfmError(
                    f"Slide {slide_id} could not be generated: {result.reason.rstrip('.')}.", hint=_FAILURE_HINT
                )
            progress.finish_slide(slide_id)


def _generate_and_write_slide(job: _GenerationJob) -> None:
    """Generate one slide and write its files. Runs in a worker."""
    cv2.setNumThreads(1)  # one thread per worker, because workers generate slides in parallel
    planned_slide = job.planned_slide
    rendered = render_slide(planned_slide)
    truth_paths = _get_truth_paths(job.folder, planned_slide.slide_id)
    scan = rendered.scan
    artefacts = {"Fold": scan.fold_mask, "Out of focus": scan.blur_mask, "Pen": scan.pen_mask}
    write_atomically(truth_paths["png"], encode_truth_image(rendered.truth))
    write_atomically(truth_paths["json"], json.dumps(truth_metadata(rendered.truth)).encode())
    write_atomically(truth_paths["geojson"], encode_truth_geojson(rendered.truth, artefacts, planned_slide.slide_id))
    # the SVS file is written last: where it exists, the ground truth was written too
    write_atomically(job.slide_path, encode_svs(scan.pixels, planned_slide.scanner, planned_slide.slide_id))


def _write_cohort_files(spec: CohortSpec, slides: Sequence[PlannedSlide], folder: Path) -> None:
    """Write the cohort tables, the table of tiles, the contact sheet and the README."""
    targets = [each.name for each in spec.targets]
    for cohort, name in COHORT_TABLES.items():
        cohort_slides = [each for each in slides if each.cohort == cohort]
        if cohort_slides:
            write_atomically(folder / name, _encode_cohort_table(cohort_slides, targets, folder))
    truths = {each.slide_id: read_truth(folder / _TRUTH_FOLDER, each.slide_id) for each in slides}
    rows = [row for each in slides for row in tile_coverage_rows(each.slide_id, truths[each.slide_id], targets)]
    write_atomically(folder / _TRUTH_FOLDER / "tiles.csv", encode_tile_table(rows, targets))
    write_atomically(
        folder / CONTACT_SHEET, _encode_contact_sheet([_GenerationJob(each, folder) for each in slides], truths)
    )
    write_atomically(folder / README, _format_readme(spec, targets).encode())


def _encode_cohort_table(slides: Sequence[PlannedSlide], targets: Sequence[str], folder: Path) -> bytes:
    columns = ["slide_id", "path", "patient_id", "cohort", "split", *targets, "site", "scanner", "objective"]
    rows = []
    for each in slides:
        cells = [each.slide_id, _GenerationJob(each, folder).relative_path, each.patient_id, each.cohort, each.split]
        labels = [each.labels[name] for name in targets]
        rows.append([*cells, *labels, each.site, each.scanner.name, f"{each.scanner.objective}x"])
    return csv_text(columns, rows).encode()


def _encode_contact_sheet(jobs: Sequence[_GenerationJob], truths: Mapping[str, SlideTruth]) -> bytes:
    """Encode a JPEG with a thumbnail and an example tile of each slide.

    If there are more than _MAX_CONTACT_SHEET_SLIDES slides, the JPEG shows that many, evenly spaced in `jobs`.
    """
    shown = [jobs[i] for i in np.unique(np.linspace(0, len(jobs) - 1, _MAX_CONTACT_SHEET_SLIDES).astype(int))]
    columns, text_height_px, gap_px, side_px = 4, 18, 8, TileSpec().tile_px
    cells = []
    for job in shown:
        truth = truths[job.planned_slide.slide_id]
        x, y, side_px0 = _find_example_tile(truth, job.planned_slide.positive_targets)
        with closing(open_slide(job.slide_path)) as slide:
            cells.append((slide.thumbnail(round(side_px * ASPECT_RATIO)).pixels, slide.read(x, y, side_px0, side_px)))
    width_px = max(thumbnail.shape[1] for thumbnail, _ in cells) + side_px + 2 * gap_px
    height_px = side_px + text_height_px + gap_px
    sheet = Image.new("RGB", (columns * width_px, -(-len(cells) // columns) * height_px), "white")
    draw = ImageDraw.Draw(sheet)
    for index, (job, (thumbnail, tile)) in enumerate(zip(shown, cells, strict=True)):
        x, y = index % columns * width_px, index // columns * height_px
        sheet.paste(Image.fromarray(thumbnail), (x, y + text_height_px))
        sheet.paste(Image.fromarray(tile), (x + thumbnail.shape[1] + gap_px, y + text_height_px))
        planned_slide = job.planned_slide
        draw.text(
            (x + 4, y + 3),
            f"{planned_slide.slide_id}  {planned_slide.scanner.objective}x  {planned_slide.site}",
            "black",
        )
        draw.text((x + thumbnail.shape[1] + gap_px, y + 3), "  ".join(planned_slide.positive_targets), (0, 120, 50))
    file = io.BytesIO()
    sheet.save(file, "JPEG", quality=88)
    return file.getvalue()


def _find_example_tile(truth: SlideTruth, positive_targets: Sequence[str]) -> tuple[int, int, int]:
    """Return (x, y, side), in level-0 pixels, of the tile that the focus of a positive target covers most.

    On a slide without positive targets, return the tile that the epithelium covers most.
    """
    positions, side_px0 = truth.default_tile_grid()
    signals = [truth.signal_coverage(name, positions, side_px0) for name in positive_targets]
    coverage = np.max(signals, axis=0) if signals else truth.coverage(truth.epithelium, positions, side_px0)
    best = int(np.argmax(coverage))
    return int(positions[best, 0]), int(positions[best, 1]), side_px0


def _format_readme(spec: CohortSpec, targets: Sequence[str]) -> str:
    settings = [f"--slides {spec.slides} --external {spec.external} --task {spec.task} --difficulty {spec.difficulty}"]
    settings += [f"--seed {spec.seed} --tiles-per-slide {spec.tiles} --fractions {' '.join(map(str, spec.fractions))}"]
    settings += [f"--prevalence {name}={value}" for name, value in spec.prevalence.items()]
    return f"""# Synthetic cohort

Generated by `tapfm synth OUT {" ".join(settings)}` (tapfm {__version__}).

The slides are computer-generated and contain no patient data. The targets ({", ".join(targets)}) have the
names of genes, but results on this cohort say nothing about real mutations.

| file | contents |
|---|---|
| `cohort.csv`, `external.csv` | slides, patients, splits, labels, site, scanner |
| `slides/`, `external/` | SVS files |
| `{CONTACT_SHEET}` | thumbnails of slides, each with an example tile |
| `truth/ID.png` | compartments (types of tissue) and foci as pixel values, {MAP_MPP:g} um per pixel |
| `truth/ID.json` | meaning of each pixel value of `truth/ID.png`; size and um per pixel of the slide |
| `truth/ID.geojson` | outlines of foci, folds, pen marks and regions out of focus, for QuPath |
| `truth/tiles.csv` | tiles of 224 px at 0.5 um per pixel: fraction of tissue, fraction with the signal of each target |

ID is the slide ID. A focus is a part of the epithelium whose nuclei have the signal of a target, or only resemble it.
A tile counts as containing the signal of a target if its fraction in `tiles.csv` is at least {SIGNAL_THRESHOLD:g}.
"""
