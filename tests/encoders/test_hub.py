"""Loading weights from a fake Hugging Face Hub, which runs a local HTTP server."""

import hashlib
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from fake_hub import COMMIT, FakeHub
from safetensors.torch import save
from support import randomise, small_card

from tapfm.encoders.build import build_vit

# Runs in a separate process, because the client of the Hub reads its settings at import.
PROGRAM = """
import dataclasses, sys
sys.path.insert(0, {tests!r})
from support import small_card
from tapfm.encoders.weights import load_encoder
from tapfm.errors import TapfmError
changes = dict(repository=sys.argv[1], sha256=sys.argv[2] or None, revision=sys.argv[3] or None, gate="terms")
try:
    _, _, provenance = load_encoder(dataclasses.replace(small_card("h-optimus-1"), **changes))
except TapfmError as error:
    print(type(error).__name__, error)
else:
    print("loaded", provenance.published, provenance.file, provenance.as_json())
"""


@pytest.fixture
def weights():
    torch.manual_seed(0)
    vit = build_vit(small_card("h-optimus-1"))
    randomise(vit)
    return save(vit.state_dict())


@pytest.fixture
def hub(weights):
    with FakeHub(weights).serve() as hub:
        yield hub


def load_weights(hub, tmp_path, repository, sha256="0" * 64, revision=COMMIT, **more):
    program = PROGRAM.format(tests=str(Path(__file__).parents[1]))
    result = subprocess.run(
        [sys.executable, "-c", program, repository, sha256, revision],
        env=hub.environment(tmp_path, **more),
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_weights_are_downloaded_verified_and_cached(hub, weights, tmp_path):
    sha256 = hashlib.sha256(weights).hexdigest()
    assert load_weights(hub, tmp_path, "lab/open", sha256).startswith("loaded True")
    assert ("GET", f"/lab/open/resolve/{COMMIT}/model.safetensors") in hub.requests
    hub.requests.clear()
    assert load_weights(hub, tmp_path, "lab/open", sha256).startswith("loaded True")
    assert load_weights(hub, tmp_path, "lab/open", sha256, HF_HUB_OFFLINE="1").startswith("loaded True")
    assert hub.requests == [], "the cache must be used"


@pytest.mark.parametrize("revision", [COMMIT, ""])
def test_repository_and_revision_are_known_also_for_cached_weights(hub, tmp_path, revision):
    for more in ({}, {"HF_HUB_OFFLINE": "1"}):
        output = load_weights(hub, tmp_path, "lab/open", "", revision, **more)
        source = {"source": "hub", "repository": "lab/open", "revision": COMMIT, "file": "model.safetensors"}
        assert output.startswith("loaded None")
        assert output.strip().endswith(str(source))


def test_wrong_digest_is_an_error(hub, tmp_path):
    assert load_weights(hub, tmp_path, "lab/open", "0" * 64).startswith("WeightsDigestError")


@pytest.mark.parametrize("repository", ["lab/gated", "lab/hidden"])
def test_error_of_gated_model_names_page_and_login_command(hub, tmp_path, repository):
    """The Hub reports a private repository as missing to users without access."""
    output = load_weights(hub, tmp_path, repository)
    assert output.startswith("GatedWeightsError")
    assert f"https://huggingface.co/{repository}" in output
    assert "hf auth login" in output


def test_error_without_network_and_cache_names_download_command(hub, tmp_path):
    output = load_weights(hub, tmp_path, "lab/open", HF_HUB_OFFLINE="1")
    assert output.startswith("WeightsNotFoundError")
    assert f"hf download lab/open model.safetensors --revision {COMMIT}" in output


def test_command_line_reports_a_gated_encoder(hub, tmp_path):
    result = subprocess.run(
        [sys.executable, "-c", "from tapfm.cli.main import main; main()", "encoders", "uni", "--check"],
        env=hub.environment(tmp_path),
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 2
    assert "UNI is gated" in result.stderr
    assert "https://huggingface.co/MahmoodLab/UNI and wait for approval" in result.stderr
    assert "Traceback" not in result.stderr
