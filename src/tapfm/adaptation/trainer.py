"""Algorithm 1 over epochs: train on the training slides, validate, keep the best epoch.

`fit` takes plain arguments. What it needs of the outside are three small promises: bags (where slides come from), a
checkpoints (where checkpoints go) and a listener (who is told).
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

from tapfm.adaptation.epoch_summary import build_epoch_row, choose_selection_rule, is_better, selection_score
from tapfm.adaptation.learner import Learner
from tapfm.adaptation.two_graph import StepReport
from tapfm.errors import Interrupted, SlidesFailedError
from tapfm.evaluation.predictions import LabelledSlide, Prediction, Unit
from tapfm.inference.bags import Bag, BagRequest, Bags, SlideFailed, check_missing_tiles
from tapfm.inference.predictor import Predictor
from tapfm.runs.progress import SUMMED_METRICS, EpochSums, RunProgress
from tapfm.runtime.seeding import make_rng
from tapfm.tiles.augment import Augmentation, AugmentedTiles
from tapfm.tiles.reading import SkippedTiles


@dataclass(frozen=True)
class TrainingSettings:
    """How long, from which draws, and what counts as better."""

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
    """Where a run is kept."""

    def save_last(self, learner: Learner, progress: RunProgress) -> None:
        """Save all that is needed to go on."""
        ...

    def save_best(self, learner: Learner, progress: RunProgress) -> None:
        """Save the weights of the best epoch so far."""
        ...


class TrainingListener(Protocol):
    """Who is told how it goes."""

    def on_pass_start(self, phase: Literal["train", "validate"], epoch: int, slides: int, done: int) -> None:
        """Hear of a pass over slides."""
        ...

    def on_slide_end(self, progress: RunProgress) -> None:
        """Hear of one more slide."""
        ...

    def on_epoch_end(self, row: Mapping[str, Any], *, best: bool) -> None:
        """Hear what an epoch came to."""
        ...

    def on_slide_failed(self, slide_id: str, reason: str) -> None:
        """Hear of a slide that failed."""
        ...

    def on_warning(self, message: str) -> None:
        """Show a warning."""
        ...


def fit(
    learner: Learner,
    bags: Bags,
    training: Sequence[LabelledSlide],
    validation: Sequence[LabelledSlide],
    plan: TrainingSettings,
    checkpoints: CheckpointWriter,
    listener: TrainingListener,
    *,
    progress: RunProgress | None = None,
    stop_signal: Callable[[], int | None] = lambda: None,
) -> RunProgress:
    """Train from where `progress` is to the end; `stop_signal` gives the number of a signal, or None."""
    run = _TrainingLoop(
        learner, bags, training, validation, plan, checkpoints, listener, progress or RunProgress(), stop_signal
    )
    bags.start(run.visits())
    try:
        while not run.progress.finished:
            run.train_epoch()
            run.end_epoch(run.validate())
    finally:
        bags.close()
    return run.progress


class _PendingReport(NamedTuple):
    """A step whose report is still on the device."""

    slide_id: str
    step: int
    tiles: int
    report: StepReport


@dataclass
class _TrainingLoop:
    """One call of `fit`."""

    learner: Learner
    bags: Bags
    training: Sequence[LabelledSlide]
    validation: Sequence[LabelledSlide]
    plan: TrainingSettings
    checkpoints: CheckpointWriter
    listener: TrainingListener
    progress: RunProgress
    stop_signal: Callable[[], int | None]

    def __post_init__(self) -> None:
        # by id: the order of the table must not decide the order of an epoch
        self.training, self.validation = (sorted(each, key=_by_id) for each in (self.training, self.validation))
        self.clock = _EpochTimer(self.learner.model.device, self.bags)
        self.saved_at = time.monotonic()
        self.predictor = Predictor.for_training(self.learner.model, on_retry=self.listener.on_warning)
        self.unread: list[_PendingReport] = []

    def order(self, epoch: int) -> list[LabelledSlide]:
        """Shuffle the training slides, by an address of the epoch."""
        return [self.training[i] for i in make_rng(self.plan.seed, epoch, "order").permutation(len(self.training))]

    def training_visit(self, epoch: int, slide: LabelledSlide) -> BagRequest:
        """Draw tiles anew each epoch."""
        return BagRequest("train", slide.slide_id, self.plan.tiles_per_slide, (self.plan.seed, epoch, slide.slide_id))

    def validation_visit(self, slide: LabelledSlide) -> BagRequest:
        """Draw the same tiles each epoch."""
        address = (self.plan.seed, "validation", slide.slide_id)
        return BagRequest("inference", slide.slide_id, self.plan.validation_tiles, address)

    def visits(self) -> Iterator[BagRequest]:
        """Foretell the rest of the run; it is read ahead, so it cannot depend on what happens."""
        start = self.progress.position
        for epoch in range(self.progress.epoch, self.plan.epochs):
            yield from (self.training_visit(epoch, slide) for slide in self.order(epoch)[start:])
            yield from (self.validation_visit(slide) for slide in self.validation)
            start = 0

    def train_epoch(self) -> None:
        """Visit the training slides that are left in this epoch."""
        epoch, start = self.progress.epoch, self.progress.position
        order = self.order(epoch)
        self.learner.start_epoch(epoch)
        self.listener.on_pass_start("train", epoch, len(order), start)
        self.clock.start()
        for position in range(start, len(order)):
            together = self.learner.optimiser_settings.slides_per_step
            update = (position + 1) % together == 0 or position + 1 == len(order)
            self.train_on(order[position], epoch, update=update)
            self.progress.position = position + 1
            self.clock.add_to(self.progress.sums)
            self.listener.on_slide_end(self.progress)
            if update:  # between updates there are gradients that a checkpoint does not hold
                self.stop_if_too_many_failed()
                self.stop_if_asked()
                if time.monotonic() - self.saved_at > self.plan.checkpoint_every_s:
                    self.save_last()
        self.read_reports()

    def train_on(self, slide: LabelledSlide, epoch: int, *, update: bool) -> None:
        """Learn from one slide, or count it as failed."""
        visit = self.training_visit(epoch, slide)
        try:
            bag = self.augmented(self.bags.read(visit), visit)
            self.progress.sums.tiles_failed += len(bag.missing)
            self.note_missing(slide, bag.missing)
        except SlideFailed as failure:
            self.fail(slide, str(failure))
            if update:
                self.learner.apply_pending()
            return
        targets = self.learner.model.task.encode(list(slide.labels.values()))
        report = self.learner.train_step(bag, targets, update=update, slide_id=slide.slide_id)
        # the report before this one: while the device is busy with this step, the host goes on to the next
        self.read_reports()
        self.unread.append(_PendingReport(slide.slide_id, self.progress.step, bag.tiles, report))
        self.progress.step += 1

    def augmented(self, bag: Bag, visit: BagRequest) -> Bag:
        """Return the bag with its pixels augmented on the device; features stay as they are."""
        if not isinstance(bag.content, torch.Tensor):
            return bag
        tiles = AugmentedTiles(
            bag.content,
            self.plan.augmentation,
            *visit.address,
            device=self.learner.model.device,
            compiled=self.learner.optimiser_settings.compiled,
        )
        return replace(bag, content=tiles)

    def read_reports(self) -> None:
        """Wait for the device, and add what it has learnt from to the epoch's sums."""
        sums = self.progress.sums
        for slide_id, step, tiles, report in self.unread:
            values = [*(getattr(report, name) for name in SUMMED_METRICS), report.checks.all(), *report.logits_C]
            numbers = torch.stack([value.double() for value in values]).tolist()  # one wait for the device
            if not numbers[len(SUMMED_METRICS)]:
                report.checks.raise_if_not_finite(slide_id, step)
            for name, value in zip(SUMMED_METRICS, numbers, strict=False):
                sums.sums[name] += value
            sums.logits[slide_id] = numbers[len(SUMMED_METRICS) + 1 :]
            sums.slides += 1
            sums.tiles += tiles
        self.unread = []

    def note_missing(self, slide: LabelledSlide, missing: Mapping[int, str]) -> None:
        """Add up unreadable tiles over all visits; the slide fails when there are too many of them."""
        if missing:
            known = self.progress.skipped.setdefault(slide.slide_id, SkippedTiles([], ""))
            known.tiles = sorted({*known.tiles, *missing})
            known.reason = next(iter(missing.values()))
        if (known_missing := self.progress.skipped.get(slide.slide_id)) is not None:
            of_tiles = self.bags.tile_count(slide.slide_id)
            check_missing_tiles(len(known_missing.tiles), of_tiles, known_missing.reason)
        self.progress.failed.pop(slide.slide_id, None)  # a drive that was away, and is back

    def fail(self, slide: LabelledSlide, reason: str) -> None:
        """Go on without a slide."""
        if slide.slide_id not in self.progress.failed:
            self.listener.on_slide_failed(slide.slide_id, reason)
        self.progress.failed[slide.slide_id] = reason

    def stop_if_too_many_failed(self) -> None:
        """Save and stop, if more slides have failed than may."""
        if len(self.progress.failed) > self.plan.allow_failures:
            count = len(self.progress.failed)
            self.save_last()
            raise SlidesFailedError(
                f"{count} slide{'s' if count > 1 else ''} failed, and {self.plan.allow_failures or 'none'} may: "
                + "; ".join(f"{slide_id}: {why}" for slide_id, why in list(self.progress.failed.items())[:5]),
                hint=f"Mend or leave them out; or let {count} fail.",
            )

    def validate(self) -> list[Prediction]:
        """Predict the validation slides, each on the same tiles in every epoch."""
        self.learner.model.train(False)
        self.listener.on_pass_start("validate", self.progress.epoch, len(self.validation), 0)
        predictions = []
        for slide in self.validation:
            try:
                encoded = self.predictor.encode_slide(self.bags, self.validation_visit(slide))
                self.note_missing(slide, encoded.missing)
                logits = self.predictor.predict_logits(slide.slide_id, encoded)
                predictions.append(
                    slide.prediction(tuple(logits), tuple(logits.values()), encoded.tiles, len(encoded.missing))
                )
            except SlideFailed as failure:
                self.fail(slide, str(failure))
            self.clock.add_to(self.progress.sums)
            self.listener.on_slide_end(self.progress)
            self.stop_if_too_many_failed()
            self.stop_if_asked()  # a resumed run repeats the whole validation, so it is counted at its end
        self.progress.sums.validation_tiles += sum(each.tiles for each in predictions)
        self.progress.sums.tiles_failed += sum(each.tiles_failed for each in predictions)
        return predictions

    def end_epoch(self, predictions: Sequence[Prediction]) -> None:
        """Write the epoch down, keep it if it is the best, and save."""
        progress = self.progress
        row = build_epoch_row(self.learner, progress, self.training, predictions, self.plan.unit)
        if progress.selected_by is None:  # once for the run: an AUC cannot be compared with a loss
            progress.selected_by = choose_selection_rule(row)
        row["score"] = selection_score(row, progress.selected_by, progress.epoch)
        best = is_better(row["score"], progress.best_score)
        if best:
            progress.best_epoch, progress.best_score = progress.epoch, row["score"]
        progress.history.append(row)
        if best:
            self.checkpoints.save_best(self.learner, progress)
        progress.epoch, progress.position, progress.sums = progress.epoch + 1, 0, EpochSums()
        waited = progress.epoch - 1 - (progress.best_epoch or 0)
        progress.stopped_early = bool(self.plan.patience) and waited >= self.plan.patience
        progress.finished = progress.epoch >= self.plan.epochs or progress.stopped_early
        self.save_last()
        self.listener.on_epoch_end(row, best=best)
        _give_back_memory()

    def save_last(self) -> None:
        """Save, and remember when."""
        self.read_reports()
        self.checkpoints.save_last(self.learner, self.progress)
        self.saved_at = time.monotonic()

    def stop_if_asked(self) -> None:
        """Save and stop, if a signal came."""
        if (number := self.stop_signal()) is not None:
            self.save_last()
            raise Interrupted(number)


