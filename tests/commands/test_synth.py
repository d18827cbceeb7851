"""`tapfm synth`: the generated files, resuming, and agreement with `tapfm inspect` and `tapfm tile`."""

import json
import shlex
import shutil
import signal
import subprocess
from contextlib import closing

import numpy as np
import openslide
import pytest
from cohort_files import read_rows
from command_line import PROGRAM, start_tapfm, tapfm, wait_for

from tapfm.cohort.cohort_table import read_cohort
from tapfm.runtime.cohort_job import RESUME_HINT
from tapfm.slides.opening import find_slides, open_slide
from tapfm.slides.tissue import detect_tissue
from tapfm.synthetic.truth import read_truth
from tapfm.tiles.store import read_tiles

SMALL = ("--slides", 6, "--external", 2, "--tiles-per-slide", 16, "--prevalence", 0.5)


def read_files(folder):
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != ".tapfm-output"
    }


@pytest.fixture(scope="module")
def cohort_run(tmp_path_factory):
    """Folder and output of a finished `tapfm synth`."""
    folder = tmp_path_factory.mktemp("synth") / "synthetic"
    result = tapfm("synth", folder, *SMALL)
    assert result.returncode == 0, result.stderr
    return folder, result


def test_output_is_a_table_and_next_commands(cohort_run):
    folder, result = cohort_run
    lines = result.stdout.splitlines()
    assert lines[0].split() == ["cohort", "split", "slides", "40x", "FGFR3", "positive"]
    assert [line.split()[:3] for line in lines[1:4]] == [
        ["development", "train", "4"],
        ["development", "val", "1"],
        ["development", "test", "1"],
    ]
    assert f"Next: tapfm inspect {folder}/cohort.csv; tapfm tile {folder}/cohort.csv --out tiles" in result.stdout
    assert (folder / "contact-sheet.jpg").stat().st_size > 10_000
    assert "no patient data" in (folder / "README.md").read_text()


def test_cohort_tables_can_be_read(cohort_run):
    folder, _ = cohort_run
    cohort = read_cohort(folder / "cohort.csv")
    assert [row.slide_id for row in cohort.rows] == [f"S00{i}" for i in range(1, 7)]
    assert len({row.patient_id for row in cohort.rows}) == 6
    assert cohort.label_names[0] == "FGFR3"
    assert sum(row.labels["FGFR3"] == "1" for row in cohort.rows) == 3
    external = read_cohort(folder / "external.csv")
    assert {row.cohort for row in external.rows} == {"external"}
    assert {row.labels["site"] for row in external.rows} <= {"site-x", "site-y"}


def test_openslide_reads_scale_and_objective(cohort_run):
    folder, _ = cohort_run
    for row in read_rows(folder / "cohort.csv"):
        with openslide.OpenSlide(folder / row["path"]) as slide:
            assert slide.properties["openslide.vendor"] == "aperio"
            assert slide.level_count >= 2
            objective = int(slide.properties["openslide.objective-power"])
            assert f"{objective}x" == row["objective"]
            assert float(slide.properties["openslide.mpp-x"]) * objective == pytest.approx(10, rel=0.03)
            assert set(slide.associated_images) == {"thumbnail", "label", "macro"}
    assert {row["objective"] for row in read_rows(folder / "cohort.csv")} == {"20x", "40x"}


def test_both_readers_return_the_same_pixels(cohort_run):
    folder, _ = cohort_run
    path = folder / "slides" / "S001.svs"
    with closing(open_slide(path)) as slide, openslide.OpenSlide(path) as reference:
        assert slide.metadata.reader != "OpenSlide"
        x, y = slide.metadata.width_px0 // 2, slide.metadata.height_px0 // 2
        region = np.asarray(reference.read_region((x, y), 0, (300, 200)).convert("RGB"))
        np.testing.assert_array_equal(slide.read_level(0, x, y, 300, 200), region)


