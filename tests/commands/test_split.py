"""Tests of `tapfm split`."""

import csv
import os
import shlex
import tomllib

import pytest
from cohort_files import read_rows
from command_line import tapfm
from slide_files import section, write_slide

from tapfm.cohort.cohort_table import read_cohort
from tapfm.cohort.splits import read_splits


def write_table(path, count=40, header="slide_id,path,patient_id,FGFR3,objective", extra=lambda _: ""):
    """Write two slides for each patient; every fifth patient is positive, every third scanned at 40x."""
    lines = [header]
    for i in range(count):
        patient = i // 2
        scan = 40 if patient % 3 == 0 else 20
        lines.append(f"s{i},slides/s{i}.svs,P{patient},{int(patient % 5 == 0)},{scan}{extra(i)}")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines) + "\n")
    return path


def split_error(*arguments):
    result = tapfm("split", *arguments)
    assert result.returncode == 2, result.stdout
    assert "Traceback" not in result.stderr
    return result.stderr


def test_split_prints_counts_and_writes_a_table(tmp_path):
    cohort, out = write_table(tmp_path / "cohort.csv", 100), tmp_path / "split.csv"
    result = tapfm("split", cohort, "--out", out)
    assert result.returncode == 0, result.stderr
    lines = [line.split() for line in result.stdout.splitlines()]
    assert lines[0] == ["split", "patients", "slides", "40x", "FGFR3", "positive"]
    assert [line[:3] for line in lines[1:4]] == [["train", "40", "80"], ["val", "5", "10"], ["test", "5", "10"]]
    positives = [" ".join(line[-4:]) for line in lines[1:4]]
    assert positives == ["16 of 80 (20%)", "2 of 10 (20%)", "2 of 10 (20%)"]
    assert f"Next: tapfm config --cohort {out} --out run.toml --target FGFR3" in result.stdout
    before, after = read_rows(cohort), read_rows(out)
    assert list(after[0]) == [*before[0], "split"]
    assert [{name: row[name] for name in before[0]} for row in after] == before
    assert len(read_splits(read_cohort(out))) == 100


def test_split_does_not_depend_on_row_order(tmp_path):
    cohort, shuffled = write_table(tmp_path / "cohort.csv"), tmp_path / "shuffled.csv"
    header, *lines = cohort.read_text().splitlines()
    shuffled.write_text("\n".join([header, *reversed(lines)]) + "\n")
    for source, out, seed in ((cohort, "a.csv", 3), (shuffled, "b.csv", 3), (cohort, "c.csv", 4)):
        assert tapfm("split", source, "--out", tmp_path / out, "--seed", seed).returncode == 0
    splits = [{row["slide_id"]: row["split"] for row in read_rows(tmp_path / f"{name}.csv")} for name in "abc"]
    assert splits[0] == splits[1] != splits[2]


def test_folds_are_columns_with_each_patient_in_test_once(tmp_path):
    cohort, out = write_table(tmp_path / "cohort.csv", extra=lambda _: ",train"), tmp_path / "folds.csv"
    cohort.write_text(cohort.read_text().replace("objective\n", "objective,fold_7\n"))
    result = tapfm("split", cohort, "--out", out, "--folds", 4, "--force")
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines()[0].split()[:3] == ["fold", "split", "patients"]
    rows = read_rows(out)
    names = [f"fold_{i}" for i in range(4)]
    assert list(rows[0]) == ["slide_id", "path", "patient_id", "FGFR3", "objective", *names]
    assert all(sorted(row[name] for name in names) == ["test", "train", "train", "val"] for row in rows)
    for fold in range(4):
        assert len(read_splits(read_cohort(out), fold)) == 40


