"""Inference creates nothing of training: no optimiser, no augmentation, no training progress."""

import pytest
from command_line import tapfm

from tapfm.adaptation.learner import Learner
from tapfm.adaptation.optimisers import AdamW
from tapfm.adaptation.two_graph import AdaptationSettings
from tapfm.runs.progress import EpochSums, RunProgress
from tapfm.tiles.augment import Augmentation, AugmentedTiles

OF_TRAINING = (Learner, AdamW, AdaptationSettings, Augmentation, AugmentedTiles, RunProgress, EpochSums)


@pytest.fixture(scope="module")
def trained(lab):
    assert tapfm("train", lab / "run.toml", "--out", lab / "runs" / "trained").returncode == 0
    return lab / "runs" / "trained"


@pytest.mark.parametrize("command", ["evaluate", "predict", "embed"])
def test_no_object_of_training_is_created(trained, lab, tmp_path, monkeypatch, command):
    for each in OF_TRAINING:
        monkeypatch.setattr(each, "__init__", lambda self, *_, **__: pytest.fail(f"a {type(self).__name__} was made"))
    here = ("--tiles", lab / "tiles", "--out", tmp_path / "out", "--workers", 0, "--device", "cpu")
    arguments = {
        "evaluate": (trained, "--cohort", lab / "cohort.csv", "--allow-overlap"),
        "predict": (lab / "cohort.csv", "--model", trained),
        "embed": (lab / "cohort.csv", "--encoder", "tapfm-pocket"),
    }
    result = tapfm(command, *arguments[command], *here)
    assert result.returncode == 0, result.said
