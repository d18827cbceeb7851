"""`tapfm tile`: output files, failed slides, resuming, options."""

import dataclasses
import json
import os
import shutil
import subprocess

import cv2
import h5py
import numpy as np
import pytest
from cohort_files import make_cohort, read_rows, read_tile_files
from command_line import PROGRAM, tapfm
from PIL import Image
from slide_files import REAL, needs_real_slides, section, write_slide

import tapfm as tapfm_package
from tapfm.cohort.cohort_table import SlideRow
from tapfm.errors import SettingError
from tapfm.runtime.files import file_identity, fingerprint
from tapfm.tiles.cohort_tiling import _make_job as make_job
from tapfm.tiles.grid import TileSpec
from tapfm.tiles.store import read_slide_tiles, read_tiles
from tapfm.tiles.tiling import TILING_VERSION

OTHER_VALUES = {
    "tile_px": 256,
    "mpp": 0.4,
    "overlap_px": 16,
    "min_tissue": 0.5,
    "tissue": "texture",
    "drop_pen": False,
    "drop_blur": False,
    "edge_tiles": "pad",
}


def test_cohort_of_20x_and_40x_slides(tmp_path):
    out = tmp_path / "tiles"
    result = tapfm("tile", make_cohort(tmp_path / "c"), "--out", out, "--workers", 2)
    assert result.returncode == 0, result.stderr
    assert "Tiled 4 of 4 slides: 58 tiles." in result.stdout
    rows = read_rows(out / "summary.csv")
    assert [row["slide_id"] for row in rows] == [f"case-{i}" for i in range(4)]
    assert [row["status"] for row in rows] == ["ok"] * 4
    assert [row["mpp"] for row in rows] == ["0.5", "0.25", "0.5", "0.25"]
    assert {row["mpp_source"] for row in rows} == {"file"}
    assert [int(row["tiles"]) for row in rows] == [
        len(read_tiles(out / "patches" / f"case-{i}_patches.h5")) for i in range(4)
    ]
    assert {"tissue_mm2", "removed_background", "removed_pen", "removed_blur", "reason", "seconds"} <= rows[0].keys()
    assert read_rows(out / "failures.csv") == []
    for i in range(4):
        with Image.open(out / "overlays" / f"case-{i}.png") as overlay:
            assert max(overlay.size) >= 1200
        assert json.loads((out / "tissue" / f"case-{i}.geojson").read_text())["features"]
        assert f"overlays/case-{i}.png" in (out / "index.html").read_text()
    at_20x, at_40x = (read_tiles(out / "patches" / f"case-{i}_patches.h5") for i in (0, 1))
    assert (at_20x.side_px0, at_40x.side_px0) == (224, 448)
    assert at_20x.achieved_mpp == at_40x.achieved_mpp == 0.5


