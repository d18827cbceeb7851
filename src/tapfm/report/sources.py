"""What a page is made of: runs or a study, and the evaluations and predictions that belong to them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tapfm.errors import InputError
from tapfm.report import finding
from tapfm.report import study as studies
from tapfm.report.finding import ResultFolder
from tapfm.report.result import EvaluatedSlideSet
from tapfm.report.run_results import read_run_results
from tapfm.report.runs import ReportedRun, read_run


@dataclass(frozen=True)
class ReportSources:
    """Everything that a page is made of."""

    runs: Sequence[ReportedRun]  # shown in full
    study: studies.ReportedStudy | None
    results: Mapping[str, Sequence[EvaluatedSlideSet]]  # by run
    evaluations: Sequence[ResultFolder]
    predictions: Sequence[ResultFolder]
    why_these_runs: str = ""  # of a study

    @property
    def every_result(self) -> list[tuple[str, EvaluatedSlideSet]]:
        """List the results with the names of their runs, which are empty where there is one run only."""
        several_runs = len(self.runs) > 1
        return [(run.name if several_runs else "", result) for run in self.runs for result in self.results[run.name]]


def read_report_sources(
    sources: Sequence[Path],
    *,
    evaluations: Sequence[Path],
    predictions: Sequence[Path],
    run_names: Sequence[str],
    resamples: int,
) -> ReportSources:
    """Read runs or a study, and find what belongs to them.

    run_names: of a study, the runs that are shown in full; where there are none, `runs_in_full` chooses.
    resamples: for the intervals of what is not measured yet.
    """
    of_studies = [source for source in sources if studies.is_study(source)]
    if of_studies and len(sources) > 1:
        raise InputError(f"{of_studies[0]} is a study.", hint="Give one study, or runs: a page shows one or the other.")
    if run_names and not of_studies:
        raise InputError("--run is for studies.", hint="Give the runs themselves: tapfm report runs/first runs/second")
    study = studies.read_study(of_studies[0]) if of_studies else None
    named_evaluations = [finding.named_evaluation(path) for path in evaluations]
    named_predictions = [finding.named_predictions(path) for path in predictions]
    why = ""
    if study is not None:
        made_by = {digest for found in [*named_evaluations, *named_predictions] for digest in found.digests()}
        runs, why = studies.runs_in_full(study, run_names, made_by)
    else:
        folders = list({source.resolve(): source for source in sources}.values())
        runs = _distinct([read_run(folder) for folder in folders])
    results, of_evaluations, of_predictions = {}, list(named_evaluations), list(named_predictions)
    for number, run in enumerate(runs):
        of_run = [found for found in named_evaluations if _belongs(found, run, runs, first=number == 0)]
        of_run = finding.once([*of_run, *finding.evaluations_of(run.folder, run.weights_sha256)])
        of_evaluations += of_run
        of_predictions += finding.predictions_of(run.folder, run.weights_sha256)
        results[run.name] = read_run_results(run, of_run, resamples)
    return ReportSources(runs, study, results, finding.once(of_evaluations), finding.once(of_predictions), why)


def _belongs(found: ResultFolder, run: ReportedRun, runs: Sequence[ReportedRun], *, first: bool) -> bool:
    """Give an evaluation that was named to the run that made it; one of none of them (an ensemble) to the first."""
    if found.made_by(run.weights_sha256):
        return True
    return first and not any(found.made_by(each.weights_sha256) for each in runs)


def _distinct(runs: Sequence[ReportedRun]) -> list[ReportedRun]:
    """Name runs by their folders, where two have the same name."""
    names = [run.name for run in runs]
    return [run if names.count(run.name) == 1 else replace(run, name=str(run.folder)) for run in runs]


def describe_sources(gathered: ReportSources) -> list[str]:
    """Say what was found, for the one who typed the command."""
    lines = [] if gathered.study is None else [f"study {gathered.study.folder}"]
    lines += [f"run {run.folder}" for run in gathered.runs]
    lines += [f"evaluation {found.path}" for found in gathered.evaluations]
    return lines + [f"predictions {found.path}" for found in gathered.predictions]
