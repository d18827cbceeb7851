"""Files that a study writes, from fake results."""

import csv
import re

import pytest
from study_results import make_results, make_study

from tapfm.results.document import Paragraph, read_sections_json, write_sections_json
from tapfm.results.figure import Figure
from tapfm.results.markdown import markdown_sections
from tapfm.results.table import Table
from tapfm.runtime.csv_files import write_csv
from tapfm.study import study_tables
from tapfm.study.folder import StudyFolder

FILES = {"ROC curves": "roc.png", "Validation AUC and training loss": "curves.png"}
FAILED = ["tapfm-pocket/tapfm/cls-attention/seed0", "train", "failed", "no | memory", "tapfm train x.toml", "x.log"]


NOTES = ["Synthetic slides.", "<b>Not</b> tissue."]
SPLIT = "slide_id,patient_id,cohort,split,FGFR3\ns1,p1,,train,1\ns2,p2,,val,0\ns3,p2,,test,1\ns4,p2,,test,0\n"


def write_fake_study(folder, strengths):
    """Write the files of a study with fake runs, and return the table of AUCs."""
    study = make_study(notes=NOTES)
    results = make_results(study, strengths, folder=folder, baseline=0.3 if strengths else None)
    for run in (run for each in results.models for run in each.histories):
        (folder / "runs" / run).mkdir(parents=True)
        (folder / "runs" / run / "split.csv").write_text(SPLIT)
    failed = [FAILED] if strengths else []
    write_csv(folder / "status.csv", ("run", "step", "state", "reason", "command", "log"), failed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(study_tables, "collect_results", lambda *_: results)
        return study_tables.write_study_tables(study, StudyFolder(folder))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("study")
    write_fake_study(folder, (0.5, 1.0))
    return folder


def test_sections_can_be_read_back(folder, tmp_path):
    sections = read_sections_json(folder / "study.json", hint="")
    assert [section.title for section in sections] == ["Overview", "Result", "AUC", "Convergence, time and memory"]
    assert (folder / "study.md").read_text().startswith(markdown_sections("A_study", sections, FILES).rstrip())
    write_sections_json(tmp_path / "again.json", sections)
    assert read_sections_json(tmp_path / "again.json", hint="") == sections


def test_figures_have_files_and_notes_are_plain_text(folder):
    blocks = [block for section in read_sections_json(folder / "study.json", hint="") for block in section.blocks]
    figures = [FILES[block.title] for block in blocks if isinstance(block, Figure)]
    assert figures == ["roc.png", "curves.png"]
    assert all((folder / name).read_bytes().startswith(b"\x89PNG") for name in figures)
    texts = [block.text for block in blocks if isinstance(block, Paragraph)]
    assert texts == [texts[0], *NOTES]
    assert texts[0].startswith("2 of 2 runs")
    assert {"tapfm-pocket", "finetune", "tapfm", "abmil", "cls-attention"} <= set(re.findall(r"[\w-]+", texts[0]))


def test_failed_steps_are_listed_with_their_command(folder):
    page = (folder / "study.md").read_text()
    failures = page[page.index("## Failed steps") :]
    assert all(text.replace("|", r"\|") in failures for text in (FAILED[0], FAILED[1], *FAILED[3:]))


def test_tables_have_separate_files_with_the_same_values(folder):
    tables = {
        section.title: block
        for section in read_sections_json(folder / "study.json", hint="")
        for block in section.blocks
        if isinstance(block, Table)
    }
    with (folder / "costs.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    shown = tables["Convergence, time and memory"]
    names = [column.name for column in shown.columns]
    assert names == list(rows[0])
    for row, cells in zip(rows, shown.rows, strict=True):
        assert [row["model"], *(float(row[name]) for name in names[1:])] == [cell.value for cell in cells.cells]
    page = (folder / "study.md").read_text()
    for name in ("table_binary.md", "costs.md"):
        text = (folder / name).read_text().split("\n", 2)[2]
        assert text.strip() in page


def test_slides_and_patients_are_counted_by_split(folder):
    page = (folder / "study.md").read_text()
    for row in (
        *("| train | 1 | 1 | 1 of 1 (100%) |", "| val | 1 | 1 | 0 of 1 (0%) |"),
        *("| test | 2 | 1 | 1 of 2 (50%) |", "| external | 30 | 30 | 15 of 30 (50%) |"),
    ):
        assert row in page


def test_study_without_results_has_a_report(tmp_path):
    aucs, headline = write_fake_study(tmp_path, ())
    assert not aucs.rows
    assert not headline.rows
    page = (tmp_path / "study.md").read_text()
    assert "0 of 2 runs finished" in page
    assert "No results yet." in page
    assert not (tmp_path / "roc.png").exists()
    assert len(read_sections_json(tmp_path / "study.json", hint="")) == 4
