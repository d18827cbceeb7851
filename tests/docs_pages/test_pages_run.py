"""Commands and examples of how-to pages that need special input files, run in the order of the page."""

import re
import shlex
from pathlib import Path

import cv2
import pytest
from cohort_files import read_rows
from command_line import tapfm
from other_tools import SPLITS, write_other_tools_files
from slide_files import section, write_slide

HOW_TO = Path(__file__).parents[2] / "docs" / "how-to"
EXTRA_OPTIONS = {"train": ("--set", "schedule.epochs=1", "--set", "machine.workers=0"), "embed": ("--workers", "0")}


def indented_commands(page):
    """Return the indented commands of a page. test_docs.py runs the commands in console blocks."""
    lines = re.findall(r"^    tapfm (.*)$", (HOW_TO / page).read_text(), re.MULTILINE)
    return [line.partition("  #")[0].strip() for line in lines]


def python_examples(page):
    return re.findall(r"^```python\n(.*?)^```", (HOW_TO / page).read_text(), re.MULTILINE | re.DOTALL)


def run(line):
    arguments = shlex.split(line)
    return tapfm(*arguments, *EXTRA_OPTIONS.get(arguments[0], ()))


def join_lines(text):
    return " ".join(text.split())


@pytest.fixture(scope="module")
def other_tools(tmp_path_factory, one_thread):  # noqa: ARG001 - for the whole module
    return write_other_tools_files(tmp_path_factory.mktemp("other-tools"))


def test_commands_for_files_of_other_tools_run(other_tools, monkeypatch):
    monkeypatch.chdir(other_tools)
    commands = indented_commands("bring-other-tools-files.md")
    assert len(commands) == 17
    for line in commands:
        result = run(line)
        assert result.returncode == 0, result.output
    assert [row["split"] for row in read_rows(other_tools / "runs" / "clam" / "split.csv")] == SPLITS


def test_splits_for_other_tools_are_in_the_documented_files(other_tools, monkeypatch):
    monkeypatch.chdir(other_tools)
    page = (HOW_TO / "bring-other-tools-files.md").read_text()
    rows = re.findall(r"^\| `(clam|patho-bench|nnmil|stamp)` \| (.*?) \|$", page, re.MULTILINE)
    lines = [line for line in indented_commands("bring-other-tools-files.md") if line.startswith("split ")]
    commands = {layout: line for line in lines for layout, _ in rows if f"--layout {layout}" in line}
    for layout, files in rows:
        result = run(f"{commands[layout]} --force")
        assert result.returncode == 0, result.output
        target = "FGFR3" if layout == "stamp" else "label"
        out = other_tools / "splits" / layout
        for name in re.findall(r"`([^`]+[.][^`]+)`", files):
            assert list(out.glob(f"**/{name.replace('TARGET', target)}")), name


@pytest.mark.parametrize("table", ["clam/splits/splits_0.csv", "stamp/clini.csv"])
def test_tables_without_slides_are_rejected_alone(other_tools, table):
    result = tapfm("inspect", other_tools / table, "--slides", other_tools / "slides")
    assert result.returncode == 2
    assert Path(table).name in result.stderr
    assert "no column with slides" in result.stderr


def test_the_documented_line_about_the_encoder_is_printed(other_tools, monkeypatch):
    monkeypatch.chdir(other_tools)
    assert tapfm("split", "clam/dataset.csv", "--slides", "slides", "--out", "again.csv").returncode == 0
    options = ("--tiles", "clam", "--encoder", "tapfm-pocket", "--out", "again.toml")
    assert tapfm("config", "--cohort", "again.csv", *options).returncode == 0
    command = "train again.toml --out runs/again --set adaptation.method=fixed --set tiles.features=stamp/uni-abcdef12"
    stderr = join_lines(run(command).stderr)
    page = (HOW_TO / "bring-other-tools-files.md").read_text()
    (line,) = re.findall(r"    (The feature files \(STAMP\).*?)\n\n", page, re.DOTALL)
    assert join_lines(line) in stderr
    wrong = run(f"{command} --set encoder.name=phikon --out runs/wrong")
    assert wrong.returncode == 2
    assert "128 features per tile" in join_lines(wrong.stderr)
    rejected = run(f"{command} --set aggregator.name=cls-attention --out runs/rejected")
    assert rejected.returncode == 2
    assert "attention" in rejected.stderr


