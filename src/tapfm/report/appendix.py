"""Last sections of a report: failures, configuration, environment, licences and sources."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tapfm.encoders.card import TIMM_PREFIX, EncoderCard
from tapfm.encoders.catalog import find_encoder_card
from tapfm.errors import InputError, TapfmError
from tapfm.report.content import Block, Code, Collapsible
from tapfm.report.reported_run import ReportedRun, read_table
from tapfm.report.result_folders import ResultFolder
from tapfm.results.document import Paragraph
from tapfm.results.table import Column, Row, Table, table_row
from tapfm.runs.base_weights import read_base_weights
from tapfm.runs.hub import forbids_derivatives
from tapfm.runtime.messages import format_count

_TEXT_COLUMN = Column("", text=True)
_FAILURE_COLUMNS = ("slide or run", "step", "problem", "reason", "what to do")


def _build_failure_rows(step: str, failures: Sequence[Mapping[str, str]]) -> list[Row]:
    """Return table rows for the rows of a failures.csv of any command."""
    rows = []
    for failure in failures:
        problem = failure.get("problem") or "failed"
        if failure.get("tiles_skipped"):
            problem += f" ({failure['tiles_skipped']})"
        cells = [failure.get("slide_id"), step, problem, failure.get("reason"), failure.get("hint")]
        rows.append(table_row(*(cell or "" for cell in cells)))  # the last row may be incomplete
    return rows


def build_failures_table(
    runs: Sequence[ReportedRun],
    evaluations: Sequence[ResultFolder],
    predictions: Sequence[ResultFolder],
    study_steps: Sequence[Mapping[str, str]],
) -> Table | None:
    """Return failed slides of runs, evaluations and predictions, and failed steps of a study; None without failures."""
    study_columns = ("run", "step", "state", "reason", "command")
    rows = [table_row(*(step.get(name) or "" for name in study_columns)) for step in study_steps]
    for run in runs:
        rows += _build_failure_rows(f"training, {run.name}", run.failures)
    for step, folders in (("evaluation", evaluations), ("prediction", predictions)):
        for folder in folders:
            failures = _read_failures(folder.path / "failures.csv")
            rows += _build_failure_rows(f"{step}, {folder.path.name}", failures)
    return Table([Column(title, text=True) for title in _FAILURE_COLUMNS], rows) if rows else None


def _read_failures(path: Path) -> list[dict[str, str]]:
    try:
        return read_table(path)
    except (OSError, ValueError) as error:
        hint = "To write it again, run the command that created this folder with --resume."
        raise InputError(f"{path} cannot be read ({error}).", hint=hint) from error


def build_configuration_blocks(runs: Sequence[ReportedRun]) -> list[Block]:
    """Return the configuration and the software environment of each run."""
    blocks: list[Block] = []
    for run in runs:
        suffix = f", {run.name}" if len(runs) > 1 else ""
        blocks.append(Collapsible(f"Configuration{suffix}", [Code(run.config_text)], "config.toml with all settings"))
        if run.environments:
            resumed = len(run.environments) - 1
            summary = "environment.json" + (f", resumed {format_count(resumed, 'time')}" if resumed else "")
            blocks.append(Collapsible(f"Environment{suffix}", [_build_environment_table(run.environments)], summary))
    return blocks


def _build_environment_table(environments: Sequence[Mapping[str, Any]]) -> Table:
    """Return a row for each property, and a column for each environment in which the run was started or resumed."""
    flattened = [_flatten(environment) for environment in environments]
    names = list(dict.fromkeys(name for environment in flattened for name in environment))
    rows = [table_row(name, *(environment.get(name, "") for environment in flattened)) for name in names]
    titles = ["started", *(f"resumed ({number})" for number in range(1, len(flattened)))]
    return Table([_TEXT_COLUMN, *(Column(title, text=True) for title in titles)], rows)


def _flatten(environment: Mapping[str, Any]) -> dict[str, str]:
    """Return nested groups, such as package versions, as entries of one mapping, without unknown values."""
    flat: dict[str, str] = {}
    for name, value in environment.items():
        if isinstance(value, Mapping):
            prefix = "" if name == "packages" else f"{name}: "
            known = {key: inner_value for key, inner_value in value.items() if inner_value is not None}
            flat |= {f"{prefix}{key}".replace("_", " "): str(inner_value) for key, inner_value in known.items()}
        elif value is not None:
            flat[name.replace("_", " ")] = str(value)
    return flat


def build_licence_blocks(runs: Sequence[ReportedRun]) -> list[Block]:
    """Return the licence and the citation of each encoder, and the weights of its runs.

    There is a warning if derivatives must not be shared.
    """
    blocks: list[Block] = []
    for name in dict.fromkeys(run.encoder for run in runs if run.encoder):
        blocks += _build_encoder_blocks(name, [run for run in runs if run.encoder == name])
    return blocks


def _build_encoder_blocks(name: str, runs: Sequence[ReportedRun]) -> list[Block]:
    if name.lower().startswith(TIMM_PREFIX):  # its card requires torch and contains no licence
        return [Paragraph(f"{name} is not in the catalogue of encoders. The licence of its weights applies.")]
    try:
        card = find_encoder_card(name)
    except TapfmError as error:
        return [Paragraph(error.message)]
    rows = [
        table_row("encoder", card.name),
        table_row("licence of the published weights", card.licence),
        table_row("citation", _describe_citation(card)),
    ]
    by_weights: dict[tuple[tuple[str, str], ...], list[str]] = {}
    for run in runs:
        by_weights.setdefault(_describe_weights(run, card), []).append(run.name)
    for weights, names in by_weights.items():
        suffix = f" of {', '.join(names)}" if len(by_weights) > 1 else ""
        rows += [table_row(f"weights{suffix}: {title}", text) for title, text in weights]
    blocks: list[Block] = [Table([_TEXT_COLUMN, _TEXT_COLUMN], rows)]
    if forbids_derivatives(card.licence):
        warning = f"The licence of {card.name} forbids sharing derivatives."
        adapted = any(run.method != "fixed" for run in runs)
        warning += " The adapted encoder is a derivative: do not share it." if adapted else ""
        blocks.append(Paragraph(warning, warning=True))
    return blocks


def _describe_weights(run: ReportedRun, card: EncoderCard) -> tuple[tuple[str, str], ...]:
    """Return what is known about the weights that a run started from, as titles and texts."""
    started = run.environments[0] if run.environments else {}
    weights = read_base_weights(started, started.get("weights_sha256"), card, adapted=run.method != "fixed")
    return tuple(weights.describe().items())


def _describe_citation(card: EncoderCard) -> str:
    """Return the exact source of the weights, and where to find the citation that the authors request."""
    if not card.repository:
        return f"{card.name}, included in tapfm" if card.packaged else card.name
    revision = f", revision {card.revision[:12]}" if card.revision else ""
    return f"{card.name}, {card.repository} on the Hugging Face Hub{revision}. See the model page for the reference."


def build_sources_table(sources: Sequence[tuple[str, Path, str]]) -> Table:
    """Return the folders that the report was created from, as kind, path and weights."""
    rows = [table_row(kind, str(path), weights) for kind, path, weights in sources]
    return Table([_TEXT_COLUMN, Column("folder", text=True), Column("SHA-256 of the weights", text=True)], rows)
