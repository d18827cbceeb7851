"""A whole study: runs, evaluations, tables; what fails is isolated, what was stopped goes on."""

import csv
import json
import shutil
import signal
import time
from pathlib import Path

import pytest
from command_line import start, tapfm, wait_for
from PIL import Image
from training_lab import POSITIONS, edit, history_of

from tapfm.evaluation.predictions import read_predictions
from tapfm.runs.ensemble import find_member_folders
from tapfm.runtime import commands as study_child
from tapfm.runtime.workers import available_cores
from tapfm.study import runner as study_runner
from tapfm.tiles.store import TileSet, write_tiles

STUDY = """
name = "A small study"
targets = ["FGFR3"]
encoders = ["tapfm-pocket"]
regimes = ["fixed", "tapfm"]
aggregators = ["abmil"]
resamples = 50
[cohort]
table = "cohort.csv"
tiles = "tiles"
[external]
table = "external.csv"
tiles = "tiles-external"
[settings]
adaptation.tiles_per_slide = 4
schedule.epochs = 2
machine = { workers = 0, device = "cpu" }
[settings.fixed]
adaptation.tiles_per_slide = "all"
"""
TABLES = (
    *("study.md", "study.json", "table_binary.md", "table_binary.csv", "table_binary.tex", "costs.md", "costs.csv"),
    *("curves.png", "roc.png"),
)


def make_external(folder):
    """The same pictures under other names: other patients, as the command sees it."""
    lines = ["slide_id,path,patient_id,FGFR3"]
    for i in range(4):
        write_tiles(
            folder / "tiles-external", TileSet(f"x-{i}", POSITIONS, 224, 224, 0.5, 0.5, 0, (448, 448)), "trident"
        )
        lines.append(f"x-{i},{i}.svs,Roe{i},{i % 2}")
    (folder / "external.csv").write_text("\n".join(lines) + "\n")


@pytest.fixture
def study_lab(own_lab):
    make_external(own_lab)
    (own_lab / "study.toml").write_text(STUDY)
    return own_lab


@pytest.fixture
def here(monkeypatch):
    """Run the commands of a study in this process, which has torch already; gives the commands."""
    commands = []

    def run(words, log, look, environment):
        look()
        assert environment == {"OMP_NUM_THREADS": str(min(4, available_cores())), "OMP_WAIT_POLICY": "passive"}
        commands.append(words)
        result = tapfm(*words)
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("a") as file:
            file.write(result.said)
        return result.returncode

    monkeypatch.setattr(study_runner, "run_child_command", run)
    return commands


def study(lab, *options, out="study"):
    return tapfm("study", lab / "study.toml", "--out", lab / out, *options)


def status_of(folder):
    with (folder / "status.csv").open(newline="") as file:
        return {(row["run"], row["step"]): row for row in csv.DictReader(file)}


def without_external(text):
    return text.partition("[external]")[0] + "[settings]" + text.partition("[settings]")[2]


def add(lab, text):
    (lab / "study.toml").write_text((lab / "study.toml").read_text() + text)


IMPOSSIBLE = """
[[variants]]
name = "plain"
[[variants]]
name = "lambda 0.5"
settings.adaptation.lambda = 0.5
"""


