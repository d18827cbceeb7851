"""Read cohort tables of tapfm and other tools, and report all problems of a table in one error."""

import pytest

from tapfm.cohort.cohort_table import find_patient_problems, read_cohort
from tapfm.cohort.slide_search import slide_id_from_name
from tapfm.cohort.table_options import TableOptions
from tapfm.errors import CohortError


@pytest.fixture
def slides(tmp_path):
    for name in ("slides/007.svs", "slides/008.svs", "slides/deep/TCGA-A1.b2-01Z.ndpi", "slides/010.ome.tiff"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    return tmp_path


def table(folder, text, name="cohort.csv"):
    (folder / name).write_text(text, encoding="utf-8")
    return folder / name


def test_read_tapfm_table(slides):
    text = "slide_id,path,patient_id,mpp,split,cohort,FGFR3,KRAS\n007,slides/007.svs,P1,0.25,train,A,1,\n"
    cohort = read_cohort(table(slides, text))
    (row,) = cohort.rows
    assert (cohort.layout, cohort.label_names) == ("tapfm", ("FGFR3", "KRAS"))
    assert (row.slide_id, row.path, row.patient_id) == ("007", slides / "slides/007.svs", "P1")
    assert (row.mpp, row.split, row.cohort, row.labels) == (0.25, "train", "A", {"FGFR3": "1", "KRAS": ""})


@pytest.mark.parametrize(
    ("layout", "text", "slide_id", "patient", "split", "labels"),
    [
        ("CLAM", "case_id,slide_id,label\nP1,007,tumor", "007", "P1", None, {"label": "tumor"}),
        (
            "list of ids",
            "slide_id,status,process\n007.svs,tbp,1",
            "007",
            "007",
            None,
            {"status": "tbp", "process": "1"},
        ),
        ("STAMP", "PATIENT,FILENAME\nP1,007.h5", "007", "P1", None, {}),
        ("STAMP", "PATIENT,FILENAME\nP1,007.svs", "007", "P1", None, {}),
        ("TRIDENT", "wsi,mpp\nslides/007.svs,0.25", "007", "007", None, {}),
        ("TRIDENT", "wsi\n007.svs", "007", "007", None, {}),
        (
            "Patho-Bench",
            "case_id\tslide_id\tFGFR3\tfold_0\tfold_1\nP1\t007\t1\ttrain\ttest",
            "007",
            "P1",
            None,
            {"FGFR3": "1"},
        ),
        ("nnMIL", "slide_id,patient_id,split,label\n007,P1,val,1", "007", "P1", "val", {"label": "1"}),
        (
            "TAPFM reference",
            "slide,slide_id,set,FGFR3\nslides/007.svs,007,test,0",
            "007",
            "007",
            "test",
            {"FGFR3": "0"},
        ),
        ("CLAM", ",case_id,slide_id,label\n0,P1,007,1", "007", "P1", None, {"label": "1"}),
        ("tapfm", "slide_id;path\n007;slides/007.svs", "007", "007", None, {}),
    ],
)
def test_read_tables_of_other_tools(slides, layout, text, slide_id, patient, split, labels):
    cohort = read_cohort(table(slides, text, "t.tsv" if "\t" in text else "t.csv"))
    (row,) = cohort.rows
    assert cohort.layout == layout
    assert (row.slide_id, row.patient_id, row.split, row.labels) == (slide_id, patient, split, labels)
    assert row.path == slides / "slides/007.svs"


def test_find_slides_by_id_below_folder(slides, tmp_path):
    elsewhere = tmp_path / "tables"
    elsewhere.mkdir()
    path = table(elsewhere, "case_id,slide_id\nA,TCGA-A1.b2-01Z\nB,010\n")
    cohort = read_cohort(path, TableOptions(slides=slides / "slides"))
    assert [row.path.name for row in cohort.rows] == ["TCGA-A1.b2-01Z.ndpi", "010.ome.tiff"]


def test_all_problems_are_in_one_error(slides):
    text = (
        "slide_id,path,mpp,patient_id\n007,slides/007.svs,,P1\n007,slides/008.svs,,P2\n,,,\na,slides/absent.svs,,P3\n"
        "b,slides/008.svs,fast,P4\nc/d,slides/008.svs,,P5\nd,slides/008.svs,-1,P6\ne,slides/008.svs,0.5,P7,1\n,,0.5,P8\n"
        "f,slides/deep/TCGA-A1.b2-01Z.ndpi,,NA\n"
    )
    with pytest.raises(CohortError) as error:
        read_cohort(table(slides, text), checks=[find_patient_problems])
    message = error.value.message
    assert "has 9 problems" in message
    for problem in (
        "rows 2 and 3: duplicate slide_id '007'",
        "row 6: mpp 'fast' is not",
        "row 7: slide_id 'c/d' cannot be used as a file name",
        "row 8: mpp '-1' is not",
        "rows 6, 7 and 8: b (008.svs), c/d (008.svs), d (008.svs) are the same file",
        "row 9: 5 fields, but the header has 4 columns",
        "row 10: no slide in column 'slide_id' and 'path'",
        "row 11: no patient in column 'patient_id'",
        "row 5: ",
    ):
        assert problem in message
    assert "absent.svs does not exist" in message


def test_missing_slide_file_is_no_error(slides):
    cohort = read_cohort(table(slides, "slide_id,path\n007,slides/007.svs\na,slides/absent.svs\n"))
    present, missing = cohort.rows
    assert not present.missing
    assert "absent.svs does not exist" in missing.missing
    assert cohort.missing_files_note.startswith("1 of 2 slide files")


@pytest.mark.parametrize("path", ["/archive/s1.svs", "p1/007.svs", "/archive/007.svs"])
def test_missing_slide_is_not_replaced_by_another_file(slides, path):
    (slides / "slides" / "s1.png").touch()
    (row,) = read_cohort(table(slides, f"slide_id,path\ns1,{path}\n")).rows
    assert row.missing.endswith(f"{path} does not exist")


def test_moved_slides_are_found_in_slides_folder(slides):
    text = "slide_id,path\na,/archive/007.svs\nb,deep/TCGA-A1.b2-01Z.ndpi\n"
    options = TableOptions(slides=slides / "slides")
    moved = read_cohort(table(slides, text), options)
    assert [row.path.name for row in moved.rows] == ["007.svs", "TCGA-A1.b2-01Z.ndpi"]
    with pytest.raises(CohortError, match=r"row 3: .*slides/007\.svs, which row 2"):
        read_cohort(table(slides, "slide_id,path\na,p1/007.svs\nb,p2/007.svs\n"), options)


def test_id_with_suffix_matches_only_that_file(slides):
    (slides / "slides" / "007.jpg").touch()
    assert read_cohort(table(slides, "case_id,slide_id\nA,007.svs\n")).rows[0].path.name == "007.svs"
    assert "no slide 009.svs below" in read_cohort(table(slides, "case_id,slide_id\nA,009.svs\n")).rows[0].missing


def test_missing_slide_of_a_feature_file_is_reported_by_slide_name(slides):
    (slides / "009.h5").touch()
    (row,) = read_cohort(table(slides, "PATIENT,FILENAME\nP1,009.h5\n")).rows
    assert "no slide 009.* below" in row.missing


@pytest.mark.parametrize("slide_id", ["a\\b", ".a", "k" * 201, "\u6f22" * 70, '"a\nb"'])
def test_ids_that_are_not_file_names_are_rejected(slides, slide_id):
    with pytest.raises(CohortError, match="cannot be used as a file name"):
        read_cohort(table(slides, f"slide_id,path\n{slide_id},slides/007.svs\n"))


def test_folder_with_dicom_and_other_slides(slides):
    (slides / "slides" / "1.dcm").touch()
    assert len(read_cohort(slides / "slides").rows) == 5


def test_two_files_for_one_id_are_rejected(slides):
    (slides / "slides/deep/007.tiff").touch()
    with pytest.raises(CohortError, match="several files match 007"):
        read_cohort(table(slides, "case_id,slide_id\nA,007\n"))


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"", "is empty"),
        (b"\n\n", "is empty"),
        (b"slide_id,path\n", "no rows below the header"),
        (b"name,age\nx,3\n", "no column with slides; its columns are name, age"),
        (b"slide_id,path\n\xff\xfe,a\n", "--encoding|not UTF-8"),
        (b"slide_id,path,path\na,b,c\n", "duplicate columns: path"),
        (b'slide_id,path\n"a,b\n', "not a valid CSV file"),
        (b"slide_id,Slide_ID,path\na,b,c\n", "duplicate columns: slide_id, Slide_ID"),
        (b"slide_id,path\n" + b"a" * 250 + b",b.svs\n", "at most 200 bytes"),
    ],
)
def test_invalid_tables_are_rejected(tmp_path, content, problem):
    (tmp_path / "t.csv").write_bytes(content)
    with pytest.raises(CohortError, match=problem):
        read_cohort(tmp_path / "t.csv")


