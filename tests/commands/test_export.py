"""What `tapfm export` writes is the run's best model, for timm and for us; it is private, licensed, and never code."""

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
from cohort_files import rows_of
from command_line import tapfm as tapfm
from hub_stand_in import TOKEN, Hub
from safetensors.torch import load_file, save_file
from support import relative_difference
from training_lab import POSITIONS, SPLITS, slide_id, tile_set

from tapfm.aggregators.catalog import AGGREGATORS
from tapfm.contracts import EncodedTiles
from tapfm.encoders.catalog import encoder_card, encoder_cards
from tapfm.encoders.features import FeatureSet, read_features, write_features
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
    made = {scope: train(scope, f"adaptation.scope={scope}") for scope in ("lora:4", "last:1")}
    made["full"] = train("full", "schedule.epochs=2")
    made["several"] = train("several", 'task.targets=["FGFR3", "TP53"]', "selection.unit=patient")
    for name in AGGREGATORS:
        made[f"fixed {name}"] = train(f"fixed {name}", "adaptation.method=fixed", f"aggregator.name={name}")
    return made


@pytest.fixture(scope="module")
def exported(lab, runs):
    for name, run in runs.items():
        result = tapfm("export", run, "--out", lab / "exported" / name)
        assert result.returncode == 0, result.said
    return lab / "exported"


@pytest.fixture(scope="module")
def tiles(lab):
    """All tiles of a test slide, read by its positions."""
    slide = open_slide(lab / "7.svs")
    pixels = np.stack([slide.read(x, y, 224, 224) for x, y in POSITIONS.tolist()])
    return torch.from_numpy(pixels.transpose(0, 3, 1, 2).copy())


def stored(lab):
    features = read_features(lab / "features" / f"{slide_id(7)}.h5")
    return EncodedTiles(torch.from_numpy(features.features), torch.from_numpy(features.attention))


def logits_of(saved, tiles):
    return export_model._predict_logits(saved.model, tiles, None)


def copy_with(run, to, old, new):
    """Copy a run, and change its config.toml."""
    shutil.copytree(run, to)
    text = (to / "config.toml").read_text()
    assert text.count(old) == 1
    (to / "config.toml").write_text(text.replace(old, new))
    return to


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir() if not path.name.startswith(".")}


@pytest.mark.parametrize("name", [*ADAPTED, *FIXED])
def test_run_and_export_give_the_logits_of_the_predictions(runs, exported, lab, tiles, name):
    rows = [row for row in rows_of(runs[name] / "predictions-test.csv") if row["slide_id"] == slide_id(7)]
    targets = ["FGFR3", "TP53"] if name == "several" else ["FGFR3"]
    assert [row["target"] for row in rows] == targets
    predicted = torch.tensor([float(row["logit"]) for row in rows])
    of_run, of_export = load_run(runs[name]), load_export(exported / name)
    ours = of_run.model.aggregator_for()(*stored(lab)).logits_C if name in FIXED else logits_of(of_run, tiles)
    torch.testing.assert_close(ours, predicted, rtol=0, atol=1e-5)
    torch.testing.assert_close(logits_of(of_export, tiles), ours, rtol=0, atol=1e-5)
    assert tuple(of_export.model.task.targets) == tuple(targets)
    assert of_export.model.task.weights == of_run.model.task.weights


@pytest.mark.parametrize("name", ADAPTED)
def test_timm_alone_gives_the_features_of_the_runs_best_model(runs, exported, tiles, name):
    model = timm.create_model(f"local-dir:{exported / name}", pretrained=True).eval()
    facts = timm.data.resolve_model_data_config(model)
    mean, std = (torch.tensor(facts[key]).view(1, 3, 1, 1) for key in ("mean", "std"))
    with torch.no_grad():
        features = model((tiles / 255 - mean) / std)
        adapted = load_run(runs[name]).model.encoder(tiles).z_KD
        published = load_encoder("tapfm-pocket").encoder.eval()(tiles).z_KD
    assert relative_difference(features, adapted) < 1e-5
    assert relative_difference(features, published) > 1e-3, "it learnt nothing, so that this test could not fail"


def test_adapters_are_folded_into_the_weights_they_adapt(exported):
    names = {path.name: load_file(path / "model.safetensors").keys() for path in exported.glob("l*")}
    assert names["lora:4"] == names["last:1"] == load_encoder("tapfm-pocket").encoder.vit.state_dict().keys()


