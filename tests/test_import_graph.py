"""One direction of flow: a package imports only from those above it in this list; `app` alone knows them all."""

import ast
from pathlib import Path

import pytest

import tapfm

LAYERS = [
    "errors",
    "storage",
    "processes",
    "seeding",
    "devices",
    "device_memory",
    "slides",
    "cohort",
    "tiles",
    "synthetic",
    "contracts",
    "encoders",
    "aggregators",
    "tasks",
    "evaluation",
    "model",
    "inference",
    "adaptation",
    "prediction",
    "report",
    "viewer",
    "app",
    "api",
]
ROOT = Path(tapfm.__file__).parent
MODULES = sorted(path.relative_to(ROOT) for path in ROOT.rglob("*.py") if path != ROOT / "__init__.py")


def layer(path: Path) -> str:
    return path.parts[0].removesuffix(".py")


def imported_layers(path: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse((ROOT / path).read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("tapfm."):
            names.add(node.module.split(".")[1])
        elif isinstance(node, ast.ImportFrom) and node.module == "tapfm":
            names |= {alias.name for alias in node.names if alias.name in LAYERS}
        elif isinstance(node, ast.Import):
            names |= {alias.name.split(".")[1] for alias in node.names if alias.name.startswith("tapfm.")}
    return names


@pytest.mark.parametrize("path", MODULES, ids=str)
def test_imports_point_upwards(path):
    above = LAYERS[: LAYERS.index(layer(path)) + 1]
    assert imported_layers(path) <= set(above)


def test_every_package_has_its_place():
    assert {layer(path) for path in MODULES} == set(LAYERS)
