import io

import pytest
from rich.console import Console

from tapfm.runtime import progress
from tapfm.runtime.progress import SlideProgress


def console(*, terminal):
    return Console(file=io.StringIO(), force_terminal=terminal, width=200)


@pytest.fixture(autouse=True)
def clock(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    return now


def test_without_terminal_lines_are_printed_periodically(clock):
    out = console(terminal=False)
    with SlideProgress(out, "tiling", slides=3) as bar:
        bar.finish_slide("a", tiles=10)
        assert out.file.getvalue() == ""
        clock[0] = 20.0
        bar.finish_slide("b", tiles=30)
        clock[0] = 21.0
        bar.finish_slide("c", tiles=30)
    line = out.file.getvalue()
    assert line.count("\n") == 1
    assert "tiling" in line
    assert "2 of 3 slides" in line
    assert "10.0 s per slide" in line
    assert "2 tiles/s" in line


def test_failure_is_printed_and_counted(clock):
    out = console(terminal=False)
    with SlideProgress(out, "tiling", slides=2) as bar:
        clock[0] = 16.0
        bar.finish_slide("a", failure="is damaged")
    assert "a: is damaged" in out.file.getvalue()
    assert "1 failed" in out.file.getvalue()


def test_tile_count_includes_unreadable_tiles(clock):
    out = console(terminal=False)
    with SlideProgress(out, "embedding", slides=2, tiles=100, note=lambda: "waiting 7%") as bar:
        bar.add_tiles(20)
        bar.finish_slide("a", tiles=40)
        clock[0] = 16.0
        bar.add_tiles(16)
    line = out.file.getvalue()
    assert "1 of 2 slides" in line
    assert "56 of 100 tiles" in line
    assert "2 tiles/s" in line  # of the 36 that were read
    assert "waiting 7%" in line


def test_terminal_shows_a_progress_bar():
    out = console(terminal=True)
    with SlideProgress(out, "tiling", slides=2) as bar:
        bar.finish_slide("a", tiles=3)
        bar.finish_slide("b", tiles=3)
    assert "2/2" in out.file.getvalue()
