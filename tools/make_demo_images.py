"""Create the images of docs/tutorials/first-hour.md from the output of `tapfm demo`.

    python tools/make_demo_images.py demo --out docs/images

Takes screenshots of the report and the viewer with Chromium, which has to be in PATH.
"""

from __future__ import annotations

import argparse
import io
import re
import shutil
import subprocess
import sys
from pathlib import Path

from PIL import Image
from playwright.sync_api import Browser, ViewportSize, sync_playwright

WIDTH_PX = 1200
VIEW_COMMAND = [sys.executable, "-c", "from tapfm.cli.main import main; main()", "view"]


def save_resized(image: Image.Image, path: Path, width_px: int = WIDTH_PX) -> None:
    """Save an image with a given width, and print its size."""
    height_px = round(image.height * width_px / image.width)
    small = image.convert("RGB").resize((width_px, height_px), Image.Resampling.LANCZOS)
    if path.suffix == ".png":  # text and lines need few colours
        small = small.quantize(128)
    small.save(path, quality=82, optimize=True)
    print(f"{path}: {small.width} x {small.height} px, {path.stat().st_size // 1000} kB")


def save_contact_sheet(demo: Path, out: Path) -> None:
    """Save the upper part of the contact sheet."""
    with Image.open(demo / "synthetic" / "contact-sheet.jpg") as sheet:
        save_resized(
            sheet.crop((0, 0, sheet.width, min(sheet.height, round(sheet.width * 0.45)))), out / "demo-slides.jpg"
        )


def save_overlay(demo: Path, out: Path, slide_id: str) -> None:
    """Save the tile overlay of a slide."""
    with Image.open(demo / "tiles" / "overlays" / f"{slide_id}.png") as overlay:
        save_resized(overlay, out / "demo-tiles.jpg", 800)


def take_screenshot(browser: Browser, address: str, selector: str, height_px: int, *, dark: bool) -> Image.Image:
    """Return a screenshot of a page, taken when the selector matches and the network is idle."""
    window = ViewportSize(width=1280, height=height_px)
    context = browser.new_context(viewport=window, color_scheme="dark" if dark else "light")
    page = context.new_page()
    page.goto(address)
    page.wait_for_selector(selector)
    page.wait_for_load_state("networkidle")
    screenshot = page.screenshot()
    context.close()
    return Image.open(io.BytesIO(screenshot))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("demo", type=Path, help="output folder of tapfm demo")
    parser.add_argument("--out", type=Path, default=Path("docs/images"), help="folder for the images")
    parser.add_argument("--slide", default="S003", help="id of the slide whose tiles are shown")
    parser.add_argument("--dark", action="store_true", help="use the dark colour scheme")
    arguments = parser.parse_args()
    demo, out = arguments.demo, arguments.out
    save_contact_sheet(demo, out)
    save_overlay(demo, out, arguments.slide)
    with Image.open(demo / "attention-check.png") as image:
        save_resized(image, out / "demo-attention-check.jpg", min(1600, image.width))
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None:
        sys.exit("Chromium is not in PATH. On Debian: apt-get install chromium")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        report = (demo / "report.html").absolute().as_uri()
        save_resized(
            take_screenshot(browser, report, "table", 1480, dark=arguments.dark), out / "demo-report.png", 1280
        )
        server = subprocess.Popen(
            [*VIEW_COMMAND, str(demo / "predictions" / "external"), "--port", "0", "--no-browser"],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert server.stdout is not None
        try:
            address = re.findall(r"http://\S+", server.stdout.readline())[0]
            save_resized(take_screenshot(browser, address, "canvas", 900, dark=arguments.dark), out / "demo-viewer.jpg")
        finally:
            server.terminate()
            browser.close()


if __name__ == "__main__":
    main()
