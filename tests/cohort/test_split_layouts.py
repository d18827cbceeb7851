"""Write splits in the layouts of other tools; our readers and pandas read them back."""

import json

import pandas as pd
import pytest
import yaml

from tapfm.cohort.split_layouts import LAYOUTS, SplitSlide, format_split_layout
from tapfm.cohort.table_files import read_text_table
from tapfm.cohort.table_layouts import add_clam_splits, join_clini
from tapfm.errors import CohortError

COLUMNS = {"one split": ("split",), "folds": ("fold_0", "fold_1", "fold_2")}
PARTS = ("train", "train", "val", "test")
CLASSES = {"EGFR": ("MUT", "WT"), "grade": ("1", "2", "3")}


def make_slides(columns, labels=CLASSES):
    """Return slides of eight patients, two of them with two slides; one slide has no label and one no split."""
    slides = []
    for number in range(10):
        patient = f"Pätient {number % 8:03}"
        known = {target: names[number % 8 % len(names)] for target, names in labels.items()}
        splits = {each: PARTS[(number % 8 + index) % 4] for index, each in enumerate(columns)}
        slides.append(SplitSlide(f"00{number}.b", f"slides/00{number}.b.svs", patient, known, splits))
    slides[3] = SplitSlide("003.b", "", slides[3].patient_id, {"EGFR": "", "grade": ""}, slides[3].splits)
    slides[4] = SplitSlide("004.b", "", slides[4].patient_id, slides[4].labels, dict.fromkeys(columns, ""))
    return slides


@pytest.fixture(params=COLUMNS.values(), ids=COLUMNS)
def columns(request):
    return request.param


@pytest.fixture
def save(tmp_path):
    def save_layout(layout, slides, targets=tuple(CLASSES), **options):
        files = format_split_layout(layout, slides, targets, "My cohort", **options)
        for name, content in files.items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_bytes(content)
        return tmp_path, sorted(files)

    return save_layout


def expected(slides, target, columns, names=None):
    """Return patient, label and splits by slide of all slides with a label."""
    return {
        slide.slide_id: (
            slide.patient_id,
            names.index(slide.labels[target]) if names else slide.labels[target],
            *(slide.splits[each] for each in columns),
        )
        for slide in slides
        if slide.labels[target]
    }


def read_back(table, slide, patient, label, *columns):
    assert table.problems == ()
    return {
        cells[slide].removesuffix(".h5"): tuple(cells[each] for each in (patient, label, *columns))
        for _, cells in table.records
    }


def test_tapfm(save, columns):
    slides = make_slides(columns)
    folder, files = save("tapfm", slides)
    assert files == ["My cohort.csv"]
    table = read_text_table(folder / files[0])
    assert table.columns == ("slide_id", "path", "patient_id", "EGFR", "grade", *columns)
    found = read_back(table, "slide_id", "patient_id", "EGFR", "path", *columns)
    assert found == {
        each.slide_id: (each.patient_id, each.labels["EGFR"], each.path, *each.splits.values()) for each in slides
    }


@pytest.mark.parametrize("target", CLASSES)
def test_clam(save, columns, target):
    slides = make_slides(columns)
    folder, _ = save("clam", slides)
    splits = folder / f"splits/{target}_100"
    dataset = read_text_table(folder / f"dataset_csv/{target}.csv")
    table = add_clam_splits(dataset, splits / "splits_0.csv" if columns == ("split",) else splits)
    assert read_back(table, "slide_id", "case_id", "label", *columns) == expected(slides, target, columns)
    for number, column in enumerate(columns):
        flags = add_clam_splits(dataset, splits / f"splits_{number}_bool.csv")
        assert [cells["split"] for _, cells in flags.records] == [cells[column] for _, cells in table.records]


def test_clam_reads_the_lists_with_pandas(save):
    slides = make_slides(("split",))
    folder, _ = save("clam", slides)
    dataset = pd.read_csv(folder / "dataset_csv/EGFR.csv")
    assert not dataset["label"].isna().any()
    lists = pd.read_csv(folder / "splits/EGFR_100/splits_0.csv", dtype=dataset["slide_id"].dtype)
    for part in ("train", "val", "test"):
        ids = set(lists[part].dropna())
        assert ids == {each.slide_id for each in slides if each.splits["split"] == part and each.labels["EGFR"]}
        assert ids <= set(dataset["slide_id"])


