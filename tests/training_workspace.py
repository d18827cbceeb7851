"""A small folder with everything that training needs: slides, cohort table, tiles, features and RUN.toml."""

import csv
import json
import shutil

import numpy as np
import pytest
import torch
from cohort_files import read_rows
from command_line import tapfm
from slide_files import section, write_slide
from training_slides import TIMING_COLUMNS

from tapfm.runs.checkpoint import load_checkpoint
from tapfm.tiles.store import TileSet, write_tiles

SPLITS = ["train"] * 4 + ["val"] * 2 + ["test"] * 4
POSITIONS = np.array([[0, 0], [224, 0], [0, 224], [224, 224]])
CONFIGURATION = """
[cohort]
table = "cohort.csv"
[tiles]
folder = "tiles"
features = "features"
[encoder]
name = "tapfm-pocket"
[task]
targets = ["FGFR3"]
[adaptation]
tiles_per_slide = 4
[schedule]
epochs = 1
[optimiser]
encoder_lr = 1e-3
aggregator_lr = 1e-2
[selection]
validation_tiles = 4
[machine]
workers = 0
device = "cpu"
"""


def case_id(number):
    return f"case-{number:02}"


def make_tile_set(number):
    return TileSet(case_id(number), POSITIONS, 224, 224, 0.5, 0.5, 0, (448, 448), fingerprint="tiles", summary={})


def create_workspace(folder):
    """Write slides with four tiles each. The last two have the same patient, and two have no TP53 label."""
    folder.mkdir(exist_ok=True)
    lines = ["slide_id,path,patient_id,split,FGFR3,TP53"]
    for i, split in enumerate(SPLITS):
        write_slide(folder / f"{i}.svs", section(448, 448, seed=i, tissue=(0, 0, 1, 1)), tile_px=224, downsamples=(1,))
        write_tiles(folder / "tiles", make_tile_set(i), "trident")
        lines.append(
            f"{case_id(i)},{i}.svs,Doe{min(i, 8)},{split},{int(i % 2 or i == 8)},{'' if i in (2, 8) else i // 2 % 2}"
        )
    (folder / "cohort.csv").write_text("\n".join(lines) + "\n")
    (folder / "run.toml").write_text(CONFIGURATION)
    return folder


@pytest.fixture(scope="module")
def one_thread():
    """Use one thread, here and in child processes: with such a small encoder, more threads only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def workspace(tmp_path_factory, one_thread):  # noqa: ARG001 - for the whole module
    folder = create_workspace(tmp_path_factory.mktemp("workspace"))
    embedded = tapfm(
        *("embed", folder / "cohort.csv", "--encoder", "tapfm-pocket", "--device", "cpu"),
        *("--tiles", folder / "tiles", "--out", folder / "features", "--workers", 0),
    )
    assert embedded.returncode == 0, embedded.output
    return folder


@pytest.fixture(scope="module")
def train(workspace):
    """Return a function that trains with some settings changed and returns the run folder."""

    def run(name, *changes):
        options = [part for change in changes for part in ("--set", change)]
        result = tapfm("train", workspace / "run.toml", "--out", workspace / "runs" / name, *options)
        assert result.returncode in (0, 130), result.output
        return workspace / "runs" / name

    return run


def read_history(run):
    return [json.loads(line) for line in (run / "history.jsonl").read_text().splitlines()]


def history_without_times(run):
    return [{name: value for name, value in row.items() if name not in TIMING_COLUMNS} for row in read_history(run)]


def load_weights(run):
    tensors, _ = load_checkpoint(run / "checkpoints" / "last.safetensors")
    return tensors


def have_same_weights(a, b):
    first, second = load_weights(a), load_weights(b)
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


@pytest.fixture
def workspace_copy(workspace, tmp_path):
    """A copy of the workspace whose files a test may change."""
    for path in workspace.iterdir():
        if path.name != "runs":
            (shutil.copytree if path.is_dir() else shutil.copy2)(path, tmp_path / path.name)
    return tmp_path


def edit_csv(table, change):
    rows = read_rows(table)
    change(rows)
    with table.open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)


def run_train(folder, *options, out="run"):
    return tapfm("train", folder / "run.toml", "--out", folder / out, *options)