def write_cohort_with_broken_slides(tmp_path):
    cohort = make_cohort(tmp_path / "c", 2)
    folder = cohort.parent
    (folder / "junk.svs").write_bytes(b"nothing")
    write_slide(folder / "glass.svs", section(900, 900, tissue=(0, 0, 0, 0)))
    write_slide(folder / "absurd.tif", section(900, 900), aperio=False, resolution_mpp=0.005)
    data = write_slide(folder / "short.svs", section(900, 900)).read_bytes()
    (folder / "short.svs").write_bytes(data[: len(data) // 2])
    with cohort.open("a") as file:
        file.write("junk,junk.svs,,,\nglass,glass.svs,,,\nabsurd,absurd.tif,,,\nshort,short.svs,,,\n")
    return cohort


def test_broken_slides_do_not_affect_the_others(tmp_path):
    cohort, out = write_cohort_with_broken_slides(tmp_path), tmp_path / "tiles"
    result = tapfm("tile", cohort, "--out", out)
    assert result.returncode == 3
    assert "Tiled 2 of 6 slides" in result.stdout
    assert "4 slides failed" in result.stdout
    assert str(out / "failures.csv") in result.stdout
    assert "Traceback" not in result.stderr
    reasons = {row["slide_id"]: row["reason"] for row in read_rows(out / "failures.csv")}
    assert "not in a slide format" in reasons["junk"]
    assert "has no tissue" in reasons["glass"]
    assert "0.005 um per pixel, outside the plausible range of 0.1 to 1.2" in reasons["absurd"]
    assert "short.svs" in reasons["short"]
    assert all(row["hint"] for row in read_rows(out / "failures.csv"))
    assert sorted(read_tile_files(out)) == ["case-0_patches.h5", "case-1_patches.h5"]
    assert (out / "overlays" / "glass.png").exists()  # shows why
    assert "has no tissue" in (out / "index.html").read_text()
    assert tapfm("tile", cohort, "--out", out, "--allow-failures", 3).returncode == 3
    assert tapfm("tile", cohort, "--out", out, "--allow-failures", 4).returncode == 0


def test_slide_is_tiled_after_its_mpp_is_entered(tmp_path):
    cohort, out = write_cohort_with_broken_slides(tmp_path), tmp_path / "tiles"
    tapfm("tile", cohort, "--out", out)
    cohort.write_text(cohort.read_text().replace("absurd,absurd.tif,,,", "absurd,absurd.tif,,0.5,"))
    before = {path: path.stat().st_mtime_ns for path in (out / "patches").iterdir()}
    result = tapfm("tile", cohort, "--out", out, "--only", "absurd")
    assert result.returncode == 0
    assert "Tiled 3 of 6 slides" in result.stdout
    rows = {row["slide_id"]: row for row in read_rows(out / "summary.csv")}
    assert (rows["absurd"]["status"], rows["absurd"]["mpp_source"]) == ("ok", "cohort table")
    assert (rows["case-0"]["status"], rows["case-0"]["seconds"] != "") == ("ok", True)
    assert (rows["junk"]["status"], "not in a slide format" in rows["junk"]["reason"]) == ("failed", True)
    assert {path: path.stat().st_mtime_ns for path in before} == before


def test_only_with_other_settings_marks_the_others_as_not_tiled(tmp_path):
    cohort, out = make_cohort(tmp_path / "c", 3), tmp_path / "tiles"
    tapfm("tile", cohort, "--out", out)
    (out / "summary.csv").unlink()
    result = tapfm("tile", cohort, "--out", out, "--only", "case-1", "--size", 112)
    assert "Tiled 1 of 3 slides" in result.stdout
    assert "Replacing the tiles of 1 slide" in result.stderr
    rows = {row["slide_id"]: row for row in read_rows(out / "summary.csv")}
    assert [rows[f"case-{i}"]["status"] for i in range(3)] == ["not tiled", "ok", "not tiled"]
    again = tapfm("tile", cohort, "--out", out, "--only", "case-1")
    assert "Tiled 3 of 3 slides" in again.stdout  # the other two were tiled with these settings


def test_output_folder_inside_the_slide_folder_is_ignored(tmp_path):
    make_cohort(tmp_path / "c", 2)
    (tmp_path / "c" / "cohort.csv").write_text("case_id,slide_id\nP0,s0\nP1,s1\n")
    for source in (tmp_path / "c", tmp_path / "c" / "cohort.csv"):
        for _ in range(2):
            result = tapfm("tile", source, "--out", tmp_path / "c" / "tiles")
            assert result.returncode == 0, result.stderr
            assert "Tiled 2 of 2 slides" in result.stdout


def test_inspect_and_tile_the_current_folder(tmp_path):
    make_cohort(tmp_path / "c", 2)
    for arguments in (["inspect", "."], ["tile", ".", "--out", "tiles"]):
        result = subprocess.run([*PROGRAM, *arguments], cwd=tmp_path / "c", capture_output=True, text=True, check=False)
        assert result.returncode == 0, result.stderr


def test_failed_slide_keeps_no_old_files(tmp_path):
    cohort, out = make_cohort(tmp_path / "c", 1), tmp_path / "tiles"
    tapfm("tile", cohort, "--out", out)
    (cohort.parent / "s0.svs").write_bytes(b"gone")
    assert tapfm("tile", cohort, "--out", out).returncode == 3
    assert [path.name for part in ("overlays", "tissue", "patches") for path in (out / part).iterdir()] == []


def test_slide_without_tiles_keeps_its_counts(tmp_path):
    pixels = cv2.GaussianBlur(section(1120, 1120, tissue=(0, 0, 1, 1)), (0, 0), 10)
    write_slide(tmp_path / "a.svs", pixels)
    assert tapfm("tile", tmp_path / "a.svs", "--out", tmp_path / "t").returncode == 3
    (row,) = read_rows(tmp_path / "t" / "summary.csv")
    assert (row["status"], row["mpp"], row["removed_blur"], row["tiles"]) == ("failed", "0.5", "25", "0")
    assert "check its image in overlays/" in row["warnings"]


def test_slide_ids_that_match_file_names_of_other_slides(tmp_path):
    make_cohort(tmp_path / "c", 2)
    (tmp_path / "c" / "cohort.csv").write_text("slide_id,path\nx,s0.svs\nx_patches,s1.svs\n")
    out = tmp_path / "tiles"
    for _ in range(2):
        assert "Tiled 2 of 2" in tapfm("tile", tmp_path / "c" / "cohort.csv", "--out", out, "--force").stdout
        assert sorted(read_tile_files(out)) == ["x_patches.h5", "x_patches_patches.h5"]


def test_tile_files_of_removed_slides_are_reported(tmp_path):
    cohort, out = make_cohort(tmp_path / "c", 3), tmp_path / "tiles"
    tapfm("tile", cohort, "--out", out)
    cohort.write_text("\n".join(cohort.read_text().splitlines()[:3]))
    assert "case-2_patches.h5" in tapfm("tile", cohort, "--out", out).stdout


def test_damaged_tile_file_is_recreated(tmp_path):
    cohort, out = make_cohort(tmp_path / "c", 2), tmp_path / "tiles"
    tapfm("tile", cohort, "--out", out)
    expected = read_tile_files(out)
    with h5py.File(out / "patches" / "case-0_patches.h5", "r+") as file:
        file["coords"].attrs["tapfm_summary"] = "{"
    (out / "patches" / "case-1_patches.h5").write_bytes(b"half")
    assert tapfm("tile", cohort, "--out", out).returncode == 0
    assert read_tile_files(out) == expected


def test_second_run_skips_finished_slides(tmp_path):
    cohort, out = make_cohort(tmp_path / "c"), tmp_path / "tiles"
    tapfm("tile", cohort, "--out", out)
    first = {path: path.stat().st_mtime_ns for path in (out / "patches").iterdir()}
    summary = (out / "summary.csv").read_text()
    result = tapfm("tile", cohort, "--out", out)
    assert "4 of 4 slides are already tiled" in result.stderr
    assert {path: path.stat().st_mtime_ns for path in (out / "patches").iterdir()} == first
    assert (out / "summary.csv").read_text() == summary
    tapfm("tile", cohort, "--out", out, "--force")
    assert {path: path.stat().st_mtime_ns for path in (out / "patches").iterdir()} != first


def test_every_setting_is_tested():
    # fails if a setting is added without a value above
    assert OTHER_VALUES.keys() == {each.name for each in dataclasses.fields(TileSpec)}


@pytest.mark.parametrize("name", OTHER_VALUES)
def test_each_setting_changes_the_key(tmp_path, name):
    row = SlideRow("a", write_slide(tmp_path / "a.svs", section(300, 300)), "a")
    keys = {
        make_job(row, tmp_path, spec, "trident", None).key
        for spec in (TileSpec(), TileSpec(**{name: OTHER_VALUES[name]}))
    }
    assert len(keys) == 2


def test_key_depends_on_scale_layout_annotation_file_and_version(tmp_path):
    path = write_slide(tmp_path / "a.svs", section(300, 300))
    row = SlideRow("a", path, "a")
    (tmp_path / "mask.geojson").write_text("{}")

    def key(row=row, layout="trident", tissue=None):
        return make_job(row, tmp_path, TileSpec(), layout, tissue).key

    keys = [key(), key(dataclasses.replace(row, mpp=0.3)), key(layout="clam"), key(tissue=tmp_path / "mask.geojson")]
    (tmp_path / "mask.geojson").write_text("{  }")
    keys.append(key(tissue=tmp_path / "mask.geojson"))
    os.utime(path, ns=(1, 1))
    keys.append(key())
    write_slide(path, section(310, 300))
    keys.append(key())
    assert key() == keys[-1]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tapfm.tiles.cohort_tiling.TILING_VERSION", TILING_VERSION + 1)
        keys.append(key())
    assert len(set(keys)) == 8


def test_tiles_of_other_settings_are_removed_if_the_slide_fails(tmp_path):
    cohort, out = make_cohort(tmp_path / "c", 2), tmp_path / "tiles"
    tapfm("tile", cohort, "--out", out)
    assert len(read_tile_files(out)) == 2
    result = tapfm("tile", cohort, "--out", out, "--size", 2048)  # larger than the slides
    assert result.returncode == 3
    assert read_tile_files(out) == {}


def test_changing_the_layout_replaces_the_files(tmp_path):
    cohort, out = make_cohort(tmp_path / "c", 1), tmp_path / "tiles"
    assert "Replacing" not in tapfm("tile", cohort, "--out", out).stderr
    assert "Replacing the tiles of 1 slide" in tapfm("tile", cohort, "--out", out, "--layout", "clam").stderr
    assert list(read_tile_files(out)) == ["case-0.h5"]
    assert read_tiles(out / "patches" / "case-0.h5").side_px0 == 224


def write_cohort_with_edge_tiles(folder):
    """Write two slides covered by tissue; 112 px at the right edge are in no complete tile."""
    folder.mkdir()
    for i in range(2):
        write_slide(folder / f"s{i}.svs", section(1008, 672, seed=i, tissue=(0, 0, 1, 1)))
    (folder / "cohort.csv").write_text("slide_id,path\na,s0.svs\nb,s1.svs\n")
    return folder / "cohort.csv"


def test_edge_tiles_are_counted_by_default(tmp_path):
    cohort, out = write_cohort_with_edge_tiles(tmp_path / "c"), tmp_path / "tiles"
    result = tapfm("tile", cohort, "--out", out)
    assert "Tiled 2 of 2 slides: 24 tiles." in result.stdout
    assert "6 tiles with tissue at the right or bottom edge (11.1% of the tissue)" in result.stdout
    assert "--edge-tiles pad" in result.stdout
    for row in read_rows(out / "summary.csv"):
        assert (row["tiles"], row["tiles_padded"], row["removed_background"], row["removed_edge"]) == (
            "12",
            "0",
            "0",
            "3",
        )
        assert float(row["removed_edge_mm2"]) == pytest.approx(112 * 672 * 0.25e-6, abs=1e-4)
    assert "3 removed (past the edge)" in (out / "index.html").read_text()
    again = tapfm("tile", cohort, "--out", out)
    assert "2 of 2 slides are already tiled" in again.stderr
    assert again.stdout == result.stdout


@pytest.mark.parametrize("layout", ["trident", "clam"])
def test_edge_tiles_can_be_padded(tmp_path, layout):
    cohort, out = write_cohort_with_edge_tiles(tmp_path / "c"), tmp_path / "tiles"
    tapfm("tile", cohort, "--out", out, "--layout", layout)
    result = tapfm("tile", cohort, "--out", out, "--layout", layout, "--edge-tiles", "pad")
    assert result.returncode == 0, result.stderr
    assert "Replacing the tiles of 2 slides" in result.stderr
    assert "Tiled 2 of 2 slides: 30 tiles." in result.stdout
    assert "6 of these tiles extend past the right or bottom edge" in result.stdout
    assert "--edge-tiles" not in result.stdout
    (row, _) = read_rows(out / "summary.csv")
    assert (row["tiles"], row["tiles_padded"], row["removed_edge"], row["removed_edge_mm2"]) == ("15", "3", "0", "0.0")
    assert "3 tiles padded with white" in (out / "index.html").read_text()
    tiles = read_slide_tiles(out, "a")
    assert tiles.positions[tiles.padded].tolist() == [[896, 0], [896, 224], [896, 448]]
    assert tiles.tiling_settings["edge_tiles"] == "pad"
    assert "2 of 2 slides are already tiled" in (
        tapfm("tile", cohort, "--out", out, "--layout", layout, "--edge-tiles", "pad").stderr
    )


def test_tiles_of_versions_without_edge_tiles_stay_valid(tmp_path):
    cohort, out = write_cohort_with_edge_tiles(tmp_path / "c"), tmp_path / "tiles"
    tapfm("tile", cohort, "--out", out)
    path = out / "patches" / "a_patches.h5"
    row = SlideRow("a", cohort.parent / "s0.svs", "a")
    spec = {"tile_px": 224, "mpp": 0.5, "overlap_px": 0, "min_tissue": 0.25, "tissue": "otsu"}
    spec |= {"drop_pen": True, "drop_blur": True}
    key = fingerprint(TILING_VERSION, spec, "trident", "a", None, [file_identity(row.path)])
    assert read_tiles(path).fingerprint == key
    assert read_tiles(path).tiling_settings == spec
    with h5py.File(path, "r+") as file:  # an older version had no counts of edge tiles
        summary = json.loads(file["coords"].attrs["tapfm_summary"])
        old = {name: value for name, value in summary.items() if name != "tiles_padded" and "edge" not in name}
        file["coords"].attrs["tapfm_summary"] = json.dumps(old)
    result = tapfm("tile", cohort, "--out", out)
    assert "2 of 2 slides are already tiled" in result.stderr
    assert "3 tiles with tissue at the right or bottom edge (11.1% of the tissue)" in result.stdout
    assert [row["removed_edge"] for row in read_rows(out / "summary.csv")] == ["", "3"]


def test_slide_with_all_of_its_tissue_under_ink(tmp_path):
    pixels = section(1000, 672, tissue=(0, 0, 1, 1))
    pixels[:] = (30, 60, 170)
    write_slide(tmp_path / "a.svs", pixels)
    result = tapfm("tile", tmp_path / "a.svs", "--out", tmp_path / "tiles")
    assert result.returncode == 3, result.stderr
    (row,) = read_rows(tmp_path / "tiles" / "summary.csv")
    names = ("tissue_mm2", "removed_pen", "removed_edge", "removed_edge_mm2")
    assert [row[name] for name in names] == ["0.0", "12", "3", "0.0"]
    assert "(0.0% of the tissue)" in result.stdout


def test_python_function_pads_edge_tiles(tmp_path):
    cohort = write_cohort_with_edge_tiles(tmp_path / "c")
    table = tapfm_package.tile(cohort, out=tmp_path / "tiles", edge_tiles="pad", workers=0)
    assert [record.tiles_padded for record in table.finished] == [3, 3]
    with pytest.raises(SettingError, match="edge-tiles is 'mirror', but must be one of skip, pad"):
        tapfm_package.tile(cohort, out=tmp_path / "other", edge_tiles="mirror")


def test_number_of_workers_does_not_change_the_files(tmp_path):
    cohort = make_cohort(tmp_path / "c", 5)
    outputs = []
    for workers in (0, 1, 4):
        out = tmp_path / f"w{workers}"
        assert tapfm("tile", cohort, "--out", out, "--workers", workers).returncode == 0
        paths = [*out.glob("patches/*.h5"), *out.glob("overlays/*.png"), *out.glob("tissue/*.geojson")]
        assert len(paths) == 15
        files = {path.relative_to(out): path.read_bytes() for path in paths}
        outputs.append((files, [{**row, "seconds": ""} for row in read_rows(out / "summary.csv")]))
    assert outputs[0] == outputs[1] == outputs[2]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--size", "3"], "size is 3"),
        (["--mpp", "0"], "mpp is 0"),
        (["--min-tissue", "2"], "min-tissue is 2"),
        (["--tissue", "magic"], "otsu, darkness, texture"),
        (["--layout", "tridnet"], "Did you mean: trident"),
        (["--edge-tiles", "padd"], "edge-tiles is 'padd', but must be one of skip, pad"),
        (["--workers", "-1"], "--workers must be at least 0"),
        (["--only", "case-9"], "Available ids: case-0, case-1"),
        (["--tissue-mask", "absent"], "absent does not exist"),
        (["--slides"], "requires an argument"),
        (["--allow-failures", "-1"], "--allow-failures must be at least 0"),
    ],
)
def test_invalid_options_are_rejected_before_writing(tmp_path, arguments, message):
    result = tapfm("tile", make_cohort(tmp_path / "c", 2), "--out", tmp_path / "tiles", *arguments)
    assert result.returncode == 2, result.stderr
    assert message in result.stderr
    assert "Traceback" not in result.stderr
    assert not (tmp_path / "tiles").exists()


