"""The layers of the package: a module imports only from its own package and from earlier layers, without cycles.

All imports count, also those inside functions or for type checking only, and module names in strings, which may be
passed to `importlib`.
"""

import ast
from pathlib import Path

import pytest

import tapfm

LAYERS = [
    "version",
    "errors",
    "contracts",
    "runtime",
    "results",
    "slides",
    "cohort",
    "tiles",
    "synthetic",
    "encoders",
    "aggregators",
    "metrics",
    "tasks",
    "evaluation",
    "config",
    "runs",
    "inference",
    "baselines",
    "adaptation",
    "prediction",
    "study",
    "report",
    "viewer",
    "bench",
    "demo",
    "workflows",
    "cli",
    "__main__",
    "__init__",
]
ROOT = Path(tapfm.__file__).parent
PATHS = {}  # of all modules, by dotted name
for file in sorted(ROOT.rglob("*.py")):
    name = ".".join(("tapfm", *file.relative_to(ROOT).with_suffix("").parts))
    PATHS[name if name == "tapfm.__init__" else name.removesuffix(".__init__")] = file
PACKAGES = {name for name, path in PATHS.items() if path.name == "__init__.py"}


def layer(module: str) -> int:
    return LAYERS.index(module.split(".")[1])


def imports(module: str) -> set[str]:
    """Return the modules of tapfm that a module imports, at module level or inside functions."""
    found = set()
    for node in ast.walk(ast.parse(PATHS[module].read_text("utf-8"))):
        if isinstance(node, ast.ImportFrom):
            assert not node.level, f"{module} has a relative import"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            found |= {name if name in PATHS else str(node.module) for name in names}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value in PATHS:
            found.add(node.value)  # for importlib
    return {"tapfm.__init__" if name == "tapfm" else name for name in found if name.split(".")[0] == "tapfm"}


IMPORTS = {module: imports(module) for module in PATHS}


def cycle_through(module: str) -> list[str]:
    """Return the shortest import cycle through a module, or an empty list."""
    before: dict[str, str] = {}
    queue = [module]
    for current in queue:
        for imported in sorted(IMPORTS[current]):
            if imported == module:
                path = [current]
                while path[-1] != module:
                    path.append(before[path[-1]])
                return [*reversed(path), module]
            if imported not in before:
                before[imported] = current
                queue.append(imported)
    return []


def test_every_package_has_a_layer():
    assert {module.split(".")[1] for module in PATHS} == set(LAYERS)


@pytest.mark.parametrize("module", sorted(PATHS))
def test_imports_come_from_the_same_package_or_an_earlier_layer(module):
    unknown = IMPORTS[module] - set(PATHS)
    later = {each for each in IMPORTS[module] - unknown if layer(each) > layer(module)}
    assert not unknown
    assert not later


@pytest.mark.parametrize("module", sorted(PATHS))
def test_no_module_is_part_of_a_cycle(module):
    assert not cycle_through(module)


def test_package_init_files_have_no_code():
    # importing a module runs the __init__.py of its package, whose imports this test would not see
    for package in PACKAGES - {"tapfm.__init__"}:
        assert len(ast.parse(PATHS[package].read_text("utf-8")).body) == 1, package


def test_modules_have_at_most_400_lines():
    assert {
        module: count for module, path in PATHS.items() if (count := len(path.read_text().splitlines())) > 400
    } == {}


def test_no_two_classes_have_the_same_name():
    modules = {}
    for module, path in PATHS.items():
        for node in ast.parse(path.read_text("utf-8")).body:
            if isinstance(node, ast.ClassDef):
                modules.setdefault(node.name, []).append(module)
    assert {name: found for name, found in modules.items() if len(found) > 1} == {}