def test_existing_splits_are_kept_without_force(tmp_path):
    header = "slide_id,path,patient_id,FGFR3,objective,set"
    valid = write_table(tmp_path / "valid.csv", header=header, extra=lambda i: ",train" if i < 30 else ",test")
    error = split_error(valid, "--out", tmp_path / "new.csv")
    assert "already has valid splits" in error
    with_folds = write_table(
        tmp_path / "folds.csv",
        header=f"{header},fold_0",
        extra=lambda i: ",train,train" if i < 20 else ",train,val" if i < 30 else ",test,test",
    )
    assert "already has valid splits" in split_error(with_folds, "--out", tmp_path / "new.csv")
    assert "already has valid folds" in split_error(with_folds, "--out", tmp_path / "new.csv", "--folds", "4")
    assert "--force" in error
    assert tapfm("split", valid, "--out", tmp_path / "new.csv", "--force").returncode == 0
    rows = read_rows(tmp_path / "new.csv")
    assert list(rows[0]) == header.split(",")
    assert {row["set"] for row in rows} == {"train", "val", "test"}


def test_patient_overlap_error_offers_a_command_that_fixes_it(tmp_path):
    header = "slide_id,path,patient_id,FGFR3,objective,split"
    overlapping = write_table(
        tmp_path / "overlapping.csv", header=header, extra=lambda i: ",train" if i < 35 else ",test"
    )
    error = split_error(overlapping, "--out", tmp_path / "new.csv")
    assert "has 41 problems" in error
    assert "patient P17 is in more than one split (column split): train has s34; test has s35" in error
    command = shlex.split(error.partition("new splits: ")[2].splitlines()[0])
    assert command[0] == "tapfm"
    assert tapfm(*command[1:]).returncode == 0
    assert "more than one split" in split_error(overlapping, "--out", tmp_path / "folds.csv", "--folds", 3)


def test_folds_replace_an_existing_split(tmp_path):
    header = "slide_id,path,patient_id,FGFR3,objective,set"
    cohort = write_table(tmp_path / "cohort.csv", header=header, extra=lambda i: ",train" if i < 34 else ",test")
    assert "--force" in split_error(cohort, "--out", tmp_path / "folds.csv", "--folds", 3)
    assert tapfm("split", cohort, "--out", tmp_path / "folds.csv", "--folds", 3, "--force").returncode == 0
    names = ["slide_id", "path", "patient_id", "FGFR3", "objective", "fold_0", "fold_1", "fold_2"]
    assert list(read_rows(tmp_path / "folds.csv")[0]) == names
    result = tapfm("config", "--cohort", tmp_path / "folds.csv", "--encoder", "tapfm-pocket")
    assert tomllib.loads(result.stdout)["cohort"]["fold"] == 0


def test_paths_are_relative_to_the_new_table(tmp_path, monkeypatch):
    cohort = write_table(tmp_path / "data" / "cohort.csv")
    (tmp_path / "data" / "slides").mkdir()
    for i in range(40):
        (tmp_path / "data" / "slides" / f"s{i}.svs").touch()
    monkeypatch.chdir(tmp_path)
    for out, expected in (("split.csv", "data/slides/s0.svs"), ("runs/one/split.csv", "../../data/slides/s0.svs")):
        assert tapfm("split", os.path.relpath(cohort), "--out", out).returncode == 0
        assert read_rows(tmp_path / out)[0]["path"] == expected
        assert len(read_cohort(tmp_path / out)) == 40


