"""Tables as hospitals and other tools export them, run through `tapfm split`, `tile`, `config` and `train`.

`expectations.toml` lists each table with its options and its outcome. This module only runs the commands:

accepted    split -> the `config` command that it prints -> train (method fixed, one epoch); and tile. Patients, slides,
            labels and splits are compared with the expected ones.
refused     each command ends with exit code 2 and one error with all expected texts, and writes nothing.
"""

import contextlib
import shlex
import shutil
import tomllib
from collections import Counter, defaultdict
from pathlib import Path

import h5py
import numpy as np
import pytest
from cohort_files import read_rows
from command_line import tapfm
from excel_tables import WORKBOOKS
from slide_files import section, write_slide

from tapfm.cohort.cohort_table import read_cohort
from tapfm.cohort.table_options import MISSING_VALUES
from tapfm.config.text import format_toml

FOLDER = Path(__file__).parent
CASES = tomllib.loads((FOLDER / "expectations.toml").read_text("utf-8"))
COMMANDS = ("split", "tile", "config", "train")
TILE_OPTIONS = ("--slides", "--encoding", "--patient-column", "--missing", "--slides-are-patients")
FEATURE_SIZE = 8
SLIDES = 12  # different slide files
# settings of [cohort] in RUN.toml, by option
SETTINGS = {
    "--slides": "slides",
    "--encoding": "encoding",
    "--patient-column": "patient_column",
    "--clini": "clini",
    "--splits": "clam_splits",
}


@pytest.fixture(scope="module")
def slides(tmp_path_factory, one_thread):  # noqa: ARG001 - for the whole module
    """Small slides with four tiles each, all different."""
    folder = tmp_path_factory.mktemp("slides")
    pixels = [section(448, 448, seed=seed, tissue=(0, 0, 1, 1)) for seed in range(SLIDES)]
    return [write_slide(folder / f"{i}.svs", each, tile_px=224, downsamples=(1,)) for i, each in enumerate(pixels)]


