"""The viewer in Chromium, with a running server."""

import re
import threading
from contextlib import ExitStack
from urllib.parse import parse_qs, urlsplit

import numpy as np
import pytest
import uvicorn
from browser import chromium, open_checked_page, page  # noqa: F401 - fixtures
from slide_files import GLASS, section, write_scn, write_slide
from viewer_fixtures import write_predicted_slide, write_two_predictions

from tapfm.viewer.access_control import AccessPolicy
from tapfm.viewer.app import create_app
from tapfm.viewer.assets import _STATIC_FOLDER as STATIC_FOLDER
from tapfm.viewer.assets import read_assets
from tapfm.viewer.collection import collect_slides
from tapfm.viewer.server import open_socket, viewer_url

pytestmark = pytest.mark.skipif(
    not (STATIC_FOLDER / "index.html").exists(), reason="the viewer's pages are not built: make setup (needs npm)"
)


class ViewerServer:
    """Context manager of a server in a thread; yields its address."""

    def __init__(self, *sources, host="127.0.0.1"):
        self.listener = open_socket(host, 0)
        port = self.listener.getsockname()[1]
        policy = AccessPolicy.for_host(host, port)
        self.address = viewer_url(host, port, policy)
        app = create_app(collect_slides(sources), read_assets(), policy)
        self.server = uvicorn.Server(uvicorn.Config(app, log_level="error", ws="none"))
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
    """Function that starts a server for the test. Tests have to request it before `page`, so that it stops last."""
    with ExitStack() as servers:
        yield lambda *sources, **options: servers.enter_context(ViewerServer(*sources, **options))


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    with ViewerServer(write_two_predictions(tmp_path_factory.mktemp("viewer"))) as url:
        yield url


def open_viewer(page, address, view=""):  # noqa: F811
    """Open the viewer and wait until slide and heatmap are drawn."""
    page.goto(address + view)
    page.wait_for_function("() => document.getElementById('scale-bar-length').textContent !== ''")
    page.wait_for_load_state("networkidle")


def current_view(page):  # noqa: F811
    return {name: values[0] for name, values in parse_qs(urlsplit(page.url).fragment).items()}


def wait_for_view(page, **expected):  # noqa: F811
    """Wait until the address contains these parameters."""
    for name, value in expected.items():
        page.wait_for_function(
            "([name, value]) => new URLSearchParams(location.hash.slice(1)).get(name) === value", arg=[name, value]
        )


# Returns the heatmap's colour at a point of the slide (level-0 pixels relative to the bounds), or None if transparent.
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


def heatmap_colour(page, x, y, corner=(0, 0)):  # noqa: F811
    view = current_view(page)
    centre = float(view["x"]) - corner[0], float(view["y"]) - corner[1]
    return page.evaluate(COLOUR_AT, [x, y, float(view["zoom"]), *centre])


def screen_position(page, x, y):  # noqa: F811
    """Return the screen position of a level-0 point of the slide."""
    view, frame = current_view(page), page.locator("#slide-image").bounding_box()
    zoom = float(view["zoom"])
    return (
        frame["x"] + frame["width"] / 2 + (x - float(view["x"])) * zoom,
        frame["y"] + frame["height"] / 2 + (y - float(view["y"])) * zoom,
    )


