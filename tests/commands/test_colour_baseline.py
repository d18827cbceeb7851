"""A baseline of colours and tile count: it finds a shortcut where there is one, and none where there is none."""

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
from tapfm.tiles.colours import COLOUR_STATISTICS
from tapfm.tiles.store import TileSet


def slides(count, split, first=0, tiles=lambda _: 10, targets=("FGFR3",)):
    found = []
    for number in range(first, first + count):
        row = SlideRow(f"s{number}", Path(f"{number}.svs"), f"p{number}")
        positions = np.zeros((tiles(number), 2), np.int64)
        labels = {target: (number >> place) % 2 for place, target in enumerate(targets)}
        found.append(RunSlide(row, split, labels, TileSet(row.slide_id, positions, 224, 224)))
    return tuple(found)


def colours(of_slides, shift):
    """Random colours; those of positive slides are shifted."""
    found = {}
    for slide in of_slides:
        noise = np.random.default_rng(int(slide.row.slide_id[1:]))
        found[colours_key(slide)] = noise.normal(shift * slide.labels["FGFR3"], 1, len(COLOUR_STATISTICS)).tolist()
    return found


def auc_of(baseline):
    positive = np.array([each.labels["FGFR3"] == 1 for each in baseline.predictions])
    return auc(positive, np.array([each.logits["FGFR3"] for each in baseline.predictions]))


@pytest.mark.parametrize(("shift", "low", "high"), [(2.0, 0.99, 1.0), (0.0, 0.35, 0.65)])
def test_a_stain_that_gives_the_label_away_shows(shift, low, high):
    training, asked = slides(60, "train"), slides(200, "test", first=60)
    made = BaselineSlides(training, (), asked)
    found = auc_of(predict_baseline(made, target_kinds(["FGFR3"]), colours(made.all, shift)))
    assert low <= found <= high


def test_so_does_the_number_of_tiles():
    def size(number):
        return 50 if number % 2 else 20

    made = BaselineSlides(slides(20, "train", tiles=size), (), slides(10, "test", first=20, tiles=size))
    baseline = predict_baseline(made, target_kinds(["FGFR3"]), None)
    assert auc_of(baseline) == 1.0
    assert "the number of tiles alone" in baseline.note


def test_labels_of_what_is_evaluated_are_not_looked_at():
    training, asked = slides(30, "train"), slides(20, "test", first=30)
    known = colours(training + asked, 1.0)
    flipped = tuple(RunSlide(each.row, each.split, {"FGFR3": 1 - each.labels["FGFR3"]}, each.tiles) for each in asked)
    first = predict_baseline(BaselineSlides(training, (), asked), target_kinds(["FGFR3"]), known)
    second = predict_baseline(BaselineSlides(training, (), flipped), target_kinds(["FGFR3"]), known)
    assert [each.logits for each in first.predictions] == [each.logits for each in second.predictions]


def test_another_cohort_may_have_the_slide_ids_of_the_training_slides():
    training, asked = slides(30, "train"), slides(20, "test", first=30)
    made = BaselineSlides(training, (), asked)
    known = colours(made.all, 1.0)
    renamed = tuple(
        replace(
            each,
            row=replace(each.row, slide_id=training[place].row.slide_id),
            tiles=replace(each.tiles, positions=each.tiles.positions + 224),
        )
        for place, each in enumerate(asked)
    )
    again = known | {colours_key(new): known[colours_key(old)] for new, old in zip(renamed, asked, strict=True)}
    first = predict_baseline(made, target_kinds(["FGFR3"]), known)
    second = predict_baseline(BaselineSlides(training, (), renamed), target_kinds(["FGFR3"]), again)
    assert [each.logits for each in first.predictions] == [each.logits for each in second.predictions]


def test_a_slide_whose_colours_could_not_be_read_is_left_out_and_told():
    training, asked = slides(10, "train"), slides(4, "test", first=10)
    known = colours(training + asked, 0.0)
    del known[colours_key(asked[2])]
    baseline = predict_baseline(BaselineSlides(training, (), asked), target_kinds(["FGFR3"]), known)
    assert [each.slide_id for each in baseline.predictions] == ["s10", "s11", "s13"]
    assert "1 slide could not be read for it" in baseline.note


def test_too_few_training_slides_make_none():
    training, asked = slides(10, "train"), slides(4, "test", first=10)
    known = colours((training[1], *asked), 0.0)
    baseline = predict_baseline(BaselineSlides(training, (), asked), target_kinds(["FGFR3"]), known)
    assert baseline.predictions == ()
    assert "too few training slides could be read for FGFR3" in baseline.note


def test_each_target_has_its_own():
    targets = ("FGFR3", "TP53")
    made = BaselineSlides(slides(40, "train", targets=targets), (), slides(8, "test", first=40, targets=targets))
    baseline = predict_baseline(made, target_kinds(targets), colours(made.all, 2.0))
    assert [list(each.logits) for each in baseline.predictions] == [list(targets)] * 8
    assert auc_of(baseline) == 1.0
