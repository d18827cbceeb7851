"""The viewer as somebody sees it: a real server, a real browser."""

import re
import threading
from contextlib import ExitStack
from urllib.parse import parse_qs, urlsplit

import numpy as np
import pytest
import uvicorn
from browser import chromium, page, watched_page  # noqa: F401 - fixtures
from slide_files import GLASS, section, write_scn, write_slide
from viewed_slides import predict, two_predictions

from tapfm.viewer.assets import _FOLDER as FOLDER
from tapfm.viewer.assets import read_assets
from tapfm.viewer.collection import collect_viewed_slides
from tapfm.viewer.gate import Admission
from tapfm.viewer.server import make_server
from tapfm.viewer.serving import address_of, open_socket

pytestmark = pytest.mark.skipif(
    not (FOLDER / "index.html").exists(), reason="the viewer's pages are not built: make setup (needs npm)"
)


class Served:
    """A server in a thread, for as long as a block lasts."""

    def __init__(self, *sources, host="127.0.0.1"):
        self.listener = open_socket(host, 0)
        port = self.listener.getsockname()[1]
        admission = Admission.of(host, port)
        self.address = address_of(host, port, admission)
        application = make_server(collect_viewed_slides(sources), read_assets(), admission)
        self.server = uvicorn.Server(uvicorn.Config(application, log_level="error", ws="none"))
        self.thread = threading.Thread(target=self.server.run, kwargs={"sockets": [self.listener]})

    def __enter__(self):
        self.thread.start()
        return self.address

    def __exit__(self, *_):
        self.server.should_exit = True
        self.thread.join(30)
        self.listener.close()


@pytest.fixture
def serve():
    """Serve slides until the test and its page are over: ask for it before `page`."""
    with ExitStack() as running:
        yield lambda *sources, **options: running.enter_context(Served(*sources, **options))


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    with Served(two_predictions(tmp_path_factory.mktemp("viewed"))) as served:
        yield served


def visit(page, address, view=""):  # noqa: F811
    """Open the viewer and wait until slide and map are drawn."""
    page.goto(address + view)
    page.wait_for_function("() => document.getElementById('length').textContent !== ''")
    page.wait_for_load_state("networkidle")


def view_of(page):  # noqa: F811
    return {name: values[0] for name, values in parse_qs(urlsplit(page.url).fragment).items()}


def wait_for_view(page, **wanted):  # noqa: F811
    """Wait until the address says so."""
    for name, value in wanted.items():
        page.wait_for_function(
            "([name, value]) => new URLSearchParams(location.hash.slice(1)).get(name) === value", arg=[name, value]
        )


# What the canvas of the map has at a point of the slide (level 0, counted from the bounds): the colour, or None.
COLOUR_AT = """([x, y, zoom, centreX, centreY]) => {
  const canvas = document.getElementById("heatmap");
  const ratio = window.devicePixelRatio;
  const left = Math.floor(((x - centreX) * zoom + canvas.clientWidth / 2) * ratio);
  const top = Math.floor(((y - centreY) * zoom + canvas.clientHeight / 2) * ratio);
  const copy = new OffscreenCanvas(1, 1).getContext("2d", { willReadFrequently: true });
  copy.drawImage(canvas, left, top, 1, 1, 0, 0, 1, 1);
  const [red, green, blue, alpha] = copy.getImageData(0, 0, 1, 1).data;
  return alpha === 0 ? null : [red, green, blue];
}"""


def map_colour(page, x, y, corner=(0, 0)):  # noqa: F811
    view = view_of(page)
    centre = float(view["x"]) - corner[0], float(view["y"]) - corner[1]
    return page.evaluate(COLOUR_AT, [x, y, float(view["zoom"]), *centre])


def tile_on_screen(page, x, y):  # noqa: F811
    """Say where on the screen a point of the slide is."""
    view, frame = view_of(page), page.locator("#picture").bounding_box()
    zoom = float(view["zoom"])
    return (
        frame["x"] + frame["width"] / 2 + (x - float(view["x"])) * zoom,
        frame["y"] + frame["height"] / 2 + (y - float(view["y"])) * zoom,
    )


