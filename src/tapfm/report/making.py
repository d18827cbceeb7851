"""Put a report together: read what there is, measure what is not measured yet, draw pictures, write one page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from datetime import date
from pathlib import Path

from rich.console import Console

from tapfm.errors import InputError
from tapfm.prediction.folder import PredictionFolder
from tapfm.prediction.slide_files import finder_of
from tapfm.report import background, cohorts, finding, tables
from tapfm.report import run_comparison as several
from tapfm.report import study as studies
from tapfm.report.content import Block, Fold, Note, Page, Section, SlideLine, Slides, Table
from tapfm.report.figures import result_figures, training_figures
from tapfm.report.finding import Found
from tapfm.report.numbers import duration, size, written
from tapfm.report.page import is_ours, render
from tapfm.report.result import Result
from tapfm.report.run_results import results_of
from tapfm.report.runs import ReportedRun, learnt_from, read_run
from tapfm.report.slide_pictures import Budget, Settings, gallery_blocks, heat_blocks
from tapfm.runtime.files import write_atomically
from tapfm.runtime.messages import command, counted
from tapfm.runtime.progress import Counter
from tapfm.version import __version__

SETS = {"test": "Test slides", "validation": "Validation slides"}
SAME_PROBABILITY = 1e-3
MOST_LINES = 20_000  # of the table of slides; a browser sorts them still


@dataclass(frozen=True)
class Asked:
    """What the page is to show besides the runs themselves."""

    evaluations: tuple[Path, ...] = ()
    predictions: tuple[Path, ...] = ()
    runs: tuple[str, ...] = ()  # of a study, those shown in full
    title: str | None = None
    pictures: Settings = field(default_factory=Settings)
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
class Made:
    """A page that was written, and what is in it."""

    path: Path
    bytes: int
    found: Sequence[str]  # what it is made from
    notes: Sequence[str]  # what it lacks


@dataclass(frozen=True)
class Gathered:
    """Everything that a page is made of."""

    runs: Sequence[ReportedRun]  # shown in full
    study: studies.ReportedStudy | None
    results: Mapping[str, Sequence[Result]]  # by run
    evaluations: Sequence[Found]
    predictions: Sequence[Found]
    why_these_runs: str = ""  # of a study

    @property
    def every_result(self) -> list[tuple[str, Result]]:
        """List the results with the names of their runs, which are empty where there is one run only."""
        several_runs = len(self.runs) > 1
        return [(run.name if several_runs else "", result) for run in self.runs for result in self.results[run.name]]


def make_report(sources: Sequence[Path], out: Path, asked: Asked, *, console: Console, today: date) -> Made:
    """Write the page of one study, or of one or several runs."""
    refuse_out(out, force=asked.force)
    for source in sources:
        finding.refuse_what_is_no_source(source)
    gathered = gather(sources, asked)
    budget = Budget(asked.most_bytes)
    page = page_of(gathered, asked, budget, console, today)
    written_page = render(page)
    try:
        write_atomically(out, written_page)
    except OSError as error:
        raise InputError(f"{out} cannot be written ({error}).", hint="Give another file to --out.") from error
    return Made(out, len(written_page), found_lines(gathered), list(page.warnings))


def refuse_out(out: Path, *, force: bool) -> None:
    """Refuse to write over what is no report."""
    if out.is_dir():
        raise InputError(f"{out} is a folder.", hint=f"Give a file to --out, such as {out / 'report.html'}")
    if out.exists() and not force and not is_ours(out):
        raise InputError(
            f"{out} is there already and is no report of tapfm.", hint="Give another name to --out, or add --force."
        )


def gather(sources: Sequence[Path], asked: Asked) -> Gathered:
    """Read runs or a study, and find what belongs to them."""
    of_studies = [source for source in sources if studies.is_study(source)]
    if of_studies and len(sources) > 1:
        raise InputError(f"{of_studies[0]} is a study.", hint="Give one study, or runs: a page shows one or the other.")
    if asked.runs and not of_studies:
        raise InputError("--run is for studies.", hint="Give the runs themselves: tapfm report runs/first runs/second")
    study = studies.read_study(of_studies[0]) if of_studies else None
    named_evaluations = [finding.named_evaluation(path) for path in asked.evaluations]
    named_predictions = [finding.named_predictions(path) for path in asked.predictions]
    why = ""
    if study is not None:
        made_by = {digest for found in [*named_evaluations, *named_predictions] for digest in found.digests()}
        runs, why = studies.runs_in_full(study, asked.runs, made_by)
    else:
        folders = list({source.resolve(): source for source in sources}.values())
        runs = distinct([read_run(folder) for folder in folders])
    results, evaluations, predictions = {}, list(named_evaluations), list(named_predictions)
    for number, run in enumerate(runs):
        of_run = [found for found in named_evaluations if belongs(found, run, runs, first=number == 0)]
        of_run = finding.once([*of_run, *finding.evaluations_of(run.folder, run.weights_sha256)])
        evaluations += of_run
        predictions += finding.predictions_of(run.folder, run.weights_sha256)
        results[run.name] = results_of(run, of_run, asked.resamples)
    return Gathered(runs, study, results, finding.once(evaluations), finding.once(predictions), why)


def belongs(found: Found, run: ReportedRun, runs: Sequence[ReportedRun], *, first: bool) -> bool:
    """Give an evaluation that was named to the run that made it; one of none of them (an ensemble) to the first."""
    if found.made_by(run.weights_sha256):
        return True
    return first and not any(found.made_by(each.weights_sha256) for each in runs)


def distinct(runs: Sequence[ReportedRun]) -> list[ReportedRun]:
    """Name runs by their folders, where two have the same name."""
    names = [run.name for run in runs]
    return [run if names.count(run.name) == 1 else replace(run, name=str(run.folder)) for run in runs]


def page_of(gathered: Gathered, asked: Asked, budget: Budget, console: Console, today: date) -> Page:
    """Put the sections in order; each is there only where there is something in it."""
    runs, study = gathered.runs, gathered.study
    sections: list[Section] = []
    if study is not None:
        if notes := studies.notes_of(study):
            sections.append(Section("About this study", notes))
        sections += studies.comparison_sections(study)
    elif len(runs) > 1:
        sections.append(Section("Comparison", several.side_by_side(runs, gathered.results)))
    sections += [
        Section("Slides and labels", cohort_blocks(gathered), "By split; positive slides of those with a label."),
        Section("Training", training_blocks(runs)),
        Section("Results", result_blocks(gathered), results_intro(gathered)),
        slides_section(gathered),
        *picture_sections(gathered, asked, budget, console),
        failures_section(gathered),
        Section("Licence of the encoder", background.licence_blocks(runs)),
        Section(
            "How it was made", [*background.made_blocks(runs), Fold("What this page is made from", [sources(gathered)])]
        ),
    ]
    return Page(
        kicker=kicker(gathered),
        title=asked.title or title_of(gathered),
        summary=summary(gathered),
        headline=headline(gathered),
        warnings=warnings(gathered, budget),
        sections=[section for section in sections if section.blocks],
        made=f"Made on {today.day} {today:%B %Y} by tapfm {__version__}.",
    )


def kicker(gathered: Gathered) -> str:
    """Say what is reported."""
    if gathered.study is not None:
        return f"Report of the study {gathered.study.config.name}"
    runs = "the run" if len(gathered.runs) == 1 else "the runs"
    return f"Report of {runs} {', '.join(run.name for run in gathered.runs)}"


def title_of(gathered: Gathered) -> str:
    """Name the page by what was learnt."""
    if gathered.study is not None:
        return ", ".join(gathered.study.config.targets)
    return ", ".join(dict.fromkeys(target for run in gathered.runs for target in run.targets)) or "A run"


def summary(gathered: Gathered) -> list[str]:
    """Say in a sentence or two what was learnt, from what, and how."""
    lines = []
    if gathered.study is not None:
        done, planned = len(gathered.study.finished), counted(len(gathered.study.planned), "run")
        chosen = f", {gathered.why_these_runs}" if gathered.why_these_runs else ""
        names = ", ".join(run.name for run in gathered.runs) or "none"
        lines.append(f"{done} of {planned} finished. In full below: {names}{chosen}.")
    for run in gathered.runs:
        of = f"{run.name}: " if len(gathered.runs) > 1 else ""
        slides, patients = learnt_from(run)
        how = (
            f"the aggregator {run.aggregator} on features of {run.encoder} as published"
            if run.method == "fixed"
            else f"{run.encoder} adapted by the method {run.method}, with the aggregator {run.aggregator}"
        )
        learnt = f"{', '.join(run.targets)} from {counted(slides, 'slide')} of {counted(patients, 'patient')}"
        text = f"{of}{learnt}: {how}."
        if run.best is not None:
            kept = f"Epoch {run.best['epoch']} of {len(run.history)} was kept"
            reached = run.validation_auc
            text += f" {kept}" + (f", with an AUC of {written(reached)} on validation." if reached is not None else ".")
        lines.append(text)
    return lines


def headline(gathered: Gathered) -> Table | None:
    """Show what matters most: AUCs on slides that nothing was chosen on."""
    if gathered.study is not None and (found := studies.study_headline(gathered.study)) is not None:
        return found
    every = gathered.every_result
    held_out = [(name, result) for name, result in every if not result.warning]
    return tables.headline(held_out or every) if every else None


def warnings(gathered: Gathered, budget: Budget) -> list[str]:
    """Say what a reader must know before anything else."""
    said = []
    for run in gathered.runs:
        if not run.finished:
            done = counted(len(run.history), "epoch")
            planned = f" of {run.epochs_planned}" if run.epochs_planned is not None else ""
            go_on = command("train", run.folder / "config.toml", "--out", run.folder, "--resume")
            said.append(
                f"The run {run.name} is not finished: {done}{planned} done. This is what there is. To go on: {go_on}"
            )
    if gathered.study is not None:
        missing = len(gathered.study.planned) - len(gathered.study.finished)
        if missing:
            said.append(f"{counted(missing, 'run')} of the study {'is' if missing == 1 else 'are'} not finished.")
    for found in [*gathered.evaluations, *gathered.predictions]:
        if not any(found.made_by(run.weights_sha256) for run in gathered.runs):
            said.append(f"{found.path} was made by {found.maker}.")
    every = gathered.every_result
    if every and all(result.warning for _, result in every):
        said.append("There are no figures of held-out slides: " + every[0][1].warning)
    if budget.left_out:
        said.append(
            f"{counted(budget.left_out, 'picture')} left out: the page holds {size(budget.most)} of them at most."
        )
    return said


def cohort_blocks(gathered: Gathered) -> list[Block]:
    """Count the slides of each run; runs of the same slides once."""
    blocks: list[Block] = []
    seen: list[object] = []
    for run in gathered.runs:
        found = cohorts.cohort_blocks(run, gathered.results[run.name])
        if run.slides and found not in seen:
            seen.append(found)
            blocks += [Fold(run.name, found, open=True)] if len(seen) > 1 else found
    return blocks


def training_blocks(runs: Sequence[ReportedRun]) -> list[Block]:
    """Draw the curves of each run."""
    blocks: list[Block] = []
    for number, run in enumerate(runs):
        if run.history:
            best = None if run.best is None else int(run.best["epoch"])
            figures = training_figures(run.history, best)
            seconds = sum(float(row.get("seconds", 0.0)) for row in run.history)
            note = Note(f"{counted(len(run.history), 'epoch')} in {duration(seconds)}, validation included.")
            blocks += [Fold(run.name, [figures, note], open=number == 0)] if len(runs) > 1 else [figures, note]
    return blocks


def results_intro(gathered: Gathered) -> str:
    """Say what the figures are of."""
    if not any(gathered.results.values()):
        return ""
    return "By set of slides. What cannot be computed is empty and says why."


def result_blocks(gathered: Gathered) -> list[Block]:
    """Show each set of slides: figures, then pictures of each target."""
    blocks: list[Block] = []
    for number, (name, result) in enumerate(gathered.every_result):
        inner: list[Block] = [Note(result.about)]
        inner += [Note(result.warning, "warning")] if result.warning else []
        inner += [Note(note, "warning") for note in result.notes]
        inner += [result_figures(result, target) for target in result.targets]
        inner += tables.metric_blocks(result)
        of = SETS.get(result.title, result.title)
        title = f"{of}, {name}" if name else of
        blocks.append(Fold(title, inner, auc_text(result), open=number == 0))
    return blocks


def auc_text(result: Result) -> str:
    """Write the AUC for the line that is seen while a part is shut."""
    found = result.measured.get((result.columns[-1], "auc"))
    if found is None or found.estimate.value is None:
        return ""
    mean = "mean " if len(result.targets) > 1 else ""
    return f"{mean}AUC {written(found.estimate.value)}"


def slides_section(gathered: Gathered) -> Section:
    """List what is said of each slide: of results, and of predictions that are in none of them."""
    lines = [line for run in gathered.runs for result in gathered.results[run.name] for line in lines_of(run, result)]
    seen = {(line.model, line.slide_id, line.target): line.probability for line in lines}
    for found in gathered.predictions:
        for line in predicted_lines(gathered.runs, found):
            evaluated = seen.get((line.model, line.slide_id, line.target))
            # another probability by the same weights is another slide of the same name, or other tiles
            if evaluated is None or abs(evaluated - line.probability) > SAME_PROBABILITY:
                lines.append(line)
    if not lines:
        return Section("Slides", [])
    intro = "Every slide and target. The mark in a bar is the threshold, chosen on validation slides."
    blocks: list[Block] = [shown := Slides(lines[:MOST_LINES])]
    if len(shown.places) == 1:  # the table has no column of it
        intro += f" All of them: {shown.places[0]}."
    if len(lines) > MOST_LINES:
        left = len(lines) - MOST_LINES
        blocks.append(Note(f"{left:,} lines are left out: the tables predictions.csv have all of them.", "warning"))
    return Section("Slides", blocks, intro)


def lines_of(run: ReportedRun, result: Result) -> list[SlideLine]:
    """List the slides of a result."""
    return [
        SlideLine(
            slide_id=each.slide_id,
            patient_id=each.patient_id,
            where=result.title,
            target=target,
            probability=probability,
            threshold=result.youden.get(target),
            label=each.labels.get(target),
            tiles=each.tiles,
            model=result.model or run.name,
        )
        for each in result.predictions
        for target, probability in each.probabilities.items()
    ]


def predicted_lines(runs: Sequence[ReportedRun], found: Found) -> list[SlideLine]:
    """List the slides of a folder of predictions."""
    model = next((run.name for run in runs if found.made_by(run.weights_sha256)), Path(found.model).name)
    return [
        SlideLine(
            slide_id=slide.slide_id,
            patient_id=slide.patient_id,
            where=found.path.name,
            target=target,
            probability=said.probability,
            threshold=said.threshold,
            label=said.label,
            tiles=slide.tiles,
            model=model,
        )
        for slide in PredictionFolder(found.path).slides()
        for target, said in slide.targets.items()
    ]


def picture_sections(gathered: Gathered, asked: Asked, budget: Budget, console: Console) -> list[Section]:
    """Draw maps and galleries of each folder of predictions."""
    finder = finder_of(asked.pictures.slides)
    maps: list[Block] = []
    galleries: list[Block] = []
    for found in gathered.predictions:
        folder = PredictionFolder(found.path)
        slides = folder.slides()
        of = [Note(f"From {found.path.name}:")] if len(gathered.predictions) > 1 else []
        if asked.pictures.heatmaps:
            maps_possible = sum(len(slide.targets) for slide in slides)
            most = min(asked.pictures.heatmaps, maps_possible)
            with closing(Counter(console, "drawing maps", most)) as counter:
                if drawn := heat_blocks(folder, slides, asked.pictures, finder, budget, counter):
                    maps += [*of, *drawn]
        if asked.pictures.tiles and (shown := gallery_blocks(folder, slides, asked.pictures, finder, budget)):
            galleries += [*of, *shown]
    intro = (
        "Each slide as it is, and with what each tile adds to the logit or how much it counts. Of every outcome the "
        "slides furthest from the threshold, wrong calls first."
    )
    tiles = "The tiles that moved the model most: they are what to look at before believing it."
    return [Section("Maps of slides", maps, intro), Section("Tiles that said most", galleries, tiles)]


def failures_section(gathered: Gathered) -> Section:
    """List what failed."""
    steps = [] if gathered.study is None else gathered.study.failed
    table = background.failures_table(gathered.runs, [*gathered.evaluations, *gathered.predictions], steps)
    return Section("What failed", [table] if table is not None else [])


def sources(gathered: Gathered) -> Table:
    """List the folders that the page is made from."""
    lines = [] if gathered.study is None else [("study", gathered.study.folder, "")]
    lines += [("run", run.folder, f"weights {(run.weights_sha256 or '-')[:16]}") for run in gathered.runs]
    for kind, folders in (("evaluation", gathered.evaluations), ("predictions", gathered.predictions)):
        lines += [(kind, found.path, f"by weights {', '.join(sorted(found.digests()))[:16]}") for found in folders]
    return background.sources_table(lines)


def found_lines(gathered: Gathered) -> list[str]:
    """Say what was found, for the one who typed the command."""
    lines = [] if gathered.study is None else [f"study {gathered.study.folder}"]
    lines += [f"run {run.folder}" for run in gathered.runs]
    lines += [f"evaluation {found.path}" for found in gathered.evaluations]
    return lines + [f"predictions {found.path}" for found in gathered.predictions]