def test_the_first_slide_opens_with_its_heatmap(page, address):  # noqa: F811
    open_viewer(page, address)
    assert page.title() == "case-1 · tapfm view"
    assert page.locator("#slide-count").inner_text() == "2 slides"
    assert page.locator("#slide-list li").count() == 2
    assert page.locator("#slide-list [aria-current=true] .slide-id").inner_text() == "case-1"
    assert page.locator("#slide-name").inner_text() == "case-1"
    assert "117 tiles" in page.locator("#slide-properties").inner_text()
    prediction = page.locator("#prediction-table tbody tr").inner_text().split()
    assert prediction == ["FGFR3", "0.250", "0.500", "positive", "positive", "✓"]
    logit_sum = page.locator("#logit-sum").inner_text()
    assert re.search(r"FGFR3: 0\.500 = −0\.500 \(.*\) \+ 1\.00 \(.*tiles\)", logit_sum)
    assert page.locator("#visible-tiles").inner_text() == "117 of 117 tiles shown"
    assert "logit" in page.locator("#unit").inner_text()
    assert "0" in page.locator("#ticks span").all_inner_texts()
    assert page.locator("#gallery img").count() == 8
    widths = page.locator("#slide-list img").evaluate_all("all => all.map((each) => each.naturalWidth)")
    assert widths == [256, 256]
    # red raises the logit, blue lowers it
    red, _, blue = heatmap_colour(page, 50, 50)
    assert red > blue + 80
    red, _, blue = heatmap_colour(page, 1250, 850)
    assert blue > red + 80


def test_a_prediction_from_few_tiles_shows_a_warning(serve, page, tmp_path):  # noqa: F811
    for name, width_px in (("few", 450), ("many", 1300)):
        path = write_slide(tmp_path / f"{name}.svs", section(width_px, 350), aperio=False, downsamples=(1,))
        write_predicted_slide(tmp_path / "predicted", path, name)
    open_viewer(page, serve(tmp_path / "predicted"))
    assert page.locator("#slide-name").inner_text() == "few"
    assert page.locator("#prediction-warning").inner_text() == "only 12 tiles"
    assert page.locator("#slide-list .warning").all_inner_texts() == ["only 12 tiles"]
    page.locator("#slide-list").get_by_text("many").click()
    page.wait_for_function("() => document.getElementById('slide-name').textContent === 'many'")
    page.wait_for_function("() => document.getElementById('prediction-warning').textContent === ''")


def test_a_tile_of_the_heatmap_covers_exactly_its_pixels(serve, page, tmp_path):  # noqa: F811
    path = write_scn(tmp_path / "padded.scn", [(512, 256, section(700, 600))], (2048, 1536))
    write_predicted_slide(tmp_path / "predicted", path, "padded")
    address = serve(tmp_path / "predicted")
    # hide all tiles but the strongest: the first one, at the corner of the bounds
    open_viewer(page, address, "#slide=padded&x=612&y=356&zoom=3&hide=100&layer=weight")
    wait_for_view(page, zoom="3", hide="100")
    for x, y in [(1, 1), (98, 1), (1, 98), (98, 98)]:
        assert heatmap_colour(page, x, y, (512, 256)) is not None
    for x, y in [(-2, 50), (50, -2), (101, 50), (50, 101)]:
        assert heatmap_colour(page, x, y, (512, 256)) is None


def test_slide_and_heatmap_are_aligned(serve, page, tmp_path):  # noqa: F811
    pixels = np.full((900, 1300, 3), GLASS, np.uint8)
    pixels[300:400, 500:600] = (20, 160, 40)
    path = write_slide(tmp_path / "marked.svs", pixels, compression="zlib", aperio=False)
    write_predicted_slide(tmp_path / "predicted", path, "marked")
    address = serve(tmp_path / "predicted")
    open_viewer(page, address, "#slide=marked&x=550&y=350&zoom=3&heatmap=0")
    x, y = (round(each) for each in screen_position(page, 500, 300))
    page.screenshot(path=tmp_path / "screenshot.png")
    from PIL import Image

    screenshot = np.asarray(Image.open(tmp_path / "screenshot.png").convert("RGB")).astype(int)
    green = screenshot[..., 1] - screenshot[..., 0] > 60
    rows, columns = np.nonzero(green[:640, 300:960])  # excludes the navigator
    assert abs(columns.min() + 300 - x) <= 2
    assert abs(rows.min() - y) <= 2
    assert abs(columns.max() - columns.min() + 1 - 300) <= 3
    assert abs(rows.max() - rows.min() + 1 - 300) <= 3


