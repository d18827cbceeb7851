import subprocess
import sys

from tapfm.runtime.claims import SlideClaims

OTHER = """
import sys
from pathlib import Path
from tapfm.runtime.claims import SlideClaims
claims = SlideClaims(Path(sys.argv[1]))
print(*(int(claims.take(slide_id)) for slide_id in sys.argv[2:]), flush=True)
if sys.stdin.readline() == "release\\n":
    claims.release(sys.argv[2])
    print("released", flush=True)
    sys.stdin.readline()
"""


def start_other(folder, *slide_ids):
    """Claim slides in another process, which then waits; returns it and what it was granted."""
    command = [sys.executable, "-c", OTHER, str(folder), *slide_ids]
    other = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    return other, other.stdout.readline().split()


def test_a_slide_is_granted_to_one_process(tmp_path):
    with SlideClaims(tmp_path) as claims:
        other, granted = start_other(tmp_path, "a", "b")
        with other:
            assert granted == ["1", "1"]
            assert list(claims.take_each(["a", "b", "c"])) == ["c"]
            other.communicate("release\n")
        assert list(claims.take_each(["a", "b"])) == ["a", "b"]


def test_a_released_slide_can_be_claimed_by_another(tmp_path):
    with SlideClaims(tmp_path) as claims:
        assert claims.take("a")
        other, granted = start_other(tmp_path, "a")
        assert granted == ["0"]
        other.communicate("")
        claims.release("a")
        other, granted = start_other(tmp_path, "a")
        assert granted == ["1"]
        other.communicate("")


def test_claims_of_a_process_that_was_killed_are_free(tmp_path):
    other, granted = start_other(tmp_path, "a")
    assert granted == ["1"]
    other.kill()
    other.communicate()
    with SlideClaims(tmp_path) as claims:
        assert claims.take("a")


def test_nothing_is_left_behind(tmp_path):
    with SlideClaims(tmp_path) as claims:
        assert list(claims.take_each([f"slide {i} " + "x" * 300 for i in range(20)]))
        claims.release("slide 3 " + "x" * 300)
        claims.release("never claimed")
    assert list(tmp_path.iterdir()) == []


def test_slides_are_claimed_when_they_are_asked_for(tmp_path):
    with SlideClaims(tmp_path) as claims:
        ids = claims.take_each(["a", "b"])
        assert next(ids) == "a"
        other, granted = start_other(tmp_path, "b")
        assert granted == ["1"]
        assert list(ids) == []
        other.communicate("")
