"""Find slides that may be of the same patient, and write splits that keep patients together."""

import csv
import tomllib

import pytest
from cohort_files import read_rows
from command_line import tapfm
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tapfm.cohort.cohort_table import read_cohort
from tapfm.cohort.columns import _COLUMN_NAMES as COLUMN_NAMES
from tapfm.cohort.columns import _parse_fold_column as parse_fold_column
from tapfm.cohort.columns import normalise_column_name
from tapfm.cohort.patients import _find_patients_in_ids as find_patients_in_ids
from tapfm.cohort.patients import _find_similar_patients as find_similar_patients
from tapfm.cohort.table_options import MISSING_VALUES, TableOptions


def read(folder, text, **options):
    path = folder / "cohort.csv"
    path.write_text(text, encoding="utf-8")
    return read_cohort(path, TableOptions(**options))


@pytest.mark.parametrize(
    "patients",
    [
        *(("0012", "12"), ("P-7", "p-7"), ("P_7", "P-7"), ("P 7", "P7"), ("12.0", "12"), ("S1-01", "S1-1")),
    ],
)
def test_patients_that_differ_only_in_spelling(patients):
    assert find_similar_patients(patients) == [list(patients)]


@pytest.mark.parametrize("patients", [("1-11", "11-1"), ("P1", "P10"), ("0", "00"), ("A1", "B1"), ("12", "12")])
def test_different_patients(patients):
    assert find_similar_patients(patients) == ([["0", "00"]] if patients == ("0", "00") else [])


def test_slides_of_one_tcga_patient_under_two_patients():
    patients = {"TCGA-50-5930-01Z-00-DX1": "P1", "tcga-50-5930-01Z-00-DX2": "P2", "TCGA-50-5931-01Z": "P3"}
    kind, groups = find_patients_in_ids(patients, has_patient_column=True)
    assert (kind, list(groups)) == ("TCGA barcode", ["TCGA-50-5930"])
    assert find_patients_in_ids(dict.fromkeys(patients, "P1"), has_patient_column=True)[1] == {}


@pytest.mark.parametrize(
    ("ids", "found"),
    [
        (["P1_1", "P1_2", "P2_1", "P2_2"], ["P1", "P2"]),
        (["P1-A", "P1-B", "P2.1", "P2.2"], ["P1", "P2"]),
        (["P1_1", "P1_2", "x", "y"], ["P1"]),  # half of the slides
        (["P1_1", "P1_2", "x", "y", "z"], []),  # fewer
        ([f"cohort_{i}" for i in range(21)], []),  # the name of a project
        (["a", "b", "c"], []),
    ],
)
def test_beginning_of_ids(ids, found):
    _, groups = find_patients_in_ids({each: each for each in ids}, has_patient_column=False)
    assert list(groups) == found
    assert find_patients_in_ids({each: f"patient of {each}" for each in ids}, has_patient_column=True)[1] == {}


def test_a_column_that_repeats_the_slide_ids_is_no_column_of_patients(tmp_path):
    (warning, shared) = read(tmp_path, "slide_id,patient_id\nP1_1,P1_1\nP1_2,P1_2\n").patient_warnings
    assert "'patient_id' repeats the slide ids" in warning
    assert "P1: P1_1, P1_2" in shared
    assert not read(tmp_path, "slide_id,patient_id\nP1_1,P1\nP1_2,P1\n").patient_warnings


def test_slides_are_patients_silences_the_warning_only_if_it_is_true(tmp_path):
    text = "slide_id{},EGFR\nP1_1{},1\nP1_2{},0\n"
    cohort = read(tmp_path, text.format("", "", ""), slides_are_patients=True)
    assert (cohort.patient_warnings, cohort.patient_problems) == ((), ())
    cohort = read(tmp_path, text.format(",patient_id", ",P1", ",P1"), slides_are_patients=True)
    (problem,) = cohort.patient_problems
    assert "several slides, such as P1" in problem.text


# No patient is in two splits, however the column of patients is called

SPELLINGS = sorted(COLUMN_NAMES["patient_id"])


@st.composite
def spelled_column(draw):
    """Return a recognised name of the column of patients in random case, with separators between its letters."""
    letters = draw(st.sampled_from(SPELLINGS))
    separators = st.sampled_from(["", "", "", " ", "_", "-", ".", "  ", "_-"])
    name = letters[0] + "".join(draw(separators) + letter for letter in letters[1:])
    return "".join(letter.upper() if draw(st.booleans()) else letter for letter in name)


