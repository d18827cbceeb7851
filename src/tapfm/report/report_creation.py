"""Create a report: read its sources, compute missing metrics, draw images and write the page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path

from rich.console import Console

from tapfm.errors import InputError
from tapfm.report.appendix import build_configuration_blocks, build_licence_blocks, build_sources_table
from tapfm.report.content import Collapsible, Page, PageSection
from tapfm.report.headline import build_cross_validation_headline, build_run_headline
from tapfm.report.heatmap_blocks import ImageBudget, ImageSelection
from tapfm.report.html_page import is_report_file, render_page
from tapfm.report.reported_cross_validation import build_cross_validation_section, summarise_cross_validation
from tapfm.report.reported_run import ReportedRun, describe_run
from tapfm.report.reported_study import ReportedStudy, read_study_sections
from tapfm.report.result_folders import check_source
from tapfm.report.run_comparison import build_comparison_blocks
from tapfm.report.sections import (
    build_cohort_section,
    build_failures_section,
    build_image_sections,
    build_predictions_section,
    build_results_section,
    build_training_section,
)
from tapfm.report.sources import ReportSources, describe_source_folders, read_report_sources
from tapfm.results.formatting import format_bytes
from tapfm.results.table import Table
from tapfm.runtime.files import write_atomically
from tapfm.runtime.messages import format_count
from tapfm.study.headline import build_study_headline, describe_choice
from tapfm.study.runs import list_models
from tapfm.version import __version__

_DIGEST_LENGTH = 16  # characters shown of a SHA-256


@dataclass(frozen=True)
class PageOptions:
    """Options for the content of the page."""

    evaluations: tuple[Path, ...] = ()
    predictions: tuple[Path, ...] = ()
    runs: tuple[str, ...] = ()  # names of the runs of a study to show in detail
    title: str | None = None
    image_selection: ImageSelection = field(default_factory=ImageSelection)
    max_image_bytes: int = 20_000_000
    resamples: int = 2000
    force: bool = False

    def __post_init__(self) -> None:
        for option, value, minimum in (
            ("--heatmaps", self.image_selection.max_heatmaps, 0),
            ("--gallery-tiles", self.image_selection.max_tiles, 0),
            ("--max-image-mb", self.max_image_bytes / 1e6, 0),
            ("--resamples", self.resamples, 1),
        ):
            if value < minimum:
                raise InputError(f"{option} is {value:g}, but must be at least {minimum}.")


@dataclass(frozen=True)
class WrittenReport:
    """A report file that was written."""

    path: Path
    bytes: int
    sources: Sequence[str]  # one line per folder that the report was created from, such as "run runs/first"
    notes: Sequence[str]  # warnings, such as missing results


def create_report(
    paths: Sequence[Path], out: Path, options: PageOptions, *, console: Console, today: date
) -> WrittenReport:
    """Write the report of a study folder, a cross-validation folder, or one or several run folders."""
    _check_output_file(out, force=options.force)
    for path in paths:
        check_source(path)
    sources = read_report_sources(
        paths,
        evaluations=options.evaluations,
        predictions=options.predictions,
        run_names=options.runs,
        resamples=options.resamples,
    )
    budget = ImageBudget(options.max_image_bytes)
    page = _build_page(sources, options, budget, console, today)
    html = render_page(page)
    try:
        write_atomically(out, html)
    except OSError as error:
        raise InputError(f"{out} cannot be written ({error}).", hint="Pass another file to --out.") from error
    return WrittenReport(out, len(html), describe_source_folders(sources), list(page.warnings))


def _check_output_file(out: Path, *, force: bool) -> None:
    """Raise InputError if `out` is a folder, or, without `force`, an existing file that is not a report."""
    if out.is_dir():
        raise InputError(f"{out} is a folder.", hint=f"Pass a file to --out, such as {out / 'report.html'}")
    if out.exists() and not force and not is_report_file(out):
        raise InputError(
            f"{out} already exists and is not a report of tapfm.",
            hint="Pass another file to --out, or add --force to overwrite it.",
        )


def _build_page(
    sources: ReportSources, options: PageOptions, budget: ImageBudget, console: Console, today: date
) -> Page:
    """Return the page with all sections that are not empty."""
    runs, study = sources.runs, sources.study
    sections: list[PageSection] = []
    if study is not None:
        sections += read_study_sections(study)
    elif sources.cross_validation is not None:
        sections.append(build_cross_validation_section(sources.cross_validation))
    elif len(runs) > 1:
        sections.append(PageSection("Comparison", build_comparison_blocks(runs, sources.results)))
    configuration = [
        *build_configuration_blocks(runs),
        Collapsible("Sources of this report", [_build_sources_table(sources)]),
    ]
    sections += [
        build_cohort_section(sources),
        build_training_section(sources),
        build_results_section(sources),
        build_predictions_section(sources),
        *build_image_sections(sources, options.image_selection, budget, console),
        build_failures_section(sources),
        PageSection("Licence of the encoder", build_licence_blocks(runs)),
        PageSection("Configuration and sources", configuration),
    ]
    return Page(
        subject=_describe_subject(sources),
        title=options.title or _default_title(sources),
        summary=_build_summary(sources),
        headline=_build_headline(sources),
        warnings=_list_warnings(sources, budget),
        sections=[section for section in sections if section.blocks],
        created=f"Created on {today.day} {today:%B %Y} with tapfm {__version__}.",
    )


def _describe_subject(sources: ReportSources) -> str:
    if sources.study is not None:
        return f"Report of the study {sources.study.config.name}"
    if sources.cross_validation is not None:
        return f"Report of the cross-validation {sources.cross_validation.name}"
    runs = "run" if len(sources.runs) == 1 else "runs"
    return f"Report of the {runs} {', '.join(run.name for run in sources.runs)}"


def _default_title(sources: ReportSources) -> str:
    """Return the targets."""
    if sources.study is not None:
        return ", ".join(sources.study.config.targets)
    return ", ".join(dict.fromkeys(target for run in sources.runs for target in run.targets))


def _build_summary(sources: ReportSources) -> list[str]:
    """Return paragraphs about all models of the headline: of a cross-validation, of a study, or of each run."""
    if sources.cross_validation is not None:
        return [summarise_cross_validation(sources.cross_validation)]
    if sources.study is not None:
        return _summarise_study(sources.study, sources.runs, sources.selection_reason)
    return [(f"{run.name}: " if len(sources.runs) > 1 else "") + describe_run(run) for run in sources.runs]


def _summarise_study(study: ReportedStudy, runs: Sequence[ReportedRun], selection_reason: str) -> list[str]:
    config = study.config
    compared = [
        *(f"the encoder{'s'[: len(config.encoders) > 1]} {', '.join(config.encoders)}",),
        *(f"the method{'s'[: len(config.methods) > 1]} {', '.join(config.methods)}",),
    ]
    models = format_count(len(list_models(config)), "model")
    lines = [
        f"The study compares {models} that predict {', '.join(config.targets)}, with {' and '.join(compared)}. "
        f"{len(study.finished_runs)} of {format_count(len(study.planned_runs), 'run')} finished."
    ]
    lines += describe_choice(study.headline_rows)
    if runs:
        lines.append(f"Shown in detail below: {', '.join(run.name for run in runs)} ({selection_reason}).")
    return lines


def _build_headline(sources: ReportSources) -> Table | None:
    """Return the AUCs of a cross-validation, of all models of a study or, without them, of the runs.

    None without results.
    """
    if sources.cross_validation is not None:
        each = sources.cross_validation
        return build_cross_validation_headline(each.name, each.runs[0], each.results)
    if sources.study is not None and (rows := sources.study.headline_rows):
        return build_study_headline(rows, with_choice=False)
    return build_run_headline(sources.runs, sources.results)


def _list_warnings(sources: ReportSources, budget: ImageBudget) -> list[str]:
    """Return the warnings at the top of the page."""
    warnings = [_describe_unfinished_run(run) for run in sources.runs if not run.finished]
    if sources.study is not None:
        warnings += _list_study_warnings(sources.study)
    for folder in [*sources.evaluations, *sources.predictions]:
        if not sources.is_reported(folder):
            warnings.append(f"{folder.path} contains results of {folder.describe_model()}, not of a reported run.")
    named_results = sources.named_results()
    if named_results and all(result.warning for _, result in named_results):
        warnings.append(
            "This report has no metrics on held-out slides. Its metrics include slides that were used to train the "
            "model, or to choose the epoch and the thresholds, so they are optimistic."
        )
    if budget.omitted:
        warnings.append(
            f"{format_count(budget.omitted, 'image')} omitted: images are limited to {format_bytes(budget.max_bytes)} "
            "in total (--max-image-mb)."
        )
    return warnings


def _describe_unfinished_run(run: ReportedRun) -> str:
    from tapfm.runs.folder import RunFolder  # imports torch

    done = len(run.history)
    progress = format_count(done, "epoch") if run.planned_epochs is None else f"{done} of {run.planned_epochs} epochs"
    command = RunFolder(run.folder).resume_command
    return (
        f"The run {run.name} is not finished ({progress}). This report shows the results so far. "
        f"To resume training: {command}"
    )


def _list_study_warnings(study: ReportedStudy) -> list[str]:
    warnings = []
    if study.finished_runs and not study.has_sections:
        warnings.append(
            f"The comparison of the models is missing, because {study.folder} has no study.json. "
            f"To create it: {study.tables_command}"
        )
    if any("chosen" not in row for row in study.auc_rows):
        warnings.append(
            f"The tables in {study.folder} have no validation AUCs, because an older version of tapfm wrote them. "
            f"To write them again: {study.tables_command}"
        )
    unfinished = len(study.planned_runs) - len(study.finished_runs)
    if unfinished:
        verb = "is" if unfinished == 1 else "are"
        warnings.append(f"{format_count(unfinished, 'run')} of the study {verb} not finished.")
    return warnings


def _build_sources_table(sources: ReportSources) -> Table:
    rows = [] if sources.study is None else [("study", sources.study.folder, "")]
    rows += [] if sources.cross_validation is None else [("cross-validation", sources.cross_validation.folder, "")]
    rows += [("run", run.folder, (run.best_checkpoint_sha256 or "-")[:_DIGEST_LENGTH]) for run in sources.runs]
    for kind, folders in (("evaluation", sources.evaluations), ("predictions", sources.predictions)):
        for folder in folders:
            digests = ", ".join(digest[:_DIGEST_LENGTH] for digest in sorted(folder.weights_digests()))
            rows.append((kind, folder.path, digests))
    return build_sources_table(rows)