def test_zoom_with_wheel_buttons_and_keys(page, address):  # noqa: F811
    open_viewer(page, address)
    zooms = [float(current_view(page)["zoom"])]

    def record_zoom(action):
        before = page.url
        action()
        page.wait_for_function("before => location.href !== before", arg=before)
        zooms.append(float(current_view(page)["zoom"]))

    record_zoom(lambda: page.get_by_label("Zoom in").click())
    record_zoom(lambda: page.keyboard.press("+"))
    page.mouse.move(600, 400)
    record_zoom(lambda: page.mouse.wheel(0, -300))
    assert zooms == sorted(zooms)
    record_zoom(lambda: page.keyboard.press("-"))
    assert zooms[-1] < zooms[-2]
    page.keyboard.press("1")
    wait_for_view(page, zoom="1")
    page.wait_for_function("() => document.getElementById('magnification').textContent === '20×'")
    assert page.locator("#scale-bar-length").inner_text() == "50 µm"
    assert page.locator("#scale-bar-line").bounding_box()["width"] == pytest.approx(100, abs=0.5)
    page.get_by_label("Whole slide").click()
    wait_for_view(page, zoom=str(zooms[0]))


def test_layer_percentiles_opacity_and_hidden_tiles(page, address):  # noqa: F811
    open_viewer(page, address)
    layers = page.get_by_label("Layer")
    titles = layers.locator("option").all_inner_texts()
    assert ["contribution" in titles[0], "weight" in titles[1], "attention" in titles[2]] == [True, True, True]
    assert "FGFR3" in titles[0]
    layers.select_option("weight")
    assert current_view(page)["layer"] == "weight"
    assert "fraction" in page.locator("#unit").inner_text()
    page.get_by_role("button", name="Percentiles").click()
    assert page.locator("#ticks span").all_inner_texts() == ["0", "25", "50", "75", "100"]
    page.locator("#hide").fill("90")
    assert page.locator("#hide-value").inner_text() == "90.0"
    assert page.locator("#visible-tiles").inner_text() == "12 of 117 tiles shown"
    assert heatmap_colour(page, 50, 50) is not None
    assert heatmap_colour(page, 1250, 850) is None
    page.locator("#opacity").fill("20")
    assert page.locator("#heatmap").evaluate("canvas => canvas.style.opacity") == "0.2"
    page.get_by_label("Show", exact=True).uncheck()
    assert heatmap_colour(page, 50, 50) is None
    assert current_view(page)["heatmap"] == "0"


def test_diverging_layers_are_hidden_by_absolute_value(page, address):  # noqa: F811
    open_viewer(page, address, "#slide=case-1&hide=50")
    assert "absolute value" in page.locator("#hide-label").inner_text()
    assert heatmap_colour(page, 50, 50) is not None
    assert heatmap_colour(page, 1250, 850) is not None
    assert heatmap_colour(page, 650, 450) is None


def test_the_tooltip_shows_the_values_of_a_tile(page, address):  # noqa: F811
    open_viewer(page, address)
    tooltip = page.locator("#tooltip")
    assert tooltip.is_hidden()
    page.mouse.move(*screen_position(page, 250, 150))
    tooltip.wait_for()
    text = tooltip.inner_text()
    assert "x 100 µm, y 50.0 µm" in text
    assert re.search(r"contribution \(FGFR3\)\s+\+0\.743\s+87%", text)
    assert "weight" in text
    assert "attention" in text
    page.mouse.move(*screen_position(page, -200, 150))
    assert tooltip.is_hidden()


def test_a_click_opens_the_tile_at_full_resolution(page, address):  # noqa: F811
    open_viewer(page, address)
    page.mouse.click(*screen_position(page, 250, 150))
    dialog = page.locator("dialog#tile-dialog")
    dialog.wait_for()
    assert "case-1: tile 31 of 117 by absolute contribution (FGFR3)" in page.locator("#tile-title").inner_text()
    assert re.search(r"contribution \(FGFR3\)\s+\+0\.743\s+31\s+87%", page.locator("#tile-values").inner_text())
    page.wait_for_function("() => document.getElementById('tile-image').naturalWidth === 100")
    page.keyboard.press("t")
    page.wait_for_function("() => document.getElementById('tile-title').textContent.includes('tile 1 of 117')")
    page.keyboard.press("n")
    page.wait_for_function("() => document.getElementById('tile-title').textContent.includes('tile 2 of 117')")
    page.get_by_role("button", name="Previous", exact=True).click()
    page.get_by_role("button", name="Show on slide").click()
    assert dialog.is_hidden()
    wait_for_view(page, x="50", y="50")
    assert page.locator("#rank").inner_text() == "1 of 117"


