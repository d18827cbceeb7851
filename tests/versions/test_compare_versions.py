"""The comparison behind tools/compare_versions.py: what it calls a difference. No version is run here."""

import json

import compare_versions
import numpy as np
import pytest
import version_scenario
from compare_versions import ROUNDING
from PIL import Image
from version_items import (
    EQUAL,
    Item,
    Tolerance,
    compare_item,
    compare_items,
    format_verdicts,
    read_golden,
    write_golden,
)
from version_outputs import collect

rng = np.random.default_rng(0)
FEATURES = rng.normal(size=(6, 4)).astype(np.float32)


def item(kind, **parts):
    return Item(kind, {name: np.asarray(values) for name, values in parts.items()})


def problem(old, new, tolerance=EQUAL):
    return compare_item("x", old, new, tolerance).problem


ITEMS = {
    "coords": item("exact", S001=[[0, 224], [224, 448]]),
    "table": item("exact", slide_id=["S001", "S002"], tiles=[4, 5]),
    "features": item("float32", S001=FEATURES, S002=2 * FEATURES),
    "metrics": item("metric", auc=[0.75], difference=[1e-17]),
    "comparison": item("statistic", p=[0.25, np.nan]),
    "heatmap": item("pixels", S001=np.full((2, 3, 3), 100, np.uint8)),
}


def test_equal_items_pass():
    verdicts = compare_items(ITEMS, ITEMS)
    assert [each.name for each in verdicts] == sorted(ITEMS)
    assert not any(each.problem for each in verdicts)
    assert format_verdicts(verdicts).endswith("6 items with 78 values: no difference.")


@pytest.mark.parametrize("name", ["features", "metrics", "comparison"])
def test_the_last_bit_of_a_number_is_a_difference(name):
    parts = dict(ITEMS[name].parts)
    first = next(iter(parts))
    parts[first] = parts[first].copy()
    parts[first].flat[0] = np.nextafter(parts[first].flat[0], parts[first].dtype.type(9))
    changed = Item(ITEMS[name].kind, parts)
    verdict = compare_item(name, ITEMS[name], changed)
    assert verdict.problem.startswith(f"{first}: 1 of")
    assert 0 < verdict.largest < 1e-6
    assert not problem(ITEMS[name], changed, ROUNDING)


@pytest.mark.parametrize(
    ("kind", "old", "passes", "fails"),
    [
        ("float32", [1000.0, 0.001], [1000.0, 0.0019], [1000.0, 0.0031]),  # relative to the largest of the part
        ("float32", [1e-8], [1e-8 + 1e-15], [1.1e-8]),
        ("metric", [1e-9], [1e-6], [1e-5]),  # a metric of 0 but for rounding
        ("statistic", [0.5], [0.5 + 9e-11], [0.5 + 2e-10]),
        ("pixels", [100], [101], [102]),
        ("exact", [7], [7], [8]),
    ],
)
def test_tolerance_allows_rounding_and_no_more(kind, old, passes, fails):
    assert not problem(item(kind, a=old), item(kind, a=passes), ROUNDING)
    assert problem(item(kind, a=old), item(kind, a=fails), ROUNDING)
    assert problem(item(kind, a=old), item(kind, a=fails))


def test_the_first_difference_is_named():
    found = problem(item("exact", slide_id=["S001", "S002"]), item("exact", slide_id=["S001", "S003"]))
    assert found == "slide_id: 1 of 2 differ, first at [1]: S002 became S003"
    assert "shape is (2,) and was (3,)" in problem(item("exact", a=[1, 2, 3]), item("exact", a=[1, 2]))


def test_nan_is_equal_to_nan_only():
    nan, one = item("float32", a=[np.nan, 1.0]), item("float32", a=[1.0, 1.0])
    assert not problem(nan, nan)
    assert problem(nan, one, Tolerance(float32=1.0))
    assert problem(one, nan, Tolerance(float32=1.0))
    assert problem(item("float32", a=[np.inf]), item("float32", a=[1.0]), Tolerance(float32=1.0))


def test_whole_numbers_are_exact_beyond_float64():
    assert problem(item("exact", a=[2**53]), item("exact", a=[2**53 + 1]))


def test_what_only_one_version_has_is_a_difference():
    fewer = {name: each for name, each in ITEMS.items() if name != "features"}
    (missing,) = [each for each in compare_items(ITEMS, fewer) if each.problem]
    assert (missing.name, missing.problem) == ("features", "only in the old version")
    (added,) = [each for each in compare_items(fewer, ITEMS) if each.problem]
    assert added.problem == "only in the new version"
    without = Item("float32", {"S001": FEATURES})
    assert problem(ITEMS["features"], without) == "only in the old version: S002"
    assert problem(without, ITEMS["features"]) == "only in the new version: S002"
    assert problem(ITEMS["metrics"], item("statistic", auc=[0.75])) == "was of kind metric"


def test_golden_files_give_back_the_items_and_are_the_same_bytes_each_time(tmp_path):
    items = ITEMS | {"large": item("float32", a=rng.normal(size=(50, 9)))}
    for name in ("a", "b"):
        write_golden(tmp_path / name, items, version=3)
    for suffix in (".json", ".npz"):
        assert (tmp_path / f"a{suffix}").read_bytes() == (tmp_path / f"b{suffix}").read_bytes()
    read, version = read_golden(tmp_path / "a")
    assert version == 3
    assert read.keys() == items.keys()
    assert not any(each.problem for each in compare_items(items, read))
    assert all(
        read[name].parts[part].dtype == values.dtype for name in items for part, values in items[name].parts.items()
    )


# --- reading files


