"""Tables as hospitals and other tools export them, run through `tapfm split`, `tile`, `config` and `train`.

`expectations.toml` lists each table with its options and its outcome. This module only runs the commands:

accepted    split -> the `config` command that it prints -> train (method fixed, one epoch); and tile. Patients, slides,
            labels and splits are compared with the expected ones.
refused     each command ends with exit code 2 and one error with all expected texts, and writes nothing.
"""

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

from tapfm.cohort.splits import fold_names, read_splits
from tapfm.cohort.table_options import MISSING_VALUES
from tapfm.config.loading import load_config
from tapfm.config.text import format_toml
from tapfm.tasks.label_columns import TargetRequest
from tapfm.tasks.labels import read_labelled_cohort

FOLDER = Path(__file__).parent
CASES = tomllib.loads((FOLDER / "expectations.toml").read_text("utf-8"))
SETTING_OF_OPTION = {
    "--slides ": "--set cohort.slides=",
    "--patient-column ": "--set cohort.patient_column=",
    "--slides-are-patients": "--set cohort.slides_are_patients=true",
    "--encoding ": "--set cohort.encoding=",
}
COMMANDS = ("split", "tile", "config", "train")
TILE_OPTIONS = ("--slides", "--encoding", "--missing")
FEATURE_SIZE = 128  # of tapfm-pocket
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
            Path(copy).parent.mkdir(exist_ok=True)
            shutil.copy(name, copy)
        for link, name in case.get("links", {}).items():
            Path(link).parent.mkdir(exist_ok=True)
            Path(link).symlink_to(name)
        return case

    return make


def parse_options(case):
    """Return the options of a case as pairs; the value of a flag is empty."""
    arguments = shlex.split(case.get("options", ""))
    pairs = []
    for word in arguments:
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
        for text in case["refused"]:
            expected = text
            if command == "train":  # its hints name the settings of RUN.toml
                for option, setting in SETTING_OF_OPTION.items():
                    expected = expected.replace(option, setting)
            assert expected in result.stderr, f"{command}: {result.stderr}"
        assert list_files() == before, command


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if "refused" not in case])
def test_accepted_table(name, make_case):
    case = make_case(CASES[name])
    patients = case["patients"]
    if patients == "slides":
        patients = {slide_id: [slide_id] for slide_id in (Path(name).stem for name in case["slide_files"])}
    patient_by_slide = {slide_id: patient for patient, slides in patients.items() for slide_id in slides}
    write_features(patient_by_slide)
    folds = ["--folds", 3] if "folds" in case else []
    split = run("split", *table_arguments(case, "split"), "--out", "split.csv", *folds)
    if has_splits := "splits" in case:
        assert split.returncode == 2
        assert "the table already has valid" in split.stderr
        assert not Path("split.csv").exists()
        arguments = ["config", *table_arguments(case, "config"), "--out", "run.toml"]
    else:
        assert split.returncode == 0, split.output
        arguments = find_next_command(split.output, "config")
    config = run(*arguments, "--encoder", "tapfm-pocket", "--method", "fixed", "--features", "features")
    assert config.returncode == 0, config.output
    output = config.stderr if has_splits else split.stderr
    for text in case.get("says", []):
        assert text in output, output
    for text in case.get("says_not", []):
        assert text not in output + config.stderr, output
    check_cohort(case, patient_by_slide)
    train = run("train", "run.toml", "--out", "run", "--set", "schedule.epochs=1", "--workers", 0, "--device", "cpu")
    assert train.returncode == 0, train.output
    for row in read_rows(Path("run/split.csv")):
        assert row["patient_id"] == patient_by_slide[row["slide_id"]]
    check_tiles(case, patient_by_slide)


def check_cohort(case, patient_by_slide):
    """Compare the table that RUN.toml names with the expected patients, labels and splits."""
    config = load_config(Path("run.toml"))
    request = TargetRequest(tuple(config.task.targets), config.class_texts)
    labelled = read_labelled_cohort(config.cohort.table, config.cohort.table_options, request)
    assert {row.slide_id: row.patient_id for row in labelled.cohort.rows} == patient_by_slide
    assert {row.slide_id for row in labelled.cohort.rows if row.missing} == set(case.get("missing", []))
    found = {}
    for target, kind in labelled.targets.items():
        (negative, positive), labels = kind.class_names, labelled.labels[target]
        found[target] = f"{labels.count(1)} {positive}, {labels.count(0)} {negative}, {labels.count(None)} missing"
    assert found == case["labels"]
    columns = {None} if any(row.split for row in labelled.cohort.rows) else set()
    columns |= {int(name.removeprefix("fold_")) for name in fold_names(labelled.cohort)}
    assert columns
    for fold in columns:
        splits = read_splits(labelled.cohort, fold)
        splits_by_patient = defaultdict(set)
        for row in labelled.cohort.rows:
            if row.slide_id in splits:
                splits_by_patient[row.patient_id].add(splits[row.slide_id])
        assert {len(each) for each in splits_by_patient.values()} == {1}
    if "splits" in case:
        assert dict(Counter(read_splits(labelled.cohort, config.cohort.fold).values())) == case["splits"]


def check_tiles(case, slide_ids):
    """Tile the slides of the original table; those without a file fail, and only they."""
    result = run("tile", *table_arguments(case, "tile"), "--out", "tiles", "--workers", 0)
    missing = case.get("missing", [])
    assert result.returncode == (3 if missing else 0), result.output
    assert [row["slide_id"] for row in read_rows(Path("tiles/failures.csv"))] == missing
    records = read_rows(Path("tiles/summary.csv"))
    assert {row["slide_id"] for row in records} == set(slide_ids)
    assert all(int(row["tiles"]) == 4 for row in records if row["slide_id"] not in missing)


def test_table_with_1000_rows(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rows = [f"s{i},patient {i // 3},s{i}.svs,{'MUT' if i // 3 % 4 == 0 else 'WT'}" for i in range(1000)]
    Path("cohort.csv").write_text("\n".join(["slide_id,patient_id,path,EGFR", *rows]) + "\n")
    split = run("split", "cohort.csv", "--positive", "EGFR=MUT", "--out", "split.csv")
    assert split.returncode == 0, split.output
    assert "1,000 of 1,000 slide files were not found" in split.stderr
    config = run(*find_next_command(split.output, "config"), "--encoder", "tapfm-pocket")
    assert config.returncode == 0, config.output
    splits = defaultdict(set)
    for row in read_rows(Path("split.csv")):
        splits[row["patient_id"]].add(row["split"])
    assert {len(each) for each in splits.values()} == {1}
    tile = run("tile", "split.csv", "--out", "tiles", "--workers", 0)
    assert tile.returncode == 3
    assert len(read_rows(Path("tiles/failures.csv"))) == 1000
