import os
from dataclasses import dataclass

import pytest

from tapfm.errors import InputError, SlideError
from tapfm.runtime import cohort_job
from tapfm.runtime.cohort_job import FAILURES_FILE, SUMMARY_FILE, Failure, SlideTable, catch_failures, process_slides
from tapfm.runtime.csv_files import read_csv
from tapfm.runtime.workers import WorkerPool, serve_function


@dataclass(frozen=True)
class Record:
    slide_id: str
    status: str
    reason: str = ""
    tiles: int = 0
    part: float | None = None
    seconds: float | None = None
    hint: str = ""


def work(job):
    if job == "bad":
        raise SlideError("is\n  damaged", hint="Copy it.")
    if job == "defect":
        raise ZeroDivisionError("oh")
    if job == "locked":
        raise PermissionError(13, "Permission denied", "x.svs")
    if job == "crash":
        os._exit(9)
    return job.upper()


def make_table(folder, slide_ids="abc", **options):
    return SlideTable(folder, list(slide_ids), Record, "not done", "no result with these settings", **options)


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_failed_slide_does_not_affect_other_slides(workers):
    jobs = {"1": "a", "2": "bad", "3": "defect", "4": "d", "5": "locked"}
    results = dict(process_slides(work, jobs, workers=workers))
    assert (results["1"], results["4"]) == ("A", "D")
    assert (results["2"].reason, results["2"].hint) == ("is damaged", "Copy it.")
    assert "ZeroDivisionError: oh" in results["3"].reason
    assert results["3"].seconds is not None
    assert results["5"].reason == "[Errno 13] Permission denied: 'x.svs'"


def test_crash_becomes_a_failure_with_a_hint():
    results = dict(process_slides(work, {"1": "crash", "2": "b"}, workers=1, crash_hint=lambda job: f"no {job}"))
    assert "code 9" in results["1"].reason
    assert results["1"].hint == "no crash"
    assert results["2"] == "B"


def test_run_slides_uses_workers_of_a_pool():
    pool = WorkerPool(1, serve_function, catch_failures(work))
    assert dict(process_slides(work, {"1": "a", "2": "bad"}, workers=1, pool=pool))["1"] == "A"


class Claims:
    """Fake claims, some of which another process holds. Records which slides are taken and released."""

    def __init__(self, others):
        self.others, self.events = others, []

    def claim_each(self, slide_ids):
        for slide_id in slide_ids:
            if slide_id not in self.others:
                self.events.append(f"take {slide_id}")
                yield slide_id

    def release(self, slide_id):
        self.events.append(f"release {slide_id}")


def test_claimed_slides_are_skipped_and_claims_are_released_after_the_result():
    claims = Claims({"2"})
    for slide_id, _ in process_slides(work, {"1": "a", "2": "b", "3": "c"}, workers=0, claims=claims):
        claims.events.append(f"handle {slide_id}")
    assert claims.events == ["take 1", "handle 1", "release 1", "take 3", "handle 3", "release 3"]


def test_finished_slides_are_skipped_when_resuming(tmp_path):
    table = make_table(tmp_path)
    with table.save_on_exit():
        assert table.select_remaining_jobs(
            dict.fromkeys("abc", "job"), only=None, force=False, load_finished=lambda _: None
        )
        table.add(Record("a", "ok", tiles=7, part=0.123456, seconds=1.5))
        table.add_failure("b", Failure("is damaged", "Copy it.", seconds=0.5))
    assert [row["slide_id"] for row in read_csv(tmp_path / SUMMARY_FILE)] == ["a", "b"]  # c was not reached
    assert read_csv(tmp_path / SUMMARY_FILE)[0]["part"] == "0.1235"
    assert read_csv(tmp_path / FAILURES_FILE) == [{"slide_id": "b", "reason": "is damaged", "hint": "Copy it."}]

    again = make_table(tmp_path)
    done = {"A": Record("a", "ok", tiles=7)}
    todo = again.select_remaining_jobs({"a": "A", "b": "B", "c": "C"}, only=None, force=False, load_finished=done.get)
    assert todo == {"b": "B", "c": "C"}
    assert again.records == {"a": Record("a", "ok", tiles=7, seconds=1.5)}  # seconds are read from summary.csv
    assert set(
        make_table(tmp_path).select_remaining_jobs(
            {"a": "A", "b": "B", "c": "C"}, only=None, force=True, load_finished=done.get
        )
    ) == set("abc")


