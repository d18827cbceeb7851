"""The comparison of tools/compare_versions.py. The versions themselves are not run here."""

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
from version_outputs import collect_items

rng = np.random.default_rng(0)
FEATURES = rng.normal(size=(6, 4)).astype(np.float32)


def item(kind, **parts):
    return Item(kind, {name: np.asarray(values) for name, values in parts.items()})


def find_problem(old, new, tolerance=EQUAL):
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
def test_a_change_of_the_last_bit_is_a_difference(name):
    parts = dict(ITEMS[name].parts)
    first = next(iter(parts))
    parts[first] = parts[first].copy()
    parts[first].flat[0] = np.nextafter(parts[first].flat[0], parts[first].dtype.type(9))
    changed = Item(ITEMS[name].kind, parts)
    verdict = compare_item(name, ITEMS[name], changed)
    assert verdict.problem.startswith(f"{first}: 1 of")
    assert 0 < verdict.largest < 1e-6
    assert not find_problem(ITEMS[name], changed, ROUNDING)


@pytest.mark.parametrize(
    ("kind", "old", "passes", "fails"),
    [
        ("float32", [1000.0, 0.001], [1000.0, 0.0019], [1000.0, 0.0031]),  # relative to the largest value of the part
        ("float32", [1e-8], [1e-8 + 1e-15], [1.1e-8]),
        ("metric", [1e-9], [1e-6], [1e-5]),  # a metric that is 0 except for rounding
        ("statistic", [0.5], [0.5 + 9e-11], [0.5 + 2e-10]),
        ("pixels", [100], [101], [102]),
        ("exact", [7], [7], [8]),
    ],
)
def test_tolerance_allows_only_rounding(kind, old, passes, fails):
    assert not find_problem(item(kind, a=old), item(kind, a=passes), ROUNDING)
    assert find_problem(item(kind, a=old), item(kind, a=fails), ROUNDING)
    assert find_problem(item(kind, a=old), item(kind, a=fails))


def test_the_first_difference_is_reported():
    found = find_problem(item("exact", slide_id=["S001", "S002"]), item("exact", slide_id=["S001", "S003"]))
    assert found == "slide_id: 1 of 2 differ, first at [1]: S002 became S003"
    assert "shape is (2,) and was (3,)" in find_problem(item("exact", a=[1, 2, 3]), item("exact", a=[1, 2]))


def test_nan_is_equal_only_to_nan():
    nan, one = item("float32", a=[np.nan, 1.0]), item("float32", a=[1.0, 1.0])
    assert not find_problem(nan, nan)
    assert find_problem(nan, one, Tolerance(float32=1.0))
    assert find_problem(one, nan, Tolerance(float32=1.0))
    assert find_problem(item("float32", a=[np.inf]), item("float32", a=[1.0]), Tolerance(float32=1.0))


def test_integers_beyond_float64_are_compared_exactly():
    assert find_problem(item("exact", a=[2**53]), item("exact", a=[2**53 + 1]))


def test_items_and_parts_of_only_one_version_are_differences():
    fewer = {name: each for name, each in ITEMS.items() if name != "features"}
    (missing,) = [each for each in compare_items(ITEMS, fewer) if each.problem]
    assert (missing.name, missing.problem) == ("features", "only in the old version")
    (added,) = [each for each in compare_items(fewer, ITEMS) if each.problem]
    assert added.problem == "only in the new version"
    without = Item("float32", {"S001": FEATURES})
    assert find_problem(ITEMS["features"], without) == "only in the old version: S002"
    assert find_problem(without, ITEMS["features"]) == "only in the new version: S002"
    assert find_problem(ITEMS["metrics"], item("statistic", auc=[0.75])) == "was of kind metric"


def test_golden_files_preserve_items_and_are_deterministic(tmp_path):
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
    items = collect_items(tmp_path)
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
    for folder, key in (("old", "why"), ("new", "reason_code")):
        (tmp_path / folder / "nested.json").write_text(json.dumps({"EGFR": {key: 1}, "KRAS": {key: 2}}))
    renamed = (("results.csv", "call", "predicted"), ("*.json", "*.why", "*.reason_code"))
    monkeypatch.setattr("version_outputs.RENAMED_FIELDS", renamed)
    verdicts = compare_items(collect_items(tmp_path / "old"), collect_items(tmp_path / "new"))
    assert [(each.name, each.problem) for each in verdicts] == [("nested.json", ""), ("results.csv", "")]


def test_older_names_are_tried_if_a_version_rejects_the_new_ones(monkeypatch):
    renamed = (("predict", "--batch", "--chunk"), ("predict", "--chunk", "--batch-size"), ("train", "a.tau", "b.tau"))
    monkeypatch.setattr(version_scenario, "RENAMED_ARGUMENTS", renamed)
    commands = []

    def command(arguments):
        commands.append(" ".join(arguments))
        return (0 if "--batch" in arguments else 2), "done"

    scenario = version_scenario.Scenario(command, version_scenario.SMALL, lambda _: None)
    assert scenario.tapfm("predict", "--batch-size", 5) == "done"
    assert commands == ["predict --batch-size 5", "predict --chunk 5", "predict --batch 5"]
    commands.clear()
    with pytest.raises(version_scenario.ScenarioError, match="exit code 2"):
        scenario.tapfm("train", "--set", "b.tau=1")
    assert commands == ["train --set b.tau=1", "train --set a.tau=1"]


# --- the command line


def fake_versions(monkeypatch, *values):
    """Replace both versions by functions that write one file."""
    remaining = iter(values)

    def run_version(_, __, out):
        out.mkdir(parents=True)
        (out / "values.json").write_text(json.dumps({"value": next(remaining)}))
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
def test_the_exit_code_is_1_if_something_differs(monkeypatch, capsys, tmp_path, new, options, code):
    fake_versions(monkeypatch, 0.5, new)
    monkeypatch.setattr(compare_versions, "export_commit", lambda *_: "0" * 40)
    assert compare_versions.main(["HEAD", *options, "--keep", str(tmp_path / "kept")]) == code
    output = capsys.readouterr().out
    assert ("DIFFERS: value: 1 of 1 differ" in output) == bool(code)
    assert (tmp_path / "kept" / "old" / "values.json").exists()


def test_an_unknown_commit_is_invalid_input(capsys):
    assert compare_versions.main(["no-such-commit"]) == 2
    error = capsys.readouterr().err
    assert "'no-such-commit' is not a commit" in error
    assert "git log --oneline" in error


def test_a_folder_with_files_is_not_overwritten(tmp_path, capsys):
    (tmp_path / "mine.txt").write_text("mine")
    assert compare_versions.main(["HEAD", "--keep", str(tmp_path)]) == 2
    assert "is not an empty folder" in capsys.readouterr().err


def test_a_failed_version_is_reported(monkeypatch, capsys):
    monkeypatch.setattr(compare_versions, "export_commit", lambda *_: "0" * 40)
    monkeypatch.setattr(compare_versions.sys, "executable", "false")
    assert compare_versions.main(["HEAD"]) == 1
    assert "version failed" in capsys.readouterr().err
