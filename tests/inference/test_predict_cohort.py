"""Predictions of a cohort: finished slides are saved, and not predicted again for the same model and content."""

import pytest
from training_slides import label_slides, make_bags, make_learner, write_slides

from tapfm.inference import cohort
from tapfm.inference.cohort import FinishedSlide, FinishedSlides, predict_cohort
from tapfm.inference.predictor import Predictor


@pytest.fixture(scope="module")
def slides(tmp_path_factory):
    return write_slides(tmp_path_factory.mktemp("slides"), 3)


def predict(slides, finished, seen=None):
    model = make_learner().model
    model.train(False)
    seen = [] if seen is None else seen
    return predict_cohort(
        Predictor.for_training(model),
        make_bags(slides),
        label_slides(slides),
        finished,
        on_slide=lambda slide_id, _: seen.append(slide_id),
    )


def test_finished_slides_are_not_read_again_and_predictions_stay_in_order(tmp_path, slides):
    path, seen = tmp_path / "finished.jsonl", []
    first = predict(slides, FinishedSlides(path, "weights"), seen)
    assert seen == list(slides)
    assert [each.slide_id for each in first.predictions] == list(slides)
    assert [each.tiles for each in first.predictions] == [25, 25, 25]
    path.write_text("\n".join(line for line in path.read_text().splitlines() if '"s01"' not in line))
    seen.clear()
    assert predict(slides, FinishedSlides(path, "weights"), seen) == first
    assert seen == ["s01"]


@pytest.mark.parametrize(
    "changed", [("other weights", {"s00": "a"}), ("weights", {"s00": "b"}), ("weights", {"s00": "a", "s01": "c"})]
)
def test_predictions_of_other_weights_or_tiles_are_discarded(tmp_path, changed):
    path = tmp_path / "finished.jsonl"
    before = FinishedSlides(path, "weights", {"s00": "a"})
    before.add("s00", FinishedSlide([1.5], 25, [3], "damaged"))
    before.add("s01", FinishedSlide([0.5], 25, [], ""))
    assert set(before.read()) == {"s00", "s01"}
    assert len(FinishedSlides(path, *changed).read()) < 2


def test_predictions_of_another_features_version_are_discarded(tmp_path, monkeypatch):
    path = tmp_path / "finished.jsonl"
    FinishedSlides(path, "weights").add("s00", FinishedSlide([1.5], 25, [], ""))
    assert FinishedSlides(path, "weights").read()
    monkeypatch.setattr(cohort, "FEATURES_VERSION", 10**6)
    assert not FinishedSlides(path, "weights").read()


def test_truncated_line_affects_only_one_slide(tmp_path):
    path = tmp_path / "finished.jsonl"
    finished = FinishedSlides(path, "weights")
    finished.add("s00", FinishedSlide([1.5], 25, [], ""))
    path.write_text(path.read_text()[:-5])
    finished.add("s01", FinishedSlide([0.5], 24, [3], "damaged"))
    assert finished.read() == {"s01": FinishedSlide([0.5], 24, [3], "damaged")}


def test_skipped_tiles_and_failures_are_reported(tmp_path, slides):
    path = tmp_path / "finished.jsonl"
    finished = FinishedSlides(path, "weights")
    finished.add("s00", FinishedSlide([1.5], 24, [3], "damaged"))
    with_missing = dict(slides)
    with_missing["s01"] = type(slides["s01"])(tmp_path / "missing.svs", slides["s01"].tiles)
    found = predict(with_missing, finished)
    assert [each.slide_id for each in found.predictions] == ["s00", "s02"]
    assert found.predictions[0].tiles_failed == 1
    assert found.skipped["s00"].tiles == [3]
    assert list(found.failed) == ["s01"]
