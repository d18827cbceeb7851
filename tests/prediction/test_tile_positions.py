"""A tile with a high value is drawn at its exact pixels: in the PNG, in the TIFF and in the GeoJSON."""

import io
import json

import numpy as np
import openslide
import pytest
import tifffile
from PIL import Image
from predicted_slides import CONTRIBUTION, make_tile_table, predicted_file, tile_positions
from slide_files import write_scn, write_slide

from tapfm.prediction.geojson import write_geojson
from tapfm.prediction.heatmap import _OPACITY as OPACITY
from tapfm.prediction.heatmap import MAX_SIDE_PX, draw_heatmap
from tapfm.prediction.heatmap_tiff import write_heatmap_tiff
from tapfm.prediction.layers import _DIVERGING as DIVERGING
from tapfm.slides.annotations import _read_polygons as read_polygons
from tapfm.slides.opening import open_slide
from tapfm.tiles.grid import TileSpec, tile_grid

BACKGROUND, TISSUE = 240, 80  # grey levels under the colours
HOT = 2, 1  # column and row of the tile on the grid


class Case:
    """A slide whose hot tile is dark tissue, so that the slide itself shows where the tile is."""

    def __init__(self, folder, *, mpp, size_px0, corner_px0=None):
        self.corner = np.array(corner_px0 or (0, 0))
        stride_px0, side_px0 = 224 * 0.5 / mpp, round(224 * 0.5 / mpp)
        self.start = self.corner + np.rint(np.array(HOT) * stride_px0).astype(int)
        self.square = [*self.start.tolist(), side_px0]
        # start of the next tiles
        self.next = self.corner + np.rint((np.array(HOT) + 1) * stride_px0).astype(int)
        pixels = np.full((size_px0[1], size_px0[0], 3), BACKGROUND, np.uint8)
        (x, y), (x_end, y_end) = self.start - self.corner, self.next - self.corner
        pixels[y:y_end, x:x_end] = TISSUE
        if corner_px0 is None:
            options = {"downsamples": (1,), "compression": "zlib", "aperio": False}
            path = write_slide(folder / "s.tif", pixels, mpp=mpp, **options)
        else:
            canvas_px = (size_px0[0] + corner_px0[0] + 300, size_px0[1] + corner_px0[1] + 200)
            path = write_scn(folder / "s.scn", [(*corner_px0, pixels)], canvas_px, mpp=mpp)
        self.slide = open_slide(path)
        self.predicted = predicted_file(path, mpp=mpp)
        positions = tile_positions(self.predicted)
        self.hot_row = positions.tolist().index(self.start.tolist())
        values = np.zeros(len(positions))
        values[self.hot_row] = 1.0
        self.table = make_tile_table(self.predicted, positions, values)

    def tile_mask(self, px0_per_px, width_px, height_px):
        """Return which pixels of an image of the bounds have their centre in the tile."""
        inside = []
        for axis, length_px in enumerate((width_px, height_px)):
            centres = (np.arange(length_px) + 0.5) * px0_per_px[axis] + self.corner[axis]
            inside.append((centres >= self.start[axis]) & (centres < self.next[axis]))
        return inside[1][:, None] & inside[0][None, :]


CASES = {
    "20x": {"mpp": 0.5, "size_px0": (1200, 900)},
    "20x, downsampled": {"mpp": 0.5, "size_px0": (2500, 1100)},
    "40x": {"mpp": 0.25, "size_px0": (2300, 1700)},
    "bounds": {"mpp": 0.5, "size_px0": (1200, 900), "corner_px0": (512, 256)},
    "40x, bounds": {"mpp": 0.25, "size_px0": (2304, 1792), "corner_px0": (771, 333)},
    "stride of 443.2": {"mpp": 0.2527, "size_px0": (2400, 1800)},
    "stride of 225.8": {"mpp": 0.496, "size_px0": (1200, 900)},
}


@pytest.fixture(params=CASES.values(), ids=CASES.keys())
def case(request, tmp_path):
    found = Case(tmp_path, **request.param)
    yield found
    found.slide.close()