def test_a_tile_past_the_edge_is_shown_with_white_and_a_note(serve, page, tmp_path):  # noqa: F811
    path = write_slide(tmp_path / "s.tif", section(450, 300), compression="zlib", aperio=False, downsamples=(1,))
    write_predicted_slide(tmp_path / "predicted", path, "s", with_edge=True)
    open_viewer(page, serve(tmp_path / "predicted"))
    assert heatmap_colour(page, 440, 50) is not None
    note = "extends past the edge of the slide"
    page.mouse.click(*screen_position(page, 430, 50))
    page.wait_for_function("() => document.getElementById('tile-image').naturalWidth === 100")
    assert note in page.locator("#tile-size").inner_text()
    pixel = """(x) => {
      const copy = new OffscreenCanvas(100, 100).getContext("2d");
      copy.drawImage(document.getElementById("tile-image"), 0, 0, 100, 100);
      return [...copy.getImageData(x, 50, 1, 1).data.slice(0, 3)];
    }"""
    assert page.evaluate(pixel, 70) == [255, 255, 255]
    assert page.evaluate(pixel, 20) != [255, 255, 255]
    page.keyboard.press("Escape")
    page.mouse.click(*screen_position(page, 350, 50))
    page.locator("dialog#tile-dialog").wait_for()
    assert note not in page.locator("#tile-size").inner_text()


def test_search_sort_and_step_through_slides(page, address):  # noqa: F811
    open_viewer(page, address)
    names = page.locator("#slide-list .slide-id")
    page.get_by_label("Sort by").select_option("FGFR3")
    assert names.all_inner_texts() == ["case-2", "case-1"]
    page.get_by_label("Search slides").fill("CASE 2")
    assert names.all_inner_texts() == ["case-2"]
    assert page.locator("#slide-count").inner_text() == "1 of 2 slides"
    names.first.click()
    wait_for_view(page, slide="case-2")
    page.get_by_label("Search slides").fill("")
    page.get_by_label("Search slides").blur()
    page.keyboard.press("j")
    wait_for_view(page, slide="case-1")
    page.keyboard.press("k")
    wait_for_view(page, slide="case-2")
    assert page.locator("#slide-name").inner_text() == "case-2"


def test_a_link_restores_the_same_view(page, address):  # noqa: F811
    open_viewer(page, address)
    expected = {
        "slide": "case-2",
        "x": "700",
        "y": "300",
        "zoom": "2",
        "layer": "attention",
        "opacity": "30",
        "hide": "40",
    }
    link = "#" + "&".join(f"{name}={value}" for name, value in expected.items()) + "&percentile=1"
    page.goto(address + link)  # in the open page
    wait_for_view(page, **expected)
    with page.context.expect_page() as new_page:
        page.evaluate("() => window.open(location.href)")
    other = new_page.value
    other.set_viewport_size({"width": 1000, "height": 700})
    other.wait_for_function("() => document.getElementById('scale-bar-length').textContent !== ''")
    wait_for_view(other, **expected)
    assert other.locator("#slide-name").inner_text() == "case-2"
    assert other.get_by_label("Layer").input_value() == "attention"
    assert other.locator("#show-percentiles").get_attribute("aria-pressed") == "true"
    other.close()


