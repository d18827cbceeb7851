"""The fixed sequence of commands by which versions of tapfm are compared: a small study on synthetic slides.

    python tools/version_scenario.py CHECKOUT OUT

runs it with the tapfm of a checkout, whose `src` has to be on PYTHONPATH, and prints each command.
"""

from __future__ import annotations

import contextlib
import csv
import importlib
import io
import json
import sys
import time
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Renamed commands, options and settings, from old to new. The scenario below uses the new names. If a version rejects
# a command (exit code 2), the older names are tried. When a command, an option or a setting is renamed, change the
# scenario and add a line at the end:
#     ("predict", "--batch", "--batch-size")         command (new name), old name, new name
#     ("train", "adaptation.tau", "aggregator.tau")  a setting, of `--set adaptation.tau=0.5`
RENAMED_ARGUMENTS: tuple[tuple[str, str, str], ...] = (
    ("train", "augmentation.quarter_turns", "augmentation.rotate_90"),
    ("train", "machine.read_ahead_gib", "machine.prefetch_gib"),
    ("train", "machine.save_minutes", "machine.checkpoint_minutes"),
    ("synth", "--tiles", "--tiles-per-slide"),
    ("split", "--targets", "--target"),
)
# Import paths of `sample_tiles(count, tiles_per_slide, *rng_key)` in all versions, the newest first.
SAMPLE_TILES = ("tapfm.tiles.sampling:sample_tiles", "tapfm.tiles.sampling:draw_tiles")

INVALID_INPUT = 2  # exit code
PROGRESS_WIDTH = 110  # characters
TARGETS = ("EGFR", "KRAS")
# This label is removed from the table, because real tables have missing labels.
REMOVED_LABEL = "S001", "KRAS"
OTHER_AGGREGATORS = ("cls-attention", "cls-gated", "dsmil", "clam", "varmil", "mean", "max")
OTHER_SETTINGS: dict[str, object] = {
    "adaptation.scope": "last:2",
    "adaptation.beta": 0.1,
    "adaptation.chunk": 3,
    "augmentation.stain_jitter": 0.3,
    "optimiser.slides_per_step": 2,
    "optimiser.clip_norm": 1.0,
    "aggregator.name": "cls-gated",
    "seed": 5,
}
CPU = ("--device", "cpu", "--workers", "0")
FRACTIONS = ("--fractions", 0.5, 0.2, 0.3)
Result = tuple[int, str]  # exit code, standard output
Command = Callable[[Sequence[str]], Result]


class ScenarioError(Exception):
    """A command failed."""


@dataclass(frozen=True)
class ScenarioSize:
    """Number of slides and epochs, and which steps run."""

    slides: int
    epochs: int
    all_steps: bool = True  # False: only three runs, one evaluation and one prediction


FULL = ScenarioSize(slides=14, epochs=2)
SMALL = ScenarioSize(slides=14, epochs=1, all_steps=False)
# AdamW moves a weight by the learning rate even if its gradient is only a rounding error. Small learning rates limit
# the effect of a different order of summation.
ENCODER_LR, AGGREGATOR_LR = 1e-4, 1e-3