def test_invalid_cohort_table_is_rejected_before_writing(tmp_path):
    cohort = make_cohort(tmp_path / "c", 2)
    with cohort.open("a") as file:
        file.write("case-0,s1.svs,,,\nx,absent.svs,,,\n")
    result = tapfm("tile", cohort, "--out", tmp_path / "tiles")
    assert result.returncode == 2
    assert "rows 2 and 4: duplicate slide_id 'case-0'" in result.stderr
    assert "row 5:" in result.stderr
    assert "absent.svs does not exist" in result.stderr
    assert not (tmp_path / "tiles").exists()


def test_tissue_annotations_of_some_slides(tmp_path):
    cohort, out = make_cohort(tmp_path / "c", 3), tmp_path / "tiles"
    masks = tmp_path / "masks"
    masks.mkdir()
    polygon = [[0, 0], [448, 0], [448, 448], [0, 448], [0, 0]]
    (masks / "case-0.geojson").write_text(json.dumps({"type": "Polygon", "coordinates": [polygon]}))
    mask = np.zeros((1200, 1200), np.uint8)
    mask[:448, :448] = 255
    Image.fromarray(mask).save(masks / "case-1.png")
    (masks / "case-2.geojson").write_text("none")
    result = tapfm("tile", cohort, "--out", out, "--tissue-mask", masks, "--keep-blur", "--min-tissue", "0.9")
    assert result.returncode == 3
    assert read_tiles(out / "patches" / "case-0_patches.h5").positions.tolist() == [
        [0, 0],
        [224, 0],
        [0, 224],
        [224, 224],
    ]
    assert read_tiles(out / "patches" / "case-1_patches.h5").positions.tolist() == [[0, 0]]
    (failure,) = read_rows(out / "failures.csv")
    assert "case-2.geojson cannot be read" in failure["reason"]
    assert "annotations found for 3 of 3 slides" in result.stderr
    assert [row["tissue"] for row in read_rows(out / "summary.csv")] == ["annotation", "annotation", ""]
    (tmp_path / "none").mkdir()
    none = tapfm("tile", cohort, "--out", out, "--tissue-mask", tmp_path / "none")
    assert none.returncode == 2
    assert "case-0.geojson or case-0.png" in none.stderr
    several = tapfm("tile", cohort, "--out", out, "--tissue-mask", masks / "case-0.geojson")
    assert several.returncode == 2
    assert "--only ID" in several.stderr