def is_id(text):
    """Return whether a patient may have this id: it is not the text of a missing value or of an error."""
    missing = {each.casefold() for each in MISSING_VALUES}
    return not {text.casefold(), text.casefold().strip("[]")} & missing and text[0] != "#"


@st.composite
def patients_of_slides(draw):
    """Return the patient of each slide. There are at least four patients with one to four slides each."""
    names = st.text(st.characters(codec="utf-8", exclude_categories=["C", "Z"]), min_size=1, max_size=8).filter(is_id)
    patients = draw(st.lists(names, min_size=4, max_size=8, unique=True))
    counts = draw(st.lists(st.integers(1, 4), min_size=len(patients), max_size=len(patients)))
    return draw(st.permutations([each for each, count in zip(patients, counts, strict=True) for _ in range(count)]))


def write_table(folder, column, patients, extra=()):
    path = folder / "cohort.csv"
    classes = {patient: str(number % 2) for number, patient in enumerate(dict.fromkeys(patients))}
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["slide_id", column, "EGFR", *(name for name, _ in extra)])
        for number, patient in enumerate(patients):
            writer.writerow([f"s{number}", patient, classes[patient], *(values[number] for _, values in extra)])
    return path


def check_split(folder, path, patients, *options, columns):
    """Split a table, and compare the patients in the written table with the given ones."""
    out = folder / "split.csv"
    result = tapfm("split", path, "--out", out, "--force", *options)
    assert result.returncode == 0, result.output
    splits = [{} for _ in columns]
    for row, patient in zip(read_rows(out), patients, strict=True):
        for seen, column in zip(splits, columns, strict=True):
            assert seen.setdefault(patient, row[column]) == row[column], (column, patient)
    named = [*options[options.index("--patient-column") :][:2]] if "--patient-column" in options else []
    config = tapfm("config", "--cohort", out, "--target", "EGFR", *named)
    assert config.returncode == 0, config.output
    column = tomllib.loads(config.stdout)["cohort"].get("patient_column", "")
    again = read_cohort(out, TableOptions(patient_column=column))
    assert [row.patient_id for row in again.rows] == list(patients)
    assert not again.patient_problems


@settings(max_examples=25)
@given(column=spelled_column(), patients=patients_of_slides())
@example(column="Patient ID", patients=["P1", "P1", "P2", "P2", "P3", "P4"])
@example(column="bcr_patient_barcode", patients=["P1", "P2", "P1", "P3", "P2", "P4"])
def test_no_patient_is_in_two_splits(tmp_path_factory, column, patients):
    folder = tmp_path_factory.mktemp("split")
    path = write_table(folder, column, patients)
    assert read_cohort(path).patient_column == " ".join(column.split())
    check_split(folder, path, patients, "--target", "EGFR", columns=["split"])
    folds = [f"fold_{i}" for i in range(3)]
    check_split(folder, path, patients, "--folds", "3", "--no-stratify", columns=folds)


OTHER_NAMES = {name for role, names in COLUMN_NAMES.items() if role != "patient_id" for name in names} | {"egfr", ""}


def is_free(name):
    """Return whether a column of the table may have this name beside the others, without another meaning."""
    return normalise_column_name(name) not in OTHER_NAMES and parse_fold_column(name) is None and name[0] != "#"


@settings(max_examples=25)
@given(
    column=st.text(st.characters(codec="utf-8", exclude_categories=["C"]), min_size=1, max_size=12).filter(is_free),
    patients=patients_of_slides(),
)
@example(column="Fallnummer", patients=["P1", "P1", "P2", "P2", "P3", "P4"])
@example(column=" Pat.  No ", patients=["P1", "P1", "P2", "P2", "P3", "P4"])
def test_no_patient_is_in_two_splits_with_a_named_column(tmp_path_factory, column, patients):
    folder = tmp_path_factory.mktemp("split")
    numbers = [str(number) for number in range(len(patients))]  # another column that would be recognised
    path = write_table(folder, column, patients, extra=[("case_id", numbers)] if column != "case_id" else ())
    check_split(folder, path, patients, "--patient-column", column, "--target", "EGFR", columns=["split"])


@pytest.mark.parametrize("column", ["split", "Set", "fold_0", "path", "mpp", "cohort"])
def test_a_column_with_another_meaning_cannot_contain_the_patients(tmp_path, column):
    path = write_table(tmp_path, column, ["P1", "P1", "P2", "P3"])
    result = tapfm("split", path, "--out", tmp_path / "split.csv", "--patient-column", column)
    assert result.returncode == 2
    assert f"the column '{column}' cannot contain the patients" in result.stderr
    assert not (tmp_path / "split.csv").exists()
