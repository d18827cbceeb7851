"""`tapfm view` on the command line."""

import json
import signal
import urllib.request

import pytest
from command_line import start_tapfm, tapfm
from viewer_fixtures import write_two_predictions

from tapfm.viewer.assets import _STATIC_FOLDER as STATIC_FOLDER
from tapfm.workflows.view import _has_desktop

needs_built_pages = pytest.mark.skipif(
    not (STATIC_FOLDER / "index.html").exists(), reason="the viewer's pages are not built: make setup"
)


@pytest.fixture(scope="module")
def prediction_folder(tmp_path_factory):
    return write_two_predictions(tmp_path_factory.mktemp("view"))


@needs_built_pages
@pytest.mark.parametrize(("stop_signal", "exit_code"), [(signal.SIGINT, 0), (signal.SIGTERM, 143)])
def test_view_prints_an_address_serves_the_slides_and_stops_on_signals(prediction_folder, stop_signal, exit_code):
    process = start_tapfm("view", prediction_folder, "--port", "0", "--no-browser")
    try:
        address = process.stdout.readline().strip()
        with urllib.request.urlopen(f"{address}api/collection", timeout=60) as response:
            assert [slide["slide_id"] for slide in json.load(response)["slides"]] == ["case-1", "case-2"]
        process.send_signal(stop_signal)
        _, stderr = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == exit_code
    assert "2 slides" in stderr
    assert "Ctrl-C" in stderr
    assert "Traceback" not in stderr
    assert len(stderr.splitlines()) == 1


@needs_built_pages
def test_a_public_host_prints_a_token_and_a_warning(prediction_folder):
    process = start_tapfm("view", prediction_folder, "--port", "0", "--host", "0.0.0.0", "--no-browser")
    try:
        address = process.stdout.readline().strip()
        port, _, token = address.rpartition(":")[2].partition("/?token=")
        with pytest.raises(urllib.request.HTTPError, match="401"):
            urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=60)
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/?token={token}", timeout=60) as response:
            assert response.status == 200
        process.send_signal(signal.SIGINT)
        _, stderr = process.communicate(timeout=60)
    finally:
        process.kill()
    assert "not encrypted" in stderr


@needs_built_pages
def test_a_missing_source_exits_with_2(tmp_path):
    result = tapfm("view", tmp_path / "absent")
    assert result.returncode == 2
    assert "absent" in result.stderr


def test_without_built_pages_the_error_explains_how_to_build_them(prediction_folder, monkeypatch, tmp_path):
    from command_line import tapfm

    monkeypatch.setattr("tapfm.viewer.assets.read_assets.__defaults__", (tmp_path,))
    result = tapfm("view", prediction_folder)
    assert result.returncode == 2
    assert "make setup" in result.output


def test_the_browser_is_not_opened_over_ssh_or_without_a_display(monkeypatch):
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
