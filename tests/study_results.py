"""Fake results of a study, for tests of tables, figures and reports."""

from pathlib import Path

import numpy as np

from tapfm.config.study import resolve_study
from tapfm.evaluation.predictions import Prediction
from tapfm.study.folder import StudyFolder
from tapfm.study.results import ModelResult, StudyResults
from tapfm.study.runs import PlannedRun, list_models

SLIDES = {"cohort": {"table": "c.csv", "tiles": "tiles"}, "external": {"table": "x.csv", "tiles": "x"}}


def make_study(**changes):
    settings = {"name": "A_study", "targets": ["FGFR3"], "encoders": ["tapfm-pocket"], "resamples": 200, **SLIDES}
    return resolve_study(settings | {"methods": ["finetune", "tapfm"]} | changes)


def make_predictions(strength, seed=0, count=30, targets=("FGFR3",), split="test"):
    """Return predictions with random logits, plus `strength` for positive labels. Noise depends only on the seed."""
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


def make_history(losses, aucs=None, **columns):
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
        | {name: values[i] for name, values in columns.items()}
        for i, (loss, auc) in enumerate(zip(losses, aucs, strict=True))
    ]


def make_results(
    study, strengths, *, folder=None, seeds=1, losses=(1.0, 0.9, 0.8), baseline=None, targets=("FGFR3",), validation=()
):
    """Return results of one model per strength, in the order of the table.

    validation: strength of each model on validation slides; without it, there are no validation predictions.
    """
    models = []
    for number, (model, strength) in enumerate(zip(list_models(study), strengths, strict=False)):
        names = [PlannedRun(model, seed, None).name for seed in range(seeds)]
        runs = {name: make_history(losses) for name in names}
        predictions = [make_predictions(strength, seed=seed, targets=targets) for seed in range(seeds)]
        on_validation = {
            name: make_predictions(validation[number], seed=50 + seed, count=20, targets=targets, split="val")
            for seed, name in enumerate(names if validation else [])
        }
        models.append(ModelResult(model, runs, {"test": predictions, "external": predictions}, on_validation))
    by_cohort = {("test", None): [make_predictions(baseline, targets=targets)]} if baseline is not None else {}
    return StudyResults(study, StudyFolder(folder or Path()), models, by_cohort)
