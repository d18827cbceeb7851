"""The report in Chromium: sorting, filters, themes, small screens and printing."""

import re

import pytest
from browser import open_checked_page
from playwright.sync_api import expect
from report_folders import (
    create_test_report,
    make_predictions,
    write_evaluation,
    write_prediction_folder,
    write_run,
    write_study,
    write_tissue_slide,
)

from tapfm.report.content import Page, PageSection, PredictionRow, PredictionTable
from tapfm.report.html_page import render_page
from tapfm.results.table import Column, Table, table_row
from tapfm.tasks.binary_target import _sigmoid as sigmoid

MATCHING_ROWS = "#slide-table tbody tr:not([hidden])"
PHONE = {"viewport": {"width": 360, "height": 740}, "is_mobile": True, "has_touch": True, "device_scale_factor": 2}


@pytest.fixture(scope="module")
def report_url(tmp_path_factory):
    """URL of a report with all sections."""
    folder = tmp_path_factory.mktemp("report")
    targets = ("EGFR", "a <very> long name of a target")
    run = write_run(folder / "runs" / "first", targets=targets)
    write_evaluation(folder / "evaluations" / "external", run, targets=targets, subgroup="scanner = alpha")
    slides = [(f"slide-{i}", write_tissue_slide(folder / f"{i}.svs", seed=i), 0.3 + 0.4 * i, i) for i in range(2)]
    write_prediction_folder(folder / "predictions" / "new", run, slides, targets=targets)
    written, _ = create_test_report(run, folder / "report.html")
    return written.path.as_uri()


def column_texts(page, number):
    return page.locator(f"{MATCHING_ROWS} > :nth-child({number})").all_inner_texts()


def test_column_headers_sort_by_mouse_and_keyboard(page, report_url):
    page.goto(report_url)
    header = page.get_by_role("columnheader", name="Probability")
    before = column_texts(page, 5)
    header.get_by_role("button").click()
    assert header.get_attribute("aria-sort") == "descending"
    values = [float(text) for text in column_texts(page, 5)]
    assert values == sorted(values, reverse=True)
    assert sorted(before) == sorted(column_texts(page, 5))
    page.keyboard.press("Enter")  # the button is focused
    assert header.get_attribute("aria-sort") == "ascending"
    assert [float(text) for text in column_texts(page, 5)] == sorted(values)
    page.get_by_role("columnheader", name="Slide").get_by_role("button").focus()
    page.keyboard.press("Space")
    assert header.get_attribute("aria-sort") == "none"
    assert column_texts(page, 1)[:2] == ["S000", "S000"]


def test_sorting_is_stable(page, report_url):
    page.goto(report_url)
    for name in ("Probability", "Outcome"):
        page.get_by_role("columnheader", name=name).get_by_role("button").click()
    rows = zip(column_texts(page, 5), column_texts(page, 9), strict=True)
    correct = [float(probability) for probability, outcome in rows if outcome == "correct"]
    assert correct == sorted(correct, reverse=True)
    assert len(correct) > 5


@pytest.mark.parametrize("slide_id", ["S{:03}", "TCGA-XX-{:04}-01Z-00-DX1.00000000-0000-0000-0000-000000000000"])
def test_prediction_table_fits_a_desktop_screen(page, tmp_path, slide_id):
    rows = [
        PredictionRow(
            slide_id.format(i),
            f"TCGA-XX-{i:04}",
            slide_set,
            target,
            0.5,
            0.4,
            "positive",
            "negative",
            "false positive",
            12_345,
        )
        for i in range(20)
        for slide_set in ("validation", "external.csv")
        for target in ("EGFR", "FGFR3")
    ]
    content = Page("k", "t", [], None, [], [PageSection("Slides", [PredictionTable(rows)])], "m")
    (tmp_path / "report.html").write_bytes(render_page(content))
    page.goto((tmp_path / "report.html").as_uri())
    assert page.locator(".scroll.tall").evaluate("each => each.scrollWidth - each.clientWidth") <= 0


def test_long_texts_in_tables_are_wrapped(page, tmp_path):
    row = table_row("S001", "the file is truncated within a tile " * 8, "/a/long/folder" * 20)
    table = Table([Column(name, text=True) for name in ("slide", "reason", "step")], [row])
    content = Page("k", "t", [], None, [], [PageSection("Failures", [table])], "m")
    (tmp_path / "report.html").write_bytes(render_page(content))
    page.goto((tmp_path / "report.html").as_uri())
    assert page.locator(".scroll").evaluate("each => each.scrollWidth - each.clientWidth") <= 0


