"""List public names of src/tapfm that nothing else uses. `make lint` runs it.

    python tools/unused_names.py    # one line `module: name` for each; exit status 1 if there are any

Two kinds of names without a leading underscore are listed:
  - a function, class or UPPERCASE constant that no other module of src, tools or benchmarks uses. A class also counts
    as used if a public function, method or field of its own module has it in its signature
  - a method or property whose name is not used as an attribute in any of them, nor as a word in templates and pages
Uses in tests do not count: code that only tests call is not needed. Names in strings count if they are dotted
(`"tapfm.cli.main:main"`), directly follow the name of a module (`("tapfm.aggregators.mean", "MeanPool")`), or are
arguments of getattr and similar functions.

Delete such a name, or add a leading underscore if its own module needs it.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterable, Iterator
from itertools import pairwise
from pathlib import Path

CHECKOUT = Path(__file__).parents[1]
TEXTS = ("src/tapfm/**/*.html", "src/tapfm/**/*.js", "frontend/src/*", "pyproject.toml")
PAGES = ("README.md", "docs/**/*.md")  # their Python examples count as callers
CALLED_BY_LIBRARIES = {  # methods that a library calls
    "forward": "torch.nn.Module calls it",
}
_ATTRIBUTE_FUNCTIONS = {"getattr", "hasattr", "setattr", "attrgetter", "methodcaller"}
_Function = ast.FunctionDef | ast.AsyncFunctionDef


def find_unused_names(package: Path, callers: Iterable[str], texts: Iterable[Path]) -> list[str]:
    """Return `module: name` for each public name of a package without a caller, in alphabetical order.

    `callers` are Python sources outside of the package, `texts` are other files that may contain names.
    """
    trees = {_module_name(path, package): ast.parse(path.read_text("utf-8")) for path in package.rglob("*.py")}
    outside = {f"(caller {number})": ast.parse(source) for number, source in enumerate(callers)}
    words = "\n".join(path.read_text("utf-8") for path in texts)
    users: dict[str, set[str]] = {}  # dotted name -> modules that use it
    attributes = set(CALLED_BY_LIBRARIES) | set(re.findall(r"\w+", words))
    for module, tree in (trees | outside).items():
        for used in _dotted_uses(tree, set(trees)):
            users.setdefault(used, set()).add(module)
        attributes |= set(_attributes(tree))
    for used in re.findall(r"[\w.]+[.:]\w+", words):
        users.setdefault(used.replace(":", "."), set()).add("(text file)")
    unused = []
    for module, tree in trees.items():
        in_signatures = set(_signature_names(tree))
        for name, node in _public_names(tree):
            part_of_signature = isinstance(node, ast.ClassDef) and name in in_signatures
            if not part_of_signature and not users.get(f"{module}.{name}", set()) - {module}:
                unused.append(f"{module}: {name}")
        unused += [f"{module}: {name}" for name in _public_methods(tree) if name.split(".")[-1] not in attributes]
    return sorted(unused)


def _module_name(path: Path, package: Path) -> str:
    return ".".join(path.relative_to(package.parent).with_suffix("").parts).removesuffix(".__init__")


def _dotted_uses(tree: ast.Module, modules: set[str]) -> Iterator[str]:
    """Yield `package.module.name` for every name of another module that a module uses."""
    root = next(iter(modules)).split(".")[0]
    aliases = {root: root}  # local name -> module
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                yield full
                if full in modules:
                    aliases[alias.asname or alias.name] = full
        elif isinstance(node, ast.Import):
            aliases |= {alias.asname: alias.name for alias in node.names if alias.asname and alias.name in modules}
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield from (found.replace(":", ".") for found in re.findall(rf"{root}(?:[.:]\w+)+", node.value))
        elif isinstance(node, ast.Tuple | ast.Call):
            parts = node.elts if isinstance(node, ast.Tuple) else node.args
            values = [str(part.value) if isinstance(part, ast.Constant) else "" for part in parts]
            yield from (f"{first}.{second}" for first, second in pairwise(values) if first in modules)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name | ast.Attribute):
            first, *rest = ast.unparse(node).split(".")
            if first in aliases:
                yield ".".join((aliases[first], *rest))


def _attributes(tree: ast.Module) -> Iterator[str]:
    """Yield the names that are used as attributes, including arguments of getattr and similar functions."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in _ATTRIBUTE_FUNCTIONS:
            for argument in node.args:
                if isinstance(argument, ast.Constant) and isinstance(argument.value, str):
                    yield from argument.value.split(".")
        elif isinstance(node, ast.MatchClass):
            yield from node.kwd_attrs


def _public_names(tree: ast.Module) -> Iterator[tuple[str, ast.stmt]]:
    """Yield the public functions, classes and constants of a module."""
    for node in tree.body:
        if isinstance(node, _Function | ast.ClassDef):
            names = [node.name]
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            parts = [part for target in targets for part in ast.walk(target)]  # for `A, B = 1, 2`
            names = [part.id for part in parts if isinstance(part, ast.Name) and part.id.isupper()]
        else:
            names = []
        yield from ((name, node) for name in names if not name.startswith("_"))


def _public_methods(tree: ast.Module) -> Iterator[str]:
    """Yield `Class.method` for the public methods and properties of all classes, including private classes."""
    for owner in (node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)):
        names = {node.name for node in owner.body if isinstance(node, _Function)}
        yield from (f"{owner.name}.{name}" for name in names if not name.startswith("_"))


def _signature_names(tree: ast.Module) -> Iterator[str]:
    """Yield the names in annotations of public functions, and of public methods and fields of public classes."""
    for name, node in _public_names(tree):
        for part in node.body if isinstance(node, ast.ClassDef) else [node]:
            annotations: list[ast.expr | None] = []
            if isinstance(part, _Function) and (part.name == "__init__" or not part.name.startswith("_")):
                arguments = [argument for argument in ast.walk(part.args) if isinstance(argument, ast.arg)]
                annotations = [part.returns, *(argument.annotation for argument in arguments)]
            elif isinstance(part, ast.AnnAssign) and isinstance(node, ast.ClassDef):
                annotations = [part.annotation]
            text = " ".join(ast.unparse(each) for each in annotations if each is not None)
            yield from set(re.findall(r"\w+", text)) - {name}


def main() -> int:
    """Print the unused names and return the exit status."""
    scripts = [path for folder in ("tools", "benchmarks") for path in (CHECKOUT / folder).rglob("*.py")]
    callers = [path.read_text("utf-8") for path in scripts]
    for page in (path for pattern in PAGES for path in CHECKOUT.glob(pattern)):
        callers += re.findall(r"^```python\n(.*?)^```", page.read_text("utf-8"), re.DOTALL | re.MULTILINE)
    texts = [path for pattern in TEXTS for path in CHECKOUT.glob(pattern) if path.is_file() and path.suffix != ".svg"]
    unused = find_unused_names(CHECKOUT / "src" / "tapfm", callers, texts)
    print(*unused, sep="\n", end="\n" if unused else "")
    return 1 if unused else 0


if __name__ == "__main__":
    sys.exit(main())
