"""Slide claims: only one process can claim a slide, and claims are released when it exits."""

import subprocess
import sys
from pathlib import Path

import pytest

from tapfm.runtime import claims as claims_module
from tapfm.runtime.claims import _CLAIMS_FILE as FILE
from tapfm.runtime.claims import SlideClaims

OTHER = """
import sys
from pathlib import Path
from tapfm.runtime.claims import SlideClaims
with SlideClaims(Path(sys.argv[1])) as claims:
    print(*(int(claims.claim(slide_id)) for slide_id in sys.argv[2:]), flush=True)
    if sys.stdin.readline() == "release\\n":
        claims.release(sys.argv[2])
        print("released", flush=True)
        sys.stdin.readline()
"""


def start_other(folder, *slide_ids):
    """Claim slides in another process, which then waits. Return the process and whether each claim succeeded."""
    command = [sys.executable, "-c", OTHER, str(folder), *slide_ids]
    other = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    return other, other.stdout.readline().split()


def test_slide_can_be_claimed_by_one_process_only(tmp_path):
    with SlideClaims(tmp_path) as claims:
        other, granted = start_other(tmp_path, "a", "b")
        assert granted == ["1", "1"]
        assert list(claims.claim_each(["a", "b", "c"])) == ["c"]
        other.stdin.write("release\n")
        other.stdin.flush()
        assert other.stdout.readline() == "released\n"
        assert list(claims.claim_each(["a", "b"])) == ["a"]
        other.communicate()
        assert claims.claim("b")


def test_released_slide_can_be_claimed_by_another_process(tmp_path):
    with SlideClaims(tmp_path) as claims:
        assert claims.claim("a")
        other, granted = start_other(tmp_path, "a")
        assert granted == ["0"]
        other.communicate()
        claims.release("a")
        other, granted = start_other(tmp_path, "a")
        assert granted == ["1"]
        other.communicate()


def test_claims_of_a_killed_process_are_released(tmp_path):
    other, granted = start_other(tmp_path, "a")
    assert granted == ["1"]
    other.kill()
    other.communicate()
    with SlideClaims(tmp_path) as claims:
        assert claims.claim("a")


def test_many_claims_use_one_empty_file(tmp_path):
    with SlideClaims(tmp_path) as claims:
        before = len(list(Path("/proc/self/fd").iterdir()))
        ids = [f"slide {number} " + "x" * 300 for number in range(2000)]
        assert list(claims.claim_each(ids)) == ids
        claims.release("never claimed")
        assert len(list(Path("/proc/self/fd").iterdir())) == before
    assert [(path.name, path.stat().st_size) for path in tmp_path.iterdir()] == [(FILE, 0)]


def test_claim_each_claims_slides_lazily(tmp_path):
    with SlideClaims(tmp_path) as claims:
        ids = claims.claim_each(["a", "b"])
        assert next(ids) == "a"
        other, granted = start_other(tmp_path, "b")
        assert granted == ["1"]
        assert list(ids) == []
        other.communicate()


@pytest.mark.parametrize("number", ["ENOLCK", "ENOTSUP"])
def test_every_claim_succeeds_without_file_locks(tmp_path, monkeypatch, number):
    def no_locks(*_):
        raise OSError(getattr(claims_module.errno, number), "no locks here")

    monkeypatch.setattr("fcntl.lockf", no_locks)
    with SlideClaims(tmp_path) as claims:
        assert claims.claim("a")
        claims.release("a")
