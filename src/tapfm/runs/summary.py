"""summary.md: a run on one page."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from tapfm.config.settings import RunConfig
from tapfm.evaluation.predictions import AucScores
from tapfm.results.markdown import markdown_table
from tapfm.results.numbers import format_duration, format_number
from tapfm.results.table import Cell, Column, Table, table_row
from tapfm.runs.data import RunData, sizes_table
from tapfm.runs.folder import RunFolder
from tapfm.runs.progress import RunProgress
from tapfm.runtime.files import write_atomically
from tapfm.runtime.messages import command, counted


def write_summary(
    run_folder: RunFolder, config: RunConfig, data: RunData, progress: RunProgress, result: Mapping[str, AucScores]
) -> None:
    """Write what was learnt from what, how well, and what went wrong."""
    lines = [
        f"# {', '.join(data.targets)}: {config.encoder.name}, {config.adaptation.method}, {config.aggregator.name}",
        "",
        *_outcome_lines(config, progress, result),
        "",
        "![loss and AUC by epoch](curves.png)",
        "",
        "## Slides",
        "",
        *_split_lines(data, progress),
        "",
        "## Training",
        "",
        *_training_lines(config, progress),
        "",
        *_failure_lines(progress),
        "## Files",
        "",
        "`config.toml` every setting, `environment.json` versions and machine, `split.csv` slides and labels, "
        "`history.jsonl` a line for each epoch, `checkpoints/` the last state and the best weights, "
        "`predictions-*.csv` each slide on all its tiles, `failures.csv` what could not be read, "
        "`tensorboard/` event files.",
        "",
        f"    {command('export', run_folder.folder, '--out', Path('exported') / run_folder.folder.name)}",
        "",
    ]
    write_atomically(run_folder.folder / "summary.md", "\n".join(lines).encode())


def _outcome_lines(config: RunConfig, progress: RunProgress, result: Mapping[str, AucScores]) -> list[str]:
    """Say which epoch was kept and what it is worth."""
    kept = f"Epoch {(progress.best_epoch or 0) + 1} of {len(progress.history)} was kept"
    targets, several = config.task.targets, len(config.task.targets) > 1
    columns = [Column("split", text=True), Column(f"{config.selection.unit}s")]
    columns += [Column(f"AUC {target}") for target in targets] + ([Column("mean AUC")] if several else [])
    rows = []
    for split, scores in result.items():
        aucs = [Cell(scores.auc[target], why=scores.why_undefined.get(target, "")) for target in targets]
        rows.append(table_row(split, scores.count, *aucs, *([scores.macro] if several else [])))
    note = "There are no confidence intervals here: with few slides an AUC is uncertain by 0.1 and more."
    return [
        f"{kept}, by {_rule(config, progress)}. Figures are of that epoch, on all tiles of each slide.",
        "",
        markdown_table(Table(columns, rows, notes=[note])).rstrip(),
    ]


def _rule(config: RunConfig, progress: RunProgress) -> str:
    """Say what the epoch was chosen by."""
    row = progress.history[progress.best_epoch or 0]
    if progress.selected_by == "auc":
        tiles = config.selection.validation_tiles
        on = "all tiles" if tiles == "all" else f"{tiles:,} tiles of each slide"
        return f"validation AUC ({format_number(row['val_macro_auc'])} on {on})"
    return "validation loss, as there is no validation AUC" if progress.selected_by == "loss" else "being the last one"


def _split_lines(data: RunData, progress: RunProgress) -> list[str]:
    """Count slides by split."""
    lines = [markdown_table(sizes_table(data)).rstrip()]
    if data.without_label:
        lines += ["", f"Without any label, and not used: {counted(len(data.without_label), 'slide')}."]
    if lost := [slide for slide in data.slides if slide.row.slide_id in progress.failed]:
        lines += ["", f"Of these, {counted(len(lost), 'slide')} failed (below)."]
    return lines


def _training_lines(config: RunConfig, progress: RunProgress) -> list[str]:
    """Say how long it took, and what it took."""
    history = progress.history
    seconds = sum(row["seconds"] for row in history)
    tiles = sum(row["tiles"] for row in history)
    waited = sum(row["waiting_share"] * row["seconds"] for row in history) / max(seconds, 1e-9)
    peak = max((row["peak_memory_gib"] for row in history), default=0.0)
    early = (
        f" It ended early: {config.selection.patience} epochs without a better one." if progress.stopped_early else ""
    )
    learnt = f"learning rate {config.optimiser.aggregator_lr:g} (aggregator)"
    if config.adaptation.method != "fixed":
        learnt = f"scope `{config.adaptation.scope}`, learning rate {config.optimiser.encoder_lr:g} (encoder), {learnt}"
    return [
        f"{counted(len(history), 'epoch')}, {counted(progress.step, 'step')}, {tiles:,} tiles in "
        f"{format_duration(seconds)}, validation included; {waited:.0%} of the time was spent waiting for tiles; at "
        f"most {peak:.1f} GiB of memory.{early}",
        "",
        f"Recipe `{config.recipe}`, seed {config.seed}, {learnt}.",
    ]


def _failure_lines(progress: RunProgress) -> list[str]:
    """List what failed."""
    if not progress.failed and not progress.skipped:
        return []
    skipped = sum(len(each.tiles) for each in progress.skipped.values())
    lines = ["## What could not be read", ""]
    lines += [f"- {slide_id} failed: {reason}" for slide_id, reason in progress.failed.items()]
    if skipped:
        slides = counted(len(progress.skipped), "slide")
        lines.append(f"- skipped: {counted(skipped, 'tile')} of {slides} (`failures.csv`)")
    return [*lines, ""]
