"""`tapfm tile` when it is stopped, killed, started twice or runs long: complete files, resuming, constant memory."""

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
from cohort_files import make_cohort, read_rows, read_tile_files
from command_line import PROGRAM, start_tapfm, tapfm, wait_for
from slide_files import copy_slide, section, write_slide

from tapfm.runtime.cohort_job import RESUME_HINT
from tapfm.runtime.output_folder import lock_folder
from tapfm.tiles.store import read_tiles


def child_pids(pid):
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def has_exited(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


@pytest.mark.parametrize("stop_signal", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
def test_stopped_command_leaves_complete_files_and_resumes(tmp_path, stop_signal):
    cohort = make_cohort(tmp_path / "c", 8)
    tapfm("tile", cohort, "--out", tmp_path / "uninterrupted", "--workers", 2)
    out = tmp_path / "tiles"
    process = start_tapfm("tile", cohort, "--out", out, "--workers", 2)
    wait_for(lambda: len(list((out / "patches").glob("*.h5"))) >= 2, process)
    workers = child_pids(process.pid)
    process.send_signal(stop_signal)
    _, stderr = process.communicate()
    assert process.returncode == {signal.SIGKILL: -9, signal.SIGINT: 130, signal.SIGTERM: 143}[stop_signal], stderr
    assert "Traceback" not in stderr
    assert (RESUME_HINT in stderr) == (stop_signal != signal.SIGKILL)
    wait_for_exit(workers)
    for path in (out / "patches").glob("*.h5"):
        read_tiles(path)
    done = {path: path.stat().st_mtime_ns for path in (out / "patches").glob("*.h5")}
    result = tapfm("tile", cohort, "--out", out, "--workers", 2)
    assert result.returncode == 0, result.stderr
    assert "of 8 slides are already tiled" in result.stderr
    assert {path: path.stat().st_mtime_ns for path in done} == done
    assert read_tile_files(out) == read_tile_files(tmp_path / "uninterrupted")
    assert not list(out.rglob("*.unfinished"))
    assert len(read_rows(out / "summary.csv")) == 8


def wait_for_exit(pids):
    deadline = time.monotonic() + 60
    while not all(map(has_exited, pids)):
        assert time.monotonic() < deadline, "workers are still running"
        os.sched_yield()


def test_killed_worker_fails_only_its_slide(tmp_path):
    cohort, out = make_cohort(tmp_path / "c", 12), tmp_path / "tiles"
    process = start_tapfm("tile", cohort, "--out", out, "--workers", 1)
    wait_for(lambda: len(list((out / "patches").glob("*.h5"))) >= 1, process)
    os.kill(child_pids(process.pid)[-1], signal.SIGKILL)
    stdout, _ = process.communicate()
    assert process.returncode == 3
    assert "Tiled 11 of 12 slides" in stdout
    (failure,) = read_rows(out / "failures.csv")
    assert "killed by SIGKILL (out of memory?)" in failure["reason"]


def test_unfinished_files_of_a_killed_command_are_removed(tmp_path):
    cohort, out = make_cohort(tmp_path / "c", 1), tmp_path / "tiles"
    (out / "patches").mkdir(parents=True)
    (out / "patches" / ".case-0_patches.h5.abc.unfinished").write_bytes(b"half")
    (out / "mine.txt").write_text("kept")
    assert tapfm("tile", cohort, "--out", out).returncode == 0
    assert not list(out.rglob("*.unfinished"))
    assert (out / "mine.txt").read_text() == "kept"


def test_two_commands_in_one_folder_are_rejected(tmp_path):
    cohort, out = make_cohort(tmp_path / "c", 1), tmp_path / "tiles"
    with lock_folder(out, "tapfm tile"):
        second = tapfm("tile", cohort, "--out", out)
    assert second.returncode == 2
    assert "Another tapfm command is running" in second.stderr
    assert tapfm("tile", cohort, "--out", out).returncode == 0


def test_memory_is_constant_over_200_slides(tmp_path):
    folder = tmp_path / "c"
    folder.mkdir()
    for i in range(10):
        write_slide(folder / f"s{i}.svs", section(700, 700, seed=i), downsamples=(1,))
    peaks = {}
    for i in range(10, 200):
        copy_slide(folder / f"s{i % 10}.svs", folder / f"s{i}.svs")
    for count in (20, 200):
        lines = ["slide_id,path", *(f"case-{i},s{i}.svs" for i in range(count))]
        (folder / "cohort.csv").write_text("\n".join(lines))
        process = subprocess.Popen(
            [*PROGRAM, "tile", folder / "cohort.csv", "--out", tmp_path / f"t{count}", "--workers", "2"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        _, status, usage = os.wait4(process.pid, 0)  # peak of the process or its largest worker
        process.returncode = os.waitstatus_to_exitcode(status)
        assert process.returncode == 0
        peaks[count] = usage.ru_maxrss
    assert peaks[200] < 1.1 * peaks[20]
