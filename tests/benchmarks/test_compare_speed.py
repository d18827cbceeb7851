"""The comparison of two versions, without running the benchmarks."""

import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "compare_speed.py"
PYPROJECT = '[project]\nname = "example"\n[project.scripts]\nexample = "example.cli:main"\n'


@pytest.fixture
def compare_speed(monkeypatch):
    spec = importlib.util.spec_from_file_location("compare_speed", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "compare_speed", module)  # needed by its dataclasses
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def repository(compare_speed, tmp_path, monkeypatch):
    """A small repository with one commit that replaces this one."""
    if shutil.which("git") is None:
        pytest.skip("git is not installed")
    root = tmp_path / "repository"
    (root / "src" / "example").mkdir(parents=True)
    (root / "benchmarks").mkdir()
    (root / "pyproject.toml").write_text(PYPROJECT)
    (root / "src" / "example" / "__init__.py").write_text("version = 1\n")
    identity = ("-c", "user.name=Someone", "-c", "user.email=someone@example.org", "-c", "commit.gpgsign=false")
    for arguments in (("init", "--quiet"), ("add", "."), (*identity, "commit", "--quiet", "--message", "First")):
        subprocess.run(["git", *arguments], cwd=root, check=True)
    monkeypatch.setattr(compare_speed, "ROOT", root)
    return root


def test_ratios_are_computed_from_paired_repeats(compare_speed):
    old = [{"step": 1.0, "gone": 1.0}, {"step": 2.0, "gone": 1.0}, {"step": 4.0, "gone": 1.0}]
    new = [{"step": 1.5, "added": 1.0}, {"step": 2.0, "added": 1.0}, {"step": 2.0, "added": 1.0}]
    (row,) = compare_speed.compare(old, new)
    assert row == compare_speed.Row("step", 2.0, 2.0, 1.0, lowest_ratio=0.5, highest_ratio=1.5)


def test_table_has_a_row_per_benchmark(compare_speed):
    rows = [
        compare_speed.Row("predict", 10.0, 12.5, 1.25, 1.2, 1.304),
        compare_speed.Row("step", 0.0123, 0.0061, 0.5, 0.4, 0.6),
    ]
    assert compare_speed.format_table(rows).splitlines()[2:] == [
        "| predict | 10.00 s | 12.50 s | 1.25 | 1.20 to 1.30 |",
        "| step | 12.3 ms | 6.1 ms | 0.50 | 0.40 to 0.60 |",
    ]


def test_versions_run_in_alternating_order(compare_speed, monkeypatch, tmp_path):
    versions = [
        compare_speed.Version(name, name, tmp_path, tmp_path, "example", "example", "main") for name in ("old", "new")
    ]
    order = []

    def time_step(version):
        order.append(version.name)
        return {"step": float(len(order))}

    monkeypatch.setattr(compare_speed, "time_step", time_step)
    times = compare_speed.measure(versions, ["step"], repeats=3)
    assert order == ["old", "new", "new", "old", "old", "new"]
    assert times == {
        "old": [{"step": 1.0}, {"step": 4.0}, {"step": 5.0}],
        "new": [{"step": 2.0}, {"step": 3.0}, {"step": 6.0}],
    }


def test_data_loading_speeds_are_converted_to_times(compare_speed):
    rows = [{"workers": None, "tiles_per_second": 50.0}, {"workers": 1, "tiles_per_second": 25.0}]
    times = compare_speed.read_data_loading_times({"augmentation": {"plain": 1000.0}, "rows": rows})
    assert times == {
        "augmentation (plain), per tile": 0.001,
        "training, step alone, per tile": 0.02,
        "training, --workers 1, per tile": 0.04,
    }


def test_commit_and_working_tree_are_exported(compare_speed, repository, tmp_path):
    (repository / "src" / "example" / "__init__.py").write_text("version = 2\n")
    commit = compare_speed.export_commit("HEAD", tmp_path / "old")
    changed = compare_speed.copy_working_tree(tmp_path / "new")
    assert changed == f"{commit.removeprefix('HEAD, ')} with uncommitted changes"
    old = compare_speed.prepare_version("old", commit, tmp_path / "old")
    new = compare_speed.prepare_version("new", changed, tmp_path / "new")
    assert (old.script, old.module, old.function) == ("example", "example.cli", "main")
    program = "import sys, example; sys.exit(example.version - int(sys.argv[1]))"
    old.run("import", ["-c", program, "1"])
    new.run("import", ["-c", program, "2"])
    with pytest.raises(SystemExit, match=r"old \(HEAD, \w+\): import failed with exit code 1"):
        old.run("import", ["-c", program, "0"])


@pytest.mark.usefixtures("repository")
def test_unknown_commit_is_an_error(compare_speed, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["compare_speed.py", "no-such-commit"])
    with pytest.raises(SystemExit) as exited:
        compare_speed.main()
    assert exited.value.code == 2
    assert capsys.readouterr().err.startswith("Unknown commit 'no-such-commit' in repository/.")


def test_version_without_a_command_line_is_an_error(compare_speed, tmp_path, capsys):
    (tmp_path / "pyproject.toml").write_text('[project]\nname = "example"\n')
    with pytest.raises(SystemExit) as exited:
        compare_speed.read_entry_point(tmp_path)
    assert exited.value.code == 2
    assert "[project.scripts]" in capsys.readouterr().err


def test_older_script_names_are_found(compare_speed, tmp_path):
    version = compare_speed.Version("old", "old", tmp_path, tmp_path, "example", "example", "main")
    assert version.find_script("data-loading") is None
    (tmp_path / "benchmarks").mkdir()
    for name in ("feeding.py", "data_loading.py"):
        (tmp_path / "benchmarks" / name).touch()
        assert version.find_script("data-loading").name == name
