"""The `Predictor`: logits and tile scores from the tiles or features of a slide, for one model or an ensemble.

Validation, the final predictions of a run, `evaluate`, `predict` and `embed` all use it, so they behave alike:

batching        tiles are encoded `batch` at a time; the aggregator always gets all tiles of a slide at once
out of memory   the batch is halved and encoding is retried; running out of memory with one tile is an error
precision       that of the `InferenceEncoder`s
non-finite      logits that are NaN or infinite fail the slide; in validation they stop the run, as training diverged
failures        a failed slide does not affect the others; up to 5% unreadable tiles per slide are skipped.
                An error of the encoder or the device would affect every slide and ends the command
resume          finished slides are skipped, by `FinishedSlides` or by the files that `finish` wrote
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Lock
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tapfm.contracts import BagOutput, EncodedTiles
from tapfm.encoders.inference import SMALLEST_BATCH, InferenceEncoder, concatenate, default_batch, wrap_encoder
from tapfm.errors import DeviceMemoryError, DiskFullError, InputError, Interrupted, NonFiniteError, TapfmError
from tapfm.inference.bags import Bag, BagRequest, Bags, SlideFailed, check_unreadable_tiles, make_unreadable_error
from tapfm.inference.tile_columns import TileColumn, column_name
from tapfm.runs.model import SlideModel
from tapfm.runtime.device_memory import release_cached_memory, unify_memory_errors
from tapfm.tasks.target import TargetKinds
from tapfm.tiles.reading import SkippedTiles

Item = TypeVar("Item")
TileValues = NDArray[np.float64]  # one value per tile


class InferenceModel(NamedTuple):
    """A model ready for inference. encoder: None for stored features. model: None to compute only features."""

    encoder: InferenceEncoder | None
    model: SlideModel | None


@dataclass(frozen=True)
class EncodedSlide:
    """All readable tiles of a slide, encoded by each model."""

    by_model: tuple[EncodedTiles, ...]
    rows: NDArray[np.int64]  # which of the slide's tiles these are
    unreadable_tiles: Mapping[int, str]  # rows of unreadable tiles, with the reason
    coordinates: Tensor | None  # (K, 2) on the slide, in units of the tile side

    @property
    def tiles(self) -> int:
        return len(self.rows)

    @property
    def skipped(self) -> SkippedTiles:
        """The unreadable tiles, and the reason of the first."""
        return SkippedTiles(sorted(self.unreadable_tiles), next(iter(self.unreadable_tiles.values()), ""))


@dataclass(frozen=True)
class SlideOutput:
    """Logits by target, and named columns with one value per tile."""

    logits: Mapping[str, float]
    logit_constants: Mapping[str, float | None]  # logit = constant + sum of contributions; None if it is not such a sum
    columns: Mapping[str, TileValues]


class Predictor:
    """Runs one model, or the members of an ensemble, on slides; each tile is read only once."""

    def __init__(
        self,
        models: Sequence[InferenceModel],
        *,
        batch: int | None = None,
        on_tiles: Callable[[int], object] = lambda _: None,
        on_retry: Callable[[str], object] = lambda _: None,
    ) -> None:
        """Create a predictor of prepared models.

        batch: tiles encoded at a time; None: chosen by the size of the encoders.
        on_tiles: called with the number of tiles after each part was encoded.
        on_retry: called with a message when memory ran out and the batch was halved.
        """
        self._encoders = [model.encoder for model in models if model.encoder is not None]
        self._models = [model.model for model in models if model.model is not None]
        tile_sizes = sorted({encoder.encoder.tile_px for encoder in self._encoders})
        if len(tile_sizes) > 1:
            raise InputError(
                f"The members of the ensemble take tiles of different sizes: {', '.join(map(str, tile_sizes))} px.",
                hint="Predict with each member separately.",
            )
        self.tile_px = tile_sizes[0] if tile_sizes else None  # None: stored features
        self.device = self._encoders[0].device if self._encoders else self._models[0].device
        self.targets: TargetKinds = self._models[0].task.target_kinds if self._models else {}
        self.batch = batch or min((default_batch(each.encoder) for each in self._encoders), default=1)
        self._on_tiles, self._on_retry = on_tiles, on_retry

    @classmethod
    def for_training(cls, model: SlideModel, on_retry: Callable[[str], object] = lambda _: None) -> Predictor:
        """Return a predictor for a model in training; its small batch leaves memory for the optimiser."""
        encoder = None if model.encoder is None else wrap_encoder(model.encoder, model.compute_dtype)
        return cls([InferenceModel(encoder, model)], batch=SMALLEST_BATCH, on_retry=on_retry)

    def run(
        self,
        slide_ids: Iterable[str],
        bags: Bags,
        finish: Callable[[str, EncodedSlide], object],
        *,
        on_slide: Callable[[str, EncodedSlide | SlideFailed], object] = lambda *_: None,
        stop_signal: Callable[[], int | None] = lambda: None,
    ) -> dict[str, SlideFailed]:
        """Encode all tiles of each slide and pass them to `finish`, which predicts and saves; return the failures.

        The next slides are prefetched meanwhile. `slide_ids` may be an iterator; an id is taken just before its slide
        is read. `on_slide` is called after each slide. Raises Interrupted if `stop_signal` returns the number of a
        signal, and OSError if `finish` cannot write.
        """
        failed: dict[str, SlideFailed] = {}
        requests, prefetched = _tee(BagRequest("inference", slide_id) for slide_id in slide_ids)
        bags.start(prefetched)
        try:
            for request in requests:
                result = self._finish_slide(bags, request, finish)
                if isinstance(result, SlideFailed):
                    failed[request.slide_id] = result
                    bags.skip_rest()
                    release_cached_memory(self.device)
                on_slide(request.slide_id, result)
                if (number := stop_signal()) is not None:
                    raise Interrupted(number)
        finally:
            bags.close()
        return failed

    def _finish_slide(
        self, bags: Bags, request: BagRequest, finish: Callable[[str, EncodedSlide], object]
    ) -> EncodedSlide | SlideFailed:
        try:
            slide = self.encode_slide(bags, request)
            check_unreadable_tiles(
                len(slide.unreadable_tiles), slide.tiles + len(slide.unreadable_tiles), slide.skipped.reason
            )
            with _convert_slide_errors():
                finish(request.slide_id, slide)
        except SlideFailed as failure:
            # a new exception: the traceback of this one references the features of the slide
            return SlideFailed(failure.reason, failure.hint, failure.stage)
        return slide

    def encode_slide(self, bags: Bags, request: BagRequest) -> EncodedSlide:
        """Read and encode the tiles of a bag, part by part. Raises SlideFailed if none of them can be read."""
        rows: list[NDArray[np.int64]] = []
        unreadable: dict[int, str] = {}
        coordinates: list[Tensor] = []
        encoded: list[list[EncodedTiles]] = []
        for part in bags.read_parts(request):
            rows.append(part.rows)
            unreadable |= part.unreadable_tiles
            if part.coordinates is not None:
                coordinates.append(part.coordinates)
            if part.tiles:
                encoded.append(self._encode_part(part))
        if not encoded:
            raise make_unreadable_error(tuple(unreadable.values()))
        return EncodedSlide(
            tuple(concatenate(parts) for parts in zip(*encoded, strict=True)),
            np.concatenate(rows),
            unreadable,
            torch.cat(coordinates) if coordinates else None,
        )

    def predict_logits(self, slide_id: str, slide: EncodedSlide) -> dict[str, float]:
        """Return the logits of a slide by target; for an ensemble, of the mean probabilities. Raises NonFiniteError."""
        by_model = [self._read_logits(slide_id, output) for output, _ in self._aggregate(slide)]
        return self._combine_logits(by_model)

    def predict(self, slide_id: str, slide: EncodedSlide) -> SlideOutput:
        """Return logits, their constants and tile columns of a slide, combined over members. Raises NonFiniteError."""
        outputs = self.predict_each(slide_id, slide)
        if len(outputs) == 1:
            return outputs[0]
        shared = [name for name in outputs[0].columns if all(name in each.columns for each in outputs)]
        return SlideOutput(
            self._combine_logits([each.logits for each in outputs]),
            dict.fromkeys(self.targets),  # a mean of probabilities is not a sum over tiles
            {name: np.mean([each.columns[name] for each in outputs], axis=0) for name in shared},
        )

    @torch.no_grad()
    def predict_each(self, slide_id: str, slide: EncodedSlide) -> list[SlideOutput]:
        """Return logits, their constants and tile columns of a slide by each model. Raises NonFiniteError."""
        outputs = []
        for output, raw_attention in self._aggregate(slide):
            logits = self._read_logits(slide_id, output)
            columns = {"attention": _as_values(raw_attention)} | _collect_tile_columns(output, self.targets)
            constants: dict[str, float | None] = dict.fromkeys(self.targets)
            if output.contributions is not None:
                contributions = output.contributions()
                columns |= _columns_by_target("contribution", contributions.per_tile_CK, self.targets)
                constants |= dict(zip(self.targets, contributions.constant_C.tolist(), strict=True))
            outputs.append(SlideOutput(logits, constants, columns))
        return outputs

    def _encode_part(self, part: Bag) -> list[EncodedTiles]:
        if isinstance(part.content, EncodedTiles):
            return [part.content] * len(self._models)
        assert isinstance(part.content, Tensor)
        while True:
            try:
                encoded = [encoder.encode(part.content, self.batch) for encoder in self._encoders]
            except torch.OutOfMemoryError as error:
                if self.batch == 1:
                    raise DeviceMemoryError(
                        f"{self.device} is out of memory with one tile at a time.",
                        hint="Free memory on it, or use another device: --device cpu. Finished work is saved.",
                    ) from error
            else:
                break
            before, self.batch = self.batch, self.batch // 2
            release_cached_memory(self.device)
            self._on_retry(f"Out of memory at {before} tiles per batch; retrying with {self.batch}.")
        self._on_tiles(part.tiles)
        return encoded

    def _aggregate(self, slide: EncodedSlide) -> Iterator[tuple[BagOutput, Tensor]]:
        """Yield the output of the aggregator of each model, and its raw attention."""
        for model, encoded in zip(self._models, slide.by_model, strict=True):
            aggregator = model.aggregator_for(slide.coordinates)
            with torch.no_grad():
                output = aggregator(*encoded)
            yield output, encoded.r_K

    def _read_logits(self, slide_id: str, output: BagOutput) -> dict[str, float]:
        """Return the logits by target. Raises NonFiniteError."""
        logits = output.logits_C.double().tolist()
        if not all(map(math.isfinite, logits)):
            raise NonFiniteError(
                f"Slide '{slide_id}': the logits are not finite: {logits}.",
                hint="Lower the learning rates or enable gradient clipping in training. Instead of float16, use "
                "bfloat16 or float32.",
            )
        return dict(zip(self.targets, logits, strict=True))

    def _combine_logits(self, by_model: Sequence[Mapping[str, float]]) -> dict[str, float]:
        if len(by_model) == 1:
            return dict(by_model[0])
        return {
            target: kind.combine_logits([each[target] for each in by_model]) for target, kind in self.targets.items()
        }


def _tee(items: Iterable[Item]) -> tuple[Iterator[Item], Iterator[Item]]:
    """Return two iterators over the same items, for two threads; `itertools.tee` is not thread-safe.

    An error raised while iterating is raised in both.
    """
    source, lock, errors = iter(items), Lock(), list[Exception]()
    queues: tuple[deque[Item], deque[Item]] = (deque(), deque())

    def take(own: deque[Item], other: deque[Item]) -> Iterator[Item]:
        while True:
            with lock:
                if not own:
                    try:
                        item = next(source)
                    except StopIteration:
                        if errors:
                            raise errors[0] from None
                        return
                    except Exception as error:
                        errors.append(error)
                        raise
                    own.append(item)
                    other.append(item)
                item = own.popleft()
            yield item

    return take(*queues), take(*reversed(queues))


@contextmanager
def _convert_slide_errors() -> Iterator[None]:
    """Convert errors of one slide to SlideFailed; errors that would affect every slide are not converted."""
    try:
        with unify_memory_errors():
            yield
    except (SlideFailed, Interrupted, OSError, DiskFullError, DeviceMemoryError, torch.AcceleratorError):
        raise
    except NonFiniteError as error:
        raise SlideFailed(error.message, error.hint, "predict") from error
    except TapfmError as error:
        raise SlideFailed(error.message, error.hint) from error
    except torch.OutOfMemoryError as error:
        raise SlideFailed(
            "out of memory in the aggregator, which needs all tiles of the slide at once",
            "Use a device with more memory: --device cpu",
            "predict",
        ) from error
    except Exception as error:  # a bug in tapfm must not stop the other slides
        raise SlideFailed(
            f"unexpected {type(error).__name__}: {error}", "Please report this bug.", "predict"
        ) from error


def _collect_tile_columns(output: BagOutput, targets: Collection[str]) -> dict[str, TileValues]:
    """Return weights and scores of the tiles as columns; values shared by all targets are one column."""
    columns: dict[str, TileValues] = {}
    kinds: tuple[tuple[TileColumn, Tensor | None], ...] = (
        ("weight", output.tile_weights),
        ("score", output.tile_scores),
    )
    for kind, values in kinds:
        if values is not None and (values.ndim == 1 or len(targets) == 1):
            columns[column_name(kind)] = _as_values(values.reshape(-1))
        elif values is not None:
            columns |= _columns_by_target(kind, values, targets)
    return columns


def _columns_by_target(kind: TileColumn, values_CK: Tensor, targets: Collection[str]) -> dict[str, TileValues]:
    return {column_name(kind, target): _as_values(row) for target, row in zip(targets, values_CK, strict=True)}


def _as_values(values: Tensor) -> TileValues:
    return values.double().cpu().numpy()
