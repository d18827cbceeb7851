"""What a run is worth: from its evaluations, or measured here from what it predicted when it was finished."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tapfm.cohort.splits import TEST, TRAIN, VALIDATION
from tapfm.errors import InputError
from tapfm.evaluation.measures import MetricValue, choose_thresholds, compute_metrics
from tapfm.evaluation.predictions import Prediction, read_predictions
from tapfm.metrics.estimate import Estimate
from tapfm.report.finding import ResultFolder, read_json
from tapfm.report.result import MetricsByTarget, SplitResult
from tapfm.report.runs import ReportedRun
from tapfm.runtime.messages import counted
from tapfm.tasks.catalog import target_kinds

_MODEL = "model"
_ALL = "all"
_TITLES = {VALIDATION: "validation", TEST: "test"}
_CHOSEN_HERE = "The epoch and the thresholds were chosen on these slides, so that the figures flatter."
_FLATTERED = {  # splits of a run's own cohort
    VALIDATION: _CHOSEN_HERE,
    TRAIN: "The model learnt from these slides, so that the figures flatter.",
    _ALL: "The model learnt from some of these slides, and the epoch and the thresholds were chosen on others, so that "
    "the figures flatter.",
}


def _result_of_split(run: ReportedRun, split: str, resamples: int) -> SplitResult:
    """Measure what a finished run predicted of one of its splits."""
    predictions, validation = run.predictions[split], run.predictions.get(VALIDATION, ())
    chosen = choose_thresholds(validation, target_kinds(run.targets), run.unit) if validation else None
    measured = compute_metrics(predictions, target_kinds(run.targets), run.unit, chosen, resamples=resamples)
    where = f"{counted(len(validation), 'validation slide')} of the run" if validation else ""
    return SplitResult(
        title=_TITLES.get(split, split),
        about=f"{_size(predictions)} of the run's own cohort, all tiles of each, measured for this page from "
        f"predictions-{split}.csv. {_counting(run.unit, resamples)}",
        targets=run.targets,
        unit=run.unit,
        predictions=predictions,
        measured={(each.target, each.metric): each for each in measured},
        youden=dict(chosen.youden) if chosen else {},
        at_sensitivity=dict(chosen.chosen) if chosen else {},
        chosen_on=where or "the run has no predictions of validation slides",
        warning=_CHOSEN_HERE if split == VALIDATION else "",
        resamples=resamples,
    )


def _result_of_evaluation(found: ResultFolder, run: ReportedRun) -> SplitResult:
    """Take over what `tapfm evaluate` measured; of another model it says so."""
    metrics = read_json(found.path / "metrics.json")
    try:
        about, thresholds, models = metrics["evaluation"], metrics["thresholds"], metrics["models"]
        baselines = [name for name in models if name != _MODEL]
        predictions = read_predictions(found.path / "predictions.csv")
        own, split = about["cohort"] == "own", about["split"]
        title = _TITLES.get(split, split) if own else about["table"] + (f", {split}" if split else "")
        of = f"the run's own cohort ({about['table']})" if own else "another cohort"
        said = f"{_size(predictions)} of {of}, all tiles of each, by tapfm evaluate ({found.path.name})."
        model = "" if found.made_by(run.weights_sha256) else Path(found.model).name
        another = [f"By {found.maker}, not by the run {run.name}."] if model else []
        return SplitResult(
            title=f"{title}, by {model}" if model else title,
            about=f"{said} {_counting(about['unit'], about['resamples'])}",
            targets=tuple(about["targets"]),
            unit=about["unit"],
            predictions=predictions,
            measured=_measures(models[_MODEL][_ALL]),
            youden=thresholds["youden"] or {},
            at_sensitivity=thresholds["at_sensitivity"] or {},
            sensitivity=float(thresholds["sensitivity"]),
            chosen_on=thresholds["chosen_on"],
            warning=_FLATTERED.get(split, "") if own else "",
            baseline=_baseline_of(found.path) if baselines else (),
            baseline_measured=_measures(models[baselines[0]][_ALL]) if baselines else {},
            subgroups={name: _measures(each) for name, each in models[_MODEL].items() if name != _ALL},
            notes=(*another, *metrics.get("notes", ())),
            resamples=int(about["resamples"]),
            seed=int(about["seed"]),
            own=own,
            model=model,
        )
    except (LookupError, TypeError, ValueError) as error:
        raise InputError(
            f"{found.path / 'metrics.json'} is not as `tapfm evaluate` writes it ({error!r}).",
            hint="Evaluate again into another folder.",
        ) from error


def _baseline_of(folder: Path) -> list[Prediction]:
    """Read what colours say, where that was kept."""
    path = folder / "predictions-baseline.csv"
    return read_predictions(path) if path.is_file() else []


def _measures(written: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> MetricsByTarget:
    """Read one group of metrics.json."""
    return {
        (target, metric): MetricValue(
            target,
            metric,
            _estimate(found),
            _estimate(found["delong"]) if "delong" in found else None,
            int(found["units"]),
            found["positives"],
        )
        for target, of_target in written.items()
        for metric, found in of_target.items()
    }


def _estimate(written: Mapping[str, Any]) -> Estimate:
    """Read an estimate."""
    return Estimate(written["value"], written["low"], written["high"], written.get("why", ""))


def _size(predictions: Sequence[Prediction]) -> str:
    """Count slides and patients."""
    patients = len({(each.cohort, each.patient_id) for each in predictions})
    return f"{counted(len(predictions), 'slide')} of {counted(patients, 'patient')}"


def _counting(unit: str, resamples: int) -> str:
    """Say what counts once, and where intervals come from."""
    return f"Figures count each {unit} once; 95% intervals by {resamples:,} resamples of patients."


def read_run_results(run: ReportedRun, evaluations: list[ResultFolder], resamples: int) -> list[SplitResult]:
    """Gather the results of a run: test first, then other cohorts, what something was chosen on last.

    A split that was evaluated is not measured again.
    """
    evaluated = [(each.path.name, _result_of_evaluation(each, run)) for each in evaluations]
    own = {result.title for _, result in evaluated if result.own and not result.model}
    measured = [("", _result_of_split(run, split, resamples)) for split in run.predictions if _TITLES[split] not in own]
    return _told_apart(
        sorted([*measured, *evaluated], key=lambda each: (bool(each[1].warning), each[1].title != _TITLES[TEST]))
    )


def _told_apart(named: Sequence[tuple[str, SplitResult]]) -> list[SplitResult]:
    """Add their folders to the titles that several results have, as where a split was evaluated twice."""
    titles = [result.title for _, result in named]
    return [
        result
        if titles.count(result.title) == 1
        else replace(result, title=f"{result.title} ({folder})", group=result.title)
        for folder, result in named
    ]
