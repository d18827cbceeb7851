"""The paper's tables of a study's own: AUC of every method with its interval, and a test against the best."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, stdev

from tapfm.evaluation.comparing import Comparison, PairedComparison, compare_methods
from tapfm.evaluation.predictions import Unit, compute_scores
from tapfm.metrics.estimate import Estimate
from tapfm.study.results import BASELINE, COHORTS, Seeds, StudyResults
from tapfm.study.runs import REGIMES_IN_TABLE
from tapfm.tasks.catalog import target_kinds

MACRO = "macro"
BLOCKS = {
    "fixed": "Fixed encoder with trained MIL aggregators",
    "finetune": "Fine-tuned (FT) encoder with MIL aggregators",
    "tapfm": "TAPFM",
    BASELINE: "Without an encoder",
}
COHORT_TITLES = {"test": "Test", "external": "External"}
_SAME = 5e-5  # values that look the same with four digits share their rank

TableColumn = tuple[str, str]  # cohort and target of a column


@dataclass(frozen=True)
class Cell:
    """What a method is worth on one target of one cohort."""

    auc: Estimate
    seeds: int
    seed_sd: float | None
    against_best: PairedComparison | None  # of this method minus the best; None for the best itself
    rank: int | None  # 1 and 2 are marked


@dataclass(frozen=True)
class Row:
    """A method, or the baseline."""

    block: str
    encoder: str
    regime: str
    aggregator: str
    variant: str
    title: str
    cells: Mapping[TableColumn, Cell]


@dataclass(frozen=True)
class ResultTable:
    """All that a table of AUCs shows."""

    unit: Unit
    patients: Mapping[TableColumn, int]  # the columns, in order
    rows: Sequence[Row]
    notes: Sequence[str] = field(default_factory=list)

    def targets(self) -> list[str]:
        """List the targets of the columns."""
        return list(dict.fromkeys(target for _, target in self.patients))

    def cohorts(self) -> list[str]:
        """List the cohorts of the columns."""
        return list(dict.fromkeys(cohort for cohort, _ in self.patients))


def make_table(results: StudyResults) -> ResultTable:
    """Compare all methods in each column; what a method lacks is left empty."""
    study = results.study
    rows = _row_titles(results)
    columns = [
        (cohort, target)
        for target in _column_targets(results)
        for cohort in COHORTS
        if _seeds_in(results, cohort, target)
    ]
    patients: dict[TableColumn, int] = {}
    cells: dict[tuple[str, ...], dict[TableColumn, Cell]] = {key: {} for key in rows}
    notes: list[str] = []
    for cohort, target in columns:
        found = _seeds_in(results, cohort, target)
        targets = study.targets if study.multilabel else [target]
        compared = _compare_column(found, targets, target, study.unit, study.resamples)
        patients[cohort, target] = compared.comparison.patients
        notes += [note for note in compared.notes(cohort) if note not in notes]
        for name, cell in compared.cells().items():
            cells[compared.keys[name]][cohort, target] = cell
    made = [
        Row(BLOCKS[key[1] if len(key) > 1 else BASELINE], *_parts_of(key), title, cells[key])
        for key, title in rows.items()
        if cells[key]
    ]
    return ResultTable(study.unit, patients, made, notes)


def _row_titles(results: StudyResults) -> dict[tuple[str, ...], str]:
    """List the rows: methods in the order of the blocks, then the baseline."""
    ordered = sorted(results.methods, key=lambda each: REGIMES_IN_TABLE.index(each.method.regime))
    rows = {row_key(each.method.row): each.method.title for each in ordered}
    return rows | ({(BASELINE,): "colours and tile count"} if results.baseline else {})


def row_key(row: tuple[str, str, str, str | None]) -> tuple[str, ...]:
    """Name a row."""
    return tuple(part or "" for part in row)


def _parts_of(key: tuple[str, ...]) -> tuple[str, str, str, str]:
    """Say what a row is made of: encoder, regime, aggregator, variant."""
    if len(key) == 1:
        return "", key[0], "", ""
    encoder, regime, aggregator, variant = key
    return encoder, regime, aggregator, variant


def _column_targets(results: StudyResults) -> list[str]:
    """List targets; of one model for several targets their mean as well."""
    return [*results.study.targets, *([MACRO] if results.study.multilabel else [])]


def _seeds_in(results: StudyResults, cohort: str, target: str) -> dict[tuple[str, ...], Seeds]:
    """Find the predictions of each row in a column."""
    found: dict[tuple[str, ...], Seeds] = {}
    for each in results.methods:
        if cohort in each.predictions and each.method.target in (None, target):
            found[row_key(each.method.row)] = each.predictions[cohort]
    for (of_cohort, of_target), seeds in results.baseline.items():
        if of_cohort == cohort and of_target in (None, target) and found:
            found[(BASELINE,)] = seeds
    return found


@dataclass(frozen=True)
class _ComparedColumn:
    """One column: everything against its best."""

    keys: Mapping[str, tuple[str, ...]]
    seeds: Mapping[str, Seeds]
    comparison: Comparison
    target: str
    best: str | None

    def cells(self) -> dict[str, Cell]:
        """Make the cells of the column."""
        values = {name: self.comparison.aucs[name, self.target].value for name in self.keys}
        # those that look the same share a rank, and use up as many
        return {
            name: Cell(
                auc=self.comparison.aucs[name, self.target],
                seeds=len(self.seeds[name]),
                seed_sd=_spread(self.seeds[name], self.target, self.comparison),
                against_best=_pair_with(self.comparison.pairs, name, self.best, self.target),
                rank=_rank_of(values[name], [value for value in values.values() if value is not None]),
            )
            for name in self.keys
        }

    def notes(self, cohort: str) -> list[str]:
        """Say what is missing of this column, and why."""
        reasons: dict[str, list[str]] = {}
        for name in self.keys:
            if why := self.comparison.aucs[name, self.target].why:
                reasons.setdefault(why, []).append(name)
        lines = [
            f"{COHORT_TITLES[cohort]}, {self.target}: {why}"
            + ("" if len(names) == len(self.keys) else f" ({', '.join(names)})")
            for why, names in reasons.items()
        ]
        lines += [
            f"{COHORT_TITLES[cohort]}: patients of {name} that other methods lack, not counted: {len(ids)}"
            for name, ids in self.comparison.left_out.items()
            if ids
        ]
        return lines


def _compare_column(
    found: Mapping[tuple[str, ...], Seeds], targets: Sequence[str], target: str, unit: Unit, resamples: int
) -> _ComparedColumn:
    """Compare the methods of a column with the best of them."""
    keys = {"/".join(part for part in key if part): key for key in found}
    seeds = {name: found[key] for name, key in keys.items()}
    values = {name: _mean_auc(each, targets, target, unit) for name, each in seeds.items()}
    known = {name: value for name, value in values.items() if value is not None}
    best = max(known, key=lambda name: known[name]) if known else None  # of equal ones the first
    if len(seeds) == 1:  # nothing to compare with; its interval comes about in the same way
        both = seeds | {f"{name} again": each for name, each in seeds.items()}
        return _ComparedColumn(
            keys, seeds, compare_methods(both, target_kinds(targets), unit, resamples=resamples), target, best
        )
    comparison = compare_methods(seeds, target_kinds(targets), unit, resamples=resamples, against=best)
    if best is not None and comparison.left_out:
        # on the patients that all have, another one may be the best
        again = {name: comparison.aucs[name, target].value for name in seeds}
        leading = {name: value for name, value in again.items() if value is not None}
        if leading and leading.get(best, -1.0) < max(leading.values()):
            best = max(leading, key=lambda name: leading[name])
            comparison = compare_methods(seeds, target_kinds(targets), unit, resamples=resamples, against=best)
    return _ComparedColumn(keys, seeds, comparison, target, best)


def _mean_auc(seeds: Seeds, targets: Sequence[str], target: str, unit: Unit) -> float | None:
    """Average the AUC of a method over its seeds."""
    values = _aucs_of(seeds, targets, target, unit)
    return fmean(values) if values else None


def _aucs_of(seeds: Seeds, targets: Sequence[str], target: str, unit: Unit) -> list[float]:
    """Find the AUC of each seed, where there is one."""
    of_seeds = [compute_scores(each, target_kinds(targets), unit) for each in seeds]
    found = [each.macro if target == MACRO else each.auc[target] for each in of_seeds]
    return [value for value in found if value is not None]


def _spread(seeds: Seeds, target: str, comparison: Comparison) -> float | None:
    """Say how much seeds differ."""
    values = _aucs_of(seeds, comparison.targets, target, comparison.unit)
    return stdev(values) if len(values) > 1 else None


def _pair_with(pairs: Iterable[PairedComparison], name: str, best: str | None, target: str) -> PairedComparison | None:
    """Find the test of a method against the best, as this method minus the best."""
    return next((pair for pair in pairs if (pair.first, pair.second, pair.target) == (name, best, target)), None)


def _rank_of(value: float | None, values: Sequence[float]) -> int | None:
    """Rank a value; those that look the same share a rank."""
    if value is None:
        return None
    return 1 + sum(other > value + _SAME for other in values)
