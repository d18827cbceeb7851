"""A slide whose file is missing costs only this slide, in every command that reads slides."""

import shutil

import pytest
from cohort_files import read_rows
from command_line import tapfm
from training_workspace import case_id

LOST = case_id(7)  # a test slide


def failures(folder):
    return {row["slide_id"]: row["reason"] for row in read_rows(folder / "failures.csv")}


@pytest.fixture
def incomplete(workspace_copy):
    """A workspace in which the file of one slide is missing, and its tiles and features too."""
    (workspace_copy / "7.svs").unlink()
    for path in (
        workspace_copy / "tiles" / "patches" / f"{LOST}_patches.h5",
        workspace_copy / "features" / f"{LOST}.h5",
    ):
        path.unlink()
    return workspace_copy


@pytest.mark.parametrize("allowed", [0, 1])
def test_tile(incomplete, allowed):
    out = incomplete / "new-tiles"
    result = tapfm("tile", incomplete / "cohort.csv", "--out", out, "--workers", 0, "--allow-failures", allowed)
    assert result.returncode == (0 if allowed else 3), result.output
    assert "Tiled 9 of 10 slides" in result.stdout
    assert "1 of 10 slide files were not found" in result.stderr
    assert failures(out) == {LOST: f"{incomplete / '7.svs'} does not exist."}
    assert "--slides FOLDER" in read_rows(out / "failures.csv")[0]["hint"]


@pytest.mark.parametrize("allowed", [0, 1])
def test_embed(incomplete, allowed):
    options = ("--encoder", "tapfm-pocket", "--tiles", incomplete / "tiles", "--out", incomplete / "features")
    options += ("--device", "cpu", "--workers", 0, "--allow-failures", allowed)
    result = tapfm("embed", incomplete / "cohort.csv", *options)
    assert result.returncode == (0 if allowed else 3), result.output
    assert "Encoded 9 of 10 slides" in result.stdout
    assert failures(incomplete / "features") == {LOST: f"{incomplete / '7.svs'} does not exist."}
    assert "tapfm tile" not in result.output  # would fail in the same way


@pytest.mark.parametrize("method", ["tapfm", "fixed"])
def test_train(incomplete, method):
    command = ("train", incomplete / "run.toml", "--out", incomplete / "run", "--set", f"adaptation.method={method}")
    result = tapfm(*command)
    assert result.returncode == 2
    assert f"{LOST}: " in result.stderr
    assert "7.svs does not exist" in result.stderr
    assert "--allow-failures 1" in result.stderr
    assert "cohort.slides=FOLDER" in result.stderr
    assert not (incomplete / "run").exists()
    result = tapfm(*command, "--allow-failures", 1)
    assert result.returncode == 0, result.output
    assert "7.svs does not exist" in failures(incomplete / "run")[LOST]
    assert {row["slide_id"] for row in read_rows(incomplete / "run" / "predictions-test.csv")} == {
        case_id(number) for number in (6, 8, 9)
    }


def test_train_on_features_does_not_need_the_slide_file(workspace_copy):
    (workspace_copy / "7.svs").unlink()
    command = ("train", workspace_copy / "run.toml", "--out", workspace_copy / "run")
    result = tapfm(*command, "--set", "adaptation.method=fixed")
    assert result.returncode == 0, result.output
    assert failures(workspace_copy / "run") == {}
    assert "1 of 10 slide files were not found" in result.stderr


def test_slides_that_moved_are_found_again(workspace_copy, tmp_path_factory):
    archive = tmp_path_factory.mktemp("archive")
    (archive / "2023").mkdir()
    for number in range(10):
        shutil.move(workspace_copy / f"{number}.svs", archive / "2023")
    out = workspace_copy / "new-tiles"
    result = tapfm("tile", workspace_copy / "cohort.csv", "--out", out, "--workers", 0)
    assert result.returncode == 3
    assert len(failures(out)) == 10
    result = tapfm("tile", workspace_copy / "cohort.csv", "--out", out, "--workers", 0, "--slides", archive)
    assert result.returncode == 0, result.output
    assert failures(out) == {}


def test_windows_paths_are_found_relative_to_the_table(workspace_copy):
    slides = workspace_copy / "Slides of 2023"
    slides.mkdir()
    table = workspace_copy / "cohort.csv"
    for number in range(10):
        shutil.move(workspace_copy / f"{number}.svs", slides)
        table.write_text(table.read_text().replace(f",{number}.svs", f",.\\Slides of 2023\\{number}.svs"))
    result = tapfm("tile", table, "--out", workspace_copy / "new-tiles", "--workers", 0)
    assert result.returncode == 0, result.output


def test_warnings_are_printed_once(workspace_copy):
    table = workspace_copy / "cohort.csv"
    table.write_text(table.read_text().replace("patient_id", "person"))
    split, run = workspace_copy / "new.csv", workspace_copy / "new.toml"
    commands = [
        ("split", table, "--out", split, "--target", "FGFR3", "--force"),
        ("config", "--cohort", split, "--target", "FGFR3", "--encoder", "tapfm-pocket", "--out", run),
        ("train", workspace_copy / "run.toml", "--out", workspace_copy / "run"),
        ("evaluate", workspace_copy / "run", "--out", workspace_copy / "evaluation"),
    ]
    for command in commands:
        result = tapfm(*command)
        assert result.returncode == 0, result.output
        assert result.output.count("No column of patients") == 1, command[0]
    tile = tapfm("tile", table, "--out", workspace_copy / "new-tiles", "--workers", 0)
    assert "No column of patients" not in tile.output
    silent = tapfm(*commands[0], "--slides-are-patients")
    assert "No column of patients" not in silent.output
    assert "config" in silent.stdout
    assert "--slides-are-patients" in silent.stdout
