"""`tapfm compare`: models against each other on the patients that all of them have."""

from __future__ import annotations

import csv
import io
import json
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from tapfm.cohort.splits import TEST, TRAIN, VALIDATION, canonical_split
from tapfm.errors import InputError, SettingError
from tapfm.evaluation.comparing import Comparison, Pair
from tapfm.evaluation.comparing import compare as compare_predictions
from tapfm.evaluation.comparison_figure import draw_differences
from tapfm.evaluation.estimate_text import cell, p_value, written
from tapfm.evaluation.measures import MACRO, target_title
from tapfm.evaluation.patients import patient_of
from tapfm.evaluation.predictions import Prediction, Unit, all_targets, read_predictions
from tapfm.metrics.estimate import Estimate
from tapfm.runs.ensemble import is_run
from tapfm.runtime.files import write_atomically
from tapfm.runtime.messages import counted
from tapfm.runtime.output_folder import locked, remove_unfinished

SHOWN = 10  # patients that the page names; left_out.csv has all
FILES = ("comparison.json", "comparison.csv", "comparison.md", "differences.png", "left_out.csv")
COLUMNS = (
    *("first", "second", "target", "auc_first", "auc_second", "difference", "low", "high"),
    *("p_delong", "p_bootstrap", "p_holm", "why"),
)


def compare_models(
    sources: Sequence[str],
    folder: Path,
    *,
    unit: str = "slide",
    against: str | None = None,
    split: str = TEST,
    resamples: int = 2000,
    seed: int = 0,
    warn: Callable[[str], None] = lambda _: None,
) -> Comparison:
    """Read the predictions, compare them, and write tables and the picture."""
    chosen: Unit | None = next((each for each in get_args(Unit) if each == unit), None)
    if chosen is None:
        raise SettingError(f"--unit must be slide or patient; got '{unit}'.")
    if resamples < 1:
        raise SettingError(f"--resamples must be at least 1; got {resamples}.")
    if len(sources) < 2:
        raise InputError("There is nothing to compare it with.", hint="Give two or more: tapfm compare A B --out DIR")
    named = [named_source(source, split) for source in sources]
    names = [name for name, _ in named]
    if repeated := sorted({name for name in names if names.count(name) > 1}):
        raise InputError(
            f"Several are called {', '.join(repeated)}.", hint=f"Name them: {repeated[0]}-1=PATH {repeated[0]}-2=PATH"
        )
    methods = same_cohorts({name: read_predictions(path) for name, path in named})
    notes = not_held_out(named, methods)
    for note in notes:
        warn(note)
    targets = common_targets(methods)
    compared = compare_predictions(
        {name: [predictions] for name, predictions in methods.items()},
        targets,
        chosen,
        resamples=resamples,
        seed=seed,
        against=against,
    )
    with locked(folder, "tapfm compare"):
        remove_unfinished(folder)
        if others := sorted(each.name for each in folder.glob("[!.]*") if each.name not in FILES):
            raise InputError(f"{folder} has other files in it, such as {others[0]}.", hint="Give a new --out.")
        files = {name: str(path) for name, path in named}
        write_atomically(folder / "comparison.csv", comparison_csv(compared))
        write_atomically(folder / "left_out.csv", left_out_csv(compared))
        draw_differences(folder / "differences.png", compared)
        write_atomically(folder / "comparison.md", comparison_md(compared, files, resamples, notes))
        write_atomically(folder / "comparison.json", comparison_json(compared, files, resamples, seed, notes))
    return compared


def named_source(source: str, split: str) -> tuple[str, Path]:
    """Read [NAME=]PATH; without a name the folder's, or the file's, is taken."""
    name, equals, text = source.partition("=")
    if not equals or Path(source).exists():
        name, text = "", source
    path = Path(text)
    return name or path.resolve().name.removesuffix(".csv"), predictions_of(path, split)


def predictions_of(path: Path, split: str) -> Path:
    """Find the table of predictions in a folder."""
    if path.is_file():
        return path
    if not path.exists():
        raise InputError(
            f"There is no {path}.",
            hint="Give folders of evaluations or runs, or CSVs of predictions; NAME=PATH names one.",
        )
    if (path / "predictions.csv").is_file():
        return path / "predictions.csv"
    name = canonical_split(split)
    if name not in (VALIDATION, TEST):
        raise InputError(f"Runs have no predictions of {name}.", hint="--split is test or val.")
    found = path / f"predictions-{name}.csv"
    if not found.is_file():
        raise InputError(
            f"{path} has neither predictions.csv nor {found.name}.",
            hint="A run has predictions when it is finished; evaluations are made by: tapfm evaluate RUN --out DIR",
        )
    return found


