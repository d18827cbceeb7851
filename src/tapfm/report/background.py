"""What stands at the end of a report: failures, settings, machine, licence, and what the page was made from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tapfm.encoders.card import TIMM_PREFIX, EncoderCard
from tapfm.encoders.catalog import encoder_card
from tapfm.errors import InputError, TapfmError
from tapfm.report.content import Block, Code, Collapsible
from tapfm.report.finding import ResultFolder
from tapfm.report.runs import ReportedRun, read_table
from tapfm.results.document import Paragraph
from tapfm.results.table import Column, Row, Table, table_row
from tapfm.runs.hub import forbids_derivatives

_TEXT = Column("", text=True)


def _failure_rows(where: str, rows: Sequence[Mapping[str, str]]) -> list[Row]:
    """Write the lines of a failures.csv, whichever command wrote it."""
    written = []
    for row in rows:
        what = row.get("problem") or "failed"
        if row.get("tiles_skipped"):
            what += f" ({row['tiles_skipped']})"
        cells = [row.get("slide_id"), where, what, row.get("reason"), row.get("hint")]
        written.append(table_row(*(cell or "" for cell in cells)))  # a line that was cut has none of the last
    return written


def failures_table(
    runs: Sequence[ReportedRun], folders: Sequence[ResultFolder], steps: Sequence[Mapping[str, str]]
) -> Table | None:
    """List all that failed: slides of runs, evaluations and predictions, and steps of a study."""
    rows = [
        table_row(*(each.get(name) or "" for name in ("run", "step", "state", "reason", "command"))) for each in steps
    ]
    for run in runs:
        rows += _failure_rows(f"training, {run.name}", run.failures)
    for found in folders:
        rows += _failure_rows(found.path.name, _failures_of(found.path / "failures.csv"))
    if not rows:
        return None
    titles = ("slide or run", "where", "what", "why", "what to do")
    return Table([Column(title, text=True) for title in titles], rows)


def _failures_of(path: Path) -> list[dict[str, str]]:
    """Read a failures.csv."""
    try:
        return read_table(path)
    except (OSError, ValueError) as error:
        raise InputError(f"{path} cannot be read ({error}).", hint="Make it again.") from error


def made_blocks(runs: Sequence[ReportedRun]) -> list[Block]:
    """Show the configuration and the machine of each run."""
    blocks: list[Block] = []
    for run in runs:
        of = f", {run.name}" if len(runs) > 1 else ""
        blocks.append(Collapsible(f"Configuration{of}", [Code(run.configuration)], "config.toml, every setting"))
        if run.environments:
            summary = "environment.json" + (", resumed elsewhere" if len(run.environments) > 1 else "")
            blocks.append(Collapsible(f"Environment{of}", [_environment_table(run.environments)], summary))
    return blocks


def _environment_table(environments: Sequence[Mapping[str, Any]]) -> Table:
    """Write a line for each fact, a column for each time the run was begun or resumed."""
    flat = [_flattened(each) for each in environments]
    names = list(dict.fromkeys(name for each in flat for name in each))
    rows = [table_row(name, *(each.get(name, "") for each in flat)) for name in names]
    times = ["begun", *(f"resumed, {number}" for number in range(1, len(flat)))]
    return Table([_TEXT, *(Column(time, text=True) for time in times)], rows)


def _flattened(environment: Mapping[str, Any]) -> dict[str, str]:
    """Put versions of packages, and how tiles were laid, beside the other facts; what is not known is left out."""
    flat: dict[str, str] = {}
    for name, value in environment.items():
        if isinstance(value, Mapping):
            group = "" if name == "packages" else f"{name}: "  # a package is known by its own name
            flat |= {f"{group}{inner}".replace("_", " "): str(each) for inner, each in value.items()}
        elif value is not None:
            flat[name.replace("_", " ")] = str(value)
    return flat


def licence_blocks(runs: Sequence[ReportedRun]) -> list[Block]:
    """Say under which licence each base model is, what that forbids, and what to cite."""
    blocks: list[Block] = []
    for name in dict.fromkeys(run.encoder for run in runs if run.encoder):
        adapted = any(run.encoder == name and run.method != "fixed" for run in runs)
        blocks += _encoder_blocks(name, adapted=adapted)
    return blocks


def _encoder_blocks(name: str, *, adapted: bool) -> list[Block]:
    """Write the facts of one encoder."""
    if name.lower().startswith(TIMM_PREFIX):  # its card would have to be made with torch, and says nothing of licences
        return [Paragraph(f"{name} is not in the catalogue: its licence is that of the weights that were given.")]
    try:
        card = encoder_card(name)
    except TapfmError as error:
        return [Paragraph(error.message)]
    rows = [
        table_row("encoder", card.name),
        table_row("licence", card.licence),
        table_row("cite", _citation(card)),
        *([table_row("weights", f"SHA-256 {card.sha256}")] if card.sha256 else []),
    ]
    blocks: list[Block] = [Table([_TEXT, Column("", text=True)], rows)]
    if forbids_derivatives(card.licence):
        said = f"The licence of {card.name} forbids sharing derivatives"
        blocks.append(Paragraph(f"{said}, and the adapted encoder is one." if adapted else f"{said}.", warning=True))
    return blocks


def _citation(card: EncoderCard) -> str:
    """Name the model as precisely as its card can; how its authors want to be cited stands on its page."""
    if not card.repository:
        return f"{card.name}, which comes with tapfm" if card.packaged else card.name
    revision = f", revision {card.revision[:12]}" if card.revision else ""
    return f"{card.name}, {card.repository} on the Hugging Face hub{revision}; as its page there asks"


def sources_table(lines: Sequence[tuple[str, Path, str]]) -> Table:
    """List what the page was made from."""
    rows = [table_row(kind, str(path), note) for kind, path, note in lines]
    return Table([_TEXT, Column("folder", text=True), Column("", text=True)], rows)
