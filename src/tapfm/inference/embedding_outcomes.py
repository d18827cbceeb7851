"""What became of each slide that was embedded: tables, and what is said at the end."""

from __future__ import annotations

import csv
import io
import shlex
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path

from rich.console import Console
from rich.text import Text

from tapfm.runtime.files import write_atomically
from tapfm.runtime.messages import grouped_advice

SHOWN = 10  # lines of advice at the end; the rest is in the table


@dataclass(frozen=True)
class Outcome:
    """What became of a slide."""

    slide_id: str
    status: str  # ok, failed, or "not embedded" where --only left it out
    reason: str = ""
    tiles: int = 0
    tiles_failed: int | None = None
    seconds: float | None = None
    what_to_do: str = ""


SUMMARY = tuple(each.name for each in fields(Outcome) if each.name != "what_to_do")
FAILURES = ("slide_id", "reason", "what_to_do")


@dataclass
class Report:
    """All outcomes so far, in the order of the cohort."""

    folder: Path
    slide_ids: list[str]
    features: str  # how many, by what, and how
    outcomes: dict[str, Outcome] = field(default_factory=dict)

    @property
    def ordered(self) -> list[Outcome]:
        """Outcomes as the cohort lists its slides."""
        return [self.outcomes[slide_id] for slide_id in self.slide_ids if slide_id in self.outcomes]

    @property
    def embedded(self) -> list[Outcome]:
        """Slides with features."""
        return [outcome for outcome in self.ordered if outcome.status == "ok"]

    @property
    def failed(self) -> list[Outcome]:
        """Slides that were tried, and have none."""
        return [outcome for outcome in self.ordered if outcome.status == "failed"]

    def save(self) -> None:
        """Write summary.csv and failures.csv."""
        write_atomically(self.folder / "summary.csv", table(SUMMARY, self.ordered))
        write_atomically(self.folder / "failures.csv", table(FAILURES, self.failed))


def failure(slide_id: str, reason: str, what_to_do: str) -> Outcome:
    """Record a slide that failed."""
    return Outcome(slide_id, "failed", " ".join(reason.split()), what_to_do=" ".join(what_to_do.split()))


def table(names: Sequence[str], outcomes: Sequence[Outcome]) -> bytes:
    """Write outcomes as CSV."""
    buffer = io.StringIO(newline="")
    writer = csv.DictWriter(buffer, names, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows(asdict(outcome) for outcome in outcomes)
    return buffer.getvalue().encode()


def say_failed(outcome: Outcome, console: Console) -> None:
    """Tell of a slide that failed, when it does."""
    console.print(Text.assemble(("failed ", "red"), f"{outcome.slide_id}: {outcome.reason}"), soft_wrap=True)


def show(report: Report, console: Console) -> None:
    """Say what was done, what was not, and what comes next."""

    def say(text: str, style: str = "") -> None:
        console.print(Text(text, style), soft_wrap=True)

    embedded, failed = report.embedded, report.failed
    tiles = sum(outcome.tiles for outcome in embedded)
    say(f"Embedded {len(embedded):,} of {len(report.ordered):,} slides: {tiles:,} tiles of {report.features}.")
    incomplete = [outcome for outcome in embedded if outcome.tiles_failed]
    if incomplete:
        missing = sum(outcome.tiles_failed or 0 for outcome in incomplete)
        say(
            f"{missing:,} tiles on {len(incomplete):,} slides could not be read: {report.folder / 'summary.csv'}",
            "yellow",
        )
    if failed:
        say(f"{len(failed):,} failed: {report.folder / 'failures.csv'}", "bold red")
        lines = grouped_advice((outcome.slide_id, outcome.what_to_do) for outcome in failed)
        for line in lines[:SHOWN]:
            say(f"  {line}")
        if len(lines) > SHOWN:
            say(f"  ... and {len(lines) - SHOWN:,} more")
    if embedded:
        folder = shlex.quote(str(report.folder))
        fixed = f"--set adaptation.method=fixed --set tiles.features={folder}"
        say(f"Next: tapfm train RUN.toml --out runs/fixed {fixed}")
