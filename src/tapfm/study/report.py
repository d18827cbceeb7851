"""Everything that is made of finished runs: tables, figures, and study.md, which has them on one page.

The same runs give the same files, byte by byte.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tapfm.cohort.splits import SPLITS
from tapfm.config.settings import RunConfig
from tapfm.config.study import StudyConfig
from tapfm.errors import InputError
from tapfm.runtime.csv_files import read_csv
from tapfm.runtime.files import write_atomically
from tapfm.runtime.messages import counted
from tapfm.study.costs import costs_csv, costs_markdown, costs_of
from tapfm.study.fits import (
    ablation_csv,
    ablation_markdown,
    fits_of,
    stability_csv,
    stability_markdown,
    trajectories_of,
)
from tapfm.study.folder import StudyFolder
from tapfm.study.forgetting import forgetting_csv, forgetting_markdown, summarise_probes
from tapfm.study.results import StudyResults, collect_results
from tapfm.study.runs import REGIMES_IN_TABLE, run_config, runs_of
from tapfm.study.table_text import table_csv, table_latex, table_markdown
from tapfm.study.tables import ResultTable, make_table
from tapfm.tasks.catalog import target_kinds
from tapfm.tasks.target import Label


@dataclass(frozen=True)
class _Part:
    """A part of the report: its name, which is that of its files, and what it says."""

    title: str
    text: str
    figures: tuple[str, ...] = ()


def write_report(study: StudyConfig, folder: StudyFolder, status: Sequence[Sequence[str]]) -> ResultTable:
    """Write all tables and figures; `status` are the lines of status.csv."""
    results = collect_results(study, folder)
    table = make_table(results)
    parts = [_comparison_part(results, table), _costs_part(results)]
    if study.report in ("ablation", "stability"):
        parts.append(_ablation_part(results, table))
    if study.report == "stability":
        trajectories = trajectories_of(results)
        _put(folder, "stability.csv", stability_csv(trajectories))
        parts.append(_Part("Stability", stability_markdown(trajectories)))
        _put(folder, "stability.md", parts[-1].text)
    if study.report == "forgetting":
        found = summarise_probes(results)
        _put(folder, "forgetting.csv", forgetting_csv(found))
        parts.append(_Part("Forgetting", forgetting_markdown(found)))
        _put(folder, "forgetting.md", parts[-1].text)
    _put(folder, "study.md", _page(results, parts, status))
    return table


def _put(folder: StudyFolder, name: str, text: str) -> None:
    """Write a file of the report."""
    write_atomically(folder.path / name, text.encode())


def _comparison_part(results: StudyResults, table: ResultTable) -> _Part:
    """Write table 1, or 2 where one model predicts several targets."""
    study, folder = results.study, results.folder
    name = "table_multilabel" if study.multilabel else "table_binary"
    text = table_markdown(table, multilabel=study.multilabel)
    caption = (
        f"{study.name}: AUC of encoders and aggregators, with 95% intervals by resampling patients and p of a paired "
        "test against the best of each column (Holm-corrected). N: patients. Best bold, second underlined."
    )
    label = "multi_label" if study.multilabel else "comparison"
    _put(folder, f"{name}.md", text)
    _put(folder, f"{name}.csv", table_csv(table))
    _put(folder, f"{name}.tex", table_latex(table, multilabel=study.multilabel, caption=caption, label=label))
    return _Part("AUC", text)


def _costs_part(results: StudyResults) -> _Part:
    """Write what methods cost, and their curves."""
    from tapfm.study.figures import draw_methods

    costs = costs_of(results)
    _put(results.folder, "costs.csv", costs_csv(costs))
    _put(results.folder, "costs.md", costs_markdown(costs))
    if not results.methods:
        return _Part("Convergence, time and memory", costs_markdown(costs))
    draw_methods(results.folder.path / "curves.png", results)
    return _Part("Convergence, time and memory", costs_markdown(costs), ("curves.png",))


def _ablation_part(results: StudyResults, table: ResultTable) -> _Part:
    """Write the fits, and draw the losses raw and as logarithms."""
    from tapfm.study.figures import draw_losses

    fitted = fits_of(results, table)
    _put(results.folder, "ablation.csv", ablation_csv(fitted))
    text = ablation_markdown(fitted)
    _put(results.folder, "ablation.md", text)
    if not fitted:
        return _Part("Log-linear fit of the training loss", text)
    for name, logarithms in (("ablation-raw.png", False), ("ablation-log.png", True)):
        draw_losses(results.folder.path / name, fitted, results.study.name, logarithms=logarithms)
    return _Part("Log-linear fit of the training loss", text, ("ablation-raw.png", "ablation-log.png"))


def _page(results: StudyResults, parts: Sequence[_Part], status: Sequence[Sequence[str]]) -> str:
    """Put it all on a page."""
    study = results.study
    planned = runs_of(study)
    finished = sum(len(each.histories) for each in results.methods)
    lines = [f"# {study.name}", "", f"{finished} of {counted(len(planned), 'run')} finished: {_what_was_run(study)}."]
    lines += [line for note in study.notes for line in ("", note)]
    lines += ["", *_settings_lines(study, results.folder), "", *_size_lines(results)]
    for part in parts:
        lines += ["", f"## {part.title}", "", part.text.rstrip()]
        lines += [line for figure in part.figures for line in ("", f"![{figure.partition('.')[0]}]({figure})")]
    names = {run.name for run in planned} | {f"{run.method.name}/ensemble-seed{run.seed}" for run in planned}
    # of variants that were taken out again nothing is told
    lines += ["", *_failure_lines([row for row in status if row[0] in names or row[0].startswith("features of ")])]
    return "\n".join(lines).rstrip() + "\n"


def _what_was_run(study: StudyConfig) -> str:
    """Say what is crossed with what."""
    parts = [", ".join(study.encoders), ", ".join(study.regimes)]
    aggregators = [*(study.aggregators if set(study.regimes) - {"tapfm"} else [])]
    aggregators += study.tapfm_aggregators if "tapfm" in study.regimes else []
    parts.append(", ".join(dict.fromkeys(aggregators)))
    parts += [", ".join(each.name for each in study.variants)] if study.variants else []
    parts += [counted(len(study.folds), "fold")] if study.folds else []
    parts.append(f"seed {study.seeds[0]}" if len(study.seeds) == 1 else f"{len(study.seeds)} seeds")
    return " × ".join(parts) + f"; {', '.join(study.targets)}"


def _settings_lines(study: StudyConfig, folder: StudyFolder) -> list[str]:
    """Say how much each regime saw: tiles, epochs, learning rates."""
    lines = [
        "| regime | tiles of a slide in a step | epochs | encoder's rate | aggregator's rate |",
        "|---|---|---|---|---|",
    ]
    configs: dict[str, list[RunConfig]] = {}
    for run in runs_of(study):
        try:
            config = run_config(study, run, folder.features(run.method.encoder))
        except InputError:
            continue  # told as failed
        configs.setdefault(run.method.regime, []).append(config)
    for regime in REGIMES_IN_TABLE:
        if of_regime := configs.get(regime):
            cells = [
                _several([each.adaptation.tiles_per_slide for each in of_regime]),
                _several([each.schedule.epochs for each in of_regime]),
                "-" if regime == "fixed" else _several([each.optimiser.encoder_lr for each in of_regime]),
                _several([each.optimiser.aggregator_lr for each in of_regime]),
            ]
            lines.append(f"| {regime} | {' | '.join(cells)} |")
    return lines


def _several(values: Sequence[object]) -> str:
    """List different values."""
    return ", ".join(f"{value:g}" if isinstance(value, float) else str(value) for value in dict.fromkeys(values))


def _size_lines(results: StudyResults) -> list[str]:
    """Count slides, patients and positives of each split."""
    study, finished = results.study, [run for each in results.methods for run in each.histories]
    if not finished:
        return []
    counts = [f"{target} positive" for target in study.targets]
    lines = [f"| | slides | patients | {' | '.join(counts)} |", "|---|--:|--:|" + "--:|" * len(counts)]
    named = {run.name: run for run in runs_of(study)}
    rows: dict[str, list[dict[str, str]]] = {}
    for name in finished:  # of one model for each target, another column in each
        for row in read_csv(results.folder.run(named[name]) / "split.csv"):
            rows.setdefault(row["slide_id"], []).append(row)
    slides = {
        slide_id: {key: value for row in of_slide for key, value in row.items()} for slide_id, of_slide in rows.items()
    }
    for split in ["all"] if study.folds else SPLITS:
        of_split = [row for row in slides.values() if split in ("all", row["split"])]
        patients = len({(row["cohort"], row["patient_id"]) for row in of_split})
        positives = [
            str(kind.count_labels([kind.parse_label(row.get(target, "")) for row in of_split])[0])
            for target, kind in target_kinds(study.targets).items()
        ]
        name = f"all, in {len(study.folds)} folds" if split == "all" else split
        lines.append(f"| {name} | {len(of_split)} | {patients} | {' | '.join(positives)} |")
    external = {
        each.slide_id: each
        for result in results.methods
        for seed in result.predictions.get("external", [])
        for each in seed
    }
    if external:
        labels: dict[str, dict[str, Label]] = {slide_id: {} for slide_id in external}
        for result in results.methods:
            for seed in result.predictions.get("external", []):
                for each in seed:
                    labels[each.slide_id].update(each.labels)
        patients = len({(each.cohort, each.patient_id) for each in external.values()})
        kinds = target_kinds(study.targets).items()
        positives = [str(kind.count_labels([each.get(name) for each in labels.values()])[0]) for name, kind in kinds]
        lines.append(f"| external | {len(external)} | {patients} | {' | '.join(positives)} |")
    return lines


def _failure_lines(status: Sequence[Sequence[str]]) -> list[str]:
    """List what failed, why, and how to repeat it."""
    failed = [row for row in status if row[2] == "failed"]
    if not failed:
        return []
    lines = ["## What failed", ""]
    for run, step, _, reason, again, log in failed:
        lines += [f"- {run}, {step}: {reason}", f"  (`{log}`; again: `{again}`)"]
    return lines
