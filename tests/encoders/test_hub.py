"""Loading from the hub, against a stand-in that speaks its protocol on this machine."""

import hashlib
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hub_stand_in import COMMIT, Hub
from safetensors.torch import save
from support import randomise, small_card

from tapfm.encoders.build import build_vit

# What a user's program would do, in a process of its own: the hub's client reads its settings once, at import.
PROGRAM = """
import dataclasses, sys
sys.path.insert(0, {tests!r})
from support import small_card
from tapfm.encoders.weights import load_encoder
from tapfm.errors import TapfmError
changes = dict(repository=sys.argv[1], sha256=sys.argv[2], revision={commit!r}, gate="terms")
try:
    _, _, provenance = load_encoder(dataclasses.replace(small_card("h-optimus-1"), **changes))
except TapfmError as error:
    print(type(error).__name__, error)
else:
    print("loaded", provenance.published, provenance.file)
"""


@pytest.fixture
def weights():
    torch.manual_seed(0)
    vit = build_vit(small_card("h-optimus-1"))
    randomise(vit)
    return save(vit.state_dict())


@pytest.fixture
def hub(weights):
    with Hub(weights).served() as hub:
        yield hub


def load(hub, tmp_path, repository, sha256="", **more):
    program = PROGRAM.format(tests=str(Path(__file__).parents[1]), commit=COMMIT)
    result = subprocess.run(
        [sys.executable, "-c", program, repository, sha256],
        env=hub.environment(tmp_path, **more),
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_weights_are_fetched_verified_and_found_again_offline(hub, weights, tmp_path):
    sha256 = hashlib.sha256(weights).hexdigest()
    assert load(hub, tmp_path, "lab/open", sha256).startswith("loaded True")
    assert ("GET", f"/lab/open/resolve/{COMMIT}/model.safetensors") in hub.asked
    hub.asked.clear()
    assert load(hub, tmp_path, "lab/open", sha256).startswith("loaded True")
    assert load(hub, tmp_path, "lab/open", sha256, HF_HUB_OFFLINE="1").startswith("loaded True")
    assert hub.asked == [], "the cache comes first"


def test_a_file_with_another_digest_is_refused(hub, tmp_path):
    assert load(hub, tmp_path, "lab/open", "0" * 64).startswith("WeightsDigestError")


@pytest.mark.parametrize("repository", ["lab/gated", "lab/hidden"])
def test_a_gated_model_says_which_page_to_open_and_how_to_log_in(hub, tmp_path, repository):
    """Of a hidden one the hub tells strangers that it does not exist."""
    answer = load(hub, tmp_path, repository)
    assert answer.startswith("GatedWeightsError")
    assert f"https://huggingface.co/{repository}" in answer
    assert "hf auth login" in answer


def test_without_network_and_cache_it_says_how_to_bring_the_weights(hub, tmp_path):
    answer = load(hub, tmp_path, "lab/open", HF_HUB_OFFLINE="1")
    assert answer.startswith("WeightsNotFoundError")
    assert f"hf download lab/open model.safetensors --revision {COMMIT}" in answer


def test_the_command_line_reports_a_gated_encoder(hub, tmp_path):
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
