"""`tapfm synth` as a user types it, and that the rest of tapfm agrees with what was painted."""

import json
import shlex
import shutil
import signal
import subprocess
from contextlib import closing

import numpy as np
import openslide
import pytest
from cohort_files import rows_of
from command_line import PROGRAM, start, tapfm, wait_for

from tapfm.cohort.cohort_table import read_cohort
from tapfm.runtime.cohort_job import RESUME_HINT
from tapfm.slides.opening import find_slides, open_slide
from tapfm.slides.tissue import tissue_mask
from tapfm.synthetic.truth import read_truth
from tapfm.tiles.store import read_tiles

SMALL = ("--slides", 6, "--external", 2, "--tiles", 16, "--prevalence", 0.5)


def contents(folder):
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != ".tapfm-output"
    }


@pytest.fixture(scope="module")
def painted(tmp_path_factory):
    folder = tmp_path_factory.mktemp("synth") / "painted"
    result = tapfm("synth", folder, *SMALL)
    assert result.returncode == 0, result.stderr
    return folder, result


def test_it_says_what_it_painted_and_what_to_type_next(painted):
    folder, result = painted
    lines = result.stdout.splitlines()
    assert lines[0].split() == ["cohort", "split", "slides", "40x", "FGFR3", "positive"]
    assert [line.split()[:3] for line in lines[1:4]] == [
        ["development", "train", "4"],
        ["development", "val", "1"],
        ["development", "test", "1"],
    ]
    assert (
        f"Next: tapfm inspect {folder}/cohort.csv; tapfm tile {folder}/cohort.csv --out {folder}/tiles" in result.stdout
    )
    assert (folder / "contact-sheet.jpg").stat().st_size > 10_000
    assert "No patient" in (folder / "README.md").read_text()


def test_the_table_is_a_cohort(painted):
    folder, _ = painted
    cohort = read_cohort(folder / "cohort.csv")
    assert [row.slide_id for row in cohort.rows] == [f"S00{i}" for i in range(1, 7)]
    assert len({row.patient_id for row in cohort.rows}) == 6
    assert cohort.label_names[0] == "FGFR3"
    assert sum(row.labels["FGFR3"] == "1" for row in cohort.rows) == 3
    external = read_cohort(folder / "external.csv")
    assert {row.cohort for row in external.rows} == {"external"}
    assert {row.labels["site"] for row in external.rows} <= {"site-x", "site-y"}


def test_slides_open_in_openslide_with_scale_and_objective(painted):
    folder, _ = painted
    for row in rows_of(folder / "cohort.csv"):
        with openslide.OpenSlide(folder / row["path"]) as slide:
            assert slide.properties["openslide.vendor"] == "aperio"
            assert slide.level_count >= 2
            objective = int(slide.properties["openslide.objective-power"])
            assert f"{objective}x" == row["objective"]
            assert float(slide.properties["openslide.mpp-x"]) * objective == pytest.approx(10, rel=0.03)
            assert set(slide.associated_images) == {"thumbnail", "label", "macro"}
    assert {row["objective"] for row in rows_of(folder / "cohort.csv")} == {"20x", "40x"}


def test_both_readers_see_the_same_pixels(painted):
    folder, _ = painted
    path = folder / "slides" / "S001.svs"
    with closing(open_slide(path)) as ours, openslide.OpenSlide(path) as theirs:
        assert ours.metadata.reader != "OpenSlide"
        x, y = ours.metadata.width_px0 // 2, ours.metadata.height_px0 // 2
        region = np.asarray(theirs.read_region((x, y), 0, (300, 200)).convert("RGB"))
        np.testing.assert_array_equal(ours.read_level(0, x, y, 300, 200), region)


def test_inspect_finds_nothing_wrong(painted):
    folder, _ = painted
    result = tapfm("inspect", folder / "cohort.csv", "--json")
    assert result.returncode == 0, result.stdout
    found = {each["slide_id"]: each for each in json.loads(result.stdout)}
    for row in rows_of(folder / "cohort.csv"):
        truth = read_truth(folder / "truth", row["slide_id"])
        assert found[row["slide_id"]]["mpp"] == pytest.approx(truth.mpp)
        assert not found[row["slide_id"]]["problem"]