def same_cohorts(methods: dict[str, list[Prediction]]) -> dict[str, list[Prediction]]:
    """Match patients by patient_id alone where a table, such as another tool's, names no cohorts."""
    nameless = [name for name, predictions in methods.items() if not any(each.cohort for each in predictions)]
    if len(nameless) in (0, len(methods)):
        return methods
    for name, predictions in methods.items():
        cohorts = Counter(patient for patient, _ in {(each.patient_id, each.cohort) for each in predictions})
        if several := sorted(patient for patient, count in cohorts.items() if count > 1):
            raise InputError(
                f"{nameless[0]} names no cohorts, and in {name} patient '{several[0]}' is in several.",
                hint=f"Add the column cohort to the table of {nameless[0]}.",
            )
    return {name: [replace(each, cohort=None) for each in predictions] for name, predictions in methods.items()}


def not_held_out(named: Sequence[tuple[str, Path]], methods: dict[str, list[Prediction]]) -> list[str]:
    """Warn of patients whom a model has seen in training or validation of its own cohort."""
    common = set.intersection(*({patient_of(each) for each in predictions} for predictions in methods.values()))
    notes = []
    for name, path in named:
        if of_own_cohort(path):
            seen = {patient_of(each) for each in methods[name] if each.split in (TRAIN, VALIDATION)} & common
            if seen:
                of = counted(len(seen), "patient")
                notes.append(f"NOT HELD OUT: {name} learnt from, or was chosen by, {of} of these.")
    return notes


def of_own_cohort(predictions: Path) -> bool:
    """Say whether a table of predictions is of the cohort that its model was trained on."""
    if is_run(predictions.parent):
        return True
    try:
        about = json.loads((predictions.parent / "evaluation.json").read_text("utf-8"))
        return bool(about["cohort"] == "own")
    except (OSError, ValueError, LookupError, TypeError):
        return False


def common_targets(methods: dict[str, list[Prediction]]) -> list[str]:
    """List the targets that all have; none at all is refused."""
    of_method = {name: all_targets(predictions) for name, predictions in methods.items()}
    first, *others = of_method.values()
    common = [target for target in first if all(target in each for each in others)]
    if not common:
        lines = [f"{name}: {', '.join(targets) or 'none'}" for name, targets in of_method.items()]
        raise InputError(
            "They have no target in common:\n  " + "\n  ".join(lines), hint="Compare what predicts the same."
        )
    return common


def comparison_csv(compared: Comparison) -> bytes:
    """Write a line for each pair and target."""
    return table_text(COLUMNS, ([*cells_of(pair, compared), reason_of(pair)] for pair in compared.pairs))


def cells_of(pair: Pair, compared: Comparison) -> list[str]:
    """Write a pair's names and numbers."""
    aucs = [compared.aucs[name, pair.target].value for name in (pair.first, pair.second)]
    numbers = [*aucs, pair.difference.value, pair.difference.low, pair.difference.high]
    numbers += [pair.p_delong, pair.p_bootstrap, pair.p_holm]
    names = [pair.first, pair.second, pair.target]
    return [*names, *("" if number is None else repr(float(number)) for number in numbers)]


def reason_of(pair: Pair) -> str:
    """Say what is missing of a pair."""
    return "; ".join(dict.fromkeys(each for each in (pair.difference.why, pair.why) if each))


def left_out_csv(compared: Comparison) -> bytes:
    """List every patient that some of them lack."""
    rows = [[name, patient] for name, patients in compared.left_out.items() for patient in patients]
    return table_text(("method", "patient"), rows)


def table_text(header: Sequence[str], rows: Iterable[Sequence[str]]) -> bytes:
    """Write a CSV."""
    buffer = io.StringIO(newline="")
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(header)
    writer.writerows(rows)
    return buffer.getvalue().encode()


def comparison_json(
    compared: Comparison, files: dict[str, str], resamples: int, seed: int, notes: Sequence[str]
) -> bytes:
    """Write all of it."""
    found = {
        "files": files,
        "unit": compared.unit,
        "patients": compared.patients,
        "resamples": resamples,
        "seed": seed,
        "notes": list(notes),
        "left_out": {name: list(patients) for name, patients in compared.left_out.items()},
        "label_conflicts": list(compared.label_conflicts),
        "auc": {
            name: {target: as_json(estimate) for (method, target), estimate in compared.aucs.items() if method == name}
            for name in compared.methods
        },
        "pairs": [
            {
                "first": pair.first,
                "second": pair.second,
                "target": pair.target,
                "difference": as_json(pair.difference),
                "p_delong": pair.p_delong,
                "p_bootstrap": pair.p_bootstrap,
                "p_holm": pair.p_holm,
                "why": pair.why,
            }
            for pair in compared.pairs
        ],
    }
    return (json.dumps(found, indent=2, allow_nan=False) + "\n").encode()


