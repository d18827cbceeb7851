"""A folder as a user has it before training: slides, a table, tiles, features and RUN.toml; all of it small."""

import csv
import json
import shutil

import numpy as np
import pytest
import torch
from cohort_files import rows_of
from command_line import tapfm
from slide_files import section, write_slide
from training_slides import TIMED

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


def slide_id(number):
    return f"case-{number:02}"


def tile_set(number):
    return TileSet(slide_id(number), POSITIONS, 224, 224, 0.5, 0.5, 0, (448, 448), fingerprint="tiles", summary={})


def make_lab(folder):
    """Slides of four tiles; the last two are of one patient, and two have no label of TP53."""
    folder.mkdir(exist_ok=True)
    lines = ["slide_id,path,patient_id,split,FGFR3,TP53"]
    for i, split in enumerate(SPLITS):
        write_slide(folder / f"{i}.svs", section(448, 448, seed=i, tissue=(0, 0, 1, 1)), tile_px=224, downsamples=(1,))
        write_tiles(folder / "tiles", tile_set(i), "trident")
        lines.append(f"{slide_id(i)},{i}.svs,Doe{min(i, 8)},{split},{i % 2},{'' if i in (2, 8) else i // 2 % 2}")
    (folder / "cohort.csv").write_text("\n".join(lines) + "\n")
    (folder / "run.toml").write_text(CONFIGURATION)
    return folder


@pytest.fixture(scope="module")
def one_thread():
    """Of so small an encoder, threads only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def lab(tmp_path_factory, one_thread):  # noqa: ARG001 - for the whole module
    folder = make_lab(tmp_path_factory.mktemp("lab"))
    embedded = tapfm(
        *("embed", folder / "cohort.csv", "--encoder", "tapfm-pocket", "--device", "cpu"),
        *("--tiles", folder / "tiles", "--out", folder / "features", "--workers", 0),
    )
    assert embedded.returncode == 0, embedded.said
    return folder


@pytest.fixture(scope="module")
def train(lab):
    """Train with some settings changed; gives the folder of the run."""

    def run(name, *changes):
        options = [part for change in changes for part in ("--set", change)]
        result = tapfm("train", lab / "run.toml", "--out", lab / "runs" / name, *options)
        assert result.returncode in (0, 130), result.said
        return lab / "runs" / name

    return run


def history_of(run):
    return [json.loads(line) for line in (run / "history.jsonl").read_text().splitlines()]


def untimed(run):
    return [{name: value for name, value in row.items() if name not in TIMED} for row in history_of(run)]


def weights_of(run):
    tensors, _ = load_checkpoint(run / "checkpoints" / "last.safetensors")
    return tensors


def same_weights(a, b):
    first, second = weights_of(a), weights_of(b)
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


@pytest.fixture
def own_lab(lab, tmp_path):
    """A copy of the lab whose files may be changed, and a run in it."""
    for path in lab.iterdir():
        if path.name != "runs":
            (shutil.copytree if path.is_dir() else shutil.copy2)(path, tmp_path / path.name)
    return tmp_path


def edit(table, change):
    rows = rows_of(table)
    change(rows)
    with table.open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)


def train_in(folder, *options, out="run"):
    return tapfm("train", folder / "run.toml", "--out", folder / out, *options)