@pytest.mark.parametrize("name", [*ADAPTED, *FIXED])
def test_nothing_in_an_export_could_be_code(exported, name):
    encoder = [] if name in FIXED else ["config.json", "model.safetensors"]
    found = contents(exported / name)
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
def test_no_slide_and_no_patient_is_named_anywhere(exported, lab, name):
    everything = b"".join(contents(exported / name).values())
    for row in rows_of(lab / "cohort.csv"):
        assert row["slide_id"].encode() not in everything
        assert row["patient_id"].encode() not in everything
    assert str(lab).encode() not in everything


def test_the_description_says_what_was_trained_how(exported):
    description = json.loads((exported / "several" / "tapfm.json").read_text())
    assert description["targets"] == ["FGFR3", "TP53"]
    published = {"base_weights_sha256": encoder_card("tapfm-pocket").sha256, "features_source": None}
    assert description["encoder"] == {"name": "tapfm-pocket", "adapted": True} | published
    assert description["aggregator"] | {"name": "cls-attention", "feature_size": 128} == description["aggregator"]
    labels = {"FGFR3": {"positive": 2, "labelled": 4}, "TP53": {"positive": 1, "labelled": 3}}
    assert description["training_labels"] == labels
    facts = {"method": "tapfm", "scope": "full", "recipe": "paper", "seed": 0, "epoch": 1}
    assert description | facts == description
    assert json.loads((exported / "lora:4" / "tapfm.json").read_text())["scope"] == "lora:4"
    fixed = json.loads((exported / "fixed abmil" / "tapfm.json").read_text())
    assert fixed["encoder"] == {"name": "tapfm-pocket", "adapted": False} | published
    assert json.loads((exported / "several" / "config.json").read_text())["tapfm"]["targets"] == ["FGFR3", "TP53"]


def test_the_description_names_the_epoch_that_was_kept(runs, exported):
    _, best = load_checkpoint(runs["full"] / "checkpoints" / "best.safetensors")
    assert json.loads((exported / "full" / "tapfm.json").read_text())["epoch"] == best["epoch"]
    assert f"epoch {best['epoch']}." in (exported / "full" / "README.md").read_text()


def test_the_card_counts_slides_patients_and_labels(exported):
    card = (exported / "several" / "README.md").read_text()
    assert "# tapfm-pocket, adapted to FGFR3, TP53" in card
    for line in (
        *("train | 4 | 4 | 2 of 4 (50%) | 1 of 3 (33%)", "val | 2 | 2 | 1 of 2 (50%) | 0 of 2 (0%)"),
        "test | 3 | 4 | 2 of 4 (50%) | 2 of 3 (67%)",
    ):
        assert f"| {line} |" in card
    assert "An aggregator of tapfm-pocket features for FGFR3" in (exported / "fixed mean" / "README.md").read_text()


def test_the_cards_figures_are_those_of_the_predictions(runs, exported):
    rows = rows_of(runs["full"] / "predictions-test.csv")
    positive, negative = ([float(row["logit"]) for row in rows if row["label"] == label] for label in "10")
    expected = np.mean([(p > n) + (p == n) / 2 for p in positive for n in negative])
    assert f"| test | FGFR3 | {expected:.3f} | 4 slides |" in (exported / "full" / "README.md").read_text()
    several = (exported / "several" / "README.md").read_text()
    assert re.search(r"\| test \| FGFR3 \| [01]\.\d{3} \| 3 patients \|", several)
    assert "| val | TP53 | - <sup>1</sup> | 2 patients |" in several
    assert "<sup>1</sup> no positive patient among 2" in several
    assert "the epoch was chosen on val" in several


def test_what_the_card_tells_to_type_loads_the_encoder(exported, runs):
    folder = exported / "lora:4"
    (program,) = re.findall(r"```python\n(.*?)```", (folder / "README.md").read_text(), re.DOTALL)
    names = {}
    exec(program.replace("FOLDER", str(folder)), names)
    weights = load_run(runs["lora:4"]).model.encoder.vit.state_dict()
    torch.testing.assert_close(dict(names["encoder"].state_dict()), dict(weights))


