"""Compare the AUCs of all models by cohort and target, with a paired test against the best model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import stdev

from tapfm.config.study import StudyConfig
from tapfm.evaluation.metric_values import MACRO
from tapfm.evaluation.model_comparison import Comparison, PairedComparison, compare_models
from tapfm.evaluation.predictions import compute_scores
from tapfm.results.estimate import Estimate
from tapfm.results.formatting import format_p_value
from tapfm.results.table import Cell, Column, Row, Table, Value, table_row
from tapfm.study.results import COHORTS, SeedPredictions, StudyResults
from tapfm.study.validation import ValidationScore, choose_model, score_on_validation
from tapfm.tasks.catalog import target_kinds
from tapfm.tasks.target import BASELINE, TargetKinds

_METHOD_TITLES = {
    "fixed": "Fixed encoder with trained MIL aggregators",
    "finetune": "Fine-tuned (FT) encoder with MIL aggregators",
    "tapfm": "TAPFM",
    BASELINE: "Without an encoder",
}
COHORT_TITLES = {"test": "Test", "external": "External"}
BASELINE_TITLE = "colour baseline"
_RANK_TOLERANCE = 5e-5  # AUCs that differ by at most this have the same rank

CohortTarget = tuple[str, str]  # (cohort, target)


@dataclass(frozen=True)
class ComparedAuc:
    """The AUC of a model for one target of one cohort."""

    auc: Estimate
    seeds: int
    seed_sd: float | None  # standard deviation over seeds; None with one seed
    against_best: PairedComparison | None  # this model minus the best; None for the best itself
    rank: int | None  # 1 is the best


@dataclass(frozen=True)
class ComparedModel:
    """AUCs of a model or of the colour baseline."""

    row_key: str
    title: str
    encoder: str
    method: str
    aggregator: str
    variant: str
    aucs: Mapping[CohortTarget, ComparedAuc]
    validation: Mapping[str, ValidationScore] = field(default_factory=dict)  # by target
    runs: Mapping[str, int] = field(default_factory=dict)  # number of finished runs, by target


@dataclass(frozen=True)
class StudyComparison:
    """AUCs of all models. A model without predictions for a cohort and target has no entry for them."""

    patients: Mapping[CohortTarget, int]
    slides: Mapping[CohortTarget, int]
    models: Sequence[ComparedModel]
    chosen: Mapping[str, str]  # row_key of the model that is chosen on validation, by target
    notes: Sequence[str]


def compare_study(results: StudyResults) -> StudyComparison:
    study = results.study
    patients: dict[CohortTarget, int] = {}
    slides: dict[CohortTarget, int] = {}
    validation: dict[str, dict[str, ValidationScore]] = {}
    aucs: dict[str, dict[CohortTarget, ComparedAuc]] = {}
    notes: list[str] = []
    for target in [*study.targets, *([MACRO] if study.is_multilabel else [])]:
        validation[target] = score_on_validation(results, target)
        for cohort in COHORTS:
            if not (seeds := results.predictions(cohort, target)):
                continue
            kinds = study.target_kinds
            targets = kinds if study.is_multilabel else {target: kinds[target]}
            comparison, best = _compare_with_best(seeds, targets, target, study)
            patients[cohort, target], slides[cohort, target] = comparison.patient_count, comparison.slide_count
            for name in seeds:
                aucs.setdefault(name, {})[cohort, target] = _collect_auc(comparison, seeds, name, best, target)
            notes += [
                f"{COHORT_TITLES[cohort]}: patients and slides of {name} that are excluded, because other models have "
                f"no predictions for them: {len(ids):,}."
                for name, ids in comparison.excluded.items()
                if ids
            ]
    rows = {each.model.row_key: each.model for each in results.models}
    models = [
        ComparedModel(
            *(name, row.title, row.encoder, row.method, row.aggregator, row.variant or "", aucs[name]),
            validation={target: scores[name] for target, scores in validation.items() if name in scores},
            runs={target: _count_runs(results, name, target) for target in validation},
        )
        for name, row in sorted(rows.items(), key=lambda item: list(_METHOD_TITLES).index(item[1].method))
        if name in aucs
    ]
    chosen: dict[str, str] = {}
    for target, scores in validation.items():
        evaluated = {
            name: score for name, score in scores.items() if any(each[1] == target for each in aucs.get(name, {}))
        }
        if (best := choose_model(evaluated)) is not None:
            chosen[target] = best
    if BASELINE in aucs:
        models.append(ComparedModel(BASELINE, BASELINE_TITLE, "", BASELINE, "", "", aucs[BASELINE]))
    return StudyComparison(patients, slides, models, chosen, list(dict.fromkeys(notes)))


def _count_runs(results: StudyResults, row_key: str, target: str) -> int:
    """Return the number of finished runs of a model that predict a target."""
    found = [each for each in results.models if each.model.row_key == row_key and each.model.target in (None, target)]
    return sum(len(each.histories) for each in found)


def _compare_with_best(
    seeds: Mapping[str, SeedPredictions], targets: TargetKinds, target: str, study: StudyConfig
) -> tuple[Comparison, str | None]:
    """Compare all models with the best model, on the patients that all models have. Also return the best model."""
    first = next(iter(seeds))
    # a single model is compared with itself, so that its confidence interval is computed in the same way
    models = seeds if len(seeds) > 1 else {**seeds, f"{first} again": seeds[first]}
    values = compare_models(models, targets, study.unit, resamples=1, against=first).aucs
    known = {name: value for name in seeds if (value := values[name, target].value) is not None}
    best = max(known, key=lambda name: known[name]) if known else None
    return compare_models(models, targets, study.unit, resamples=study.resamples, against=best or first), best


def _collect_auc(
    comparison: Comparison, seeds: Mapping[str, SeedPredictions], name: str, best: str | None, target: str
) -> ComparedAuc:
    values = [comparison.aucs[each, target].value for each in seeds]
    pairs = {(pair.first, pair.second, pair.target): pair for pair in comparison.pairs}
    auc = comparison.aucs[name, target]
    scores = [compute_scores(each, target_kinds(comparison.targets), comparison.unit) for each in seeds[name]]
    seed_aucs = [score.macro if target == MACRO else score.auc[target] for score in scores]
    known = [value for value in seed_aucs if value is not None]
    return ComparedAuc(
        auc=auc,
        seeds=len(seeds[name]),
        seed_sd=stdev(known) if len(known) > 1 else None,
        against_best=None if best is None else pairs.get((name, best, target)),
        rank=None
        if auc.value is None
        else 1 + sum(each is not None and each > auc.value + _RANK_TOLERANCE for each in values),
    )


def tidy_table(comparison: StudyComparison) -> Table:
    """Return a table with one row per model, cohort and target, for the CSV file."""
    text_names = ("model", "encoder", "method", "aggregator", "variant", "cohort", "target")
    value_names = ("patients", "slides", "auc", "ci_low", "ci_high", "seeds", "seed_sd")
    columns = [
        *(Column(name, text=True) for name in text_names),
        *map(Column, value_names),
        Column("difference_to_best", interval=True),
    ]
    columns += [*map(Column, ("p_bootstrap", "p_delong", "p_holm", "rank")), Column("reason", text=True)]
    columns += map(Column, ("validation_auc", "validation_ci_low", "validation_ci_high"))
    columns += [*map(Column, ("validation_patients", "validation_slides")), Column("validation_reason", text=True)]
    columns += map(Column, ("runs", "chosen"))
    rows = []
    for model in comparison.models:
        for cohort_target, cell in model.aucs.items():
            pair, auc, target = cell.against_best, cell.auc, cohort_target[1]
            tests = (None,) * 4 if pair is None else (pair.difference, pair.p_bootstrap, pair.p_delong, pair.p_holm)
            rows.append(
                table_row(
                    *(model.title, model.encoder, model.method, model.aggregator, model.variant, *cohort_target),
                    *(comparison.patients[cohort_target], comparison.slides[cohort_target]),
                    *(auc.value, auc.low, auc.high, cell.seeds, cell.seed_sd, *tests, cell.rank, auc.reason),
                    *_validation_values(model.validation.get(target)),
                    *(model.runs.get(target), int(comparison.chosen.get(target) == model.row_key)),
                )
            )
    return Table(columns, rows)


def _validation_values(score: ValidationScore | None) -> tuple[Value, ...]:
    if score is None:
        return (None, None, None, None, None, "")
    return score.auc.value, score.auc.low, score.auc.high, score.patients, score.slides, score.auc.reason


def wide_table(comparison: StudyComparison, study: StudyConfig) -> Table:
    """Return the table in the layout of the paper: one row per model, below the title of its method.

    There is one column per target and cohort. If one model predicts several targets, there is one column per target,
    and the rows are repeated for each cohort.
    """
    cohort_targets, rows = list(comparison.patients), []
    titles = {(cohort, target): _cohort_title(comparison, cohort, target) for cohort, target in cohort_targets}
    if study.is_multilabel:
        targets = list(dict.fromkeys(target for _, target in cohort_targets))
        columns = [_auc_column("Macro average" if target == MACRO else target) for target in targets]
        for cohort in dict.fromkeys(cohort for cohort, _ in cohort_targets):
            selected = [(cohort, target) for target in targets]
            rows += [Row(heading=titles[selected[0]], heading_level=1), *_model_rows(comparison, selected)]
    else:
        columns = [_auc_column(titles[each], group=each[1]) for each in cohort_targets]
        rows += _model_rows(comparison, cohort_targets)
    seeds = max((cell.seeds for model in comparison.models for cell in model.aucs.values()), default=1)
    note = (
        f"AUC by {study.unit}, with 95% confidence interval (bootstrap of patients) and p value of a paired test "
        "against the model with the highest AUC of the column (Holm-corrected). Bold, underlined: highest and second "
        "highest AUC of the column; this is not the choice of a model, which is made on validation. N: number of "
        "patients."
    )
    if seeds > 1:
        note += f" AUCs are means over the seeds of a model (at most {seeds}), with their confidence intervals."
    return Table([Column("Model", text=True), *columns], rows, notes=[note, *comparison.notes])


def _auc_column(title: str, group: str = "") -> Column:
    return Column(title, group=group, float_format=".4f", interval_format=".3f")


def _cohort_title(comparison: StudyComparison, cohort: str, target: str) -> str:
    return f"{COHORT_TITLES[cohort]} (N = {comparison.patients[cohort, target]:,})"


def _model_rows(comparison: StudyComparison, cohort_targets: Sequence[CohortTarget]) -> list[Row]:
    rows, heading = [], ""
    for model in comparison.models:
        if not any(each in model.aucs for each in cohort_targets):
            continue
        if _METHOD_TITLES[model.method] != heading:
            heading = _METHOD_TITLES[model.method]
            rows.append(Row(heading=heading))
        rows.append(table_row(model.title, *(_wide_cell(model.aucs.get(each)) for each in cohort_targets)))
    return rows


def _wide_cell(cell: ComparedAuc | None) -> Cell:
    if cell is None:
        return Cell(Estimate(None))
    p_holm = None if cell.against_best is None else cell.against_best.p_holm
    text = format_p_value(p_holm)
    detail = "" if p_holm is None else f"p {text}" if text.startswith("<") else f"p = {text}"
    return Cell(cell.auc, detail, rank=cell.rank or 0)