def test_two_annotations_of_a_slide_are_rejected(tmp_path):
    cohort, masks = make_cohort(tmp_path / "c", 1), tmp_path / "masks"
    masks.mkdir()
    for suffix in ("png", "geojson"):
        (masks / f"case-0.{suffix}").touch()
    result = tapfm("tile", cohort, "--out", tmp_path / "tiles", "--tissue-mask", masks)
    assert result.returncode == 2
    assert "case-0.geojson and case-0.png" in result.stderr


def test_tile_files_of_another_tool_are_not_overwritten(tmp_path):
    cohort, out = make_cohort(tmp_path / "c", 2), tmp_path / "tiles"
    (out / "patches").mkdir(parents=True)
    for name in ("case-0.h5", "case-1.h5"):
        with h5py.File(out / "patches" / name, "w") as file:
            coords = file.create_dataset("coords", data=np.zeros((3, 2), int))
            if name == "case-0.h5":
                coords.attrs.update({"patch_size": 256, "patch_level": 0, "name": "case-0"})
    before = read_tile_files(out)
    rejected = tapfm("tile", cohort, "--out", out, "--layout", "clam")
    assert rejected.returncode == 2
    assert "2 tile files of another tool or another slide, such as case-0.h5" in rejected.stderr
    assert tapfm("tile", cohort, "--out", out).returncode == 0
    assert before.items() <= read_tile_files(out).items()


