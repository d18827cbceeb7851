"""The page about cohort tables: its tables, commands, messages and lists of names."""

import re
import shlex
from pathlib import Path

import pytest
from command_line import tapfm
from slide_files import section, write_slide

from tapfm.cohort.columns import _COLUMN_NAMES as COLUMN_NAMES
from tapfm.cohort.columns import normalise_column_name
from tapfm.cohort.table_options import MISSING_VALUES

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "your-cohort-table.md"
TEXT = PAGE.read_text("utf-8")
COMMANDS = [line.partition("  #")[0].strip() for line in re.findall(r"^    tapfm (.*)$", TEXT, re.MULTILINE)]
QUOTED = set(re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```", "", TEXT, flags=re.MULTILINE | re.DOTALL)))
REFUSED = "split bad.csv --out never.csv"


def join_lines(text):
    return " ".join(text.split())


@pytest.fixture(scope="module")
def folder(tmp_path_factory, one_thread):  # noqa: ARG001 - for the whole module
    """A folder with the tables of the page, and small slides."""
    folder = tmp_path_factory.mktemp("tables")
    for name, content in re.findall(r'^```text title="(.*?)"\n(.*?)^```', TEXT, re.MULTILINE | re.DOTALL):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(content, encoding="utf-8")
    (folder / "slides").mkdir()
    names = [f"S{number}" for number in range(1, 6)] + [
        f"B23-081{each}" for each in ("5-1", "5-2", "6-1", "7-1", "8-1")
    ]
    for seed, name in enumerate(names):
        write_slide(
            folder / "slides" / f"{name}.svs",
            section(448, 448, seed=seed, tissue=(0, 0, 1, 1)),
            tile_px=224,
            downsamples=(1,),
        )
    return folder


@pytest.fixture(scope="module")
def outputs(folder):
    """The outputs of all commands of the page, run in its order."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        return {command: tapfm(*shlex.split(command)) for command in COMMANDS}


@pytest.mark.parametrize("command", COMMANDS)
def test_command_runs(command, outputs):
    result = outputs[command]
    assert result.returncode == (2 if command == REFUSED else 0), result.output


def test_messages_are_as_printed(outputs):
    page = join_lines(TEXT)
    assert join_lines(outputs[REFUSED].stderr) in page
    assert join_lines(outputs["split cohort.csv --out split.csv"].stderr).startswith("Read 5 slides of 4 patients")
    for line in outputs["split cohort.csv --out split.csv"].stderr.splitlines()[:2]:
        assert f"    {line}\n" in TEXT
    (warning,) = [
        line for line in outputs["split numbered.csv --out numbered-split.csv"].stderr.splitlines() if "4 sl" in line
    ]
    assert warning in page


def test_splits_of_clam_and_patho_bench_are_read(outputs):
    assert (
        "Using the column fold_0 (cohort.fold)." in outputs[next(each for each in COMMANDS if "k=all" in each)].stderr
    )
    assert (
        "splits_0.csv: 3 train, 1 val, 1 test" in outputs[next(each for each in COMMANDS if "--splits" in each)].stderr
    )


@pytest.mark.parametrize("role", ["slide_id", "path", "patient_id", "split", "mpp", "cohort"])
def test_every_recognised_name_is_listed(role):
    assert set(COLUMN_NAMES[role]) <= set(map(normalise_column_name, QUOTED))


def test_every_missing_value_is_listed():
    assert set(MISSING_VALUES) <= QUOTED