@pytest.mark.parametrize("target", CLASSES)
def test_patho_bench(save, columns, target):
    slides = make_slides(columns)
    folder, files = save("patho-bench", slides)
    assert files == sorted(f"{each}/{name}" for each in CLASSES for name in ("config.yaml", "k=all.tsv"))
    names = CLASSES[target]
    table = read_text_table(folder / target / "k=all.tsv")
    folds = ("fold_0",) if columns == ("split",) else columns
    assert table.columns == ("case_id", "slide_id", target, *folds)
    found = read_back(table, "slide_id", "case_id", target, *folds)
    assert found == {key: (a, str(b), *rest) for key, (a, b, *rest) in expected(slides, target, columns, names).items()}
    config = yaml.safe_load((folder / target / "config.yaml").read_text("utf-8"))
    assert config == {
        "datasets": ["My cohort"],
        "task_col": target,
        "extra_cols": [],
        "task_type": "classification",
        "metrics": ["macro-ovr-auc"],
        "label_dict": dict(enumerate(names)),
        "sample_col": "case_id",
        "num_samples": 7,
    }
    assert pd.read_csv(folder / target / "k=all.tsv", sep="\t")[target].dtype == int


def test_patho_bench_with_labels_that_differ_within_a_patient(save):
    slides = make_slides(("split",))
    slides[8] = SplitSlide("008.b", "", slides[0].patient_id, {"EGFR": "WT", "grade": "1"}, slides[0].splits)
    folder, _ = save("patho-bench", slides)
    configs = [yaml.safe_load((folder / each / "config.yaml").read_text("utf-8")) for each in CLASSES]
    assert [(each["sample_col"], each["num_samples"]) for each in configs] == [("slide_id", 9), ("case_id", 7)]


@pytest.mark.parametrize("target", CLASSES)
def test_nnmil(save, columns, target):
    slides = make_slides(columns)
    folder, _ = save("nnmil", slides)
    for column in columns:
        task = folder / target / ("" if column == "split" else column)
        table = read_text_table(task / "dataset.json")
        found = read_back(table, "slide_id", "patient_id", "label", "split")
        assert found == {key: row for key, row in expected(slides, target, (column,)).items() if row[-1]}
        document = json.loads((task / "dataset.json").read_text("utf-8"))
        assert document["labels"] == {str(number): name for number, name in enumerate(CLASSES[target])}
        assert document["metric"] == ("auc" if target == "EGFR" else "bacc")
        assert pd.read_csv(task / "dataset.csv")["label"].dtype == int


@pytest.mark.parametrize("target", CLASSES)
def test_stamp(save, columns, target):
    slides = make_slides(columns)
    folder, files = save("stamp", slides)
    assert files == ["EGFR/splits.json", "clini.csv", "grade/splits.json", "slide.csv"]
    table = join_clini(read_text_table(folder / "slide.csv"), read_text_table(folder / "clini.csv"))
    found = read_back(table, "FILENAME", "PATIENT", target, *columns)
    assert {key: row for key, row in found.items() if row[1]} == expected(slides, target, columns)
    splits = json.loads((folder / target / "splits.json").read_text("utf-8"))["splits"]
    assert len(splits) == len(columns)
    for split, column in zip(splits, columns, strict=True):
        known = {each.patient_id: each.splits[column] for each in slides if each.labels[target]}
        assert split["train_patients"] == [each for each, part in known.items() if part in ("train", "val")]
        assert split["test_patients"] == [each for each, part in known.items() if part == "test"]


def test_stamp_reads_the_tables_with_pandas(save):
    folder, _ = save("stamp", make_slides(("split",)))
    clini = pd.read_csv(folder / "clini.csv", usecols=["PATIENT", "EGFR"], dtype=str).dropna()
    assert clini["PATIENT"].is_unique
    assert len(clini) == 7
    slides = pd.read_csv(folder / "slide.csv", usecols=["PATIENT", "FILENAME"], dtype=str)
    assert slides["FILENAME"].is_unique
    assert slides["FILENAME"].str.endswith(".h5").all()


