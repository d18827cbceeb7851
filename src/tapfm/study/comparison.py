"""The paper's comparison: AUC of every method in each cohort and target, with a test against the best."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import stdev

from tapfm.config.study import StudyConfig
from tapfm.evaluation.method_comparison import Comparison, PairedComparison, compare_methods
from tapfm.evaluation.metric_values import MACRO
from tapfm.evaluation.predictions import compute_scores
from tapfm.results.estimate import Estimate
from tapfm.results.formatting import format_p_value
from tapfm.results.table import Cell, Column, Row, Table, table_row
from tapfm.study.results import COHORTS, Seeds, StudyResults
from tapfm.tasks.catalog import target_kinds
from tapfm.tasks.target import BASELINE, TargetKinds

_BLOCKS = {
    "fixed": "Fixed encoder with trained MIL aggregators",
    "finetune": "Fine-tuned (FT) encoder with MIL aggregators",
    "tapfm": "TAPFM",
    BASELINE: "Without an encoder",
}
COHORT_TITLES = {"test": "Test", "external": "External"}
BASELINE_TITLE = "colours and tile count"
_SAME = 5e-5  # values that are equal with four digits share their rank

CohortTarget = tuple[str, str]  # cohort and target


@dataclass(frozen=True)
class ComparedAuc:
    """The AUC of a method on one target of one cohort."""

    auc: Estimate
    seeds: int
    seed_sd: float | None
    against_best: PairedComparison | None  # this method minus the best; None for the best itself
    rank: int | None  # 1 is the best


@dataclass(frozen=True)
class ComparedMethod:
    """A method, or the colour baseline."""

    row: str  # name
    title: str
    encoder: str
    regime: str
    aggregator: str
    variant: str
    aucs: Mapping[CohortTarget, ComparedAuc]


@dataclass(frozen=True)
class StudyComparison:
    """The AUCs of all methods; a method that lacks some has no entry there."""

    patients: Mapping[CohortTarget, int]
    methods: Sequence[ComparedMethod]
    notes: Sequence[str]


def compare_study(results: StudyResults) -> StudyComparison:
    """Compare all methods in each cohort and target."""
    study = results.study
    patients: dict[CohortTarget, int] = {}
    aucs: dict[str, dict[CohortTarget, ComparedAuc]] = {}
    notes: list[str] = []
    for target in [*study.targets, *([MACRO] if study.multilabel else [])]:
        for cohort in COHORTS:
            if not (seeds := results.predictions(cohort, target)):
                continue
            targets = target_kinds(study.targets if study.multilabel else [target])
            comparison, best = _compare_with_best(seeds, targets, target, study)
            patients[cohort, target] = comparison.patients
            for name in seeds:
                aucs.setdefault(name, {})[cohort, target] = _compared_auc(comparison, seeds, name, best, target)
            notes += [
                f"{COHORT_TITLES[cohort]}: {len(ids):,} patients of {name} are not counted, because other methods "
                "have no predictions for them."
                for name, ids in comparison.excluded.items()
                if ids
            ]
    rows = {each.method.row: each.method for each in results.methods}
    methods = [
        ComparedMethod(name, row.title, row.encoder, row.regime, row.aggregator, row.variant or "", aucs[name])
        for name, row in sorted(rows.items(), key=lambda item: list(_BLOCKS).index(item[1].regime))
        if name in aucs
    ]
    if BASELINE in aucs:
        methods.append(ComparedMethod(BASELINE, BASELINE_TITLE, "", BASELINE, "", "", aucs[BASELINE]))
    return StudyComparison(patients, methods, list(dict.fromkeys(notes)))


def _compare_with_best(
    seeds: Mapping[str, Seeds], targets: TargetKinds, target: str, study: StudyConfig
) -> tuple[Comparison, str | None]:
    """Compare methods with the best of them on the patients that all of them have; of equal ones the first."""
    first = next(iter(seeds))
    # a single method is compared with itself, so that its interval is computed in the same way
    methods = seeds if len(seeds) > 1 else {**seeds, f"{first} again": seeds[first]}
    values = compare_methods(methods, targets, study.unit, resamples=1, against=first).aucs
    known = {name: value for name in seeds if (value := values[name, target].value) is not None}
    best = max(known, key=lambda name: known[name]) if known else None
    return compare_methods(methods, targets, study.unit, resamples=study.resamples, against=best or first), best


def _compared_auc(
    comparison: Comparison, seeds: Mapping[str, Seeds], name: str, best: str | None, target: str
) -> ComparedAuc:
    values = [comparison.aucs[each, target].value for each in seeds]
    pairs = {(pair.first, pair.second, pair.target): pair for pair in comparison.pairs}
    auc = comparison.aucs[name, target]
    scores = [compute_scores(each, target_kinds(comparison.targets), comparison.unit) for each in seeds[name]]
    found = [score.macro if target == MACRO else score.auc[target] for score in scores]
    of_seeds = [value for value in found if value is not None]
    return ComparedAuc(
        auc=auc,
        seeds=len(seeds[name]),
        seed_sd=stdev(of_seeds) if len(of_seeds) > 1 else None,
        against_best=None if best is None else pairs.get((name, best, target)),
        rank=None if auc.value is None else 1 + sum(each is not None and each > auc.value + _SAME for each in values),
    )


def tidy_table(comparison: StudyComparison) -> Table:
    """Return a table with a row for each method, cohort and target, for CSV files."""
    texts = ("model", "encoder", "regime", "aggregator", "variant", "cohort", "target")
    numbers = ("patients", "auc", "ci_low", "ci_high", "seeds", "seed_sd")
    columns = [
        *(Column(name, text=True) for name in texts),
        *map(Column, numbers),
        Column("difference_to_best", interval=True),
    ]
    columns += [*map(Column, ("p_bootstrap", "p_delong", "p_holm", "rank")), Column("reason", text=True)]
    rows = []
    for method in comparison.methods:
        for place, cell in method.aucs.items():
            pair, auc = cell.against_best, cell.auc
            tests = (None,) * 4 if pair is None else (pair.difference, pair.p_bootstrap, pair.p_delong, pair.p_holm)
            rows.append(
                table_row(
                    *(method.title, method.encoder, method.regime, method.aggregator, method.variant, *place),
                    *(comparison.patients[place], auc.value, auc.low, auc.high, cell.seeds, cell.seed_sd),
                    *(*tests, cell.rank, auc.reason),
                )
            )
    return Table(columns, rows)


def parse_auc_row(line: Mapping[str, str]) -> Estimate:
    """Return the AUC in a line of the CSV file of the tidy table."""
    value, low, high = (float(line[name]) if line[name] else None for name in ("auc", "ci_low", "ci_high"))
    return Estimate(value, low, high, line["reason"])


def wide_table(comparison: StudyComparison, study: StudyConfig) -> Table:
    """Return the paper's table: a row for each method, below the title of its regime.

    Columns are cohorts within targets; if one model predicts several targets, columns are targets, and one cohort
    follows the other.
    """
    places, rows = list(comparison.patients), []
    titles = {(cohort, target): _cohort_title(comparison, cohort, target) for cohort, target in places}
    if study.multilabel:
        targets = list(dict.fromkeys(target for _, target in places))
        columns = [_auc_column("Macro average" if target == MACRO else target) for target in targets]
        for cohort in dict.fromkeys(cohort for cohort, _ in places):
            of_cohort = [(cohort, target) for target in targets]
            rows += [Row(heading=titles[of_cohort[0]], level=1), *_method_rows(comparison, of_cohort)]
    else:
        columns = [_auc_column(titles[place], group=place[1]) for place in places]
        rows += _method_rows(comparison, places)
    seeds = max((cell.seeds for method in comparison.methods for cell in method.aucs.values()), default=1)
    note = (
        f"AUC, each {study.unit} counted once; the best is bold, the second underlined. Beside it: the 95% confidence "
        "interval from resampled patients, and p of a paired test against the best of the column, corrected by Holm's "
        "method. N: patients."
    )
    if seeds > 1:
        note += f" AUCs are means over {seeds} seeds, and the intervals are those of the means."
    return Table([Column("Model", text=True), *columns], rows, notes=[note, *comparison.notes])


def _auc_column(title: str, group: str = "") -> Column:
    return Column(title, group=group, form=".4f", interval_form=".3f")


def _cohort_title(comparison: StudyComparison, cohort: str, target: str) -> str:
    return f"{COHORT_TITLES[cohort]} (N = {comparison.patients[cohort, target]:,})"


def _method_rows(comparison: StudyComparison, places: Sequence[CohortTarget]) -> list[Row]:
    rows, block = [], ""
    for method in comparison.methods:
        if not any(place in method.aucs for place in places):
            continue
        if _BLOCKS[method.regime] != block:
            block = _BLOCKS[method.regime]
            rows.append(Row(heading=block))
        rows.append(table_row(method.title, *(_wide_cell(method.aucs.get(place)) for place in places)))
    return rows


def _wide_cell(cell: ComparedAuc | None) -> Cell:
    if cell is None:
        return Cell(Estimate(None))
    p_holm = None if cell.against_best is None else cell.against_best.p_holm
    text = format_p_value(p_holm)
    detail = "" if p_holm is None else f"p {text}" if text.startswith("<") else f"p = {text}"
    return Cell(cell.auc, detail, rank=cell.rank or 0)