def test_filters_show_only_matching_rows(page, report_url):
    page.goto(report_url)
    count = page.locator("#slide-count")
    total = 2 * (10 + 8 + 14 + 2)
    assert count.inner_text() == f"{total} of {total} rows"
    page.get_by_label("wrong calls only").check()
    assert set(column_texts(page, 9)) <= {"false positive", "false negative"}
    assert 0 < page.locator(MATCHING_ROWS).count() < total
    page.locator("#filter-set").select_option("external.csv")
    assert set(column_texts(page, 3)) == {"external.csv"}
    page.get_by_label("wrong calls only").uncheck()
    page.locator("#slide-filters").get_by_label("Target").select_option("EGFR")
    assert count.inner_text() == f"14 of {total} rows"
    page.get_by_label("Search").fill("s50")
    assert column_texts(page, 1) == [f"S{500 + i}" for i in range(10)]
    page.emulate_media(media="print")
    assert page.get_by_text(f"Filtered: 10 of {total} rows.").is_visible()  # the filters are not printed
    page.emulate_media(media="screen")
    page.get_by_label("Search").fill("no such slide")
    assert page.locator(MATCHING_ROWS).count() == 0


def test_theme_follows_the_system_and_the_button(chromium, report_url):
    def background_colour(page):
        return page.evaluate("getComputedStyle(document.body).backgroundColor")

    with open_checked_page(chromium, color_scheme="dark") as page:
        page.goto(report_url)
        dark = background_colour(page)
        button = page.locator("#theme")
        assert button.get_attribute("aria-pressed") == "true"
        button.click()
        assert background_colour(page) != dark
        assert button.inner_text() == "Dark"
        page.reload()
        assert background_colour(page) == "rgb(255, 255, 255)"  # the choice is saved
    with open_checked_page(chromium, color_scheme="light") as page:
        page.goto(report_url)
        assert background_colour(page) == "rgb(255, 255, 255)"
        page.locator("#theme").click()
        assert background_colour(page) == dark
        page.emulate_media(media="print")
        assert background_colour(page) == "rgb(255, 255, 255)"  # print always uses the light theme


@pytest.fixture(scope="module", params=["run", "study", "runs"])
def any_report_url(request, report_url, tmp_path_factory):
    """URL of the report of a run, a study and several runs."""
    folder = tmp_path_factory.mktemp("reports")
    if request.param == "run":
        return report_url
    if request.param == "study":
        source = write_study(folder / "study")
        (run,) = (source / "runs").glob("*/tapfm/*/*")
        prediction = ("TCGA-XX-A123-01Z-00-DX1.00000000-0000-0000-0000-000000000000", None, 0.7, 1)
        options = {"predictions": (write_prediction_folder(folder / "predictions", run, [prediction]),)}
    else:
        names = ("tapfm-pocket/tapfm/cls-attention/seed0", "tapfm-pocket/finetune/abmil/seed0")
        source = [write_run(folder / "runs" / name) for name in names]
        options = {}
    written, _ = create_test_report(source, folder / "report.html", **options)
    return written.path.as_uri()


# Elements beyond the screen, table cells that are hidden or not wide enough, and tables that scroll sideways.
FIND_CUT_OFF = """() => {
    const describe = (each) => each.outerHTML.slice(0, 120);
    const visible = (each) => each.getClientRects().length > 0;
    const beyond = [...document.querySelectorAll("body *")].filter((each) => visible(each)
        && (!each.closest("svg") || each.matches("svg, text"))
        && (each.getBoundingClientRect().right > innerWidth + 1 || each.getBoundingClientRect().left < -1)
        && !each.matches(".skip"));
    const clipped = [...document.querySelectorAll("table, tr, th, td, td > span, .scroll, pre")].filter((each) =>
        visible(each) && each.scrollWidth > each.clientWidth + 1 && getComputedStyle(each).display !== "inline");
    const hidden = [...document.querySelectorAll("tbody tr")].filter(visible)
        .flatMap((row) => [...row.cells].filter((cell) => cell.textContent.trim() && !visible(cell)));
    return [...beyond, ...clipped, ...hidden].map(describe);
}"""


@pytest.mark.parametrize("width", [360, 390])
def test_on_a_phone_nothing_is_cut_off(chromium, any_report_url, width):
    with open_checked_page(chromium, **PHONE | {"viewport": {"width": width, "height": 740}}) as page:
        page.goto(any_report_url)
        page.evaluate("for (const each of document.querySelectorAll('details.collapsible')) each.open = true")
        assert page.evaluate(FIND_CUT_OFF) == []
        assert page.evaluate("document.documentElement.scrollWidth") == width
        assert page.locator("#slide-table td").first.is_visible()


def test_on_a_phone_each_value_has_the_title_of_its_column(chromium, any_report_url):
    """The header of a wide table is not shown there, so the label next to the value must be the same."""
    with open_checked_page(chromium, **PHONE) as page:
        page.goto(any_report_url)
        wrong = page.evaluate("""() => [...document.querySelectorAll(".stacks table")].flatMap((table) => {
            const titles = [...[...table.tHead.rows].at(-1).cells].map((each) => each.textContent);
            return [...table.tBodies[0].rows].flatMap((row) => [...row.cells].slice(1))
                .filter((cell) => cell.textContent && (!cell.dataset.label.endsWith(titles[cell.cellIndex].trim())
                    || !getComputedStyle(cell, "::before").content.includes(cell.dataset.label)))
                .map((cell) => cell.outerHTML);
        })""")
        assert wrong == []
        assert page.locator(".headline .stacks, .headline td").count() > 0