def test_empty_excel_files_and_missing_files_are_rejected(tmp_path):
    (tmp_path / "t.xlsx").touch()
    with pytest.raises(CohortError, match="empty"):
        read_cohort(tmp_path / "t.xlsx")
    with pytest.raises(CohortError, match=r"absent\.csv does not exist"):
        read_cohort(tmp_path / "absent.csv")
    (tmp_path / "empty").mkdir()
    with pytest.raises(CohortError, match="No slides found below"):
        read_cohort(tmp_path / "empty")


def test_byte_order_mark_and_spaces_are_ignored(slides):
    path = slides / "t.csv"
    path.write_bytes("﻿slide_id , path\n 007 , slides/007.svs \n".encode())
    assert read_cohort(path).rows[0].slide_id == "007"


def test_read_folder_or_single_slide(slides):
    assert [row.slide_id for row in read_cohort(slides / "slides").rows] == ["007", "008", "010", "TCGA-A1.b2-01Z"]
    assert [row.slide_id for row in read_cohort(slides / "slides/007.svs").rows] == ["007"]


def test_equal_file_names_in_a_folder_are_rejected(slides):
    (slides / "slides/deep/007.svs").touch()
    with pytest.raises(CohortError, match=r"007: 007\.svs, deep/007\.svs"):
        read_cohort(slides / "slides")


