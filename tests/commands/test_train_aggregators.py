"""`tapfm train` with different aggregators, and aggregators that do not support the configuration."""

import subprocess
import sys

import h5py
import numpy as np
import pytest
import torch
from cohort_files import read_rows
from command_line import tapfm
from training_workspace import SPLITS, case_id, read_history, run_train

from tapfm.aggregators.catalog import AGGREGATORS, build_aggregator
from tapfm.config.loading import load_config
from tapfm.encoders.catalog import find_encoder_card
from tapfm.runs.saved_model import _infer_feature_size as infer_feature_size
from tapfm.runs.saved_model import load_run

FINETUNE, FIXED = "adaptation.method=finetune", "adaptation.method=fixed"
ATTENTION_AGGREGATORS = ("cls-gated", "cls-attention")


def settings(*changes):
    return [part for change in changes for part in ("--set", change)]


def train_error(workspace, *changes):
    """Return the error message of an invalid configuration. The run folder must not be created."""
    result = tapfm("train", workspace / "run.toml", "--out", workspace / "runs" / "invalid", *settings(*changes))
    assert result.returncode == 2, result.output
    assert not (workspace / "runs" / "invalid").exists()
    return " ".join(result.output.split())


def test_finetuning_with_dsmil(train, workspace):
    run = train("dsmil", FINETUNE, "aggregator.name=dsmil", "schedule.epochs=2")
    assert len(read_history(run)) == 2
    assert read_history(run)[0]["norm_g_r"] == 0
    assert len({row["slide_id"] for row in read_rows(run / "predictions-test.csv")}) == 4
    assert load_run(run).metadata["aggregator"]["options"] == AGGREGATORS["dsmil"].complete_options({})
    assert tapfm("export", run, "--out", workspace / "out-dsmil").returncode == 0


def test_cls_gated_starts_with_the_same_loss_as_cls_attention(train):
    no_training = ("optimiser.encoder_lr=0", "optimiser.aggregator_lr=0")
    gated, plain = (
        read_history(train(name, f"aggregator.name={name}", *no_training))[0] for name in ATTENTION_AGGREGATORS
    )
    for name in ("loss_agg", "val_loss"):
        assert gated[name] == plain[name]
    for name in ("loss_attention", "norm_g_z", "norm_g_r", "norm_encoder"):
        assert gated[name] == pytest.approx(plain[name], rel=1e-4)
        assert gated[name] != 0


def test_cls_gated_trains_its_gate(train):
    run = train("gate", "aggregator.name=cls-gated")
    assert load_run(run).model.aggregator.gates.score.weight.norm() > 0


def test_method_fixed_with_transmil(train, workspace):
    pytest.importorskip("torchmil")
    small = ("aggregator.options.att_dim=16", "aggregator.options.n_landmarks=4")
    run = train("transmil", FIXED, "aggregator.name=torchmil:TransMIL", *small)
    assert load_run(run).metadata["aggregator"]["feature_size"] == find_encoder_card("tapfm-pocket").feature_size
    assert tapfm("export", run, "--out", workspace / "out-transmil").returncode == 0


@pytest.mark.parametrize("method", [FIXED, FINETUNE])
def test_graph_aggregator_uses_tile_coordinates(train, workspace, method):
    pytest.importorskip("torchmil")
    run = train(f"gcn-{method[-5:]}", method, "aggregator.name=torchmil:PatchGCN")
    assert read_history(run)[0]["loss_agg"] > 0
    assert tapfm("export", run, "--out", workspace / f"out-{method[-5:]}").returncode == 0


def test_graph_aggregator_needs_features_with_coordinates(workspace_copy):
    pytest.importorskip("torchmil")
    (workspace_copy / "theirs").mkdir()
    for i in range(len(SPLITS)):
        with h5py.File(workspace_copy / "theirs" / f"{case_id(i)}.h5", "w") as file:
            file["feats"] = np.ones((5, 12), np.float16)
    result = run_train(
        workspace_copy,
        *settings(FIXED, f"tiles.features={workspace_copy / 'theirs'}", "aggregator.name=torchmil:PatchGCN"),
    )
    assert result.returncode == 2
    output = " ".join(result.output.split())
    assert f"{case_id(0)}.h5 (STAMP)" in output
    assert "coordinates" in output


@pytest.mark.parametrize("name", [name for name, card in AGGREGATORS.items() if not card.uses_raw_attention])
def test_method_tapfm_rejects_aggregators_without_attention(workspace, name):
    message = train_error(workspace, f"aggregator.name={name}")
    assert f"'{name}' does not use the encoder's attention" in message
    assert "use cls-attention or cls-gated" in message


def test_unsupported_torchmil_options_are_configuration_problems(workspace):
    name = "aggregator.name=torchmil:TransMIL"
    assert "does not use the encoder's attention" in train_error(workspace, name)
    message = train_error(workspace, name, FINETUNE, 'task.targets=["FGFR3", "TP53"]', "head.layer_norm=true")
    assert "task.targets: torchmil:TransMIL" in message
    assert "head.layer_norm: torchmil:TransMIL has its own head" in message
    assert "no torchmil model named 'Transmill'" in train_error(
        workspace, "aggregator.name=torchmil:Transmill", FINETUNE
    )
    message = train_error(workspace, name, FINETUNE, "aggregator.options.att_dm=3")
    assert "aggregator.options.att_dm: There is no option of the aggregator torchmil:TransMIL" in message


def test_torchmil_configuration_is_checked_without_importing_torch(workspace):
    code = (
        "import sys; from pathlib import Path; from tapfm.config.loading import load_config;"
        f"load_config(Path({str(workspace / 'run.toml')!r}), ['aggregator.name=torchmil:TransMIL', '{FINETUNE}']);"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("size", [8, 16, 512])
@pytest.mark.parametrize(
    "name",
    [*AGGREGATORS, *(f"torchmil:{model}" for model in ("TransMIL", "GTP", "PatchGCN", "DeepGraphSurv", "DSMIL"))],
)
def test_feature_size_is_read_from_the_checkpoint(workspace, name, size):
    """Also if the feature size equals that of an inner layer, so that the model has no input projection."""
    if name.startswith("torchmil:"):
        pytest.importorskip("torchmil")
    config = load_config(workspace / "run.toml", [FIXED, f"aggregator.name={name}"])
    aggregator = build_aggregator(name, size, 1, options=config.aggregator.options)
    tensors = {f"aggregator/{key}": each.detach() for key, each in aggregator.named_parameters()}
    assert infer_feature_size(tensors | {"moments/aggregator/x": torch.zeros(3, 7)}, config) == size