@pytest.fixture
def without_mpp(tmp_path):
    """A folder with one slide of each kind that the page lists."""
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


def test_slides_without_a_scale_are_reported_and_fixed_as_documented(without_mpp, monkeypatch):
    monkeypatch.chdir(without_mpp)
    monkeypatch.setenv("COLUMNS", "250")
    page = (HOW_TO / "slides-without-mpp.md").read_text()
    result = tapfm("inspect", "slides/", "--write-cohort", "with-mpp.csv")
    assert result.returncode == 3
    for line in result.output.splitlines():
        slide, problem = re.match(r"([a-z-]*)", line)[1], re.split(r" {2,}", line.rstrip())[-1]
        if slide in ("contradicts", "no-mpp", "nothing", "odd", "photo", "tenfold"):
            assert join_lines(problem) in join_lines(page)
    assert join_lines(result.stdout.splitlines()[-1]) in join_lines(page)
    table = re.search(r"^    slide_id,path.*?\n\n", page, re.MULTILINE | re.DOTALL)[0]
    (without_mpp / "with-mpp.csv").write_text(re.sub("^    ", "", table.strip(), flags=re.MULTILINE).strip() + "\n")
    inspect, tile, predict, predict_with_option = indented_commands("slides-without-mpp.md")
    inspection = run(inspect)
    assert (inspection.returncode, inspection.output.count("cohort table")) == (0, 2), inspection.output
    assert run(tile).returncode == 0
    assert predict.startswith("predict --model runs/first with-mpp.csv")
    assert predict_with_option.endswith("--mpp 0.25")


def test_an_export_can_be_used_as_documented(workspace, train, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    run_folder = train("exported")
    result = tapfm("export", run_folder, "--out", "exported")
    assert result.returncode == 0
    page = (HOW_TO / "export-and-share.md").read_text()
    for line in result.output.splitlines():
        assert f"    {line}" in page
    (example,) = python_examples("export-and-share.md")
    exec(compile(example, "export-and-share.md", "exec"), {})
    for line in capsys.readouterr().out.splitlines():
        assert f"    {line}" in page
    (tmp_path / "slides").mkdir()
    (tmp_path / "slides" / "one.svs").symlink_to(workspace / "0.svs")
    predict, _, push = indented_commands("export-and-share.md")
    assert run(predict).returncode == 0
    assert push.startswith("export runs/first --out exported --push-to-hub my-lab/")


def test_exports_and_runs_contain_only_the_documented_names(train, tmp_path, workspace):
    run_folder = train("revealing")
    assert tapfm("export", run_folder, "--out", tmp_path / "exported").returncode == 0

    def contains_slide_and_folder(path):
        text = path.read_bytes().decode(errors="replace")
        return "case-0" in text, str(workspace) in text

    assert {contains_slide_and_folder(path) for path in (tmp_path / "exported").iterdir()} == {(False, False)}
    assert contains_slide_and_folder(run_folder / "history.jsonl") == (False, False)
    assert contains_slide_and_folder(run_folder / "summary.md") == (False, True), "its command line has the full path"
    for name in ("split.csv", "predictions-test.csv"):
        assert contains_slide_and_folder(run_folder / name) == (True, False)
    assert contains_slide_and_folder(run_folder / "checkpoints" / "last.safetensors") == (False, True)


def test_resuming_with_other_settings_is_rejected_as_documented(workspace, train):
    run_folder = train("changed")
    result = tapfm("train", workspace / "run.toml", "--out", run_folder, "--resume", "--set", "schedule.epochs=4")
    assert result.returncode == 2
    stderr = result.stderr.replace(str(run_folder), "runs/term").replace("was 1", "was 3")
    page = (HOW_TO / "resume-after-a-crash.md").read_text()
    for line in stderr.splitlines():
        assert f"    {line}" in page
