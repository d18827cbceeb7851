"""Built web pages of the viewer."""

from pathlib import Path

import pytest

from tapfm.errors import InputError
from tapfm.viewer import assets as assets_module
from tapfm.viewer.assets import _STATIC_FOLDER as STATIC_FOLDER
from tapfm.viewer.assets import read_assets

ROOT = Path(__file__).parents[2]


def test_missing_pages_raise_an_error_that_says_how_to_get_them(tmp_path, monkeypatch):
    (tmp_path / "viewer.js").write_text("incomplete")
    for checkout, hints in (
        (ROOT, ("make setup", str(ROOT))),
        (tmp_path, ("make setup", "pip install", "release wheel")),
    ):
        monkeypatch.setattr(assets_module, "_CHECKOUT", checkout)
        for folder in (tmp_path, tmp_path / "absent"):
            with pytest.raises(InputError, match="no web pages") as error:
                read_assets(folder)
            for each in ("Node.js 18 or newer", *hints):
                assert each in error.value.hint


def test_assets_have_media_types_and_an_etag_of_their_content(tmp_path):
    (tmp_path / "index.html").write_text("<!doctype html>")
    (tmp_path / "viewer.js").write_text("1")
    (tmp_path / "other.map").write_text("{}")
    before = read_assets(tmp_path)
    assert set(before) == {"index.html", "viewer.js"}
    assert before["viewer.js"].media_type.startswith("text/javascript")
    (tmp_path / "viewer.js").write_text("2")
    assert read_assets(tmp_path)["viewer.js"].etag != before["viewer.js"].etag


@pytest.mark.skipif(not (STATIC_FOLDER / "index.html").exists(), reason="the viewer's pages are not built: make setup")
def test_built_pages_are_complete_and_load_nothing_from_other_servers():
    assets = read_assets()
    assert {"index.html", "viewer.js", "style.css", "icon.svg", "openseadragon-licence.txt"} == set(assets)
    page = assets["index.html"].data.decode()
    for name in ("viewer.js", "style.css", "icon.svg"):
        assert f"assets/{name}" in page
    assert "http" not in page
    assert "http" not in assets["style.css"].data.decode()
    assert b"Copyright" in assets["openseadragon-licence.txt"].data
