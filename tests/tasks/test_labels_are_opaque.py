"""Code outside tasks/ depends neither on the values of labels nor on how probabilities are computed from logits."""

import ast
from pathlib import Path

import pytest

import tapfm

ROOT = Path(tapfm.__file__).parent
# sigmoids that are not predictions: gates of networks, and DeLong's interval of an AUC
OTHER_SIGMOIDS = ("aggregators", "encoders", "metrics/delong.py")
# labels of synthetic slides are generated as numbers
GENERATES_LABELS = ("synthetic",)
FILES = sorted(path.relative_to(ROOT).as_posix() for path in ROOT.rglob("*.py"))
OUTSIDE = [name for name in FILES if not name.startswith("tasks/")]


def is_in(name, places):
    return any(name == place or name.startswith(f"{place}/") for place in places)


def find_names(node):
    for each in ast.walk(node):
        if isinstance(each, ast.Name):
            yield each.id
        elif isinstance(each, ast.Attribute):
            yield each.attr
        elif isinstance(each, ast.alias):
            yield each.name.split(".")[-1]


def find_numeric_labels(tree):
    """Yield annotations of labels as numbers, and comparisons of labels with numbers."""
    for node in ast.walk(tree):
        named = []
        if isinstance(node, ast.AnnAssign):
            named.append((ast.unparse(node.target), node.annotation))
        elif isinstance(node, ast.arg) and node.annotation is not None:
            named.append((node.arg, node.annotation))
        elif isinstance(node, ast.FunctionDef) and node.returns is not None:
            named.append((node.name, node.returns))
        for name, annotation in named:
            if "label" in name.lower() and "int | None" in ast.unparse(annotation):
                yield f"line {node.lineno}: {name}: {ast.unparse(annotation)}"
        if isinstance(node, ast.Compare) and isinstance(node.ops[0], ast.Eq | ast.NotEq):
            texts = [ast.unparse(each) for each in (node.left, *node.comparators)]
            if any(text in ("0", "1", "'0'", "'1'") for text in texts) and any("label" in text for text in texts):
                yield f"line {node.lineno}: {ast.unparse(node)}"


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ("labels: Mapping[str, int | None]", 1),
        ("def f(label: int | None): pass", 1),
        ("def read_labels() -> list[int | None]: pass", 1),
        ("label == 1", 1),
        ("row.labels['T'] == '1'", 1),
        ("label is None", 0),
        ("fold: int | None = None", 0),
        ("labels: Mapping[str, Label]", 0),
    ],
)
def test_find_numeric_labels(code, found):
    assert len(list(find_numeric_labels(ast.parse(code)))) == found


@pytest.mark.parametrize("name", [name for name in OUTSIDE if not is_in(name, OTHER_SIGMOIDS)])
def test_no_sigmoid_outside_tasks(name):
    found = set(find_names(ast.parse((ROOT / name).read_text("utf-8"))))
    assert not found & {"sigmoid", "expit", "logsigmoid"}


@pytest.mark.parametrize("name", [name for name in OUTSIDE if not is_in(name, GENERATES_LABELS)])
def test_no_numeric_labels_outside_tasks(name):
    assert list(find_numeric_labels(ast.parse((ROOT / name).read_text("utf-8")))) == []
