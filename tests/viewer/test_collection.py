"""Selection of the slides that the viewer shows."""

import json
import shutil

import pytest
from predicted_slides import predicted_slide
from slide_files import section, write_slide
from viewer_fixtures import write_predicted_slide, write_two_predictions

from tapfm.errors import CohortError, InputError
from tapfm.prediction.folder import PREDICTION_JSON
from tapfm.viewer.collection import collect_slides


@pytest.fixture
def plain_slide(tmp_path):
    (tmp_path / "plain").mkdir()
    return write_slide(tmp_path / "plain" / "other.svs", section(300, 300))


def test_predictions_and_slide_folders_can_be_combined(tmp_path, plain_slide):
    predicted = write_two_predictions(tmp_path)
    found = collect_slides([predicted, plain_slide.parent])
    assert [slide.slide_id for slide in found.slides] == ["case-1", "case-2", "other"]
    assert [slide.prediction is not None for slide in found.slides] == [True, True, False]
    assert found.targets == ["FGFR3"]
    assert found.missing_slide_ids == []
    assert len({slide.key for slide in found.slides}) == 3


def test_a_slide_passed_twice_is_shown_once_with_its_prediction(tmp_path):
    predicted = write_two_predictions(tmp_path)
    for order in ([predicted, tmp_path / "slides"], [tmp_path / "slides", predicted]):
        found = collect_slides(order)
        assert [slide.slide_id for slide in found.slides] == ["case-1", "case-2"]
        assert all(slide.prediction for slide in found.slides)


def test_different_slides_with_the_same_id_are_an_error(tmp_path):
    predicted = write_two_predictions(tmp_path)
    other = write_slide(tmp_path / "case-1.svs", section(300, 300))
    with pytest.raises(CohortError, match="case-1"):
        collect_slides([predicted, other])
    with pytest.raises(CohortError, match="case-1, case-2"):
        collect_slides([predicted, shutil.copytree(predicted, tmp_path / "again")])


def test_moved_slides_are_found_in_the_slides_folder(tmp_path):
    predicted = write_two_predictions(tmp_path)
    moved = shutil.move(tmp_path / "slides", tmp_path / "moved")
    assert collect_slides([predicted]).missing_slide_ids == ["case-1", "case-2"]
    found = collect_slides([predicted], moved)
    assert found.missing_slide_ids == []
    assert found.slides[0].path == moved / "case-1.svs"
    (moved / "twice").mkdir()
    shutil.copy(moved / "case-1.svs", moved / "twice" / "case-1.svs")
    with pytest.raises(InputError, match=r"case-1.*twice"):
        collect_slides([predicted], moved)
    with pytest.raises(InputError, match="nowhere"):
        collect_slides([predicted], tmp_path / "nowhere")


def test_the_key_changes_with_the_file_and_the_prediction(tmp_path, plain_slide):
    before = collect_slides([plain_slide]).slides[0].key
    assert collect_slides([plain_slide]).slides[0].key == before
    write_slide(plain_slide, section(300, 300, seed=1))
    assert collect_slides([plain_slide]).slides[0].key != before
    key_without_prediction = collect_slides([plain_slide]).slides[0].key
    write_predicted_slide(tmp_path / "predicted", plain_slide, "other")
    assert collect_slides([tmp_path / "predicted"]).slides[0].key != key_without_prediction


@pytest.mark.parametrize("state", ["absent", "empty", "no finished slide", "damaged"])
def test_a_folder_without_slides_is_an_error_with_a_hint(tmp_path, state):
    folder = tmp_path / "folder"
    if state != "absent":
        folder.mkdir()
    if state in ("no finished slide", "damaged"):
        (folder / PREDICTION_JSON).write_text("{}" if state == "no finished slide" else "no JSON")
    with pytest.raises(InputError) as error:
        collect_slides([folder])
    assert error.value.hint


def test_a_damaged_slide_json_is_an_error(tmp_path):
    (tmp_path / PREDICTION_JSON).write_text("{}")
    slide_folder = tmp_path / "per-slide" / "case-17"
    predicted_slide().write(slide_folder)
    broken = json.loads((slide_folder / "slide.json").read_text())
    del broken["bounds"]
    (slide_folder / "slide.json").write_text(json.dumps(broken))
    with pytest.raises(InputError, match=r"slide\.json cannot be read"):
        collect_slides([tmp_path])
