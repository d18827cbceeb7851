"""Sizes of the demo: nothing else about it depends on them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

TARGET = "FGFR3"  # the one that `tapfm synth --task fgfr3` plants
ENCODER = "tapfm-pocket"
PREVALENCE = 0.4
FRACTIONS = (0.5, 0.2, 0.3)  # training, validation, test
COHORT_NOTE = (
    f"{PREVALENCE:.0%} of the slides are positive. {FRACTIONS[0]:.0%} of all are for training, {FRACTIONS[1]:.0%} for "
    f"validation, {FRACTIONS[2]:.0%} for testing. Both are chosen for so few slides: the paper has 16%, and 80, 10, "
    "10%."
)

Name = Literal["demo", "full", "tiny"]


@dataclass(frozen=True)
class Size:
    """Slides to paint, epochs to train, and a note to print first."""

    name: Name
    takes: str  # how long, in words
    slides: int
    external: int
    tiles: int  # of tissue on a slide, about
    difficulty: str
    tiles_per_slide: int  # K: in a step
    epochs: int
    fixed_epochs: int  # of the aggregator on stored features: an epoch takes a fraction of a second
    resamples: int = 2000
    note: str = ""

    @property
    def options(self) -> list[str]:
        """Options of `tapfm demo` that choose it."""
        return [] if self.name == "demo" else [f"--{self.name}"]

    @property
    def settings(self) -> dict[str, Any]:
        """Tables of RUN.toml that all runs share."""
        return {
            "adaptation": {"tiles_per_slide": self.tiles_per_slide},
            "schedule": {"epochs": self.epochs, "first_cycle": self.epochs},
            "machine": {"workers": 1},
            "fixed": {
                "adaptation": {"tiles_per_slide": "all"},
                "schedule": {"epochs": self.fixed_epochs, "first_cycle": self.fixed_epochs},
            },
        }


SIZES: dict[Name, Size] = {
    "demo": Size("demo", "9 to 10 minutes on two cores", 80, 24, 40, "easy", 16, 12, 30),
    "full": Size("full", "an hour or more on two cores", 200, 80, 60, "medium", 24, 20, 50),
    "tiny": Size(
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
        note="So few slides only show that every part works here: the figures mean nothing.",
    ),
}
