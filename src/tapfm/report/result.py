"""What a model is worth on a set of slides, as a report shows it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tapfm.evaluation.measures import MACRO, MetricValue
from tapfm.evaluation.predictions import Prediction, Unit

MetricsByTarget = Mapping[tuple[str, str], MetricValue]  # by target and metric


@dataclass(frozen=True)
class SplitResult:
    """Predictions of a set of slides, and what was measured of them."""

    title: str  # test, validation, external.csv; two of the same name have their folders in it
    about: str  # which slides, and where the figures come from
    targets: Sequence[str]
    unit: Unit
    predictions: Sequence[Prediction]
    measured: MetricsByTarget
    youden: Mapping[str, float | None] = field(default_factory=dict)  # thresholds by target
    at_sensitivity: Mapping[str, float | None] = field(default_factory=dict)
    sensitivity: float = 0.9
    chosen_on: str = ""  # where thresholds come from, or why there are none
    warning: str = ""  # the slides were used to choose something
    baseline: Sequence[Prediction] = ()
    baseline_measured: MetricsByTarget = field(default_factory=dict)
    subgroups: Mapping[str, MetricsByTarget] = field(default_factory=dict)
    notes: Sequence[str] = ()
    resamples: int = 2000
    seed: int = 0
    own: bool = True  # slides of the run's own cohort
    group: str = ""  # its title, where that had to be told from another
    model: str = ""  # where it is not the run

    @property
    def columns(self) -> list[str]:
        """List the targets, and their mean where there are several."""
        return [*self.targets, *([MACRO] if len(self.targets) > 1 else [])]