def test_inspect_finds_no_problems(cohort_run):
    folder, _ = cohort_run
    result = tapfm("inspect", folder / "cohort.csv", "--json")
    assert result.returncode == 0, result.stdout
    found = {each["slide_id"]: each for each in json.loads(result.stdout)}
    for row in read_rows(folder / "cohort.csv"):
        truth = read_truth(folder / "truth", row["slide_id"])
        assert found[row["slide_id"]]["mpp"] == pytest.approx(truth.slide_mpp)
        assert not found[row["slide_id"]]["problem"]


def test_find_slides_ignores_other_images(cohort_run):
    folder, _ = cohort_run
    assert len(find_slides(folder)) == 8  # without contact sheet and truth images


def test_detected_tissue_agrees_with_the_truth(cohort_run):
    folder, _ = cohort_run
    for path in sorted((folder / "slides").glob("*.svs")):
        truth = read_truth(folder / "truth", path.stem)
        with closing(open_slide(path)) as slide:
            thumbnail = slide.thumbnail(400)
        mpp = truth.slide_mpp * thumbnail.downsample[0]
        found = detect_tissue(thumbnail.pixels, mpp)
        rows, columns = (
            np.linspace(0, side - 1, count).astype(int)
            for side, count in zip(truth.tissue.shape, found.shape, strict=True)
        )
        expected = truth.tissue[np.ix_(rows, columns)]
        dice = 2 * (found & expected).sum() / (found.sum() + expected.sum())
        assert dice > 0.9, path.stem


def test_tiles_agree_with_the_truth(cohort_run, tmp_path):
    folder, _ = cohort_run
    assert tapfm("tile", folder / "cohort.csv", "--out", tmp_path, "--keep-pen", "--keep-blur").returncode == 0
    rows = read_rows(folder / "truth" / "tiles.csv")
    truth_rows = {(row["slide_id"], row["x_px0"], row["y_px0"]): row for row in rows}
    for path in (tmp_path / "patches").glob("*.h5"):
        tiles = read_tiles(path)
        on_tissue = {key for key, row in truth_rows.items() if key[0] == tiles.slide_id and float(row["tissue"]) >= 0.5}
        extracted = {(tiles.slide_id, str(x), str(y)) for x, y in tiles.positions}
        assert extracted <= set(truth_rows)  # on the same grid
        assert len(on_tissue - extracted) <= 0.05 * len(on_tissue)
        assert {int(truth_rows[key]["side_px0"]) for key in extracted} == {tiles.side_px0}


def test_signal_is_in_less_than_half_of_the_tiles_of_positive_slides_only(cohort_run):
    folder, _ = cohort_run
    has_signal = {row["slide_id"]: [] for row in read_rows(folder / "cohort.csv") + read_rows(folder / "external.csv")}
    for row in read_rows(folder / "truth" / "tiles.csv"):
        has_signal[row["slide_id"]].append(float(row["FGFR3"]) >= 0.1)
    for row in read_rows(folder / "cohort.csv") + read_rows(folder / "external.csv"):
        assert any(has_signal[row["slide_id"]]) == (row["FGFR3"] == "1")
        assert np.mean(has_signal[row["slide_id"]]) < 0.5


def test_same_seed_gives_same_files(cohort_run, tmp_path):
    folder, _ = cohort_run
    assert tapfm("synth", tmp_path / "again", *SMALL, "--workers", 0).returncode == 0
    first, second = read_files(folder), read_files(tmp_path / "again")
    assert first.keys() == second.keys()
    assert [name for name in first if first[name] != second[name]] == []
    for seed in (0, 1):  # cohorts that differ only in the seed
        settings = ("--slides", 2, "--external", 0, "--tiles-per-slide", 10, "--seed", seed)
        assert tapfm("synth", tmp_path / f"seed-{seed}", *settings).returncode == 0
    assert len({read_files(tmp_path / f"seed-{seed}")["slides/S001.svs"] for seed in (0, 1)}) == 2