def test_it_opens_with_the_first_slide_and_its_map(page, address):  # noqa: F811
    visit(page, address)
    assert page.title() == "case-1 · tapfm view"
    assert page.locator("#count").inner_text() == "2 slides"
    assert page.locator("#list li").count() == 2
    assert page.locator("#list [aria-current=true] .id").inner_text() == "case-1"
    assert page.locator("#name").inner_text() == "case-1"
    assert "117 tiles" in page.locator("#facts").inner_text()
    assert page.locator("#results tbody tr").inner_text().split() == ["FGFR3", "0.250", "0.500", "+", "+", "✓"]
    assert page.locator("#sum").inner_text() == "Logit of FGFR3: 0.500 = −0.500 (constant) + 1.00 (all tiles)"
    assert page.locator("#tiles-shown").inner_text() == "117 of 117 tiles shown"
    assert "logit" in page.locator("#unit").inner_text()
    assert "0" in page.locator("#ticks span").all_inner_texts()
    assert page.locator("#gallery img").count() == 8
    widths = page.locator("#list img").evaluate_all("all => all.map((each) => each.naturalWidth)")
    assert widths == [256, 256]
    # red raises, blue lowers
    red, _, blue = map_colour(page, 50, 50)
    assert red > blue + 80
    red, _, blue = map_colour(page, 1250, 850)
    assert blue > red + 80


def test_a_hot_tile_covers_its_own_pixels_and_no_others(serve, page, tmp_path):  # noqa: F811
    path = write_scn(tmp_path / "padded.scn", [(512, 256, section(700, 600))], (2048, 1536))
    predict(tmp_path / "predicted", path, "padded")
    address = serve(tmp_path / "predicted")
    # only the strongest tile of all is left: the first one, at the corner of the bounds
    visit(page, address, "#slide=padded&x=612&y=356&zoom=3&hide=100&layer=weight")
    wait_for_view(page, zoom="3", hide="100")
    for x, y in [(1, 1), (98, 1), (1, 98), (98, 98)]:
        assert map_colour(page, x, y, (512, 256)) is not None
    for x, y in [(-2, 50), (50, -2), (101, 50), (50, 101)]:
        assert map_colour(page, x, y, (512, 256)) is None


def test_the_slide_under_the_map_is_where_the_map_says(serve, page, tmp_path):  # noqa: F811
    picture = np.full((900, 1300, 3), GLASS, np.uint8)
    picture[300:400, 500:600] = (20, 160, 40)
    path = write_slide(tmp_path / "marked.svs", picture, compression="zlib", aperio=False)
    predict(tmp_path / "predicted", path, "marked")
    address = serve(tmp_path / "predicted")
    visit(page, address, "#slide=marked&x=550&y=350&zoom=3&map=0")
    x, y = (round(each) for each in tile_on_screen(page, 500, 300))
    page.screenshot(path=tmp_path / "seen.png")
    from PIL import Image

    seen = np.asarray(Image.open(tmp_path / "seen.png").convert("RGB")).astype(int)
    green = seen[..., 1] - seen[..., 0] > 60
    rows, columns = np.nonzero(green[:640, 300:960])  # without the navigator
    assert abs(columns.min() + 300 - x) <= 2
    assert abs(rows.min() - y) <= 2
    assert abs(columns.max() - columns.min() + 1 - 300) <= 3
    assert abs(rows.max() - rows.min() + 1 - 300) <= 3


def test_zooming_by_wheel_buttons_and_keys(page, address):  # noqa: F811
    visit(page, address)
    zooms = [float(view_of(page)["zoom"])]

    def zoomed(do):
        before = page.url
        do()
        page.wait_for_function("before => location.href !== before", arg=before)
        zooms.append(float(view_of(page)["zoom"]))

    zoomed(lambda: page.get_by_label("Zoom in").click())
    zoomed(lambda: page.keyboard.press("+"))
    page.mouse.move(600, 400)
    zoomed(lambda: page.mouse.wheel(0, -300))
    assert zooms == sorted(zooms)
    zoomed(lambda: page.keyboard.press("-"))
    assert zooms[-1] < zooms[-2]
    page.keyboard.press("1")
    wait_for_view(page, zoom="1")
    page.wait_for_function("() => document.getElementById('magnification').textContent === '20×'")
    assert page.locator("#length").inner_text() == "50 µm"
    assert page.locator("#bar").bounding_box()["width"] == pytest.approx(100, abs=0.5)
    page.get_by_label("Whole slide").click()
    wait_for_view(page, zoom=str(zooms[0]))