def test_a_study_from_slides_to_tables(study_lab, here):
    """Two regimes, a variant that one of them cannot have; then nothing is left to do; then the same tables again."""
    add(study_lab, IMPOSSIBLE)
    out = study_lab / "study"
    result = study(study_lab)
    assert result.returncode == 3, result.said  # of the variant that cannot be
    fixed, half = "tapfm-pocket/fixed/abmil/plain/seed0", "tapfm-pocket/tapfm/cls-attention/lambda-0.5/seed0"
    status = status_of(out)
    assert {key for key, row in status.items() if row["state"] == "failed"} == {
        ("tapfm-pocket/fixed/abmil/lambda-0.5/seed0", "train")
    }
    assert "adaptation.lambda: is 0 with method fixed" in result.said
    assert "adaptation.lambda" in (out / "study.md").read_text()
    assert status[fixed, "evaluate external"]["state"] == "done"
    assert status[half, "train"]["command"].startswith("tapfm train ")
    assert [words[0] for words in here].count("embed") == 2
    assert [words[0] for words in here].count("train") == 3
    assert json.loads((out / "evaluations" / half / "external" / "metrics.json").read_text())["slides"] == 4

    text = (out / "table_binary.md").read_text()
    for row in ("tapfm-pocket + ABMIL, plain", "tapfm-pocket (TAPFM), lambda 0.5", "colours and tile count"):
        assert f"| {row} | " in text
    assert "FGFR3, Test (N = 3)" in text  # the last two slides are of one patient
    assert "FGFR3, External (N = 4)" in text
    page = (out / "study.md").read_text()
    assert "3 of 4 runs finished" in page
    assert "| train | 4 | 4 | 2 of 4 (50%) |" in page
    assert "| external | 4 | 4 | 2 of 4 (50%) |" in page
    assert "tapfm-pocket (TAPFM), plain" in (out / "costs.md").read_text()

    before = {name: (out / name).read_bytes() for name in TABLES}
    here.clear()
    assert study(study_lab).returncode == 2  # it is there
    assert study(study_lab, "--resume").returncode == 3
    assert not here  # all that can be done is done
    assert {name: (out / name).read_bytes() for name in TABLES} == before
    for name in TABLES:
        (out / name).unlink()
    assert tapfm("study", "--tables", "--out", out).returncode == 0
    assert {name: (out / name).read_bytes() for name in TABLES} == before

    settings = (study_lab / "study.toml").read_text()
    (study_lab / "study.toml").write_text(settings.replace("schedule.epochs = 2", "schedule.epochs = 3"))
    changed = study(study_lab, "--resume")
    assert changed.returncode == 2
    assert "has changed for runs" in changed.said
    assert f"{fixed}: schedule.epochs was 2, is 3" in changed.said


def test_only_some_runs_then_the_others(study_lab, here, monkeypatch):
    """From within the folder: paths that are typed start there, those in files do not."""
    monkeypatch.chdir(study_lab)
    study_lab, out = Path(), Path("study")
    listed = tapfm("study", study_lab / "study.toml", "--list")
    assert [line.split()[0] for line in listed.said.splitlines()] == [
        "tapfm-pocket/fixed/abmil/seed0",
        "tapfm-pocket/tapfm/cls-attention/seed0",
    ]
    assert study(study_lab, "--only", "*/tapfm/*").returncode == 0
    assert [words[0] for words in here] == ["train", "evaluate", "evaluate"]
    listed = study(study_lab, "--list")
    assert "fixed/abmil/seed0  to do" in listed.said
    assert "cls-attention/seed0  finished" in listed.said
    assert "1 of 2 runs finished" in (out / "study.md").read_text()
    assert study(study_lab, "--only", "nothing").returncode == 2
    here.clear()
    assert study(study_lab, "--resume").returncode == 0
    assert [words[0] for words in here] == ["embed", "embed", "train", "evaluate", "evaluate"]
    assert "2 of 2 runs finished" in (out / "study.md").read_text()

    # of a table that has changed since, figures are made anew
    before = (out / "table_binary.csv").read_text()
    edit(Path("external.csv"), lambda rows: rows[0].update(FGFR3="1"))
    here.clear()
    tapfm("study", "--tables", "--out", out)
    assert "external" not in (out / "table_binary.csv").read_text()
    assert study(study_lab, "--resume").returncode == 0
    assert [words[0] for words in here] == ["evaluate", "evaluate"]
    after = (out / "table_binary.csv").read_text()
    assert "external" in after
    assert after != before


def test_a_run_that_fails_costs_itself_only(study_lab, here):
    """A slide that cannot be read: what is fixed has its features before, what is adapted fails."""
    assert study(study_lab, "--only", "*/fixed/*").returncode == 0
    whole = (study_lab / "1.svs").read_bytes()
    (study_lab / "1.svs").write_bytes(b"nothing")
    result = study(study_lab, "--resume")
    assert result.returncode == 3
    status = status_of(study_lab / "study")
    run = "tapfm-pocket/tapfm/cls-attention/seed0"
    assert status[run, "train"]["state"] == "failed"
    assert status[run, "evaluate test"]["state"] == "not run"
    assert status[run, "evaluate test"]["reason"] == f"needs {run}: train"
    assert "case-01" in (study_lab / "study" / status[run, "train"]["log"]).read_text()
    assert "## What failed" in (study_lab / "study" / "study.md").read_text()
    (study_lab / "1.svs").write_bytes(whole)
    here.clear()
    assert study(study_lab, "--resume").returncode == 0
    assert [words[0] for words in here] == ["train", "evaluate", "evaluate"]
    assert "## What failed" not in (study_lab / "study" / "study.md").read_text()


