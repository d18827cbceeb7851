"""The baseline of colours and tile count detects shortcuts, and only those."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tapfm.baselines.colour_baseline import BaselineSlides, predict_baseline
from tapfm.baselines.slide_colours import colours_key
from tapfm.cohort.cohort_table import SlideRow
from tapfm.metrics.ranking import auc
from tapfm.runs.data import RunSlide
from tapfm.tasks.catalog import target_kinds
from tapfm.tiles.colour_statistics import COLOUR_STATISTICS
from tapfm.tiles.store import TileSet


def make_slides(count, split, first=0, tiles=lambda _: 10, targets=("FGFR3",)):
    found = []
    for number in range(first, first + count):
        row = SlideRow(f"s{number}", Path(f"{number}.svs"), f"p{number}")
        positions = np.zeros((tiles(number), 2), np.int64)
        labels = {target: (number >> index) % 2 for index, target in enumerate(targets)}
        found.append(RunSlide(row, split, labels, TileSet(row.slide_id, positions, 224, 224)))
    return tuple(found)


def make_colours(slides, shift):
    """Return random colour statistics; those of positive slides are shifted."""
    found = {}
    for slide in slides:
        noise = np.random.default_rng(int(slide.row.slide_id[1:]))
        found[colours_key(slide)] = noise.normal(shift * slide.labels["FGFR3"], 1, len(COLOUR_STATISTICS)).tolist()
    return found


def compute_auc(baseline):
    positive = np.array([each.labels["FGFR3"] == 1 for each in baseline.predictions])
    return auc(positive, np.array([each.logits["FGFR3"] for each in baseline.predictions]))


@pytest.mark.parametrize(("shift", "low", "high"), [(2.0, 0.99, 1.0), (0.0, 0.35, 0.65)])
def test_baseline_detects_colours_that_depend_on_the_label(shift, low, high):
    training, evaluated = make_slides(60, "train"), make_slides(200, "test", first=60)
    slides = BaselineSlides(training, (), evaluated)
    found = compute_auc(predict_baseline(slides, target_kinds(["FGFR3"]), make_colours(slides.all, shift)))
    assert low <= found <= high


def test_baseline_detects_tile_counts_that_depend_on_the_label():
    def count_tiles(number):
        return 50 if number % 2 else 20

    slides = BaselineSlides(
        make_slides(20, "train", tiles=count_tiles), (), make_slides(10, "test", first=20, tiles=count_tiles)
    )
    baseline = predict_baseline(slides, target_kinds(["FGFR3"]), None)
    assert compute_auc(baseline) == 1.0
    assert "only the number of tiles" in baseline.note


def test_labels_of_evaluated_slides_are_not_used():
    training, evaluated = make_slides(30, "train"), make_slides(20, "test", first=30)
    known = make_colours(training + evaluated, 1.0)
    flipped = tuple(
        RunSlide(each.row, each.split, {"FGFR3": 1 - each.labels["FGFR3"]}, each.tiles) for each in evaluated
    )
    first = predict_baseline(BaselineSlides(training, (), evaluated), target_kinds(["FGFR3"]), known)
    second = predict_baseline(BaselineSlides(training, (), flipped), target_kinds(["FGFR3"]), known)
    assert [each.logits for each in first.predictions] == [each.logits for each in second.predictions]


def test_slide_ids_may_equal_those_of_training_slides():
    training, evaluated = make_slides(30, "train"), make_slides(20, "test", first=30)
    slides = BaselineSlides(training, (), evaluated)
    known = make_colours(slides.all, 1.0)
    renamed = tuple(
        replace(
            each,
            row=replace(each.row, slide_id=training[index].row.slide_id),
            tiles=replace(each.tiles, positions=each.tiles.positions + 224),
        )
        for index, each in enumerate(evaluated)
    )
    again = known | {colours_key(new): known[colours_key(old)] for new, old in zip(renamed, evaluated, strict=True)}
    first = predict_baseline(slides, target_kinds(["FGFR3"]), known)
    second = predict_baseline(BaselineSlides(training, (), renamed), target_kinds(["FGFR3"]), again)
    assert [each.logits for each in first.predictions] == [each.logits for each in second.predictions]


def test_slide_without_colours_is_excluded_and_noted():
    training, evaluated = make_slides(10, "train"), make_slides(4, "test", first=10)
    known = make_colours(training + evaluated, 0.0)
    del known[colours_key(evaluated[2])]
    baseline = predict_baseline(BaselineSlides(training, (), evaluated), target_kinds(["FGFR3"]), known)
    assert [each.slide_id for each in baseline.predictions] == ["s10", "s11", "s13"]
    assert "It excludes 1 slide without readable tiles" in baseline.note


def test_no_baseline_with_too_few_training_slides():
    training, evaluated = make_slides(10, "train"), make_slides(4, "test", first=10)
    known = make_colours((training[1], *evaluated), 0.0)
    baseline = predict_baseline(BaselineSlides(training, (), evaluated), target_kinds(["FGFR3"]), known)
    assert baseline.predictions == ()
    assert "not available" in baseline.note
    assert "FGFR3" in baseline.note


def test_each_target_has_its_own_model():
    targets = ("FGFR3", "TP53")
    slides = BaselineSlides(
        make_slides(40, "train", targets=targets), (), make_slides(8, "test", first=40, targets=targets)
    )
    baseline = predict_baseline(slides, target_kinds(targets), make_colours(slides.all, 2.0))
    assert [list(each.logits) for each in baseline.predictions] == [list(targets)] * 8
    assert compute_auc(baseline) == 1.0
