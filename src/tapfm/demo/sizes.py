"""Sizes of the demo: number of slides, tiles and epochs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

TARGET = "FGFR3"  # planted by the default task of `tapfm synth`
ENCODER = "tapfm-pocket"
PREVALENCE = 0.4
FRACTIONS = (0.5, 0.2, 0.3)  # training, validation, test
COHORT_NOTE = (
    f"{PREVALENCE:.0%} of the slides are positive. {FRACTIONS[0]:.0%} of the slides are used for training, "
    f"{FRACTIONS[1]:.0%} for validation and {FRACTIONS[2]:.0%} for testing. These values suit a small cohort; in the "
    "paper, 16% of the slides are positive and the splits are 80%, 10% and 10%."
)

SizeName = Literal["demo", "full", "tiny"]


@dataclass(frozen=True)
class DemoSize:
    """Number of slides, tiles and epochs of a demo."""

    name: SizeName
    duration: str  # expected duration, to print
    slides: int
    external_slides: int
    tissue_tiles: int  # approximate number of tissue tiles per slide
    difficulty: str
    tiles_per_slide: int  # K: tiles per slide and step
    epochs: int
    fixed_epochs: int  # with a fixed encoder; more, because an epoch on stored features is fast
    resamples: int = 2000
    note: str = ""  # printed before the demo and after its results

    @property
    def options(self) -> list[str]:
        """Options of `tapfm demo` that select this size."""
        return [] if self.name == "demo" else [f"--{self.name}"]

    @property
    def settings(self) -> dict[str, Any]:
        """Section [settings] of study.toml: settings for all runs; those in `fixed` are for method fixed only."""
        return {
            "adaptation": {"tiles_per_slide": self.tiles_per_slide},
            "schedule": {"epochs": self.epochs, "first_cycle": self.epochs},
            "machine": {"workers": 1},
            "fixed": {
                "adaptation": {"tiles_per_slide": "all"},
                "schedule": {"epochs": self.fixed_epochs, "first_cycle": self.fixed_epochs},
            },
        }


SIZES: dict[SizeName, DemoSize] = {
    "demo": DemoSize("demo", "9 to 10 minutes on two cores", 80, 24, 40, "easy", 16, 12, 30),
    "full": DemoSize("full", "an hour or more on two cores", 200, 80, 60, "medium", 24, 20, 50),
    "tiny": DemoSize(
        "tiny",
        "one or two minutes",
        10,
        4,
        10,
        "easy",
        4,
        1,
        2,
        resamples=100,
        note="This size only shows that every step works on this machine: metrics of so few slides are meaningless.",
    ),
}