def test_slides_can_be_sorted_and_the_contents_closed_on_a_phone(chromium, report_url):
    with open_checked_page(chromium, **PHONE) as page:
        page.goto(report_url)
        page.get_by_role("columnheader", name="Probability").get_by_role("button").click()
        values = [float(each) for each in page.locator(f"{MATCHING_ROWS} > [data-label=Probability]").all_inner_texts()]
        assert values == sorted(values, reverse=True)
        contents = page.locator(".contents details")
        assert contents.get_attribute("open") is None
        contents.locator("summary").click()
        contents.get_by_role("link", name="Training").click()
        assert page.url.endswith("#training")
        assert contents.get_attribute("open") is None


def test_the_headline_fits_a_desktop_screen(page, any_report_url):
    page.goto(any_report_url)
    assert page.locator(".headline .scroll").evaluate("each => each.scrollWidth - each.clientWidth") <= 0


def test_print_expands_all_sections_and_hides_controls(page, report_url):
    page.goto(report_url)
    collapsed = page.locator("details.collapsible:not([open])")
    before = collapsed.count()
    assert before
    page.emulate_media(media="print")
    expect(collapsed).to_have_count(0)
    assert not page.locator(".filters").is_visible()
    assert not page.locator(".contents").is_visible()
    assert page.locator(".scroll.tall").evaluate("each => each.scrollHeight <= each.clientHeight + 1")
    assert page.get_by_text("[adaptation]").is_visible()
    page.emulate_media(media="screen")
    expect(collapsed).to_have_count(before)
    assert page.pdf(format="A4").startswith(b"%PDF")


def test_images_are_valid_and_the_contents_mark_the_current_section(page, report_url):
    page.goto(report_url)
    sizes = page.evaluate(
        "Promise.all([...document.images].map((each) => each.decode().then(() => each.naturalWidth)))"
    )
    assert len(sizes) > 8
    assert min(sizes) > 0
    page.locator("#training-title").scroll_into_view_if_needed()
    page.evaluate("document.getElementById('training').scrollIntoView({behavior: 'instant'})")
    page.wait_for_selector('.contents a[href="#training"][aria-current]')


def test_names_that_contain_html_are_shown_as_text(page, tmp_path):
    evil = "<img src=x onerror=\"console.error('in')\"><script>console.error('in')</script>"
    rows = [
        PredictionRow(evil, evil, slide_set, evil, 0.5, 0.4, evil, evil, evil, 3, model)
        for model, slide_set in (("a", "b"), (evil, evil))
    ]
    content = Page(evil, evil, [evil], None, [evil], [PageSection("Slides", [PredictionTable(rows)], evil)], evil)
    (tmp_path / "report.html").write_bytes(render_page(content))
    page.goto((tmp_path / "report.html").as_uri())
    assert page.locator("h1").inner_text() == evil
    assert page.locator("img").count() == 0
    page.locator("#filter-set").select_option(evil)
    page.get_by_label("Model").select_option(evil)
    assert page.locator(MATCHING_ROWS).count() == 1


def test_five_thousand_slides_can_be_sorted_and_filtered(page, tmp_path):
    rows = [
        PredictionRow(
            each.slide_id, each.patient_id, "test", "FGFR3", sigmoid(each.logits["FGFR3"]), 0.5, "", "", "", each.tiles
        )
        for each in make_predictions(5000)
    ]
    content = Page("k", "t", [], None, [], [PageSection("Slides", [PredictionTable(rows)])], "m")
    (tmp_path / "report.html").write_bytes(render_page(content))
    page.goto((tmp_path / "report.html").as_uri())
    visible = page.locator("#slide-table tbody tr").locator("visible=true")
    assert visible.count() == PredictionTable.rows_shown  # the others are only printed
    assert page.locator("#slide-count").inner_text() == "5,000 of 5,000 rows, first 300 shown"
    page.get_by_role("columnheader", name="Tiles").get_by_role("button").click()
    assert visible.count() == PredictionTable.rows_shown
    assert visible.first.inner_text().startswith("S4999")
    page.emulate_media(media="print")
    assert visible.count() == 5000
    page.emulate_media(media="screen")
    page.get_by_role("button", name="Show all 5,000 rows").click()
    assert visible.count() == 5000
    page.get_by_label("Search").fill("S4321")
    assert re.fullmatch("1 of 5,000 rows", page.locator("#slide-count").inner_text())


def test_without_javascript_all_rows_are_shown(chromium, report_url):
    with open_checked_page(chromium, java_script_enabled=False) as page:
        page.goto(report_url)
        assert page.locator("#slide-table tbody tr").count() == 2 * (10 + 8 + 14 + 2)
        assert not page.locator("#slide-filters").is_visible()
        assert not page.locator("#theme").is_visible()
