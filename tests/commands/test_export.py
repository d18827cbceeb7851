"""`tapfm export`: timm and tapfm load the best model of a run; no code and no patient ids in the files."""

import dataclasses
import json
import os
import re
import shutil
import signal
import struct
import subprocess
import sys
import threading
from types import SimpleNamespace

import numpy as np
import pytest
import timm
import torch
import yaml
from cohort_files import read_rows
from command_line import tapfm
from fake_hub import TOKEN, FakeHub
from safetensors.torch import load_file, save_file
from support import relative_difference
from training_workspace import POSITIONS, SPLITS, case_id, make_tile_set

from tapfm.adaptation import from_config
from tapfm.aggregators.catalog import AGGREGATORS
from tapfm.contracts import EncodedTiles
from tapfm.encoders.catalog import find_encoder_card, load_encoder_cards
from tapfm.encoders.features import SlideFeatures, read_features, write_features
from tapfm.encoders.weights import load_encoder
from tapfm.errors import CheckpointError, RunError, WeightsDigestError, WeightsMismatchError
from tapfm.runs import export as export_model
from tapfm.runs import saved_model
from tapfm.runs.checkpoint import load_checkpoint, save_checkpoint
from tapfm.runs.folder import RunFolder
from tapfm.runs.model_card import format_model_card
from tapfm.runs.saved_model import load_export, load_run
from tapfm.slides.opening import open_slide

ADAPTED = ["full", "lora:4", "last:1", "several"]
FIXED = [f"fixed {name}" for name in AGGREGATORS]


@pytest.fixture(scope="module")
def runs(train):
    trained = {scope: train(scope, f"adaptation.scope={scope}") for scope in ("lora:4", "last:1")}
    trained["full"] = train("full", "schedule.epochs=2")
    trained["several"] = train("several", 'task.targets=["FGFR3", "TP53"]', "selection.unit=patient")
    for name in AGGREGATORS:
        trained[f"fixed {name}"] = train(f"fixed {name}", "adaptation.method=fixed", f"aggregator.name={name}")
    return trained


@pytest.fixture(scope="module")
def exported(workspace, runs):
    for name, run in runs.items():
        result = tapfm("export", run, "--out", workspace / "exported" / name)
        assert result.returncode == 0, result.output
    return workspace / "exported"


@pytest.fixture(scope="module")
def tiles(workspace):
    """Return all tiles of a test slide."""
    slide = open_slide(workspace / "7.svs")
    pixels = np.stack([slide.read(x, y, 224, 224) for x, y in POSITIONS.tolist()])
    return torch.from_numpy(pixels.transpose(0, 3, 1, 2).copy())


def read_stored_features(workspace):
    features = read_features(workspace / "features" / f"{case_id(7)}.h5")
    return EncodedTiles(torch.from_numpy(features.features), torch.from_numpy(features.attention))


def predict_logits(saved, tiles):
    return export_model._predict_logits(saved.model, tiles, None)


def copy_run(run, to, old, new):
    """Copy a run and replace a text in its config.toml."""
    shutil.copytree(run, to)
    text = (to / "config.toml").read_text()
    assert text.count(old) == 1
    (to / "config.toml").write_text(text.replace(old, new))
    return to


def read_files(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir() if not path.name.startswith(".")}


@pytest.mark.parametrize("name", [*ADAPTED, *FIXED])
def test_run_and_export_give_the_logits_in_the_prediction_table(runs, exported, workspace, tiles, name):
    rows = [row for row in read_rows(runs[name] / "predictions-test.csv") if row["slide_id"] == case_id(7)]
    targets = ["FGFR3", "TP53"] if name == "several" else ["FGFR3"]
    assert [row["target"] for row in rows] == targets
    predicted = torch.tensor([float(row["logit"]) for row in rows])
    run, export = load_run(runs[name]), load_export(exported / name)
    ours = (
        run.model.aggregator_for()(*read_stored_features(workspace)).logits_C
        if name in FIXED
        else predict_logits(run, tiles)
    )
    torch.testing.assert_close(ours, predicted, rtol=0, atol=1e-5)
    torch.testing.assert_close(predict_logits(export, tiles), ours, rtol=0, atol=1e-5)
    assert tuple(export.model.task.target_kinds) == tuple(targets)
    assert export.model.task.weights == run.model.task.weights


