"""An exported encoder goes to a hub that speaks the protocol on this machine, or is refused with a reason."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hub_stand_in import TOKEN, Hub

from tapfm.encoders.catalog import encoder_card, encoder_cards
from tapfm.encoders.timm_folder import write_timm_folder
from tapfm.encoders.weights import load_encoder
from tapfm.errors import InputError
from tapfm.runs.hub import forbids_derivatives, push_folder

# In a process of its own: the hub's client reads its settings once, at import.
PUSH = """
import sys
from pathlib import Path
from tapfm.runs.hub import push_folder
from tapfm.encoders.catalog import encoder_card
from tapfm.errors import TapfmError
folder, repository, encoder, flags = sys.argv[1:]
try:
    print(push_folder(
        Path(folder), repository, card=encoder_card(encoder),
        despite_no_derivatives="despite" in flags, private="public" not in flags,
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
    with Hub().served() as hub:
        yield hub


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "out"
    encoder, card, _ = load_encoder("tapfm-pocket")
    write_timm_folder(encoder, card, folder)
    (folder / "README.md").write_text("---\nlicense: apache-2.0\n---\nAn adapted encoder.\n")
    (folder / ".tapfm-output").write_text("ours")
    (folder / ".model.safetensors.1234.unfinished").write_text("left by a killed run")
    return folder


def run(program, *arguments, hub, home, **more):
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
    return run(PUSH, folder, repository, encoder, flags, hub=hub, home=folder.parent, **more)


def test_what_arrives_is_what_lies_in_the_folder_and_timm_loads_it(hub, folder, tmp_path):
    assert push(hub, folder) == f"{hub.endpoint}/lab/pocket-fgfr3"
    assert hub.private == {"lab/pocket-fgfr3": True}
    names = ("README.md", "config.json", "model.safetensors")
    assert hub.pushed["lab/pocket-fgfr3"] == {name: (folder / name).read_bytes() for name in names}
    run(LOAD, "lab/pocket-fgfr3", tmp_path / "loaded.pt", hub=hub, home=tmp_path)
    loaded, expected = torch.load(tmp_path / "loaded.pt"), load_encoder("tapfm-pocket").encoder.vit.state_dict()
    assert loaded.keys() == expected.keys()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in expected.items())


def test_pushing_again_replaces_what_is_there(hub, folder):
    push(hub, folder)
    (folder / "README.md").write_text("Better described.\n")
    push(hub, folder)
    assert hub.pushed["lab/pocket-fgfr3"]["README.md"] == b"Better described.\n"


def test_a_public_repository_takes_only_what_is_meant_to_be_public(hub, folder):
    push(hub, folder, flags="public")
    assert hub.private == {"lab/pocket-fgfr3": False}
    hub.pushed["lab/pocket-fgfr3"].clear()
    answer = push(hub, folder)
    assert answer.startswith("InputError 2")
    assert "exists and is public" in answer
    assert hub.pushed["lab/pocket-fgfr3"] == {}


def test_a_no_derivatives_licence_needs_the_flag(hub, folder):
    answer = push(hub, folder, encoder="uni2-h")
    assert answer.startswith("InputError 2")
    assert "UNI2-h (CC-BY-NC-ND-4.0)" in answer
    assert "--despite-no-derivatives" in answer
    assert hub.asked == []
    assert push(hub, folder, encoder="uni2-h", flags="despite").startswith("http")
    assert "config.json" in hub.pushed["lab/pocket-fgfr3"]


@pytest.mark.parametrize(
    ("repository", "token", "said"),
    [
        ("other/uni", TOKEN, "does not let you write to other/uni"),
        ("lab/uni", "hf_bad", "does not know the token"),
        ("lab/uni", "", "Nobody is logged in"),
    ],
)
def test_without_the_right_to_write_it_says_how_to_log_in(hub, folder, repository, token, said):
    answer = push(hub, folder, repository, HF_TOKEN=token)
    assert answer.startswith("InputError 2")
    assert said in answer
    assert "hf auth login" in answer
    assert hub.pushed == {}


@pytest.mark.parametrize("without", [{"HF_ENDPOINT": "http://127.0.0.1:9"}, {"HF_HUB_OFFLINE": "1"}], ids=str)
def test_without_network_it_says_so(hub, folder, without):
    answer = push(hub, folder, **without)
    assert answer.startswith("InputError 2 lab/pocket-fgfr3 could not be pushed")
    assert "Is there network?" in answer


@pytest.mark.parametrize(
    "repository", ["", "name", "a/b/c", "/name", "owner/", "own er/name", "-a/b", "a/b.git", "a--b/c", "a/b..c", "ü/b"]
)
def test_a_name_that_is_no_repositorys_is_refused_first(repository):
    with pytest.raises(InputError, match=r"is not the name of a repository .*\n.*owner/name"):
        push_folder(Path("nowhere"), repository, card=encoder_card("uni"), despite_no_derivatives=False)


def test_a_folder_that_is_no_exported_encoder_is_refused(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(InputError, match=r"no model.safetensors.*\n.*tapfm export"):
        push_folder(tmp_path, "lab/uni", card=encoder_card("tapfm-pocket"), despite_no_derivatives=False)


def test_licences_that_forbid_derivatives_are_told_from_others():
    forbidding = {card.licence for card in encoder_cards().values() if forbids_derivatives(card.licence)}
    assert forbidding == {
        "CC-BY-NC-ND-4.0",
        "MIT (hub card) or CC-BY-NC-ND-4.0 (code repository): the two disagree",
    }
    assert forbids_derivatives("cc-by-nd-4.0")
    assert forbids_derivatives("Lab licence, no derivatives")
    assert not forbids_derivatives("Standard, and friendly")
