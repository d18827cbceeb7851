"""Join and read the tables of STAMP, CLAM and nnMIL, and read the split table of Patho-Bench."""

import json

import pytest

from tapfm.cohort.table_files import read_text_table
from tapfm.cohort.table_layouts import add_clam_splits, join_clini
from tapfm.errors import CohortError


@pytest.fixture
def write(tmp_path):
    def write_file(name, content):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
        return path

    return write_file


def column(table, name):
    return [cells[name] for _, cells in table.records]


# --- STAMP ---


def join(write, slides, clini, **options):
    return join_clini(
        read_text_table(write("slide.csv", slides)), read_text_table(write("clini.csv", clini)), **options
    )


@pytest.mark.parametrize("name", ["PATIENT", "Patient ID", "patient-id", "Case_ID", "bcr_patient_barcode"])
def test_join_clini(write, name):
    slides = "PATIENT,FILENAME\nP1,a.h5\nP2,b.h5\nP1,c.h5\n"
    table = join(write, slides, f"KRAS,{name},Sex\nMUT,P1,f\nWT,P2,m\n,P9,m\n")
    assert table.source.name == "slide.csv"
    assert table.columns == ("PATIENT", "FILENAME", "KRAS", "Sex")
    assert table.records[2] == (4, {"PATIENT": "P1", "FILENAME": "c.h5", "KRAS": "MUT", "Sex": "f"})
    assert column(table, "KRAS") == ["MUT", "WT", "MUT"]
    assert table.problems == ()
    assert any("2 patients" in note and name in note for note in table.notes)
    assert any("1 patient " in note and "P9" in note for note in table.notes)


def test_patients_without_clinical_data(write):
    slides = "PATIENT,FILENAME\nP1,a.h5\n007,b.h5\n,c.h5\nP3,d.h5\n"
    table = join(write, slides, "PATIENT,KRAS\nP1,1\n7,0\n")
    assert column(table, "FILENAME") == ["a.h5"]
    assert [row for row, _ in table.problems] == [3, 4, 5]
    first, second, third = (text for _, text in table.problems)
    assert "'007'" in first
    assert "has '7'" in first
    assert second == "no patient"
    assert "'P3'" in third


def test_patient_with_several_clinical_rows(write):
    slides = "PATIENT,FILENAME\nP1,a.h5\nP2,b.h5\n"
    clini = "PATIENT,KRAS,sex\nP1,1,f\nP1,1,f\nP2,1,m\nP2,0,m\nP9,1,m\nP9,0,m\n"
    table = join(write, slides, clini)
    ((row, text),) = table.problems
    assert row == 0
    assert "clini.csv, rows 4, 5: patient 'P2'" in text
    assert "KRAS" in text
    assert "sex" not in text


def test_column_in_both_tables(write):
    slides = "PATIENT,FILENAME,Sex\nP1,a.h5,f\nP2,b.h5,\nP3,c.h5,m\n"
    table = join(write, slides, "PATIENT,SEX\nP1,f\nP2,m\nP3,f\n")
    assert table.columns == ("PATIENT", "FILENAME", "Sex")
    assert column(table, "Sex")[:2] == ["f", "m"]
    ((row, text),) = table.problems
    assert row == 4
    assert "'m' in slide.csv" in text
    assert "'f' in clini.csv" in text


def test_rows_of_both_tables_that_cannot_be_read(write):
    slides, clini = "PATIENT,FILENAME\nP1,a.h5\nP1,b.h5,,x\n", "PATIENT,KRAS\nP1,1\nP2,0,x\n"
    (_, of_clini), (row, _) = join(write, slides, clini).problems
    assert row == 3
    assert "clini.csv, row 3: 3 fields" in of_clini


def test_patient_column_by_name(write):
    slides, clini = "Person,FILENAME\nP1,a.h5\n", "person,case_id,KRAS\nP1,x,1\n"
    table = join(write, slides, clini, patient_column="Person")
    assert (table.columns, table.problems) == (("Person", "FILENAME", "case_id", "KRAS"), ())
    with pytest.raises(CohortError, match=r"slide\.csv has no column of patients") as caught:
        join(write, slides, clini)
    assert "--patient-column" in caught.value.hint


def test_tables_without_a_common_patient(write):
    with pytest.raises(CohortError, match=r"No patient of .*slide\.csv.*'PATIENT' has A1.*'PATIENT' has B1"):
        join(write, "PATIENT,FILENAME\nA1,a.h5\n", "PATIENT,KRAS\nB1,1\n")


# --- CLAM ---

DATASET = "case_id,slide_id,label\nP1,s_1,tumor\nP2,s_2,normal\nP3,s_3,tumor\nP4,s_4,normal\n"
LISTS = ",train,val,test\n0,s_1,s_3,s_4\n1,s_2,,\n"
BOOLEANS = ",train,val,test\ns_1,True,False,False\ns_2,True,False,False\ns_3,False,True,False\ns_4,False,False,True\n"


