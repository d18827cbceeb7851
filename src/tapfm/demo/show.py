"""What the demo ends with: the table, what attention found, where things are, and what to type next."""

from __future__ import annotations

import csv
import json
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from tapfm.demo.sizes import FRACTIONS, PREVALENCE, TARGET, Size
from tapfm.demo.steps import COHORTS, DemoFolder
from tapfm.evaluation.estimate_text import written
from tapfm.metrics.estimate import Estimate
from tapfm.runtime.messages import command, counted

TITLES = {"test": "held-out", "external": "external"}
REGIMES = {
    "fixed": "fixed encoder + ABMIL",
    "finetune": "fine-tuned encoder + ABMIL",
    "tapfm": "TAPFM",
}
RANKED_BY = {
    "attention before": "attention, pretrained encoder",
    "attention after": "attention, after TAPFM",
    "contribution after": "contribution, after TAPFM",
}


def say_what_comes(size: Size, console: Console) -> None:
    """Say what is about to happen, and what was chosen for it."""
    train, validation, test = (f"{fraction:.0%}" for fraction in FRACTIONS)
    lines = [
        f"{size.slides} painted slides and {size.external} of other sites, three ways to learn {TARGET} from their "
        f"labels, with an encoder of 0.9 million parameters: {size.takes}.",
        f"{PREVALENCE:.0%} of the slides are positive; {train} of all are for training, {validation} for validation, "
        f"{test} for testing. Both are chosen for so few slides: the paper has 16%, and 80, 10, 10%.",
        *([size.note] if size.note else []),
    ]
    for line in lines:
        console.print(line, markup=False)


def show(size: Size, folder: DemoFolder, console: Console) -> None:
    """Print how it ended; all of it is read from files."""
    console.print()
    show_results(folder, console)
    console.print()
    show_planted(folder, console)
    console.print()
    worth = size.note or (
        "Intervals are of 95%, by drawing patients again; study.md has paired tests. There is one seed of each, and "
        "another would give other figures. Painted slides show how tapfm works, not how well a method does on tissue."
    )
    console.print(worth, markup=False)
    console.print(f"\nThe steps took {minutes(folder)}. Look at:")
    print_beside(
        console,
        {
            str(folder.report): "all of it on a page, for any browser",
            str(folder.planted_picture): "one slide: what was planted, attention before and after",
            str(folder.predictions("external") / "per-slide"): "maps of each slide, and its telling tiles",
            str(folder.study / "study.md"): "the tables; beside it as .csv and .tex",
        },
    )
    console.print("Type next:")
    print_beside(
        console,
        {
            command("view", folder.predictions("external")): "slides and maps in the browser",
            "tapfm inspect SLIDES/ --write-cohort cohort.csv": "begin with slides of your own",
            "tapfm encoders": "the models that can learn from them",
            "tapfm doctor": "which of them open here, and what else this machine can do",
        },
    )
    if shutil.which("tapfm") is None:  # as after `make demo`
        on_path = Path(sys.executable).parent / "activate"
        console.print(f"tapfm is not on the path yet: source {on_path}", markup=False, soft_wrap=True)


def print_beside(console: Console, lines: Mapping[str, str]) -> None:
    """Print what can be pasted, each on a line that is never broken, and what it is."""
    width = max(map(len, lines))
    for text, meaning in lines.items():
        console.print(f"  {text:<{width}}  # {meaning}", markup=False, soft_wrap=True)


def show_results(folder: DemoFolder, console: Console) -> None:
    """Print AUCs of the three ways, as the paper's table has them."""
    with folder.results.open(newline="", encoding="utf-8") as file:
        lines = list(csv.DictReader(file))
    patients = {line["cohort"]: line["patients"] for line in lines}
    table = Table(box=None, padding=(0, 2, 0, 0), title=f"AUC, {TARGET}", title_justify="left", title_style="bold")
    table.add_column("")
    for cohort in COHORTS:
        table.add_column(f"{TITLES[cohort]} ({patients.get(cohort, 0)} patients)")
    rows: dict[str, dict[str, Mapping[str, str]]] = {}
    for line in lines:
        rows.setdefault(REGIMES.get(line["regime"], line["model"]), {})[line["cohort"]] = line
    for title, cells in rows.items():
        table.add_row(title, *(cell_of(cells.get(cohort)) for cohort in COHORTS))
    console.print(table)


def cell_of(line: Mapping[str, str] | None) -> str:
    """Write an AUC and its interval, or why there is none."""
    if line is None:
        return "-"
    value, low, high = (float(line[name]) if line[name] else None for name in ("auc", "low", "high"))
    return written(Estimate(value, low, high)) if value is not None else line["why"] or "-"


def show_planted(folder: DemoFolder, console: Console) -> None:
    """Print how well planted tiles were found, before and after."""
    found: dict[str, Any] = json.loads(folder.planted.read_text("utf-8"))
    table = Table(
        box=None,
        padding=(0, 2, 0, 0),
        title="How often a tile with the planted signal ranks above one without (mean of positive slides; chance: 0.5)",
        title_justify="left",
        title_style="bold",
    )
    table.add_column("ranked by")
    for cohort in COHORTS:
        share = found[cohort]["share"]
        carry = f", {share:.0%} of tiles with it" if share is not None else ""
        table.add_column(f"{TITLES[cohort]} ({counted(found[cohort]['slides'], 'slide')}{carry})")
    for by, title in RANKED_BY.items():
        table.add_row(title, *(written(Estimate(**found[cohort]["found"][by])) for cohort in COHORTS))
    console.print(table)


def minutes(folder: DemoFolder) -> str:
    """Write how long all steps were worked on."""
    seconds = round(sum(json.loads(folder.state.read_text("utf-8"))["seconds"].values()))
    return f"{seconds // 60} min {seconds % 60} s"
