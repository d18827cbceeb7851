"""The two lists of modules in CONTRIBUTING.md match the call stacks of `tapfm predict` and `tapfm train`.

The tests record the call stack of functions that process the data: a slide is tiled, a segment of its file is decoded,
tile coordinates are stored, tiles are encoded or aggregated, a prediction is written, or a gradient is computed.
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
from tapfm.slides.readers.segments import SegmentedSlide
from tapfm.tiles import cohort_tiling

ROOT = Path(package.__file__).parent
CONTRIBUTING = Path(__file__).parents[1] / "CONTRIBUTING.md"


def read_module_list(heading):
    """Return the modules of the numbered list below a heading of CONTRIBUTING.md, in order."""
    text = CONTRIBUTING.read_text("utf-8").split(f"### {heading}\n", 1)[1].split("\n#", 1)[0]
    return re.findall(r"^\d+\. \[`([\w/.]+\.py)`\]\(src/tapfm/\1\)", text, re.MULTILINE)


def imported_modules(module):
    """Return the modules of the package that a module imports, at module level or inside functions."""
    found = set()
    for node in ast.walk(ast.parse((ROOT / module).read_text("utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("tapfm"):
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
            found |= {name.removeprefix("tapfm.").replace(".", "/") + ".py" for name in names}
    return found


class CallRecorder:
    """Records the modules of the package on the call stack of chosen functions."""

    def __init__(self, monkeypatch):
        self._patch, self.stacks = monkeypatch, []

    def add(self, owner, name):
        function = getattr(owner, name)
        own = [function.__module__] if function.__module__.startswith("tapfm.") else []

        def wrapped(*args, **kwargs):
            stack, frame = own, sys._getframe(1)
            while frame is not None:
                module = frame.f_globals.get("__name__", "")
                stack = [module, *stack] if module.startswith("tapfm.") else stack
                frame = frame.f_back
            self.stacks.append([module.removeprefix("tapfm.").replace(".", "/") + ".py" for module in stack])
            return function(*args, **kwargs)

        self._patch.setattr(owner, name, wrapped)

    def modules_below(self, first, through=None):
        """Return the modules of the recorded stacks from `first` on; with `through`, only of stacks that contain it."""
        found = set()
        for stack in self.stacks:
            if first in stack and (through is None or through in stack):
                found |= set(stack[stack.index(first) :])
        return found


@pytest.mark.parametrize(
    ("heading", "max_modules"), [("From a slide file to a prediction", 15), ("From `tapfm train` to the gradient", 10)]
)
def test_lists_are_short_and_modules_do_not_import_earlier_ones(heading, max_modules):
    modules = read_module_list(heading)
    assert 5 < len(modules) <= max_modules
    for i, module in enumerate(modules):
        assert not imported_modules(module) & set(modules[:i]), f"{module} imports a module that is listed before it"


@pytest.fixture(scope="module")
def trained(workspace):
    assert tapfm("train", workspace / "run.toml", "--out", workspace / "runs" / "paths").returncode == 0
    return workspace / "runs" / "paths"


def run_without_workers(function, jobs, **_):
    """Replacement of `process_slides` without modules of runtime/ on the call stack."""
    return ((slide_id, function(job)) for slide_id, job in jobs.items())


def test_predict_calls_the_listed_modules(trained, tmp_path, monkeypatch):
    recorder, modules = CallRecorder(monkeypatch), read_module_list("From a slide file to a prediction")
    monkeypatch.setattr(cohort_tiling, "process_slides", run_without_workers)
    for owner, name in (
        (SegmentedSlide, "_decode_segment"),
        (cohort_tiling, "tile_slide"),
        (h5py.File, "__init__"),
        (VitEncoder, "forward"),
        (ClsAttention, "forward"),
        (PredictedSlide, "write"),
    ):
        recorder.add(owner, name)
    slide = write_slide(tmp_path / "slide.svs", section(900, 900))
    arguments = ("--model", trained, "--out", tmp_path / "predicted", "--workers", 0, "--device", "cpu")
    result = tapfm("predict", slide, *arguments)
    assert result.returncode == 0, result.output
    assert recorder.modules_below(modules[0]) == set(modules)


def test_train_calls_the_listed_modules(workspace, monkeypatch):
    recorder, modules = CallRecorder(monkeypatch), read_module_list("From `tapfm train` to the gradient")
    for owner, name in (
        (torch.autograd, "grad"),
        (torch.autograd, "backward"),
        (VitEncoder, "forward"),
        (ClsAttention, "forward"),
        (torch.nn.functional, "binary_cross_entropy_with_logits"),
    ):
        recorder.add(owner, name)
    result = tapfm("train", workspace / "run.toml", "--out", workspace / "runs" / "followed")
    assert result.returncode == 0, result.output
    assert recorder.modules_below(modules[0], through="adaptation/two_graph.py") == set(modules)