def as_json(estimate: Estimate) -> dict[str, Any]:
    """Write an estimate."""
    return {"value": estimate.value, "low": estimate.low, "high": estimate.high, "why": estimate.why}


def comparison_md(compared: Comparison, files: dict[str, str], resamples: int, notes: Sequence[str]) -> bytes:
    """Write one page."""
    targets = shown_targets(compared)
    lines = [
        f"# {' / '.join(compared.methods)}",
        "",
        f"On the {counted(compared.patients, 'patient')} that all of them have; figures count each {compared.unit} "
        f"once. In brackets: 95% intervals, by {resamples:,} resamples of patients.",
        "",
        *(line for note in notes for line in (f"**{note}**", "")),
        "| AUC | " + " | ".join(target_title(target) for target in targets) + " |",
        "|---|" + "--:|" * len(targets),
    ]
    for name in compared.methods:
        cells = [written(compared.aucs[name, target]) for target in targets]
        lines.append(f"| {cell(name)} (`{files[name]}`) | {' | '.join(cells)} |")
    lines += [
        "",
        "## Differences of AUC",
        "",
        "| | target | difference | p (DeLong) | p (bootstrap) | p (Holm) |",
        "|---|---|--:|--:|--:|--:|",
    ]
    for pair in compared.pairs:
        cells = [written(pair.difference, sign=True), *map(p_value, (pair.p_delong, pair.p_bootstrap, pair.p_holm))]
        lines.append(f"| {cell(f'{pair.first} - {pair.second}')} | {target_title(pair.target)} | {' | '.join(cells)} |")
    lines += [
        "",
        "Paired: the same patients, and the same resamples of them, for all. Holm's correction is over the pairs of a "
        "target, of DeLong's p where there is one, else of the bootstrap's.",
        "",
    ]
    if reasons := list(dict.fromkeys(f"- {pair.target}: {why}" for pair in compared.pairs if (why := reason_of(pair)))):
        lines += ["## What is missing", "", *reasons, ""]
    lines += left_out_lines(compared)
    lines += ["![differences](differences.png)", ""]
    return "\n".join(lines).encode()


def left_out_lines(compared: Comparison) -> list[str]:
    """Name the first few patients that do not count, and labels that some lack."""
    lines = []
    for name, patients in compared.left_out.items():
        if patients:
            more = f" and {len(patients) - SHOWN:,} more (`left_out.csv`)" if len(patients) > SHOWN else ""
            names = ", ".join(patients[:SHOWN]) + more
            lines.append(f"- {name}: {counted(len(patients), 'patient')} that others lack: {names}")
    if compared.label_conflicts:
        names = ", ".join(compared.label_conflicts[:SHOWN])
        lines.append(f"- labelled in some of them only, and that label counts: {names}")
    return ["## Left out", "", *lines, ""] if lines else []


def shown_targets(compared: Comparison) -> list[str]:
    """List the targets, and their mean where there are several."""
    return [*compared.targets, *([MACRO] if len(compared.targets) > 1 else [])]


def show(compared: Comparison, folder: Path, console: Console, messages: Console) -> None:
    """Print the table, and say where to look."""
    table = Table(box=None, padding=(0, 2, 0, 0))
    for name in ("AUC", *map(target_title, shown_targets(compared))):
        table.add_column(escape(name))
    for name in compared.methods:
        table.add_row(escape(name), *(written(compared.aucs[name, target]) for target in shown_targets(compared)))
    console.print(table)
    console.print()
    table = Table(box=None, padding=(0, 2, 0, 0))
    for name in ("difference of AUC", "target", "", "p (DeLong)", "p (bootstrap)", "p (Holm)"):
        table.add_column(name, justify="right" if name.startswith("p ") else "left")
    for pair in compared.pairs:
        p_values = map(p_value, (pair.p_delong, pair.p_bootstrap, pair.p_holm))
        names = escape(f"{pair.first} - {pair.second}")
        table.add_row(names, escape(target_title(pair.target)), written(pair.difference, sign=True), *p_values)
    console.print(table)
    messages.print(f"On {counted(compared.patients, 'patient')} that all of them have.", markup=False)
    if count := sum(len(patients) for patients in compared.left_out.values()):
        messages.print(f"Left out: {counted(count, 'patient')} ({folder / 'left_out.csv'})", markup=False)
    messages.print(
        f"Look at it: {folder / 'comparison.md'} and {folder / 'differences.png'}", markup=False, soft_wrap=True
    )
