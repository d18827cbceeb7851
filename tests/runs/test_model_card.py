"""The model card of an export names the weights that the run really started from."""

import json
import re
import shutil

import h5py
import numpy as np
import pytest
import yaml
from command_line import tapfm
from safetensors.torch import load_file, save_file
from training_workspace import POSITIONS, SPLITS, case_id, run_train

from tapfm.encoders.catalog import find_encoder_card
from tapfm.runs.base_weights import read_base_weights
from tapfm.runtime.files import file_sha256

CARD = find_encoder_card("tapfm-pocket")
PUBLISHED_ROW = "| published weights of tapfm-pocket | yes, the same SHA-256 |"


def export(run, out):
    """Return the header and the text of the model card, and tapfm.json."""
    result = tapfm("export", run, "--out", out)
    assert result.returncode == 0, result.output
    text = (out / "README.md").read_text()
    return yaml.safe_load(text.split("---")[1]), text, json.loads((out / "tapfm.json").read_text())


@pytest.fixture(scope="module")
def own_weights(tmp_path_factory):
    """A weights file with the architecture of the packaged encoder, and other values."""
    file = tmp_path_factory.mktemp("private folder") / "mine.safetensors"
    weights = load_file(CARD.package_folder / CARD.file)
    save_file({name: tensor * 1.01 for name, tensor in weights.items()}, file)
    return file


def test_packaged_weights_are_named_with_their_digest(train, tmp_path):
    header, text, metadata = export(train("packaged"), tmp_path / "out")
    assert (header["license"], "base_model" in header) == ("apache-2.0", False)  # it is not on the hub
    assert "# tapfm-pocket, adapted to FGFR3\n" in text
    assert "| source | the file that comes with tapfm |" in text
    assert f"| SHA-256 | {CARD.sha256} |" in text
    assert PUBLISHED_ROW in text
    source = {"source": "package", "repository": None, "revision": None, "file": CARD.file}
    assert metadata["encoder"]["base_weights"] == source


@pytest.mark.parametrize("scope", ["full", "last:1"])
def test_local_weights_are_not_presented_as_the_published_encoder(train, own_weights, tmp_path, scope):
    run = train(f"own {scope}", f"encoder.weights={own_weights}", f"adaptation.scope={scope}")
    header, text, metadata = export(run, tmp_path / "out")
    assert (header["license"], "base_model" in header) == ("unknown", False)
    assert "# tapfm-pocket architecture with other weights, adapted to FGFR3\n" in text
    assert "The tapfm-pocket architecture (not its published weights) was adapted" in text
    assert "| source | a local file |" in text
    assert "| file | mine.safetensors |" in text
    assert f"| SHA-256 | {file_sha256(own_weights)} |" in text
    assert f"| published weights of tapfm-pocket | no, the published file has {CARD.sha256} |" in text
    assert "The weights of this model are others." in text
    assert metadata["encoder"]["base_weights"]["file"] == "mine.safetensors"
    assert json.loads((tmp_path / "out" / "config.json").read_text())["pretrained_cfg"]["license"] == "unknown"
    exported = b"".join(path.read_bytes() for path in (tmp_path / "out").iterdir() if path.is_file())
    assert str(own_weights.parent).encode() not in exported
    assert b"private folder" not in exported


def test_local_copy_of_the_published_file_counts_as_published(train, tmp_path):
    copy = shutil.copy(CARD.package_folder / CARD.file, tmp_path / "copy.safetensors")
    header, text, _ = export(train("copy", f"encoder.weights={copy}"), tmp_path / "out")
    assert header["license"] == "apache-2.0"
    assert "| file | copy.safetensors |" in text
    assert PUBLISHED_ROW in text


def test_run_of_an_older_version_has_no_source_in_its_card(train, tmp_path):
    run = shutil.copytree(train("old", "adaptation.scope=last:1"), tmp_path / "old")
    (environment,) = json.loads((run / "environment.json").read_text())
    del environment["weights"]
    (run / "environment.json").write_text(json.dumps([environment]))
    _, text, metadata = export(run, tmp_path / "out")
    assert "| source | not recorded by the version of tapfm that started the run |" in text
    assert PUBLISHED_ROW in text  # its SHA-256 was recorded
    assert metadata["encoder"]["base_weights"] is None


def test_features_of_tapfm_have_the_digest_of_their_weights(train, tmp_path):
    _, text, _ = export(train("fixed", "adaptation.method=fixed", "aggregator.name=mean"), tmp_path / "out")
    assert "The encoder is the published tapfm-pocket." in text
    assert "| source | features that tapfm embed computed |" in text
    assert PUBLISHED_ROW in text


def test_features_of_other_weights_are_not_those_of_the_published_encoder(workspace_copy, own_weights):
    shutil.rmtree(workspace_copy / "features")
    embedded = tapfm(
        *("embed", workspace_copy / "cohort.csv", "--encoder", "tapfm-pocket", "--weights", own_weights),
        *("--tiles", workspace_copy / "tiles", "--out", workspace_copy / "features", "--workers", 0, "--device", "cpu"),
    )
    assert embedded.returncode == 0, embedded.output
    trained = run_train(workspace_copy, "--set", "adaptation.method=fixed", "--set", "aggregator.name=mean")
    assert trained.returncode == 0, trained.output
    header, text, _ = export(workspace_copy / "run", workspace_copy / "out")
    assert header["license"] == "unknown"
    assert "The features are those of the tapfm-pocket architecture; not its published weights." in text
    assert f"| SHA-256 | {file_sha256(own_weights)} |" in text


def test_features_of_another_tool_are_named_as_recorded(workspace_copy):
    shutil.rmtree(workspace_copy / "features")
    (workspace_copy / "features").mkdir()
    rng = np.random.default_rng(0)
    for number in range(len(SPLITS)):  # as TRIDENT writes them
        with h5py.File(workspace_copy / "features" / f"{case_id(number)}.h5", "w") as file:
            features = file.create_dataset("features", data=rng.normal(size=(4, 128)).astype(np.float32))
            features.attrs["encoder"] = "conch_v15"
            file.create_dataset("coords", data=POSITIONS).attrs["patch_size_level0"] = 224
    trained = run_train(workspace_copy, "--set", "adaptation.method=fixed", "--set", "aggregator.name=mean")
    assert trained.returncode == 0, trained.output
    header, text, _ = export(workspace_copy / "run", workspace_copy / "out")
    assert (header["license"], "base_model" in header) == ("unknown", False)
    assert "# Aggregator of features of another tool (TRIDENT, conch_v15) for FGFR3" in text
    assert "| source | features of another tool: TRIDENT, conch_v15 |" in text
    assert "| published weights of tapfm-pocket | unknown, because the SHA-256 was not recorded |" in text
    assert not re.search("The encoder is the published", text)


@pytest.mark.parametrize(
    ("recorded", "digest", "published"),
    [
        ({"weights": {"source": "hub", "repository": "lab/x", "revision": "r1", "file": "f"}}, "a" * 64, True),
        ({"weights": {"source": "local", "file": "f"}}, "a" * 64, None),
        ({}, None, None),
    ],
)
def test_weights_without_a_published_digest_are_those_of_the_hub_or_unknown(recorded, digest, published):
    card = find_encoder_card("timm:vit_tiny_patch16_224")
    weights = read_base_weights(recorded, digest, card, adapted=True)
    assert weights.are_published is published
    texts = list(weights.describe().values())
    assert texts[-1].startswith("yes" if published else "unknown")
    assert (texts[0] == "Hugging Face Hub: lab/x, revision r1") is bool(published)