def test_output_in_the_slide_folder(tmp_path):
    make_cohort(tmp_path / "c", 2)
    for _ in range(2):
        result = subprocess.run(
            [*PROGRAM, "tile", ".", "--out", "."], cwd=tmp_path / "c", capture_output=True, text=True, check=False
        )
        assert "Tiled 2 of 2 slides" in result.stdout, result.stderr


def test_written_outlines_can_be_used_as_annotations(tmp_path):
    cohort, out = make_cohort(tmp_path / "c", 1), tmp_path / "tiles"
    tapfm("tile", cohort, "--out", out)
    before = read_tiles(out / "patches" / "case-0_patches.h5").positions.tolist()
    in_place = tapfm("tile", cohort, "--out", out, "--tissue-mask", out / "tissue")
    assert in_place.returncode == 2
    assert "would be overwritten" in in_place.stderr
    shutil.copytree(out / "tissue", tmp_path / "edited")
    result = tapfm("tile", cohort, "--out", out, "--tissue-mask", tmp_path / "edited")
    assert "already" not in result.stderr
    assert read_tiles(out / "patches" / "case-0_patches.h5").positions.tolist() == before


@needs_real_slides
def test_folder_of_real_slides(tmp_path):
    result = tapfm("tile", REAL, "--out", tmp_path / "tiles")
    assert result.returncode == 3
    assert "Tiled 3 of 8 slides" in result.stdout
    rows = {row["slide_id"]: row for row in read_rows(tmp_path / "tiles" / "summary.csv")}
    assert rows["CMU-1-Small-Region"]["tiles"] == "61"
    assert "0.00499 um per pixel" in rows["CMU-1-Small-Region.jpeg"]["reason"]
    assert "column `mpp`" in result.stdout


