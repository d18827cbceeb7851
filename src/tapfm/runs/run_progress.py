"""Progress of a run, saved in checkpoints for resuming: position, sums of the current epoch, history of epochs."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields
from typing import Any

from tapfm.tiles.reading import SkippedTiles

# metrics of training on one slide; their sums over an epoch give the means in history.jsonl
SUMMED_METRICS = (
    "loss_agg",
    "loss_feature",
    "loss_attention",
    "loss_cosine",
    "loss_pfm",
    "norm_g_z",
    "norm_g_r",
    "norm_encoder",
)


@dataclass
class EpochSums:
    """Sums over the current epoch."""

    slides: int = 0  # finished training slides
    tiles: int = 0  # of training slides
    validation_tiles: int = 0
    tiles_failed: int = 0  # unreadable tiles of training and validation slides
    # by name in SUMMED_METRICS, over the finished training slides
    sums: dict[str, float] = field(default_factory=lambda: dict.fromkeys(SUMMED_METRICS, 0.0))
    # of the finished training slides, by slide id: one logit per target, computed before the update on that slide
    logits: dict[str, list[float]] = field(default_factory=dict)
    seconds: float = 0.0  # including validation
    waited_s: float = 0.0  # seconds spent waiting for tiles
    peak_bytes: int = 0  # peak memory, not a sum

    @property
    def tiles_per_second(self) -> float:
        """Tiles per second, including validation."""
        return (self.tiles + self.validation_tiles) / max(self.seconds, 1e-9)

    @property
    def data_wait_fraction(self) -> float:
        """Time spent waiting for tiles, as a fraction of `seconds`."""
        return self.waited_s / max(self.seconds, 1e-9)


@dataclass
class RunProgress:
    """Progress of a run. Epochs count from 0."""

    epoch: int = 0  # current epoch
    position: int = 0  # number of training slides of the current epoch that are finished or failed
    step: int = 0  # number of training slides finished in all epochs; failed slides do not count
    finished: bool = False
    stopped_early: bool = False
    selected_by: str | None = None  # criterion for the best epoch: auc, loss or last
    best_epoch: int | None = None
    best_score: float | None = None  # score of the best epoch; higher is better
    failed: dict[str, str] = field(default_factory=dict)  # why a slide failed, by slide id
    skipped: dict[str, SkippedTiles] = field(default_factory=dict)  # unreadable tiles, by slide id
    sums: EpochSums = field(default_factory=EpochSums)
    history: list[dict[str, Any]] = field(default_factory=list)  # rows of history.jsonl: finished epochs

    def clear_failures(self) -> None:
        """Forget the failed slides, so that they are tried again."""
        for slide_id in self.failed:
            self.skipped.pop(slide_id, None)
        self.failed = {}

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> RunProgress:
        """Create from the result of `as_json`; unknown fields are ignored."""
        known = {each.name for each in fields(cls)}
        values = {name: value for name, value in values.items() if name in known}
        values["sums"] = EpochSums(**values["sums"])
        values["skipped"] = {slide: SkippedTiles(**each) for slide, each in values["skipped"].items()}
        return cls(**values)