def test_a_card_imports_what_its_arguments_need(runs, monkeypatch):
    saved = dataclasses.replace(load_run(runs["full"]), card=encoder_card("phikon"))
    text = format_model_card(saved, RunFolder(runs["full"]), {})
    (program,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    monkeypatch.setattr(timm, "create_model", lambda *_, **given: SimpleNamespace(eval=lambda: given))
    names = {}
    exec(program, names)
    assert names["encoder"]["norm_layer"](8).eps == 1e-12


def test_the_hub_can_read_the_card_of_every_encoder(runs):
    saved, run_folder = load_run(runs["full"]), RunFolder(runs["full"])
    licences = {}
    for key, card in encoder_cards().items():
        text = format_model_card(dataclasses.replace(saved, card=card), run_folder, {})
        head = yaml.safe_load(text.split("---")[1])
        assert card.licence in text.split("## Licence")[1]
        assert head.get("base_model", "") == card.repository
        assert (head["license"] == "other") == ("license_name" in head)
        assert re.fullmatch(r"[a-z0-9.]+(-[a-z0-9.]+)*", head.get("license_name", "none"))
        licences[key] = head["license"]
    assert (licences["tapfm-pocket"], licences["uni"], licences["phikon"]) == ("apache-2.0", "cc-by-nc-nd-4.0", "other")


def test_exporting_again_replaces_an_export_and_leaves_nothing_of_it(runs, tmp_path, tiles):
    out = tmp_path / "out [1]"
    for name, *force in (("full",), ("full",), ("fixed mean", "--force"), ("lora:4", "--force")):
        result = tapfm("export", runs[name], "--out", out, *force)
        assert result.returncode == 0, result.said
        assert f"Exported to {out}: " in result.said
        assert (out / "model.safetensors").exists() == (out / "config.json").exists() == (name != "fixed mean")
    assert torch.equal(logits_of(load_export(out), tiles), logits_of(load_run(runs["lora:4"]), tiles))


def test_an_export_that_was_stopped_loads_for_nobody_and_can_be_made_again(runs, tmp_path, monkeypatch):
    def stopped(*_, **__):
        raise KeyboardInterrupt

    tapfm("export", runs["last:1"], "--out", tmp_path / "over")
    for name, place in (("first", "save_checkpoint"), ("over", "save_checkpoint"), ("over", "format_model_card")):
        with monkeypatch.context() as patch:
            patch.setattr(export_model, place, stopped)
            assert tapfm("export", runs["last:1"], "--out", tmp_path / name).returncode == 130
        with pytest.raises(RunError, match="no exported model"):
            load_export(tmp_path / name)
        assert tapfm("export", runs["last:1"], "--out", tmp_path / name).returncode == 0


def test_the_export_of_another_run_is_not_written_over(runs, tmp_path):
    assert tapfm("export", runs["full"], "--out", tmp_path / "out").returncode == 0
    before = contents(tmp_path / "out")
    result = tapfm("export", runs["lora:4"], "--out", tmp_path / "out")
    assert result.returncode == 2
    assert "holds the export of another run" in result.said
    assert contents(tmp_path / "out") == before


def test_what_is_not_an_exports_is_not_written_over(runs, tmp_path):
    foreign, page, file = tmp_path / "foreign", tmp_path / "page", tmp_path / "file"
    foreign.mkdir()
    save_file({"a": torch.ones(1)}, foreign / "model.safetensors")
    page.mkdir()
    (page / "README.md").write_text("mine")
    file.write_text("mine")
    run = shutil.copytree(runs["full"], tmp_path / "run")
    for out, why in (
        (foreign, "holds a model that tapfm did not write"),
        (page, "has other files in it, such as README.md"),
        (run, "has other files in it"),
        (file, "is a file"),
    ):
        before = contents(out) if out not in (run, file) else None
        for name in ("full", "fixed mean"):
            result = tapfm("export", runs[name], "--out", out)
            assert result.returncode == 2
            assert why in result.said
        assert before is None or contents(out) == before
    assert file.read_text() == "mine"
    assert sorted(path.name for path in run.iterdir()) == sorted(path.name for path in runs["full"].iterdir())


def test_an_export_that_another_run_began_with_is_not_written_over(train, exported, tmp_path):
    base = shutil.copytree(exported / "full", tmp_path / "base")
    second = train("second", f"encoder.weights={base}", "adaptation.scope=last:1")
    before = contents(base)
    for out in (base, tmp_path / "elsewhere" / ".." / "base"):
        result = tapfm("export", second, "--out", out)
        assert result.returncode == 2
        assert f"holds the weights that {second} started from" in result.said
    assert contents(base) == before
    assert tapfm("export", second, "--out", tmp_path / "new").returncode == 0


def test_a_check_that_finds_other_logits_is_told(runs, tmp_path, monkeypatch):
    def other(path, tensors, description):
        save_checkpoint(path, {name: tensor + 1 for name, tensor in tensors.items()}, description)

    monkeypatch.setattr(export_model, "save_checkpoint", other)
    for name in ("full", "fixed abmil"):
        with pytest.raises(WeightsMismatchError, match="loaded again it gives other logits"):
            export_model.export_run(
                runs[name],
                tmp_path / name,
                push_to=None,
                despite_no_derivatives=False,
                private=True,
                force=False,
                console=None,
            )


def test_a_folder_that_is_no_run_is_told(tmp_path):
    result = tapfm("export", tmp_path, "--out", tmp_path / "out")
    assert result.returncode == 2
    assert "is not a run folder: it has no config.toml" in result.said
    assert not (tmp_path / "out").exists()
    with pytest.raises(RunError, match="is no run"):
        load_run(tmp_path)


def test_a_run_without_a_finished_epoch_says_how_to_go_on(runs, tmp_path):
    run = shutil.copytree(runs["fixed mean"], tmp_path / "run")
    for checkpoint in (run / "checkpoints").iterdir():
        checkpoint.unlink()
    result = tapfm("export", run, "--out", tmp_path / "out")
    assert result.returncode == 2
    assert "has not finished an epoch yet" in result.said
    assert not (tmp_path / "out").exists()
    (command,) = re.findall(r"tapfm (train .*)", result.said)
    assert tapfm(*command.split()).returncode == 0
    assert tapfm("export", run, "--out", tmp_path / "out").returncode == 0


def test_a_run_that_lacks_a_file_is_told(runs, tmp_path):
    for number, name in enumerate(("split.csv", "environment.json")):
        run = shutil.copytree(runs["full"], tmp_path / str(number))
        (run / name).unlink()
        with pytest.raises(RunError, match=f"has no {name}"):
            load_run(run)
    (run / "config.toml").write_text("[encoder")
    assert tapfm("export", run, "--out", tmp_path / "out").returncode == 2


def test_of_an_unfinished_run_the_best_epoch_so_far_is_exported(lab, train, tmp_path):
    best, over = lab / "runs" / "stopped" / "checkpoints" / "best.safetensors", threading.Event()

    def strike():
        while not over.wait(0.005):
            if best.exists():
                os.kill(os.getpid(), signal.SIGINT)
                return

    striker = threading.Thread(target=strike)
    striker.start()
    try:
        run = train("stopped", "schedule.epochs=10000", "adaptation.method=fixed", "aggregator.name=mean")
    finally:
        over.set()
        striker.join()
    result = tapfm("export", run, "--out", tmp_path / "out")
    assert result.returncode == 0
    assert re.search(r"The run is not finished: this is the best of \d+ epochs? so far", result.said)
    assert "None: the run was not finished" in (tmp_path / "out" / "README.md").read_text()
    (run / "checkpoints" / "last.safetensors").unlink()
    assert tapfm("export", run, "--out", tmp_path / "out").returncode == 0


@pytest.mark.parametrize("name", ["full", "lora:4", "last:1"])
def test_other_base_weights_are_refused_where_the_checkpoint_holds_a_part_only(runs, tmp_path, tiles, name):
    card = encoder_card("tapfm-pocket")
    weights = load_file(card.package_folder / card.file)
    save_file({key: tensor * 1.1 for key, tensor in weights.items()}, tmp_path / "other.safetensors")
    named = f'"tapfm-pocket"\nweights = "{tmp_path / "other.safetensors"}"'
    run = copy_with(runs[name], tmp_path / "run", '"tapfm-pocket"', named)
    if name == "full":
        assert torch.equal(logits_of(load_run(run), tiles), logits_of(load_run(runs["full"]), tiles))
        return
    with pytest.raises(WeightsDigestError, match=r"not those that .*run began with"):
        load_run(run)
    result = tapfm("export", run, "--out", tmp_path / "out")
    assert result.returncode == 2
    assert not (tmp_path / "out").exists()


def test_a_checkpoint_of_something_else_is_refused(runs, tmp_path):
    run = copy_with(runs["full"], tmp_path / "run", 'scope = "full"', 'scope = "lora:4"')
    with pytest.raises(CheckpointError, match="does not fit"):
        load_run(run)


def test_a_folder_that_is_no_export_is_told(exported, tmp_path):
    folder = shutil.copytree(exported / "full", tmp_path / "folder")
    for text in ("{}", "[]", "1", '{"encoder": "uni"}', "not JSON"):
        (folder / "tapfm.json").write_text(text)
        with pytest.raises(RunError, match="no exported model"):
            load_export(folder)
    shutil.copy(exported / "full" / "tapfm.json", folder)
    (folder / "aggregator.safetensors").write_bytes(b"\x80\x04 a pickle")
    with pytest.raises(CheckpointError, match="is not a checkpoint"):
        load_export(folder)


def test_weights_beside_an_export_are_not_taken_for_it(exported, tmp_path, tiles, monkeypatch):
    card = dataclasses.replace(encoder_card("tapfm-pocket"), file="pytorch_model.bin")
    monkeypatch.setattr(saved_model, "encoder_card", lambda _: card)
    folder = shutil.copytree(exported / "full", tmp_path / "folder")
    torch.save({name: torch.zeros(1) for name in load_file(folder / "model.safetensors")}, folder / card.file)
    assert torch.equal(logits_of(load_export(folder), tiles), logits_of(load_export(exported / "full"), tiles))


def test_features_of_another_size_than_the_encoders_are_told(train, tmp_path):
    for i in range(len(SPLITS)):
        rng = np.random.default_rng(i)
        features = FeatureSet(slide_id(i), rng.normal(size=(4, 16)).astype(np.float32))
        write_features(tmp_path / f"{slide_id(i)}.h5", features, tile_set(i), about={})
    run = train("sixteen", "adaptation.method=fixed", f"tiles.features={tmp_path}", "aggregator.name=abmil")
    assert load_run(run).description["aggregator"]["feature_size"] == 16
    assert tapfm("export", run, "--out", tmp_path / "out").returncode == 0
    with pytest.raises(RunError, match=r"features of size 16, and tapfm-pocket makes some of size 128"):
        load_export(tmp_path / "out")


def test_an_aggregator_of_other_weights_than_the_published_is_refused(exported, tmp_path):
    folder = shutil.copytree(exported / "fixed mean", tmp_path / "copy")
    description = json.loads((folder / "tapfm.json").read_text())
    description["encoder"]["base_weights_sha256"] = "0" * 64
    (folder / "tapfm.json").write_text(json.dumps(description))
    with pytest.raises(WeightsDigestError, match="features of other weights of tapfm-pocket"):
        load_export(folder)


@pytest.mark.parametrize("flag", ["--public", "--despite-no-derivatives"])
def test_a_flag_about_pushing_without_a_place_to_push_to_is_refused(runs, tmp_path, flag):
    result = tapfm("export", runs["full"], "--out", tmp_path / "out", flag)
    assert result.returncode == 2
    assert "There is nothing to push." in result.said
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("name", "repository", "why"),
    [("full", "no-owner", "is not the name of a repository"), ("fixed mean", "lab/uni", "no adapted one to push")],
)
def test_what_cannot_be_pushed_is_refused_before_anything_is_written(runs, tmp_path, name, repository, why):
    result = tapfm("export", runs[name], "--out", tmp_path / "out", "--push-to-hub", repository)
    assert result.returncode == 2
    assert why in result.said
    assert not (tmp_path / "out").exists()