def test_slide_whose_old_files_cannot_be_removed_fails_alone(tmp_path):
    out = tmp_path / "tiles"
    (out / "overlays" / "case-1.png").mkdir(parents=True)  # a folder that cannot be removed as a file
    result = tapfm("tile", make_cohort(tmp_path / "c"), "--out", out, "--workers", 1)
    assert result.returncode == 3, result.stderr
    assert [row["slide_id"] for row in read_rows(out / "failures.csv")] == ["case-1"]
    assert [row["status"] for row in read_rows(out / "summary.csv")] == ["ok", "failed", "ok", "ok"]


def test_tiles_of_a_slide_whose_file_is_missing_are_kept(tmp_path):
    cohort, out = make_cohort(tmp_path / "c", 2), tmp_path / "tiles"
    tapfm("tile", cohort, "--out", out)
    before = read_tile_files(out)
    (tmp_path / "c" / "s0.svs").rename(tmp_path / "elsewhere.svs")
    result = tapfm("tile", cohort, "--out", out)
    assert result.returncode == 3
    (failure,) = read_rows(out / "failures.csv")
    assert failure["slide_id"] == "case-0"
    assert "s0.svs does not exist" in failure["reason"]
    assert read_tile_files(out) == before
    (tmp_path / "elsewhere.svs").rename(tmp_path / "c" / "s0.svs")
    assert "2 of 2 slides are already tiled" in tapfm("tile", cohort, "--out", out).stderr
