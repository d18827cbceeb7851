"""Put a report together: read what there is, measure what is not measured yet, draw pictures, write one page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path

from rich.console import Console

from tapfm.errors import InputError
from tapfm.report import background, finding
from tapfm.report import run_comparison as several
from tapfm.report import study as studies
from tapfm.report.content import Collapsible, Page, PageSection
from tapfm.report.headline import headline_table
from tapfm.report.page import is_ours, render
from tapfm.report.runs import count_training_slides
from tapfm.report.sections import (
    cohort_blocks,
    failures_section,
    picture_sections,
    result_blocks,
    results_intro,
    slides_section,
    training_blocks,
)
from tapfm.report.slide_pictures import PictureBudget, PictureSettings
from tapfm.report.sources import ReportSources, describe_sources, read_report_sources
from tapfm.results.formatting import format_bytes, format_number
from tapfm.results.table import Table
from tapfm.runtime.files import write_atomically
from tapfm.runtime.messages import format_command, format_count
from tapfm.version import __version__


@dataclass(frozen=True)
class PageOptions:
    """What the page is to show besides the runs themselves."""

    evaluations: tuple[Path, ...] = ()
    predictions: tuple[Path, ...] = ()
    runs: tuple[str, ...] = ()  # of a study, those shown in full
    title: str | None = None
    pictures: PictureSettings = field(default_factory=PictureSettings)
    most_bytes: int = 20_000_000  # of pictures
    resamples: int = 2000
    force: bool = False

    def __post_init__(self) -> None:
        for option, value, least in (
            ("--heatmaps", self.pictures.heatmaps, 0),
            ("--tiles", self.pictures.tiles, 0),
            ("--most-mb", self.most_bytes / 1e6, 0),
            ("--resamples", self.resamples, 1),
        ):
            if value < least:
                raise InputError(f"{option} is {value:g}: it has to be at least {least}.")


@dataclass(frozen=True)
class WrittenReport:
    """A page that was written, and what is in it."""

    path: Path
    bytes: int
    found: Sequence[str]  # what it is made from
    notes: Sequence[str]  # what it lacks


def make_report(
    sources: Sequence[Path], out: Path, asked: PageOptions, *, console: Console, today: date
) -> WrittenReport:
    """Write the page of one study, or of one or several runs."""
    _refuse_out(out, force=asked.force)
    for source in sources:
        finding.refuse_what_is_no_source(source)
    gathered = read_report_sources(
        sources,
        evaluations=asked.evaluations,
        predictions=asked.predictions,
        run_names=asked.runs,
        resamples=asked.resamples,
    )
    budget = PictureBudget(asked.most_bytes)
    page = _page_of(gathered, asked, budget, console, today)
    written_page = render(page)
    try:
        write_atomically(out, written_page)
    except OSError as error:
        raise InputError(f"{out} cannot be written ({error}).", hint="Give another file to --out.") from error
    return WrittenReport(out, len(written_page), describe_sources(gathered), list(page.warnings))


def _refuse_out(out: Path, *, force: bool) -> None:
    """Refuse to write over what is no report."""
    if out.is_dir():
        raise InputError(f"{out} is a folder.", hint=f"Give a file to --out, such as {out / 'report.html'}")
    if out.exists() and not force and not is_ours(out):
        raise InputError(
            f"{out} is there already and is no report of tapfm.", hint="Give another name to --out, or add --force."
        )


def _page_of(gathered: ReportSources, asked: PageOptions, budget: PictureBudget, console: Console, today: date) -> Page:
    """Put the sections in order; each is there only where there is something in it."""
    runs, study = gathered.runs, gathered.study
    sections: list[PageSection] = []
    if study is not None:
        sections += studies.study_sections(study)
    elif len(runs) > 1:
        sections.append(PageSection("Comparison", several.side_by_side(runs, gathered.results)))
    sections += [
        PageSection("Slides and labels", cohort_blocks(gathered), "By split; positive slides of those with a label."),
        PageSection("Training", training_blocks(runs)),
        PageSection("Results", result_blocks(gathered), results_intro(gathered)),
        slides_section(gathered),
        *picture_sections(gathered, asked.pictures, budget, console),
        failures_section(gathered),
        PageSection("Licence of the encoder", background.licence_blocks(runs)),
        PageSection(
            "How it was made",
            [*background.made_blocks(runs), Collapsible("What this page is made from", [_sources_table(gathered)])],
        ),
    ]
    return Page(
        kicker=_kicker(gathered),
        title=asked.title or _title_of(gathered),
        summary=_summary(gathered),
        headline=_headline(gathered),
        warnings=_warnings(gathered, budget),
        sections=[section for section in sections if section.blocks],
        made=f"Made on {today.day} {today:%B %Y} by tapfm {__version__}.",
    )


def _kicker(gathered: ReportSources) -> str:
    """Say what is reported."""
    if gathered.study is not None:
        return f"Report of the study {gathered.study.config.name}"
    runs = "the run" if len(gathered.runs) == 1 else "the runs"
    return f"Report of {runs} {', '.join(run.name for run in gathered.runs)}"


def _title_of(gathered: ReportSources) -> str:
    """Name the page by what was learnt."""
    if gathered.study is not None:
        return ", ".join(gathered.study.config.targets)
    return ", ".join(dict.fromkeys(target for run in gathered.runs for target in run.targets)) or "A run"


def _summary(gathered: ReportSources) -> list[str]:
    """Say in a sentence or two what was learnt, from what, and how."""
    lines = []
    if gathered.study is not None:
        done, planned = len(gathered.study.finished), format_count(len(gathered.study.planned), "run")
        chosen = f", {gathered.why_these_runs}" if gathered.why_these_runs else ""
        names = ", ".join(run.name for run in gathered.runs) or "none"
        lines.append(f"{done} of {planned} finished. In full below: {names}{chosen}.")
    for run in gathered.runs:
        of = f"{run.name}: " if len(gathered.runs) > 1 else ""
        slides, patients = count_training_slides(run)
        how = (
            f"the aggregator {run.aggregator} on features of {run.encoder} as published"
            if run.method == "fixed"
            else f"{run.encoder} adapted by the method {run.method}, with the aggregator {run.aggregator}"
        )
        learnt = f"{', '.join(run.targets)} from {format_count(slides, 'slide')} of {format_count(patients, 'patient')}"
        text = f"{of}{learnt}: {how}."
        if run.best is not None:
            kept = f"Epoch {run.best['epoch']} of {len(run.history)} was kept"
            reached = run.validation_auc
            text += f" {kept}" + (
                f", with an AUC of {format_number(reached)} on validation." if reached is not None else "."
            )
        lines.append(text)
    return lines


def _headline(gathered: ReportSources) -> Table | None:
    """Show what matters most: AUCs on slides that nothing was chosen on."""
    if gathered.study is not None and (found := studies.study_headline(gathered.study)) is not None:
        return found
    every = gathered.every_result
    held_out = [(name, result) for name, result in every if not result.warning]
    return headline_table(held_out or every) if every else None


def _warnings(gathered: ReportSources, budget: PictureBudget) -> list[str]:
    """Say what a reader must know before anything else."""
    said = []
    for run in gathered.runs:
        if not run.finished:
            done = format_count(len(run.history), "epoch")
            planned = f" of {run.epochs_planned}" if run.epochs_planned is not None else ""
            go_on = format_command("train", run.folder / "config.toml", "--out", run.folder, "--resume")
            said.append(
                f"The run {run.name} is not finished: {done}{planned} done. This is what there is. To go on: {go_on}"
            )
    if gathered.study is not None:
        if gathered.study.finished and not gathered.study.has_sections:
            write = gathered.study.tables_command
            said.append(f"The comparison of the study is not shown: it has no study.json. To write it: {write}")
        missing = len(gathered.study.planned) - len(gathered.study.finished)
        if missing:
            said.append(f"{format_count(missing, 'run')} of the study {'is' if missing == 1 else 'are'} not finished.")
    for found in [*gathered.evaluations, *gathered.predictions]:
        if not any(found.made_by(run.weights_sha256) for run in gathered.runs):
            said.append(f"{found.path} was made by {found.maker}.")
    every = gathered.every_result
    if every and all(result.warning for _, result in every):
        said.append("There are no metrics of held-out slides: " + every[0][1].warning)
    if budget.left_out:
        said.append(
            f"{format_count(budget.left_out, 'picture')} left out: the page holds {format_bytes(budget.most)} at most."
        )
    return said


def _sources_table(gathered: ReportSources) -> Table:
    """List the folders that the page is made from."""
    lines = [] if gathered.study is None else [("study", gathered.study.folder, "")]
    lines += [("run", run.folder, f"weights {(run.weights_sha256 or '-')[:16]}") for run in gathered.runs]
    for kind, folders in (("evaluation", gathered.evaluations), ("predictions", gathered.predictions)):
        lines += [(kind, found.path, f"by weights {', '.join(sorted(found.digests()))[:16]}") for found in folders]
    return background.sources_table(lines)