def test_a_no_derivatives_licence_lets_the_model_be_written_and_not_be_pushed(runs, tmp_path, monkeypatch):
    card = dataclasses.replace(encoder_card("tapfm-pocket"), licence="CC-BY-NC-ND-4.0")
    monkeypatch.setattr(saved_model, "encoder_card", lambda _: card)
    result = tapfm("export", runs["full"], "--out", tmp_path / "out", "--push-to-hub", "lab/uni")
    assert result.returncode == 2
    assert "does not let you share adapted versions" in result.said
    assert not (tmp_path / "out").exists()
    for name, says in (("full", True), ("fixed mean", False)):
        assert tapfm("export", runs[name], "--out", tmp_path / name).returncode == 0
        text = (tmp_path / name / "README.md").read_text()
        assert ("It forbids sharing derivatives, and this model is one." in text) == says


# In a process of its own: the hub's client reads its settings once, at import.
PUSH = """
import dataclasses, sys
from tapfm.runs import saved_model
from tapfm.cli.main import main
card = dataclasses.replace(saved_model.encoder_card("tapfm-pocket"), licence="CC-BY-NC-ND-4.0")
run, out = sys.argv[1:]
for repository, *flags in ["lab/private"], ["lab/public", "--public", "--despite-no-derivatives"]:
    if flags:
        saved_model.encoder_card = lambda _: card
    sys.argv = ["tapfm", "export", run, "--out", out, "--push-to-hub", repository, *flags]
    try:
        main()
    except SystemExit as ended:
        assert not ended.code
"""


def test_what_is_pushed_is_the_export_and_private_unless_asked(runs, tmp_path):
    with Hub().served() as hub:
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
    found = contents(tmp_path / "out")
    assert hub.pushed["lab/public"] == found, "the licence differs, and so README.md and config.json do"
    assert hub.pushed["lab/private"].keys() == found.keys()