@pytest.fixture
def make_case(tmp_path, monkeypatch, slides):
    """Return a function that writes the files of a case and makes their folder the current one."""

    def make(case):
        monkeypatch.chdir(tmp_path)
        monkeypatch.setenv("COLUMNS", "300")
        for name in case["files"]:
            Path(name).parent.mkdir(parents=True, exist_ok=True)
            if name in WORKBOOKS:
                WORKBOOKS[name]().save(name)
            else:
                shutil.copy(FOLDER / "tables" / name, name)
        for i, name in enumerate(case.get("slide_files", [])):
            Path(name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(slides[i], name)
        for copy, name in case.get("copies", {}).items():
            shutil.copy(name, copy)
        for link, name in case.get("links", {}).items():
            Path(link).symlink_to(name)
        return case

    return make


def parse_options(case):
    """Return the options of a case as pairs; the value of a flag is empty."""
    words = shlex.split(case.get("options", ""))
    pairs = []
    for word in words:
        if word.startswith("--"):
            pairs.append((word, ""))
        else:
            pairs[-1] = (pairs[-1][0], word)
    return pairs


def join_options(pairs):
    return [word for pair in pairs for word in pair if word]


def table_arguments(case, command):
    """Return the table and the options of a case that a command has."""
    options = parse_options(case)
    if command == "tile":
        options = [(name, value) for name, value in options if name in TILE_OPTIONS]
    has_clini = any(name == "--clini" for name, _ in options)
    table = "--cohort" if command == "config" else "--slide-table" if has_clini else ""
    return [*([table] if table else []), case["files"][0], *join_options(options)]


def write_run_toml(case, table):
    """Write RUN.toml by hand, for a table that `tapfm config` refuses."""
    options = parse_options(case)
    cohort = {"table": table} | {SETTINGS[name]: value for name, value in options if name in SETTINGS}
    cohort |= {"slides_are_patients": True} if ("--slides-are-patients", "") in options else {}
    if extra := [value for name, value in options if name == "--missing"]:
        cohort["missing_values"] = [*MISSING_VALUES, *extra]
    texts = defaultdict(lambda: defaultdict(list))
    for name, value in options:
        if name in ("--positive", "--negative"):
            target, _, text = value.partition("=")
            texts[target][name[2:]].append(text)
    targets = [value for name, value in options if name == "--target"] or [*texts] or [case.get("target", "EGFR")]
    tables = {
        "cohort": cohort,
        "encoder": {"name": "tapfm-pocket"},
        "tiles": {"features": "features"},
        "adaptation": {"method": "fixed"},
        "task": {"targets": targets, "labels": texts},
        "selection": {"unit": case.get("unit", "slide")},
    }
    Path("run.toml").write_text(format_toml(tables), encoding="utf-8")


def write_features(slide_ids):
    Path("features").mkdir()
    for seed, slide_id in enumerate(slide_ids):
        with h5py.File(f"features/{slide_id}.h5", "w") as file:
            file["features"] = np.random.default_rng(seed).normal(size=(3, FEATURE_SIZE)).astype(np.float32)
            file["coords"] = np.zeros((3, 2), int)


def find_next_command(output, name):
    """Return the arguments of a command that another one printed."""
    lines = [line.partition(f"tapfm {name} ") for line in output.splitlines()]
    (found,) = [after for _, command, after in lines if command]
    return [name, *shlex.split(found)]


def run(*arguments):
    result = tapfm(*arguments)
    assert "Traceback" not in result.output, result.output
    return result


def list_files():
    return sorted(str(path) for path in Path().rglob("*"))


def check_texts(texts, output):
    for text in texts:
        assert text in output, f"not printed: {text}\n{output}"


def read_splits_by_patient(rows, columns):
    return {column: {(row.patient_id, split_of(row, column)) for row in rows} for column in columns}


def split_of(row, column):
    return row.split if column == "split" else row.folds[column]


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if "refused" in case])
def test_refused_table(name, make_case):
    case = make_case(CASES[name])
    before = list_files()
    by_command = {
        "split": lambda: run("split", *table_arguments(case, "split"), "--out", "split.csv"),
        "tile": lambda: run("tile", *table_arguments(case, "tile"), "--out", "tiles", "--workers", 0),
        "config": lambda: run("config", *table_arguments(case, "config"), "--out", "run.toml"),
        "train": lambda: run("train", "run.toml", "--out", "run", "--workers", 0, "--device", "cpu"),
    }
    for command in case.get("refused_by", COMMANDS):
        if command == "train":
            write_run_toml(case, case["files"][0])
            before = list_files()
        result = by_command[command]()
        assert result.returncode == 2, f"{command}: {result.output}"
        assert result.stdout == ""
        check_texts(case["refused"], result.stderr)
        assert list_files() == before, command


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if "refused" not in case])
def test_accepted_table(name, make_case):
    case = make_case(CASES[name])
    slide_ids = [slide_id for slides in case["patients"].values() for slide_id in slides]
    with contextlib.suppress(FileNotFoundError):
        shutil.rmtree("features")
    write_features(slide_ids)
    split = run("split", *table_arguments(case, "split"), "--out", "split.csv")
    if "splits" in case:
        assert split.returncode == 2
        check_texts(["the table already has valid"], split.stderr)
        config_arguments = ["config", *table_arguments(case, "config"), "--out", "run.toml"]
    else:
        assert split.returncode == 0, split.output
        check_texts(case.get("says", []), split.stderr)
        config_arguments = find_next_command(split.output, "config")
    config = run(*config_arguments, "--encoder", "tapfm-pocket", "--method", "fixed", "--features", "features")
    assert config.returncode == 0, config.output
    if "splits" in case:
        check_texts(case.get("says", []), config.stderr)
    train = run("train", "run.toml", "--out", "run", "--set", "schedule.epochs=1", "--workers", 0, "--device", "cpu")
    assert train.returncode == 0, train.output
    check_cohort(case, config.stderr)
    check_tiles(case, slide_ids)


def check_cohort(case, output):
    """Compare the slides that were trained on with the expected patients, labels and splits."""
    settings = tomllib.loads(Path("run.toml").read_text("utf-8"))
    trained = read_rows(Path("run/split.csv"))
    expected = {slide_id: patient for patient, slides in case["patients"].items() for slide_id in slides}
    assert set(settings["task"]["targets"]) == set(case["labels"])
    for target, text in case["labels"].items():
        counts = dict(reversed(each.split(" ")) for each in text.split(", "))
        assert f"Target {target}: {counts['positive']} " in output, output