def test_only_selects_slides_and_keeps_records_of_others(tmp_path):
    table = make_table(tmp_path)
    with table.save_on_exit():
        table.add_failure("b", Failure("is damaged", "Copy it."))
    again = make_table(tmp_path)
    done = {"A": Record("a", "ok")}
    todo = again.select_remaining_jobs({"a": "A", "b": "B", "c": "C"}, only=["c"], force=True, load_finished=done.get)
    assert todo == {"c": "C"}
    assert [(each.slide_id, each.status) for each in again.records_in_cohort_order] == [("a", "ok"), ("b", "failed")]
    assert again.failed[0].hint == "Copy it."
    todo = make_table(tmp_path / "new").select_remaining_jobs(
        {"a": "A", "b": "B", "c": "C"}, only=["c"], force=False, load_finished=lambda _: None
    )
    assert todo == {"c": "C"}


def test_failure_instead_of_a_job_is_recorded(tmp_path):
    table = make_table(tmp_path, "ab")
    assert table.select_remaining_jobs(
        {"a": Failure("no tiles"), "b": "B"}, only=None, force=False, load_finished=lambda _: None
    ) == {"b": "B"}
    assert [each.reason for each in table.failed] == ["no tiles"]


@pytest.mark.parametrize(("only", "allowed", "code"), [(None, 0, 3), (None, 2, 0), (["a"], 0, 3), (["c"], 0, 0)])
def test_exit_code_counts_failures_of_selected_slides(tmp_path, only, allowed, code):
    table = make_table(tmp_path)
    for slide_id in "ab":
        table.add_failure(slide_id, Failure("is damaged"))
    table.add(Record("c", "ok"))
    assert table.exit_code(only, allowed) == code


def test_tables_are_saved_periodically_and_after_an_interrupt(tmp_path, monkeypatch):
    monkeypatch.setattr(cohort_job, "_SAVE_INTERVAL_S", -1.0)
    seen = []
    table = make_table(tmp_path, on_save=lambda records: seen.append(len(records)))
    table.add(Record("a", "ok"))
    assert seen == [1]
    monkeypatch.setattr(cohort_job, "_SAVE_INTERVAL_S", 1e9)

    def stop():
        with table.save_on_exit():
            table.add(Record("b", "ok"))
            assert seen == [1]
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        stop()
    assert seen == [1, 2]


def test_unwritable_folder_raises_input_error(tmp_path):
    (tmp_path / "file").write_text("")
    table = make_table(tmp_path / "file")
    with pytest.raises(InputError, match="cannot be written"), table.save_on_exit():
        pass


def test_summary_with_byte_order_mark_is_read_and_foreign_table_is_ignored(tmp_path):
    table = make_table(tmp_path, "a")
    with table.save_on_exit():
        table.add(Record("a", "ok", seconds=1.5))
    summary = tmp_path / SUMMARY_FILE
    summary.write_bytes(b"\xef\xbb\xbf" + summary.read_bytes())
    again = make_table(tmp_path, "a")
    assert (
        again.select_remaining_jobs({"a": "A"}, only=None, force=False, load_finished=lambda _: Record("a", "ok")) == {}
    )
    assert again.records["a"].seconds == 1.5
    summary.write_text("name;seconds\na;1\n")
    assert make_table(tmp_path, "a").select_remaining_jobs(
        {"a": "A"}, only=None, force=False, load_finished=lambda _: None
    ) == {"a": "A"}


def test_planning_writes_no_files(tmp_path, monkeypatch):
    monkeypatch.setattr(cohort_job, "_SAVE_INTERVAL_S", -1.0)
    make_table(tmp_path).select_remaining_jobs(
        dict.fromkeys("abc", Failure("no tiles")), only=None, force=False, load_finished=lambda _: None
    )
    assert list(tmp_path.iterdir()) == []