def test_layers_percentiles_opacity_and_hiding(page, address):  # noqa: F811
    visit(page, address)
    layers = page.get_by_label("Layer")
    assert layers.locator("option").all_inner_texts() == [
        "contribution to the logit of FGFR3",
        "weight in the slide",
        "raw attention of the encoder",
    ]
    layers.select_option("weight")
    assert view_of(page)["layer"] == "weight"
    assert "share of the slide" in page.locator("#unit").inner_text()
    page.get_by_role("button", name="Percentiles").click()
    assert page.locator("#ticks span").all_inner_texts() == ["0", "25", "50", "75", "100"]
    page.locator("#hide").fill("90")
    assert page.locator("#hide-said").inner_text() == "90.0"
    assert page.locator("#tiles-shown").inner_text() == "12 of 117 tiles shown"
    assert map_colour(page, 50, 50) is not None
    assert map_colour(page, 1250, 850) is None
    page.locator("#opacity").fill("20")
    assert page.locator("#heatmap").evaluate("canvas => canvas.style.opacity") == "0.2"
    page.get_by_label("show").uncheck()
    assert map_colour(page, 50, 50) is None
    assert view_of(page)["map"] == "0"


def test_hiding_around_0_goes_by_the_absolute_value(page, address):  # noqa: F811
    visit(page, address, "#slide=case-1&hide=50")
    assert "nearer to 0" in page.locator("#hide-name").inner_text()
    assert map_colour(page, 50, 50) is not None
    assert map_colour(page, 1250, 850) is not None
    assert map_colour(page, 650, 450) is None


def test_hovering_tells_the_numbers_of_a_tile(page, address):  # noqa: F811
    visit(page, address)
    tooltip = page.locator("#tooltip")
    assert tooltip.is_hidden()
    page.mouse.move(*tile_on_screen(page, 250, 150))
    tooltip.wait_for()
    said = tooltip.inner_text()
    assert "x 100 µm, y 50.0 µm" in said
    assert re.search(r"contribution, FGFR3\s+\+0\.743\s+87%", said)
    assert "weight" in said
    assert "attention" in said
    page.mouse.move(*tile_on_screen(page, -200, 150))
    assert tooltip.is_hidden()


def test_a_click_opens_the_tile_at_full_size(page, address):  # noqa: F811
    visit(page, address)
    page.mouse.click(*tile_on_screen(page, 250, 150))
    dialog = page.locator("dialog#tile")
    dialog.wait_for()
    assert "case-1, tile 31 of 117 by absolute contribution, FGFR3" in page.locator("#tile-title").inner_text()
    assert re.search(r"contribution, FGFR3\s+\+0\.743\s+31\s+87%", page.locator("#tile-numbers").inner_text())
    page.wait_for_function("() => document.getElementById('tile-picture').naturalWidth === 100")
    page.keyboard.press("t")
    page.wait_for_function("() => document.getElementById('tile-title').textContent.includes('tile 1 of 117')")
    page.keyboard.press("n")
    page.wait_for_function("() => document.getElementById('tile-title').textContent.includes('tile 2 of 117')")
    page.get_by_role("button", name="Previous", exact=True).click()
    page.get_by_role("button", name="Show on the slide").click()
    assert dialog.is_hidden()
    wait_for_view(page, x="50", y="50")
    assert page.locator("#rank").inner_text() == "1 of 117"


def test_slides_are_found_sorted_and_stepped_through(page, address):  # noqa: F811
    visit(page, address)
    names = page.locator("#list .id")
    page.get_by_label("Sort by").select_option("FGFR3")
    assert names.all_inner_texts() == ["case-2", "case-1"]
    page.get_by_label("Search slides").fill("CASE 2")
    assert names.all_inner_texts() == ["case-2"]
    assert page.locator("#count").inner_text() == "1 of 2 slides"
    names.first.click()
    wait_for_view(page, slide="case-2")
    page.get_by_label("Search slides").fill("")
    page.get_by_label("Search slides").blur()
    page.keyboard.press("j")
    wait_for_view(page, slide="case-1")
    page.keyboard.press("k")
    wait_for_view(page, slide="case-2")
    assert page.locator("#name").inner_text() == "case-2"


