"""`tapfm tile`: a cohort's slides in parallel processes, each with its files, and a table of what became of them."""

from __future__ import annotations

import csv
import time
from collections.abc import Collection, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import cv2
from rich.console import Console
from rich.markup import escape
from rich.text import Text

from tapfm.cohort.manifest import SlideRow
from tapfm.errors import InputError, TapfmError, TileStoreError
from tapfm.runtime.files import fingerprint, identity_of, write_atomically
from tapfm.runtime.messages import grouped_advice
from tapfm.runtime.output_folder import locked, remove_unfinished
from tapfm.runtime.progress import SAY_EVERY_S, progress_bar
from tapfm.runtime.workers import Crew, Died, run_isolated
from tapfm.slides.opening import OUTPUT_FOLDERS, files_of, open_slide
from tapfm.slides.regions import GEOJSON_SUFFIXES, MASK_SUFFIXES, geojson_of
from tapfm.slides.scale import resolve_scale
from tapfm.tiles.contact_sheet import contact_sheet
from tapfm.tiles.grid import TileSpec, Verdict
from tapfm.tiles.outcomes import FAILURES, SUMMARY, Outcome, table
from tapfm.tiles.overlay import draw_overlay
from tapfm.tiles.store import LAYOUTS, Layout, TileSet, read_tiles, store_path, write_tiles
from tapfm.tiles.tiling import TILING_VERSION, tile_slide, why_empty

OUTLINES = "tissue"  # folder of our own GeoJSON
SAVE_EVERY_S = 5.0  # the table, during a run: a kill loses no more than that of it, and no slide
SHOWN = 10  # warnings at the end; the rest are in the table


@dataclass(frozen=True)
class Job:
    """One slide to tile; travels to a worker."""

    row: SlideRow
    spec: TileSpec
    layout: Layout
    folder: Path
    tissue_path: Path | None
    key: str  # fingerprint of everything that decides the tiles
    threads: int = 1  # more where there are fewer slides than cores


@dataclass
class Report:
    """All outcomes so far, in the order of the cohort."""

    folder: Path
    slide_ids: list[str]
    outcomes: dict[str, Outcome] = field(default_factory=dict)

    @property
    def failed(self) -> list[Outcome]:
        """Slides without tiles."""
        return [outcome for outcome in self.ordered if outcome.status == "failed"]

    @property
    def ordered(self) -> list[Outcome]:
        """Outcomes as the cohort lists its slides, whichever came first."""
        return [self.outcomes[slide_id] for slide_id in self.slide_ids if slide_id in self.outcomes]

    @property
    def tiles(self) -> int:
        """Tiles of all slides."""
        return sum(outcome.tiles for outcome in self.outcomes.values())

    def others(self) -> list[str]:
        """Files of tiles that no slide of the cohort owns."""
        owned = {store_path(self.folder, slide_id, layout).name for slide_id in self.slide_ids for layout in LAYOUTS}
        return sorted(path.name for path in (self.folder / "patches").glob("*.h5") if path.name not in owned)

    def save(self) -> None:
        """Write summary.csv, failures.csv and the contact sheet."""
        write_atomically(self.folder / "summary.csv", table(SUMMARY, self.ordered))
        write_atomically(self.folder / "failures.csv", table(FAILURES, self.failed))
        write_atomically(self.folder / "index.html", contact_sheet(self.ordered).encode())


