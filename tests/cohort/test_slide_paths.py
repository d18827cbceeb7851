"""Read the paths of slides as Linux, macOS and Windows write them."""

from pathlib import Path

import pytest

from tapfm.cohort.slide_paths import file_name_of, parse_slide_path


@pytest.mark.parametrize(
    ("text", "path"),
    [
        ("slides/a.svs", "slides/a.svs"),
        ("/data/slides/a.svs", "/data/slides/a.svs"),
        ("slides\\a.svs", "slides/a.svs"),
        (".\\slides\\deep/a.svs", "slides/deep/a.svs"),
        ("..\\slides\\a.svs", "../slides/a.svs"),
        ("C:\\My Slides\\a.svs", "C:/My Slides/a.svs"),
        ("C:/slides/a.svs", "C:/slides/a.svs"),
        ("\\\\server\\share\\a.svs", "//server/share/a.svs"),
        ('"C:\\slides\\a.svs"', "C:/slides/a.svs"),
        ("a.b.svs", "a.b.svs"),
    ],
)
def test_paths_of_all_systems(text, path):
    assert parse_slide_path(text) == Path(path)
    assert file_name_of(text) == Path(path).name
    assert parse_slide_path(text).name == file_name_of(text)


def test_relative_windows_path_is_found_below_the_folder(tmp_path):
    (tmp_path / "slides").mkdir()
    (tmp_path / "slides" / "a.svs").touch()
    assert (tmp_path / parse_slide_path("slides\\a.svs", tmp_path)).exists()


def test_existing_name_with_a_backslash_is_found(tmp_path):
    (tmp_path / "slides\\a.svs").touch()
    assert (tmp_path / parse_slide_path("slides\\a.svs", tmp_path)).exists()
    assert parse_slide_path("slides\\b.svs", tmp_path) == Path("slides/b.svs")


@pytest.mark.parametrize("text", ["\\" * 300 + "a" * 300, "a\\b\0.svs"])
def test_text_that_cannot_be_a_path(text, tmp_path):
    assert parse_slide_path(text, tmp_path).name == file_name_of(text)


@pytest.mark.parametrize(("text", "name"), [("slides/", "slides"), ("slides\\", "slides"), ("", ""), ('"', '"')])
def test_last_part(text, name):
    assert file_name_of(text) == name