def test_second_run_generates_only_missing_slides(cohort_run):
    folder, _ = cohort_run
    before = read_files(folder)
    times = {path: path.stat().st_mtime_ns for path in folder.rglob("*.svs")}
    result = tapfm("synth", folder, *SMALL)
    assert "8 of 8 slides already exist" in result.stderr
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*.svs")} == times
    (folder / "slides" / "S002.svs").unlink()
    assert "7 of 8 slides already exist" in tapfm("synth", folder, *SMALL).stderr
    assert read_files(folder) == before


def truncate_json(folder):
    (folder / "truth" / "S002.json").write_text("{")


def empty_json(folder):
    (folder / "truth" / "S002.json").write_text("{}")


def truncate_slide(folder):
    slide = folder / "slides" / "S002.svs"
    slide.write_bytes(slide.read_bytes()[:1000])


def delete_outlines(folder):
    (folder / "truth" / "S002.geojson").unlink()


@pytest.mark.parametrize("damage", [truncate_json, empty_json, truncate_slide, delete_outlines])
def test_second_run_regenerates_damaged_slides(cohort_run, damage):
    folder, _ = cohort_run
    before = read_files(folder)
    damage(folder)
    result = tapfm("synth", folder, *SMALL)
    assert result.returncode == 0, result.stderr
    assert "7 of 8 slides already exist" in result.stderr
    assert read_files(folder) == before


def test_unfinished_files_of_other_commands_are_kept(cohort_run):
    folder, _ = cohort_run
    other = folder / "tiles" / "patches" / ".S001.h5.abc.unfinished"
    other.parent.mkdir(parents=True)
    other.touch()
    own = folder / "slides" / ".S001.svs.abc.unfinished"
    own.touch()
    assert tapfm("synth", folder, *SMALL).returncode == 0
    assert other.exists()
    assert not own.exists()
    shutil.rmtree(folder / "tiles")


@pytest.mark.parametrize(
    "names", [["slides/notes.txt"], ["slides/.."], ["slides/"], ["../victim.svs"], ["/victim.svs"], 3, None]
)
def test_settings_file_with_other_paths_is_rejected(tmp_path, names):
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


def test_folder_with_only_hidden_files_counts_as_empty(tmp_path):
    (tmp_path / ".DS_Store").touch()
    (tmp_path / ".tapfm-output").touch()
    assert tapfm("synth", tmp_path, "--slides", 2, "--external", 0, "--tiles-per-slide", 10).returncode == 0


def test_full_disk_is_an_error_without_traceback(tmp_path):
    command = f"ulimit -f 4; {shlex.join(PROGRAM)} synth {tmp_path}/p --slides 2 --external 0 --tiles-per-slide 10"
    result = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert result.returncode == 1
    assert "Traceback" not in result.stderr
    assert "without --force" in " ".join(result.stderr.split())


def test_higher_prevalence_of_rare_targets_is_reported(tmp_path):
    size = ("--slides", 12, "--external", 0, "--tiles-per-slide", 10)
    result = tapfm("synth", tmp_path / "p", "--task", "luad4", *size, "--fractions", 0.5, 0.0, 0.5)
    assert "ALK in the development cohort: 4 positive slides instead of 0 (3% of 12)" in result.stdout


def test_other_settings_need_force_and_replace_the_cohort(tmp_path):
    small = ("--slides", 3, "--external", 0, "--tiles-per-slide", 10)
    folder = tmp_path / "p"
    assert tapfm("synth", folder, *small).returncode == 0
    (folder / "notes.txt").write_text("mine")
    rejected = tapfm("synth", folder, "--slides", 2, "--external", 0, "--tiles-per-slide", 10)
    assert rejected.returncode == 2
    assert "--force" in rejected.stderr
    assert len(list((folder / "slides").glob("*.svs"))) == 3
    assert tapfm("synth", folder, "--slides", 2, "--external", 0, "--tiles-per-slide", 10, "--force").returncode == 0
    assert [path.name for path in sorted((folder / "slides").glob("*"))] == ["S001.svs", "S002.svs"]
    assert not (folder / "truth" / "S003.png").exists()
    assert (folder / "notes.txt").read_text() == "mine"
    assert len(read_rows(folder / "cohort.csv")) == 2


