"""The commands that versions of tapfm are compared by: from painted slides to predictions, small and always the same.

    python tools/version_scenario.py CHECKOUT OUT

runs them with the tapfm of a checkout, whose `src` has to be on PYTHONPATH, and says which one is running.
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

# Words of commands that were renamed, from the old spelling to the new one. The scenario below is written in the new
# spelling. A version that refuses a command (exit code 2) is given older spellings of it. When a command, an option or
# a setting is renamed, change the scenario and add a line at the end:
#     ("predict", "--batch", "--batch-size")         command (new spelling), old word, new word
#     ("train", "adaptation.tau", "aggregator.tau")  a setting, of `--set adaptation.tau=0.5`
RENAMED_WORDS: tuple[tuple[str, str, str], ...] = (
    ("train", "augmentation.quarter_turns", "augmentation.rotate_90"),
    ("train", "machine.read_ahead_gib", "machine.prefetch_gib"),
    ("train", "machine.save_minutes", "machine.checkpoint_minutes"),
)
# Where `sample_tiles(count, tiles_per_slide, *address)` is, the newest place first.
DRAW_TILES = ("tapfm.tiles.sampling:sample_tiles", "tapfm.tiles.sampling:draw_tiles")

REFUSED = 2  # exit code for bad input
WIDTH = 110  # of a line of progress, in characters
TARGETS = ("EGFR", "KRAS")
# The label that is taken out of the table, as real tables lack some.
UNLABELLED = "S001", "KRAS"
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
class Size:
    """How much is trained and predicted."""

    slides: int
    epochs: int
    all_steps: bool = True  # False: one evaluation, one prediction, three runs


FULL = Size(slides=14, epochs=2)
SMALL = Size(slides=14, epochs=1, all_steps=False)
# AdamW moves a weight by its rate even where the gradient is nothing but rounding. Small rates keep small what another
# order of sums changes.
ENCODER_LR, AGGREGATOR_LR = 1e-4, 1e-3


class Scenario:
    """Runs commands in a folder; all paths in them are relative to it."""

    def __init__(self, command: Command, size: Size, progress: Callable[[str], None]) -> None:
        self.command, self.size, self.progress = command, size, progress
        self.paint: Callable[[], None] = self.paint_slides

    def run(self) -> None:
        """Run everything."""
        self.paint()
        self.prepare_slides()
        self.train_models()
        self.evaluate_models()
        self.predict_slides()
        draw_tiles(Path("tiles/summary.csv"), Path("drawn_tiles.json"))

    def tapfm(self, *words: object) -> str:
        """Run a command, in its old spelling where the version refuses the new one; return its standard output."""
        started = time.monotonic()
        spellings = _spellings([str(word) for word in words])
        typed = spellings[0]
        self.progress(f"  tapfm {' '.join(typed)}"[:WIDTH].ljust(WIDTH + 1))
        for typed in spellings:
            code, output = self.command(typed)
            if code != REFUSED:
                break
        self.progress(f"{time.monotonic() - started:5.1f} s\n")
        if code:
            raise ScenarioError(f"`tapfm {' '.join(typed)}` ended with exit code {code}.")
        return output

    def paint_slides(self) -> None:
        """Paint slides of two cohorts; one slide in three is 40x."""
        painted = ("--slides", self.size.slides, "--external", 4, "--tiles", 10, "--seed", 3, "--workers", 1)
        signal = ("--task", "luad4", "--difficulty", "easy", "--prevalence", 0.5)
        self.tapfm("synth", "painted", *signal, *painted, *FRACTIONS)

    def prepare_slides(self) -> None:
        """Split, tile and embed; inspect too."""
        table = "painted/cohort.csv"
        targets = [word for target in TARGETS for word in ("--targets", target)]
        self.tapfm("split", table, "--out", "split.csv", *targets, *FRACTIONS, "--force")
        remove_label(Path("split.csv"), *UNLABELLED)
        self.tapfm("tile", "split.csv", "--out", "tiles", "--workers", 1)
        embed = ("--encoder", "tapfm-pocket", "--tiles", "tiles", "--out", "features", *CPU)
        self.tapfm("embed", "split.csv", *embed)
        if self.size.all_steps:
            Path("inspected.json").write_text(self.tapfm("inspect", "painted/slides", "--json"), "utf-8")
            self.tapfm("split", table, "--out", "folds.csv", *targets, "--folds", 3, "--force")
            other = ("--overlap", 56, "--min-tissue", 0.6, "--tissue", "darkness", "--keep-pen", "--keep-blur")
            only = ("--only", "S001", "--only", "S007", "--workers", 1)
            self.tapfm("tile", "split.csv", "--out", "tiles-clam", "--layout", "clam", *other, *only)
            self.tapfm("tile", "painted/external.csv", "--out", "tiles-external", "--workers", 1)

    def train_models(self) -> None:
        """Train the three methods, and make an ensemble of two runs."""
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
        targets = [word for target in TARGETS for word in ("--target", target)]
        base = ("--cohort", "split.csv", "--encoder", "tapfm-pocket", "--tiles", "tiles", "--method", method)
        self.tapfm("config", *base, *options, *targets, "--out", f"{name}.toml")
        changes = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
        self.tapfm("train", f"{name}.toml", "--out", f"runs/{name}", *changes, *CPU)

    def evaluate_models(self) -> None:
        """Evaluate runs and the ensemble; compare runs, and tables of predictions that are written here."""
        options = ("--resamples", 200, *CPU)
        self.tapfm("evaluate", "runs/tapfm", "--out", "evaluations/tapfm", "--by", "scanner", *options)
        if self.size.all_steps:
            self.tapfm("evaluate", "ensemble", "--out", "evaluations/ensemble", "--unit", "patient", *options)
            self.tapfm("evaluate", "runs/fixed", "--out", "evaluations/fixed", "--split", "all", *options)
            external = ("--cohort", "painted/external.csv", "--tiles", "tiles-external")
            self.tapfm("evaluate", "runs/finetune", "--out", "evaluations/external", *external, *options)
            runs = ("runs/tapfm", "runs/finetune", "runs/fixed")
            self.tapfm("compare", *runs, "--out", "comparisons/runs", "--resamples", 200)
        tables = [f"{name}={write_predictions(Path('inputs'), name, number)}" for number, name in enumerate("abc")]
        self.tapfm("compare", *tables, "--out", "comparisons/tables", "--resamples", 500, "--unit", "patient")

    def predict_slides(self) -> None:
        """Predict with a run, the ensemble and an export, with pictures of the first two."""
        drawn = ("--tiles", "tiles", "--heatmaps", "--geojson", *CPU)
        self.tapfm("export", "runs/tapfm", "--out", "exported")
        ensemble = ("predict", "--model", "ensemble", "split.csv", "--out", "predictions/ensemble")
        self.tapfm(*ensemble, "--split", "val", *drawn)
        if self.size.all_steps:
            run = ("predict", "--model", "runs/tapfm", "split.csv", "--out", "predictions/run")
            self.tapfm(*run, "--split", "test", *drawn)
            slides = ("painted/slides/S001.svs", "painted/slides/S007.svs")
            self.tapfm("predict", "--model", "exported", *slides, "--out", "predictions/export", "--batch", 5, *CPU)


def run_scenario(
    folder: Path,
    command: Command,
    size: Size = FULL,
    *,
    paint: Callable[[], None] | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> None:
    """Run the scenario in a new folder. Raises ScenarioError where a command fails.

    `paint` writes painted/cohort.csv and its slides into the working folder, instead of `tapfm synth`.
    """
    folder.mkdir(parents=True)
    with contextlib.chdir(folder):
        scenario = Scenario(command, size, progress)
        scenario.paint = paint or scenario.paint
        scenario.run()


def _spellings(words: list[str]) -> list[list[str]]:
    """List the spellings of a command, the newest first; the table of renamed words is in the order of time."""
    spellings = [words]
    for command, old, new in reversed(RENAMED_WORDS):
        if command == words[0]:
            latest = [old + word[len(new) :] if word.split("=")[0] == new else word for word in spellings[-1]]
            spellings += [latest] if latest != spellings[-1] else []
    return spellings


def remove_label(table: Path, slide_id: str, target: str) -> None:
    """Take a label out of a table, so that one slide has no label of a target."""
    with table.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    for row in rows:
        if row["slide_id"] == slide_id:
            row[target] = ""
    with table.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, rows[0], lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def write_predictions(folder: Path, name: str, number: int) -> Path:
    """Write made-up predictions of 30 patients with 36 slides, some of them equal; a larger number is a worse model."""
    lines = ["patient_id,slide_id,target,label,probability"]
    for slide in range(36):
        patient = slide % 30
        for offset, target in enumerate(TARGETS):
            label = (patient * 7 + offset * 3) % 5 < 2
            noise = (slide * 37 + number * 11 + offset * 5) % 23 / 23
            probability = round((0.35 - 0.1 * number) * label + 0.6 * noise + 0.02, 2)
            lines.append(f"P{patient:02},W{slide:02},{target},{int(label)},{probability}")
    folder.mkdir(exist_ok=True)
    path = folder / f"{name}.csv"
    path.write_text("\n".join(lines) + "\n", "utf-8")
    return path


def draw_tiles(summary: Path, out: Path) -> None:
    """Write which tiles training draws from slides; the one thing that no file says."""
    draw = _find_draw_tiles()
    with summary.open(newline="", encoding="utf-8") as file:
        tiles = {row["slide_id"]: int(row["tiles"]) for row in csv.DictReader(file)}
    tiles |= {"large": 20_000}
    drawn = {
        f"{slide_id}.{limit}.{epoch}": [int(tile) for tile in draw(count, limit, 7, epoch, slide_id)]
        for slide_id, count in tiles.items()
        for limit in (4, 64, None if count < 100 else 300)
        for epoch in (0, 1)
    }
    out.write_text(json.dumps(drawn), "utf-8")


def _find_draw_tiles() -> Callable[..., Any]:
    for place in DRAW_TILES:
        module, _, name = place.partition(":")
        with contextlib.suppress(ImportError, AttributeError):
            return getattr(importlib.import_module(module), name)
    raise ScenarioError(f"draw_tiles is in none of {', '.join(DRAW_TILES)}; add its place to DRAW_TILES.")


# --- in a process of its own


def entry_point(checkout: Path) -> Callable[[], object]:
    """Import the function that a checkout's pyproject.toml names as the command `tapfm`."""
    scripts = tomllib.loads((checkout / "pyproject.toml").read_text("utf-8"))["project"]["scripts"]
    module, _, name = scripts["tapfm"].partition(":")
    return getattr(importlib.import_module(module), name)


def in_this_process(main: Callable[[], object]) -> Command:
    """Return a function that runs one command of the program whose entry point is `main`, without starting it anew."""

    def command(words: Sequence[str]) -> Result:
        out, error, code = io.StringIO(), io.StringIO(), 0
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(error), _arguments(words):
            try:
                main()
            except SystemExit as ended:
                code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
        if code:
            print(out.getvalue(), error.getvalue(), sep="", file=sys.stderr, flush=True)
        return code, out.getvalue()

    return command


@contextlib.contextmanager
def _arguments(words: Sequence[str]) -> Iterator[None]:
    before = sys.argv
    sys.argv = ["tapfm", *words]
    try:
        yield
    finally:
        sys.argv = before


def main(checkout: str, out: str) -> int:
    """Run the scenario with the version of a checkout."""
    command = in_this_process(entry_point(Path(checkout)))
    try:
        run_scenario(Path(out), command, progress=lambda text: print(text, end="", flush=True))
    except ScenarioError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