@pytest.mark.parametrize(
    "link", ["#slide=absent", "#zoom=NaN&x=&y=no", "#zoom=1e9&x=1e9&y=-1e9&opacity=-5&layer=no", "#%"]
)
def test_an_invalid_link_shows_the_first_slide(page, address, link):  # noqa: F811
    open_viewer(page, address, link)
    assert page.locator("#slide-name").inner_text() == "case-1"
    assert page.locator("#message").is_visible() == (link == "#slide=absent")


def test_parameters_missing_in_a_link_have_their_defaults(page, address):  # noqa: F811
    open_viewer(page, address, "#slide=case-1&hide=40&percentile=1&heatmap=0")
    page.goto(address + "#slide=case-1&layer=weight")
    wait_for_view(page, layer="weight", hide=None, percentile=None, heatmap=None)
    assert page.locator("#visible-tiles").inner_text() == "117 of 117 tiles shown"


def test_the_back_button_returns_to_the_previous_slide(page, address):  # noqa: F811
    open_viewer(page, address, "#slide=case-1&x=300&y=200&zoom=2")
    wait_for_view(page, zoom="2")
    page.keyboard.press("l")
    page.locator("#slide-list button").nth(1).click()
    wait_for_view(page, slide="case-2")
    page.keyboard.press("1")
    wait_for_view(page, zoom="1")
    page.go_back()
    wait_for_view(page, slide="case-1", x="300", y="200", zoom="2", layer="weight")
    page.locator("#slide-name", has_text="case-1").wait_for()
    page.go_forward()
    wait_for_view(page, slide="case-2", zoom="1")
    page.locator("#slide-name", has_text="case-2").wait_for()


def test_a_late_response_of_a_left_slide_is_ignored(page, address):  # noqa: F811
    open_viewer(page, address)
    late = page.request.get(f"{address}api/collection").json()["slides"][1]["key"]
    held = []
    page.route(f"**/api/slides/{late}", lambda route: held.append(route))
    with page.expect_request(f"**/api/slides/{late}"):
        page.locator("#slide-list button").nth(1).click()
    page.locator("#slide-list button").nth(0).click()
    with page.expect_response(f"**/api/slides/{late}/tile-values") as response:
        held[0].continue_()
    response.value.finished()
    # when this request is finished, the page has handled the late response
    page.evaluate("() => fetch('api/collection').then((response) => response.json())")
    assert page.locator("#slide-list [aria-current=true] .slide-id").inner_text() == "case-1"
    assert page.locator("#slide-name").inner_text() == "case-1"
    assert current_view(page)["slide"] == "case-1"


def test_late_images_of_a_left_slide_cause_no_error(page, address):  # noqa: F811
    held = []
    page.route("**/images/**", lambda route: held.append(route))
    with page.expect_request("**/images/**"):
        page.goto(address)
    wait_for_view(page, slide="case-1")
    page.keyboard.press("j")
    wait_for_view(page, slide="case-2")
    page.unroute("**/images/**")
    assert held
    for route in held:
        route.continue_()
    page.wait_for_load_state("networkidle")
    assert page.locator("#message").is_hidden()


def whole_slide_zoom(page, width, height):  # noqa: F811
    """Return the zoom at which a slide just fits into the view."""
    frame = page.locator("#slide-image").bounding_box()
    return min(frame["width"] / width, frame["height"] / height)


def test_a_new_slide_fits_into_the_view_with_and_without_side_panel(serve, page, tmp_path):  # noqa: F811
    plain = write_slide(tmp_path / "plain.svs", section(900, 1300))
    address = serve(write_two_predictions(tmp_path), plain)
    open_viewer(page, address)
    for slide, size in (("plain", (900, 1300)), ("case-1", (1300, 900))):
        page.goto(f"{address}#slide={slide}")
        page.wait_for_function(
            "zoom => location.hash.includes(`zoom=${zoom}`)", arg=f"{whole_slide_zoom(page, *size):.4}"
        )


