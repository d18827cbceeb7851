"""Process each slide of a cohort separately, so that one failed slide does not stop the others.

A function runs on the job of each slide: the data that it needs to process the slide. If the function fails, the slide
is recorded as failed, with a reason and a hint. Results are saved per slide, so that running the same command again
processes only the remaining slides.

    with lock_folder(folder, "tapfm tile"), SlideClaims(folder) as claims:
        table = SlideTable(folder, slide_ids, TilingRecord, "not tiled", "excluded by --only")
        todo = table.select_remaining_jobs(jobs, only=only, force=force, load_finished=load_record)
        with table.save_on_exit(), SlideProgress(console, "tiling", slides=len(todo)) as progress:
            for slide_id, result in process_slides(tile_slide, todo, workers=workers, claims=claims):
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
from tapfm.runtime.csv_files import read_csv_or_empty, write_csv
from tapfm.runtime.workers import WorkerCrash, WorkerPool, map_isolated

SUMMARY_FILE, FAILURES_FILE = "summary.csv", "failures.csv"
_FAILURE_COLUMNS = ("slide_id", "reason", "hint")
RESUME_HINT = "Finished slides are saved. To resume, run the same command again, without --force."
_SAVE_INTERVAL_S = 5.0  # minimum; if the command is killed, both CSV files may lack slides finished since the last save
_SUMMARY_DECIMALS = 4  # of numbers in summary.csv

Job = TypeVar("Job")
Result = TypeVar("Result")


@dataclass(frozen=True)
class Failure:
    """Why a slide failed, and a hint how to fix it. Line breaks in both texts are replaced by spaces."""

    reason: str
    hint: str = ""
    seconds: float | None = None  # time until the slide failed
    stage: str = ""  # stage that failed, such as "tiles"; empty for commands with a single stage

    def __post_init__(self) -> None:
        for name in ("reason", "hint"):
            object.__setattr__(self, name, " ".join(getattr(self, name).split()))


def process_slides(
    function: Callable[[Job], Result],
    jobs: Mapping[str, Job],
    *,
    workers: int,
    claims: SlideClaims | None = None,
    pool: WorkerPool | None = None,
    crash_hint: Callable[[Job], str] = lambda _: "If the machine ran out of memory, reduce --workers.",
) -> Generator[tuple[str, Result | Failure], None, None]:
    """Run a function on each slide's job in worker processes; yield (slide_id, result) as the slides finish.

    The result of a slide is a Failure if the function raised an exception or its worker crashed.

    jobs: the argument of the function for each slide, by slide_id.
    claims: each slide is claimed before it is processed; slides that another process has claimed are skipped. The claim
        of a slide is released when the caller asks for the next result.
    crash_hint: returns the hint for a job whose worker crashed.
    pool: started workers to use first: `WorkerPool(n, serve_function, catch_failures(function))`.
    """
    slide_ids = jobs if claims is None else claims.claim_each(jobs)
    items = ((slide_id, jobs[slide_id]) for slide_id in slide_ids)
    with closing(map_isolated(catch_failures(function), items, workers, pool)) as results:
        for slide_id, result in results:
            if isinstance(result, WorkerCrash):
                yield slide_id, Failure(result.reason, crash_hint(jobs[slide_id]))
            else:
                yield slide_id, result
            if claims is not None:
                claims.release(slide_id)


def catch_failures(function: Callable[[Job], Result]) -> Callable[[Job], Result | Failure]:
    """Wrap a function so that it returns a Failure instead of raising an exception. The wrapper can be pickled."""
    return partial(_call_and_catch, function)


def _call_and_catch(function: Callable[[Job], Result], job: Job) -> Result | Failure:
    start = time.monotonic()
    try:
        return function(job)
    except TapfmError as error:
        failure = Failure(error.message, error.hint)
    except OSError as error:
        failure = Failure(str(error), "Check free disk space and permissions.")
    except Exception as error:  # a bug in tapfm must not stop the other slides
        failure = Failure(f"unexpected {type(error).__name__}: {error}", "This is a bug in tapfm; please report it.")
    return replace(failure, seconds=round(time.monotonic() - start, 2))


class _SlideRecord(Protocol):
    """Protocol of a row of summary.csv: a frozen dataclass whose fields have defaults, except slide_id and status."""

    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]

    def __init__(
        self, slide_id: str, status: str, reason: str = "", *, hint: str = "", seconds: float | None = None
    ) -> None: ...

    @property
    def slide_id(self) -> str: ...

    @property
    def status(self) -> str:
        """The text "ok" or "failed"; or a text such as "not tiled" if --only excludes a slide without results."""

    @property
    def reason(self) -> str:
        """Why the slide failed or was not processed."""

    @property
    def hint(self) -> str:
        """How to fix the failure; written to failures.csv only."""

    @property
    def seconds(self) -> float | None:
        """Processing time; None if it is not known."""

    @property
    def tiles(self) -> int:
        """Number of tiles of the slide."""


Record = TypeVar("Record", bound=_SlideRecord)


@dataclass(repr=False)
class SlideTable(Generic[Record]):
    """Records of all slides of a cohort, saved in the output folder as summary.csv. failures.csv has the failed slides.

    unselected_status, unselected_reason: recorded for slides that --only excludes, unless an earlier command processed
        them.
    on_save: called with all records whenever the two files are saved.
    """

    folder: Path
    slide_ids: Sequence[str]  # in the order of the cohort
    record_type: type[Record]
    unselected_status: str
    unselected_reason: str
    on_save: Callable[[Sequence[Record]], object] = lambda _: None
    records: dict[str, Record] = field(default_factory=dict)  # by slide_id
    _saved_at: float = field(default_factory=time.monotonic)

    def __repr__(self) -> str:
        counts = f"{len(self.finished):,} finished, {len(self.failed):,} failed of {len(self.slide_ids):,} slides"
        return f"SlideTable('{self.folder}': {counts})"

    @property
    def records_in_cohort_order(self) -> list[Record]:
        """All records, in cohort order."""
        return [self.records[slide_id] for slide_id in self.slide_ids if slide_id in self.records]

    @property
    def finished(self) -> list[Record]:
        """Records of slides that were processed without error."""
        return [record for record in self.records_in_cohort_order if record.status == "ok"]

    @property
    def failed(self) -> list[Record]:
        """Records of slides that failed."""
        return [record for record in self.records_in_cohort_order if record.status == "failed"]

    def select_remaining_jobs(
        self,
        jobs: Mapping[str, Job | Failure],
        *,
        only: Collection[str] | None,
        force: bool,
        load_finished: Callable[[Job], Record | None],
    ) -> dict[str, Job]:
        """Record the slides that earlier commands finished, and return the jobs of the remaining slides.

        Slides that `only` does not select are not processed. Their records are kept if they failed earlier, or if
        `load_finished` finds their results; otherwise they get `unselected_status`.

        jobs: by slide_id. A slide with a Failure instead of a job is recorded as failed.
        only: slide_ids to process; None selects all slides.
        force: process the selected slides again, even if they are finished.
        load_finished: returns the record of a job that is already finished with the same settings, else None.
        """
        earlier_seconds = {
            row["slide_id"]: _parse_float_or_none(row["seconds"])
            for row in read_csv_or_empty(self.folder / SUMMARY_FILE, "slide_id", "seconds")
        }
        earlier_failures = {
            row["slide_id"]: row for row in read_csv_or_empty(self.folder / FAILURES_FILE, *_FAILURE_COLUMNS)
        }
        todo: dict[str, Job] = {}
        for slide_id in self.slide_ids:
            job, selected = jobs[slide_id], only is None or slide_id in only
            finished = None if isinstance(job, Failure) or (selected and force) else load_finished(job)
            if finished is not None:
                self.records[slide_id] = replace(finished, seconds=earlier_seconds.get(slide_id))
            elif selected and isinstance(job, Failure):
                self.records[slide_id] = self._failed_record(slide_id, job)
            elif selected and not isinstance(job, Failure):
                todo[slide_id] = job
            elif slide_id in earlier_failures:
                failure = Failure(earlier_failures[slide_id]["reason"], earlier_failures[slide_id]["hint"])
                self.records[slide_id] = self._failed_record(slide_id, failure)
            else:
                self.records[slide_id] = self.record_type(slide_id, self.unselected_status, self.unselected_reason)
        return todo

    def add(self, record: Record) -> None:
        """Add a slide's record, and write summary.csv and failures.csv if the last save was over 5 seconds ago."""
        self.records[record.slide_id] = record
        if time.monotonic() - self._saved_at > _SAVE_INTERVAL_S:
            self.save()

    def add_failure(self, slide_id: str, failure: Failure) -> None:
        self.add(self._failed_record(slide_id, failure))

    def _failed_record(self, slide_id: str, failure: Failure) -> Record:
        return self.record_type(slide_id, "failed", failure.reason, hint=failure.hint, seconds=failure.seconds)

    def save(self) -> None:
        """Write all records to summary.csv, and those of failed slides to failures.csv."""
        columns = [each.name for each in fields(self.record_type) if each.name != "hint"]
        write_csv(self.folder / SUMMARY_FILE, columns, map(_record_to_cells, self.records_in_cohort_order))
        write_csv(self.folder / FAILURES_FILE, _FAILURE_COLUMNS, map(_record_to_cells, self.failed))
        self.on_save(self.records_in_cohort_order)
        self._saved_at = time.monotonic()

    @contextmanager
    def save_on_exit(self) -> Iterator[None]:
        """Write summary.csv and failures.csv when the context exits, also after an error.

        Raises InputError if the folder cannot be written to.
        """
        try:
            try:
                yield
            finally:
                self.save()
        except OSError as error:
            raise InputError(
                f"{self.folder} cannot be written to ({error}).",
                hint=f"Check free disk space and permissions, or choose another folder with --out. {RESUME_HINT}",
            ) from error

    def exit_code(self, only: Collection[str] | None, allow_failures: int) -> int:
        """Return 3 if more than `allow_failures` of the slides in `only` (None: all slides) failed, else 0."""
        return 3 if sum(only is None or each.slide_id in only for each in self.failed) > allow_failures else 0


def _record_to_cells(record: _SlideRecord) -> dict[str, Any]:
    """Return the values of a record by column name, with rounded numbers."""
    values = asdict(record)
    return {
        name: round(value, _SUMMARY_DECIMALS) if isinstance(value, float) else value for name, value in values.items()
    }


def _parse_float_or_none(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None
