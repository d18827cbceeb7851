"""Complete studies: runs, evaluations and tables, isolation of failures, and resuming."""

import csv
import json
import shutil
import signal
import time
from pathlib import Path

import pytest
from command_line import start_tapfm, tapfm, wait_for
from PIL import Image
from training_workspace import POSITIONS, edit_csv, read_history

from tapfm.evaluation.predictions import read_predictions
from tapfm.runs.ensemble import find_member_folders
from tapfm.runtime.commands import read_failure_reason, run_child_command
from tapfm.runtime.workers import available_cores
from tapfm.study import runner as study_runner
from tapfm.tiles.store import TileSet, write_tiles

STUDY = """
name = "A small study"
targets = ["FGFR3"]
encoders = ["tapfm-pocket"]
methods = ["fixed", "tapfm"]
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


def write_external_cohort(folder):
    """Write an external cohort with the same slide files, but with other slide and patient ids."""
    lines = ["slide_id,path,patient_id,FGFR3"]
    for i in range(4):
        write_tiles(
            folder / "tiles-external", TileSet(f"x-{i}", POSITIONS, 224, 224, 0.5, 0.5, 0, (448, 448)), "trident"
        )
        lines.append(f"x-{i},{i}.svs,Roe{i},{i % 2}")
    (folder / "external.csv").write_text("\n".join(lines) + "\n")


@pytest.fixture
def study_workspace(workspace_copy):
    write_external_cohort(workspace_copy)
    (workspace_copy / "study.toml").write_text(STUDY)
    return workspace_copy


@pytest.fixture
def commands(monkeypatch):
    """Run the commands of a study in this process, where torch is already imported, and record their arguments."""
    commands = []

    def run(arguments, log, check, environment):
        check()
        assert environment == {"OMP_NUM_THREADS": str(min(4, available_cores())), "OMP_WAIT_POLICY": "passive"}
        commands.append(arguments)
        result = tapfm(*arguments)
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("a") as file:
            file.write(result.output)
        return result.returncode

    monkeypatch.setattr(study_runner, "run_child_command", run)
    return commands


def run_study(workspace, *options, out="study"):
    return tapfm("study", workspace / "study.toml", "--out", workspace / out, *options)


def read_status(folder):
    with (folder / "status.csv").open(newline="") as file:
        return {(row["run"], row["step"]): row for row in csv.DictReader(file)}


def remove_external(text):
    return text.partition("[external]")[0] + "[settings]" + text.partition("[settings]")[2]


def append_to_study(workspace, text):
    (workspace / "study.toml").write_text((workspace / "study.toml").read_text() + text)


# lambda is not valid for method fixed
VARIANTS = """
[[variants]]
name = "plain"
[[variants]]
name = "lambda 0.5"
settings.adaptation.lambda = 0.5
"""


def test_study_with_an_invalid_run_can_be_resumed_and_its_tables_rewritten(study_workspace, commands):
    """Two methods, and a variant that is invalid for one of them."""
    append_to_study(study_workspace, VARIANTS)
    out = study_workspace / "study"
    result = run_study(study_workspace)
    assert result.returncode == 3, result.output  # because of the invalid run
    fixed, half = "tapfm-pocket/fixed/abmil/plain/seed0", "tapfm-pocket/tapfm/cls-attention/lambda-0.5/seed0"
    status = read_status(out)
    assert {key for key, row in status.items() if row["state"] == "failed"} == {
        ("tapfm-pocket/fixed/abmil/lambda-0.5/seed0", "train")
    }
    assert "adaptation.lambda: must be 0 with method fixed" in result.output
    assert "adaptation.lambda" in (out / "study.md").read_text()
    assert status[fixed, "evaluate external"]["state"] == "done"
    assert status[half, "train"]["command"].startswith("tapfm train ")
    assert [each[0] for each in commands].count("embed") == 2
    assert [each[0] for each in commands].count("train") == 3
    assert json.loads((out / "evaluations" / half / "external" / "metrics.json").read_text())["slides"] == 4

    text = (out / "table_binary.md").read_text()
    for row in ("tapfm-pocket + ABMIL, plain", "tapfm-pocket (TAPFM), lambda 0.5", "colour baseline"):
        assert f"| {row} | " in text
    assert "FGFR3, Test (N = 3)" in text  # the last two slides are of one patient
    assert "FGFR3, External (N = 4)" in text
    page = (out / "study.md").read_text()
    assert "3 of 4 runs finished" in page
    assert "| train | 4 | 4 | 2 of 4 (50%) |" in page
    assert "| external | 4 | 4 | 2 of 4 (50%) |" in page
    assert "tapfm-pocket (TAPFM), plain" in (out / "costs.md").read_text()

    before = {name: (out / name).read_bytes() for name in TABLES}
    commands.clear()
    assert run_study(study_workspace).returncode == 2  # the folder already contains a study
    assert run_study(study_workspace, "--resume").returncode == 3
    assert not commands  # all valid steps are done
    assert {name: (out / name).read_bytes() for name in TABLES} == before
    for name in TABLES:
        (out / name).unlink()
    assert tapfm("study", "--tables", "--out", out).returncode == 0
    assert {name: (out / name).read_bytes() for name in TABLES} == before

    settings = (study_workspace / "study.toml").read_text()
    (study_workspace / "study.toml").write_text(settings.replace("schedule.epochs = 2", "schedule.epochs = 3"))
    changed = run_study(study_workspace, "--resume")
    assert changed.returncode == 2
    assert "already started" in changed.output
    assert f"{fixed}: schedule.epochs was 2 and is now 3" in changed.output


def test_select_runs_with_only_then_resume_the_others(study_workspace, commands, monkeypatch):
    """Command-line paths are relative to the current folder, and paths in STUDY.toml to the file."""
    monkeypatch.chdir(study_workspace)
    study_workspace, out = Path(), Path("study")
    listed = tapfm("study", study_workspace / "study.toml", "--list")
    assert [line.split()[0] for line in listed.output.splitlines()] == [
        "tapfm-pocket/fixed/abmil/seed0",
        "tapfm-pocket/tapfm/cls-attention/seed0",
    ]
    assert run_study(study_workspace, "--only", "*/tapfm/*").returncode == 0
    assert [each[0] for each in commands] == ["train", "evaluate", "evaluate"]
    listed = run_study(study_workspace, "--list")
    assert "fixed/abmil/seed0  to do" in listed.output
    assert "cls-attention/seed0  finished" in listed.output
    assert "1 of 2 runs finished" in (out / "study.md").read_text()
    assert run_study(study_workspace, "--only", "nothing").returncode == 2
    commands.clear()
    assert run_study(study_workspace, "--resume").returncode == 0
    assert [each[0] for each in commands] == ["embed", "embed", "train", "evaluate", "evaluate"]
    assert "2 of 2 runs finished" in (out / "study.md").read_text()

    # a changed cohort table is evaluated again
    before = (out / "table_binary.csv").read_text()
    edit_csv(Path("external.csv"), lambda rows: rows[0].update(FGFR3="1"))
    commands.clear()
    tapfm("study", "--tables", "--out", out)
    assert "external" not in (out / "table_binary.csv").read_text()
    assert run_study(study_workspace, "--resume").returncode == 0
    assert [each[0] for each in commands] == ["evaluate", "evaluate"]
    after = (out / "table_binary.csv").read_text()
    assert "external" in after
    assert after != before

    # a study whose cohort table was moved
    Path("external.csv").rename("moved.csv")
    for missing in (tapfm("study", "--tables", "--out", out), run_study(study_workspace, "--resume")):
        assert missing.returncode == 2
        assert "external.csv" in missing.output
        assert "external.table" in missing.output
    assert (out / "table_binary.csv").read_text() == after


def test_failed_run_does_not_affect_other_runs(study_workspace, commands):
    """With an unreadable slide, method tapfm fails, but method fixed has its features already."""
    assert run_study(study_workspace, "--only", "*/fixed/*").returncode == 0
    slide = (study_workspace / "1.svs").read_bytes()
    (study_workspace / "1.svs").write_bytes(b"nothing")
    result = run_study(study_workspace, "--resume")
    assert result.returncode == 3
    status = read_status(study_workspace / "study")
    run = "tapfm-pocket/tapfm/cls-attention/seed0"
    assert status[run, "train"]["state"] == "failed"
    assert status[run, "evaluate test"]["state"] == "not run"
    assert status[run, "evaluate test"]["reason"].startswith(f"needs {run}: train")
    assert "case-01" in (study_workspace / "study" / status[run, "train"]["log"]).read_text()
    assert "## Failed steps" in (study_workspace / "study" / "study.md").read_text()
    (study_workspace / "1.svs").write_bytes(slide)
    commands.clear()
    assert run_study(study_workspace, "--resume").returncode == 0
    assert [each[0] for each in commands] == ["train", "evaluate", "evaluate"]
    assert "## Failed steps" not in (study_workspace / "study" / "study.md").read_text()


def test_folds_are_pooled_and_their_ensemble_is_evaluated_on_external_slides(study_workspace, commands):
    def add_folds(rows):
        for i, row in enumerate(rows):
            patient = min(i, 8)
            row["fold_0"] = "test" if patient in (0, 1, 2) else "val" if patient in (3, 4) else "train"
            row["fold_1"] = "test" if patient in (3, 4, 5) else "val" if patient in (0, 1) else "train"

    edit_csv(study_workspace / "cohort.csv", add_folds)
    text = STUDY.replace('["fixed", "tapfm"]', '["fixed"]').replace("schedule.epochs = 2", "schedule.epochs = 1")
    (study_workspace / "study.toml").write_text(text.replace("resamples", "folds = [0, 1]\nresamples"))
    result = run_study(study_workspace)
    assert result.returncode == 0, result.output
    out = study_workspace / "study"
    method = "tapfm-pocket/fixed/abmil"
    assert [each[0] for each in commands] == ["embed", "embed", "train", "evaluate", "train", "evaluate", "evaluate"]
    members, _ = find_member_folders(out / "ensembles" / method / "seed0")
    assert [member.resolve() for member in members] == [out / "runs" / method / f"fold{i}" / "seed0" for i in (0, 1)]
    table = (out / "table_binary.md").read_text()
    assert "FGFR3, Test (N = 6)" in table
    assert "FGFR3, External (N = 4)" in table
    external = read_predictions(out / "evaluations" / method / "ensemble-seed0" / "external" / "predictions.csv")
    assert len(external) == 4
    assert "all (2 folds)" in (out / "study.md").read_text()

    # the ensemble is also written without external slides
    shutil.rmtree(out / "ensembles")
    text = remove_external((study_workspace / "study.toml").read_text())
    (study_workspace / "study.toml").write_text(text)
    commands.clear()
    assert run_study(study_workspace, "--resume").returncode == 0
    assert not commands
    assert find_member_folders(out / "ensembles" / method / "seed0")[0] == members


def test_forgetting_study_probes_the_encoder(study_workspace, commands):
    for side in ("train", "test"):
        for number, name in enumerate(("pale", "dark")):
            folder = study_workspace / "probe" / side / name
            folder.mkdir(parents=True)
            for i in range(3):
                Image.new("RGB", (64, 64), (90 + 120 * number, 60 + 20 * i, 140)).save(folder / f"{i}.png")
    text = remove_external(STUDY).replace('["fixed", "tapfm"]', '["tapfm"]')
    text = text.replace("resamples = 50", 'resamples = 50\nreport = "forgetting"').replace("epochs = 2", "epochs = 1")
    (study_workspace / "study.toml").write_text(text + '[probe]\ntiles = "probe"\n')
    result = run_study(study_workspace)
    assert result.returncode == 0, result.output
    assert [each[0] for each in commands] == ["train", "evaluate", "probe"]
    probe = json.loads((study_workspace / "study" / "probes/tapfm-pocket/tapfm/cls-attention/seed0.json").read_text())
    assert probe["classes"] == ["dark", "pale"]
    assert 0 < probe["cosine_distance"] < 1
    assert 0 < probe["linear_cka"] <= 1
    assert "no significant change" in (study_workspace / "study" / "forgetting.md").read_text()


@pytest.mark.usefixtures("commands")
def test_stability_study_compares_orders_of_updates(study_workspace):
    orders = "".join(
        f'[[variants]]\nname = "{each}"\nsettings.adaptation.bag_gradient = "{each}"\n'
        for each in ("before", "after", "joint")
    )
    text = remove_external(STUDY).replace('["fixed", "tapfm"]', '["tapfm"]')
    text = text.replace("resamples", 'report = "stability"\nresamples')
    text = text.replace("epochs = 2", "epochs = 4").replace("tiles_per_slide = 4", "tiles_per_slide = 1", 1)
    (study_workspace / "study.toml").write_text(text + orders)
    result = run_study(study_workspace)
    assert result.returncode == 0, result.output
    out = study_workspace / "study"
    with (out / "ablation.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["variant"] for row in rows] == ["before", "after", "joint"]
    assert all(row["b"] and row["r_squared"] for row in rows)
    assert (out / "ablation-raw.png").exists()
    assert (out / "ablation-log.png").exists()
    text = (out / "stability.md").read_text()
    assert "| runs | 1 | 1 | 1 |" in text
    assert "may be due to chance" in text


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGKILL, -9)])
def test_stopped_study_saves_its_run_and_resumes(study_workspace, commands, number, code):
    """In child processes. The current run saves a checkpoint even if the study is killed."""
    text = remove_external(STUDY).replace('["fixed", "tapfm"]', '["tapfm"]').replace("epochs = 2", "epochs = 12")
    (study_workspace / "study.toml").write_text(text)
    out = study_workspace / "study"
    run = out / "runs/tapfm-pocket/tapfm/cls-attention/seed0"
    process = start_tapfm("study", study_workspace / "study.toml", "--out", out)
    wait_for((run / "history.jsonl").exists, process)
    process.send_signal(number)
    stdout, stderr = process.communicate()
    assert process.returncode == code, stdout + stderr
    assert "Traceback" not in stderr
    if number == signal.SIGINT:
        assert f"tapfm study {out}/study.toml --out {out} --resume" in stderr
        assert read_status(out)["tapfm-pocket/tapfm/cls-attention/seed0", "train"]["state"] == "not run"
    log = out / "logs/tapfm-pocket/tapfm/cls-attention/seed0.log"
    deadline = time.monotonic() + 60
    while "Stopped. The run is saved." not in log.read_text():
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.05)
    before = len(read_history(run))
    assert 0 < before < 12
    time.sleep(0.3)  # until the process has exited and its lock is released
    result = tapfm("study", out / "study.toml", "--out", out, "--resume")
    assert result.returncode == 0, result.output
    assert [each[0] for each in commands] == ["train", "evaluate"]
    assert "Resuming in epoch" in log.read_text()
    assert len(read_history(run)) == 12


def test_failure_reason_is_the_last_error_in_the_log(tmp_path):
    log = tmp_path / "run.log"
    code = run_child_command(["train", str(tmp_path / "absent.toml"), "--out", str(tmp_path / "r")], log, lambda: None)
    assert code == 2
    assert log.read_text().startswith("$ tapfm train ")
    assert read_failure_reason(code, log, 0).startswith(f"{tmp_path}/absent.toml ")
    log.write_text("error: before\n$ tapfm train\nTraceback\nMemoryError: 3 GB\n")
    start_byte = len("error: before\n")
    assert read_failure_reason(1, log, start_byte) == "the process ended with exit code 1: MemoryError: 3 GB"
    assert "killed by SIGKILL" in read_failure_reason(-9, log, start_byte)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "STUDY.toml or --preset is missing"),
        (["--preset", "paper-table9", "--out", "x"], "'paper-table9'"),
        (["--preset", "paper-table1", "--out", "x"], "--cohort"),
        (["--preset", "layers", "--scale", "tiny", "--out", "x"], "must be full or mini"),
        (
            ["--preset", "layers", "--scale", "mini", "--cohort", "c.csv", "--out", "x"],
            "cannot be combined with --cohort",
        ),
        (["--preset", "layers", "--scale", "mini", "--fold", "1", "--out", "x"], "cannot be combined with --fold"),
        (["study.toml"], "--out is missing"),
        (["--tables"], "--out is missing"),
        (["--tables", "--list"], "--out is missing"),
        (["--preset", "layers", "--cohort", "absent.csv", "--out", "x"], "correct --cohort"),
        (["study.toml", "--preset", "layers", "--out", "x"], "cannot be combined with study.toml"),
        (["absent.toml", "--out", "x"], "absent.toml"),
        (["--tables", "--out", "x"], "study.toml"),
        (["--write", "new.toml"], "STUDY.toml or --preset is missing"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_invalid_options_are_an_error(study_workspace, monkeypatch, options, message):
    monkeypatch.chdir(study_workspace)
    result = tapfm("study", *options)
    assert result.returncode == 2
    assert message in " ".join(result.output.split())


def test_missing_slides_or_tiles_are_an_error_before_the_first_run(study_workspace, commands):
    shutil.rmtree(study_workspace / "tiles-external")
    result = run_study(study_workspace)
    assert result.returncode == 2
    assert f"tapfm tile {study_workspace}/external.csv --out {study_workspace}/tiles-external" in result.output
    (study_workspace / "external.csv").unlink()
    assert run_study(study_workspace).returncode == 2
    assert not commands
    (study_workspace / "full").mkdir()
    (study_workspace / "full" / "notes.txt").write_text("")
    write_external_cohort(study_workspace)
    assert "notes.txt" in run_study(study_workspace, out="full").output


def test_write_preset_does_not_overwrite_a_file(tmp_path):
    file = tmp_path / "study.toml"
    assert tapfm("study", "--preset", "layers", "--write", file).returncode == 0
    assert 'name = "LoRA, rank 16"' in file.read_text()
    assert tapfm("study", "--preset", "layers", "--write", file).returncode == 2
    listed = tapfm("study", file, "--list")
    assert "h-optimus-0/tapfm/cls-attention/last-4-blocks/seed0" in listed.output
    assert list(tmp_path.iterdir()) == [file]