def test_folds_are_pooled_and_their_ensemble_meets_the_external_slides(study_lab, here):
    def to_folds(rows):
        for i, row in enumerate(rows):
            patient = min(i, 8)
            row["fold_0"] = "test" if patient in (0, 1, 2) else "val" if patient in (3, 4) else "train"
            row["fold_1"] = "test" if patient in (3, 4, 5) else "val" if patient in (0, 1) else "train"

    edit(study_lab / "cohort.csv", to_folds)
    text = STUDY.replace('["fixed", "tapfm"]', '["fixed"]').replace("schedule.epochs = 2", "schedule.epochs = 1")
    (study_lab / "study.toml").write_text(text.replace("resamples", "folds = [0, 1]\nresamples"))
    result = study(study_lab)
    assert result.returncode == 0, result.said
    out = study_lab / "study"
    method = "tapfm-pocket/fixed/abmil"
    assert [words[0] for words in here] == ["embed", "embed", "train", "evaluate", "train", "evaluate", "evaluate"]
    members, _ = find_member_folders(out / "ensembles" / method / "seed0")
    assert [member.resolve() for member in members] == [out / "runs" / method / f"fold{i}" / "seed0" for i in (0, 1)]
    table = (out / "table_binary.md").read_text()
    assert "FGFR3, Test (N = 6)" in table
    assert "FGFR3, External (N = 4)" in table
    external = read_predictions(out / "evaluations" / method / "ensemble-seed0" / "external" / "predictions.csv")
    assert len(external) == 4
    assert "all, in 2 folds" in (out / "study.md").read_text()

    # without external slides there is an ensemble just as well
    shutil.rmtree(out / "ensembles")
    text = without_external((study_lab / "study.toml").read_text())
    (study_lab / "study.toml").write_text(text)
    here.clear()
    assert study(study_lab, "--resume").returncode == 0
    assert not here
    assert find_member_folders(out / "ensembles" / method / "seed0")[0] == members


def test_an_ablation_and_a_probe(study_lab, here):
    """One study that asks for both kinds of extra: fits of the loss, and what the encoder forgot."""
    for side in ("train", "test"):
        for number, name in enumerate(("pale", "dark")):
            folder = study_lab / "probe" / side / name
            folder.mkdir(parents=True)
            for i in range(3):
                Image.new("RGB", (64, 64), (90 + 120 * number, 60 + 20 * i, 140)).save(folder / f"{i}.png")
    text = without_external(STUDY).replace('["fixed", "tapfm"]', '["tapfm"]')
    text = text.replace("resamples = 50", 'resamples = 50\nreport = "forgetting"').replace("epochs = 2", "epochs = 1")
    (study_lab / "study.toml").write_text(text + '[probe]\ntiles = "probe"\n')
    result = study(study_lab)
    assert result.returncode == 0, result.said
    assert [words[0] for words in here] == ["train", "evaluate", "probe"]
    found = json.loads((study_lab / "study" / "probes/tapfm-pocket/tapfm/cls-attention/seed0.json").read_text())
    assert found["classes"] == ["dark", "pale"]
    assert 0 < found["cosine_distance"] < 1
    assert 0 < found["linear_cka"] <= 1
    assert "no significant change" in (study_lab / "study" / "forgetting.md").read_text()


