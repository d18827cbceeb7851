"""The training loop: epochs of Algorithm 1, validation, checkpoints and selection of the best epoch.

`fit` has three interfaces to other code: `Bags` reads the slides, a `CheckpointWriter` saves checkpoints, and a
`TrainingListener` receives progress events.
"""

from __future__ import annotations

import contextlib
import ctypes
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, Protocol

import torch

from tapfm.adaptation.epoch_summary import build_epoch_row, choose_selection_rule, compute_selection_score, is_better
from tapfm.adaptation.learner import Learner
from tapfm.adaptation.two_graph import StepReport
from tapfm.errors import Interrupted, SlidesFailedError
from tapfm.evaluation.predictions import LabelledSlide, Prediction, Unit
from tapfm.inference.bags import Bag, BagRequest, Bags, SlideFailed, check_unreadable_tiles
from tapfm.inference.predictor import Predictor
from tapfm.runs.run_progress import SUMMED_METRICS, EpochSums, RunProgress
from tapfm.runtime.messages import format_count
from tapfm.runtime.seeding import make_rng
from tapfm.tiles.augment import Augmentation, AugmentedTiles
from tapfm.tiles.reading import SkippedTiles


@dataclass(frozen=True)
class TrainingSettings:
    """Settings of the training loop.

    tiles_per_slide, validation_tiles: number of tiles sampled from a slide; None: all tiles.
    patience: stop after this many epochs without a better validation score; 0: never.
    unit: whether validation metrics are per slide or per patient.
    allow_failures: number of slides that may fail before training stops.
    """

    epochs: int
    augmentation: Augmentation = Augmentation()  # noqa: RUF009 - frozen
    seed: int = 0
    tiles_per_slide: int | None = None
    validation_tiles: int | None = 1000
    patience: int = 0
    unit: Unit = "slide"
    checkpoint_every_s: float = 1800.0
    allow_failures: int = 0


class CheckpointWriter(Protocol):
    """Saves checkpoints."""

    def save_last(self, learner: Learner, progress: RunProgress) -> None:
        """Save everything that is needed to resume."""
        ...

    def save_best(self, learner: Learner, progress: RunProgress) -> None:
        """Save the weights of the best epoch so far."""
        ...


class TrainingListener(Protocol):
    """Receives progress events."""

    def on_pass_start(self, phase: Literal["train", "validate"], epoch: int, slides: int, done: int) -> None:
        """Handle the start of a pass over the slides, of which `done` were processed before the run was resumed."""
        ...

    def on_slide_end(self, progress: RunProgress) -> None:
        """Handle the end of a slide, in training or validation."""
        ...

    def on_epoch_end(self, row: Mapping[str, Any], *, best: bool) -> None:
        """Handle the end of an epoch. `row` is its line of history.jsonl. best: False without validation."""
        ...

    def on_slide_failed(self, slide_id: str, reason: str) -> None:
        """Handle the first failure of a slide."""
        ...

    def on_warning(self, message: str) -> None:
        """Handle a warning."""
        ...


def fit(
    learner: Learner,
    bags: Bags,
    training: Sequence[LabelledSlide],
    validation: Sequence[LabelledSlide],
    settings: TrainingSettings,
    checkpoint_writer: CheckpointWriter,
    listener: TrainingListener,
    *,
    progress: RunProgress | None = None,
    stop_signal: Callable[[], int | None] = lambda: None,
) -> RunProgress:
    """Train until the run is finished, and return its progress.

    progress: where to resume; None: a new run.
    stop_signal: returns the number of a signal that stops the run, or None.

    Raises `Interrupted` after such a signal, and `SlidesFailedError` if too many slides failed; both after saving a
    checkpoint. Raises `NonFiniteError` if a loss, gradient or logit is not finite.
    """
    loop = _TrainingLoop(
        learner,
        bags,
        training,
        validation,
        settings,
        checkpoint_writer,
        listener,
        progress or RunProgress(),
        stop_signal,
    )
    bags.start(loop.iter_requests())
    try:
        while not loop.progress.finished:
            loop.train_epoch()
            loop.end_epoch(loop.validate())
    finally:
        bags.close()
    return loop.progress


class _PendingReport(NamedTuple):
    """A step whose report has not been read from the device yet."""

    slide_id: str
    step: int
    tiles: int
    report: StepReport


