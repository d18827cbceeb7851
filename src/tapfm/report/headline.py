"""Table at the top of a report of runs: the main metric (AUC) of each run on each set of slides."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tapfm.evaluation.metric_values import MACRO
from tapfm.report.reported_run import ReportedRun
from tapfm.report.run_comparison import ResultsByRun, have_same_slides
from tapfm.report.run_results import VALIDATION_TITLE
from tapfm.report.slide_set_results import SlideSetResults
from tapfm.results.table import Table
from tapfm.study.headline import METHOD_DETAILS, OPTIMISTIC, HeadlineRow, MeasuredAuc, build_headline
from tapfm.study.validation import RUN_CHOICE_RULE, ValidationScore, choose_model

_ResultsBySet = Mapping[str, SlideSetResults]  # by title of the set of slides


def build_run_headline(runs: Sequence[ReportedRun], results: ResultsByRun) -> Table | None:
    """Return a row for each run and target, with a column for validation and for each set of held-out slides.

    Without held-out slides, the columns are all sets of slides. If several runs have the same validation slides, the
    one that is chosen on them is marked. Results of other models have their own rows. None without results.
    """
    held_out_only = any(not result.warning for run in runs for result in results[run.name])
    models: list[tuple[str, str, _ResultsBySet]] = []  # name, description and results
    for run in runs:
        shown = [each for each in results[run.name] if not (each.warning and held_out_only) or _is_validation(each)]
        for model in dict.fromkeys(each.model for each in shown):
            description = f"not the run {run.name}" if model else _describe_method(run)
            by_set = _group_by_set([each for each in shown if each.model == model], first_only=len(runs) > 1)
            models.append((model or run.name, description, by_set))
    if not models:
        return None
    chosen, note = _choose_run(runs, results) if len(runs) > 1 else (None, "")
    shown_results = [each.results for _, _, by_set in models for each in by_set.values()]
    targets = dict.fromkeys(target for each in shown_results for target in each.targets_and_mean)
    rows = [
        HeadlineRow(name, target, measured, description, chosen=name == chosen)
        for target in targets
        for name, description, by_set in models
        if (measured := {title: auc for title, each in by_set.items() if (auc := _measure(each, target)) is not None})
    ]
    metrics = dict.fromkeys(each.metric_names[each.main_metrics[0]] for each in shown_results)
    optimistic = OPTIMISTIC if any(row.validation_auc is not None for row in rows) else ""
    return build_headline(rows, [each for each in (note, optimistic) if each], metric=" or ".join(metrics))


def build_cross_validation_headline(name: str, run: ReportedRun, results: Sequence[SlideSetResults]) -> Table | None:
    """Return a row for each target, with a column for the out-of-fold slides and for each other cohort.

    run: one of the folds, which have the same method.
    """
    targets = dict.fromkeys(target for each in results for target in each.results.targets_and_mean)
    rows = [
        HeadlineRow(name, target, measured, _describe_method(run))
        for target in targets
        if (measured := {each.title: auc for each in results if (auc := _measure(each, target)) is not None})
    ]
    metrics = dict.fromkeys(each.results.metric_names[each.results.main_metrics[0]] for each in results)
    return build_headline(rows, [], metric=" or ".join(metrics)) if rows else None


def _is_validation(result: SlideSetResults) -> bool:
    return result.own_cohort and not result.model and _base_title(result) == VALIDATION_TITLE


def _base_title(result: SlideSetResults) -> str:
    """Return the title of the set of slides without its folder and model."""
    title = result.title_without_folder or result.title
    return title.removesuffix(f", by {result.model}") if result.model else title


def _group_by_set(results: Sequence[SlideSetResults], *, first_only: bool) -> dict[str, SlideSetResults]:
    """Return the results of a model by title. Of several with the same title, keep the first, or add their folders."""
    titles = [_base_title(each) for each in results]
    found: dict[str, SlideSetResults] = {}
    for title, result in zip(titles, results, strict=True):
        name = title if first_only or titles.count(title) == 1 else result.title
        found.setdefault(name[:1].upper() + name[1:] if result.own_cohort else name, result)
    return found


def _measure(result: SlideSetResults, target: str) -> MeasuredAuc | None:
    """Return the main metric for a target, with the number of patients and slides that have a label."""
    value = result.metrics.get((target, result.results.main_metrics[0]))
    if value is None:
        return None
    labelled = [
        each
        for each in result.predictions
        if any(label is not None for name, label in each.labels.items() if target in (name, MACRO))
    ]
    return MeasuredAuc(value.estimate, len({(each.cohort, each.patient_id) for each in labelled}), len(labelled))


def _describe_method(run: ReportedRun) -> str:
    method = METHOD_DETAILS.get(run.method, run.method.upper())
    return ", ".join(part for part in (method, run.encoder, run.aggregator) if part)


def _choose_run(runs: Sequence[ReportedRun], results: ResultsByRun) -> tuple[str | None, str]:
    """Return the run with the best result on validation slides, and the rule; or None and the reason."""
    validation = {run.name: next((each for each in results[run.name] if _is_validation(each)), None) for run in runs}
    known = {name: each for name, each in validation.items() if each is not None}
    if len(known) < len(validation) or not have_same_slides(list(known.values())):
        return None, "No run is chosen, because the runs do not have the same validation slides, labels and targets."
    scores = {}
    for run in runs:
        measured = _measure(known[run.name], known[run.name].results.targets_and_mean[-1])
        if measured is not None:
            loss = None if run.best_epoch_row is None else run.best_epoch_row.get("val_loss")
            scores[run.name] = ValidationScore(measured.auc, measured.patients, measured.slides or 0, loss)
    chosen = choose_model(scores)
    if chosen is None:
        return None, "No run is chosen, because there are no validation AUCs."
    return chosen, f"How the run is chosen: {RUN_CHOICE_RULE}. Test and external slides are not used."
