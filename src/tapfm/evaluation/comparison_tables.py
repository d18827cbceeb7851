"""Tables of a comparison: CSV, JSON and a Markdown page, and the plot of the differences."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tapfm.evaluation.comparing import Comparison, PairedComparison
from tapfm.evaluation.comparison_figure import draw_differences
from tapfm.evaluation.estimate_text import escape_cell, format_estimate, format_p_value
from tapfm.evaluation.measures import MACRO, target_title
from tapfm.results.estimate import Estimate
from tapfm.runtime.csv_files import write_csv
from tapfm.runtime.files import write_atomically
from tapfm.runtime.messages import counted

_SHOWN = 10  # patients that the page names; left_out.csv has all
FILES = ("comparison.json", "comparison.csv", "comparison.md", "differences.png", "left_out.csv")
_COLUMNS = (
    *("first", "second", "target", "auc_first", "auc_second", "difference", "low", "high"),
    *("p_delong", "p_bootstrap", "p_holm", "why"),
)


def write_comparison(
    folder: Path, compared: Comparison, files: Mapping[str, str], *, resamples: int, seed: int, notes: Sequence[str]
) -> None:
    """Write the tables of a comparison and its plot.

    files: the table of predictions of each method.
    notes: warnings to repeat on the page.
    """
    pairs = ([*_csv_cells(pair, compared), _reason(pair)] for pair in compared.pairs)
    write_csv(folder / "comparison.csv", _COLUMNS, pairs)
    left_out = ([name, patient] for name, patients in compared.left_out.items() for patient in patients)
    write_csv(folder / "left_out.csv", ("method", "patient"), left_out)
    draw_differences(folder / "differences.png", compared)
    write_atomically(folder / "comparison.md", _markdown(compared, files, resamples, notes))
    write_atomically(folder / "comparison.json", _json(compared, files, resamples, seed, notes))


def _csv_cells(pair: PairedComparison, compared: Comparison) -> list[str]:
    aucs = [compared.aucs[name, pair.target].value for name in (pair.first, pair.second)]
    numbers = [*aucs, pair.difference.value, pair.difference.low, pair.difference.high]
    numbers += [pair.p_delong, pair.p_bootstrap, pair.p_holm]
    names = [pair.first, pair.second, pair.target]
    return [*names, *("" if number is None else repr(float(number)) for number in numbers)]


def _reason(pair: PairedComparison) -> str:
    """Return why values of a pair are missing."""
    return "; ".join(dict.fromkeys(each for each in (pair.difference.why, pair.why) if each))


def _json(compared: Comparison, files: Mapping[str, str], resamples: int, seed: int, notes: Sequence[str]) -> bytes:
    found = {
        "files": dict(files),
        "unit": compared.unit,
        "patients": compared.patients,
        "resamples": resamples,
        "seed": seed,
        "notes": list(notes),
        "left_out": {name: list(patients) for name, patients in compared.left_out.items()},
        "label_conflicts": list(compared.label_conflicts),
        "auc": {
            name: {
                target: _estimate_json(estimate)
                for (method, target), estimate in compared.aucs.items()
                if method == name
            }
            for name in compared.methods
        },
        "pairs": [
            {
                "first": pair.first,
                "second": pair.second,
                "target": pair.target,
                "difference": _estimate_json(pair.difference),
                "p_delong": pair.p_delong,
                "p_bootstrap": pair.p_bootstrap,
                "p_holm": pair.p_holm,
                "why": pair.why,
            }
            for pair in compared.pairs
        ],
    }
    return (json.dumps(found, indent=2, allow_nan=False) + "\n").encode()


def _estimate_json(estimate: Estimate) -> dict[str, Any]:
    return {"value": estimate.value, "low": estimate.low, "high": estimate.high, "why": estimate.why}


def _markdown(compared: Comparison, files: Mapping[str, str], resamples: int, notes: Sequence[str]) -> bytes:
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
        cells = [format_estimate(compared.aucs[name, target]) for target in targets]
        lines.append(f"| {escape_cell(name)} (`{files[name]}`) | {' | '.join(cells)} |")
    lines += [
        "",
        "## Differences of AUC",
        "",
        "| | target | difference | p (DeLong) | p (bootstrap) | p (Holm) |",
        "|---|---|--:|--:|--:|--:|",
    ]
    for pair in compared.pairs:
        cells = [
            format_estimate(pair.difference, sign=True),
            *map(format_p_value, (pair.p_delong, pair.p_bootstrap, pair.p_holm)),
        ]
        lines.append(
            f"| {escape_cell(f'{pair.first} - {pair.second}')} | {target_title(pair.target)} | {' | '.join(cells)} |"
        )
    lines += [
        "",
        "Paired: the same patients, and the same resamples of them, for all. Holm's correction is over the pairs of a "
        "target, of DeLong's p where there is one, else of the bootstrap's.",
        "",
    ]
    if reasons := list(dict.fromkeys(f"- {pair.target}: {why}" for pair in compared.pairs if (why := _reason(pair)))):
        lines += ["## What is missing", "", *reasons, ""]
    lines += _left_out_lines(compared)
    lines += ["![differences](differences.png)", ""]
    return "\n".join(lines).encode()


def _left_out_lines(compared: Comparison) -> list[str]:
    """Name the first few patients that do not count, and labels that some methods lack."""
    lines = []
    for name, patients in compared.left_out.items():
        if patients:
            more = f" and {len(patients) - _SHOWN:,} more (`left_out.csv`)" if len(patients) > _SHOWN else ""
            names = ", ".join(patients[:_SHOWN]) + more
            lines.append(f"- {name}: {counted(len(patients), 'patient')} that others lack: {names}")
    if compared.label_conflicts:
        names = ", ".join(compared.label_conflicts[:_SHOWN])
        lines.append(f"- labelled in some of them only, and that label counts: {names}")
    return ["## Left out", "", *lines, ""] if lines else []


def shown_targets(compared: Comparison) -> list[str]:
    """Return the targets, and their mean where there are several."""
    return [*compared.targets, *([MACRO] if len(compared.targets) > 1 else [])]
