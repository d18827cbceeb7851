"""Find slide files that are listed twice: the same file, or a copy of it."""

import pytest

from tapfm.cohort.cohort_table import read_cohort
from tapfm.cohort.file_copies import find_copies
from tapfm.errors import CohortError

MIB = 2**20


@pytest.fixture
def write(tmp_path):
    def write_file(name, content):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content)
        return path

    return write_file


def test_the_same_file(write, tmp_path):
    path = write("a.svs", b"slide")
    (tmp_path / "linked").symlink_to(tmp_path)
    (tmp_path / "link.svs").symlink_to(path)
    same = [path, tmp_path / "linked" / "a.svs", tmp_path / "link.svs", tmp_path / "linked" / ".." / "a.svs"]
    other = write("b.svs", b"other")
    assert find_copies(dict(enumerate([*same[:3], other]))) == [([0, 1, 2], "the same file")]


def test_copies(write):
    content = bytes(range(256)) * (3 * MIB // 256)
    paths = [write("a.svs", content), write("b.svs", content + b"x"), write("c.svs", content), write("d.svs", b"")]
    assert find_copies(dict(enumerate(paths))) == [([0, 2], "copies of the same file")]


@pytest.mark.parametrize("position", [0, 4 * MIB, 8 * MIB - 10])
def test_files_of_equal_size_with_different_content(write, position):
    first, second = bytearray(8 * MIB), bytearray(8 * MIB)  # such as uncompressed slides with white borders
    second[position : position + 10] = bytes(range(10))
    assert find_copies({2: write("a.tif", first), 3: write("b.tif", second)}) == []


def test_small_files_of_equal_size(write):
    assert find_copies({2: write("a.svs", b"12345"), 3: write("b.svs", b"12346")}) == []


def test_empty_unreadable_and_missing_files_are_ignored(write, tmp_path):
    paths = [write("a.svs", b""), write("b.svs", b""), tmp_path / "c.svs", tmp_path / "d.svs"]
    assert find_copies(dict(enumerate(paths))) == []


def test_copies_of_slides_with_several_files(write, tmp_path):
    for name in ("a", "b", "c"):
        write(f"{name}.mrxs", b"index")
        write(f"{name}/Data0001.dat", b"pixels of c" if name == "c" else b"pixels of a")
    paths = {number: tmp_path / f"{name}.mrxs" for number, name in enumerate("abc")}
    assert find_copies(paths) == [([0, 1], "copies of the same file")]


def test_one_file_under_two_patients_names_both(write, tmp_path):
    write("a.svs", b"slide")
    write("copy/b.svs", b"slide")
    table = tmp_path / "cohort.csv"
    table.write_text("slide_id,path,patient_id\na,a.svs,P1\nb,copy/b.svs,P2\n")
    with pytest.raises(CohortError, match=r"rows 2 and 3: .* copies of the same file, listed under 2 patients: P1, P2"):
        read_cohort(table)
    table.write_text("slide_id,path,patient_id\na,a.svs,P1\nb,copy/b.svs,P1\n")
    with pytest.raises(CohortError, match=r"copies of the same file\n"):
        read_cohort(table)