@pytest.mark.parametrize("name", ADAPTED)
def test_timm_gives_the_features_of_the_best_model(runs, exported, tiles, name):
    model = timm.create_model(f"local-dir:{exported / name}", pretrained=True).eval()
    data_config = timm.data.resolve_model_data_config(model)
    mean, std = (torch.tensor(data_config[key]).view(1, 3, 1, 1) for key in ("mean", "std"))
    with torch.no_grad():
        features = model((tiles / 255 - mean) / std)
        adapted = load_run(runs[name]).model.encoder(tiles).z_KD
        published = load_encoder("tapfm-pocket").encoder.eval()(tiles).z_KD
    assert relative_difference(features, adapted) < 1e-5
    assert relative_difference(features, published) > 1e-3, "this test needs a trained encoder"


def test_adapters_are_merged_into_the_weights(exported):
    names = {path.name: load_file(path / "model.safetensors").keys() for path in exported.glob("l*")}
    assert names["lora:4"] == names["last:1"] == load_encoder("tapfm-pocket").encoder.vit.state_dict().keys()


@pytest.mark.parametrize("name", [*ADAPTED, *FIXED])
def test_export_contains_only_tensors_and_json(exported, name):
    encoder = [] if name in FIXED else ["config.json", "model.safetensors"]
    found = read_files(exported / name)
    assert sorted(found) == sorted(["README.md", "aggregator.safetensors", "tapfm.json", *encoder])
    for file, data in found.items():
        if file.endswith(".safetensors"):
            (length,) = struct.unpack("<Q", data[:8])
            header = json.loads(data[8 : 8 + length])
            header.pop("__metadata__")
            assert {each["dtype"] for each in header.values()} == {"F32"}
            assert 8 + length + max(each["data_offsets"][1] for each in header.values()) == len(data)
        elif file.endswith(".json"):
            json.loads(data)


@pytest.mark.parametrize("name", [*ADAPTED, *FIXED])
def test_export_contains_no_slide_ids_patient_ids_or_paths(exported, workspace, name):
    content = b"".join(read_files(exported / name).values())
    for row in read_rows(workspace / "cohort.csv"):
        assert row["slide_id"].encode() not in content
        assert row["patient_id"].encode() not in content
    assert str(workspace).encode() not in content


def test_description_contains_training_settings(exported):
    metadata = json.loads((exported / "several" / "tapfm.json").read_text())
    assert metadata["targets"] == ["FGFR3", "TP53"]
    card = find_encoder_card("tapfm-pocket")
    published = {"base_weights_sha256": card.sha256, "features_source": None}
    weights = {"source": "package", "repository": None, "revision": None, "file": card.file}
    assert metadata["encoder"] == {"name": "tapfm-pocket", "adapted": True, "base_weights": weights} | published
    assert metadata["aggregator"] | {"name": "cls-attention", "feature_size": 128} == metadata["aggregator"]
    labels = {"FGFR3": {"positive": 2, "labelled": 4}, "TP53": {"positive": 1, "labelled": 3}}
    assert metadata["training_labels"] == labels
    settings = {"method": "tapfm", "scope": "full", "recipe": "paper", "seed": 0, "epoch": 1}
    assert metadata | settings == metadata
    assert json.loads((exported / "lora:4" / "tapfm.json").read_text())["scope"] == "lora:4"
    fixed = json.loads((exported / "fixed abmil" / "tapfm.json").read_text())
    assert fixed["encoder"] == {"name": "tapfm-pocket", "adapted": False, "base_weights": None} | published
    assert json.loads((exported / "several" / "config.json").read_text())["tapfm"]["targets"] == ["FGFR3", "TP53"]


def test_description_contains_the_best_epoch(runs, exported):
    _, best = load_checkpoint(runs["full"] / "checkpoints" / "best.safetensors")
    assert json.loads((exported / "full" / "tapfm.json").read_text())["epoch"] == best["epoch"]
    assert f"epoch {best['epoch']}." in (exported / "full" / "README.md").read_text()


def test_model_card_counts_slides_patients_and_labels(exported):
    card = (exported / "several" / "README.md").read_text()
    assert "# tapfm-pocket, adapted to FGFR3, TP53" in card
    for line in (
        *("train | 4 | 4 | 2 of 4 (50%) | 1 of 3 (33%)", "val | 2 | 2 | 1 of 2 (50%) | 0 of 2 (0%)"),
        "test | 3 | 4 | 3 of 4 (75%) | 2 of 3 (67%)",
    ):
        assert f"| {line} |" in card
    assert "Aggregator of tapfm-pocket features for FGFR3" in (exported / "fixed mean" / "README.md").read_text()