def test_png_has_the_tile_at_its_pixels_and_on_its_tissue(case):
    sheet = draw_heatmap(case.slide.thumbnail(MAX_SIDE_PX), case.predicted, case.table, CONTRIBUTION)
    with Image.open(io.BytesIO(sheet)) as image:
        about = json.loads(image.text["tapfm"])
        left, top, width_px, height_px = about["slide_in_image_px"]
        image = np.asarray(image)[top : top + height_px, left : left + width_px].astype(int)
    red = image[..., 0] - image[..., 2] > 40
    expected = case.tile_mask(about["px0_per_px"], width_px, height_px)
    np.testing.assert_array_equal(red, expected)
    # the dark tissue is under the tile, except for pixels that the edge crosses
    rows, columns = (np.flatnonzero(expected.any(axis=axis)) for axis in (1, 0))
    colour = OPACITY * np.array(DIVERGING[-1]) + (1 - OPACITY) * TISSUE
    inner = image[rows[0] + 1 : rows[-1], columns[0] + 1 : columns[-1]]
    assert np.abs(inner - colour).max() <= 8
    for y in (rows[0] - 2, rows[-1] + 2):
        assert (image[y, columns[0] : columns[-1]] > 215).all()
    for x in (columns[0] - 2, columns[-1] + 2):
        assert (image[rows[0] : rows[-1], x] > 215).all()


def test_tiff_has_the_tile_at_its_pixels(case, tmp_path):
    path = tmp_path / "heatmap.tif"
    write_heatmap_tiff(path, case.predicted, case.table, CONTRIBUTION)
    with tifffile.TiffFile(path) as file:
        about = json.loads(file.pages[0].description)
    assert about["bounds_corner_px0"] == case.corner.tolist()
    downsample = about["downsample"]
    with openslide.OpenSlide(path) as opened:
        image = np.asarray(opened.read_region((0, 0), 0, opened.dimensions).convert("RGB"))
        assert float(opened.properties["openslide.mpp-x"]) == pytest.approx(case.predicted.mpp * downsample, rel=1e-6)
    red = (image == DIVERGING[-1]).all(axis=2)
    np.testing.assert_array_equal(red, case.tile_mask((downsample, downsample), *red.shape[::-1]))


def test_geojson_has_the_tile_at_its_corners(case, tmp_path):
    path = tmp_path / "tiles.geojson"
    write_geojson(path, case.predicted, case.table)
    features = json.loads(path.read_text())["features"]
    hot = [each for each in features if each["properties"]["measurements"][CONTRIBUTION.column] == 1]
    assert [features.index(each) for each in hot] == [case.hot_row]
    x, y, side = case.square
    x, y = x - case.corner[0], y - case.corner[1]
    around = [[x, y], [x + side, y], [x + side, y + side], [x, y + side], [x, y]]
    assert hot[0]["geometry"] == {"type": "Polygon", "coordinates": [around]}
    # our own GeoJSON reader returns the same position on the slide
    ring = read_polygons(path, case.slide.metadata.bounds)[case.hot_row][0]
    np.testing.assert_array_equal(ring[0], case.start)
    np.testing.assert_array_equal(ring[2], case.start + side)


def test_tile_past_the_edge_is_drawn_up_to_the_edge(tmp_path):
    pixels = np.full((700, 1000, 3), TISSUE, np.uint8)
    path = write_slide(tmp_path / "s.tif", pixels, downsamples=(1,), compression="zlib", aperio=False)
    predicted = predicted_file(path)
    positions = tile_grid(predicted.bounds, TileSpec(), 0.5, with_edge=True)
    table = make_tile_table(predicted, positions, np.arange(len(positions)) == len(positions) - 1)
    expected = np.zeros((700, 1000), bool)
    expected[672:, 896:] = True
    slide = open_slide(path)
    with Image.open(io.BytesIO(draw_heatmap(slide.thumbnail(1000), predicted, table, CONTRIBUTION))) as image:
        left, top, width_px, height_px = json.loads(image.text["tapfm"])["slide_in_image_px"]
        drawn = np.asarray(image)[top : top + height_px, left : left + width_px].astype(int)
    np.testing.assert_array_equal(drawn[..., 0] - drawn[..., 2] > 40, expected)
    write_heatmap_tiff(tmp_path / "heatmap.tif", predicted, table, CONTRIBUTION)
    with openslide.OpenSlide(tmp_path / "heatmap.tif") as opened:
        drawn = np.asarray(opened.read_region((0, 0), 0, opened.dimensions).convert("RGB"))
    assert drawn.shape[:2] == (100, 143)  # 1 pixel for 7 of the slide
    np.testing.assert_array_equal(
        (drawn == DIVERGING[-1]).all(axis=2), np.pad(np.ones((4, 15), bool), ((96, 0), (128, 0)))
    )
    slide.close()
