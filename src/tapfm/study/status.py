"""Read and write status.csv: state, reason, command and log of each step of a study."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tapfm.errors import InputError
from tapfm.runtime.csv_files import read_csv, write_csv
from tapfm.runtime.messages import format_command
from tapfm.runtime.steps import Step, StepResult
from tapfm.study.folder import StudyFolder

_COLUMNS = ("run", "step", "state", "reason", "command", "log")


def write_status(folder: StudyFolder, steps: Sequence[Step], results: Mapping[str, StepResult]) -> None:
    """Write the results of these steps. Rows of other steps in the file are kept."""
    rows = read_status(folder)
    for step in steps:
        result, log = results[step.key], step.log.relative_to(folder.path).as_posix()
        row = [step.group, step.name, result.state, result.reason, format_command(*step.arguments), log]
        rows[step.group, step.name] = row
    write_csv(folder.status, _COLUMNS, rows.values())


def read_status(folder: StudyFolder) -> dict[tuple[str, str], list[str]]:
    """Return the rows of status.csv by (run, step); empty if the file does not exist."""
    try:
        rows = read_csv(folder.status) if folder.status.exists() else []
        return {(row["run"], row["step"]): [row[name] for name in _COLUMNS] for row in rows}
    except (OSError, ValueError, KeyError) as error:
        raise InputError(
            f"{folder.status} cannot be read ({type(error).__name__}: {error}).",
            hint="Delete this file; the next tapfm study command writes it again.",
        ) from error
