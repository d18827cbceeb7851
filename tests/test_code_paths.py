"""The two lists of CONTRIBUTING.md, followed: the modules on the call stack where the work is done, and no others.

A watched function is one where something happens to the data: a slide is tiled, a segment of its file is decoded, tile
coordinates are stored, tiles are encoded or aggregated, a prediction is written, or a gradient is computed.
"""

import ast
import re
import sys
from pathlib import Path

import h5py
import pytest
import torch
from command_line import tapfm
from slide_files import section, write_slide

import tapfm as package
from tapfm.aggregators.cls_attention import ClsAttention
from tapfm.encoders.vit import VitEncoder
from tapfm.prediction.folder import PredictedSlide
from tapfm.slides.readers.tiff import TiffSlide
from tapfm.tiles import cohort_tiling

ROOT = Path(package.__file__).parent
CONTRIBUTING = Path(__file__).parents[1] / "CONTRIBUTING.md"


def listed(heading):
    """Return the modules of the numbered list below a heading of CONTRIBUTING.md, in order."""
    text = CONTRIBUTING.read_text("utf-8").split(f"### {heading}\n", 1)[1].split("\n#", 1)[0]
    return re.findall(r"^\d+\. \[`([\w/.]+\.py)`\]\(src/tapfm/\1\)", text, re.MULTILINE)


def imported_modules(module):
    """Return the modules of the package that a module imports, lazily or not."""
    found = set()
    for node in ast.walk(ast.parse((ROOT / module).read_text("utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("tapfm"):
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
            found |= {name.removeprefix("tapfm.").replace(".", "/") + ".py" for name in names}
    return found


class Watch:
    """Collects the modules of the package on the call stack of the watched functions."""

    def __init__(self, monkeypatch):
        self._patch, self.stacks = monkeypatch, []

    def add(self, owner, name):
        watched = getattr(owner, name)
        own = [watched.__module__] if watched.__module__.startswith("tapfm.") else []

        def wrapped(*args, **kwargs):
            stack, frame = own, sys._getframe(1)
            while frame is not None:
                module = frame.f_globals.get("__name__", "")
                stack = [module, *stack] if module.startswith("tapfm.") else stack
                frame = frame.f_back
            self.stacks.append([module.removeprefix("tapfm.").replace(".", "/") + ".py" for module in stack])
            return watched(*args, **kwargs)

        self._patch.setattr(owner, name, wrapped)

    def modules_below(self, first, through=None):
        """Return the modules that were called from `first` on, of the stacks that pass `through`."""
        found = set()
        for stack in self.stacks:
            if first in stack and (through is None or through in stack):
                found |= set(stack[stack.index(first) :])
        return found


@pytest.mark.parametrize(
    ("heading", "most"), [("From a slide file to a prediction", 15), ("From `tapfm train` to the gradient", 10)]
)
def test_the_lists_are_short_and_go_one_way(heading, most):
    modules = listed(heading)
    assert 5 < len(modules) <= most
    for i, module in enumerate(modules):
        assert not imported_modules(module) & set(modules[:i]), f"{module} imports a module that is listed before it"


@pytest.fixture(scope="module")
def trained(lab):
    assert tapfm("train", lab / "run.toml", "--out", lab / "runs" / "paths").returncode == 0
    return lab / "runs" / "paths"


def run_without_workers(function, jobs, **_):
    """Do what `run_slides` does, without modules of runtime/ on the call stack."""
    return ((slide_id, function(job)) for slide_id, job in jobs.items())


def test_a_slide_file_becomes_a_prediction_along_the_list(trained, tmp_path, monkeypatch):
    watch, modules = Watch(monkeypatch), listed("From a slide file to a prediction")
    monkeypatch.setattr(cohort_tiling, "run_slides", run_without_workers)
    for owner, name in (
        (TiffSlide, "_decode"),
        (cohort_tiling, "tile_slide"),
        (h5py.File, "__init__"),
        (VitEncoder, "forward"),
        (ClsAttention, "forward"),
        (PredictedSlide, "write"),
    ):
        watch.add(owner, name)
    slide = write_slide(tmp_path / "slide.svs", section(900, 900))
    arguments = ("--model", trained, "--out", tmp_path / "predicted", "--workers", 0, "--device", "cpu")
    result = tapfm("predict", slide, *arguments)
    assert result.returncode == 0, result.said
    assert watch.modules_below(modules[0]) == set(modules)


def test_train_reaches_the_gradient_along_the_list(lab, monkeypatch):
    watch, modules = Watch(monkeypatch), listed("From `tapfm train` to the gradient")
    for owner, name in (
        (torch.autograd, "grad"),
        (torch.autograd, "backward"),
        (VitEncoder, "forward"),
        (ClsAttention, "forward"),
        (torch.nn.functional, "binary_cross_entropy_with_logits"),
    ):
        watch.add(owner, name)
    result = tapfm("train", lab / "run.toml", "--out", lab / "runs" / "followed")
    assert result.returncode == 0, result.said
    assert watch.modules_below(modules[0], through="adaptation/two_graph.py") == set(modules)