def test_ids_with_path_are_used_unchanged(slides):
    cohort = read_cohort(table(slides, "slide_id,path\nregion.jpeg,slides/007.svs\nregion,slides/008.svs\n"))
    assert [row.slide_id for row in cohort.rows] == ["region.jpeg", "region"]


def test_unknown_ids_are_rejected_with_available_ids(slides):
    with pytest.raises(CohortError, match="No slide in the cohort has the id '9'"):
        read_cohort(slides / "slides").check_ids(["007", "9"])


@pytest.mark.parametrize(
    ("name", "slide_id"),
    [
        ("a.svs", "a"),
        ("a.b.SVS", "a.b"),
        ("a.ome.tif", "a"),
        ("a.h5", "a"),
        ("a", "a"),
        ("dir/a.ndpi", "a"),
        (".svs", ".svs"),
    ],
)
def test_slide_ids_from_file_names(name, slide_id):
    assert slide_id_from_name(name) == slide_id


@pytest.mark.parametrize("second", ["x/a.svs", "./x/a.svs", "x/../x/a.svs"])
def test_the_same_missing_file_under_two_patients_is_rejected(slides, second):
    text = f"slide_id,path,patient_id\na,x/a.svs,P1\nb,{second},P2\n"
    with pytest.raises(CohortError, match=r"rows 2 and 3: .*the same file, listed under 2 patients: P1, P2"):
        read_cohort(table(slides, text))
