"""Run the commands and examples of the documentation."""

import re
import shlex
import shutil
import signal
import subprocess
from pathlib import Path

import pytest
import torch
from cohort_files import read_rows
from command_line import PROGRAM, tapfm
from safetensors.torch import save_file
from slide_files import section, write_slide
from training_workspace import create_workspace

from tapfm.encoders.build import build_vit
from tapfm.encoders.catalog import find_encoder_card, load_encoder_cards
from tapfm.viewer.assets import _STATIC_FOLDER as STATIC_FOLDER

ROOT = Path(__file__).parents[1]
HOW_TO = ROOT / "docs" / "how-to"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


def blocks(page, language):
    text = page.read_text().replace(" \\\n", " ")  # join lines that end in a backslash
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


TUTORIALS = sorted((ROOT / "docs" / "tutorials").glob("*.md"))  # tests/journeys runs them from top to bottom
COMMANDS = sorted(
    {
        line.partition("#")[0].strip()
        for page in PAGES
        if page not in TUTORIALS
        for block in blocks(page, "console")
        for line in block.splitlines()
        if line.startswith("tapfm ")
    }
)
TARGETS = sorted(
    {
        target
        for page in PAGES
        for block in blocks(page, "console")
        for line in block.splitlines()
        if line.startswith("make ")
        for target in line.partition("#")[0].split()[1:]
    }
)


# appended to `tapfm synth` commands of the docs; the last value of an option counts
FEWER_SLIDES = ("--slides", "3", "--external", "2", "--tiles-per-slide", "10")


@pytest.fixture(scope="module")
def synthetic(tmp_path_factory):
    folder = tmp_path_factory.mktemp("synth") / "synthetic"
    assert tapfm("synth", folder, *FEWER_SLIDES).returncode == 0
    return folder


@pytest.fixture(scope="module")
def prepared(tmp_path_factory, synthetic, one_thread):  # noqa: ARG001 - for the whole module
    """All files that the docs use: slides, tables, an edited outline, a synthetic cohort, tiles, features and a run."""
    folder = tmp_path_factory.mktemp("workspace")
    shutil.copytree(synthetic, folder / "synthetic")
    create_workspace(folder / "small")
    shutil.move(folder / "small" / "tiles", folder / "tiles")
    rows = read_rows(folder / "small" / "cohort.csv")
    lines = [f"{row['slide_id']},small/{row['path']},{row['patient_id']},{row['split']},{row['FGFR3']}" for row in rows]
    (folder / "split.csv").write_text("\n".join(["slide_id,path,patient_id,split,FGFR3", *lines]) + "\n")
    (folder / "slides").mkdir()
    (folder / "edited").mkdir()
    lines = ["slide_id,path,FGFR3"]
    for number in range(12, 20):
        # the pages use case-17, so it is larger
        side_px, mpp = (1200, 0.25) if number == 17 else (600, 0.5)
        write_slide(folder / "slides" / f"case-{number}.svs", section(side_px, side_px, seed=number), mpp=mpp)
        lines.append(f"case-{number},slides/case-{number}.svs,{number % 2}")
    (folder / "cohort.csv").write_text("\n".join(lines) + "\n")
    outline = [[0, 0], [900, 0], [900, 900], [0, 900], [0, 0]]
    (folder / "edited" / "case-17.geojson").write_text(f'{{"type": "Polygon", "coordinates": [{outline}]}}')
    arguments = ("--cohort", folder / "split.csv", "--tiles", folder / "tiles", "--encoder", "tapfm-pocket")
    assert tapfm("config", *arguments, "--out", folder / "run.toml").returncode == 0
    text = (folder / "run.toml").read_text()
    shorter = re.sub(r"# epochs = 20 ", "epochs = 1 ", text)
    assert shorter != text
    (folder / "run.toml").write_text(shorter)
    assert tapfm("train", folder / "run.toml", "--out", folder / "runs" / "first").returncode == 0
    embed = ("embed", folder / "split.csv", "--encoder", "tapfm-pocket", "--tiles", folder / "tiles")
    assert tapfm(*embed, "--out", folder / "features").returncode == 0
    assert tapfm("tile", folder / "synthetic" / "external.csv", "--out", folder / "tiles-external").returncode == 0
    predict = ("predict", "--model", folder / "runs" / "first", folder / "slides", "--out", folder / "predicted")
    assert tapfm(*predict).returncode == 0
    shutil.copytree(folder / "runs" / "first", folder / "runs" / "second")
    (folder / "study.toml").write_text(STUDY)
    assert tapfm("study", folder / "study.toml", "--out", folder / "studies" / "first").returncode == 0
    return folder


