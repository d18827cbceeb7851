"""Adapt a pathology foundation model to your task from slide labels, on one GPU.

Most commands are functions with the options of the command line; `configure` and `load` exist only in Python:

    import tapfm

    tapfm.tile("cohort.csv", out="tiles")
    run = tapfm.train("run.toml", out="runs/first", set=["schedule.epochs=5"])
    model = tapfm.load(run.folder).model

Functions are imported when they are first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from tapfm.version import __version__

if TYPE_CHECKING:
    from tapfm.workflows.compare import compare
    from tapfm.workflows.config import configure
    from tapfm.workflows.embed import embed
    from tapfm.workflows.evaluate import evaluate
    from tapfm.workflows.export import export
    from tapfm.workflows.inspect import inspect
    from tapfm.workflows.load import load
    from tapfm.workflows.plan import plan
    from tapfm.workflows.predict import predict
    from tapfm.workflows.probe import probe
    from tapfm.workflows.report import make_report
    from tapfm.workflows.split import split
    from tapfm.workflows.study import run_study
    from tapfm.workflows.synth import synth
    from tapfm.workflows.tile import tile
    from tapfm.workflows.train import train

__all__ = [
    "__version__",
    "compare",
    "configure",
    "embed",
    "evaluate",
    "export",
    "inspect",
    "load",
    "make_report",
    "plan",
    "predict",
    "probe",
    "run_study",
    "split",
    "synth",
    "tile",
    "train",
]
_MODULES = {"configure": "config", "make_report": "report", "run_study": "study"}  # others have the function's name


def __getattr__(name: str) -> Any:
    """Import a function when it is first used."""
    if name not in __all__:
        instead = {"config": "configure", "report": "make_report", "study": "run_study"}.get(name)
        hint = f"; use tapfm.{instead}" if instead else ""
        raise AttributeError(f"module 'tapfm' has no attribute '{name}'{hint}")
    function = getattr(importlib.import_module(f"tapfm.workflows.{_MODULES.get(name, name)}"), name)
    globals()[name] = function
    return function


def __dir__() -> list[str]:
    return __all__