def test_resizing_the_window_keeps_the_magnification(page, address):  # noqa: F811
    view = {"slide": "case-1", "x": "650", "y": "450", "zoom": "8"}
    open_viewer(page, address, "#" + "&".join(f"{name}={value}" for name, value in view.items()))
    wait_for_view(page, **view)
    page.set_viewport_size({"width": 1000, "height": 700})
    page.wait_for_function("() => document.getElementById('heatmap').clientHeight === 700")
    page.keyboard.press("l")
    wait_for_view(page, layer="weight", **view)
    assert page.locator("#magnification").inner_text() == "160×"
    page.keyboard.press("0")
    wait_for_view(page, zoom=f"{whole_slide_zoom(page, 1300, 900):.4}")
    page.set_viewport_size({"width": 1200, "height": 800})
    page.wait_for_function("() => document.getElementById('heatmap').clientHeight === 800")
    wait_for_view(page, zoom=f"{whole_slide_zoom(page, 1300, 900):.4}")


def test_shortcuts_work_after_a_click(page, address):  # noqa: F811
    open_viewer(page, address, "#slide=case-1&x=650&y=450&zoom=3")
    for button, slide in (
        ("#zoom-in", "case-1"),
        ("#show-percentiles", "case-1"),
        ("#slide-list button >> nth=1", "case-2"),
    ):
        page.locator(button).click()
        wait_for_view(page, slide=slide)
        x = float(current_view(page)["x"])
        page.keyboard.press("ArrowRight")
        page.wait_for_function("x => Number(new URLSearchParams(location.hash.slice(1)).get('x')) > x", arg=x)
    page.keyboard.press("t")  # after a click into the slide list
    page.keyboard.press("Enter")
    page.locator("#tile-title", has_text="case-2: tile 1 of 117").wait_for()


def test_keyboard_shortcuts(page, address):  # noqa: F811
    open_viewer(page, address)
    page.keyboard.press("?")
    page.locator("dialog#shortcuts").wait_for()
    assert "Next slide" in page.locator("#shortcut-list").inner_text()
    page.keyboard.press("?")
    assert page.locator("dialog#shortcuts").is_hidden()
    page.keyboard.press("h")
    wait_for_view(page, heatmap="0")
    page.keyboard.press("h")
    page.keyboard.press("l")
    wait_for_view(page, layer="weight")
    page.keyboard.press("p")
    wait_for_view(page, percentile="1")
    page.keyboard.press("]")
    wait_for_view(page, opacity="65")
    page.keyboard.press("1")
    wait_for_view(page, zoom="1")
    x = float(current_view(page)["x"])
    page.keyboard.press("ArrowRight")
    page.wait_for_function("x => Number(new URLSearchParams(location.hash.slice(1)).get('x')) > x", arg=x)
    page.keyboard.press("/")
    page.keyboard.type("hl")  # in a text field, keys are no shortcuts
    assert page.get_by_label("Search slides").input_value() == "hl"
    wait_for_view(page, layer="weight")


def test_all_controls_have_an_accessible_name(page, address):  # noqa: F811
    open_viewer(page, address)
    unnamed = page.evaluate(
        """() => [...document.querySelectorAll("button, input, select")].filter((control) => !(
             control.textContent.trim() || control.getAttribute("aria-label") || control.labels?.length || control.title
           )).map((control) => control.outerHTML)"""
    )
    assert unnamed == []
    page.keyboard.press("Tab")
    assert page.evaluate("() => document.activeElement.textContent") == "Skip to slide"


def test_a_slide_without_prediction_and_a_damaged_slide(chromium, tmp_path):  # noqa: F811
    write_slide(tmp_path / "plain.svs", section(1300, 900))
    (tmp_path / "broken.svs").write_bytes(b"not a slide")
    with ViewerServer(tmp_path) as address, open_checked_page(chromium, expected=("422",)) as page:  # noqa: F811
        page.goto(address)
        page.locator("#message", has_text="broken: The slide file cannot be opened").wait_for()
        page.keyboard.press("j")
        wait_for_view(page, slide="plain")
        assert page.locator("#message").is_hidden()
        assert page.locator("#heatmap-settings").is_hidden()
        assert "SVS" in page.locator("#slide-properties").inner_text()


