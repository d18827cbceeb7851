"""Inference creates no training objects: no optimiser, no augmentation, no training progress."""

import pytest
from command_line import tapfm

from tapfm.adaptation.learner import Learner
from tapfm.adaptation.optimisers import AdamW
from tapfm.adaptation.two_graph import AdaptationSettings
from tapfm.runs.run_progress import EpochSums, RunProgress
from tapfm.tiles.augment import Augmentation, AugmentedTiles

TRAINING_CLASSES = (Learner, AdamW, AdaptationSettings, Augmentation, AugmentedTiles, RunProgress, EpochSums)


@pytest.fixture(scope="module")
def trained(workspace):
    assert tapfm("train", workspace / "run.toml", "--out", workspace / "runs" / "trained").returncode == 0
    return workspace / "runs" / "trained"


@pytest.mark.parametrize("command", ["evaluate", "predict", "embed"])
def test_inference_creates_no_training_objects(trained, workspace, tmp_path, monkeypatch, command):
    for each in TRAINING_CLASSES:
        monkeypatch.setattr(
            each, "__init__", lambda self, *_, **__: pytest.fail(f"a {type(self).__name__} was created")
        )
    options = ("--tiles", workspace / "tiles", "--out", tmp_path / "out", "--workers", 0, "--device", "cpu")
    arguments = {
        "evaluate": (trained, "--cohort", workspace / "cohort.csv", "--allow-overlap"),
        "predict": (workspace / "cohort.csv", "--model", trained),
        "embed": (workspace / "cohort.csv", "--encoder", "tapfm-pocket"),
    }
    result = tapfm(command, *arguments[command], *options)
    assert result.returncode == 0, result.output
