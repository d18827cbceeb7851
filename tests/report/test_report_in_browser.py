"""The page as people use it: sorted, filtered, by night, on a phone and on paper. Nothing leaves the machine."""

import re

import pytest
from browser import watched_page
from playwright.sync_api import expect
from report_lab import make_evaluation, make_prediction, make_run, page_of, predictions, write_section

from tapfm.report.content import Page, PageSection, SlideLine, SlidesBlock
from tapfm.report.page import render
from tapfm.results.table import Column, Table, table_row
from tapfm.tasks.binary_target import _sigmoid as sigmoid

FIRST_ROWS = "#slide-table tbody tr:not([hidden])"
PHONE = {"viewport": {"width": 360, "height": 740}, "is_mobile": True, "has_touch": True, "device_scale_factor": 2}


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    """A page with everything on it."""
    folder = tmp_path_factory.mktemp("report")
    targets = ("EGFR", "a <very> long name of a target")
    run = make_run(folder / "runs" / "first", targets=targets)
    make_evaluation(folder / "evaluations" / "external", run, targets=targets, subgroup="scanner = alpha")
    slides = [(f"slide-{i}", write_section(folder / f"{i}.svs", seed=i), 0.3 + 0.4 * i, i) for i in range(2)]
    make_prediction(folder / "predictions" / "new", run, slides, targets=targets)
    made, _ = page_of(run, folder / "report.html")
    return made.path.as_uri()


def column(page, number):
    return page.locator(f"{FIRST_ROWS} > :nth-child({number})").all_inner_texts()


def test_headers_sort_by_mouse_and_keyboard(page, address):
    page.goto(address)
    header = page.get_by_role("columnheader", name="Probability")
    before = column(page, 5)
    header.get_by_role("button").click()
    assert header.get_attribute("aria-sort") == "descending"
    values = [float(text) for text in column(page, 5)]
    assert values == sorted(values, reverse=True)
    assert sorted(before) == sorted(column(page, 5))
    page.keyboard.press("Enter")  # the button has the focus
    assert header.get_attribute("aria-sort") == "ascending"
    assert [float(text) for text in column(page, 5)] == sorted(values)
    page.get_by_role("columnheader", name="Slide").get_by_role("button").focus()
    page.keyboard.press("Space")
    assert header.get_attribute("aria-sort") == "none"
    assert column(page, 1)[:2] == ["S000", "S000"]


def test_equal_lines_stay_in_the_order_of_the_last_sort(page, address):
    page.goto(address)
    for name in ("Probability", "Outcome"):
        page.get_by_role("columnheader", name=name).get_by_role("button").click()
    right = [float(p) for p, outcome in zip(column(page, 5), column(page, 9), strict=True) if outcome == "correct"]
    assert right == sorted(right, reverse=True)
    assert len(right) > 5


@pytest.mark.parametrize("slide_id", ["S{:03}", "TCGA-XX-{:04}-01Z-00-DX1.00000000-0000-0000-0000-000000000000"])
def test_the_table_of_slides_fits_a_desk(page, tmp_path, slide_id):
    lines = [
        SlideLine(
            slide_id.format(i),
            f"TCGA-XX-{i:04}",
            where,
            target,
            0.5,
            0.4,
            "positive",
            "negative",
            "false positive",
            12_345,
        )
        for i in range(20)
        for where in ("validation", "external.csv")
        for target in ("EGFR", "FGFR3")
    ]
    made = Page("k", "t", [], None, [], [PageSection("Slides", [SlidesBlock(lines)])], "m")
    (tmp_path / "report.html").write_bytes(render(made))
    page.goto((tmp_path / "report.html").as_uri())
    assert page.locator(".scroll.tall").evaluate("each => each.scrollWidth - each.clientWidth") <= 0


def test_reasons_that_are_long_are_broken_into_lines(page, tmp_path):
    row = table_row("S001", "the file ends in the middle of a tile " * 8, "/a/long/folder" * 20)
    table = Table([Column(name, text=True) for name in ("slide", "why", "where")], [row])
    made = Page("k", "t", [], None, [], [PageSection("What failed", [table])], "m")
    (tmp_path / "report.html").write_bytes(render(made))
    page.goto((tmp_path / "report.html").as_uri())
    assert page.locator(".scroll").evaluate("each => each.scrollWidth - each.clientWidth") <= 0


def test_filters_leave_what_was_asked_for(page, address):
    page.goto(address)
    shown = page.locator("#slide-count")
    everything = 2 * (10 + 8 + 14 + 2)
    assert shown.inner_text() == f"{everything} of {everything}"
    page.get_by_label("wrong calls only").check()
    assert set(column(page, 9)) <= {"false positive", "false negative"}
    assert 0 < page.locator(FIRST_ROWS).count() < everything
    page.get_by_label("Slides of").select_option("external.csv")
    assert set(column(page, 3)) == {"external.csv"}
    page.get_by_label("wrong calls only").uncheck()
    page.locator("#slide-filters").get_by_label("Target").select_option("EGFR")
    assert shown.inner_text() == f"14 of {everything}"
    page.get_by_label("Search").fill("s50")
    assert column(page, 1) == [f"S{500 + i}" for i in range(10)]
    page.emulate_media(media="print")
    assert page.get_by_text(f"Filtered: 10 of {everything} lines.").is_visible()  # paper has no filters to see
    page.emulate_media(media="screen")
    page.get_by_label("Search").fill("nobody")
    assert page.locator(FIRST_ROWS).count() == 0