class Scenario:
    """Runs the commands in the working directory; all their paths are relative."""

    def __init__(self, command: Command, size: ScenarioSize, progress: Callable[[str], None]) -> None:
        self.command, self.size, self.progress = command, size, progress
        self.create_slides: Callable[[], None] = self.generate_slides

    def run(self) -> None:
        """Run all commands."""
        self.create_slides()
        self.prepare_slides()
        self.train_models()
        self.evaluate_models()
        self.predict_slides()
        write_sampled_tiles(Path("tiles/summary.csv"), Path("sampled_tiles.json"))

    def tapfm(self, *arguments: object) -> str:
        """Run a command, with its old names if the version rejects the new ones. Returns its standard output."""
        started = time.monotonic()
        variants = _list_variants([str(argument) for argument in arguments])
        variant = variants[0]
        self.progress(f"  tapfm {' '.join(variant)}"[:PROGRESS_WIDTH].ljust(PROGRESS_WIDTH + 1))
        for variant in variants:
            code, output = self.command(variant)
            if code != INVALID_INPUT:
                break
        self.progress(f"{time.monotonic() - started:5.1f} s\n")
        if code:
            raise ScenarioError(f"`tapfm {' '.join(variant)}` failed with exit code {code}.")
        return output

    def generate_slides(self) -> None:
        """Generate slides of two cohorts; some slides are 20x, the others 40x."""
        size = ("--slides", self.size.slides, "--external", 4, "--tiles-per-slide", 10, "--seed", 3, "--workers", 1)
        signal = ("--task", "luad4", "--difficulty", "easy", "--prevalence", 0.5)
        self.tapfm("synth", "synthetic", *signal, *size, *FRACTIONS)

    def prepare_slides(self) -> None:
        """Split, tile, embed and inspect the slides."""
        table = "synthetic/cohort.csv"
        targets = [argument for target in TARGETS for argument in ("--target", target)]
        self.tapfm("split", table, "--out", "split.csv", *targets, *FRACTIONS, "--force")
        remove_label(Path("split.csv"), *REMOVED_LABEL)
        self.tapfm("tile", "split.csv", "--out", "tiles", "--workers", 1)
        embed = ("--encoder", "tapfm-pocket", "--tiles", "tiles", "--out", "features", *CPU)
        self.tapfm("embed", "split.csv", *embed)
        if self.size.all_steps:
            Path("inspected.json").write_text(self.tapfm("inspect", "synthetic/slides", "--json"), "utf-8")
            self.tapfm("split", table, "--out", "folds.csv", *targets, "--folds", 3, "--force")
            other = ("--overlap", 56, "--min-tissue", 0.6, "--tissue", "darkness", "--keep-pen", "--keep-blur")
            only = ("--only", "S001", "--only", "S007", "--workers", 1)
            self.tapfm("tile", "split.csv", "--out", "tiles-clam", "--layout", "clam", *other, *only)
            self.tapfm("tile", "synthetic/external.csv", "--out", "tiles-external", "--workers", 1)

    def train_models(self) -> None:
        """Train with each method, and write an ensemble of two runs."""
        common: dict[str, object] = {"schedule.epochs": self.size.epochs, "schedule.first_cycle": self.size.epochs}
        common |= {"optimiser.aggregator_lr": AGGREGATOR_LR}
        few = common | {"adaptation.tiles_per_slide": 4, "selection.validation_tiles": 6}
        few |= {"optimiser.encoder_lr": ENCODER_LR}
        features = ("--features", "features")
        self.train("tapfm", "tapfm", few | {"aggregator.name": "cls-attention"})
        self.train("finetune", "finetune", few | {"aggregator.name": "abmil"})
        self.train("fixed", "fixed", common | {"aggregator.name": "abmil"}, *features)
        if self.size.all_steps:
            for aggregator in OTHER_AGGREGATORS:
                self.train(f"fixed-{aggregator}", "fixed", common | {"aggregator.name": aggregator}, *features)
            self.train("reference", "tapfm", few | OTHER_SETTINGS, "--recipe", "reference")
        Path("ensemble").mkdir()
        members = {"kind": "seeds", "members": ["../runs/tapfm", "../runs/finetune"]}
        Path("ensemble/ensemble.json").write_text(json.dumps(members), "utf-8")

    def train(self, name: str, method: str, settings: Mapping[str, object], *options: str) -> None:
        """Write a configuration and train with it."""
        targets = [argument for target in TARGETS for argument in ("--target", target)]
        base = ("--cohort", "split.csv", "--encoder", "tapfm-pocket", "--tiles", "tiles", "--method", method)
        self.tapfm("config", *base, *options, *targets, "--out", f"{name}.toml")
        changes = [argument for key, value in settings.items() for argument in ("--set", f"{key}={value}")]
        self.tapfm("train", f"{name}.toml", "--out", f"runs/{name}", *changes, *CPU)

    def evaluate_models(self) -> None:
        """Evaluate runs and the ensemble; compare runs, and tables of invented predictions."""
        options = ("--resamples", 200, *CPU)
        self.tapfm("evaluate", "runs/tapfm", "--out", "evaluations/tapfm", "--by", "scanner", *options)
        if self.size.all_steps:
            self.tapfm("evaluate", "ensemble", "--out", "evaluations/ensemble", "--unit", "patient", *options)
            self.tapfm("evaluate", "runs/fixed", "--out", "evaluations/fixed", "--split", "all", *options)
            external = ("--cohort", "synthetic/external.csv", "--tiles", "tiles-external")
            self.tapfm("evaluate", "runs/finetune", "--out", "evaluations/external", *external, *options)
            runs = ("runs/tapfm", "runs/finetune", "runs/fixed")
            self.tapfm("compare", *runs, "--out", "comparisons/runs", "--resamples", 200)
        tables = [f"{name}={write_predictions(Path('inputs'), name, index)}" for index, name in enumerate("abc")]
        self.tapfm("compare", *tables, "--out", "comparisons/tables", "--resamples", 500, "--unit", "patient")

    def predict_slides(self) -> None:
        """Predict with a run, the ensemble and an export, with heatmaps of the first two."""
        options = ("--tiles", "tiles", "--heatmaps", "--geojson", *CPU)
        self.tapfm("export", "runs/tapfm", "--out", "exported")
        ensemble = ("predict", "--model", "ensemble", "split.csv", "--out", "predictions/ensemble")
        self.tapfm(*ensemble, "--split", "val", *options)
        if self.size.all_steps:
            run = ("predict", "--model", "runs/tapfm", "split.csv", "--out", "predictions/run")
            self.tapfm(*run, "--split", "test", *options)
            slides = ("synthetic/slides/S001.svs", "synthetic/slides/S007.svs")
            self.tapfm("predict", "--model", "exported", *slides, "--out", "predictions/export", "--batch", 5, *CPU)