def test_only_slides_are_found_in_the_folder(painted):
    folder, _ = painted
    assert len(find_slides(folder)) == 8  # no contact sheet, no picture of the truth


def test_tissue_is_found_where_it_was_painted(painted):
    folder, _ = painted
    for path in sorted((folder / "slides").glob("*.svs")):
        truth = read_truth(folder / "truth", path.stem)
        with closing(open_slide(path)) as slide:
            thumbnail = slide.thumbnail(400)
        mpp = truth.mpp * thumbnail.downsample[0]
        found = tissue_mask(thumbnail.pixels, mpp)
        rows, columns = (
            np.linspace(0, side - 1, count).astype(int)
            for side, count in zip(truth.tissue.shape, found.shape, strict=True)
        )
        there = truth.tissue[np.ix_(rows, columns)]
        overlap = 2 * (found & there).sum() / (found.sum() + there.sum())
        assert overlap > 0.9, path.stem  # Dice


def test_tiles_are_those_of_the_truth(painted, tmp_path):
    folder, _ = painted
    assert tapfm("tile", folder / "cohort.csv", "--out", tmp_path, "--keep-pen", "--keep-blur").returncode == 0
    known = {(row["slide_id"], row["x_px0"], row["y_px0"]): row for row in rows_of(folder / "truth" / "tiles.csv")}
    for path in (tmp_path / "patches").glob("*.h5"):
        tiles = read_tiles(path)
        on_tissue = {key for key, row in known.items() if key[0] == tiles.slide_id and float(row["tissue"]) >= 0.5}
        taken = {(tiles.slide_id, str(x), str(y)) for x, y in tiles.positions}
        assert taken <= set(known)  # the same grid
        assert len(on_tissue - taken) <= 0.05 * len(on_tissue)
        assert {int(known[key]["side_px0"]) for key in taken} == {tiles.side_px0}


def test_the_signal_is_in_a_minority_of_the_tiles_of_positive_slides_alone(painted):
    folder, _ = painted
    carrying = {row["slide_id"]: [] for row in rows_of(folder / "cohort.csv") + rows_of(folder / "external.csv")}
    for row in rows_of(folder / "truth" / "tiles.csv"):
        carrying[row["slide_id"]].append(float(row["FGFR3"]) >= 0.1)
    for row in rows_of(folder / "cohort.csv") + rows_of(folder / "external.csv"):
        assert any(carrying[row["slide_id"]]) == (row["FGFR3"] == "1")
        assert np.mean(carrying[row["slide_id"]]) < 0.5


def test_the_same_seed_paints_the_same_files(painted, tmp_path):
    folder, _ = painted
    assert tapfm("synth", tmp_path / "again", *SMALL, "--workers", 0).returncode == 0
    first, second = contents(folder), contents(tmp_path / "again")
    assert first.keys() == second.keys()
    assert [name for name in first if first[name] != second[name]] == []
    for seed in (0, 1):  # two small slides each, which differ by the seed alone
        settings = ("--slides", 2, "--external", 0, "--tiles", 10, "--seed", seed)
        assert tapfm("synth", tmp_path / f"seed-{seed}", *settings).returncode == 0
    assert len({contents(tmp_path / f"seed-{seed}")["slides/S001.svs"] for seed in (0, 1)}) == 2


def test_a_second_run_paints_nothing_and_mends_what_is_gone(painted):
    folder, _ = painted
    before = contents(folder)
    times = {path: path.stat().st_mtime_ns for path in folder.rglob("*.svs")}
    result = tapfm("synth", folder, *SMALL)
    assert "8 of 8 slides are already painted" in result.stderr
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*.svs")} == times
    (folder / "slides" / "S002.svs").unlink()
    assert "7 of 8 slides are already painted" in tapfm("synth", folder, *SMALL).stderr
    assert contents(folder) == before