@pytest.mark.parametrize("content", [LISTS, BOOLEANS, "train,val,test\ns_1,s_3,s_4\ns_2,,\n", BOOLEANS.upper()])
def test_clam_split_file(write, content):
    dataset = read_text_table(write("dataset.csv", DATASET.upper() if content.isupper() else DATASET))
    table = add_clam_splits(dataset, write("splits_0.csv", content))
    assert table.columns == (*dataset.columns, "split")
    assert column(table, "split") == ["train", "train", "val", "test"]
    assert table.problems == ()
    assert "2 train, 1 val, 1 test" in table.notes[-1]


def test_folder_of_clam(write, tmp_path):
    dataset = read_text_table(write("dataset.csv", DATASET))
    for number in (10, 2, 0):
        write(f"splits/splits_{number}.csv", LISTS if number else ",train,val,test\n0,s_4,,s_1\n")
        write(f"splits/splits_{number}_bool.csv", BOOLEANS)
        write(f"splits/splits_{number}_descriptor.csv", ",train,val,test\ntumor,1,1,0\n")
    table = add_clam_splits(dataset, tmp_path / "splits")
    assert table.columns == (*dataset.columns, "fold_0", "fold_2", "fold_10")
    assert column(table, "fold_0") == ["test", "", "", "train"]
    assert column(table, "fold_10") == ["train", "train", "val", "test"]
    assert any("in none of them: 2 slides" in note for note in table.notes)


def test_folder_with_boolean_files_only(write, tmp_path):
    write("splits/splits_3_bool.csv", BOOLEANS)
    table = add_clam_splits(read_text_table(write("dataset.csv", DATASET)), tmp_path / "splits")
    assert column(table, "fold_3") == ["train", "train", "val", "test"]


@pytest.mark.parametrize(("in_table", "in_splits"), [("s_1.svs", "s_1"), ("s_1", "s_1.svs"), ("s_1.svs", "s_1.svs")])
def test_suffix_of_ids(write, in_table, in_splits):
    dataset = read_text_table(write("dataset.csv", f"case_id,slide_id\nP1,{in_table}\nP2,b.c\n"))
    table = add_clam_splits(dataset, write("splits_0.csv", f",train,val,test\n0,{in_splits},b.c,\n"))
    assert (column(table, "split"), table.problems) == (["train", "val"], ())


def test_problems_of_clam_splits(write):
    dataset = read_text_table(write("dataset.csv", "slide_id\ns_1\ns_2\nd.svs\nd.ndpi\n"))
    content = ",train,val,test\n0,s_1,s_1,s_8\n1,s_2,s_9,d\n"
    problems = add_clam_splits(dataset, write("splits_0.csv", content)).problems
    texts = [text for row, text in problems if row == 0]
    assert len(texts) == len(problems) == 3
    assert any("'s_1' is in train and in val" in text for text in texts)
    assert any("2 slides not in" in text and "s_9" in text and "s_8" in text for text in texts)
    assert any("'d' is d.ndpi, d.svs" in text for text in texts)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (
            "splits_0_descriptor.csv",
            ",train,val,test\nnormal_tissue,211,36,34\ntumor,89,15,15\n",
            "does not contain slide ids",
        ),
        ("dataset.csv", DATASET, "not a split file of CLAM"),
        ("empty.csv", "", "not a split file of CLAM"),
        ("folder/other.csv", LISTS, "no file splits_0.csv"),
        ("missing", "", "cannot be read"),
    ],
)
def test_files_without_clam_splits(write, tmp_path, name, content, message):
    dataset = read_text_table(write("slides.csv", DATASET))
    path = tmp_path / name if name == "missing" else write(name, content)
    with pytest.raises(CohortError, match=message) as caught:
        add_clam_splits(dataset, path.parent if "folder" in name else path)
    assert "splits_0.csv" in caught.value.hint


def test_clam_tables_that_cannot_get_splits(write):
    splits = write("splits_0.csv", LISTS)
    with pytest.raises(CohortError, match="already has the column Split"):
        add_clam_splits(read_text_table(write("a.csv", "slide_id,Split\ns_1,train\n")), splits)
    with pytest.raises(CohortError, match="no column with slides"):
        add_clam_splits(read_text_table(write("b.csv", "case_id,label\nP1,1\n")), splits)


# --- Patho-Bench ---


def test_split_table_of_patho_bench(write):
    table = read_text_table(write("k=all.tsv", "case_id\tslide_id\tBAP1\tfold_0\tfold_1\n013\ts_1\t1\ttrain\ttest\n"))
    cells = {"case_id": "013", "slide_id": "s_1", "BAP1": "1", "fold_0": "train", "fold_1": "test"}
    assert table.records == ((2, cells),)


# --- nnMIL ---


def nnmil_split(*slides):
    entries = [{"slide_id": s, "patient_id": p, "dataset_id": "tcga", "label": label} for s, p, label in slides]
    return {"patient_ids": [], "slide_ids": [], "slide_info": entries, "statistics": {}}


