"""Every aggregator through `tapfm train`: what is refused before anything is read, and runs of some of them."""

import subprocess
import sys

import h5py
import numpy as np
import pytest
import torch
from cohort_files import rows_of
from command_line import tapfm
from training_lab import SPLITS, history_of, slide_id, train_in

from tapfm.aggregators.catalog import AGGREGATORS, build_aggregator
from tapfm.config.loading import load_config
from tapfm.encoders.catalog import encoder_card
from tapfm.runs.saved_model import _feature_size_of as feature_size_of
from tapfm.runs.saved_model import load_run

FINETUNE, FIXED = "adaptation.method=finetune", "adaptation.method=fixed"
GIVEN_ATTENTION = ("cls-gated", "cls-attention")


def settings(*changes):
    return [part for change in changes for part in ("--set", change)]


def refused(lab, *changes):
    """Give what is said of a configuration that cannot be; all of it is found before anything is read."""
    result = tapfm("train", lab / "run.toml", "--out", lab / "runs" / "refused", *settings(*changes))
    assert result.returncode == 2, result.said
    assert not (lab / "runs" / "refused").exists()
    return " ".join(result.said.split())


def test_finetuning_with_dsmil(train, lab):
    run = train("dsmil", FINETUNE, "aggregator.name=dsmil", "schedule.epochs=2")
    assert len(history_of(run)) == 2
    assert history_of(run)[0]["norm_g_r"] == 0
    assert len({row["slide_id"] for row in rows_of(run / "predictions-test.csv")}) == 4
    assert load_run(run).description["aggregator"]["options"] == AGGREGATORS["dsmil"].settings({})
    assert tapfm("export", run, "--out", lab / "out-dsmil").returncode == 0


def test_tapfm_with_cls_gated_begins_where_cls_attention_does(train):
    still = ("optimiser.encoder_lr=0", "optimiser.aggregator_lr=0")
    gated, plain = (history_of(train(name, f"aggregator.name={name}", *still))[0] for name in GIVEN_ATTENTION)
    for name in ("loss_agg", "val_loss"):
        assert gated[name] == plain[name]
    for name in ("loss_attention", "norm_g_z", "norm_g_r", "norm_encoder"):
        assert gated[name] == pytest.approx(plain[name], rel=1e-4)
        assert gated[name] != 0


def test_tapfm_with_cls_gated_learns_its_gate(train):
    run = train("gate", "aggregator.name=cls-gated")
    assert load_run(run).model.aggregator.gates.score.weight.norm() > 0


def test_a_fixed_run_of_transmil(train, lab):
    pytest.importorskip("torchmil")
    small = ("aggregator.options.att_dim=16", "aggregator.options.n_landmarks=4")
    run = train("transmil", FIXED, "aggregator.name=torchmil:TransMIL", *small)
    assert load_run(run).description["aggregator"]["feature_size"] == encoder_card("tapfm-pocket").feature_size
    assert tapfm("export", run, "--out", lab / "out-transmil").returncode == 0


@pytest.mark.parametrize("method", [FIXED, FINETUNE])
def test_a_graph_is_made_of_where_the_tiles_are(train, lab, method):
    pytest.importorskip("torchmil")
    run = train(f"gcn-{method[-5:]}", method, "aggregator.name=torchmil:PatchGCN")
    assert history_of(run)[0]["loss_agg"] > 0
    assert tapfm("export", run, "--out", lab / f"out-{method[-5:]}").returncode == 0


def test_a_graph_of_features_without_positions_is_refused(own_lab):
    pytest.importorskip("torchmil")
    (own_lab / "theirs").mkdir()
    for i in range(len(SPLITS)):
        with h5py.File(own_lab / "theirs" / f"{slide_id(i)}.h5", "w") as file:
            file["feats"] = np.ones((5, 12), np.float16)
    result = train_in(
        own_lab, *settings(FIXED, f"tiles.features={own_lab / 'theirs'}", "aggregator.name=torchmil:PatchGCN")
    )
    assert result.returncode == 2
    assert "(STAMP) does not say where its tiles are" in " ".join(result.said.split())


@pytest.mark.parametrize("name", [name for name, card in AGGREGATORS.items() if not card.uses_attention])
def test_tapfm_is_refused_without_the_attention_and_those_that_use_it_are_named(lab, name):
    said = refused(lab, f"aggregator.name={name}")
    assert f"'{name}' does not use the encoder's attention, so method tapfm would be finetune" in said
    assert "use cls-attention or cls-gated" in said


def test_what_torchmil_cannot_do_is_told_with_the_configuration(lab):
    name = "aggregator.name=torchmil:TransMIL"
    assert "does not use the encoder's attention" in refused(lab, name)
    said = refused(lab, name, FINETUNE, 'task.targets=["FGFR3", "TP53"]', "head.layer_norm=true")
    assert "task.targets: torchmil:TransMIL has one logit, and there are 2 targets." in said
    assert "head.layer_norm: torchmil:TransMIL has a head of its own" in said
    assert "no model of torchmil named 'Transmill'" in refused(lab, "aggregator.name=torchmil:Transmill", FINETUNE)
    said = refused(lab, name, FINETUNE, "aggregator.options.att_dm=3")
    assert "aggregator.options.att_dm: There is no option of the aggregator torchmil:TransMIL" in said


def test_a_configuration_with_torchmil_is_checked_without_torch(lab):
    code = (
        "import sys; from pathlib import Path; from tapfm.config.loading import load_config;"
        f"load_config(Path({str(lab / 'run.toml')!r}), ['aggregator.name=torchmil:TransMIL', '{FINETUNE}']);"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("size", [8, 16, 512])
@pytest.mark.parametrize(
    "name",
    [*AGGREGATORS, *(f"torchmil:{model}" for model in ("TransMIL", "GTP", "PatchGCN", "DeepGraphSurv", "DSMIL"))],
)
def test_the_size_of_the_features_is_found_in_a_checkpoint(lab, name, size):
    """Also where it is that of a layer inside, and the model leaves out what would turn one into the other."""
    if name.startswith("torchmil:"):
        pytest.importorskip("torchmil")
    config = load_config(lab / "run.toml", [FIXED, f"aggregator.name={name}"])
    aggregator = build_aggregator(name, size, 1, options=config.aggregator.options)
    tensors = {f"aggregator/{key}": each.detach() for key, each in aggregator.named_parameters()}
    assert feature_size_of(tensors | {"moments/aggregator/x": torch.zeros(3, 7)}, config) == size
