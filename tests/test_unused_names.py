"""Detection of unused public names, in a small package."""

from pathlib import Path

import pytest
from unused_names import find_unused_names

FILES = {
    "pack/__init__.py": "",
    "pack/shapes.py": """
LIMIT, _PRIVATE, IN_A_TUPLE = 3, 4, 5
SIZE: int = 5
UNUSED = 6


class Square:
    side = 1

    def area(self): ...

    @property
    def diagonal(self): ...

    def perimeter(self): ...

    def by_page(self): ...

    def by_getattr(self): ...

    def forward(self): ...

    def _private(self): ...


class Result: ...


class Field: ...


class Options:
    field: Field


class Lonely:
    def again(self) -> "Lonely": ...


def measure(square: Square | None = None) -> "list[Result]":
    return only_here()


def only_here(): ...


def only_tested(): ...


def by_alias(): ...


def by_module(): ...


def by_dots(): ...


def by_string(): ...


def by_table(): ...


def by_text(): ...


def by_pair(): ...


async def unused(): ...


def _private(): ...
""",
    "pack/use.py": """
import pack.shapes as s
from pack import shapes
from pack.shapes import LIMIT, Options, measure

TABLE = {"dots": "pack.shapes.by_string", "colon": "pack.shapes:by_table"}
PAIR = ("pack.shapes", "by_pair")
print(s.by_alias, shapes.by_module, LIMIT, Options, measure().diagonal, getattr(measure, "by_getattr"))
""",
    "tools/tool.py": """
import pack.shapes
from pack.use import PAIR, TABLE

print(pack.shapes.by_dots, pack.shapes.SIZE, TABLE, PAIR, measure().area())
""",
    "page.html": "{{ square.by_page }} and pack.shapes:by_text",
    "tests/test_shapes.py": "from pack.shapes import only_tested",
}


@pytest.fixture
def folder(tmp_path):
    for name, text in FILES.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path


def find(folder: Path) -> list[str]:
    return find_unused_names(folder / "pack", [(folder / "tools/tool.py").read_text()], [folder / "page.html"])


def test_only_names_without_a_caller_are_listed(folder):
    assert find(folder) == [
        "pack.shapes: IN_A_TUPLE",
        "pack.shapes: Lonely",
        "pack.shapes: Lonely.again",
        "pack.shapes: Square.perimeter",
        "pack.shapes: UNUSED",
        "pack.shapes: only_here",
        "pack.shapes: only_tested",
        "pack.shapes: unused",
    ]


def test_an_import_in_another_module_counts_as_use(folder):
    names = "IN_A_TUPLE, UNUSED, Lonely, only_here, only_tested, unused"
    (folder / "pack/more.py").write_text(f"from pack.shapes import {names}\n")
    assert find(folder) == ["pack.shapes: Lonely.again", "pack.shapes: Square.perimeter"]