def run_scenario(
    folder: Path,
    command: Command,
    size: ScenarioSize = FULL,
    *,
    create_slides: Callable[[], None] | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> None:
    """Run the scenario in a new folder. Raises ScenarioError if a command fails.

    `create_slides` replaces `tapfm synth`: it writes synthetic/cohort.csv and its slides into the working directory.
    """
    folder.mkdir(parents=True)
    with contextlib.chdir(folder):
        scenario = Scenario(command, size, progress)
        scenario.create_slides = create_slides or scenario.create_slides
        scenario.run()


def _list_variants(arguments: list[str]) -> list[list[str]]:
    """Return a command with its new names, then with older ones. RENAMED_ARGUMENTS is in chronological order."""
    variants = [arguments]
    for command, old, new in reversed(RENAMED_ARGUMENTS):
        if command == arguments[0]:
            older = [old + each[len(new) :] if each.split("=")[0] == new else each for each in variants[-1]]
            variants += [older] if older != variants[-1] else []
    return variants


def remove_label(table: Path, slide_id: str, target: str) -> None:
    """Remove the label of one slide from a table."""
    with table.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    for row in rows:
        if row["slide_id"] == slide_id:
            row[target] = ""
    with table.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, rows[0], lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def write_predictions(folder: Path, name: str, model_index: int) -> Path:
    """Write invented predictions of 36 slides of 30 patients, with ties. Model 0 is the best."""
    lines = ["patient_id,slide_id,target,label,probability"]
    for slide in range(36):
        patient = slide % 30
        for offset, target in enumerate(TARGETS):
            label = (patient * 7 + offset * 3) % 5 < 2
            noise = (slide * 37 + model_index * 11 + offset * 5) % 23 / 23
            probability = round((0.35 - 0.1 * model_index) * label + 0.6 * noise + 0.02, 2)
            lines.append(f"P{patient:02},W{slide:02},{target},{int(label)},{probability}")
    folder.mkdir(exist_ok=True)
    path = folder / f"{name}.csv"
    path.write_text("\n".join(lines) + "\n", "utf-8")
    return path


def write_sampled_tiles(summary: Path, out: Path) -> None:
    """Write which tiles training samples from slides. No output file of tapfm contains them."""
    sample_tiles = _find_sample_tiles()
    with summary.open(newline="", encoding="utf-8") as file:
        tiles = {row["slide_id"]: int(row["tiles"]) for row in csv.DictReader(file)}
    tiles |= {"large": 20_000}
    sampled = {
        f"{slide_id}.{limit}.{epoch}": [int(tile) for tile in sample_tiles(count, limit, 7, epoch, slide_id)]
        for slide_id, count in tiles.items()
        for limit in (4, 64, None if count < 100 else 300)
        for epoch in (0, 1)
    }
    out.write_text(json.dumps(sampled), "utf-8")


def _find_sample_tiles() -> Callable[..., Any]:
    for import_path in SAMPLE_TILES:
        module, _, name = import_path.partition(":")
        with contextlib.suppress(ImportError, AttributeError):
            return getattr(importlib.import_module(module), name)
    raise ScenarioError(f"sample_tiles is not in {', '.join(SAMPLE_TILES)}. Add its import path to SAMPLE_TILES.")


# --- when run as a script


def import_entry_point(checkout: Path) -> Callable[[], object]:
    """Import the function behind the command `tapfm`, which a checkout's pyproject.toml defines."""
    scripts = tomllib.loads((checkout / "pyproject.toml").read_text("utf-8"))["project"]["scripts"]
    module, _, name = scripts["tapfm"].partition(":")
    return getattr(importlib.import_module(module), name)


def make_command_runner(main: Callable[[], object]) -> Command:
    """Return a function that runs a command in this process by calling its entry point `main`."""

    def command(arguments: Sequence[str]) -> Result:
        out, error, code = io.StringIO(), io.StringIO(), 0
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(error), _set_argv(arguments):
            try:
                main()
            except SystemExit as system_exit:
                code = system_exit.code if isinstance(system_exit.code, int) else int(system_exit.code is not None)
        if code:
            print(out.getvalue(), error.getvalue(), sep="", file=sys.stderr, flush=True)
        return code, out.getvalue()

    return command


@contextlib.contextmanager
def _set_argv(arguments: Sequence[str]) -> Iterator[None]:
    before = sys.argv
    sys.argv = ["tapfm", *arguments]
    try:
        yield
    finally:
        sys.argv = before


def main(checkout: str, out: str) -> int:
    command = make_command_runner(import_entry_point(Path(checkout)))
    try:
        run_scenario(Path(out), command, progress=lambda text: print(text, end="", flush=True))
    except ScenarioError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
