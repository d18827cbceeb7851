"""Rendered slides follow their settings, at every scale, and are reproducible."""

from dataclasses import replace

import cv2
import numpy as np
import pytest

from tapfm.synthetic.cohort_plan import DIFFICULTIES, TASKS, CohortSpec, plan_cohort
from tapfm.synthetic.cohort_plan import _sample_section as sample_section
from tapfm.synthetic.nuclei import EPITHELIAL, MORPHOLOGIES
from tapfm.synthetic.scanning import Artefacts, Scanner, StainingProtocol, scan_section
from tapfm.synthetic.scanning import _render_pixels as render_pixels
from tapfm.synthetic.section import Compartment, Focus, SectionSpec, generate_section
from tapfm.synthetic.slide_rendering import render_slide
from tapfm.synthetic.stain_rendering import render_stains

SPEC = SectionSpec(
    700, 560, tissue_fraction=0.55, foci=(Focus("FGFR3", MORPHOLOGIES["coarse"], 0.2), Focus("large", EPITHELIAL, 0.1))
)


@pytest.fixture(scope="module")
def section():
    return generate_section(SPEC, 0, "S001")


@pytest.fixture(scope="module")
def stains(section):
    return render_stains(section, 0.5, 0, "S001")


@pytest.mark.parametrize("outline", ["resection", "chips", "cores"])
@pytest.mark.parametrize("fraction", [0.3, 0.6])
def test_section_has_the_requested_tissue_fraction(outline, fraction):
    spec = replace(SPEC, outline=outline, tissue_fraction=fraction, width_um=1600, height_um=1250)
    tissue = generate_section(spec, 0, "a").tissue
    assert tissue.mean() == pytest.approx(fraction, abs=0.02)
    edge = np.concatenate([tissue[:20].ravel(), tissue[-20:].ravel(), tissue[:, :20].ravel(), tissue[:, -20:].ravel()])
    assert not edge.any()


def test_section_has_the_requested_compartments(section):
    area = section.tissue.sum()
    within = (section.compartments == Compartment.EPITHELIUM) | (section.compartments == Compartment.LUMEN)
    assert within.sum() / area == pytest.approx(SPEC.epithelium_fraction, abs=0.06)
    assert {Compartment(value) for value in np.unique(section.compartments)} >= {
        *(Compartment.GLASS, Compartment.STROMA, Compartment.EPITHELIUM, Compartment.LYMPHOID)
    }


def test_foci_are_epithelium_and_have_the_requested_fraction(section):
    epithelium = section.compartments == Compartment.EPITHELIUM
    assert (section.foci_map[~epithelium] == 0).all()
    for number, focus in enumerate(SPEC.foci, 1):
        fraction = (section.foci_map == number).sum() / epithelium.sum()
        assert fraction == pytest.approx(focus.fraction_of_epithelium, abs=0.03)


@pytest.mark.parametrize("difficulty", list(DIFFICULTIES))
def test_all_targets_have_foci_on_a_slide_positive_for_all(difficulty):
    all_positive = {target.name: 1 for target in TASKS["luad4"]}
    for seed in range(4):
        cohort = CohortSpec(slides=2, external=0, task="luad4", difficulty=difficulty, seed=seed, tiles=24)
        spec = sample_section(cohort, "S001", "development", all_positive)
        section = generate_section(spec, seed, "S001")
        for number, focus in enumerate(spec.foci, 1):
            fraction = (section.foci_map == number).sum() / (section.compartments == Compartment.EPITHELIUM).sum()
            assert fraction > 0.5 * focus.fraction_of_epithelium, focus.name


def test_nuclei_of_a_focus_are_inside_it(section):
    planted = next(each for each in section.nuclei if each.group == "FGFR3")
    assert len(planted) > 20
    assert (section.foci_map[planted.y_um.astype(int), planted.x_um.astype(int)] == 1).all()


@pytest.mark.parametrize("seed", range(8))
def test_nuclei_are_inside_the_section(seed):
    # 1252 rows: float32 rounds some positions up to the edge
    section = generate_section(replace(SPEC, width_um=400, height_um=1252, tissue_fraction=0.6), seed, "edge")
    for nuclei in section.nuclei:
        assert nuclei.x_um.min() >= 0
        assert nuclei.y_um.max() < 1252


def test_same_rng_key_gives_same_stains(section, stains):
    again = render_stains(generate_section(SPEC, 0, "S001"), 0.5, 0, "S001")
    np.testing.assert_array_equal(again.haematoxylin, stains.haematoxylin)
    np.testing.assert_array_equal(again.eosin, stains.eosin)
    other = render_stains(section, 0.5, 1, "S001")
    assert not np.array_equal(other.eosin, stains.eosin)