def test_a_link_leads_back_to_the_same_view(page, address):  # noqa: F811
    visit(page, address)
    wanted = {
        "slide": "case-2",
        "x": "700",
        "y": "300",
        "zoom": "2",
        "layer": "attention",
        "opacity": "30",
        "hide": "40",
    }
    link = "#" + "&".join(f"{name}={value}" for name, value in wanted.items()) + "&percentile=1"
    page.goto(address + link)  # in the page that is open
    wait_for_view(page, **wanted)
    with page.context.expect_page() as opening:
        page.evaluate("() => window.open(location.href)")
    other = opening.value
    other.set_viewport_size({"width": 1000, "height": 700})
    other.wait_for_function("() => document.getElementById('length').textContent !== ''")
    wait_for_view(other, **wanted)
    assert other.locator("#name").inner_text() == "case-2"
    assert other.get_by_label("Layer").input_value() == "attention"
    assert other.locator("#as-percentile").get_attribute("aria-pressed") == "true"
    other.close()


@pytest.mark.parametrize(
    "link", ["#slide=absent", "#zoom=NaN&x=&y=no", "#zoom=1e9&x=1e9&y=-1e9&opacity=-5&layer=no", "#%"]
)
def test_a_link_that_makes_no_sense_shows_the_first_slide(page, address, link):  # noqa: F811
    visit(page, address, link)
    assert page.locator("#name").inner_text() == "case-1"
    assert page.locator("#message").is_visible() == (link == "#slide=absent")


def test_what_a_link_leaves_out_is_not_as_it_was(page, address):  # noqa: F811
    visit(page, address, "#slide=case-1&hide=40&percentile=1&map=0")
    page.goto(address + "#slide=case-1&layer=weight")
    wait_for_view(page, layer="weight", hide=None, percentile=None, map=None)
    assert page.locator("#tiles-shown").inner_text() == "117 of 117 tiles shown"


def test_the_way_back_leads_from_slide_to_slide(page, address):  # noqa: F811
    visit(page, address, "#slide=case-1&x=300&y=200&zoom=2")
    wait_for_view(page, zoom="2")
    page.keyboard.press("l")
    page.locator("#list button").nth(1).click()
    wait_for_view(page, slide="case-2")
    page.keyboard.press("1")
    wait_for_view(page, zoom="1")
    page.go_back()
    wait_for_view(page, slide="case-1", x="300", y="200", zoom="2", layer="weight")
    page.locator("#name", has_text="case-1").wait_for()
    page.go_forward()
    wait_for_view(page, slide="case-2", zoom="1")
    page.locator("#name", has_text="case-2").wait_for()


def test_an_answer_that_comes_late_changes_nothing(page, address):  # noqa: F811
    visit(page, address)
    late = page.request.get(f"{address}api/collection").json()["slides"][1]["key"]
    held = []
    page.route(f"**/api/slides/{late}", lambda route: held.append(route))
    with page.expect_request(f"**/api/slides/{late}"):
        page.locator("#list button").nth(1).click()
    page.locator("#list button").nth(0).click()
    with page.expect_response(f"**/api/slides/{late}/numbers") as numbers:
        held[0].continue_()
    numbers.value.finished()
    page.evaluate("() => fetch('api/collection').then((answer) => answer.json())")  # the page has had its turn by then
    assert page.locator("#list [aria-current=true] .id").inner_text() == "case-1"
    assert page.locator("#name").inner_text() == "case-1"
    assert view_of(page)["slide"] == "case-1"


def test_pictures_that_come_after_their_slide_was_left_are_no_trouble(page, address):  # noqa: F811
    held = []
    page.route("**/pictures/**", lambda route: held.append(route))
    with page.expect_request("**/pictures/**"):
        page.goto(address)
    wait_for_view(page, slide="case-1")
    page.keyboard.press("j")
    wait_for_view(page, slide="case-2")
    page.unroute("**/pictures/**")
    assert held
    for route in held:
        route.continue_()
    page.wait_for_load_state("networkidle")
    assert page.locator("#message").is_hidden()


