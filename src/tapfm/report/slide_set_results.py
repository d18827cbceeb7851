"""Predictions and metrics of a model on one set of slides."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tapfm.evaluation.figures import EvaluatedPredictions
from tapfm.evaluation.metric_tables import MODEL, EvaluationResults
from tapfm.evaluation.metric_values import MetricValue
from tapfm.evaluation.predictions import Prediction, Unit
from tapfm.tasks.target import TargetKinds


@dataclass(frozen=True)
class SlideSetResults:
    """Predictions and metrics of a model on one set of slides."""

    title: str  # test, validation, external.csv; followed by the folder if several sets have the same title
    description: str  # number and origin of the slides, and the source of the metrics
    results: EvaluationResults
    predictions: Sequence[Prediction]
    baseline: Sequence[Prediction] = ()
    warning: str = ""  # why the metrics are optimistic; empty for held-out slides
    own_cohort: bool = True  # the slides are from the cohort of the run (or of `model`), not from an external one
    title_without_folder: str = ""  # only if the title contains a folder
    model: str = ""  # name of the evaluated model if it is not the run

    @property
    def targets(self) -> TargetKinds:
        return self.results.targets

    @property
    def unit(self) -> Unit:
        """Unit of the metrics: slide or patient."""
        unit: Unit = self.results.about["unit"]
        return unit

    @property
    def metrics(self) -> dict[tuple[str, str], MetricValue]:
        """Metrics of the model by target and metric."""
        return self.results.select_metrics(MODEL)

    @property
    def thresholds(self) -> dict[str, float | None]:
        """Youden thresholds by target; empty if there are no thresholds."""
        thresholds = self.results.chosen_thresholds.thresholds
        return {} if thresholds is None else dict(thresholds.youden)

    def to_evaluated_predictions(self) -> EvaluatedPredictions:
        """Return the data for the figures."""
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