@pytest.mark.usefixtures("here")
def test_orders_of_updates_are_compared(study_lab):
    orders = "".join(
        f'[[variants]]\nname = "{each}"\nsettings.adaptation.bag_gradient = "{each}"\n'
        for each in ("before", "after", "joint")
    )
    text = without_external(STUDY).replace('["fixed", "tapfm"]', '["tapfm"]')
    text = text.replace("resamples", 'report = "stability"\nresamples')
    text = text.replace("epochs = 2", "epochs = 4").replace("tiles_per_slide = 4", "tiles_per_slide = 1", 1)
    (study_lab / "study.toml").write_text(text + orders)
    result = study(study_lab)
    assert result.returncode == 0, result.said
    out = study_lab / "study"
    with (out / "ablation.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["variant"] for row in rows] == ["before", "after", "joint"]
    assert all(row["b"] and row["r_squared"] for row in rows)
    assert (out / "ablation-raw.png").exists()
    assert (out / "ablation-log.png").exists()
    text = (out / "stability.md").read_text()
    assert "| runs | 1 | 1 | 1 |" in text
    assert "With so few seeds, this may be chance." in text


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGKILL, -9)])
def test_a_study_that_is_stopped_goes_on(study_lab, here, number, code):
    """In processes of its own: the run that was in hand saves, even where the study itself had no time to say so."""
    text = without_external(STUDY).replace('["fixed", "tapfm"]', '["tapfm"]').replace("epochs = 2", "epochs = 12")
    (study_lab / "study.toml").write_text(text)
    out = study_lab / "study"
    run = out / "runs/tapfm-pocket/tapfm/cls-attention/seed0"
    process = start("study", study_lab / "study.toml", "--out", out)
    wait_for((run / "history.jsonl").exists, process)
    process.send_signal(number)
    said, more = process.communicate()
    assert process.returncode == code, said + more
    assert "Traceback" not in more
    if number == signal.SIGINT:
        assert f"tapfm study {out}/study.toml --out {out} --resume" in more
        assert status_of(out)["tapfm-pocket/tapfm/cls-attention/seed0", "train"]["state"] == "not run"
    log = out / "logs/tapfm-pocket/tapfm/cls-attention/seed0.log"
    deadline = time.monotonic() + 60
    while "Stopped and saved" not in log.read_text():
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.05)
    before = len(history_of(run))
    assert 0 < before < 12
    time.sleep(0.3)  # the lock goes with the process
    result = tapfm("study", out / "study.toml", "--out", out, "--resume")
    assert result.returncode == 0, result.said
    assert [words[0] for words in here] == ["train", "evaluate"]
    assert "Resuming in epoch" in log.read_text()
    assert len(history_of(run)) == 12


def test_what_a_command_says_last_is_why_it_failed(tmp_path):
    log = tmp_path / "run.log"
    code = study_child.run_child_command(
        ["train", str(tmp_path / "absent.toml"), "--out", str(tmp_path / "r")], log, lambda: None
    )
    assert code == 2
    assert log.read_text().startswith("$ tapfm train ")
    assert study_child.failure_reason(code, log, 0).startswith(f"{tmp_path}/absent.toml cannot be read")
    log.write_text("error: before\n$ tapfm train\nTraceback\nMemoryError: 3 GB\n")
    since_bytes = len("error: before\n")
    assert study_child.failure_reason(1, log, since_bytes) == "its process ended with code 1: MemoryError: 3 GB"
    assert "killed by SIGKILL" in study_child.failure_reason(-9, log, since_bytes)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ([], "There is no study to run"),
        (["--preset", "paper-table9", "--out", "x"], "There is no preset named 'paper-table9'"),
        (["--preset", "paper-table1", "--out", "x"], "needs slides"),
        (["--preset", "layers", "--scale", "tiny", "--out", "x"], "It is full or mini"),
        (
            ["--preset", "layers", "--scale", "mini", "--cohort", "c.csv", "--out", "x"],
            "has its own slides and encoder",
        ),
        (["study.toml"], "No output folder was given"),
        (["study.toml", "--preset", "layers", "--out", "x"], "define another one"),
        (["absent.toml", "--out", "x"], "cannot be read"),
        (["--tables", "--out", "x"], "cannot be read"),
        (["--write", "new.toml"], "There is no study to run"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_wrong_words_are_told(study_lab, monkeypatch, options, told):
    monkeypatch.chdir(study_lab)
    result = tapfm("study", *options)
    assert result.returncode == 2
    assert told in " ".join(result.said.split())


def test_a_study_without_its_slides_or_tiles_is_told_before_anything_is_run(study_lab, here):
    shutil.rmtree(study_lab / "tiles-external")
    result = study(study_lab)
    assert result.returncode == 2
    assert f"Make it: tapfm tile {study_lab}/external.csv --out {study_lab}/tiles-external" in result.said
    (study_lab / "external.csv").unlink()
    assert study(study_lab).returncode == 2
    assert not here
    (study_lab / "full").mkdir()
    (study_lab / "full" / "notes.txt").write_text("")
    make_external(study_lab)
    assert "has other files in it" in study(study_lab, out="full").said


def test_a_preset_is_written_to_a_file_once(tmp_path):
    file = tmp_path / "study.toml"
    assert tapfm("study", "--preset", "layers", "--write", file).returncode == 0
    assert 'name = "LoRA, rank 16"' in file.read_text()
    assert tapfm("study", "--preset", "layers", "--write", file).returncode == 2
    listed = tapfm("study", file, "--list")
    assert "h-optimus-0/tapfm/cls-attention/last-4-blocks/seed0" in listed.said
    assert list(tmp_path.iterdir()) == [file]
