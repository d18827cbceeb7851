"""Results of a model on a set of slides, as a report shows them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tapfm.evaluation.figures import EvaluatedPredictions
from tapfm.evaluation.metric_tables import MODEL, EvaluationResults
from tapfm.evaluation.metric_values import MetricValue
from tapfm.evaluation.predictions import Prediction, Unit
from tapfm.tasks.target import TargetKinds


@dataclass(frozen=True)
class EvaluatedSlideSet:
    """Predictions of a set of slides, and what was measured of them."""

    title: str  # test, validation, external.csv; with the folder where two would be the same
    about: str  # which slides, and where the numbers come from
    results: EvaluationResults
    predictions: Sequence[Prediction]
    baseline: Sequence[Prediction] = ()
    warning: str = ""  # the slides were used to choose something
    own: bool = True  # slides of the run's own cohort
    group: str = ""  # the title before the folder was added
    model: str = ""  # where it is not the run

    @property
    def targets(self) -> TargetKinds:
        """The targets of the model."""
        return self.results.kinds

    @property
    def unit(self) -> Unit:
        """What counts once."""
        unit: Unit = self.results.about["unit"]
        return unit

    @property
    def metrics(self) -> dict[tuple[str, str], MetricValue]:
        """The metrics of the model by target and name."""
        return self.results.select_metrics(MODEL)

    @property
    def thresholds(self) -> dict[str, float | None]:
        """Youden's thresholds by target; empty if none were chosen."""
        chosen = self.results.chosen.thresholds
        return {} if chosen is None else dict(chosen.youden)

    def evaluated_predictions(self) -> EvaluatedPredictions:
        """Return what the figures are drawn from."""
        about = self.results.about
        return EvaluatedPredictions(
            self.predictions,
            self.baseline,
            self.unit,
            self.metrics,
            self.thresholds,
            about["resamples"],
            about["seed"],
        )
