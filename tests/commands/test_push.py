"""Pushing an exported encoder to a fake Hugging Face Hub, and errors of pushing."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from fake_hub import TOKEN, FakeHub

from tapfm.encoders.catalog import find_encoder_card, load_encoder_cards
from tapfm.encoders.timm_folder import write_timm_folder
from tapfm.encoders.weights import load_encoder
from tapfm.errors import InputError
from tapfm.runs.hub import forbids_derivatives, push_folder

# Runs in a separate process, because the client of the Hub reads its settings at import.
PUSH = """
import sys
from pathlib import Path
from tapfm.runs.hub import push_folder
from tapfm.encoders.catalog import find_encoder_card
from tapfm.errors import TapfmError
folder, repository, encoder, flags = sys.argv[1:]
try:
    print(push_folder(
        Path(folder), repository, card=find_encoder_card(encoder),
        owner_permission="permission" in flags, private="public" not in flags,
    ))
except TapfmError as error:
    print(type(error).__name__, error.exit_code, error)
"""

LOAD = """
import sys, timm, torch
model = timm.create_model(f"hf-hub:{sys.argv[1]}", pretrained=True).eval()
torch.save(model.state_dict(), sys.argv[2])
"""


@pytest.fixture
def hub():
    with FakeHub().serve() as hub:
        yield hub


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "out"
    encoder, card, _ = load_encoder("tapfm-pocket")
    write_timm_folder(encoder, card, folder)
    (folder / "README.md").write_text("---\nlicense: apache-2.0\n---\nAn adapted encoder.\n")
    (folder / ".tapfm-output").write_text("created by tapfm")
    (folder / ".model.safetensors.1234.unfinished").write_text("left by a killed process")
    return folder


def run_python(program, *arguments, hub, home, **more):
    result = subprocess.run(
        [sys.executable, "-c", program, *map(str, arguments)],
        env=hub.environment(home, **({"HF_TOKEN": TOKEN} | more)),
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


def push(hub, folder, repository="lab/pocket-fgfr3", *, encoder="tapfm-pocket", flags="", **more):
    return run_python(PUSH, folder, repository, encoder, flags, hub=hub, home=folder.parent, **more)


def test_pushed_files_are_those_of_the_folder_and_timm_loads_them(hub, folder, tmp_path):
    assert push(hub, folder) == f"{hub.endpoint}/lab/pocket-fgfr3"
    assert hub.private == {"lab/pocket-fgfr3": True}
    names = ("README.md", "config.json", "model.safetensors")
    assert hub.pushed["lab/pocket-fgfr3"] == {name: (folder / name).read_bytes() for name in names}
    run_python(LOAD, "lab/pocket-fgfr3", tmp_path / "loaded.pt", hub=hub, home=tmp_path)
    loaded, expected = torch.load(tmp_path / "loaded.pt"), load_encoder("tapfm-pocket").encoder.vit.state_dict()
    assert loaded.keys() == expected.keys()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in expected.items())


def test_pushing_again_replaces_files(hub, folder):
    push(hub, folder)
    (folder / "README.md").write_text("A better description.\n")
    push(hub, folder)
    assert hub.pushed["lab/pocket-fgfr3"]["README.md"] == b"A better description.\n"


def test_private_push_to_a_public_repository_is_an_error(hub, folder):
    push(hub, folder, flags="public")
    assert hub.private == {"lab/pocket-fgfr3": False}
    hub.pushed["lab/pocket-fgfr3"].clear()
    output = push(hub, folder)
    assert output.startswith("InputError 2")
    assert "exists and is public" in output
    assert hub.pushed["lab/pocket-fgfr3"] == {}


def test_no_derivatives_licence_needs_the_option(hub, folder):
    output = push(hub, folder, encoder="uni2-h")
    assert output.startswith("InputError 2")
    assert "UNI2-h (CC-BY-NC-ND-4.0)" in output
    assert "--owner-permission" in output
    assert hub.requests == []
    assert push(hub, folder, encoder="uni2-h", flags="permission").startswith("http")
    assert "config.json" in hub.pushed["lab/pocket-fgfr3"]


@pytest.mark.parametrize(
    ("repository", "token", "message"),
    [
        ("other/uni", TOKEN, "no write access to other/uni"),
        ("lab/uni", "hf_bad", "rejected the token"),
        ("lab/uni", "", "No user is logged in"),
    ],
)
def test_error_without_write_access_says_how_to_log_in(hub, folder, repository, token, message):
    output = push(hub, folder, repository, HF_TOKEN=token)
    assert output.startswith("InputError 2")
    assert message in output
    assert "hf auth login" in output
    assert hub.pushed == {}


@pytest.mark.parametrize("environment", [{"HF_ENDPOINT": "http://127.0.0.1:9"}, {"HF_HUB_OFFLINE": "1"}], ids=str)
def test_push_without_network_is_an_error(hub, folder, environment):
    output = push(hub, folder, **environment)
    assert output.startswith("InputError 2 The model could not be pushed to lab/pocket-fgfr3")
    assert "Check the network connection" in output


@pytest.mark.parametrize(
    "repository", ["", "name", "a/b/c", "/name", "owner/", "own er/name", "-a/b", "a/b.git", "a--b/c", "a/b..c", "ü/b"]
)
def test_invalid_repository_name_is_an_error(repository):
    with pytest.raises(InputError, match=r"is not a valid repository name.*\n.*owner/name"):
        push_folder(Path("missing"), repository, card=find_encoder_card("uni"), owner_permission=False)


def test_folder_without_an_exported_encoder_is_an_error(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(InputError, match=r"no model.safetensors.*\n.*tapfm export"):
        push_folder(tmp_path, "lab/uni", card=find_encoder_card("tapfm-pocket"), owner_permission=False)


def test_licences_that_forbid_derivatives():
    forbidding = {card.licence for card in load_encoder_cards().values() if forbids_derivatives(card.licence)}
    assert forbidding == {
        "CC-BY-NC-ND-4.0",
        "MIT (hub card) or CC-BY-NC-ND-4.0 (code repository): the two disagree",
    }
    assert forbids_derivatives("cc-by-nd-4.0")
    assert forbids_derivatives("Lab licence, no derivatives")
    assert not forbids_derivatives("Standard, and friendly")