def _by_id(slide: LabelledSlide) -> str:
    """Sort by what does not change."""
    return slide.slide_id


def _give_back_memory() -> None:
    """Let the system have what was freed: bags of many sizes leave holes, and glibc would keep them all."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):  # another C library
            ctypes.CDLL("libc.so.6").malloc_trim(0)


class _EpochTimer:
    """Time, waiting and memory since it was last asked."""

    def __init__(self, device: torch.device, bags: Bags) -> None:
        self._device, self._bags = device, bags
        self._at, self._waited = time.monotonic(), 0.0

    def start(self) -> None:
        """Begin an epoch."""
        self._at, self._waited = time.monotonic(), self._bags.waited_s
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)

    def add_to(self, sums: EpochSums) -> None:
        """Add what has passed to an epoch's sums."""
        now, waited = time.monotonic(), self._bags.waited_s
        sums.seconds += now - self._at
        sums.waited_s += waited - self._waited
        self._at, self._waited = now, waited
        sums.peak_bytes = max(sums.peak_bytes, self._peak_bytes())

    def _peak_bytes(self) -> int:
        if self._device.type == "cuda":
            return torch.cuda.max_memory_allocated(self._device)
        if sys.platform == "win32":
            return 0  # it does not say
        import resource

        unit_bytes = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit_bytes
