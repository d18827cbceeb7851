"""Commands and examples of pages that need files of their own are run in the order of the page, as printed there."""

import re
import shlex
from pathlib import Path

import cv2
import pytest
from command_line import tapfm
from other_tools import make
from slide_files import section, write_slide

HOW_TO = Path(__file__).parents[2] / "docs" / "how-to"
QUICK = {"train": ("--set", "schedule.epochs=1", "--set", "machine.workers=0"), "embed": ("--workers", "0")}


def commands_of(page):
    """The indented commands: those in console blocks are run by test_docs.py."""
    found = re.findall(r"^    tapfm (.*)$", (HOW_TO / page).read_text(), re.MULTILINE)
    return [line.partition("  #")[0].strip() for line in found]


def examples_of(page):
    return re.findall(r"^```python\n(.*?)^```", (HOW_TO / page).read_text(), re.MULTILINE | re.DOTALL)


def run(line):
    words = shlex.split(line)
    return tapfm(*words, *QUICK.get(words[0], ()))


def in_one_line(text):
    return " ".join(text.split())


@pytest.fixture(scope="module")
def other_tools(tmp_path_factory, one_thread):  # noqa: ARG001 - for the whole module
    return make(tmp_path_factory.mktemp("other-tools"))


def test_files_of_other_tools_are_read_as_the_page_says(other_tools, monkeypatch):
    monkeypatch.chdir(other_tools)
    page = "bring-other-tools-files.md"
    (example,) = examples_of(page)
    exec(compile(example, page, "exec"), {})
    commands = commands_of(page)
    assert len(commands) == 13
    for line in commands:
        result = run(line)
        assert result.returncode == 0, result.said
    assert (other_tools / "clam.csv").read_text().splitlines()[5].endswith(",val")


@pytest.mark.parametrize("table", ["clam/splits/splits_0.csv", "stamp/clini.csv"])
def test_the_tables_that_the_page_says_are_not_read_are_refused(other_tools, table):
    result = tapfm("inspect", other_tools / table, "--slides", other_tools / "slides")
    assert result.returncode == 2
    assert "names no slides" in result.stderr


def test_what_the_page_says_of_a_wrong_encoder_is_said(other_tools, monkeypatch):
    monkeypatch.chdir(other_tools)
    assert tapfm("split", "clam/dataset.csv", "--slides", "slides", "--out", "again.csv").returncode == 0
    words = ("config", "--cohort", "again.csv", "--tiles", "clam", "--encoder", "tapfm-pocket", "--out", "again.toml")
    assert tapfm(*words).returncode == 0
    fixed = "train again.toml --out runs/again --set adaptation.method=fixed --set tiles.features=stamp/uni-abcdef12"
    said = in_one_line(run(fixed).stderr)
    page = in_one_line((HOW_TO / "bring-other-tools-files.md").read_text())
    (line,) = re.findall(r"The feature files \(STAMP\).*?another one\.", page)
    assert line in said
    refused = run(f"{fixed} --set aggregator.name=cls-attention --out runs/refused")
    assert refused.returncode == 2
    assert "has no attention" in refused.stderr


@pytest.fixture
def without_mpp(tmp_path):
    """One slide of every kind, as the page lists them."""
    folder = tmp_path / "slides"
    folder.mkdir()
    kinds = {
        "good": (0.25, 40),
        "no-mpp": (None, 40),
        "nothing": (None, None),
        "tenfold": (2.5, 40),
        "contradicts": (0.5, 40),
        "odd": (0.2, 40),
    }
    for seed, (name, (mpp, objective)) in enumerate(kinds.items()):
        write_slide(folder / f"{name}.svs", section(1200, 1200, seed=seed), mpp=mpp, objective=objective)
    cv2.imwrite(str(folder / "photo.png"), section(1200, 1200, seed=9)[:, :, ::-1])
    return tmp_path


def test_slides_without_a_scale_are_found_and_mended_as_the_page_says(without_mpp, monkeypatch):
    monkeypatch.chdir(without_mpp)
    monkeypatch.setenv("COLUMNS", "250")
    page = (HOW_TO / "slides-without-mpp.md").read_text()
    result = tapfm("inspect", "slides/", "--write-cohort", "with-mpp.csv")
    assert result.returncode == 3
    for line in result.said.splitlines():
        slide, problem = re.match(r"([a-z-]*)", line)[1], re.split(r" {2,}", line.rstrip())[-1]
        if slide in ("contradicts", "no-mpp", "nothing", "odd", "photo", "tenfold"):
            assert in_one_line(problem) in in_one_line(page)
    assert in_one_line(result.stdout.splitlines()[-1]) in in_one_line(page)
    mended = re.search(r"^    slide_id,path.*?\n\n", page, re.MULTILINE | re.DOTALL)[0]
    (without_mpp / "with-mpp.csv").write_text(re.sub("^    ", "", mended.strip(), flags=re.MULTILINE).strip() + "\n")
    inspect, tile, predict = commands_of("slides-without-mpp.md")
    looked = run(inspect)
    assert (looked.returncode, looked.said.count("manifest")) == (0, 2), looked.said
    assert run(tile).returncode == 0
    assert predict.startswith("predict --model runs/first with-mpp.csv")


def test_an_export_is_used_as_the_page_says(lab, train, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    first = train("exported")
    said = tapfm("export", first, "--out", "exported")
    assert said.returncode == 0
    page = (HOW_TO / "export-and-share.md").read_text()
    for line in said.said.splitlines():
        assert f"    {line}" in page
    (example,) = examples_of("export-and-share.md")
    exec(compile(example, "export-and-share.md", "exec"), {})
    for line in capsys.readouterr().out.splitlines():
        assert f"    {line}" in page
    (tmp_path / "slides").mkdir()
    (tmp_path / "slides" / "one.svs").symlink_to(lab / "0.svs")
    predict, _, push = commands_of("export-and-share.md")
    assert run(predict).returncode == 0
    assert push.startswith("export runs/first --out exported --push-to-hub my-lab/")


def test_what_an_export_and_a_run_reveal_is_what_the_page_says(train, tmp_path, lab):
    first = train("revealing")
    assert tapfm("export", first, "--out", tmp_path / "exported").returncode == 0

    def names(path):
        text = path.read_bytes().decode(errors="replace")
        return "case-0" in text, str(lab) in text

    assert {names(path) for path in (tmp_path / "exported").iterdir()} == {(False, False)}
    assert names(first / "history.jsonl") == (False, False)
    assert names(first / "summary.md") == (False, True), "the command, typed with the whole path"
    assert names(first / "split.csv") == names(first / "predictions-test.csv") == (True, False)
    assert names(first / "checkpoints" / "last.safetensors") == (False, True)


def test_a_run_that_is_begun_with_something_else_is_refused_as_the_page_says(lab, train):
    changed = train("changed")
    result = tapfm("train", lab / "run.toml", "--out", changed, "--resume", "--set", "schedule.epochs=4")
    assert result.returncode == 2
    said = result.stderr.replace(str(changed), "runs/term").replace("was 1", "was 3")
    page = (HOW_TO / "resume-after-a-crash.md").read_text()
    for line in said.splitlines():
        assert f"    {line}" in page