@pytest.mark.parametrize("stop_signal", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_stopped_command_resumes(tmp_path, stop_signal):
    folder, settings = tmp_path / "p", ("--slides", 6, "--external", 0, "--tiles-per-slide", 12)
    process = start_tapfm("synth", folder, *settings, "--workers", 2)
    wait_for(lambda: len(list((folder / "slides").glob("S*.svs"))) >= 2, process)
    process.send_signal(stop_signal)
    _, stderr = process.communicate()
    assert process.returncode == {signal.SIGKILL: -9, signal.SIGINT: 130, signal.SIGTERM: 143}[stop_signal], stderr
    assert "Traceback" not in stderr
    assert (RESUME_HINT in stderr) == (stop_signal != signal.SIGKILL)
    assert not (folder / "cohort.csv").exists()  # no table of an incomplete cohort
    for path in (folder / "slides").glob("S*.svs"):
        openslide.OpenSlide(path).close()
    result = tapfm("synth", folder, *settings)
    assert result.returncode == 0, result.stderr
    assert "of 6 slides already exist" in result.stderr
    assert len(read_rows(folder / "cohort.csv")) == 6
    assert not list(folder.rglob("*.unfinished"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--task", "fgfr2"], "fgfr3"),
        (["--difficulty", "heavy"], "easy, medium, hard"),
        (["--prevalence", "lots"], "--prevalence 0.4"),
        (["--prevalence", "1"], "between 0 and 1"),
        (["--prevalence", "KRAS=0.4"], "FGFR3"),
        (["--fractions", "0.5", "0.5", "0.5"], "--fractions 0.8 0.1 0.1"),
        (["--fractions", "nan", "0", "1"], "--fractions 0.8 0.1 0.1"),
        (["--slides", "0"], "--slides must be from 2 to 9999"),
        (["--tiles-per-slide", "100000"], "10 to 1000"),
        (["--workers", "-1"], "--workers must be at least 0"),
    ],
)
def test_invalid_options_are_rejected_before_writing(tmp_path, arguments, message):
    result = tapfm("synth", tmp_path / "p", *arguments)
    assert result.returncode == 2
    assert message in result.stderr
    assert not (tmp_path / "p").exists()


def test_folder_with_other_files_is_rejected(tmp_path):
    (tmp_path / "thesis.txt").write_text("mine")
    result = tapfm("synth", tmp_path)
    assert result.returncode == 2
    assert "was not created by tapfm synth" in result.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]
    assert tapfm("synth", tmp_path / "thesis.txt").returncode == 2
    assert tapfm("synth", "/dev/null").returncode == 2


def test_prevalence_by_target(tmp_path):
    settings = ("--task", "luad4", "--slides", 10, "--external", 0, "--tiles-per-slide", 10, "--fractions", 1, 0, 0)
    result = tapfm("synth", tmp_path / "p", *settings, "--prevalence", "egfr=0.7", "--prevalence", 0.3)
    assert result.returncode == 0, result.stderr
    rows = read_rows(tmp_path / "p" / "cohort.csv")
    assert [sum(row[name] == "1" for row in rows) for name in ("EGFR", "KRAS", "MET", "ALK")] == [7, 3, 3, 3]
    assert read_rows(tmp_path / "p" / "truth" / "tiles.csv")[0].keys() >= {"EGFR", "KRAS", "MET", "ALK"}
    assert not (tmp_path / "p" / "external.csv").exists()


def test_zero_workers_generate_in_this_process(cohort_run, tmp_path, monkeypatch):
    def fail(*_):
        raise AssertionError("a worker was started")

    monkeypatch.setattr("tapfm.runtime.workers.start_worker", fail)
    result = tapfm("synth", tmp_path / "synthetic", *SMALL, "--workers", 0)
    assert result.returncode == 0, result.stderr
    assert read_files(tmp_path / "synthetic") == read_files(cohort_run[0])