def test_metrics_of_model_card_match_the_predictions(runs, exported):
    rows = read_rows(runs["full"] / "predictions-test.csv")
    positive, negative = ([float(row["logit"]) for row in rows if row["label"] == label] for label in "10")
    expected = np.mean([(p > n) + (p == n) / 2 for p in positive for n in negative])
    assert f"| test | FGFR3 | {expected:.3f} | 4 slides |" in (exported / "full" / "README.md").read_text()
    several = (exported / "several" / "README.md").read_text()
    assert re.search(r"\| test \| FGFR3 \| [01]\.\d{3} \| 3 patients \|", several)
    assert "| val | TP53 | - <sup>1</sup> | 2 patients |" in several
    assert "<sup>1</sup> no positive patient among 2" in several
    assert "The epoch was selected on val" in several


def test_code_of_model_card_loads_the_encoder(exported, runs):
    folder = exported / "lora:4"
    (program,) = re.findall(r"```python\n(.*?)```", (folder / "README.md").read_text(), re.DOTALL)
    variables = {}
    exec(program.replace("FOLDER", str(folder)), variables)
    weights = load_run(runs["lora:4"]).model.encoder.vit.state_dict()
    torch.testing.assert_close(dict(variables["encoder"].state_dict()), dict(weights))


def test_code_of_model_card_imports_what_it_needs(runs, monkeypatch):
    saved = dataclasses.replace(load_run(runs["full"]), card=find_encoder_card("phikon"))
    text = format_model_card(saved, RunFolder(runs["full"]), {})
    (program,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    monkeypatch.setattr(timm, "create_model", lambda *_, **arguments: SimpleNamespace(eval=lambda: arguments))
    variables = {}
    exec(program, variables)
    assert variables["encoder"]["norm_layer"](8).eps == 1e-12


def test_model_card_metadata_is_valid_for_every_encoder(runs):
    saved, run_folder = load_run(runs["full"]), RunFolder(runs["full"])
    licences = {}
    for key, card in load_encoder_cards().items():
        encoder = saved.metadata["encoder"] | {"base_weights_sha256": card.sha256 or "0" * 64}
        if not card.packaged and card.repository:
            encoder["base_weights"] = {"source": "hub", "repository": card.repository}
        with_card = dataclasses.replace(saved, card=card, metadata=saved.metadata | {"encoder": encoder})
        text = format_model_card(with_card, run_folder, {})
        metadata = yaml.safe_load(text.split("---")[1])
        assert card.licence in text.split("## Licence")[1]
        assert metadata.get("base_model", "") == card.repository
        assert (metadata["license"] == "other") == ("license_name" in metadata)
        assert re.fullmatch(r"[a-z0-9.]+(-[a-z0-9.]+)*", metadata.get("license_name", "none"))
        licences[key] = metadata["license"]
    assert (licences["tapfm-pocket"], licences["uni"], licences["phikon"]) == ("apache-2.0", "cc-by-nc-nd-4.0", "other")


def test_exporting_again_replaces_all_files(runs, tmp_path, tiles):
    out = tmp_path / "out [1]"
    for name, *force in (("full",), ("full",), ("fixed mean", "--force"), ("lora:4", "--force")):
        result = tapfm("export", runs[name], "--out", out, *force)
        assert result.returncode == 0, result.output
        assert f"Exported to {out}: " in result.output
        assert (out / "model.safetensors").exists() == (out / "config.json").exists() == (name != "fixed mean")
    assert torch.equal(predict_logits(load_export(out), tiles), predict_logits(load_run(runs["lora:4"]), tiles))


def test_interrupted_export_cannot_be_loaded_and_can_be_repeated(runs, tmp_path, monkeypatch):
    def interrupt(*_, **__):
        raise KeyboardInterrupt

    tapfm("export", runs["last:1"], "--out", tmp_path / "over")
    for name, function in (("first", "save_checkpoint"), ("over", "save_checkpoint"), ("over", "format_model_card")):
        with monkeypatch.context() as patch:
            patch.setattr(export_model, function, interrupt)
            assert tapfm("export", runs["last:1"], "--out", tmp_path / name).returncode == 130
        with pytest.raises(RunError, match="is not an exported model"):
            load_export(tmp_path / name)
        assert tapfm("export", runs["last:1"], "--out", tmp_path / name).returncode == 0


def test_export_of_another_run_is_not_overwritten(runs, tmp_path):
    assert tapfm("export", runs["full"], "--out", tmp_path / "out").returncode == 0
    before = read_files(tmp_path / "out")
    result = tapfm("export", runs["lora:4"], "--out", tmp_path / "out")
    assert result.returncode == 2
    assert "contains the export of another run" in result.output
    assert read_files(tmp_path / "out") == before


def test_other_files_are_not_overwritten(runs, tmp_path):
    foreign, page, file = tmp_path / "foreign", tmp_path / "page", tmp_path / "file"
    foreign.mkdir()
    save_file({"a": torch.ones(1)}, foreign / "model.safetensors")
    page.mkdir()
    (page / "README.md").write_text("mine")
    file.write_text("mine")
    run = shutil.copytree(runs["full"], tmp_path / "run")
    for out, message in (
        (foreign, "contains a model that tapfm did not write"),
        (page, "README.md"),
        (run, str(run)),
        (file, "is a file"),
    ):
        before = read_files(out) if out not in (run, file) else None
        for name in ("full", "fixed mean"):
            result = tapfm("export", runs[name], "--out", out)
            assert result.returncode == 2
            assert message in result.output
        assert before is None or read_files(out) == before
    assert file.read_text() == "mine"
    assert sorted(path.name for path in run.iterdir()) == sorted(path.name for path in runs["full"].iterdir())


def test_base_weights_of_the_run_are_not_overwritten(train, exported, tmp_path):
    base = shutil.copytree(exported / "full", tmp_path / "base")
    second = train("second", f"encoder.weights={base}", "adaptation.scope=last:1")
    before = read_files(base)
    for out in (base, tmp_path / "elsewhere" / ".." / "base"):
        result = tapfm("export", second, "--out", out)
        assert result.returncode == 2
        assert f"contains the encoder weights that {second} started from" in result.output
    assert read_files(base) == before
    assert tapfm("export", second, "--out", tmp_path / "new").returncode == 0


def test_export_with_other_logits_is_an_error(runs, tmp_path, monkeypatch):
    def save_changed(path, tensors, metadata):
        save_checkpoint(path, {name: tensor + 1 for name, tensor in tensors.items()}, metadata)

    monkeypatch.setattr(export_model, "save_checkpoint", save_changed)
    for name in ("full", "fixed abmil"):
        with pytest.raises(WeightsMismatchError, match="does not give the logits of the run"):
            export_model.export_run(
                runs[name],
                tmp_path / name,
                push_to=None,
                owner_permission=False,
                private=True,
                force=False,
                console=None,
            )


def test_folder_without_a_run_is_an_error(tmp_path):
    result = tapfm("export", tmp_path, "--out", tmp_path / "out")
    assert result.returncode == 2
    assert "is not a run folder: it has no config.toml" in result.output
    assert not (tmp_path / "out").exists()
    with pytest.raises(RunError, match="is not a run folder"):
        load_run(tmp_path)


def test_error_of_run_without_finished_epoch_names_resume_command(runs, tmp_path):
    run = shutil.copytree(runs["fixed mean"], tmp_path / "run")
    for path in [*(run / "checkpoints").iterdir(), run / "history.jsonl"]:
        path.unlink()
    result = tapfm("export", run, "--out", tmp_path / "out")
    assert result.returncode == 2
    assert "has not finished an epoch yet" in result.output
    assert not (tmp_path / "out").exists()
    (command,) = re.findall(r"tapfm (train .*)", result.output)
    assert tapfm(*command.split()).returncode == 0
    assert tapfm("export", run, "--out", tmp_path / "out").returncode == 0


def test_run_with_missing_files_is_an_error(runs, tmp_path):
    for number, name in enumerate(("split.csv", "environment.json")):
        run = shutil.copytree(runs["full"], tmp_path / str(number))
        (run / name).unlink()
        with pytest.raises(RunError, match=f"has no {name}"):
            load_run(run)
    (run / "config.toml").write_text("[encoder")
    assert tapfm("export", run, "--out", tmp_path / "out").returncode == 2


def test_damaged_last_checkpoint_is_an_error_before_anything_is_written(runs, tmp_path):
    run = shutil.copytree(runs["full"], tmp_path / "run")
    last = run / "checkpoints" / "last.safetensors"
    os.truncate(last, last.stat().st_size // 2)
    result = tapfm("export", run, "--out", tmp_path / "out")
    assert (result.returncode, "last.safetensors" in result.output) == (2, True)
    assert not (tmp_path / "out").exists()
    last.unlink()
    assert tapfm("export", run, "--out", tmp_path / "out").returncode == 0


def test_best_epoch_of_an_unfinished_run_is_exported(workspace, train, tmp_path):
    best, finished = workspace / "runs" / "stopped" / "checkpoints" / "best.safetensors", threading.Event()

    def send_signal():
        while not finished.wait(0.005):
            if best.exists():
                os.kill(os.getpid(), signal.SIGINT)
                return

    thread = threading.Thread(target=send_signal)
    thread.start()
    try:
        run = train("stopped", "schedule.epochs=10000", "adaptation.method=fixed", "aggregator.name=mean")
    finally:
        finished.set()
        thread.join()
    result = tapfm("export", run, "--out", tmp_path / "out")
    assert result.returncode == 0
    assert re.search(r"The run is not finished\. Exporting the best of \d+ epochs? so far", result.output)
    assert "No metrics: the run was not finished" in (tmp_path / "out" / "README.md").read_text()
    (run / "checkpoints" / "last.safetensors").unlink()
    assert tapfm("export", run, "--out", tmp_path / "out").returncode == 0


@pytest.mark.parametrize("name", ["full", "lora:4", "last:1"])
def test_other_base_weights_are_an_error_if_the_checkpoint_has_only_some_weights(runs, tmp_path, tiles, name):
    card = find_encoder_card("tapfm-pocket")
    weights = load_file(card.package_folder / card.file)
    save_file({key: tensor * 1.1 for key, tensor in weights.items()}, tmp_path / "other.safetensors")
    setting = f'"tapfm-pocket"\nweights = "{tmp_path / "other.safetensors"}"'
    run = copy_run(runs[name], tmp_path / "run", '"tapfm-pocket"', setting)
    if name == "full":
        assert torch.equal(predict_logits(load_run(run), tiles), predict_logits(load_run(runs["full"]), tiles))
        return
    with pytest.raises(WeightsDigestError, match=r"differ from those that .*run was started with"):
        load_run(run)
    result = tapfm("export", run, "--out", tmp_path / "out")
    assert result.returncode == 2
    assert not (tmp_path / "out").exists()


def test_checkpoint_of_another_model_is_an_error(runs, tmp_path):
    run = copy_run(runs["full"], tmp_path / "run", 'scope = "full"', 'scope = "lora:4"')
    with pytest.raises(CheckpointError, match="does not match"):
        load_run(run)


def test_invalid_export_is_an_error(exported, tmp_path):
    folder = shutil.copytree(exported / "full", tmp_path / "folder")
    for text in ("{}", "[]", "1", '{"encoder": "uni"}', "not JSON"):
        (folder / "tapfm.json").write_text(text)
        with pytest.raises(RunError, match="is not an exported model"):
            load_export(folder)
    shutil.copy(exported / "full" / "tapfm.json", folder)
    (folder / "aggregator.safetensors").write_bytes(b"\x80\x04 a pickle")
    with pytest.raises(CheckpointError, match="is not a tapfm checkpoint"):
        load_export(folder)


def test_other_weights_in_the_export_folder_are_ignored(exported, tmp_path, tiles, monkeypatch):
    card = dataclasses.replace(find_encoder_card("tapfm-pocket"), file="pytorch_model.bin")
    monkeypatch.setattr(saved_model, "find_encoder_card", lambda _: card)
    folder = shutil.copytree(exported / "full", tmp_path / "folder")
    torch.save({name: torch.zeros(1) for name in load_file(folder / "model.safetensors")}, folder / card.file)
    assert torch.equal(
        predict_logits(load_export(folder), tiles), predict_logits(load_export(exported / "full"), tiles)
    )


def test_export_with_features_of_another_size_is_an_error(train, tmp_path, monkeypatch):
    card = dataclasses.replace(find_encoder_card("tapfm-pocket"), feature_size=16)
    monkeypatch.setattr(from_config, "find_encoder_card", lambda _: card)  # training would reject the features
    for i in range(len(SPLITS)):
        rng = np.random.default_rng(i)
        features = SlideFeatures(case_id(i), rng.normal(size=(4, 16)).astype(np.float32))
        write_features(tmp_path / f"{case_id(i)}.h5", features, make_tile_set(i), attributes={})
    run = train("sixteen", "adaptation.method=fixed", f"tiles.features={tmp_path}", "aggregator.name=abmil")
    assert load_run(run).metadata["aggregator"]["feature_size"] == 16
    assert tapfm("export", run, "--out", tmp_path / "out").returncode == 0
    with pytest.raises(RunError, match=r"features of size 16, but tapfm-pocket computes features of size 128"):
        load_export(tmp_path / "out")


def test_missing_base_weights_are_an_error_that_names_the_setting(train, exported, tmp_path):
    base = shutil.copyfile(exported / "full" / "model.safetensors", tmp_path / "base.safetensors")
    run = train("moved", f"encoder.weights={base}", "adaptation.scope=last:1")
    base.unlink()
    result = tapfm("export", run, "--out", tmp_path / "out")
    assert (result.returncode, f"encoder.weights in {run / 'config.toml'}" in result.output) == (2, True)
    config = shutil.copyfile(run / "config.toml", tmp_path / "run.toml")
    result = tapfm("train", config, "--out", tmp_path / "again")
    assert (result.returncode, "--set encoder.weights=" in result.output) == (2, True)


def test_aggregator_trained_on_other_weights_is_an_error(exported, tmp_path):
    folder = shutil.copytree(exported / "fixed mean", tmp_path / "copy")
    metadata = json.loads((folder / "tapfm.json").read_text())
    metadata["encoder"]["base_weights_sha256"] = "0" * 64
    (folder / "tapfm.json").write_text(json.dumps(metadata))
    with pytest.raises(WeightsDigestError, match=f"tapfm-pocket.*{'0' * 64}"):
        load_export(folder)


@pytest.mark.parametrize("flag", ["--public", "--owner-permission"])
def test_push_options_without_a_repository_are_an_error(runs, tmp_path, flag):
    result = tapfm("export", runs["full"], "--out", tmp_path / "out", flag)
    assert result.returncode == 2
    assert f"{flag} needs --push-to-hub" in result.output
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("name", "repository", "message"),
    [("full", "no-owner", "is not a valid repository name"), ("fixed mean", "lab/uni", "no adapted encoder to push")],
)
def test_push_errors_come_before_anything_is_written(runs, tmp_path, name, repository, message):
    result = tapfm("export", runs[name], "--out", tmp_path / "out", "--push-to-hub", repository)
    assert result.returncode == 2
    assert message in result.output
    assert not (tmp_path / "out").exists()


def test_no_derivatives_licence_allows_export_but_not_push(runs, tmp_path, monkeypatch):
    card = dataclasses.replace(find_encoder_card("tapfm-pocket"), licence="CC-BY-NC-ND-4.0")
    monkeypatch.setattr(saved_model, "find_encoder_card", lambda _: card)
    result = tapfm("export", runs["full"], "--out", tmp_path / "out", "--push-to-hub", "lab/uni")
    assert result.returncode == 2
    assert "does not allow sharing adapted versions" in result.output
    assert not (tmp_path / "out").exists()
    for name, has_warning in (("full", True), ("fixed mean", False)):
        assert tapfm("export", runs[name], "--out", tmp_path / name).returncode == 0
        text = (tmp_path / name / "README.md").read_text()
        assert ("It does not allow sharing derivatives" in text) == has_warning


# Runs in a separate process, because the client of the Hub reads its settings at import.
PUSH = """
import dataclasses, sys
from tapfm.runs import saved_model
from tapfm.cli.main import main
card = dataclasses.replace(saved_model.find_encoder_card("tapfm-pocket"), licence="CC-BY-NC-ND-4.0")
run, out = sys.argv[1:]
for repository, *flags in ["lab/private"], ["lab/public", "--public", "--owner-permission"]:
    if flags:
        saved_model.find_encoder_card = lambda _: card
    sys.argv = ["tapfm", "export", run, "--out", out, "--push-to-hub", repository, *flags]
    try:
        main()
    except SystemExit as exited:
        assert not exited.code
"""


def test_export_is_pushed_and_private_by_default(runs, tmp_path):
    with FakeHub().serve() as hub:
        pushed = subprocess.run(
            [sys.executable, "-c", PUSH, str(runs["full"]), str(tmp_path / "out")],
            env=hub.environment(tmp_path, HF_TOKEN=TOKEN, OMP_NUM_THREADS="1"),
            capture_output=True,
            text=True,
            check=False,
        )
    assert pushed.returncode == 0, pushed.stderr
    assert hub.private == {"lab/private": True, "lab/public": False}
    assert f"Pushed to {hub.endpoint}/lab/private (private)" in pushed.stderr
    assert f"Pushed to {hub.endpoint}/lab/public\n" in pushed.stderr
    found = read_files(tmp_path / "out")
    assert hub.pushed["lab/public"] == found, "the second push, with another licence, replaced the files"
    assert hub.pushed["lab/private"].keys() == found.keys()
