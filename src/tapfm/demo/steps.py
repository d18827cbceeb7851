"""The steps of the demo: commands that a user would type, one after another, into one folder."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from tapfm.demo.sizes import ENCODER, FRACTIONS, PREVALENCE, TARGET, Size
from tapfm.runtime.files import write_atomically

COHORTS = ("test", "external")


@dataclass(frozen=True)
class Step:
    """A command: what it is for, what is typed, and what it makes, the first of which is there when it is done."""

    name: str
    title: str
    words: tuple[str, ...]  # none where only painted slides allow it, so that it is no command
    makes: tuple[Path, ...]
    says: tuple[str, ...] = ()  # how the lines of its result begin that are shown; all of it goes to its log
    before: Callable[[], None] | None = None

    @property
    def is_made(self) -> bool:
        """Say whether all of it is there."""
        return all(path.exists() for path in self.makes)


@dataclass(frozen=True)
class DemoFolder:
    """Where everything is."""

    path: Path

    @property
    def state(self) -> Path:
        """Which steps are done."""
        return self.path / "demo.json"

    @property
    def painted(self) -> Path:
        """Slides, tables and what was planted."""
        return self.path / "painted"

    @property
    def split(self) -> Path:
        """The table of the development cohort, split."""
        return self.path / "split.csv"

    @property
    def external(self) -> Path:
        """The table of the other sites."""
        return self.painted / "external.csv"

    @property
    def study_file(self) -> Path:
        """What is compared."""
        return self.path / "study.toml"

    @property
    def study(self) -> Path:
        """What came of it."""
        return self.path / "study"

    @property
    def results(self) -> Path:
        """The AUCs of it."""
        return self.study / "table_binary.csv"

    @property
    def adapted(self) -> Path:
        """The run of TAPFM."""
        return self.study / "runs" / ENCODER / "tapfm" / "cls-attention" / "seed0"

    @property
    def report(self) -> Path:
        """All of it on a page."""
        return self.path / "report.html"

    @property
    def planted(self) -> Path:
        """How well attention finds what was planted."""
        return self.path / "planted.json"

    @property
    def planted_picture(self) -> Path:
        """The same of one slide, to look at."""
        return self.path / "planted.png"

    def table(self, cohort: str) -> Path:
        """The table of the cohort `test` or `external`."""
        return self.split if cohort == "test" else self.external

    def tiles(self, cohort: str) -> Path:
        """Its tiles."""
        return self.path / ("tiles" if cohort == "test" else "tiles-external")

    def predictions(self, cohort: str) -> Path:
        """What it says of them after."""
        return self.path / "predictions" / cohort


def steps_of(size: Size, folder: DemoFolder) -> list[Step]:
    """List the steps in their order."""
    painted, cohort = folder.painted, folder.painted / "cohort.csv"
    paint = ["--slides", str(size.slides), "--external", str(size.external), "--tiles", str(size.tiles)]
    paint += ["--difficulty", size.difficulty, "--prevalence", str(PREVALENCE), "--fractions", *map(str, FRACTIONS)]
    predict = [
        Step(
            f"predict-{name}",
            f"Predict the {'held-out' if name == 'test' else 'external'} slides, and map what each tile said",
            (
                *("predict", "--model", str(folder.adapted), str(folder.table(name)), "--split", "test"),
                *("--tiles", str(folder.tiles(name)), "--out", str(folder.predictions(name)), "--heatmaps", "--resume"),
            ),
            (folder.predictions(name) / "predictions.csv", folder.predictions(name)),
        )
        for name in COHORTS
    ]
    shown = [word for name in COHORTS for word in ("--predictions", str(folder.predictions(name)))]
    return [
        Step(
            "synth",
            "Paint slides with a signal planted in some nests",
            ("synth", str(painted), *paint),
            (painted / "README.md", painted),  # the first is written last
            ("Look",),
        ),
        Step(
            "inspect",
            "Look at what is there: format, size, scale, problems",
            ("inspect", str(cohort), str(folder.external)),
            (),
            (f"{size.slides + size.external} slides",),
        ),
        Step(
            "tile",
            "Find the tissue and lay tiles at 0.5 microns per pixel",
            ("tile", str(cohort), "--out", str(folder.tiles("test"))),
            (folder.tiles("test") / "summary.csv", folder.tiles("test")),
            ("Tiled", "Look"),
        ),
        Step(
            "tile-external",
            "The same for the external cohort: other sites, another scanner",
            ("tile", str(folder.external), "--out", str(folder.tiles("external"))),
            (folder.tiles("external") / "summary.csv", folder.tiles("external")),
            ("Tiled", "Look"),
        ),
        Step(
            "split",
            "Split by patient (--force, as the painted table has a split already)",
            ("split", str(cohort), "--fractions", *map(str, FRACTIONS), "--force", "--out", str(folder.split)),
            (folder.split,),
            ("split", "train", "val", "test"),
        ),
        Step(
            "study",
            "Learn in three ways, and evaluate each on held-out and external slides",
            ("study", str(folder.study_file), "--out", str(folder.study), "--jobs", "2", "--resume"),
            (folder.results, folder.study),
            before=partial(write_study, folder.study_file, size),
        ),
        *predict,
        Step(
            "report",
            "Put all of it on one page",
            ("report", str(folder.study), *shown, "--out", str(folder.report)),
            (folder.report,),
            ("Written",),
        ),
        Step("planted", "Compare attention with what was planted", (), (folder.planted, folder.planted_picture)),
    ]


def write_study(path: Path, size: Size) -> None:
    """Write STUDY.toml: a fixed encoder with ABMIL, a fine-tuned one with ABMIL, TAPFM. Paths start at the file."""
    from tapfm.config.study import study_text

    train, validation, test = (f"{fraction:.0%}" for fraction in FRACTIONS)
    tables: dict[str, Any] = {
        "name": f"Three ways to learn {TARGET} from painted slides",
        "targets": [TARGET],
        "encoders": [ENCODER],
        "regimes": ["fixed", "finetune", "tapfm"],
        "aggregators": ["abmil"],
        "tapfm_aggregators": ["cls-attention"],
        "resamples": size.resamples,
        "notes": [
            "**Painted slides**: no tissue of a patient, an encoder of 0.9 million parameters, few tiles and epochs. "
            "This shows how tapfm works. It says nothing about tissue, nor which method is better there.",
            f"{PREVALENCE:.0%} of the slides are positive. {train} of all are for training, {validation} for "
            f"validation, {test} for testing. Both are chosen for so few slides: the paper has 16%, and 80, 10, 10%.",
            f"Where the encoder is fixed, the aggregator sees all tiles of a slide for {size.fixed_epochs} epochs; "
            f"where it learns, a step has {size.tiles_per_slide} tiles of a slide, for {size.epochs} epochs. "
            "One seed each.",
        ],
        "cohort": {"table": "split.csv", "tiles": "tiles"},
        "external": {"table": "painted/external.csv", "tiles": "tiles-external"},
        "settings": size.settings,
    }
    write_atomically(path, study_text(tables).encode())