@dataclass
class _TrainingLoop:
    """State of one call of `fit`."""

    learner: Learner
    bags: Bags
    training: Sequence[LabelledSlide]
    validation: Sequence[LabelledSlide]
    settings: TrainingSettings
    checkpoint_writer: CheckpointWriter
    listener: TrainingListener
    progress: RunProgress
    stop_signal: Callable[[], int | None]

    def __post_init__(self) -> None:
        # sorted, so that the order of the cohort table does not matter
        self.training, self.validation = (
            sorted(slides, key=lambda slide: slide.slide_id) for slides in (self.training, self.validation)
        )
        self.timer = _EpochTimer(self.learner.model.device, self.bags)
        self.saved_at = time.monotonic()
        self.predictor = Predictor.for_training(self.learner.model, on_retry=self.listener.on_warning)
        self.pending_reports: list[_PendingReport] = []

    def shuffle_slides(self, epoch: int) -> list[LabelledSlide]:
        """Return the training slides in the order of an epoch."""
        order = make_rng(self.settings.seed, epoch, "order").permutation(len(self.training))
        return [self.training[i] for i in order]

    def training_request(self, epoch: int, slide: LabelledSlide) -> BagRequest:
        """Return the request for a training bag. Every epoch samples other tiles."""
        rng_key = (self.settings.seed, epoch, slide.slide_id)
        return BagRequest("train", slide.slide_id, self.settings.tiles_per_slide, rng_key)

    def validation_request(self, slide: LabelledSlide) -> BagRequest:
        """Return the request for a validation bag. Every epoch samples the same tiles."""
        rng_key = (self.settings.seed, "validation", slide.slide_id)
        return BagRequest("inference", slide.slide_id, self.settings.validation_tiles, rng_key)

    def iter_requests(self) -> Iterator[BagRequest]:
        """Yield the requests of the rest of the run. They are prefetched, so they cannot depend on results."""
        start = self.progress.position
        for epoch in range(self.progress.epoch, self.settings.epochs):
            yield from (self.training_request(epoch, slide) for slide in self.shuffle_slides(epoch)[start:])
            yield from (self.validation_request(slide) for slide in self.validation)
            start = 0

    def train_epoch(self) -> None:
        """Train on the remaining slides of this epoch."""
        epoch, start = self.progress.epoch, self.progress.position
        order = self.shuffle_slides(epoch)
        self.learner.start_epoch(epoch)
        self.listener.on_pass_start("train", epoch, len(order), start)
        self.timer.start()
        for position in range(start, len(order)):
            slides_per_step = self.learner.optimiser_settings.slides_per_step
            update = (position + 1) % slides_per_step == 0 or position + 1 == len(order)
            self.train_slide(order[position], epoch, update=update)
            self.progress.position = position + 1
            self.timer.add_to(self.progress.sums)
            self.listener.on_slide_end(self.progress)
            if update:  # a checkpoint does not contain the gradients of pending slides
                self.stop_if_too_many_failed()
                self.stop_if_interrupted()
                if time.monotonic() - self.saved_at > self.settings.checkpoint_every_s:
                    self.save_last()
        self.read_reports()

    def train_slide(self, slide: LabelledSlide, epoch: int, *, update: bool) -> None:
        """Train on one slide, or record its failure."""
        request = self.training_request(epoch, slide)
        try:
            bag = self.augment_bag(self.bags.read(request), request)
            self.progress.sums.tiles_failed += len(bag.unreadable_tiles)
            self.record_unreadable_tiles(slide, bag.unreadable_tiles)
        except SlideFailed as failure:
            self.record_failure(slide, str(failure))
            if update:
                self.learner.apply_pending()
            return
        targets = self.learner.model.task.encode(list(slide.labels.values()))
        report = self.learner.train_step(bag, targets, update=update, slide_id=slide.slide_id)
        # reads the report of the previous step while the device is busy with this one
        self.read_reports()
        self.pending_reports.append(_PendingReport(slide.slide_id, self.progress.step, bag.tiles, report))
        self.progress.step += 1

    def augment_bag(self, bag: Bag, request: BagRequest) -> Bag:
        """Return the bag with augmented tiles. Stored features are not changed."""
        if not isinstance(bag.content, torch.Tensor):
            return bag
        tiles = AugmentedTiles(
            bag.content,
            self.settings.augmentation,
            *request.rng_key,
            device=self.learner.model.device,
            compiled=self.learner.optimiser_settings.compiled,
        )
        return replace(bag, content=tiles)

    def read_reports(self) -> None:
        """Synchronise with the device, and add the pending reports to the sums of the epoch."""
        sums = self.progress.sums
        for slide_id, step, tiles, report in self.pending_reports:
            values = [*(getattr(report, name) for name in SUMMED_METRICS), report.checks.all(), *report.logits_C]
            numbers = torch.stack([value.double() for value in values]).tolist()  # synchronises once
            if not numbers[len(SUMMED_METRICS)]:
                report.checks.raise_if_not_finite(slide_id, step)
            for name, value in zip(SUMMED_METRICS, numbers, strict=False):
                sums.sums[name] += value
            sums.logits[slide_id] = numbers[len(SUMMED_METRICS) + 1 :]
            sums.slides += 1
            sums.tiles += tiles
        self.pending_reports = []

    def record_unreadable_tiles(self, slide: LabelledSlide, unreadable: Mapping[int, str]) -> None:
        """Record unreadable tiles of a slide. Raise `SlideFailed` if too many were unreadable so far."""
        if unreadable:
            new = self.progress.skipped.setdefault(slide.slide_id, SkippedTiles([], ""))
            new.tiles = sorted({*new.tiles, *unreadable})
            new.reason = next(iter(unreadable.values()))
        if (skipped := self.progress.skipped.get(slide.slide_id)) is not None:
            check_unreadable_tiles(len(skipped.tiles), self.bags.tile_count(slide.slide_id), skipped.reason)
        # a slide that failed before can be readable again, for example after a network error
        self.progress.failed.pop(slide.slide_id, None)

    def record_failure(self, slide: LabelledSlide, reason: str) -> None:
        if slide.slide_id not in self.progress.failed:
            self.listener.on_slide_failed(slide.slide_id, reason)
        self.progress.failed[slide.slide_id] = reason

    def stop_if_too_many_failed(self) -> None:
        """Save a checkpoint and raise `SlidesFailedError` if more slides failed than `allow_failures`."""
        if len(self.progress.failed) > self.settings.allow_failures:
            count = len(self.progress.failed)
            reasons = "; ".join(f"{slide_id}: {reason}" for slide_id, reason in list(self.progress.failed.items())[:5])
            self.save_last()
            raise SlidesFailedError(
                f"{format_count(count, 'slide')} failed (allowed: {self.settings.allow_failures}): {reasons}",
                hint=f"Fix or exclude them, or set TrainingSettings.allow_failures to {count}.",
            )

    def validate(self) -> list[Prediction]:
        """Predict the validation slides."""
        self.learner.model.train(False)
        self.listener.on_pass_start("validate", self.progress.epoch, len(self.validation), 0)
        predictions = []
        for slide in self.validation:
            try:
                encoded = self.predictor.encode_slide(self.bags, self.validation_request(slide))
                self.record_unreadable_tiles(slide, encoded.unreadable_tiles)
                logits = self.predictor.predict_logits(slide.slide_id, encoded)
                skipped = len(encoded.unreadable_tiles)
                predictions.append(slide.prediction(tuple(logits), tuple(logits.values()), encoded.tiles, skipped))
            except SlideFailed as failure:
                self.record_failure(slide, str(failure))
            self.timer.add_to(self.progress.sums)
            self.listener.on_slide_end(self.progress)
            self.stop_if_too_many_failed()
            self.stop_if_interrupted()
        # counted at the end, because a resumed run repeats the whole validation
        self.progress.sums.validation_tiles += sum(each.tiles for each in predictions)
        self.progress.sums.tiles_failed += sum(each.tiles_failed for each in predictions)
        return predictions

    def end_epoch(self, predictions: Sequence[Prediction]) -> None:
        """Add the epoch to the history, save its weights if it is the best, and save a checkpoint."""
        progress = self.progress
        row = build_epoch_row(self.learner, progress, self.training, predictions, self.settings.unit)
        if progress.selected_by is None:  # fixed for the whole run, because an AUC cannot be compared with a loss
            progress.selected_by = choose_selection_rule(row)
        row["score"] = compute_selection_score(row, progress.selected_by, progress.epoch)
        best = is_better(row["score"], progress.best_score)
        if best:
            progress.best_epoch, progress.best_score = progress.epoch, row["score"]
        progress.history.append(row)
        if best:
            self.checkpoint_writer.save_best(self.learner, progress)
        progress.epoch, progress.position, progress.sums = progress.epoch + 1, 0, EpochSums()
        epochs_since_best = progress.epoch - 1 - (progress.best_epoch or 0)
        progress.stopped_early = bool(self.settings.patience) and epochs_since_best >= self.settings.patience
        progress.finished = progress.epoch >= self.settings.epochs or progress.stopped_early
        self.save_last()
        self.listener.on_epoch_end(row, best=best and progress.selected_by != "last")
        _return_freed_memory()

    def save_last(self) -> None:
        self.read_reports()
        self.checkpoint_writer.save_last(self.learner, self.progress)
        self.saved_at = time.monotonic()

    def stop_if_interrupted(self) -> None:
        """Save a checkpoint and raise `Interrupted` if a signal was received."""
        if (number := self.stop_signal()) is not None:
            self.save_last()
            raise Interrupted(number)


def _return_freed_memory() -> None:
    """Return freed memory to the operating system. Bags of many sizes fragment the heap, which glibc would keep."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):  # another C library
            ctypes.CDLL("libc.so.6").malloc_trim(0)


class _EpochTimer:
    """Measures the time, the time of waiting for data, and the peak memory of an epoch."""

    def __init__(self, device: torch.device, bags: Bags) -> None:
        self._device, self._bags = device, bags
        self._at, self._waited = time.monotonic(), 0.0

    def start(self) -> None:
        """Start the clock and reset the peak memory, at the start of an epoch."""
        self._at, self._waited = time.monotonic(), self._bags.waited_s
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)

    def add_to(self, sums: EpochSums) -> None:
        """Add the measurements since the last call to the sums of an epoch."""
        now, waited = time.monotonic(), self._bags.waited_s
        sums.seconds += now - self._at
        sums.waited_s += waited - self._waited
        self._at, self._waited = now, waited
        sums.peak_bytes = max(sums.peak_bytes, self._peak_bytes())

    def _peak_bytes(self) -> int:
        if self._device.type == "cuda":
            return torch.cuda.max_memory_allocated(self._device)
        if sys.platform == "win32":
            return 0  # not available
        import resource

        unit_bytes = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit_bytes
