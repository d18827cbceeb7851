"""The scripts that created tapfm-pocket run on a few tiles: generate, pretrain, probe."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from command_line import run_script
from safetensors import safe_open

from tapfm.encoders.build import build_vit
from tapfm.encoders.catalog import find_encoder_card

TOOLS = Path(__file__).parents[1] / "tools"


def run_tool(tool, *arguments):
    result = subprocess.run(
        [sys.executable, str(TOOLS / tool), *map(str, arguments)], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.fixture(scope="module")
def generated(tmp_path_factory):
    folder = tmp_path_factory.mktemp("generated")
    run_tool("generate_synthetic_tiles.py", folder / "tiles", "--slides", 12, "--tiles", 10, "--minutes", 0)
    run_tool(
        "generate_synthetic_tiles.py",
        folder / "probe",
        "--probe",
        "--slides",
        12,
        "--tiles",
        10,
        "--difficulty",
        "easy",
    )
    return folder


def test_generated_tiles_have_the_format_that_the_other_scripts_read(generated):
    (shard,) = (generated / "tiles").glob("*.npy")
    tiles = np.load(shard)
    assert tiles.dtype == np.uint8
    assert tiles.shape[1:] == (224, 224, 3)
    with np.load(generated / "probe" / "test.npz") as part:
        assert len(part["tiles"]) == len(part["truth"]) == len(part["slide"])
        assert not part["truth"][part["label"] == 0].any()
        assert part["truth"][part["label"] == 1].any()


def test_pretraining_writes_weights_of_the_packaged_architecture(generated, tmp_path):
    out = tmp_path / "pocket.safetensors"
    output = run_tool(
        *("pretrain_pocket.py", "--method", "dino", "--tiles", generated / "tiles", "--limit", 8, "--batch", 8),
        *("--steps", 2, "--out", out),
    )
    assert "step 2" in output
    with safe_open(out, "pt") as file:
        shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
        assert file.metadata()["method"] == "dino"
    packaged = build_vit(find_encoder_card("tapfm-pocket")).state_dict()
    assert shapes == {name: tuple(tensor.shape) for name, tensor in packaged.items()}


def test_probe_prints_its_tables(generated):
    result = run_script(TOOLS / "probe_pocket.py", generated / "probe")
    assert result.returncode == 0, result.stderr
    for row in ("| colour statistics |", "| tapfm-pocket |", "| stain and size |", "| tapfm-pocket, oracle |"):
        assert row in result.stdout