# the smallest possible study, which the page about studies resumes
STUDY = """
name = "A small study"
targets = ["FGFR3"]
encoders = ["tapfm-pocket"]
methods = ["tapfm"]
resamples = 20
[cohort]
table = "split.csv"
tiles = "tiles"
[settings]
schedule.epochs = 1
machine.workers = 0
"""


@pytest.fixture
def workspace(tmp_path, prepared):
    return shutil.copytree(prepared, tmp_path / "workspace")


def remove_output(command, folder):
    """Remove the files that the command will write, unless it resumes."""
    arguments = shlex.split(command)
    outputs = [arguments[2]] if command.startswith("tapfm synth") else []
    if not {"--resume", "--tables"} & set(arguments):
        outputs += [arguments[arguments.index(option) + 1] for option in ("--out", "--write") if option in arguments]
    for out in outputs:
        if (folder / out).is_dir():
            shutil.rmtree(folder / out)
        (folder / out).unlink(missing_ok=True)


SERVERS = [command for command in COMMANDS if command.startswith("tapfm view")]


@pytest.mark.parametrize("command", SERVERS)
def test_every_server_of_the_docs_starts_and_stops(command, workspace):
    if not (STATIC_FOLDER / "index.html").exists():
        pytest.skip("the viewer is not built: make setup (needs npm)")
    program = [*PROGRAM, *shlex.split(command)[1:], "--port", "0", "--no-browser"]  # the last value counts
    server = subprocess.Popen(program, cwd=workspace, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    address = server.stdout.readline()
    server.send_signal(signal.SIGINT)
    _, errors = server.communicate(timeout=60)
    assert address.startswith("http://127.0.0.1:"), errors
    assert server.returncode == 0, errors


@pytest.mark.parametrize("command", [command for command in COMMANDS if command not in SERVERS])
def test_every_command_of_the_docs_runs(command, workspace, monkeypatch):
    remove_output(command, workspace)
    monkeypatch.chdir(workspace)
    monkeypatch.setenv("TAPFM_CACHE", str(workspace))
    result = tapfm(*shlex.split(command)[1:], *(FEWER_SLIDES if command.startswith("tapfm synth") else ()))
    assert result.returncode == 0, result.output


def test_tiling_example_runs(workspace, monkeypatch, capsys):
    monkeypatch.chdir(workspace)
    assert tapfm("tile", "cohort.csv", "--out", "tiles").returncode == 0
    (example,) = blocks(HOW_TO / "tile-your-slides.md", "python")
    exec(compile(example, "tile-your-slides.md", "exec"), {})
    assert capsys.readouterr().out == "4 (224, 224, 3) 0.5\n"


def test_ground_truth_example_runs(workspace, monkeypatch, capsys):
    monkeypatch.chdir(workspace)
    assert tapfm("tile", "synthetic/cohort.csv", "--out", "synthetic/tiles").returncode == 0
    (example,) = blocks(HOW_TO / "generate-a-synthetic-cohort.md", "python")
    exec(compile(example, "generate-a-synthetic-cohort.md", "exec"), {})
    assert re.fullmatch(r"\d+ of \d+ tiles contain the signal\n", capsys.readouterr().out)


@pytest.mark.parametrize("page", ["README.md", "docs/how-to/train-a-model.md"])
def test_training_examples_run(workspace, monkeypatch, capsys, page):
    monkeypatch.chdir(workspace)
    (example,) = blocks(ROOT / page, "python")
    if page == "README.md":
        for name in ("split.csv", "tiles", "runs"):
            remove_output(f"--out {name}", workspace)
        assert len([line for line in example.splitlines() if line]) == 9
    exec(compile(example, page, "exec"), {})
    assert re.fullmatch(r"[12] \{'FGFR3': [\d.]+\}\n", capsys.readouterr().out)
    assert (workspace / "runs").is_dir()


def test_evaluation_example_runs(workspace, monkeypatch, capsys):
    monkeypatch.chdir(workspace)
    (example,) = blocks(HOW_TO / "evaluate-a-model.md", "python")
    exec(compile(example, "evaluate-a-model.md", "exec"), {})
    assert re.search(r"^Estimate\(value=[\d.]+, ", capsys.readouterr().out, re.MULTILINE)


def test_prediction_example_runs(workspace, monkeypatch, capsys):
    monkeypatch.chdir(workspace)
    (example,) = blocks(HOW_TO / "predict-slides.md", "python")
    exec(compile(example, "predict-slides.md", "exec"), {})
    assert re.fullmatch(r"case-17 \d+ True\n", capsys.readouterr().out)


def test_study_example_runs(workspace, monkeypatch, capsys):
    monkeypatch.chdir(workspace)
    (example,) = blocks(HOW_TO / "run-a-study.md", "python")
    exec(compile(example, "run-a-study.md", "exec"), {})
    assert capsys.readouterr().out == "{}\n"


def test_report_example_runs(workspace, monkeypatch, capsys):
    monkeypatch.chdir(workspace)
    (example,) = blocks(HOW_TO / "make-a-report.md", "python")
    exec(compile(example, "make-a-report.md", "exec"), {})
    assert capsys.readouterr().out == "0\n"


def test_configuration_errors_are_quoted_as_printed(workspace):
    changes = ("--set", "adaptation.lamda=1", "--set", "schedule.epochs=ten")
    errors = tapfm("config", workspace / "run.toml", *changes).stderr
    page = (HOW_TO / "train-a-model.md").read_text()
    for line in errors.splitlines()[1:3]:
        assert f"    {line}" in page, errors


def test_commands_and_make_targets_are_found():
    assert "tapfm train run.toml --out runs/first" in COMMANDS
    assert set(TARGETS) == {"demo", "docs", "test", "lint", "typecheck", "bench", "wheel", "help"}


@pytest.mark.parametrize("target", TARGETS)
def test_every_make_target_of_the_docs_exists_and_is_listed(target):
    listed = subprocess.run(["make", "help"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert re.search(rf"^{target} ", listed, re.MULTILINE)


def test_training_step_example_runs(tmp_path, monkeypatch, capsys):
    (example,) = blocks(HOW_TO / "use-the-step.md", "python")
    torch.manual_seed(0)
    save_file(build_vit(find_encoder_card("kaiko-s16")).state_dict(), tmp_path / "kaiko-s16.safetensors")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TAPFM_CACHE", str(tmp_path / "cache"))
    exec(compile(example, "use-the-step.md", "exec"), {})
    assert capsys.readouterr().out.startswith("L_agg ")


def test_readme_states_the_number_of_encoders():
    text = (ROOT / "README.md").read_text()
    assert f"{len(load_encoder_cards())} ViTs" in text
    assert f"the {len(load_encoder_cards())} ViTs" in text


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_between_pages_exist(page):
    for link in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
        assert link.startswith("http") or (page.parent / link).exists(), link


@pytest.mark.parametrize("page", [*PAGES, ROOT / "Makefile"], ids=lambda page: page.name)
def test_named_benchmarks_and_tools_exist(page):
    for name in re.findall(r"(?:benchmarks|tools)/\w+\.py", page.read_text()):
        assert (ROOT / name).exists()


def test_readme_lines_are_short():
    assert max(map(len, (ROOT / "README.md").read_text().splitlines())) <= 120