def test_the_theme_follows_the_system_and_the_button(chromium, address):
    def background(page):
        return page.evaluate("getComputedStyle(document.body).backgroundColor")

    with watched_page(chromium, color_scheme="dark") as page:
        page.goto(address)
        dark = background(page)
        button = page.locator("#theme")
        assert button.get_attribute("aria-pressed") == "true"
        button.click()
        assert background(page) != dark
        assert button.inner_text() == "Dark"
        page.reload()
        assert background(page) == "rgb(255, 255, 255)"  # remembered
    with watched_page(chromium, color_scheme="light") as page:
        page.goto(address)
        assert background(page) == "rgb(255, 255, 255)"
        page.locator("#theme").click()
        assert background(page) == dark
        page.emulate_media(media="print")
        assert background(page) == "rgb(255, 255, 255)"  # paper is white


def test_a_phone_scrolls_tables_and_never_the_page(chromium, address):
    with watched_page(chromium, **PHONE) as page:
        page.goto(address)
        shut = page.locator("details.fold:not([open]) > summary")
        while shut.count():
            shut.first.click()
        wide = page.evaluate(
            """() => [...document.querySelectorAll("main *")].filter((each) =>
                each.getBoundingClientRect().right > innerWidth + 1 && !each.closest(".scroll, pre, svg"))
                .map((each) => each.outerHTML.slice(0, 80))"""
        )
        assert wide == []
        assert page.evaluate("document.documentElement.scrollWidth") == 360
        table = page.locator(".scroll.tall")
        assert table.evaluate("each => each.scrollWidth > each.clientWidth")
        contents = page.locator(".contents details")
        assert contents.get_attribute("open") is None
        contents.locator("summary").click()
        contents.get_by_role("link", name="Training").click()
        assert page.url.endswith("#training")
        assert contents.get_attribute("open") is None


def test_paper_has_everything_open_and_no_controls(page, address):
    page.goto(address)
    shut = page.locator("details.fold:not([open])")
    before = shut.count()
    assert before
    page.emulate_media(media="print")
    expect(shut).to_have_count(0)
    assert not page.locator(".filters").is_visible()
    assert not page.locator(".contents").is_visible()
    assert page.locator(".scroll.tall").evaluate("each => each.scrollHeight <= each.clientHeight + 1")
    assert page.get_by_text("[adaptation]").is_visible()
    page.emulate_media(media="screen")
    expect(shut).to_have_count(before)
    assert page.pdf(format="A4").startswith(b"%PDF")


def test_pictures_are_decoded_and_the_contents_follow(page, address):
    page.goto(address)
    sizes = page.evaluate(
        "Promise.all([...document.images].map((each) => each.decode().then(() => each.naturalWidth)))"
    )
    assert len(sizes) > 8
    assert min(sizes) > 0
    page.locator("#training-title").scroll_into_view_if_needed()
    page.evaluate("document.getElementById('training').scrollIntoView({behavior: 'instant'})")
    page.wait_for_selector('.contents a[href="#training"][aria-current]')


def test_names_that_are_html_do_nothing(page, tmp_path):
    evil = "<img src=x onerror=\"console.error('in')\"><script>console.error('in')</script>"
    lines = [
        SlideLine(evil, evil, where, evil, 0.5, 0.4, evil, evil, evil, 3, model)
        for model, where in (("a", "b"), (evil, evil))
    ]
    made = Page(evil, evil, [evil], None, [evil], [PageSection("Slides", [SlidesBlock(lines)], evil)], evil)
    (tmp_path / "report.html").write_bytes(render(made))
    page.goto((tmp_path / "report.html").as_uri())
    assert page.locator("h1").inner_text() == evil
    assert page.locator("img").count() == 0
    page.get_by_label("Slides of").select_option(evil)
    page.get_by_label("Model").select_option(evil)
    assert page.locator(FIRST_ROWS).count() == 1


def test_five_thousand_slides_are_sorted_and_filtered(page, tmp_path):
    lines = [
        SlideLine(
            each.slide_id, each.patient_id, "test", "FGFR3", sigmoid(each.logits["FGFR3"]), 0.5, "", "", "", each.tiles
        )
        for each in predictions(5000)
    ]
    made = Page("k", "t", [], None, [], [PageSection("Slides", [SlidesBlock(lines)])], "m")
    (tmp_path / "report.html").write_bytes(render(made))
    page.goto((tmp_path / "report.html").as_uri())
    seen = page.locator("#slide-table tbody tr").locator("visible=true")
    assert seen.count() == SlidesBlock.few  # the others are there, and on paper
    assert page.locator("#slide-count").inner_text() == "5,000 of 5,000, the first 300 shown"
    page.get_by_role("columnheader", name="Tiles").get_by_role("button").click()
    assert seen.count() == SlidesBlock.few
    assert seen.first.inner_text().startswith("S4999")
    page.emulate_media(media="print")
    assert seen.count() == 5000
    page.emulate_media(media="screen")
    page.get_by_role("button", name="Show all 5,000").click()
    assert seen.count() == 5000
    page.get_by_label("Search").fill("S4321")
    assert re.fullmatch("1 of 5,000", page.locator("#slide-count").inner_text())


def test_without_scripts_all_is_there(chromium, address):
    with watched_page(chromium, java_script_enabled=False) as page:
        page.goto(address)
        assert page.locator("#slide-table tbody tr").count() == 2 * (10 + 8 + 14 + 2)
        assert not page.locator("#slide-filters").is_visible()
        assert not page.locator("#theme").is_visible()