def damage_json(folder):
    (folder / "truth" / "S002.json").write_text("{")


def empty_json(folder):
    (folder / "truth" / "S002.json").write_text("{}")


def cut_slide(folder):
    slide = folder / "slides" / "S002.svs"
    slide.write_bytes(slide.read_bytes()[:1000])


def lose_outlines(folder):
    (folder / "truth" / "S002.geojson").unlink()


@pytest.mark.parametrize("harm", [damage_json, empty_json, cut_slide, lose_outlines])
def test_a_second_run_mends_what_is_damaged(painted, harm):
    folder, _ = painted
    before = contents(folder)
    harm(folder)
    result = tapfm("synth", folder, *SMALL)
    assert result.returncode == 0, result.stderr
    assert "7 of 8 slides are already painted" in result.stderr
    assert contents(folder) == before


def test_what_another_command_is_writing_below_is_left_alone(painted):
    folder, _ = painted
    theirs = folder / "tiles" / "patches" / ".S001.h5.abc.unfinished"
    theirs.parent.mkdir(parents=True)
    theirs.touch()
    ours = folder / "slides" / ".S001.svs.abc.unfinished"
    ours.touch()
    assert tapfm("synth", folder, *SMALL).returncode == 0
    assert theirs.exists()
    assert not ours.exists()
    shutil.rmtree(folder / "tiles")


@pytest.mark.parametrize(
    "names", [["slides/notes.txt"], ["slides/.."], ["slides/"], ["../victim.svs"], ["/victim.svs"], 3, None]
)
def test_settings_that_name_other_files_are_refused(tmp_path, names):
    folder = tmp_path / "p"
    (folder / "slides").mkdir(parents=True)
    (folder / "slides" / "notes.txt").write_text("mine")
    (tmp_path / "victim.svs").write_text("mine")
    (folder / "synth.json").write_text(json.dumps({"key": "other", "slides": names}))
    result = tapfm("synth", folder, "--slides", 2, "--force")
    assert result.returncode == 2
    assert "synth.json is damaged" in result.stderr
    assert (folder / "slides" / "notes.txt").exists()
    assert (tmp_path / "victim.svs").exists()


def test_a_folder_with_hidden_files_alone_is_empty(tmp_path):
    (tmp_path / ".DS_Store").touch()
    (tmp_path / ".tapfm-output").touch()
    assert tapfm("synth", tmp_path, "--slides", 2, "--external", 0, "--tiles", 10).returncode == 0


def test_a_full_disk_is_an_error_not_a_traceback(tmp_path):
    command = f"ulimit -f 4; {shlex.join(PROGRAM)} synth {tmp_path}/p --slides 2 --external 0 --tiles 10"
    result = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert result.returncode == 1
    assert "Traceback" not in result.stderr
    assert RESUME_HINT in result.stderr


def test_rare_targets_are_told_to_be_planted_more_often(tmp_path):
    settings = ("--task", "luad4", "--slides", 12, "--external", 0, "--tiles", 10, "--fractions", 0.5, 0.0, 0.5)
    result = tapfm("synth", tmp_path / "p", *settings)
    assert (
        "ALK, development: 4 positive instead of 0 (3% of 12), so that every split that is large enough"
        in result.stdout
    )


def test_other_settings_need_force_and_leave_nothing_behind(tmp_path):
    small = ("--slides", 3, "--external", 0, "--tiles", 10)
    folder = tmp_path / "p"
    assert tapfm("synth", folder, *small).returncode == 0
    (folder / "notes.txt").write_text("mine")
    refused = tapfm("synth", folder, "--slides", 2, "--external", 0, "--tiles", 10)
    assert refused.returncode == 2
    assert "--force" in refused.stderr
    assert len(list((folder / "slides").glob("*.svs"))) == 3
    assert tapfm("synth", folder, "--slides", 2, "--external", 0, "--tiles", 10, "--force").returncode == 0
    assert [path.name for path in sorted((folder / "slides").glob("*"))] == ["S001.svs", "S002.svs"]
    assert not (folder / "truth" / "S003.png").exists()
    assert (folder / "notes.txt").read_text() == "mine"
    assert len(rows_of(folder / "cohort.csv")) == 2