PARTS = {"train": nnmil_split(("a", "P1", 0)), "val": nnmil_split(("b", "P2", 1)), "test": nnmil_split()}
LABELS = {"task_type": "classification", "labels": {"0": "wild type", "1": "mutant"}}


def test_plan_of_nnmil_with_one_split(write):
    table = read_text_table(write("dataset_plan.json", {**LABELS, "data_splits": {"official_split": PARTS}}))
    assert table.columns == ("slide_id", "patient_id", "dataset_id", "label", "split")
    assert table.records == (
        (1, {"slide_id": "a", "patient_id": "P1", "dataset_id": "tcga", "label": "wild type", "split": "train"}),
        (2, {"slide_id": "b", "patient_id": "P2", "dataset_id": "tcga", "label": "mutant", "split": "val"}),
    )
    assert any("0 = wild type, 1 = mutant" in note for note in table.notes)


def test_plan_of_nnmil_with_folds(write):
    other = {"train": nnmil_split(("b", "P2", 1), ("c", "P3", 1)), "test": nnmil_split(("a", "P1", 0))}
    plan = {"task_type": "classification", "labels": {}, "data_splits": {"fold_0": PARTS, "fold_1": other}}
    table = read_text_table(write("dataset_plan.json", plan))
    assert table.columns == ("slide_id", "patient_id", "dataset_id", "label", "fold_0", "fold_1")
    assert column(table, "fold_0") == ["train", "val", ""]
    assert column(table, "fold_1") == ["test", "train", "train"]
    assert column(table, "label") == ["0", "1", "1"]
    assert (table.notes, table.problems) == ((), ())


def test_survival_plan_of_nnmil(write):
    entry = {"slide_id": 7, "patient_id": "P1", "event": 1, "time": 32.0, "note": None, "age": float("nan")}
    plan = {
        "task_type": "survival",
        "labels": {"time_unit": "days"},
        "data_splits": {"fold_0": {"train": {"slide_info": [entry]}}},
    }
    table = read_text_table(write("plan.json", plan))
    assert [text for _, cells in table.records for text in cells.values()] == ["7", "P1", "1", "32", "", "", "train"]


def test_contradictions_in_a_plan(write):
    other = {"train": nnmil_split(("b", "P2", 1), ("a", "P1", 1)), "test": nnmil_split(("b", "P9", 1))}
    table = read_text_table(write("plan.json", {"data_splits": {"fold_0": PARTS, "fold_1": other}}))
    assert [row for row, _ in table.problems] == [1, 2, 2]
    text = " ".join(text for _, text in table.problems)
    assert "'a' has different values of label" in text
    assert "'b' has different values of patient_id" in text
    assert "'b' is listed in 'train' and 'test' of fold_1" in text


@pytest.mark.parametrize("clinical_dir", ["/elsewhere/dataset.csv", "other.csv", None])
def test_dataset_of_nnmil(write, clinical_dir):
    content = "slide_id,patient_id,split,label\na,P1,train,0\nb,P2,test,1\nc,P3,test,\nd,P4,test,5\n"
    path = write("other.csv" if clinical_dir == "other.csv" else "dataset.csv", content)
    table = read_text_table(write("dataset.json", {**LABELS, "clinical_dir": clinical_dir}))
    assert table.source == path
    assert column(table, "label") == ["wild type", "mutant", "", "5"]
    assert column(table, "split") == ["train", "test", "test", "test"]
    assert any("dataset.json" in note and path.name in note for note in table.notes)


def test_class_numbers_stay_if_names_are_not_unique(write):
    write("dataset.csv", "slide_id,patient_id,split,label\na,P1,train,0\n")
    document = {"task_type": "classification", "labels": {"0": "x", "1": "x"}}
    assert column(read_text_table(write("dataset.json", document)), "label") == ["0"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "not valid JSON"),
        ("[" * 100_000, "not valid JSON"),
        ([{"slide_id": "a"}], "not a JSON file of nnMIL"),
        ({"type": "FeatureCollection"}, "not a JSON file of nnMIL"),
        ({"task_type": "classification"}, "dataset.csv does not exist"),
        ({"data_splits": []}, "data_splits is not a JSON object"),
        ({"data_splits": {"fold_0": {}}}, "fold_0 is not a JSON object"),
        ({"data_splits": {"fold_0": {"train": ["a"]}}}, "no list 'slide_info'"),
        ({"data_splits": {"fold_0": {"train": {"slide_info": [{"patient_id": "P1"}]}}}}, "has no slide_id"),
        ({"data_splits": {"fold_0": {"train": {"slide_info": ["a"]}}}}, "has no slide_id"),
    ],
)
def test_json_files_that_cannot_be_read(write, content, message):
    with pytest.raises(CohortError, match=message) as caught:
        read_text_table(write("any.json", content))
    assert "dataset_plan.json" in caught.value.hint
