"""Outputs for fixed inputs are those of the golden files, unless the version number of their code has increased.

Caches of tiles, features, synthetic slides, colours and heatmaps are valid as long as the version number of their code
is the same (TILING_VERSION and others). A changed output with an unchanged number would leave stale files in use.
tools/write_golden.py writes the golden files; golden_cases.py defines their contents.
"""

import golden_cases
import numpy as np
import pytest
import write_golden
from golden_cases import CASES, FOLDER, create_items, describe_differences
from version_items import Item, read_golden

MAX_BYTES = 2_000_000


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.constant])
def test_outputs_equal_the_golden_file(name):
    problem = describe_differences(name, create_items(name))
    assert not problem, problem


def test_golden_files_are_small_and_belong_to_a_case():
    files = list(FOLDER.iterdir())
    assert sum(file.stat().st_size for file in files) < MAX_BYTES
    assert {file.stem for file in files} == set(CASES)


# --- messages of a failure


@pytest.fixture
def colours(monkeypatch, tmp_path):
    """Items of a copy of the smallest golden file, with one changed value."""
    for path in FOLDER.glob("colours.*"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    monkeypatch.setattr(golden_cases, "FOLDER", tmp_path)
    items, _ = read_golden(tmp_path / "colours")
    statistics = {part: values.copy() for part, values in items["statistics"].parts.items()}
    statistics["noise"][0] += 1
    return items | {"statistics": Item("statistic", statistics)}


def test_changed_output_requires_a_new_version(colours):
    message = describe_differences("colours", colours)
    assert "COLOURS_VERSION is still 1" in message
    assert "statistics: noise: 1 of 21 differ, first at [0]" in message
    assert "increase COLOURS_VERSION in tiles/colour_statistics.py" in message
    assert message.endswith("then write the golden files again: python tools/write_golden.py")


def test_a_new_version_requires_new_golden_files(colours, monkeypatch):
    monkeypatch.setattr(CASES["colours"].module, "COLOURS_VERSION", 2)
    message = describe_differences("colours", colours)
    assert "COLOURS_VERSION is 2" in message
    assert "version 1" in message
    assert "python tools/write_golden.py colours" in message


def test_golden_files_are_only_written_for_a_new_version(colours, monkeypatch, capsys):
    monkeypatch.setattr(golden_cases, "create_items", lambda _: colours)
    assert write_golden.main(["colours"]) == 1
    printed = capsys.readouterr().out
    assert "colours: not written" in printed
    assert "Increase COLOURS_VERSION in tiles/colour_statistics.py first" in printed
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


def test_an_unknown_golden_file_is_invalid_input(capsys):
    with pytest.raises(SystemExit) as error:
        write_golden.main(["tilling"])
    assert error.value.code == 2
    assert "choose from tiling, features" in capsys.readouterr().err