def tile_cohort(
    rows: Sequence[SlideRow],
    folder: Path,
    spec: TileSpec,
    *,
    only: Collection[str] | None,
    layout: Layout,
    tissue: Path | None,
    workers: int,
    force: bool,
    console: Console,
    crew: Crew | None = None,
) -> Report:
    """Tile all slides (or those in `only`); those whose files are there, made with the same settings, are kept.

    A `crew` is of processes that answer with `tile_one`, if some were hired before.
    """
    drawn = drawn_files(rows, tissue, folder, only)
    jobs = [make_job(row, folder, spec, layout, drawn.get(row.slide_id)) for row in rows]
    report = Report(folder, [row.slide_id for row in rows])
    if tissue is not None:
        console.print(f"Tissue drawn by hand: {len(drawn):,} of {len(rows):,} slides; the others by {spec.tissue}.")
    refuse_foreign_files(jobs)
    with locked(folder, "tapfm tile"):
        remove_unfinished(folder, *(folder / name for name in OUTPUT_FOLDERS))
        seconds = {row["slide_id"]: number(row["seconds"]) for row in records(folder / "summary.csv", "seconds")}
        failures = {row["slide_id"]: row for row in records(folder / "failures.csv", "reason", "what_to_do")}
        todo = []
        for job in jobs:
            slide_id = job.row.slide_id
            chosen = only is None or slide_id in only
            done = None if chosen and force else outcome_before(job)
            if done is not None:
                report.outcomes[slide_id] = replace(done, seconds=seconds.get(slide_id))
            elif chosen:
                todo.append(job)
            elif slide_id in failures:
                reason, what_to_do = (failures[slide_id][name] for name in ("reason", "what_to_do"))
                report.outcomes[slide_id] = Outcome(slide_id, "failed", reason, what_to_do=what_to_do)
            else:
                report.outcomes[slide_id] = Outcome(slide_id, "not tiled", "no tiles with these settings")
        if recalled := sum(outcome.status == "ok" for outcome in report.outcomes.values()):
            console.print(f"{recalled:,} of {len(jobs):,} slides are tiled already with these settings.")
        try:
            threads = max(1, workers // max(1, len(todo)))
            run([replace(job, threads=threads) for job in todo], report, workers, console, crew)
        finally:
            report.save()
    return report


def run(jobs: Sequence[Job], report: Report, workers: int, console: Console, crew: Crew | None = None) -> None:
    """Work through the jobs, saying how far it is."""
    start = saved = said = time.monotonic()
    done = tiles = failures = 0
    with progress_bar(console) as progress, closing(run_isolated(tile_one, jobs, workers, crew)) as results:
        bar = progress.add_task("tiling", total=len(jobs), speed="")
        for index, answer in results:
            slide_id = jobs[index].row.slide_id
            outcome = crashed(jobs[index], answer) if isinstance(answer, Died) else answer
            report.outcomes[slide_id] = outcome
            done += 1
            tiles += outcome.tiles
            failures += outcome.status == "failed"
            now = time.monotonic()
            speed = f"{done / (now - start):.2f} slides/s, {tiles / (now - start):,.0f} tiles/s"
            failed = f", {failures:,} failed" if failures else ""
            progress.update(bar, advance=1, speed=f"{tiles:,} tiles, {speed}{failed}")
            if outcome.status == "failed":
                progress.console.print(
                    Text.assemble(("failed ", "red"), f"{slide_id}: {outcome.reason}"), soft_wrap=True
                )
            if now - saved > SAVE_EVERY_S:
                report.save()
                saved = now
            if not console.is_terminal and now - said > SAY_EVERY_S:
                console.print(f"{done:,} of {len(jobs):,} slides, {tiles:,} tiles, {speed}{failed}")
                said = now


def make_job(row: SlideRow, folder: Path, spec: TileSpec, layout: Layout, tissue_path: Path | None) -> Job:
    """Make the job of a slide; its key covers everything that its files depend on."""
    try:
        files = [identity_of(file) for file in [*files_of(row.path), *([tissue_path] if tissue_path else [])]]
    except OSError:
        files = []  # it will fail by itself, and say how
    key = fingerprint(TILING_VERSION, asdict(spec), layout, row.slide_id, row.mpp, files)
    return Job(row, spec, layout, folder, tissue_path, key)


def refuse_foreign_files(jobs: Sequence[Job]) -> None:
    """Stop before tiles that another tool wrote would be written over."""
    paths = [(store_path(job.folder, job.row.slide_id, job.layout), job.row.slide_id) for job in jobs]
    foreign = [path.name for path, slide_id in paths if path.exists() and not may_replace(path, slide_id)]
    if foreign:
        raise InputError(
            f"{jobs[0].folder}/patches has {len(foreign):,} files that tapfm did not write, such as {foreign[0]}.",
            hint="Give another folder with --out.",
        )


def drawn_files(
    rows: Sequence[SlideRow], given: Path | None, folder: Path, only: Collection[str] | None
) -> dict[str, Path]:
    """Find the tissue that a person drew: a file for each id in a folder, or one file for a single slide."""
    if given is None:
        return {}
    ours = (folder / OUTLINES).resolve()
    if ours in (given.resolve(), given.resolve().parent):
        raise InputError(
            f"{given} is where tapfm writes its own outlines: yours would be overwritten.",
            hint=f"Copy what you corrected to another folder, and give that: cp -r {folder / OUTLINES} edited",
        )
    slide_ids = [row.slide_id for row in rows if only is None or row.slide_id in only]
    if given.is_file():
        if len(slide_ids) != 1:
            raise InputError(
                f"--tissue-mask {given} is one file, for {len(slide_ids):,} slides.",
                hint="Give a folder with a file for each slide, named by its id; or one slide: --only ID",
            )
        return {slide_ids[0]: given}
    suffixes = (*GEOJSON_SUFFIXES, *MASK_SUFFIXES)
    found: dict[str, Path] = {}
    for row in rows:
        files = [path for suffix in suffixes if (path := given / f"{row.slide_id}{suffix}").exists()]
        if len(files) > 1:
            names = " and ".join(file.name for file in files)
            raise InputError(f"{given} has {names}: which is meant?", hint="Keep one file for each slide.")
        if files:
            found[row.slide_id] = files[0]
    if not found:
        raise InputError(
            f"{given} has no file for any of the slides.",
            hint=f"Files are named by the slide's id, such as {rows[0].slide_id}.geojson or {rows[0].slide_id}.png",
        )
    return found


def outcome_before(job: Job) -> Outcome | None:
    """Recall a slide that was tiled already, if everything it depends on is as it was."""
    path = store_path(job.folder, job.row.slide_id, job.layout)
    if not (path.exists() and overlay_path(job).exists()):
        return None
    try:
        tiles = read_tiles(path)
    except TileStoreError:
        return None
    if tiles.fingerprint != job.key or not tiles.summary:
        return None
    try:
        return Outcome(**tiles.summary)
    except TypeError:
        return None  # a version that knew other columns


def overlay_path(job: Job) -> Path:
    """Say where a slide's picture is."""
    return job.folder / "overlays" / f"{job.row.slide_id}.png"


def outline_path(job: Job) -> Path:
    """Say where a slide's outline is."""
    return job.folder / OUTLINES / f"{job.row.slide_id}.geojson"


def tile_one(job: Job) -> Outcome:
    """Tile one slide and write its files; whatever goes wrong with it is its outcome. Runs in a worker."""
    cv2.setNumThreads(job.threads)  # slides run side by side
    start = time.monotonic()
    try:
        remove_results(job)
        outcome = tile_and_write(job)
    except TapfmError as error:
        outcome = failure(job, error.message, error.hint)
    except Exception as error:  # a defect of ours must not cost the other slides
        outcome = failure(job, f"unexpected {type(error).__name__}: {error}", "Please report it.")
    return replace(outcome, seconds=round(time.monotonic() - start, 2))


def tile_and_write(job: Job) -> Outcome:
    """Do the work of `tile_one`."""
    slide_id = job.row.slide_id
    with closing(open_slide(job.row.path)) as slide:
        facts = slide.facts
        scale = resolve_scale(facts, job.row.mpp)
        tiled = tile_slide(slide, scale, job.spec, job.tissue_path, job.threads)
        write_atomically(overlay_path(job), draw_overlay(slide, tiled, scale, slide_id))
    write_atomically(outline_path(job), geojson_of(tiled.tissue, tiled.thumbnail, facts, slide_id))
    counts = tiled.counts
    outcome = Outcome(
        slide_id=slide_id,
        status="ok",
        mpp=scale.mpp,
        mpp_source=scale.source,
        tissue=job.spec.tissue if job.tissue_path is None else "drawn",
        achieved_mpp=job.spec.achieved_mpp(scale.mpp),
        tiles=counts[Verdict.KEPT],
        tissue_mm2=tiled.tissue_mm2,
        removed_background=counts[Verdict.BACKGROUND],
        removed_padding=counts[Verdict.PADDING],
        removed_pen=counts[Verdict.PEN],
        removed_blur=counts[Verdict.BLUR],
        removed_unreadable=counts[Verdict.UNREADABLE],
        warnings="; ".join(tiled.warnings),
    )
    if not len(tiled.kept):
        error = why_empty(tiled, job.row.path.name, job.spec)
        return replace(outcome, status="failed", reason=error.message, what_to_do=error.hint)
    tiles = TileSet(
        slide_id=slide_id,
        positions=tiled.kept,
        side_px0=tiled.side_px0,
        tile_px=job.spec.tile_px,
        target_mpp=job.spec.mpp,
        slide_mpp=scale.mpp,
        overlap_px=job.spec.overlap_px,
        size_px0=(facts.width_px0, facts.height_px0),
        fingerprint=job.key,
        summary=asdict(outcome),
        spec=asdict(job.spec),
    )
    write_tiles(job.folder, tiles, job.layout)
    return outcome


def failure(job: Job, reason: str, what_to_do: str) -> Outcome:
    """Record a slide that failed."""
    return Outcome(job.row.slide_id, "failed", " ".join(reason.split()), what_to_do=" ".join(what_to_do.split()))


def crashed(job: Job, died: Died) -> Outcome:
    """Record a slide whose process died."""
    remove_results(job)
    advice = f"Look at it alone: tapfm inspect {job.row.path}. If the machine ran out of memory: fewer --workers."
    return failure(job, died.reason, advice)


def remove_results(job: Job) -> None:
    """Remove what other settings made of a slide, so that it is never taken for the result of these."""
    overlay_path(job).unlink(missing_ok=True)
    outline_path(job).unlink(missing_ok=True)
    for layout in LAYOUTS:
        path = store_path(job.folder, job.row.slide_id, layout)
        if path.exists() and may_replace(path, job.row.slide_id):
            path.unlink()


def may_replace(path: Path, slide_id: str) -> bool:
    """Say whether a file is ours and of that slide, or nobody's as it cannot be read.

    x_patches.h5 is of the slide x in one layout, of x_patches in the other.
    """
    try:
        tiles = read_tiles(path)
    except TileStoreError:
        return True
    return tiles.fingerprint is not None and tiles.slide_id == slide_id


def records(path: Path, *names: str) -> list[dict[str, str]]:
    """Recall a table of an earlier run; nothing where there is none, or it was edited beyond recognition."""
    try:
        with path.open(newline="", encoding="utf-8") as file:
            rows = list(csv.DictReader(file))
    except (OSError, ValueError, csv.Error):
        return []
    return [row for row in rows if all(row.get(name) is not None for name in ("slide_id", *names))]


def number(text: str) -> float | None:
    """Read a number, or nothing."""
    try:
        return float(text)
    except ValueError:
        return None


def show(report: Report, console: Console) -> None:
    """Say what was done, what was not, and where to look."""
    ordered, folder = report.ordered, escape(str(report.folder))
    warned = [outcome for outcome in ordered if outcome.warnings]
    tiled = sum(outcome.status == "ok" for outcome in ordered)
    console.print(f"Tiled {tiled:,} of {len(ordered):,} slides: {report.tiles:,} tiles.")
    if others := report.others():
        console.print(
            f"{len(others):,} more files in {folder}/patches are not of this cohort, such as {escape(others[0])}"
        )
    for outcome in warned[:SHOWN]:
        console.print(Text(f"warning {outcome.slide_id}: {outcome.warnings}", "yellow"))
    if len(warned) > SHOWN:
        console.print(f"... and {len(warned) - SHOWN:,} more warnings, in {folder}/summary.csv")
    if report.failed:
        console.print(f"[bold red]{len(report.failed):,} failed:[/] {folder}/failures.csv")
        for line in grouped_advice((outcome.slide_id, outcome.what_to_do) for outcome in report.failed):
            console.print(Text(f"  {line}"))
    console.print(f"Look at them: {folder}/index.html")
