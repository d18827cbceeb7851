"""Results of a study, as if its runs were finished, with made-up numbers."""

from pathlib import Path

import numpy as np

from tapfm.config.study import resolve_study
from tapfm.evaluation.predictions import Prediction
from tapfm.study.folder import StudyFolder
from tapfm.study.results import MethodResult, StudyResults
from tapfm.study.runs import PlannedRun, list_methods

SLIDES = {"cohort": {"table": "c.csv", "tiles": "tiles"}, "external": {"table": "x.csv", "tiles": "x"}}


def a_study(**changes):
    given = {"name": "A_study", "targets": ["FGFR3"], "encoders": ["tapfm-pocket"], "resamples": 200, **SLIDES}
    return resolve_study(given | {"regimes": ["finetune", "tapfm"]} | changes)


def predictions(strength, seed=0, count=30, targets=("FGFR3",), split="test"):
    """Patients whose logits are so much higher where they are positive; noise is the same for all strengths."""
    rng = np.random.default_rng(seed)
    noise = rng.normal(size=(count, len(targets)))
    return [
        Prediction(
            f"s{i}",
            f"p{i}",
            split,
            None,
            {target: (i + place) % 2 for place, target in enumerate(targets)},
            {target: float(noise[i, place] + strength * ((i + place) % 2)) for place, target in enumerate(targets)},
            tiles=5,
        )
        for i in range(count)
    ]


def history(losses, aucs=None, **more):
    aucs = aucs or [0.5 + 0.01 * i for i in range(len(losses))]
    return [
        {
            "epoch": i + 1,
            "loss_agg": loss,
            "val_macro_auc": auc,
            "score": auc,
            "norm_encoder": 1.0,
            "seconds": 2.0,
            "peak_memory_gib": 0.5 + 0.1 * i,
            "tiles_per_second": 50.0,
        }
        | {name: values[i] for name, values in more.items()}
        for i, (loss, auc) in enumerate(zip(losses, aucs, strict=True))
    ]


def results_of(study, strengths, *, folder=None, seeds=1, losses=(1.0, 0.9, 0.8), baseline=None, targets=("FGFR3",)):
    """As many methods as strengths, in the order of the table."""
    methods = []
    for method, strength in zip(list_methods(study), strengths, strict=False):
        runs = {PlannedRun(method, seed, None).name: history(losses) for seed in range(seeds)}
        made = [predictions(strength, seed=seed, targets=targets) for seed in range(seeds)]
        methods.append(MethodResult(method, runs, {"test": made, "external": made}))
    found = {("test", None): [predictions(baseline, targets=targets)]} if baseline is not None else {}
    return StudyResults(study, StudyFolder(folder or Path()), methods, found)