def test_files_become_items_without_paths_times_and_digests(tmp_path):
    run = tmp_path / "runs" / "a"
    (run / "tensorboard").mkdir(parents=True)
    (run / "tensorboard" / "events").write_text("x")
    (run / "summary.md").write_text("x")
    lines = [{"epoch": n, "loss": 0.5 / n, "val_auc": {"EGFR": 1.0}, "seconds": n / 7} for n in (1, 2)]
    (run / "history.jsonl").write_text("\n".join(map(json.dumps, lines)))
    (run / "split.csv").write_text("slide_id,path,digest,tiles,EGFR,mpp\nS001,/a/b,ff,4,,0.5\nS002,/a/c,fe,5,1,0.25\n")
    for slide_id in ("S001", "S002"):
        Image.fromarray(np.full((2, 2, 3), 7, np.uint8)).save(tmp_path / f"heatmap-{slide_id}.png")
        (tmp_path / f"{slide_id}.json").write_text(json.dumps({"slide_id": slide_id, "path": "/a", "at": [1, 2]}))
    items = collect(tmp_path)
    assert {name: (each.kind, list(each.parts)) for name, each in items.items()} == {
        "runs/a/history.jsonl": ("exact", ["epoch"]),
        "runs/a/history.jsonl numbers": ("float32", ["loss", "val_auc.EGFR"]),
        "runs/a/split.csv": ("exact", ["columns", "slide_id", "tiles"]),
        "runs/a/split.csv numbers": ("float32", ["EGFR", "mpp"]),
        "ID.json": ("exact", ["at[]", "slide_id"]),
        "heatmap-*.png pixels": ("pixels", ["S001 heatmap-S001.png", "S002 heatmap-S002.png"]),
    }
    assert items["ID.json"].parts["at[]"].tolist() == [1, 2, 1, 2]
    assert items["runs/a/history.jsonl numbers"].parts["loss"].tolist() == [0.5, 0.25]
    np.testing.assert_array_equal(items["runs/a/split.csv numbers"].parts["EGFR"], [np.nan, 1.0])


def test_renamed_files_and_fields_are_read_under_their_new_names(tmp_path, monkeypatch):
    for folder, file, column in (("old", "calls.csv", "call"), ("new", "results.csv", "predicted")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / file).write_text(f"slide_id,{column}\nS001,1\n")
    monkeypatch.setattr("version_outputs.RENAMED_FILES", (("calls.csv", "calls", "results"),))
    monkeypatch.setattr("version_outputs.RENAMED_FIELDS", (("results.csv", "call", "predicted"),))
    verdicts = compare_items(collect(tmp_path / "old"), collect(tmp_path / "new"))
    assert [(each.name, each.problem) for each in verdicts] == [("results.csv", "")]


def test_a_version_that_refuses_a_word_is_given_older_ones(monkeypatch):
    renamed = (("predict", "--batch", "--chunk"), ("predict", "--chunk", "--batch-size"), ("train", "a.tau", "b.tau"))
    monkeypatch.setattr(version_scenario, "RENAMED_WORDS", renamed)
    typed = []

    def command(words):
        typed.append(" ".join(words))
        return (0 if "--batch" in words else 2), "done"

    scenario = version_scenario.Scenario(command, version_scenario.SMALL, lambda _: None)
    assert scenario.tapfm("predict", "--batch-size", 5) == "done"
    assert typed == ["predict --batch-size 5", "predict --chunk 5", "predict --batch 5"]
    typed.clear()
    with pytest.raises(version_scenario.ScenarioError, match="exit code 2"):
        scenario.tapfm("train", "--set", "b.tau=1")
    assert typed == ["train --set b.tau=1", "train --set a.tau=1"]


# --- the command


def fake_versions(monkeypatch, *features):
    """Take the place of both versions: each writes one file."""
    written = iter(features)

    def run_version(_, __, out):
        out.mkdir(parents=True)
        (out / "values.json").write_text(json.dumps({"value": next(written)}))
        return 1.0

    monkeypatch.setattr(compare_versions, "run_version", run_version)


@pytest.mark.parametrize(
    ("new", "options", "code"),
    [
        (0.5, [], 0),
        (0.5 + 1e-8, [], 1),
        (0.5 + 1e-8, ["--tolerance"], 0),
        (0.5001, ["--tolerance"], 1),
        (0.5001, ["--tolerance", "1e-3"], 0),
    ],
)
def test_the_exit_code_says_whether_something_differs(monkeypatch, capsys, tmp_path, new, options, code):
    fake_versions(monkeypatch, 0.5, new)
    monkeypatch.setattr(compare_versions, "export_commit", lambda *_: "0" * 40)
    assert compare_versions.main(["HEAD", *options, "--keep", str(tmp_path / "kept")]) == code
    printed = capsys.readouterr().out
    assert ("DIFFERS: value: 1 of 1 differ" in printed) == bool(code)
    assert (tmp_path / "kept" / "old" / "values.json").exists()


def test_an_unknown_commit_is_bad_input(capsys):
    assert compare_versions.main(["no-such-commit"]) == 2
    error = capsys.readouterr().err
    assert "'no-such-commit' is not a commit" in error
    assert "git log --oneline" in error


def test_a_folder_with_files_is_not_written_over(tmp_path, capsys):
    (tmp_path / "mine.txt").write_text("mine")
    assert compare_versions.main(["HEAD", "--keep", str(tmp_path)]) == 2
    assert "is not an empty folder" in capsys.readouterr().err


def test_a_version_that_fails_is_told(monkeypatch, capsys):
    monkeypatch.setattr(compare_versions, "export_commit", lambda *_: "0" * 40)
    monkeypatch.setattr(compare_versions.sys, "executable", "false")
    assert compare_versions.main(["HEAD"]) == 1
    assert "could not run all commands" in capsys.readouterr().err
