"""The layers of the package: a module imports only from its own package and from earlier layers, without cycles.

Every import counts, also those inside functions and for type checking only, and names of modules in texts, which
`importlib` may get.
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
    """Return the modules of tapfm that a module imports, at its top or anywhere else."""
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
    """Return the shortest way from a module back to itself, or nothing."""
    before: dict[str, str] = {}
    queue = [module]
    for current in queue:
        for imported in sorted(IMPORTS[current]):
            if imported == module:
                way = [current]
                while way[-1] != module:
                    way.append(before[way[-1]])
                return [*reversed(way), module]
            if imported not in before:
                before[imported] = current
                queue.append(imported)
    return []


def test_every_package_has_its_layer():
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


def test_packages_hold_no_code():
    # an import of a module runs the __init__ of its package: one with code would make edges that this file cannot see
    for package in PACKAGES - {"tapfm.__init__"}:
        assert len(ast.parse(PATHS[package].read_text("utf-8")).body) == 1, package


def test_no_module_is_long():
    assert {
        module: count for module, path in PATHS.items() if (count := len(path.read_text().splitlines())) > 400
    } == {}
