"""What the docs say, the tests run."""

import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from command_line import PROGRAM, tapfm
from safetensors.torch import save_file
from slide_files import section, write_slide

from tapfm.encoders.build import build_vit
from tapfm.encoders.catalog import encoder_card, encoder_cards

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


def blocks(page, language):
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)


COMMANDS = sorted(
    {
        line.partition("#")[0].strip()
        for page in PAGES
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


# the docs paint 90 slides; what is typed is run with these added, which come last and so count
FEWER = ("--slides", "3", "--external", "2", "--tiles", "10")


@pytest.fixture(scope="module")
def painted(tmp_path_factory):
    folder = tmp_path_factory.mktemp("synth") / "painted"
    assert tapfm("synth", folder, *FEWER).returncode == 0
    return folder


@pytest.fixture
def lab(tmp_path, painted):
    """Make a folder with what the docs speak of: slides, a table, a corrected outline, a painted cohort."""
    shutil.copytree(painted, tmp_path / "painted")
    (tmp_path / "slides").mkdir()
    (tmp_path / "edited").mkdir()
    for name, mpp in (("case-17", 0.25), ("case-18", 0.5)):
        write_slide(tmp_path / "slides" / f"{name}.svs", section(1200, 1200), mpp=mpp)
    (tmp_path / "cohort.csv").write_text("slide_id,path\ncase-17,slides/case-17.svs\ncase-18,slides/case-18.svs\n")
    outline = [[0, 0], [900, 0], [900, 900], [0, 900], [0, 0]]
    (tmp_path / "edited" / "case-17.geojson").write_text(f'{{"type": "Polygon", "coordinates": [{outline}]}}')
    return tmp_path


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_of_the_docs_runs(command, lab):
    environment = os.environ | {"HF_HOME": str(lab), "TAPFM_CACHE": str(lab)}
    program = [*PROGRAM, *shlex.split(command)[1:], *(FEWER if command.startswith("tapfm synth") else ())]
    result = subprocess.run(program, cwd=lab, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


def test_the_example_of_reading_tiles_runs_as_printed(lab, monkeypatch, capsys):
    monkeypatch.chdir(lab)
    assert tapfm("tile", "cohort.csv", "--out", "tiles").returncode == 0
    (example,) = blocks(ROOT / "docs" / "tile-your-slides.md", "python")
    exec(compile(example, "tile-your-slides.md", "exec"), {})
    assert capsys.readouterr().out == "4 (224, 224, 3) 0.5\n"


def test_the_example_of_asking_the_truth_runs_as_printed(lab, monkeypatch, capsys):
    monkeypatch.chdir(lab)
    assert tapfm("tile", "painted/cohort.csv", "--out", "painted/tiles").returncode == 0
    (example,) = blocks(ROOT / "docs" / "paint-a-cohort.md", "python")
    exec(compile(example, "paint-a-cohort.md", "exec"), {})
    assert re.fullmatch(r"\d+ of \d+ tiles carry the signal\n", capsys.readouterr().out)


def test_the_docs_name_commands_and_targets():
    assert "tapfm encoders uni" in COMMANDS
    assert {"setup", "test", "lint", "typecheck", "bench", "help"} == set(TARGETS)


@pytest.mark.parametrize("target", TARGETS)
def test_every_make_target_of_the_docs_exists_and_is_listed(target):
    listed = subprocess.run(["make", "help"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert re.search(rf"^{target} ", listed, re.MULTILINE)


def test_the_example_of_a_step_runs_as_printed(tmp_path, monkeypatch, capsys):
    (example,) = blocks(ROOT / "docs" / "use-the-step.md", "python")
    torch.manual_seed(0)
    save_file(build_vit(encoder_card("kaiko-s16")).state_dict(), tmp_path / "kaiko-s16.safetensors")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TAPFM_CACHE", str(tmp_path / "cache"))
    exec(compile(example, "use-the-step.md", "exec"), {})
    assert capsys.readouterr().out.startswith("L_agg ")


def test_the_number_of_encoders_in_the_readme_is_right():
    assert f"the {len(encoder_cards())} foundation models" in (ROOT / "README.md").read_text()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_between_pages_lead_somewhere(page):
    for link in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
        assert link.startswith("http") or (page.parent / link).exists(), link


def test_the_readme_fits_one_screen():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 60
