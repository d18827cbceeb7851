"""Data of `--scale mini`: synthetic slides, tiles, and tiles of another task. The studies would take too long."""

import pytest
from command_line import tapfm
from PIL import Image
from rich.console import Console

from tapfm.study import mini_data
from tapfm.study.preset_studies import build_mini_study
from tapfm.study.probe_tiles import find_probe_tiles
from tapfm.study.study_plan import check_input_files
from tapfm.workflows.study import _prepare_mini as prepare_mini


@pytest.fixture(scope="module")
def mini_folder(tmp_path_factory):
    """Folder with mini data: two slides instead of forty."""
    folder = tmp_path_factory.mktemp("mini")
    commands = []

    def run(arguments, log, check):  # noqa: ARG001 - signature of run_child_command
        commands.append(arguments)
        fewer = ("--slides", "2", "--external", "1", "--tiles-per-slide", "30") if arguments[0] == "synth" else ()
        result = tapfm(*arguments, *fewer)
        assert result.returncode == 0, result.output
        return 0

    results = mini_data.prepare_mini_data(folder, ["fgfr3"], console=Console(quiet=True), run_command=run)
    assert not results.failed
    assert [each[0] for each in commands] == ["synth", "tile", "tile"]
    commands.clear()
    mini_data.prepare_mini_data(folder, ["fgfr3"], console=Console(quiet=True), run_command=run)
    assert not commands  # nothing is generated again
    return folder


def test_mini_study_uses_the_prepared_slides_and_tiles(mini_folder):
    study = build_mini_study("ablation-tiles", mini_folder)
    check_input_files(study)
    assert study.encoders == ["tapfm-pocket"]
    assert "K = 8, 16, 24 tiles" in study.notes[1]
    assert "20 epochs" in study.notes[1]
    assert "12 tiles" in build_mini_study("paper-table1", mini_folder).notes[1]


def test_probe_tiles_are_extracted_by_tissue_type(mini_folder, monkeypatch):
    monkeypatch.setattr(mini_data, "_MIN_PROBE_TILES", 2)
    monkeypatch.setattr(mini_data, "_MAX_PROBE_TILES", 5)
    folder = mini_data.extract_probe_tiles(mini_folder, "fgfr3")
    tiles = find_probe_tiles(folder)
    assert {"epithelium", "stroma"} <= set(tiles.classes)
    assert {each.path.name.split("_")[0] for each in tiles.train}.isdisjoint(
        each.path.name.split("_")[0] for each in tiles.test
    )
    assert max(sum(each.label == name for each in tiles.test) for name in tiles.classes) <= 5
    with Image.open(tiles.train[0].path) as tile:
        assert tile.size == (224, 224)
    written = (folder / "README.md").stat().st_mtime_ns
    assert mini_data.extract_probe_tiles(mini_folder, "fgfr3") == folder
    assert (folder / "README.md").stat().st_mtime_ns == written


def test_mini_study_prints_its_size_and_limits_first(mini_folder, capsys, monkeypatch):
    monkeypatch.setattr(mini_data, "_MIN_PROBE_TILES", 2)
    console = Console(stderr=True, width=300)
    prepare_mini(
        "forgetting",
        {mini_folder: build_mini_study("forgetting", mini_folder)},
        mini_folder,
        resume=False,
        console=console,
    )
    printed = capsys.readouterr().err
    assert "K = 12 tiles per slide and step, 8 epochs" in printed
    assert "which method is better" in printed
