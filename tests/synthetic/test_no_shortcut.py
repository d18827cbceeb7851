"""No shortcut: neither stain nor the amount of tissue tells the label, however clearly the signal is planted."""

from dataclasses import replace

import numpy as np
import pytest

from tapfm.synthetic.cohort import CohortSpec, plan_cohort
from tapfm.synthetic.slides import paint_slide

SLIDES = 64


def stain_and_size(planned):
    """Mean, deviation and percentiles of the colours of the tissue, and how much tissue there is."""
    pixels = paint_slide(planned).scan.pixels[::2, ::2].reshape(-1, 3).astype(np.float64)
    tissue = pixels[pixels.min(1) < 215]
    density = -np.log(np.maximum(tissue, 1) / 255)
    parts = [part for values in (tissue, density) for part in (values.mean(0), values.std(0))]
    return np.concatenate([*parts, np.percentile(tissue, [10, 50, 90], axis=0).ravel(), [len(tissue) / len(pixels)]])


def area_under_curve(scores, labels):
    above = scores[labels == 1][:, None] - scores[labels == 0][None]
    return float((above > 0).mean() + 0.5 * (above == 0).mean())


def left_out_scores(features, labels, ridge=3.0):
    """Score each slide by a ridge regression on the others."""
    scores = np.empty(len(labels))
    for left in range(len(labels)):
        others = np.arange(len(labels)) != left
        mean, std = features[others].mean(0), features[others].std(0) + 1e-9
        known = (features[others] - mean) / std
        target = np.where(labels[others] == 1, 1 / labels[others].sum(), -1 / (1 - labels[others]).sum())
        weights = np.linalg.solve(known.T @ known + ridge * len(known) / 10 * np.eye(known.shape[1]), known.T @ target)
        scores[left] = (features[left] - mean) / std @ weights
    return scores


def interval(scores, labels, draws=1000):
    rng = np.random.default_rng(0)
    groups = [np.flatnonzero(labels == value) for value in (0, 1)]
    drawn = [np.concatenate([rng.choice(group, len(group)) for group in groups]) for _ in range(draws)]
    return np.quantile([area_under_curve(scores[each], labels[each]) for each in drawn], [0.025, 0.975])


@pytest.fixture(scope="module")
def cohort():
    spec = CohortSpec(slides=SLIDES, external=0, tiles=10, difficulty="easy", prevalence={"FGFR3": 0.5})
    planned = [each for each in plan_cohort(spec) if each.scanner.objective == 20]  # 40x takes four times as long
    labels = np.array([each.labels["FGFR3"] for each in planned])
    return planned, labels, np.array([stain_and_size(each) for each in planned])


def test_stain_and_size_stay_at_chance(cohort):
    _, labels, features = cohort
    low, high = interval(left_out_scores(features, labels), labels)
    assert low < 0.5 < high


def test_a_leak_of_colour_would_be_seen(cohort):
    planned, labels, features = cohort
    leaky = features.copy()
    for index, each in enumerate(planned):
        if labels[index]:
            stain = replace(each.staining, haematoxylin_strength=1.35 * each.staining.haematoxylin_strength)
            leaky[index] = stain_and_size(replace(each, staining=stain))
    low, _ = interval(left_out_scores(leaky, labels), labels)
    assert low > 0.5
