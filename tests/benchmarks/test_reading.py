"""The benchmark of reading, with small slides."""

import runpy
from pathlib import Path

import numpy as np
import pytest
from slide_files import section, write_slide

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "reading.py"


@pytest.fixture
def reading(monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    return runpy.run_path(str(SCRIPT))


def test_readers_return_equal_pixels(reading, tmp_path):
    path = write_slide(tmp_path / "one.svs", section(1000, 700))
    row = reading["measure"](path, 448, "random", rounds=1)
    assert (row.slide, row.tiles, row.order, row.count) == ("one.svs", "448 -> 224 px", "random", 2)
    assert set(row.tiles_per_second) >= {"OpenSlide", "tapfm"}
    assert row.ratios["OpenSlide"] == pytest.approx(row.tiles_per_second["tapfm"] / row.tiles_per_second["OpenSlide"])
    assert row.differences["tapfm"] == 0
    assert "| one.svs | 448 -> 224 px | random | 2 |" in reading["format_table"]([row])


def test_file_that_a_reader_cannot_open_is_skipped(reading, tmp_path, capsys):
    write_slide(tmp_path / "good.svs", section(500, 500))
    (tmp_path / "bad.svs").write_bytes(b"II*\0" + bytes(100))
    rows = reading["measure_real"](tmp_path, 1)
    assert [(row.slide, row.tiles, row.order) for row in rows] == [
        ("good.svs", tiles, order) for tiles in ("224 px", "448 -> 224 px") for order in ("grid", "random")
    ]
    assert capsys.readouterr().out.startswith("Skipped bad.svs: ")


def test_positions_are_inside_the_slide(reading):
    positions = np.array(reading["list_positions"](224, "grid", 100, (700, 500)))
    assert len(positions) == 3 * 2
    assert (positions.max(axis=0) + 224 <= (700, 500)).all()
