"""Write a comparison of models: tables, a figure, and the page comparison.md."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from tapfm.cohort.splits import format_names
from tapfm.evaluation.metric_values import MACRO, target_title
from tapfm.evaluation.model_comparison import Comparison, PairedComparison
from tapfm.results.document import Paragraph, Section
from tapfm.results.estimate import Estimate
from tapfm.results.figure import Axis, Colour, Figure, Line, Mark, Panel, Points, ReferenceLine
from tapfm.results.figure_drawing import write_png
from tapfm.results.formatting import format_p_value
from tapfm.results.markdown import markdown_sections
from tapfm.results.table import Column, Table, table_csv, table_row
from tapfm.runtime.csv_files import write_csv
from tapfm.runtime.files import write_atomically
from tapfm.runtime.messages import format_count

_MAX_LISTED = 10  # entries per list on the page; comparison.json contains all
FILES = ("comparison.json", "comparison.csv", "comparison.md", "differences.png", "excluded.csv")
_PAIRED_NOTE = (
    "Differences are paired: all models are evaluated on the same patients and the same bootstrap resamples. "
    "p (Holm) is corrected for the number of pairs of models, separately for each target. It is based on p (DeLong), "
    "or on p (bootstrap) if there is no p (DeLong)."
)


def write_comparison(
    folder: Path, comparison: Comparison, files: Mapping[str, str], *, resamples: int, seed: int, notes: Sequence[str]
) -> None:
    """Write the tables of a comparison and its figure.

    files: the prediction table of each model.
    notes: warnings to repeat on the page.
    """
    figure = _build_differences_figure(comparison)
    page = markdown_sections(
        f"Comparison of {', '.join(comparison.models)}",
        _build_sections(comparison, files, figure, resamples, notes),
        {figure.title: "differences.png"},
    )
    excluded = ([name, patient] for name, patients in comparison.excluded.items() for patient in patients)
    write_atomically(folder / "comparison.csv", table_csv(_build_pairs_table(comparison)).encode())
    write_csv(folder / "excluded.csv", ("model", "patient"), excluded)
    write_png(folder / "differences.png", figure)
    write_atomically(folder / "comparison.md", page.encode())
    write_atomically(folder / "comparison.json", _format_json(comparison, files, resamples, seed, notes))


def _targets_and_mean(comparison: Comparison) -> list[str]:
    """Return the targets, followed by their mean if there are several."""
    return [*comparison.targets, *([MACRO] if len(comparison.targets) > 1 else [])]


def build_auc_table(comparison: Comparison, files: Mapping[str, str] | None = None) -> Table:
    """Return the AUC of each model.

    files: the prediction table of each model, shown after its name.
    """
    targets = _targets_and_mean(comparison)
    rows = [
        table_row(
            name if files is None else f"{name} (`{files[name]}`)",
            *(comparison.aucs[name, target] for target in targets),
        )
        for name in comparison.models
    ]
    columns = [Column(target_title(target), group="AUC") for target in targets]
    return Table([Column("model", text=True), *columns], rows)


def build_differences_table(comparison: Comparison) -> Table:
    """Return the AUC difference of each pair, with the p values of its tests."""
    columns = [Column("models", text=True), Column("target", text=True), Column("AUC difference", float_format="+.3f")]
    columns += [Column(f"p ({test})") for test in ("DeLong", "bootstrap", "Holm")]
    rows = [
        table_row(
            f"{pair.first} - {pair.second}",
            target_title(pair.target),
            pair.difference,
            *map(format_p_value, (pair.p_delong, pair.p_bootstrap, pair.p_holm)),
        )
        for pair in comparison.pairs
    ]
    return Table(columns, rows, notes=[_PAIRED_NOTE])


def _build_pairs_table(comparison: Comparison) -> Table:
    """Return the table for comparison.csv."""
    names = ("first", "second", "target", "auc_first", "auc_second", "difference", "ci_low", "ci_high")
    rows = []
    for pair in comparison.pairs:
        aucs = [comparison.aucs[name, pair.target].value for name in (pair.first, pair.second)]
        values = [*aucs, pair.difference.value, pair.difference.low, pair.difference.high]
        p_values = pair.p_delong, pair.p_bootstrap, pair.p_holm
        rows.append(table_row(pair.first, pair.second, pair.target, *values, *p_values, _describe_missing(pair)))
    return Table([Column(name) for name in (*names, "p_delong", "p_bootstrap", "p_holm", "reason")], rows)


def _describe_missing(pair: PairedComparison) -> str:
    """Return why values of a pair are missing, or how many resamples were excluded; empty if neither applies."""
    return "; ".join(dict.fromkeys(each for each in (pair.difference.reason, pair.reason) if each))


def _build_differences_figure(comparison: Comparison) -> Figure:
    """Return a plot of the AUC differences; differences whose confidence interval excludes 0 are coloured."""
    names = list(dict.fromkeys(f"{pair.first} - {pair.second}" for pair in comparison.pairs))
    pairs = {(f"{pair.first} - {pair.second}", pair.target): pair.difference for pair in comparison.pairs}
    panels = []
    for target in dict.fromkeys(pair.target for pair in comparison.pairs):
        estimates = {name: pairs[name, target] for name in names if (name, target) in pairs}
        panels.append(_build_interval_panel(target_title(target), "AUC difference", estimates, reference=0.0))
    width = 3.4 + 0.07 * max(map(len, names), default=0)
    return Figure("AUC differences", panels, panel_width_in=width, panel_height_in=1.4 + 0.32 * len(names))


def _build_interval_panel(title: str, label: str, estimates: Mapping[str, Estimate], reference: float) -> Panel:
    """Return a panel with one row per value and its confidence interval, and a line at a reference value."""
    marks: list[Mark] = [ReferenceLine(reference, dash="dotted")]
    for row, estimate in enumerate(estimates.values()):
        if estimate.value is None:
            continue
        low, high = estimate.low, estimate.high
        excludes_reference = low is not None and high is not None and not low <= reference <= high
        colour: Colour = "primary" if excludes_reference else "grey"
        if low is not None and high is not None:
            marks.append(Line([low, high], [row, row], colour))
        marks.append(Points([estimate.value], [row], colour))
    rows = [float(row) for row in range(len(estimates))]
    y = Axis("", len(estimates) - 0.5, -0.5, rows, list(estimates))
    return Panel(title, Axis(f"{label} with 95% confidence interval"), y, marks)


def _build_sections(
    comparison: Comparison, files: Mapping[str, str], figure: Figure, resamples: int, notes: Sequence[str]
) -> list[Section]:
    about = (
        f"Evaluated on the {format_count(comparison.patient_count, 'patient')} that all models have. "
        f"Each {comparison.unit} counts once. "
        f"Ranges are 95% confidence intervals from {resamples:,} bootstrap resamples of patients."
    )
    warnings = [Paragraph(note, warning=True) for note in notes]
    sections = [
        Section("", [Paragraph(about), *warnings, build_auc_table(comparison, files)]),
        Section("AUC differences", [build_differences_table(comparison), figure]),
    ]
    missing = dict.fromkeys(
        f"- {target_title(pair.target)}: {reason}" for pair in comparison.pairs if (reason := _describe_missing(pair))
    )
    for title, lines in (("Missing values", list(missing)), ("Excluded", _list_excluded(comparison))):
        if lines:
            sections.append(Section(title, [Paragraph("\n".join(lines))]))
    return sections


def _list_excluded(comparison: Comparison) -> list[str]:
    """Return lines about excluded patients and about labels that only some models have."""
    lines = []
    for name, patients in comparison.excluded.items():
        if patients:
            listed = format_names(patients, _MAX_LISTED) + (" (`excluded.csv`)" if len(patients) > _MAX_LISTED else "")
            lines.append(f"- {name}: {len(patients):,} patients or slides are not in all models: {listed}")
    if comparison.partial_labels:
        listed = format_names(comparison.partial_labels, _MAX_LISTED)
        lines.append(
            "- Not excluded: patients or slides with a label in only some models. This label is used for all models: "
            f"{listed}"
        )
    return lines


def _format_json(
    comparison: Comparison, files: Mapping[str, str], resamples: int, seed: int, notes: Sequence[str]
) -> bytes:
    """Return the contents of comparison.json."""
    contents = {
        "files": dict(files),
        "unit": comparison.unit,
        "patients": comparison.patient_count,
        "resamples": resamples,
        "seed": seed,
        "notes": list(notes),
        "excluded": {name: list(patients) for name, patients in comparison.excluded.items()},
        "partial_labels": list(comparison.partial_labels),
        "auc": {
            name: {target: asdict(comparison.aucs[name, target]) for target in _targets_and_mean(comparison)}
            for name in comparison.models
        },
        "pairs": [asdict(pair) for pair in comparison.pairs],
    }
    return (json.dumps(contents, indent=2, allow_nan=False) + "\n").encode()