def test_section_looks_the_same_at_20x_and_40x(section, stains):
    fine = render_stains(section, 0.25, 0, "S001")
    height, width = stains.eosin.shape
    assert fine.eosin.shape == (2 * height, 2 * width)
    for name in ("haematoxylin", "eosin", "blood"):
        downsampled = cv2.resize(getattr(fine, name), (width, height), interpolation=cv2.INTER_AREA)
        # chromatin differs between scales; larger structures are the same
        at_40x, at_20x = (cv2.GaussianBlur(each, (0, 0), 4.0) for each in (downsampled, getattr(stains, name)))
        assert np.corrcoef(at_40x.ravel(), at_20x.ravel())[0, 1] > 0.99, name
        assert at_40x.mean() == pytest.approx(at_20x.mean(), rel=0.03)


def test_glass_is_bright_and_nuclei_are_dark(section, stains):
    pixels = render_pixels(stains, StainingProtocol(), Scanner("alpha", 0.5, 20), np.random.default_rng(0))
    grey = cv2.resize(pixels.mean(2), section.compartments.shape[::-1], interpolation=cv2.INTER_AREA)
    glass = cv2.erode((section.compartments == Compartment.GLASS).astype(np.uint8), np.ones((9, 9))).astype(bool)
    assert grey[glass].mean() > 235
    nuclei = next(each for each in section.nuclei if each.kind.haematoxylin > 1.4)  # lymphocytes
    assert grey[nuclei.y_um.astype(int), nuclei.x_um.astype(int)].mean() < 130


def test_artefacts_are_inside_their_masks(section, stains):
    scanner, tissue = Scanner("alpha", 0.5, 20), section.tissue
    clean = scan_section(stains, tissue, StainingProtocol(), scanner, Artefacts(), 0, "S001").pixels
    assert not scan_section(stains, tissue, StainingProtocol(), scanner, Artefacts(), 0, "S001").fold_mask.any()
    scan = scan_section(stains, tissue, StainingProtocol(), scanner, Artefacts(2, 90.0, "blue", 0), 0, "S001")

    def inside(mask, pixels):
        large = cv2.resize(mask.astype(np.uint8), pixels.shape[1::-1], interpolation=cv2.INTER_NEAREST).astype(bool)
        return pixels[large].astype(float)

    ink = inside(scan.pen_mask, scan.pixels)
    assert ink[:, 2].mean() > ink[:, 0].mean() + 60  # blue
    only_fold = scan.fold_mask & ~scan.pen_mask & ~scan.blur_mask
    assert inside(only_fold, scan.pixels).mean() < inside(only_fold, clean).mean() - 15
    only_blur = scan.blur_mask & ~scan.pen_mask & ~scan.fold_mask
    assert inside(only_blur, scan.pixels).std() < 0.8 * inside(only_blur, clean).std()
    untouched = ~(scan.fold_mask | scan.blur_mask | scan.pen_mask)
    untouched = cv2.erode(untouched.astype(np.uint8), np.ones((131, 131))).astype(bool)
    assert untouched.any()
    np.testing.assert_array_equal(inside(untouched, scan.pixels), inside(untouched, clean))


def test_focus_does_not_change_the_mean_colour():
    # the same section with and without the focus: only the nuclei differ
    spec = replace(SPEC, width_um=1100, height_um=860, epithelium_fraction=0.5)
    for name, kind in MORPHOLOGIES.items():
        means = []
        for foci in ((), (Focus(name, kind, 0.9),)):
            section = generate_section(replace(spec, foci=foci), 0, name)
            pixels = render_pixels(
                render_stains(section, 0.5, 0, name),
                StainingProtocol(),
                Scanner("a", 0.5, 20),
                np.random.default_rng(0),
            )
            epithelium = cv2.erode((section.compartments == Compartment.EPITHELIUM).astype(np.uint8), np.ones((3, 3)))
            epithelium = cv2.resize(epithelium, pixels.shape[1::-1], interpolation=cv2.INTER_NEAREST).astype(bool)
            means.append(pixels[epithelium].mean(0))
        np.testing.assert_allclose(means[0], means[1], atol=2.5, err_msg=name)  # of 255


def test_rendered_slide_contains_the_foci_of_its_labels():
    planned = plan_cohort(CohortSpec(slides=4, external=0, tiles=12, prevalence={"FGFR3": 0.5}))
    positive = next(each for each in planned if each.labels["FGFR3"])
    rendered = render_slide(positive)
    assert rendered.scan.pixels.dtype == np.uint8
    assert rendered.truth.focus_names[0] == "FGFR3"
    assert (rendered.truth.foci_map == 1).any()
    negative = render_slide(next(each for each in planned if not each.labels["FGFR3"]))
    assert "FGFR3" not in negative.truth.focus_names
