"""How far a run is: everything but tensors that the next step depends on, and what is told of each epoch."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields
from typing import Any

from tapfm.tiles.reading import SkippedTiles

# what of an epoch is summed up slide by slide
SUMMED = (
    "loss_agg",
    "loss_feature",
    "loss_attention",
    "loss_regular",
    "loss_pfm",
    "norm_g_z",
    "norm_g_r",
    "norm_encoder",
)


@dataclass
class EpochSums:
    """An epoch so far."""

    slides: int = 0
    tiles: int = 0  # learnt from
    validation_tiles: int = 0
    tiles_failed: int = 0
    sums: dict[str, float] = field(default_factory=lambda: dict.fromkeys(SUMMED, 0.0))
    logits: dict[str, list[float]] = field(default_factory=dict)  # by slide, before its update
    seconds: float = 0.0
    waited_s: float = 0.0
    peak_bytes: int = 0

    @property
    def tiles_per_second(self) -> float:
        """How fast it went, validation included."""
        return (self.tiles + self.validation_tiles) / max(self.seconds, 1e-9)

    @property
    def waiting_share(self) -> float:
        """Part of the time that was spent waiting for tiles."""
        return self.waited_s / max(self.seconds, 1e-9)


@dataclass
class RunProgress:
    """Where a run is. Epochs count from 0; `position` is the number of training slides of this epoch that are done."""

    epoch: int = 0
    position: int = 0
    step: int = 0
    finished: bool = False
    stopped_early: bool = False
    selected_by: str | None = None  # auc, loss or last: what decides which epoch is the best
    best_epoch: int | None = None
    best_score: float | None = None
    failed: dict[str, str] = field(default_factory=dict)  # slide and reason
    skipped: dict[str, SkippedTiles] = field(default_factory=dict)
    sums: EpochSums = field(default_factory=EpochSums)
    history: list[dict[str, Any]] = field(default_factory=list)

    def forget_failures(self) -> None:
        """Give slides that failed another chance."""
        for slide_id in self.failed:
            self.skipped.pop(slide_id, None)
        self.failed = {}

    def as_json(self) -> dict[str, Any]:
        """Give it as JSON has it."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> RunProgress:
        """Read it back."""
        known = {each.name for each in fields(cls)}
        values = {name: value for name, value in values.items() if name in known}
        values["sums"] = EpochSums(**values["sums"])
        values["skipped"] = {slide: SkippedTiles(**each) for slide, each in values["skipped"].items()}
        return cls(**values)
