"""Tables and figure of a comparison, and its files."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from tapfm.evaluation.method_comparison import Comparison, PairedComparison
from tapfm.evaluation.metric_values import MACRO, target_title
from tapfm.results.document import Paragraph, Section
from tapfm.results.drawing import write_png
from tapfm.results.estimate import Estimate
from tapfm.results.figure import Axis, Figure, Line, Mark, Panel, Points, Rule
from tapfm.results.formatting import format_p_value
from tapfm.results.markdown import markdown_sections
from tapfm.results.table import Column, Table, table_csv, table_row
from tapfm.runtime.csv_files import write_csv
from tapfm.runtime.files import write_atomically
from tapfm.runtime.messages import format_count

_SHOWN = 10  # patients that the page names; excluded.csv has all
FILES = ("comparison.json", "comparison.csv", "comparison.md", "differences.png", "excluded.csv")
_PAIRED_NOTE = (
    "Paired: all methods on the same patients and the same resamples. Holm's correction is over the pairs of a target, "
    "of DeLong's p value if there is one, otherwise of the bootstrap's."
)


def write_comparison(
    folder: Path, compared: Comparison, files: Mapping[str, str], *, resamples: int, seed: int, notes: Sequence[str]
) -> None:
    """Write the tables of a comparison and its figure.

    files: the table of predictions of each method.
    notes: warnings to repeat on the page.
    """
    figure = _differences_figure(compared)
    page = markdown_sections(
        " / ".join(compared.methods),
        _sections(compared, files, figure, resamples, notes),
        {figure.title: "differences.png"},
    )
    excluded = ([name, patient] for name, patients in compared.excluded.items() for patient in patients)
    write_atomically(folder / "comparison.csv", table_csv(_all_pairs_table(compared)).encode())
    write_csv(folder / "excluded.csv", ("method", "patient"), excluded)
    write_png(folder / "differences.png", figure)
    write_atomically(folder / "comparison.md", page.encode())
    write_atomically(folder / "comparison.json", _json(compared, files, resamples, seed, notes))


def _shown_targets(compared: Comparison) -> list[str]:
    """Return the targets, and their mean where there are several."""
    return [*compared.targets, *([MACRO] if len(compared.targets) > 1 else [])]


def auc_table(compared: Comparison, files: Mapping[str, str] | None = None) -> Table:
    """Return the AUC of each method; with the file of its predictions if given."""
    targets = _shown_targets(compared)
    rows = [
        table_row(
            name if files is None else f"{name} (`{files[name]}`)",
            *(compared.aucs[name, target] for target in targets),
        )
        for name in compared.methods
    ]
    return Table([Column("AUC", text=True), *(Column(target_title(target)) for target in targets)], rows)


def differences_table(compared: Comparison) -> Table:
    """Return the difference of AUC of each pair, with the p values of its tests."""
    columns = [Column("difference of AUC", text=True), Column("target", text=True), Column("", form="+.3f")]
    columns += [Column(f"p ({test})") for test in ("DeLong", "bootstrap", "Holm")]
    rows = [
        table_row(
            f"{pair.first} - {pair.second}",
            target_title(pair.target),
            pair.difference,
            *map(format_p_value, (pair.p_delong, pair.p_bootstrap, pair.p_holm)),
        )
        for pair in compared.pairs
    ]
    return Table(columns, rows, notes=[_PAIRED_NOTE])


def _all_pairs_table(compared: Comparison) -> Table:
    """Return comparison.csv."""
    names = ("first", "second", "target", "auc_first", "auc_second", "difference", "ci_low", "ci_high")
    rows = []
    for pair in compared.pairs:
        aucs = [compared.aucs[name, pair.target].value for name in (pair.first, pair.second)]
        numbers = [*aucs, pair.difference.value, pair.difference.low, pair.difference.high]
        tests = pair.p_delong, pair.p_bootstrap, pair.p_holm
        rows.append(table_row(pair.first, pair.second, pair.target, *numbers, *tests, _reason(pair)))
    return Table([Column(name) for name in (*names, "p_delong", "p_bootstrap", "p_holm", "reason")], rows)


def _reason(pair: PairedComparison) -> str:
    """Return why values of a pair are missing."""
    return "; ".join(dict.fromkeys(each for each in (pair.difference.reason, pair.reason) if each))


def _differences_figure(compared: Comparison) -> Figure:
    """Return each difference of AUC with its interval; those whose interval excludes 0 are coloured."""
    names = list(dict.fromkeys(f"{pair.first} - {pair.second}" for pair in compared.pairs))
    pairs = {(f"{pair.first} - {pair.second}", pair.target): pair.difference for pair in compared.pairs}
    panels = []
    for target in dict.fromkeys(pair.target for pair in compared.pairs):
        estimates = {name: pairs[name, target] for name in names if (name, target) in pairs}
        panels.append(_interval_panel(target_title(target), "difference of AUC", estimates, reference=0.0))
    width = 3.4 + 0.07 * max(map(len, names), default=0)
    return Figure("Differences of AUC", panels, panel_width_in=width, panel_height_in=1.4 + 0.32 * len(names))


def _interval_panel(title: str, label: str, estimates: Mapping[str, Estimate], reference: float) -> Panel:
    """Return values with their confidence intervals, one below the other, and a line at a reference value."""
    marks: list[Mark] = [Rule(reference, dash="dotted")]
    for place, estimate in enumerate(estimates.values()):
        if estimate.value is None:
            continue
        low, high = estimate.low, estimate.high
        clear = low is not None and high is not None and not low <= reference <= high
        if low is not None and high is not None:
            marks.append(Line([low, high], [place, place], "model" if clear else "grey"))
        marks.append(Points([estimate.value], [place], "model" if clear else "grey"))
    places = [float(place) for place in range(len(estimates))]
    y = Axis("", len(estimates) - 0.5, -0.5, places, list(estimates))
    return Panel(title, Axis(f"{label}, 95% confidence interval"), y, marks)


def _sections(
    compared: Comparison, files: Mapping[str, str], figure: Figure, resamples: int, notes: Sequence[str]
) -> list[Section]:
    about = (
        f"On the {format_count(compared.patients, 'patient')} that all methods have; each {compared.unit} counts once. "
        f"Ranges are 95% confidence intervals from {resamples:,} bootstrap resamples of patients."
    )
    sections = [
        Section("", [Paragraph(about), *(Paragraph(note, warning=True) for note in notes), auc_table(compared, files)]),
        Section("Differences of AUC", [differences_table(compared), figure]),
    ]
    missing = dict.fromkeys(
        f"- {target_title(pair.target)}: {reason}" for pair in compared.pairs if (reason := _reason(pair))
    )
    for title, lines in (("What is missing", list(missing)), ("Left out", _excluded_lines(compared))):
        if lines:
            sections.append(Section(title, [Paragraph("\n".join(lines))]))
    return sections


def _excluded_lines(compared: Comparison) -> list[str]:
    """List the first few patients that do not count, and labels that some methods lack."""
    lines = []
    for name, patients in compared.excluded.items():
        if patients:
            more = f" and {len(patients) - _SHOWN:,} more (`excluded.csv`)" if len(patients) > _SHOWN else ""
            names = ", ".join(patients[:_SHOWN]) + more
            lines.append(f"- {name}: {format_count(len(patients), 'patient')} that other methods lack: {names}")
    if compared.label_conflicts:
        names = ", ".join(compared.label_conflicts[:_SHOWN])
        lines.append(f"- labelled by some methods only; that label is used: {names}")
    return lines


def _json(compared: Comparison, files: Mapping[str, str], resamples: int, seed: int, notes: Sequence[str]) -> bytes:
    found = {
        "files": dict(files),
        "unit": compared.unit,
        "patients": compared.patients,
        "resamples": resamples,
        "seed": seed,
        "notes": list(notes),
        "excluded": {name: list(patients) for name, patients in compared.excluded.items()},
        "label_conflicts": list(compared.label_conflicts),
        "auc": {
            name: {target: asdict(compared.aucs[name, target]) for target in _shown_targets(compared)}
            for name in compared.methods
        },
        "pairs": [asdict(pair) for pair in compared.pairs],
    }
    return (json.dumps(found, indent=2, allow_nan=False) + "\n").encode()