def test_absolute_paths_and_symbolic_links(tmp_path):
    cohort = write_table(tmp_path / "data" / "cohort.csv", 12)
    absolute = tmp_path / "archive" / "s1.svs"
    cohort.write_text(cohort.read_text().replace("slides/s1.svs", str(absolute)))
    for path in (absolute, tmp_path / "data" / "slides" / "s0.svs", tmp_path / "deep" / "below" / "x"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    (tmp_path / "link").symlink_to(tmp_path / "deep" / "below")
    assert tapfm("split", cohort, "--out", tmp_path / "link" / "split.csv").returncode == 0
    first, second = read_rows(tmp_path / "link" / "split.csv")[:2]
    assert (tmp_path / "link" / first["path"]).samefile(tmp_path / "data" / "slides" / "s0.svs")
    assert second["path"] == str(absolute)


def test_slides_found_by_id_keep_their_id(tmp_path):
    slides = tmp_path / "slides"
    slides.mkdir()
    for i in range(6):
        (slides / f"s{i}.svs").touch()
    (tmp_path / "clam.csv").write_text(
        "case_id,slide_id,label,mpp\n" + "".join(f"P{i},s{i}.svs,{i % 2},0.25\n" for i in range(6))
    )
    assert tapfm("split", tmp_path / "clam.csv", "--out", tmp_path / "here.csv").returncode == 0
    assert list(read_rows(tmp_path / "here.csv")[0]) == ["case_id", "slide_id", "label", "mpp", "split"]
    assert tapfm("split", tmp_path / "clam.csv", "--out", tmp_path / "there" / "split.csv").returncode == 0
    before, after = read_cohort(tmp_path / "clam.csv"), read_cohort(tmp_path / "there" / "split.csv")
    assert [row.slide_id for row in after.rows] == [row.slide_id for row in before.rows]
    assert all(new.path.samefile(old.path) for new, old in zip(after.rows, before.rows, strict=True))


def test_all_columns_of_another_tool_are_kept(tmp_path):
    lines = [f"{i};P{i};007-{i};{i % 2};;a, b" for i in range(8)]
    (tmp_path / "t.csv").write_text("\n".join([";case_id;slide_id;FGFR3;;remark", *lines]) + "\n")
    assert tapfm("split", tmp_path / "t.csv", "--out", tmp_path / "split.csv").returncode == 0
    with (tmp_path / "split.csv").open(newline="") as file:
        header, first, *_ = csv.reader(file)
    assert header == ["case_id", "slide_id", "FGFR3", "remark", "split"]
    assert first[:4] == ["P0", "007-0", "0", "a, b"]


def test_resolution_is_read_from_slides_and_unknown_ones_are_counted(tmp_path):
    for i in range(6):
        write_slide(tmp_path / f"s{i}.svs", section(300 + i, 300), mpp=0.25 if i < 3 else 0.5, downsamples=(1,))
    (tmp_path / "s6.svs").write_bytes(b"nothing")
    rows = [f"s{i},s{i}.svs,P{i},{i % 2}" for i in range(8)]
    (tmp_path / "cohort.csv").write_text("\n".join(["slide_id,path,patient_id,FGFR3", *rows]) + "\n")
    result = tapfm("split", tmp_path / "cohort.csv", "--out", tmp_path / "split.csv", "--fractions", "0.5", "0", "0.5")
    assert result.returncode == 0, result.stderr
    assert "scan resolution of 7 slides" in result.stderr
    assert "scan resolution of 2 slides is unknown" in result.stdout
    lines = [line.split() for line in result.stdout.splitlines()[1:3]]
    assert [line[0] for line in lines] == ["train", "test"]
    assert [sum(int(line[column]) for line in lines) for column in (3, 5)] == [3, 6]  # "2 of 3 (67%)", ...


def test_note_about_missing_class_or_empty_split(tmp_path):
    (tmp_path / "cohort.csv").write_text("slide_id,mpp,FGFR3\na,0.5,1\nb,0.5,0\nc,0.5,0\n")
    result = tapfm("split", tmp_path / "cohort.csv", "--out", tmp_path / "split.csv")
    assert result.returncode == 0, result.stderr
    assert "val has no positive slide for FGFR3" in result.stdout
    assert "test is empty" in result.stdout


def test_without_a_usable_label_only_no_stratify_splits(tmp_path):
    (tmp_path / "cohort.csv").write_text("slide_id,mpp,stage\na,0.5,I\nb,0.5,II\nc,0.5,III\n")
    error = split_error(tmp_path / "cohort.csv", "--out", tmp_path / "split.csv")
    assert "stage: I (1), II (1), III (1)" in error
    assert "--no-stratify" in error
    assert not (tmp_path / "split.csv").exists()
    result = tapfm("split", tmp_path / "cohort.csv", "--out", tmp_path / "split.csv", "--no-stratify")
    assert result.returncode == 0, result.stderr
    assert f"Wrote {tmp_path / 'split.csv'}" in result.stdout
    assert "tapfm config" not in result.stdout


def test_a_named_target_is_never_dropped(tmp_path):
    cohort = write_table(
        tmp_path / "cohort.csv",
        header="slide_id,path,patient_id,FGFR3,objective,KRAS,site",
        extra=lambda i: f",{'maybe' if i == 7 else i % 2},b",
    )
    error = split_error(cohort, "--out", tmp_path / "x.csv")
    assert "2 columns can be the target" in error
    error = split_error(cohort, "--out", tmp_path / "x.csv", "--target", "KRAS", "--target", "site")
    assert "row 9: KRAS is 'maybe'" in error
    assert "rows 2, 3, 4 and 37 more: site is 'b'" in error
    assert "Did you mean: FGFR3" in split_error(cohort, "--out", tmp_path / "x.csv", "--target", "FGFR")
    assert not (tmp_path / "x.csv").exists()
    result = tapfm("split", cohort, "--out", tmp_path / "x.csv", "--target", "KRAS", "--missing", "maybe")
    assert result.returncode == 0, result.stderr
    assert "1 missing (maybe: 1)" in result.stderr


def test_training_split_without_a_class_is_rejected(tmp_path):
    cohort = write_table(
        tmp_path / "cohort.csv", header="slide_id,path,patient_id,FGFR3,objective,ALK", extra=lambda _: ",0"
    )
    error = split_error(cohort, "--out", tmp_path / "x.csv", "--target", "ALK")
    assert "training split (column split):\n  ALK: 0 positive and 32 negative slides" in error
    assert not (tmp_path / "x.csv").exists()


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--out", "there.csv"], "there.csv already exists"),
        (["--out", "cohort.csv"], "cohort.csv is the cohort table itself"),
        (["--out", "x.svs"], "not the name of a CSV file"),
        (["--out", "cohort.csv/x.csv"], "cannot be written"),
        (["--out", "x.csv", "--fractions", "0.8", "0.1", "0.2"], "0.8 0.1 0.2 are not valid"),
        (["--out", "x.csv", "--folds", "2"], "must be from 3 to 20"),
        (
            ["--out", "x.csv", "--folds", "5", "--fractions", "1", "0", "0"],
            "--folds and --fractions cannot be combined",
        ),
    ],
)
def test_invalid_options_are_rejected_and_change_nothing(tmp_path, monkeypatch, arguments, problem):
    monkeypatch.chdir(tmp_path)
    before = write_table(tmp_path / "cohort.csv").read_bytes()
    (tmp_path / "there.csv").write_text("mine")
    assert problem in split_error("cohort.csv", *arguments)
    assert (tmp_path / "cohort.csv").read_bytes() == before
    assert (tmp_path / "there.csv").read_text() == "mine"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cohort.csv", "there.csv"]


def test_folder_instead_of_a_table_is_rejected(tmp_path):
    (tmp_path / "a.svs").touch()
    assert "tapfm inspect" in split_error(tmp_path, "--out", tmp_path / "x.csv")


def test_force_overwrites_the_cohort_table(tmp_path):
    cohort = write_table(tmp_path / "cohort.csv")
    assert tapfm("split", cohort, "--out", cohort, "--force").returncode == 0
    assert len(read_splits(read_cohort(cohort))) == 40


def test_folds_replace_all_columns_with_the_name_of_a_split(tmp_path):
    header = "slide_id,path,patient_id,FGFR3,objective,set,split"
    cohort = write_table(tmp_path / "c.csv", header=header, extra=lambda i: ",train,train" if i < 34 else ",test,test")
    result = tapfm("split", cohort, "--out", tmp_path / "folds.csv", "--folds", 3, "--force")
    assert result.returncode == 0, result.stderr
    names = ["slide_id", "path", "patient_id", "FGFR3", "objective", "fold_0", "fold_1", "fold_2"]
    assert list(read_rows(tmp_path / "folds.csv")[0]) == names
