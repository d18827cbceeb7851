"""Make the pictures of docs/tutorials/first-hour.md from what `tapfm demo` wrote.

    python tools/make_demo_images.py demo --out docs/images

The report and the viewer are photographed in Chromium, which has to be in PATH.
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
VIEW = [sys.executable, "-c", "from tapfm.cli.main import main; main()", "view"]


def save(picture: Image.Image, path: Path, width_px: int = WIDTH_PX) -> None:
    """Save a picture small enough for a page."""
    height_px = round(picture.height * width_px / picture.width)
    small = picture.convert("RGB").resize((width_px, height_px), Image.Resampling.LANCZOS)
    if path.suffix == ".png":  # letters and lines: few colours
        small = small.quantize(128)
    small.save(path, quality=82, optimize=True)
    print(f"{path}: {small.width} x {small.height} px, {path.stat().st_size // 1000} kB")


def picture_slides(demo: Path, out: Path) -> None:
    """Take the upper part of the contact sheet."""
    with Image.open(demo / "synthetic" / "contact-sheet.jpg") as sheet:
        save(sheet.crop((0, 0, sheet.width, min(sheet.height, round(sheet.width * 0.45)))), out / "demo-slides.jpg")


def picture_tiles(demo: Path, out: Path, slide_id: str) -> None:
    """Take the overlay of a slide."""
    with Image.open(demo / "tiles" / "overlays" / f"{slide_id}.png") as overlay:
        save(overlay, out / "demo-tiles.jpg", 800)


def photograph(browser: Browser, address: str, ready: str, height_px: int, *, dark: bool) -> Image.Image:
    """Take a picture of a page as it comes up."""
    window = ViewportSize(width=1280, height=height_px)
    context = browser.new_context(viewport=window, color_scheme="dark" if dark else "light")
    page = context.new_page()
    page.goto(address)
    page.wait_for_selector(ready)
    page.wait_for_load_state("networkidle")
    taken = page.screenshot()
    context.close()
    return Image.open(io.BytesIO(taken))


def main() -> None:
    """Make them all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("demo", type=Path)
    parser.add_argument("--out", type=Path, default=Path("docs/images"))
    parser.add_argument("--slide", default="S003", help="the slide whose tiles are shown")
    parser.add_argument("--dark", action="store_true", help="the pages as they look in the dark")
    arguments = parser.parse_args()
    demo, out = arguments.demo, arguments.out
    picture_slides(demo, out)
    picture_tiles(demo, out, arguments.slide)
    with Image.open(demo / "attention-check.png") as planted:
        save(planted, out / "demo-attention-check.jpg", min(1600, planted.width))
    found = shutil.which("chromium") or shutil.which("google-chrome")
    if found is None:
        sys.exit("Chromium is not in PATH (Debian: apt-get install chromium)")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=found, args=["--no-sandbox"])
        report = (demo / "report.html").absolute().as_uri()
        save(photograph(browser, report, "table", 1480, dark=arguments.dark), out / "demo-report.png", 1280)
        server = subprocess.Popen(
            [*VIEW, str(demo / "predictions" / "external"), "--port", "0", "--no-browser"],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert server.stdout is not None
        try:
            address = re.findall(r"http://\S+", server.stdout.readline())[0]
            save(photograph(browser, address, "canvas", 900, dark=arguments.dark), out / "demo-viewer.jpg")
        finally:
            server.terminate()
            browser.close()


if __name__ == "__main__":
    main()
