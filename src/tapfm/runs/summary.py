"""Write summary.md, an overview of a run on one page."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from tapfm.config.settings import RunConfig
from tapfm.evaluation.predictions import AucScores
from tapfm.results.formatting import format_duration, format_number
from tapfm.results.markdown import markdown_table
from tapfm.results.table import Cell, Column, Table, table_row
from tapfm.runs.data import RunData, split_sizes_table
from tapfm.runs.folder import RunFolder
from tapfm.runs.run_progress import RunProgress
from tapfm.runtime.files import write_atomically
from tapfm.runtime.messages import format_command, format_count


def write_summary(
    run_folder: RunFolder,
    config: RunConfig,
    data: RunData,
    progress: RunProgress,
    scores_by_split: Mapping[str, AucScores],
) -> None:
    lines = [
        f"# {', '.join(data.targets)}: {config.encoder.name}, {config.adaptation.method}, {config.aggregator.name}",
        "",
        *_result_lines(config, progress, scores_by_split),
        "",
        "![loss and AUC by epoch](curves.png)",
        "",
        "## Slides",
        "",
        *_slide_lines(data, progress),
        "",
        "## Training",
        "",
        *_training_lines(config, progress),
        "",
        *_failure_lines(progress),
        "## Files",
        "",
        "- `config.toml`: all settings",
        "- `environment.json`: versions and machine",
        "- `split.csv`: slides, splits and labels",
        "- `history.jsonl`: one line per epoch",
        "- `checkpoints/`: the state for resuming, and the weights of the selected epoch",
        "- `predictions-*.csv`: predictions on all tiles of each slide",
        "- `failures.csv`: failed slides and skipped tiles",
        "- `tensorboard/`: event files for TensorBoard",
        "",
        "To export the model:",
        "",
        f"    {format_command('export', run_folder.folder, '--out', Path('exported') / run_folder.folder.name)}",
        "",
    ]
    write_atomically(run_folder.folder / "summary.md", "\n".join(lines).encode())


def _result_lines(config: RunConfig, progress: RunProgress, scores_by_split: Mapping[str, AucScores]) -> list[str]:
    """Return the selected epoch and its AUCs."""
    selected = f"Epoch {(progress.best_epoch or 0) + 1} of {len(progress.history)} was selected"
    targets, several = config.task.targets, len(config.task.targets) > 1
    columns = [Column("split", text=True), Column(f"{config.selection.unit}s")]
    columns += [Column(f"AUC {target}") for target in targets] + ([Column("mean AUC")] if several else [])
    rows = []
    for split, scores in scores_by_split.items():
        aucs = [Cell(scores.auc[target], reason=scores.undefined_reasons.get(target, "")) for target in targets]
        rows.append(table_row(split, scores.count, *aucs, *([scores.macro] if several else [])))
    note = "These AUCs have no confidence intervals: with few slides an AUC is uncertain by 0.1 or more."
    return [
        f"{selected} {_describe_selection(config, progress)}. "
        "The metrics are for this epoch, on all tiles of each slide.",
        "",
        markdown_table(Table(columns, rows, notes=[note])).rstrip(),
    ]


def _describe_selection(config: RunConfig, progress: RunProgress) -> str:
    """Return the reason why the epoch was selected, as the end of a sentence."""
    row = progress.history[progress.best_epoch or 0]
    if progress.selected_by == "auc":
        tiles = config.selection.validation_tiles
        tiles_text = "all tiles" if tiles == "all" else f"{tiles:,} tiles of each slide"
        return f"by validation AUC ({format_number(row['val_macro_auc'])} on {tiles_text})"
    if progress.selected_by == "loss":
        return "by validation loss, as there is no validation AUC"
    return "because it is the last epoch"


def _slide_lines(data: RunData, progress: RunProgress) -> list[str]:
    """Return the lines about slides: a table by split, and how many were not used or failed."""
    lines = [markdown_table(split_sizes_table(data)).rstrip()]
    if data.slides_without_label:
        lines += ["", f"Not used, because they have no label: {format_count(len(data.slides_without_label), 'slide')}."]
    if failed := [slide for slide in data.slides if slide.row.slide_id in progress.failed]:
        lines += ["", f"Of the slides in the table, {len(failed):,} failed (listed below)."]
    return lines


def _training_lines(config: RunConfig, progress: RunProgress) -> list[str]:
    """Return duration, memory and main settings of training."""
    history = progress.history
    seconds = sum(row["seconds"] for row in history)
    tiles = sum(row["tiles"] for row in history)
    waited = sum(row["data_wait_fraction"] * row["seconds"] for row in history) / max(seconds, 1e-9)
    peak = max((row["peak_memory_gib"] for row in history), default=0.0)
    early_stop = (
        f" Training stopped early after {config.selection.patience} epochs without improvement."
        if progress.stopped_early
        else ""
    )
    settings = f"learning rate {config.optimiser.aggregator_lr:g} (aggregator)"
    if config.adaptation.method != "fixed":
        scope, encoder_lr = config.adaptation.scope, config.optimiser.encoder_lr
        settings = f"scope `{scope}`, learning rate {encoder_lr:g} (encoder), {settings}"
    return [
        f"{format_count(len(history), 'epoch')}, {format_count(progress.step, 'training slide')} and {tiles:,} "
        f"training tiles (summed over epochs); {format_duration(seconds)} including validation, {waited:.0%} of it "
        f"spent waiting for tiles; peak memory {peak:.1f} GiB.{early_stop}",
        "",
        f"Recipe `{config.recipe}`, seed {config.seed}, {settings}.",
    ]


def _failure_lines(progress: RunProgress) -> list[str]:
    """Return the section about failed slides and skipped tiles; empty if there are none."""
    if not progress.failed and not progress.skipped:
        return []
    skipped = sum(len(each.tiles) for each in progress.skipped.values())
    lines = ["## Failed slides and skipped tiles", ""]
    lines += [f"- {slide_id} failed: {reason}" for slide_id, reason in progress.failed.items()]
    if skipped:
        slides = format_count(len(progress.skipped), "slide")
        lines.append(f"- skipped: {format_count(skipped, 'tile')} of {slides} (`failures.csv`)")
    return [*lines, ""]