def whole_slide(page, width, height):  # noqa: F811
    """Say at which zoom a slide just fits."""
    frame = page.locator("#picture").bounding_box()
    return min(frame["width"] / width, frame["height"] / height)


def test_a_slide_is_seen_whole_whether_or_not_the_one_before_had_a_panel(serve, page, tmp_path):  # noqa: F811
    plain = write_slide(tmp_path / "plain.svs", section(900, 1300))
    address = serve(two_predictions(tmp_path), plain)
    visit(page, address)
    for slide, size in (("plain", (900, 1300)), ("case-1", (1300, 900))):
        page.goto(f"{address}#slide={slide}")
        page.wait_for_function("zoom => location.hash.includes(`zoom=${zoom}`)", arg=f"{whole_slide(page, *size):.4}")


def test_a_window_of_another_size_keeps_the_magnification(page, address):  # noqa: F811
    view = {"slide": "case-1", "x": "650", "y": "450", "zoom": "8"}
    visit(page, address, "#" + "&".join(f"{name}={value}" for name, value in view.items()))
    wait_for_view(page, **view)
    page.set_viewport_size({"width": 1000, "height": 700})
    page.wait_for_function("() => document.getElementById('heatmap').clientHeight === 700")
    page.keyboard.press("l")
    wait_for_view(page, layer="weight", **view)
    assert page.locator("#magnification").inner_text() == "160×"
    page.keyboard.press("0")
    wait_for_view(page, zoom=f"{whole_slide(page, 1300, 900):.4}")
    page.set_viewport_size({"width": 1200, "height": 800})
    page.wait_for_function("() => document.getElementById('heatmap').clientHeight === 800")
    wait_for_view(page, zoom=f"{whole_slide(page, 1300, 900):.4}")


def test_after_a_click_keys_go_on_working(page, address):  # noqa: F811
    visit(page, address, "#slide=case-1&x=650&y=450&zoom=3")
    for button, slide in (("#zoom-in", "case-1"), ("#as-percentile", "case-1"), ("#list button >> nth=1", "case-2")):
        page.locator(button).click()
        wait_for_view(page, slide=slide)
        x = float(view_of(page)["x"])
        page.keyboard.press("ArrowRight")
        page.wait_for_function("x => Number(new URLSearchParams(location.hash.slice(1)).get('x')) > x", arg=x)
    page.keyboard.press("t")  # the pointer was last in the list
    page.keyboard.press("Enter")
    page.locator("#tile-title", has_text="case-2, tile 1 of 117").wait_for()


def test_keys(page, address):  # noqa: F811
    visit(page, address)
    page.keyboard.press("?")
    page.locator("dialog#keys").wait_for()
    assert "map on and off" in page.locator("#keys-list").inner_text()
    page.keyboard.press("Escape")
    assert page.locator("dialog#keys").is_hidden()
    page.keyboard.press("h")
    wait_for_view(page, map="0")
    page.keyboard.press("h")
    page.keyboard.press("l")
    wait_for_view(page, layer="weight")
    page.keyboard.press("p")
    wait_for_view(page, percentile="1")
    page.keyboard.press("]")
    wait_for_view(page, opacity="65")
    page.keyboard.press("1")
    wait_for_view(page, zoom="1")
    x = float(view_of(page)["x"])
    page.keyboard.press("ArrowRight")
    page.wait_for_function("x => Number(new URLSearchParams(location.hash.slice(1)).get('x')) > x", arg=x)
    page.keyboard.press("/")
    page.keyboard.type("hl")  # in a field, letters are letters
    assert page.get_by_label("Search slides").input_value() == "hl"
    wait_for_view(page, layer="weight")


def test_everything_can_be_reached_and_has_a_name(page, address):  # noqa: F811
    visit(page, address)
    nameless = page.evaluate(
        """() => [...document.querySelectorAll("button, input, select")].filter((each) => !(
             each.textContent.trim() || each.getAttribute("aria-label") || each.labels?.length || each.title
           )).map((each) => each.outerHTML)"""
    )
    assert nameless == []
    page.keyboard.press("Tab")
    assert page.evaluate("() => document.activeElement.textContent") == "Skip to the slide"


