"""`tapfm predict --mpp`: the scale of slides that have no usable scale of their own."""

import io

import h5py
import numpy as np
import pytest
from cohort_files import read_rows
from command_line import tapfm
from rich.console import Console
from slide_files import section, write_slide

import tapfm as tapfm_package
from tapfm.cohort.cohort_table import SlideRow
from tapfm.prediction.folder import PredictionFolder
from tapfm.tiles.cohort_tiling import tile_cohort
from tapfm.tiles.grid import TileSpec
from tapfm.tiles.store import read_tiles


@pytest.fixture(scope="module")
def run(train):
    return train("scale")


@pytest.fixture(scope="module")
def slides(tmp_path_factory):
    """A folder with a slide that has a scale, one that has only an objective power, and one that has neither."""
    folder = tmp_path_factory.mktemp("slides")
    write_slide(folder / "own.svs", section(900, 900), mpp=0.5)
    write_slide(folder / "power.svs", section(900, 900, seed=1), mpp=None, objective=20)
    write_slide(folder / "none.tif", section(900, 900, seed=2), mpp=None, aperio=False)
    return folder


def predict(model, out, *arguments):
    return tapfm("predict", "--model", model, "--out", out, "--workers", 0, "--device", "cpu", *arguments)


def scales(out):
    """Return the scale of each predicted slide, its source, and the side of its tiles in level-0 pixels."""
    return {each.slide_id: (each.mpp, each.mpp_source, each.side_px0) for each in PredictionFolder(out).slides()}


def test_only_slides_without_a_scale_get_the_value(run, slides, tmp_path):
    (tmp_path / "table.csv").write_text(f"slide_id,path,mpp\nlisted,{slides / 'none.tif'},1.0\n")
    result = predict(run, tmp_path / "p", slides, tmp_path / "table.csv", "--mpp", 0.25)
    assert result.returncode == 0, result.output
    assert scales(tmp_path / "p") == {
        "listed": (1.0, "cohort table", 112),
        "none": (0.25, "--mpp", 448),
        "own": (0.5, "file", 224),
        "power": (0.5, "objective", 224),
    }
    assert "--mpp 0.25 is used for 1 of 4 slides" in result.output
    assert all(f"1 from the {source}" in result.output for source in ("file", "objective", "cohort table"))
    rows = {row["slide_id"]: row for row in read_rows(tmp_path / "p" / "predictions.csv")}
    assert (rows["none"]["mpp"], rows["none"]["mpp_source"]) == ("0.25", "--mpp")
    assert (rows["own"]["mpp"], rows["own"]["mpp_source"]) == ("0.5", "file")


def test_value_that_no_slide_needs_is_reported(run, slides, tmp_path):
    result = predict(run, tmp_path / "p", slides / "own.svs", "--mpp", 0.25)
    assert result.returncode == 0, result.output
    assert "--mpp 0.25 is used for none of 1 slide" in result.output


def test_failed_slides_name_the_option_and_are_added_by_resuming_with_it(run, slides, tmp_path):
    first = predict(run, tmp_path / "p", slides)
    assert first.returncode == 3
    (failure,) = read_rows(tmp_path / "p" / "failures.csv")
    assert failure["slide_id"] == "none"
    assert "--mpp 0.25 --resume" in failure["hint"]
    assert "column `mpp`" in failure["hint"]
    before = scales(tmp_path / "p")
    added = predict(run, tmp_path / "p", slides, "--mpp", 0.25, "--resume")
    assert added.returncode == 0, added.output
    assert "2 of 3 slides are already tiled" in added.output
    assert "2 of 3 slides are already predicted" in added.output
    assert scales(tmp_path / "p") == before | {"none": (0.25, "--mpp", 448)}
    for options in ((), ("--mpp", 0.5)):
        other = predict(run, tmp_path / "p", slides, *options, "--resume")
        assert other.returncode == 2, other.output
        assert "mpp: 0.25 before" in other.output
    again = predict(run, tmp_path / "p", slides, "--mpp", 0.25, "--resume")
    assert again.returncode == 0, again.output
    assert "3 of 3 slides are already predicted" in again.output


