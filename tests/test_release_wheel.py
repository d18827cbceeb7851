"""The release wheel contains the pages of `tapfm view`; other builds say in one line that they do not."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import build_wheel
import pytest

ROOT = Path(__file__).parents[1]
PAGES = {
    "index.html": '<link href="assets/style.css"><script src="assets/viewer.js"></script><a href="https://x.org">x</a>',
    "style.css": "a {}",
    "viewer.js": "1",
    "openseadragon-licence.txt": "Copyright",
}


def write_wheel(path, pages):
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("tapfm/__init__.py", "")
        for name, text in pages.items():
            archive.writestr(f"tapfm/viewer/static/{name}", text)
    return path


def test_files_that_the_page_loads_must_be_in_the_wheel(tmp_path):
    assert build_wheel.find_missing_pages(write_wheel(tmp_path / "all.whl", PAGES)) == []
    without_pages = write_wheel(tmp_path / "none.whl", {})
    assert build_wheel.find_missing_pages(without_pages) == ["index.html", "openseadragon-licence.txt"]
    for name in PAGES:
        if name != "index.html":
            others = {other: text for other, text in PAGES.items() if other != name}
            assert build_wheel.find_missing_pages(write_wheel(tmp_path / f"no-{name}.whl", others)) == [name]
    assert build_wheel.find_missing_pages(write_wheel(tmp_path / "e.whl", PAGES | {"viewer.js": ""})) == ["viewer.js"]


@pytest.fixture
def checkout(tmp_path):
    """A copy of what a build needs, without the pages, with a virtual environment that make regards as ready."""
    folder = tmp_path / "checkout"
    shutil.copytree(ROOT / "src", folder / "src", ignore=shutil.ignore_patterns("__pycache__", "static"))
    for name in ("pyproject.toml", "constraints.txt", "hatch_build.py", "Makefile", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    shutil.copytree(ROOT / "tools", folder / "tools", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(ROOT / "frontend" / "src", folder / "frontend" / "src")
    for name in ("build.mjs", "package.json", "package-lock.json"):
        shutil.copy(ROOT / "frontend" / name, folder / "frontend")
    (folder / ".venv" / "bin").mkdir(parents=True)
    (folder / ".venv" / "bin" / "python").write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    (folder / ".venv" / "bin" / "python").chmod(0o755)
    (folder / ".venv" / ".ready").touch()
    return folder


def write_pages(checkout):
    static = checkout / "src" / "tapfm" / "viewer" / "static"
    static.mkdir()
    for name, text in PAGES.items():
        (static / name).write_text(text)


def run(checkout, *command):
    # pip cannot download hatchling in a test; "false" is how pip spells --no-build-isolation in a variable
    environment = os.environ | {"PIP_NO_BUILD_ISOLATION": "false", "PIP_NO_INDEX": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.run(
        command, cwd=checkout, env=environment, capture_output=True, text=True, check=False, timeout=300
    )


@pytest.fixture
def path_without_npm(tmp_path, monkeypatch):
    """A PATH with only the programs that the Makefile needs."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in ("make", "sh", "env", "grep", "sed", "expand", "touch", "echo"):
        (folder / name).symlink_to(shutil.which(name))
    monkeypatch.setenv("PATH", str(folder))


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
@pytest.mark.usefixtures("path_without_npm")
@pytest.mark.parametrize("pages", ["missing", "outdated"])
def test_make_wheel_without_npm_fails_and_says_what_to_install(checkout, pages):
    if pages == "outdated":
        write_pages(checkout)
        os.utime(checkout / "src" / "tapfm" / "viewer" / "static" / "index.html", (0, 0))
    result = run(checkout, "make", "wheel")
    assert result.returncode == 2
    assert "npm was not found" in result.stdout
    assert "install Node.js 18 or newer" in result.stdout
    assert not (checkout / "dist").exists()


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
@pytest.mark.usefixtures("path_without_npm")
def test_make_wheel_writes_a_wheel_with_the_pages(checkout):
    pytest.importorskip("hatchling", reason="hatchling is not installed: make setup")
    write_pages(checkout)
    result = run(checkout, "make", "wheel", "DIST=out")
    assert result.returncode == 0, result.stdout + result.stderr
    (wheel,) = (checkout / "out").glob("*.whl")
    assert build_wheel.find_missing_pages(wheel) == []


def test_wheel_is_checked_even_if_the_pages_were_built(checkout):
    """The check must notice a packaging mistake: here, the pages are not included."""
    pytest.importorskip("hatchling", reason="hatchling is not installed: make setup")
    write_pages(checkout)
    (checkout / ".gitignore").write_text("src/tapfm/viewer/static/\n")
    settings = checkout / "pyproject.toml"
    text = settings.read_text()
    assert text.count('artifacts = ["src/tapfm/viewer/static/*"]') == 1
    settings.write_text(text.replace('artifacts = ["src/tapfm/viewer/static/*"]', "artifacts = []"))
    result = run(checkout, sys.executable, "tools/build_wheel.py", "--out", "out")
    assert result.returncode == 2
    assert "index.html" in result.stderr
    assert not (checkout / "out").exists()


def test_pip_builds_a_package_without_pages_and_prints_one_line_about_them(checkout):
    pytest.importorskip("hatchling", reason="hatchling is not installed: make setup")
    build = (sys.executable, "-m", "pip", "wheel", "--no-deps", "--wheel-dir", "out", ".")
    result = run(checkout, *build, "--verbose")
    assert result.returncode == 0, result.stderr
    lines = [line for line in (result.stdout + result.stderr).splitlines() if "tapfm view" in line]
    assert len(lines) == 1
    assert "Node.js 18 or newer" in lines[0]
    (wheel,) = (checkout / "out").glob("*.whl")
    assert build_wheel.find_missing_pages(wheel) != []
    write_pages(checkout)
    assert "tapfm view" not in run(checkout, *build, "--verbose").stdout
