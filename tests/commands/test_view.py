"""`tapfm view` as a user types it."""

import json
import signal
import urllib.request

import pytest
from command_line import start, tapfm
from viewed_slides import two_predictions

from tapfm.viewer.assets import _FOLDER as FOLDER
from tapfm.workflows.view import _has_desktop

needs_pages = pytest.mark.skipif(
    not (FOLDER / "index.html").exists(), reason="the viewer's pages are not built: make setup"
)


@pytest.fixture(scope="module")
def predicted(tmp_path_factory):
    return two_predictions(tmp_path_factory.mktemp("view"))


@needs_pages
@pytest.mark.parametrize(("with_signal", "code"), [(signal.SIGINT, 0), (signal.SIGTERM, 143)])
def test_it_prints_an_address_answers_there_and_ends_quietly(predicted, with_signal, code):
    process = start("view", predicted, "--port", "0", "--no-browser")
    try:
        address = process.stdout.readline().strip()
        with urllib.request.urlopen(f"{address}api/collection", timeout=60) as answer:
            assert [slide["slide_id"] for slide in json.load(answer)["slides"]] == ["case-1", "case-2"]
        process.send_signal(with_signal)
        _, said = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == code
    assert said == "2 slides. Press Ctrl-C to stop. Open:\n"


@needs_pages
def test_open_to_others_it_prints_a_token_and_a_warning(predicted):
    process = start("view", predicted, "--port", "0", "--host", "0.0.0.0", "--no-browser")
    try:
        address = process.stdout.readline().strip()
        port, _, token = address.rpartition(":")[2].partition("/?token=")
        with pytest.raises(urllib.request.HTTPError, match="401"):
            urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=60)
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/?token={token}", timeout=60) as answer:
            assert answer.status == 200
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=60)
    finally:
        process.kill()
    assert "not encrypted" in said


@needs_pages
def test_what_cannot_be_shown_ends_with_2(tmp_path):
    result = tapfm("view", tmp_path / "absent")
    assert result.returncode == 2
    assert "There is no file" in result.stderr


def test_without_pages_it_says_how_to_build_them(predicted, monkeypatch, tmp_path):
    from command_line import tapfm

    monkeypatch.setattr("tapfm.viewer.assets.read_assets.__defaults__", (tmp_path,))
    result = tapfm("view", predicted)
    assert result.returncode == 2
    assert "make setup" in result.said


def test_a_browser_is_not_opened_at_the_far_end_of_a_connection(monkeypatch):
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    monkeypatch.setattr("sys.platform", "linux")
    monkeypatch.delenv("SSH_CONNECTION", raising=False)
    monkeypatch.delenv("WAYLAND_DISPLAY", raising=False)
    monkeypatch.setenv("DISPLAY", ":0")
    assert _has_desktop()
    monkeypatch.setenv("SSH_CONNECTION", "10.0.0.1 22")
    assert not _has_desktop()
    monkeypatch.delenv("SSH_CONNECTION")
    monkeypatch.delenv("DISPLAY")
    assert not _has_desktop()