def test_tiles_of_another_value_are_not_reused(slides, tmp_path):
    rows = [SlideRow(name, slides / f"{name}.{suffix}", name) for name, suffix in (("own", "svs"), ("none", "tif"))]
    sides, output = [], io.StringIO()
    for mpp in (0.5, 0.25, 0.25):
        tile_cohort(
            rows,
            tmp_path,
            TileSpec(),
            only=None,
            layout="trident",
            tissue=None,
            workers=0,
            force=False,
            console=Console(file=output, width=200),
            mpp_option=mpp,
        )
        sides.append([read_tiles(tmp_path / "patches" / f"{row.slide_id}_patches.h5").side_px0 for row in rows])
    assert sides == [[224, 224], [224, 448], [224, 448]]
    assert "1 of 2 slides are already tiled" in output.getvalue()
    assert "2 of 2 slides are already tiled" in output.getvalue()


def test_implausible_value_in_the_file_is_replaced_with_a_warning(run, tmp_path):
    write_slide(tmp_path / "tenfold.svs", section(900, 900), mpp=2.5, objective=40)
    result = predict(run, tmp_path / "p", tmp_path / "tenfold.svs", "--mpp", 0.25)
    assert result.returncode == 0, result.output
    assert scales(tmp_path / "p") == {"tenfold": (0.25, "--mpp", 448)}
    assert "2.5 um per pixel, outside the plausible range" in result.output


def test_value_that_contradicts_the_objective_power_is_not_used(run, slides, tmp_path):
    write_slide(tmp_path / "twenty.svs", section(900, 900), mpp=2.5, objective=20)
    result = predict(run, tmp_path / "p", slides / "none.tif", tmp_path / "twenty.svs", "--mpp", 0.25)
    assert result.returncode == 3, result.output
    (failure,) = read_rows(tmp_path / "p" / "failures.csv")
    assert failure["slide_id"] == "twenty"
    assert "--mpp 0.25 is not used for it, because 20x usually means 0.5" in failure["reason"]
    assert "column `mpp`" in failure["hint"]
    assert "--resume" not in failure["hint"]


@pytest.mark.parametrize("value", ["0", "-1", "nan", "10", "0.099", "inf"])
def test_implausible_option_is_an_error(run, slides, tmp_path, value):
    result = predict(run, tmp_path / "p", slides, "--mpp", value)
    assert result.returncode == 2
    assert "between 0.1 and 1.2" in result.output
    assert not (tmp_path / "p").exists()


def test_scale_of_tiles_of_another_tool(run, slides, tmp_path):
    (tmp_path / "tiles" / "patches").mkdir(parents=True)
    for name in ("own", "none"):
        with h5py.File(tmp_path / "tiles" / "patches" / f"{name}_patches.h5", "w") as file:
            coordinates = file.create_dataset("coords", data=np.array([[0, 0], [448, 0]]))
            coordinates.attrs.update({"patch_size": 224, "patch_size_level0": 448, "name": name})
    arguments = (slides / "own.svs", slides / "none.tif", "--tiles", tmp_path / "tiles")
    failed = predict(run, tmp_path / "without", *arguments)
    assert failed.returncode == 3
    (failure,) = read_rows(tmp_path / "without" / "failures.csv")
    assert (failure["slide_id"], "--mpp" in failure["hint"]) == ("none", True)
    result = predict(run, tmp_path / "p", *arguments, "--mpp", 0.25)
    assert result.returncode == 0, result.output
    assert scales(tmp_path / "p") == {"none": (0.25, "--mpp", 448), "own": (0.5, "file", 448)}
    assert "--mpp 0.25 is used for 1 of 2 slides" in result.output


def test_tiles_of_a_prediction_with_another_value_keep_their_scale(run, slides, tmp_path):
    slide = slides / "none.tif"
    assert predict(run, tmp_path / "first", slide, "--mpp", 0.5).returncode == 0
    result = predict(run, tmp_path / "p", slide, "--mpp", 0.25, "--tiles", tmp_path / "first" / "tiles")
    assert result.returncode == 0, result.output
    assert scales(tmp_path / "p") == {"none": (0.5, "tiles", 224)}
    assert "--mpp 0.25 is used for none of 1 slide" in result.output


def test_python_function_has_the_same_option(run, slides, tmp_path):
    predicted = tapfm_package.predict(slides / "none.tif", model=run, out=tmp_path / "p", mpp=0.25, device="cpu")
    assert [(slide.mpp, slide.mpp_source) for slide in predicted.slides] == [(0.25, "--mpp")]
