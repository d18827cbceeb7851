"""Steps of the demo: ordinary tapfm commands that write to one folder."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from tapfm.demo.folder import COHORTS, DemoFolder
from tapfm.demo.sizes import COHORT_NOTE, ENCODER, FRACTIONS, PREVALENCE, TARGET, DemoSize
from tapfm.runtime.files import write_atomically
from tapfm.runtime.messages import format_count
from tapfm.runtime.steps import Step


def list_demo_steps(size: DemoSize, folder: DemoFolder) -> list[Step]:
    """Return the steps in order. Each step needs the previous one."""
    cohort = folder.synthetic / "cohort.csv"
    synth = ["--slides", str(size.slides), "--external", str(size.external_slides)]
    synth += ["--tiles-per-slide", str(size.tissue_tiles)]
    synth += ["--difficulty", size.difficulty, "--prevalence", str(PREVALENCE), "--fractions", *map(str, FRACTIONS)]
    predictions = [argument for name in COHORTS for argument in ("--predictions", str(folder.predictions(name)))]

    def step(name: str, title: str, *arguments: object, **details: Any) -> Step:
        return Step(name, tuple(map(str, arguments)), folder.path / "logs" / f"{name}.txt", title=title, **details)

    def predict_step(cohort_name: str, cohort_title: str) -> Step:
        out = folder.predictions(cohort_name)
        arguments = ["predict", "--model", folder.tapfm_run, folder.cohort_table(cohort_name), "--split", "test"]
        arguments += ["--tiles", folder.tiles(cohort_name), "--out", out, "--heatmaps", "--resume"]
        title = f"Predict the {cohort_title} slides and draw heatmaps"
        return step(f"predict-{cohort_name}", title, *arguments, expected_outputs=(out / "predictions.csv", out))

    steps = [
        step(
            "synth",
            "Generate synthetic slides with a signal in some tumour nests",
            *("synth", folder.synthetic, *synth),
            expected_outputs=(folder.synthetic / "README.md", folder.synthetic),  # README.md is written last
            summary_line_prefixes=("Thumbnails",),
        ),
        step(
            "inspect",
            "Inspect the slides: format, size, resolution, problems",
            *("inspect", cohort, folder.external),
            summary_line_prefixes=(f"{size.slides + size.external_slides} slides",),
        ),
        step(
            "tile",
            "Detect tissue and extract tiles at 0.5 microns per pixel",
            *("tile", cohort, "--out", folder.tiles("test")),
            expected_outputs=(folder.tiles("test") / "summary.csv", folder.tiles("test")),
            summary_line_prefixes=("Tiled", "Check the overlays"),
        ),
        step(
            "tile-external",
            "Tile the external cohort (other sites, another scanner)",
            *("tile", folder.external, "--out", folder.tiles("external")),
            expected_outputs=(folder.tiles("external") / "summary.csv", folder.tiles("external")),
            summary_line_prefixes=("Tiled", "Check the overlays"),
        ),
        step(
            "split",
            "Split by patient (--force replaces the split of the synthetic cohort table)",
            *(
                "split",
                cohort,
                "--target",
                TARGET,
                "--fractions",
                *map(str, FRACTIONS),
                "--force",
                "--out",
                folder.split,
            ),
            expected_outputs=(folder.split,),
            summary_line_prefixes=("split", "train", "val", "test"),
        ),
        step(
            "study",
            "Train with three methods, and evaluate each on held-out and external slides",
            *("study", folder.study_file, "--out", folder.study, "--jobs", "2", "--resume"),
            expected_outputs=(folder.auc_table, folder.study),
            prepare=partial(_write_study, folder.study_file, size),
        ),
        predict_step("test", "held-out"),
        predict_step("external", "external"),
        step(
            "report",
            "Write a report on the study and the predictions",
            *("report", folder.study, *predictions, "--out", folder.report),
            expected_outputs=(folder.report,),
            summary_line_prefixes=("Wrote",),
        ),
        step(
            "attention-check",
            "Compare attention with the planted signal",
            expected_outputs=(folder.attention_check, folder.attention_check_image),
            function=partial(_check_attention, folder),
        ),
    ]
    return [steps[0], *(replace(step, needs=(previous.key,)) for previous, step in pairwise(steps))]


def _check_attention(folder: DemoFolder) -> None:
    from tapfm.demo.attention_check import check_attention

    check_attention(folder)


def _write_study(path: Path, size: DemoSize) -> None:
    """Write STUDY.toml with three methods: fixed encoder + ABMIL, fine-tuned encoder + ABMIL, and TAPFM."""
    from tapfm.config.study import format_study

    tables: dict[str, Any] = {
        "name": f"Three training methods for {TARGET} on synthetic slides",
        "targets": [TARGET],
        "encoders": [ENCODER],
        "methods": ["fixed", "finetune", "tapfm"],
        "aggregators": ["abmil"],
        "tapfm_aggregators": ["cls-attention"],
        "resamples": size.resamples,
        "notes": [
            "The slides are synthetic, the encoder has 0.9 million parameters, and there are few tiles and epochs. "
            "The demo shows how tapfm works. It says nothing about real tissue, or about which method is better there.",
            COHORT_NOTE,
            "With the fixed encoder, the aggregator is trained on all tiles of each slide for "
            f"{format_count(size.fixed_epochs, 'epoch')}. The other methods use {size.tiles_per_slide} tiles per slide "
            f"and step, for {format_count(size.epochs, 'epoch')}. Each method has one seed.",
        ],
        "cohort": {"table": "split.csv", "tiles": "tiles"},
        "external": {"table": "synthetic/external.csv", "tiles": "tiles-external"},
        "settings": size.settings,
    }
    write_atomically(path, format_study(tables).encode())