@pytest.mark.parametrize("blow", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_run_that_is_stopped_goes_on(tmp_path, blow):
    folder, settings = tmp_path / "p", ("--slides", 6, "--external", 0, "--tiles", 12)
    process = start("synth", folder, *settings, "--workers", 2)
    wait_for(lambda: len(list((folder / "slides").glob("S*.svs"))) >= 2, process)
    process.send_signal(blow)
    _, stderr = process.communicate()
    assert process.returncode == {signal.SIGKILL: -9, signal.SIGINT: 130, signal.SIGTERM: 143}[blow], stderr
    assert "Traceback" not in stderr
    assert (RESUME_HINT in stderr) == (blow != signal.SIGKILL)
    assert not (folder / "cohort.csv").exists()  # no table of slides that are not there
    for path in (folder / "slides").glob("S*.svs"):
        openslide.OpenSlide(path).close()
    result = tapfm("synth", folder, *settings)
    assert result.returncode == 0, result.stderr
    assert "of 6 slides are already painted" in result.stderr
    assert len(rows_of(folder / "cohort.csv")) == 6
    assert not list(folder.rglob("*.unfinished"))


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--task", "fgfr2"], "fgfr3"),
        (["--difficulty", "heavy"], "easy, medium, hard"),
        (["--prevalence", "lots"], "--prevalence 0.4"),
        (["--prevalence", "1"], "between 0 and 1"),
        (["--prevalence", "KRAS=0.4"], "FGFR3"),
        (["--fractions", "0.5", "0.5", "0.5"], "--fractions 0.8 0.1 0.1"),
        (["--fractions", "nan", "0", "1"], "--fractions 0.8 0.1 0.1"),
        (["--slides", "0"], "2 to 9999"),
        (["--tiles", "100000"], "10 to 1000"),
        (["--workers", "-1"], "has to be at least"),
    ],
)
def test_wrong_settings_are_refused_before_anything_is_written(tmp_path, arguments, says):
    result = tapfm("synth", tmp_path / "p", *arguments)
    assert result.returncode == 2
    assert says in result.stderr
    assert not (tmp_path / "p").exists()


def test_a_folder_of_something_else_is_left_alone(tmp_path):
    (tmp_path / "thesis.txt").write_text("mine")
    result = tapfm("synth", tmp_path)
    assert result.returncode == 2
    assert "was not painted by tapfm synth" in result.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]
    assert tapfm("synth", tmp_path / "thesis.txt").returncode == 2
    assert tapfm("synth", "/dev/null").returncode == 2


def test_prevalences_by_target(tmp_path):
    settings = ("--task", "luad4", "--slides", 10, "--external", 0, "--tiles", 10, "--fractions", 1, 0, 0)
    result = tapfm("synth", tmp_path / "p", *settings, "--prevalence", "egfr=0.7", "--prevalence", 0.3)
    assert result.returncode == 0, result.stderr
    rows = rows_of(tmp_path / "p" / "cohort.csv")
    assert [sum(row[name] == "1" for row in rows) for name in ("EGFR", "KRAS", "MET", "ALK")] == [7, 3, 3, 3]
    assert rows_of(tmp_path / "p" / "truth" / "tiles.csv")[0].keys() >= {"EGFR", "KRAS", "MET", "ALK"}
    assert not (tmp_path / "p" / "external.csv").exists()


def test_without_workers_slides_are_painted_in_this_process(painted, tmp_path, monkeypatch):
    def refuse(*_):
        raise AssertionError("a worker was started")

    monkeypatch.setattr("tapfm.runtime.workers.start_worker", refuse)
    result = tapfm("synth", tmp_path / "painted", *SMALL, "--workers", 0)
    assert result.returncode == 0, result.stderr
    assert contents(tmp_path / "painted") == contents(painted[0])