def test_a_slide_without_prediction_and_a_broken_one(chromium, tmp_path):  # noqa: F811
    write_slide(tmp_path / "plain.svs", section(1300, 900))
    (tmp_path / "broken.svs").write_bytes(b"nothing")
    with Served(tmp_path) as address, watched_page(chromium, expected=("422",)) as page:  # noqa: F811
        page.goto(address)
        page.locator("#message", has_text="broken: This slide's file is damaged").wait_for()
        page.keyboard.press("j")
        wait_for_view(page, slide="plain")
        assert page.locator("#message").is_hidden()
        assert page.locator("#map").is_hidden()
        assert "SVS" in page.locator("#facts").inner_text()


def test_of_a_slide_nothing_stays_when_the_next_one_is_broken(chromium, tmp_path):  # noqa: F811
    predicted = two_predictions(tmp_path)
    (tmp_path / "slides" / "case-2.svs").write_bytes(b"nothing")
    with Served(predicted) as address, watched_page(chromium, expected=("422",)) as page:  # noqa: F811
        visit(page, address)
        page.keyboard.press("t")
        wait_for_view(page, x="50")
        empty = """() => [...document.querySelectorAll(".over")].every((canvas) => {
          const copy = new OffscreenCanvas(canvas.width, canvas.height).getContext("2d", { willReadFrequently: true });
          copy.drawImage(canvas, 0, 0);
          return !copy.getImageData(0, 0, canvas.width, canvas.height).data.some(Boolean);
        })"""
        assert not page.evaluate(empty)
        page.keyboard.press("j")
        page.locator("#message", has_text="case-2").wait_for()
        assert page.evaluate(empty)
        assert view_of(page) == {"slide": "case-2"}


def test_a_name_cannot_become_a_part_of_the_page(serve, page, tmp_path):  # noqa: F811
    name = "<img src=x onerror=alert(1)>"
    path = write_slide(tmp_path / "slide.svs", section(600, 400))
    predict(tmp_path / "predicted", path, name, targets=("<b>target</b>",))
    address = serve(tmp_path / "predicted")
    visit(page, address)
    assert page.locator("#name").inner_text() == name
    assert page.locator("#name img, #list b, #results b").count() == 0


def test_open_to_others_the_token_is_taken_once_and_leaves_the_address(serve, page, tmp_path):  # noqa: F811
    path = write_slide(tmp_path / "slide.svs", section(600, 400))
    address = serve(path, host="0.0.0.0")
    parts = urlsplit(address)
    visit(page, f"http://127.0.0.1:{parts.port}/?{parts.query}")
    wait_for_view(page, slide="slide")
    assert "token" not in page.url
    page.reload()
    page.locator("#name", has_text="slide").wait_for()


def test_the_token_leaves_the_address_of_a_broken_slide_too(chromium, tmp_path):  # noqa: F811
    (tmp_path / "broken.svs").write_bytes(b"nothing")
    with Served(tmp_path, host="0.0.0.0") as address, watched_page(chromium, expected=("422",)) as page:  # noqa: F811
        parts = urlsplit(address)
        page.goto(f"http://127.0.0.1:{parts.port}/?{parts.query}")
        page.locator("#message", has_text="broken").wait_for()
        assert "token" not in page.url


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_tablet_has_list_and_panel_when_asked_for(chromium, address, scheme):  # noqa: F811
    with watched_page(chromium, viewport={"width": 768, "height": 1024}, has_touch=True, color_scheme=scheme) as page:  # noqa: F811
        visit(page, address)
        assert page.locator("#picture").bounding_box()["width"] == 768
        page.get_by_label("List of slides").tap()
        page.locator("#list button").nth(1).tap()
        wait_for_view(page, slide="case-2")
        page.get_by_label("Map and numbers", exact=True).first.tap()
        page.get_by_label("Layer").select_option("attention")
        wait_for_view(page, layer="attention")
        assert page.evaluate("() => document.documentElement.scrollWidth") == 768


def test_on_a_phone_the_panel_can_be_closed_again(chromium, address):  # noqa: F811
    with watched_page(chromium, viewport={"width": 390, "height": 844}, has_touch=True) as page:  # noqa: F811
        visit(page, address)
        for name in ("List of slides", "Map and numbers"):
            button = page.get_by_role("button", name=name)
            button.tap()
            assert button.get_attribute("aria-expanded") == "true"
            button.tap()
            assert button.get_attribute("aria-expanded") == "false"
