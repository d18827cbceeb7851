"""The steps of the demo: commands that a user would type, one after another, into one folder."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from tapfm.demo.folder import COHORTS, DemoFolder
from tapfm.demo.sizes import COHORT_NOTE, ENCODER, FRACTIONS, PREVALENCE, TARGET, Size
from tapfm.runtime.files import write_atomically
from tapfm.runtime.steps import Step


def demo_steps(size: Size, folder: DemoFolder) -> list[Step]:
    """List the steps in their order; each needs the one before it."""
    cohort = folder.synthetic / "cohort.csv"
    paint = ["--slides", str(size.slides), "--external", str(size.external), "--tiles", str(size.tiles)]
    paint += ["--difficulty", size.difficulty, "--prevalence", str(PREVALENCE), "--fractions", *map(str, FRACTIONS)]
    predictions = [word for name in COHORTS for word in ("--predictions", str(folder.predictions(name)))]

    def step(name: str, title: str, *words: object, **details: Any) -> Step:
        return Step(name, tuple(map(str, words)), folder.path / "logs" / f"{name}.txt", title=title, **details)

    def predict(name: str, slides: str) -> Step:
        out = folder.predictions(name)
        words = ["predict", "--model", folder.adapted, folder.table(name), "--split", "test"]
        words += ["--tiles", folder.tiles(name), "--out", out, "--heatmaps", "--resume"]
        title = f"Predict the {slides} slides, and draw a heatmap of each"
        return step(f"predict-{name}", title, *words, files=(out / "predictions.csv", out))

    steps = [
        step(
            "synth",
            "Paint slides with a signal in some nests of tumour",
            *("synth", folder.synthetic, *paint),
            files=(folder.synthetic / "README.md", folder.synthetic),  # the first is written last
            shown_prefixes=("Look",),
        ),
        step(
            "inspect",
            "Inspect the slides: format, size, scale, problems",
            *("inspect", cohort, folder.external),
            shown_prefixes=(f"{size.slides + size.external} slides",),
        ),
        step(
            "tile",
            "Detect tissue and extract tiles at 0.5 microns per pixel",
            *("tile", cohort, "--out", folder.tiles("test")),
            files=(folder.tiles("test") / "summary.csv", folder.tiles("test")),
            shown_prefixes=("Tiled", "Look"),
        ),
        step(
            "tile-external",
            "The same for the external cohort: other sites, another scanner",
            *("tile", folder.external, "--out", folder.tiles("external")),
            files=(folder.tiles("external") / "summary.csv", folder.tiles("external")),
            shown_prefixes=("Tiled", "Look"),
        ),
        step(
            "split",
            "Split by patient (--force, as the painted table has a split already)",
            *("split", cohort, "--fractions", *map(str, FRACTIONS), "--force", "--out", folder.split),
            files=(folder.split,),
            shown_prefixes=("split", "train", "val", "test"),
        ),
        step(
            "study",
            "Train in three ways, and evaluate each on held-out and external slides",
            *("study", folder.study_file, "--out", folder.study, "--jobs", "2", "--resume"),
            files=(folder.results, folder.study),
            before=partial(_write_study, folder.study_file, size),
        ),
        predict("test", "held-out"),
        predict("external", "external"),
        step(
            "report",
            "Write a report of everything",
            *("report", folder.study, *predictions, "--out", folder.report),
            files=(folder.report,),
            shown_prefixes=("Written",),
        ),
        step(
            "attention-check",
            "Compare attention with the painted signal",
            files=(folder.attention_check, folder.attention_check_image),
            function=partial(_check_attention, folder),
        ),
    ]
    return [steps[0], *(replace(step, needs=(previous.key,)) for previous, step in pairwise(steps))]


def _check_attention(folder: DemoFolder) -> None:
    from tapfm.demo.attention_check import check_attention

    check_attention(folder)


def _write_study(path: Path, size: Size) -> None:
    """Write STUDY.toml: a fixed encoder with ABMIL, a fine-tuned one with ABMIL, TAPFM."""
    from tapfm.config.study import format_study

    tables: dict[str, Any] = {
        "name": f"Three ways to learn {TARGET} from painted slides",
        "targets": [TARGET],
        "encoders": [ENCODER],
        "regimes": ["fixed", "finetune", "tapfm"],
        "aggregators": ["abmil"],
        "tapfm_aggregators": ["cls-attention"],
        "resamples": size.resamples,
        "notes": [
            "Painted slides: no tissue of a patient, an encoder of 0.9 million parameters, few tiles and epochs. "
            "This shows how tapfm works. It says nothing about tissue, nor which method is better there.",
            COHORT_NOTE,
            f"Where the encoder is fixed, the aggregator sees all tiles of a slide for {size.fixed_epochs} epochs; "
            f"where it learns, a step has {size.tiles_per_slide} tiles of a slide, for {size.epochs} epochs. "
            "One seed each.",
        ],
        "cohort": {"table": "split.csv", "tiles": "tiles"},
        "external": {"table": "synthetic/external.csv", "tiles": "tiles-external"},
        "settings": size.settings,
    }
    write_atomically(path, format_study(tables).encode())