def test_the_previous_slide_is_cleared_if_the_next_one_is_damaged(chromium, tmp_path):  # noqa: F811
    predicted = write_two_predictions(tmp_path)
    (tmp_path / "slides" / "case-2.svs").write_bytes(b"not a slide")
    with ViewerServer(predicted) as address, open_checked_page(chromium, expected=("422",)) as page:  # noqa: F811
        open_viewer(page, address)
        page.keyboard.press("t")
        wait_for_view(page, x="50")
        overlays_are_empty = """() => [...document.querySelectorAll(".overlay")].every((canvas) => {
          const copy = new OffscreenCanvas(canvas.width, canvas.height).getContext("2d", { willReadFrequently: true });
          copy.drawImage(canvas, 0, 0);
          return !copy.getImageData(0, 0, canvas.width, canvas.height).data.some(Boolean);
        })"""
        assert not page.evaluate(overlays_are_empty)
        page.keyboard.press("j")
        page.locator("#message", has_text="case-2").wait_for()
        assert page.evaluate(overlays_are_empty)
        assert current_view(page) == {"slide": "case-2"}


def test_names_are_not_interpreted_as_html(serve, page, tmp_path):  # noqa: F811
    name = "<img src=x onerror=alert(1)>"
    path = write_slide(tmp_path / "slide.svs", section(600, 400))
    write_predicted_slide(tmp_path / "predicted", path, name, targets=("<b>target</b>",))
    address = serve(tmp_path / "predicted")
    open_viewer(page, address)
    assert page.locator("#slide-name").inner_text() == name
    assert page.locator("#slide-name img, #slide-list b, #prediction-table b").count() == 0


def test_the_token_is_removed_from_the_address_of_a_public_server(serve, page, tmp_path):  # noqa: F811
    path = write_slide(tmp_path / "slide.svs", section(600, 400))
    address = serve(path, host="0.0.0.0")
    parts = urlsplit(address)
    open_viewer(page, f"http://127.0.0.1:{parts.port}/?{parts.query}")
    wait_for_view(page, slide="slide")
    assert "token" not in page.url
    page.reload()
    page.locator("#slide-name", has_text="slide").wait_for()


def test_the_token_is_removed_from_the_address_of_a_damaged_slide(chromium, tmp_path):  # noqa: F811
    (tmp_path / "broken.svs").write_bytes(b"not a slide")
    with ViewerServer(tmp_path, host="0.0.0.0") as address, open_checked_page(chromium, expected=("422",)) as page:  # noqa: F811
        parts = urlsplit(address)
        page.goto(f"http://127.0.0.1:{parts.port}/?{parts.query}")
        page.locator("#message", has_text="broken").wait_for()
        assert "token" not in page.url


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_slide_list_and_side_panel_open_on_a_tablet(chromium, address, scheme):  # noqa: F811
    viewport = {"width": 768, "height": 1024}
    with open_checked_page(chromium, viewport=viewport, has_touch=True, color_scheme=scheme) as page:  # noqa: F811
        open_viewer(page, address)
        assert page.locator("#slide-image").bounding_box()["width"] == 768
        page.get_by_label("Slide list").tap()
        page.locator("#slide-list button").nth(1).tap()
        wait_for_view(page, slide="case-2")
        page.get_by_label("Prediction and heatmap", exact=True).first.tap()
        page.get_by_label("Layer").select_option("attention")
        wait_for_view(page, layer="attention")
        assert page.evaluate("() => document.documentElement.scrollWidth") == 768


def test_slide_list_and_side_panel_can_be_closed_on_a_phone(chromium, address):  # noqa: F811
    with open_checked_page(chromium, viewport={"width": 390, "height": 844}, has_touch=True) as page:  # noqa: F811
        open_viewer(page, address)
        for name in ("Slide list", "Prediction and heatmap"):
            button = page.get_by_role("button", name=name)
            button.tap()
            assert button.get_attribute("aria-expanded") == "true"
            button.tap()
            assert button.get_attribute("aria-expanded") == "false"
