"""`tapfm inspect`."""

import csv
import json

from command_line import tapfm
from slide_files import REAL, needs_real_slides, section, write_scn, write_slide


def write_slides(tmp_path):
    write_slide(tmp_path / "a.svs", section(900, 700), mpp=0.25)
    write_slide(tmp_path / "b.tif", section(600, 600), mpp=None, aperio=False)
    write_scn(tmp_path / "c.scn", [(512, 256, section(1024, 1024, tissue=(0, 0, 1, 1)))], (4096, 2048))
    write_slide(tmp_path / "d.svs", section(600, 600), mpp=None, objective=20)
    (tmp_path / "e.svs").write_bytes(b"nothing")
    return tmp_path


def test_output_has_a_row_per_slide_and_hints(tmp_path):
    result = tapfm("inspect", write_slides(tmp_path))
    assert result.returncode == 3
    lines = {line.split()[0]: line for line in result.stdout.splitlines() if line}
    for text in ("SVS", "900 x 700", "0.25", "file", "40x", "aperio"):
        assert text in lines["a"]
    assert "metadata of b.tif contain neither microns per pixel" in " ".join(result.stdout.split())
    assert "SCN" in lines["c"]
    assert "from the objective power of 20x" in " ".join(result.stdout.split())
    assert "5 slides: 2 ready, 1 with a warning, 2 with a problem." in result.stdout
    assert "column `mpp`" in result.stdout


def test_json_output(tmp_path):
    found = {each["slide_id"]: each for each in json.loads(tapfm("inspect", write_slides(tmp_path), "--json").stdout)}
    assert (found["a"]["mpp"], found["a"]["mpp_source"], found["a"]["downsamples"]) == (0.25, "file", [1.0, 4.0])
    assert (found["a"]["reader"], found["c"]["reader"]) == ("tiff", "openslide")
    assert found["c"]["bounds_px0"] == [512, 256, 1024, 1024]
    assert (found["d"]["mpp"], found["d"]["mpp_source"]) == (0.5, "objective")
    assert found["e"]["problem"].startswith("e.svs is not in a slide format")


def test_written_cohort_table_can_be_completed_and_inspected(tmp_path):
    (tmp_path / "slides").mkdir()
    slides = write_slides(tmp_path / "slides")
    cohort = tmp_path / "cohort.csv"
    tapfm("inspect", slides, "--write-cohort", cohort)
    with cohort.open() as file:
        rows = list(csv.DictReader(file))
    assert [row["path"] for row in rows] == [f"slides/{name}" for name in ("a.svs", "b.tif", "c.scn", "d.svs", "e.svs")]
    cohort.write_text(cohort.read_text().replace("b,slides/b.tif,,", "b,slides/b.tif,,0.5"))
    found = {each["slide_id"]: each for each in json.loads(tapfm("inspect", cohort, "--json").stdout)}
    assert (found["b"]["mpp"], found["b"]["mpp_source"], found["b"]["problem"]) == (0.5, "cohort table", "")
    assert "is already a table" in tapfm("inspect", cohort, "--write-cohort", tmp_path / "new.csv").stderr
    again = tapfm("inspect", slides, "--write-cohort", cohort)
    assert again.returncode == 2
    assert "already exists" in again.stderr


def test_brackets_in_names_are_printed_and_equal_names_get_unique_ids(tmp_path):
    for seed, name in enumerate(("a/x[he].svs", "b/x[he].svs", "c/x[he]-2.svs")):
        (tmp_path / name).parent.mkdir()
        write_slide(tmp_path / name, section(300, 300, seed=seed), downsamples=(1,))
    result = tapfm("inspect", tmp_path, "--write-cohort", tmp_path / "cohort.csv")
    assert result.stdout.count("x[he]") == 3
    assert tapfm("inspect", tmp_path / "cohort.csv").returncode == 0
    ids = [line.split(",")[0] for line in (tmp_path / "cohort.csv").read_text().splitlines()[1:]]
    assert len(set(ids)) == 3


def test_missing_slides_of_a_table_are_reported(tmp_path):
    write_slide(tmp_path / "a.svs", section(300, 300))
    (tmp_path / "cohort.csv").write_text("slide_id,path\na,a.svs\nb,absent.svs\n")
    result = tapfm("inspect", tmp_path / "cohort.csv")
    assert result.returncode == 3
    assert "absent.svsdoesnotexist" in "".join(result.stdout.split())  # a long path is wrapped
    assert "2 slides: 1 ready" in result.stdout


def test_several_sources_missing_source_and_empty_folder(tmp_path):
    write_slide(tmp_path / "a.svs", section(300, 300))
    write_slide(tmp_path / "b.svs", section(300, 300))
    result = tapfm("inspect", tmp_path / "a.svs", tmp_path / "b.svs")
    assert result.returncode == 0
    assert "2 slides: 2 ready" in result.stdout
    assert tapfm("inspect", tmp_path / "absent.svs").returncode == 2
    (tmp_path / "empty").mkdir()
    assert "No slides found below" in tapfm("inspect", tmp_path / "empty").stderr
    assert tapfm("inspect").returncode == 2


@needs_real_slides
def test_real_slides():
    found = {each["slide_id"]: each for each in json.loads(tapfm("inspect", REAL, "--json").stdout)}
    assert len(found) == 8
    assert (found["CMU-1-Small-Region"]["mpp"], found["CMU-1-Small-Region"]["objective_power"]) == (0.499, 20)
    assert found["CMU-1-Small-Region-DICOM"]["format"] == "DICOM"
    assert found["XYC-grid"]["format"] == "OME-TIFF"
    assert "0.00499" in found["CMU-1-Small-Region.jpeg"]["problem"]
    assert found["broken"]["problem"]
