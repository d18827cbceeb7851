"""Outputs for fixed inputs are those of the golden files, or the version number beside the code has been increased.

Caches of tiles, features, painted slides, colours and pictures are kept as long as the version number of their code is
the same (TILING_VERSION and others). So a change of output without a change of the number would serve stale files.
tools/write_golden.py writes the golden files; golden_cases.py says what is in them.
"""

import golden_cases
import numpy as np
import pytest
import write_golden
from golden_cases import CASES, FOLDER, explain, make_items
from version_items import Item, read_golden

MOST_BYTES = 2_000_000


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.constant])
def test_outputs_are_those_of_the_golden_file(name):
    problem = explain(name, make_items(name))
    assert not problem, problem


def test_golden_files_are_small_and_none_is_left_over():
    files = list(FOLDER.iterdir())
    assert sum(file.stat().st_size for file in files) < MOST_BYTES
    assert {file.stem for file in files} == set(CASES)


# --- what a failure says


@pytest.fixture
def colours(monkeypatch, tmp_path):
    """Work on a copy of the smallest golden file; returns its items with one value changed."""
    for path in FOLDER.glob("colours.*"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    monkeypatch.setattr(golden_cases, "FOLDER", tmp_path)
    items, _ = read_golden(tmp_path / "colours")
    statistics = {part: values.copy() for part, values in items["statistics"].parts.items()}
    statistics["noise"][0] += 1
    return items | {"statistics": Item("statistic", statistics)}


def test_a_change_of_output_asks_for_a_new_version(colours):
    said = explain("colours", colours)
    assert "COLOURS_VERSION is still 1" in said
    assert "statistics: noise: 1 of 21 differ, first at [0]" in said
    assert "increase COLOURS_VERSION in tiles/colours.py" in said
    assert said.endswith("then write the golden files again: python tools/write_golden.py")


def test_a_new_version_asks_for_new_golden_files(colours, monkeypatch):
    monkeypatch.setattr(CASES["colours"].module, "COLOURS_VERSION", 2)
    said = explain("colours", colours)
    assert said == (
        "COLOURS_VERSION is 2, and the golden file was written by version 1. "
        "Write it again: python tools/write_golden.py colours"
    )


def test_golden_files_are_written_for_a_new_version_only(colours, monkeypatch, capsys):
    monkeypatch.setattr(golden_cases, "make_items", lambda _: colours)
    assert write_golden.main(["colours"]) == 1
    printed = capsys.readouterr().out
    assert "colours: not written" in printed
    assert "Increase COLOURS_VERSION in tiles/colours.py first" in printed
    monkeypatch.setattr(CASES["colours"].module, "COLOURS_VERSION", 2)
    assert write_golden.main(["colours"]) == 0
    printed = capsys.readouterr().out
    assert "colours: written" in printed
    assert "noise: 1 of 21 differ" in printed
    items, version = read_golden(golden_cases.FOLDER / "colours")
    assert version == 2
    np.testing.assert_array_equal(items["statistics"].parts["noise"], colours["statistics"].parts["noise"])
    assert write_golden.main(["colours"]) == 0
    assert "colours: unchanged" in capsys.readouterr().out


def test_an_unknown_golden_file_is_bad_input(capsys):
    with pytest.raises(SystemExit) as ended:
        write_golden.main(["tilling"])
    assert ended.value.code == 2
    assert "choose from tiling, features" in capsys.readouterr().err
