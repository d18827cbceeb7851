"""Which slides are shown."""

import json
import shutil

import pytest
from predicted_slides import predicted_slide
from slide_files import section, write_slide
from viewed_slides import predict, two_predictions

from tapfm.errors import CohortError, InputError
from tapfm.prediction.folder import PREDICTION_JSON
from tapfm.viewer.collection import collect_viewed_slides


@pytest.fixture
def plain(tmp_path):
    (tmp_path / "plain").mkdir()
    return write_slide(tmp_path / "plain" / "other.svs", section(300, 300))


def test_predictions_folders_and_files_come_together(tmp_path, plain):
    predicted = two_predictions(tmp_path)
    found = collect_viewed_slides([predicted, plain.parent])
    assert [slide.slide_id for slide in found.slides] == ["case-1", "case-2", "other"]
    assert [slide.prediction is not None for slide in found.slides] == [True, True, False]
    assert found.targets == ["FGFR3"]
    assert found.lost == []
    assert len({slide.key for slide in found.slides}) == 3


def test_a_slide_that_is_given_twice_is_shown_once_with_its_prediction(tmp_path):
    predicted = two_predictions(tmp_path)
    for order in ([predicted, tmp_path / "slides"], [tmp_path / "slides", predicted]):
        found = collect_viewed_slides(order)
        assert [slide.slide_id for slide in found.slides] == ["case-1", "case-2"]
        assert all(slide.prediction for slide in found.slides)


def test_two_slides_with_one_id_are_refused(tmp_path):
    predicted = two_predictions(tmp_path)
    other = write_slide(tmp_path / "case-1.svs", section(300, 300))
    with pytest.raises(CohortError, match="case-1"):
        collect_viewed_slides([predicted, other])
    with pytest.raises(CohortError, match="case-1, case-2"):
        collect_viewed_slides([predicted, shutil.copytree(predicted, tmp_path / "again")])


def test_slides_that_moved_are_found_where_the_user_says(tmp_path):
    predicted = two_predictions(tmp_path)
    moved = shutil.move(tmp_path / "slides", tmp_path / "moved")
    assert collect_viewed_slides([predicted]).lost == ["case-1", "case-2"]
    found = collect_viewed_slides([predicted], moved)
    assert found.lost == []
    assert found.slides[0].path == moved / "case-1.svs"
    (moved / "twice").mkdir()
    shutil.copy(moved / "case-1.svs", moved / "twice" / "case-1.svs")
    with pytest.raises(InputError, match="several files for case-1"):
        collect_viewed_slides([predicted], moved)
    with pytest.raises(InputError, match="There is no folder"):
        collect_viewed_slides([predicted], tmp_path / "nowhere")


def test_a_key_changes_with_the_file_and_with_the_prediction(tmp_path, plain):
    before = collect_viewed_slides([plain]).slides[0].key
    assert collect_viewed_slides([plain]).slides[0].key == before
    write_slide(plain, section(300, 300, seed=1))
    assert collect_viewed_slides([plain]).slides[0].key != before
    without = collect_viewed_slides([plain]).slides[0].key
    predict(tmp_path / "predicted", plain, "other")
    assert collect_viewed_slides([tmp_path / "predicted"]).slides[0].key != without


@pytest.mark.parametrize("what", ["absent", "empty", "no slide done", "damaged"])
def test_what_cannot_be_shown_is_told(tmp_path, what):
    folder = tmp_path / "folder"
    if what != "absent":
        folder.mkdir()
    if what in ("no slide done", "damaged"):
        (folder / PREDICTION_JSON).write_text("{}" if what == "no slide done" else "no JSON")
    with pytest.raises(InputError) as told:
        collect_viewed_slides([folder])
    assert told.value.hint


def test_a_slide_json_that_is_damaged_is_told(tmp_path):
    (tmp_path / PREDICTION_JSON).write_text("{}")
    place = tmp_path / "per-slide" / "case-17"
    predicted_slide().write(place)
    broken = json.loads((place / "slide.json").read_text())
    del broken["bounds"]
    (place / "slide.json").write_text(json.dumps(broken))
    with pytest.raises(InputError, match=r"slide\.json cannot be read"):
        collect_viewed_slides([tmp_path])
