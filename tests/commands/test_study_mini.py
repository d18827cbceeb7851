"""What `--scale mini` makes for itself: painted slides, tiles, tiles of another task. Its studies take too long."""

import pytest
from command_line import tapfm
from PIL import Image
from rich.console import Console

from tapfm.study import mini as study_mini
from tapfm.study.plan import check_slides
from tapfm.study.preset_studies import build_mini_study
from tapfm.study.probe_tiles import find_probe_tiles
from tapfm.workflows.study import _prepare_mini as prepare_mini


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Two slides instead of forty."""
    folder = tmp_path_factory.mktemp("mini")
    commands = []

    def run(words, log, look):  # noqa: ARG001 - as children are run
        commands.append(words)
        fewer = ("--slides", "2", "--external", "1", "--tiles", "30") if words[0] == "synth" else ()
        result = tapfm(*words, *fewer)
        assert result.returncode == 0, result.said
        return 0

    results = study_mini.prepare_mini_data(folder, ["fgfr3"], console=Console(quiet=True), run_command=run)
    assert not results.failed
    assert [words[0] for words in commands] == ["synth", "tile", "tile"]
    commands.clear()
    study_mini.prepare_mini_data(folder, ["fgfr3"], console=Console(quiet=True), run_command=run)
    assert not commands  # all of it is there
    return folder


def test_a_small_study_finds_all_it_needs(made):
    study = build_mini_study("ablation-tiles", made)
    check_slides(study)
    assert study.encoders == ["tapfm-pocket"]
    assert "K = 8, 16, 24 tiles" in study.notes[1]
    assert "20 epochs" in study.notes[1]
    assert "12 tiles" in build_mini_study("paper-table1", made).notes[1]


def test_tiles_of_another_task_are_cut_by_the_truth(made, monkeypatch):
    monkeypatch.setattr(study_mini, "_MIN_TILES", 2)
    monkeypatch.setattr(study_mini, "_PROBE_TILES", 5)
    folder = study_mini.cut_probe_tiles(made, "fgfr3")
    found = find_probe_tiles(folder)
    assert {"epithelium", "stroma"} <= set(found.classes)
    assert {each.path.name.split("_")[0] for each in found.train}.isdisjoint(
        each.path.name.split("_")[0] for each in found.test
    )
    assert max(sum(each.label == name for each in found.test) for name in found.classes) <= 5
    with Image.open(found.train[0].path) as tile:
        assert tile.size == (224, 224)
    written = (folder / "README.md").stat().st_mtime_ns
    assert study_mini.cut_probe_tiles(made, "fgfr3") == folder
    assert (folder / "README.md").stat().st_mtime_ns == written


def test_what_it_is_worth_is_said_first(made, capsys, monkeypatch):
    monkeypatch.setattr(study_mini, "_MIN_TILES", 2)
    console = Console(stderr=True, width=300)
    prepare_mini("forgetting", {made: build_mini_study("forgetting", made)}, made, resume=False, console=console)
    said = capsys.readouterr().err
    assert "K = 12 tiles of a slide in a step, 8 epochs" in said
    assert "not which method is better" in said