def test_stamp_needs_one_label_per_patient(save):
    slides = make_slides(("split",))
    slides[8] = SplitSlide("008.b", "", slides[0].patient_id, {"EGFR": "WT", "grade": "1"}, slides[0].splits)
    with pytest.raises(CohortError, match=r"different labels of EGFR: Pätient 000\."):
        save("stamp", slides)


@pytest.mark.parametrize("layout", ["patho-bench", "nnmil"])
def test_order_of_classes(save, layout):
    folder, _ = save(layout, make_slides(("split",)), ("EGFR",), classes={"EGFR": ("WT", "MUT")})
    path = folder / "EGFR" / ("k=all.tsv" if layout == "patho-bench" else "dataset.csv")
    (first, *_) = read_text_table(path).records
    assert first[1]["EGFR" if layout == "patho-bench" else "label"] == "1"  # MUT


@pytest.mark.parametrize(
    ("labels", "names"),
    [(("1",), ("0", "1")), (("0", "1"), ("0", "1")), (("10", "9"), ("9", "10")), (("b", "10", "a"), ("10", "a", "b"))],
)
def test_numbers_of_classes(save, labels, names):
    folder, _ = save("patho-bench", make_slides(("split",), {"EGFR": labels, "grade": ("1",)}), ("EGFR",))
    assert tuple(yaml.safe_load((folder / "EGFR/config.yaml").read_text("utf-8"))["label_dict"].values()) == names


def test_targets_with_names_that_are_no_file_names(save):
    labels = {"ER/PR: status": ("0", "1"), "ER PR status": ("0", "1"), "../x": ("0", "1")}
    slides = [
        SplitSlide(each.slide_id, "", each.patient_id, dict.fromkeys(labels, "1"), each.splits)
        for each in make_slides(("split",))
    ]
    folder, files = save("patho-bench", slides, tuple(labels))
    assert len({(folder / name).resolve() for name in files}) == 6
    assert all((folder / name).resolve().is_relative_to(folder) for name in files)
    tasks = {yaml.safe_load((folder / name).read_text("utf-8"))["task_col"] for name in files if name.endswith("yaml")}
    assert tasks == set(labels)


@pytest.mark.parametrize("layout", LAYOUTS[1:])
def test_layouts_need_a_target(layout):
    with pytest.raises(CohortError, match=f"layout {layout} needs labels") as caught:
        format_split_layout(layout, make_slides(("split",)), (), "cohort")
    assert "--target" in caught.value.hint


@pytest.mark.parametrize("layout", ["clam", "nnmil"])
def test_ids_that_are_numbers(layout):
    slides = [SplitSlide(f"00{n}", "", f"P{n}", {"EGFR": "1"}, {"split": "train"}) for n in range(3)]
    with pytest.raises(CohortError, match="Every slide_id is a number, such as 000"):
        format_split_layout(layout, slides, ("EGFR",), "cohort")
    slides = [SplitSlide(f"s{n}", "", str(n), {"EGFR": "1"}, {"split": "train"}) for n in range(3)]
    if layout == "nnmil":
        with pytest.raises(CohortError, match="Every patient_id is a number"):
            format_split_layout(layout, slides, ("EGFR",), "cohort")
    else:
        assert format_split_layout(layout, slides, ("EGFR",), "cohort")


@pytest.mark.parametrize("layout", ["clam", "stamp"])
def test_text_that_pandas_reads_as_missing(layout):
    slides = [SplitSlide("s1", "", "P1", {"EGFR": "None"}, {"split": "train"})]
    with pytest.raises(CohortError, match="label of EGFR is 'None'"):
        format_split_layout(layout, slides, ("EGFR",), "cohort")
    slides = [SplitSlide("s1", "", "NA", {"EGFR": "1"}, {"split": "train"})]
    with pytest.raises(CohortError, match="patient_id is 'NA'"):
        format_split_layout(layout, slides, ("EGFR",), "cohort")
