"""Work on the slides of a cohort: what every command that goes slide by slide shares.

A job function runs on each slide. A slide that fails is recorded with the reason and what to do, and the others
go on. Finished slides are kept: the same command resumes.

    with locked(folder, "tapfm tile"), SlideClaims(folder) as claims:
        table = SlideTable(folder, slide_ids, TileRecord, left_out=("not tiled", "no tiles with these settings"))
        todo = table.plan(jobs, only=only, force=force, recall=recall)
        with table.saved(), SlideProgress(console, "tiling", slides=len(todo)) as progress:
            for slide_id, result in run_slides(tile_slide, todo, workers=workers, claims=claims):
                ...
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import Field, asdict, dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Generic, Protocol, TypeVar

from tapfm.errors import InputError, TapfmError
from tapfm.runtime.claims import SlideClaims
from tapfm.runtime.csv_files import recall_csv, write_csv
from tapfm.runtime.workers import WorkerDied, WorkerPool, map_isolated

SUMMARY, FAILURES = "summary.csv", "failures.csv"
_FAILURE_COLUMNS = ("slide_id", "reason", "what_to_do")
RESUME = "Finished slides are kept; run the same command again to resume."
_SAVE_EVERY_S = 5.0  # a command that is killed loses that much of the tables, and no slide
_DIGITS = 4  # of numbers in tables

Job = TypeVar("Job")
Result = TypeVar("Result")


@dataclass(frozen=True)
class Failure:
    """Why a slide failed and what to do about it, on one line each."""

    reason: str
    what_to_do: str = ""
    seconds: float | None = None
    stage: str = ""  # where a command has several

    def __post_init__(self) -> None:
        for name in ("reason", "what_to_do"):
            object.__setattr__(self, name, " ".join(getattr(self, name).split()))


def run_slides(
    function: Callable[[Job], Result],
    jobs: Mapping[str, Job],
    *,
    workers: int,
    claims: SlideClaims | None = None,
    pool: WorkerPool | None = None,
    after_crash: Callable[[Job], str] = lambda _: "If the machine ran out of memory, use fewer --workers.",
) -> Generator[tuple[str, Result | Failure], None, None]:
    """Run a function on the job of each slide, in worker processes; yields (slide_id, result) as they finish.

    An error or a crash is the Failure of that slide. A slide that another process has claimed is left out.
    claims: released when the caller is done with the result. after_crash: returns what to do about a crash.
    pool: workers of `serve_function` with `attempt(function)`, started before.
    """
    slide_ids = jobs if claims is None else claims.take_each(jobs)
    items = ((slide_id, jobs[slide_id]) for slide_id in slide_ids)
    with closing(map_isolated(attempt(function), items, workers, pool)) as results:
        for slide_id, result in results:
            if isinstance(result, WorkerDied):
                yield slide_id, Failure(result.reason, after_crash(jobs[slide_id]))
            else:
                yield slide_id, result
            if claims is not None:
                claims.release(slide_id)


def attempt(function: Callable[[Job], Result]) -> Callable[[Job], Result | Failure]:
    """Return a function that returns a Failure instead of raising; it can be pickled."""
    return partial(_attempt, function)


def _attempt(function: Callable[[Job], Result], job: Job) -> Result | Failure:
    start = time.monotonic()
    try:
        return function(job)
    except TapfmError as error:
        failure = Failure(error.message, error.hint)
    except OSError as error:
        failure = Failure(str(error), "Check free space and permissions.")
    except Exception as error:  # a defect of ours must not stop the other slides
        failure = Failure(f"unexpected {type(error).__name__}: {error}", "Please report it.")
    return replace(failure, seconds=round(time.monotonic() - start, 2))


class _SlideRecord(Protocol):
    """A line of summary.csv: a frozen dataclass with at least these fields, of which all have defaults but two."""

    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]

    def __init__(
        self, slide_id: str, status: str, reason: str = "", *, what_to_do: str = "", seconds: float | None = None
    ) -> None: ...

    @property
    def slide_id(self) -> str:
        """The slide."""

    @property
    def status(self) -> str:
        """ok, failed, or that of slides that --only leaves out."""

    @property
    def reason(self) -> str:
        """Why it failed, or was left out."""

    @property
    def what_to_do(self) -> str:
        """What to do about it; only in failures.csv."""

    @property
    def seconds(self) -> float | None:
        """How long it took."""

    @property
    def tiles(self) -> int:
        """Its tiles."""


Record = TypeVar("Record", bound=_SlideRecord)


@dataclass(repr=False)
class SlideTable(Generic[Record]):
    """The records of all slides of a cohort in one output folder: summary.csv and failures.csv.

    record: class of the records. left_out: status and reason of slides that --only leaves out and that have no
    result.
    also_save: called whenever the tables are saved.
    """

    folder: Path
    slide_ids: Sequence[str]  # in the order of the cohort
    record: type[Record]
    left_out: tuple[str, str]
    also_save: Callable[[Sequence[Record]], object] = lambda _: None
    records: dict[str, Record] = field(default_factory=dict)
    _saved_at: float = field(default_factory=time.monotonic)

    def __repr__(self) -> str:
        counts = f"{len(self.finished):,} finished, {len(self.failed):,} failed of {len(self.slide_ids):,} slides"
        return f"SlideTable('{self.folder}': {counts})"

    @property
    def ordered(self) -> list[Record]:
        """Records in the order of the cohort."""
        return [self.records[slide_id] for slide_id in self.slide_ids if slide_id in self.records]

    @property
    def finished(self) -> list[Record]:
        """Slides with a result."""
        return [record for record in self.ordered if record.status == "ok"]

    @property
    def failed(self) -> list[Record]:
        """Slides that failed."""
        return [record for record in self.ordered if record.status == "failed"]

    def plan(
        self,
        jobs: Mapping[str, Job | Failure],
        *,
        only: Collection[str] | None,
        force: bool,
        recall: Callable[[Job], Record | None],
    ) -> dict[str, Job]:
        """Record what earlier commands finished, and return the jobs that are left.

        recall: returns the record of a job that is finished, with the same settings. A Failure instead of a job is
        recorded as it is. Records of slides that `only` leaves out are kept.
        """
        seconds = {
            row["slide_id"]: _number(row["seconds"]) for row in recall_csv(self.folder / SUMMARY, "slide_id", "seconds")
        }
        before = {row["slide_id"]: row for row in recall_csv(self.folder / FAILURES, *_FAILURE_COLUMNS)}
        todo: dict[str, Job] = {}
        for slide_id in self.slide_ids:
            job, chosen = jobs[slide_id], only is None or slide_id in only
            kept = None if isinstance(job, Failure) or (chosen and force) else recall(job)
            if kept is not None:
                self.records[slide_id] = replace(kept, seconds=seconds.get(slide_id))
            elif chosen and isinstance(job, Failure):
                self.records[slide_id] = self._failed(slide_id, job)
            elif chosen and not isinstance(job, Failure):
                todo[slide_id] = job
            elif slide_id in before:
                failure = Failure(before[slide_id]["reason"], before[slide_id]["what_to_do"])
                self.records[slide_id] = self._failed(slide_id, failure)
            else:
                self.records[slide_id] = self.record(slide_id, *self.left_out)
        return todo

    def add(self, record: Record) -> None:
        """Record a slide; the tables are saved now and then."""
        self.records[record.slide_id] = record
        if time.monotonic() - self._saved_at > _SAVE_EVERY_S:
            self.save()

    def fail(self, slide_id: str, failure: Failure) -> None:
        """Record a slide that failed."""
        self.add(self._failed(slide_id, failure))

    def _failed(self, slide_id: str, failure: Failure) -> Record:
        return self.record(slide_id, "failed", failure.reason, what_to_do=failure.what_to_do, seconds=failure.seconds)

    def save(self) -> None:
        """Write summary.csv and failures.csv."""
        columns = [each.name for each in fields(self.record) if each.name != "what_to_do"]
        write_csv(self.folder / SUMMARY, columns, map(_cells, self.ordered))
        write_csv(self.folder / FAILURES, _FAILURE_COLUMNS, map(_cells, self.failed))
        self.also_save(self.ordered)
        self._saved_at = time.monotonic()

    @contextmanager
    def saved(self) -> Iterator[None]:
        """Save the tables at the end, however it ends; a folder that cannot be written is an input error."""
        try:
            try:
                yield
            finally:
                self.save()
        except OSError as error:
            raise InputError(
                f"{self.folder} cannot be written ({error}).",
                hint=f"Check free space and permissions, or give another folder with --out. {RESUME}",
            ) from error

    def exit_code(self, only: Collection[str] | None, allow_failures: int) -> int:
        """Return 3 when more of the chosen slides failed than may, else 0."""
        return 3 if sum(only is None or each.slide_id in only for each in self.failed) > allow_failures else 0


def _cells(record: _SlideRecord) -> dict[str, Any]:
    values = asdict(record)
    return {name: round(value, _DIGITS) if isinstance(value, float) else value for name, value in values.items()}


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None
