"""The built pages."""

import pytest

from tapfm.errors import InputError
from tapfm.viewer.assets import _FOLDER as FOLDER
from tapfm.viewer.assets import read_assets


def test_without_pages_it_is_told_how_to_build_them(tmp_path):
    (tmp_path / "viewer.js").write_text("half of it")
    for folder in (tmp_path, tmp_path / "absent"):
        with pytest.raises(InputError, match="not built") as told:
            read_assets(folder)
        assert "make setup" in told.value.hint


def test_pages_know_their_kind_and_change_their_tag(tmp_path):
    (tmp_path / "index.html").write_text("<!doctype html>")
    (tmp_path / "viewer.js").write_text("1")
    (tmp_path / "other.map").write_text("{}")
    before = read_assets(tmp_path)
    assert set(before) == {"index.html", "viewer.js"}
    assert before["viewer.js"].media_type.startswith("text/javascript")
    (tmp_path / "viewer.js").write_text("2")
    assert read_assets(tmp_path)["viewer.js"].etag != before["viewer.js"].etag


@pytest.mark.skipif(not (FOLDER / "index.html").exists(), reason="the viewer's pages are not built: make setup")
def test_the_built_pages_are_whole_and_ask_nobody_else():
    assets = read_assets()
    assert {"index.html", "viewer.js", "style.css", "icon.svg", "openseadragon-licence.txt"} == set(assets)
    page = assets["index.html"].data.decode()
    for name in ("viewer.js", "style.css", "icon.svg"):
        assert f"assets/{name}" in page
    assert "http" not in page
    assert "http" not in assets["style.css"].data.decode()
    assert b"Copyright" in assets["openseadragon-licence.txt"].data
