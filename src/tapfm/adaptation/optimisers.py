"""AdamW with low-memory storage options, and its learning rate schedule: cosine annealing with warm restarts.

The optimiser updates the parameters shard by shard, see shards.py. With offloading, master weights and moments are in
host memory, and one shard at a time is copied to the device. A step never synchronises with the device: learning
rate, step count, clipping factor and the check for finite gradients are tensors on it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from tapfm.adaptation.moments import (
    BLOCK_SIZE,
    MomentFormat,
    hash_int32,
    moment_bytes,
    read_moments,
    store_moments,
    zero_moments,
)
from tapfm.adaptation.shards import (
    ParameterSlice,
    Shard,
    group_parameters,
    layout_fingerprint,
    master_dtype,
    take_flat_gradient,
)
from tapfm.errors import CheckpointError

_CPU_PIECE_ELEMENTS = 2**16
_FIRST_DECAY, _SECOND_DECAY, _EPSILON = 0.9, 0.999, 1e-8
_STEP, _LAYOUT = "step", "layout"  # checkpoint keys, in addition to the moments of each shard
_FORMAT_BY_DTYPE: dict[torch.dtype, MomentFormat] = {
    torch.float64: "float32",
    torch.float32: "float32",
    torch.bfloat16: "bfloat16",
    torch.uint8: "int8",
}
_STRIDE = 0x9E3779B1 - 2**32  # so that steps and shards use different random bits


@dataclass(frozen=True)
class LearningRateSchedule:
    """Cosine annealing with warm restarts.

    The first cycle has `first_cycle` epochs. Each further cycle is `factor` times as long as the one before.
    """

    first_cycle: int = 10
    factor: int = 2

    def rate(self, epoch: int, highest: float, lowest: float = 0.0) -> float:
        """Return the learning rate of an epoch, counted from 0. There is no state to save."""
        length, position = self.first_cycle, epoch
        while position >= length:
            position -= length
            length *= self.factor
        return lowest + (highest - lowest) * (1 + math.cos(math.pi * position / length)) / 2


class AdamW:
    """AdamW with betas 0.9 and 0.999. The parameters are moved to `device` and become views of the shards.

    compute_dtype: dtype of the parameters; float32 master weights are stored if it is lower. None: unchanged.
    moments: storage format of the moments.
    offload: store master weights and moments in host memory.
    decay_all: apply weight decay to biases and norms as well.

    A parameter without a gradient is treated as if its gradient were 0.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        *,
        device: torch.device,
        weight_decay: float,
        decay_all: bool,
        compute_dtype: torch.dtype | None = None,
        moments: MomentFormat = "float32",
        offload: bool = False,
        compiled: bool = False,
    ) -> None:
        self.moment_format, self.offload, self.weight_decay = moments, offload, weight_decay
        self._update = torch.compile(_update_shard, dynamic=True) if compiled else _update_shard
        self._rate = torch.zeros((), dtype=torch.float64, device=device)
        self.device = self._rate.device  # with an index: cuda becomes cuda:0
        self._step = torch.zeros((), dtype=torch.int64, device=device)
        self._true = torch.ones((), dtype=torch.bool, device=device)
        # biases and norms are vectors
        decayed = {name: p for name, p in parameters.items() if p.ndim > 1 or decay_all}
        others = {name: p for name, p in parameters.items() if name not in decayed}
        self.shards = tuple(
            self._build_shard(slices, has_weight_decay=named is decayed, compute_dtype=compute_dtype)
            for named in (decayed, others)
            for slices in group_parameters(named)
        )
        self._shard_indices = torch.arange(len(self.shards), dtype=torch.int32, device=device)
        self._layout = layout_fingerprint(self.shards)

    def _build_shard(
        self, slices: tuple[ParameterSlice, ...], *, has_weight_decay: bool, compute_dtype: torch.dtype | None
    ) -> Shard:
        """Copy parameters into a new shard and make them views of it."""
        blocks = -(-(slices[-1].start + slices[-1].parameter.numel()) // BLOCK_SIZE)
        original_dtype = slices[0].parameter.dtype
        full_dtype, working_dtype = master_dtype(original_dtype), compute_dtype or original_dtype
        storage = torch.device("cpu") if self.offload else self.device
        pinned = self.offload and self.device.type == "cuda"
        working = torch.zeros(blocks, BLOCK_SIZE, dtype=working_dtype, device=self.device)
        master = None
        if working_dtype != full_dtype:
            master = torch.zeros(blocks, BLOCK_SIZE, dtype=full_dtype, device=storage, pin_memory=pinned)
        for part in slices:
            for flat in (working, master):
                if flat is not None:
                    part.view_in(flat).copy_(part.parameter.data)
            part.parameter.grad = None
            part.parameter.data = part.view_in(working)
        moments = zero_moments(self.moment_format, blocks, full_dtype, storage, pinned=pinned)
        return Shard(slices, has_weight_decay, working, master, moments)

    def set_learning_rate(self, rate: float) -> None:
        self._rate.fill_(rate)

    def gradients(self) -> list[Tensor]:
        """Return all gradients that the next step will use."""
        return [p.parameter.grad for shard in self.shards for p in shard.slices if p.parameter.grad is not None]

    @torch.no_grad()
    def step(self, *, factor: Tensor | float = 1.0, finite: Tensor | None = None) -> None:
        """Update with the gradients times `factor`, and clear them. If `finite` is False, nothing else changes."""
        finite = self._true if finite is None else finite
        self._step += finite
        seeds = hash_int32(self._step.to(torch.int32) * _STRIDE + self._shard_indices)
        scalars = self._compute_scalars(factor)
        for shard, seed in zip(self.shards, seeds, strict=True):
            self._step_shard(shard, scalars[shard.full_precision.dtype, shard.has_weight_decay], finite, seed)

    def _step_shard(self, shard: Shard, scalars: tuple[Tensor, ...], finite: Tensor, seed: Tensor) -> None:
        """Update one shard. Offloaded master weights and moments are copied to the device and back."""
        stored = dict(self._stored_tensors(shard))
        on_device = {name: t.to(self.device, non_blocking=True) for name, t in stored.items()}
        master = on_device.pop("master", None)
        gradient = take_flat_gradient(shard)
        if self.device.type == "cpu":
            self._update_on_cpu(gradient, shard.working, master, on_device, scalars, finite, seed)
            return
        self._update(gradient, shard.working, master, on_device, self.moment_format, scalars, finite, seed)
        if self.offload:
            for name, updated in {"master": master, **on_device}.items():
                if updated is not None:
                    stored[name].copy_(updated, non_blocking=True)

    def _update_on_cpu(
        self,
        gradient: Tensor,
        working: Tensor,
        master: Tensor | None,
        moments: dict[str, Tensor],
        scalars: tuple[Tensor, ...],
        finite: Tensor,
        seed: Tensor,
    ) -> None:
        """Update a shard in pieces that fit into the CPU's cache. Reading `finite` costs nothing on the CPU."""
        if not finite:
            return
        piece = _CPU_PIECE_ELEMENTS // BLOCK_SIZE
        for start in range(0, len(working), piece):
            rows = slice(start, start + piece)
            self._update(
                gradient[rows],
                working[rows],
                None if master is None else master[rows],
                {name: stored[rows] for name, stored in moments.items()},
                self.moment_format,
                scalars,
                None,
                seed + start * BLOCK_SIZE,
            )

    def _compute_scalars(self, factor: Tensor | float) -> dict[tuple[torch.dtype, bool], tuple[Tensor, ...]]:
        """Return the factors of a step, computed in float64: in float32, 1 - 0.999 has only four correct digits."""
        step = self._step.to(torch.float64)
        step_size = self._rate / (1 - _FIRST_DECAY**step)
        inverse_root_bias = (1 - _SECOND_DECAY**step).rsqrt()  # a factor, to save one division per element
        scale = torch.ones_like(self._rate) * factor
        exact = {
            decay: (scale, step_size, inverse_root_bias, 1 - self._rate * (self.weight_decay if decay else 0.0))
            for decay in (False, True)
        }
        kinds = {(shard.full_precision.dtype, shard.has_weight_decay) for shard in self.shards}
        return {(dtype, decay): tuple(n.to(dtype) for n in exact[decay]) for dtype, decay in kinds}

    def master_weights(self) -> dict[str, Tensor]:
        """Return the full-precision weights by name, as views that the next step changes."""
        self._synchronise()
        return {part.name: part.view_in(shard.full_precision) for shard in self.shards for part in shard.slices}

    @torch.no_grad()
    def load_master_weights(self, values: Mapping[str, Tensor]) -> None:
        """Load full-precision weights and update the working weights. Raise `CheckpointError` if they do not match."""
        masters = self.master_weights()
        for name, master in masters.items():
            if name not in values or values[name].shape != master.shape:
                raise CheckpointError(
                    f"The checkpoint does not match the model: {name} is missing or has a different shape.",
                    hint="Use the encoder, aggregator and adaptation.scope that the checkpoint was saved with.",
                )
        for name, master in masters.items():
            master.copy_(values[name])
        for shard in self.shards:
            if shard.master is not None:
                shard.working.copy_(shard.master)

    def state(self) -> dict[str, Tensor]:
        """Return the moments by shard number (`0007/first`), the step count, and `layout`, without copying them."""
        self._synchronise()
        return dict(self._named_moments()) | {_STEP: self._step, _LAYOUT: self._layout}

    @torch.no_grad()
    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Load a state. Raise `CheckpointError` if the moment format or the parameters differ."""
        self._synchronise()
        saved_format = _detect_format(state)
        if saved_format is not None and saved_format != self.moment_format:
            raise CheckpointError(
                f"The checkpoint has {saved_format} moments, but the optimiser uses {self.moment_format}.",
                hint=f'Resume with optimiser.moments = "{saved_format}", or start a new run.',
            )
        moments = dict(self._named_moments())
        mismatches = [name for name, stored in moments.items() if not _same_shape_and_dtype(state.get(name), stored)]
        if mismatches or _STEP not in state or not _equal(state.get(_LAYOUT), self._layout):
            raise CheckpointError(
                "The moments in the checkpoint belong to other parameters or have a different layout.",
                hint="Use the encoder, aggregator and adaptation.scope that the checkpoint was saved with. "
                "If another version of tapfm wrote it, start a new run.",
            )
        for name, stored in moments.items():
            stored.copy_(state[name])
        self._step.copy_(state[_STEP])

    def _named_moments(self) -> Iterator[tuple[str, Tensor]]:
        for index, shard in enumerate(self.shards):
            for name, stored in shard.moments.items():
                yield f"{index:04d}/{name}", stored

    def _stored_tensors(self, shard: Shard) -> Iterator[tuple[str, Tensor]]:
        if shard.master is not None:
            yield "master", shard.master
        yield from shard.moments.items()

    def _synchronise(self) -> None:
        """Wait until copies to the host are complete."""
        if self.offload and self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def _update_shard(
    gradient: Tensor,
    working: Tensor,
    master: Tensor | None,
    moments: dict[str, Tensor],
    moment_format: MomentFormat,
    scalars: tuple[Tensor, ...],
    finite: Tensor | None,
    seed: Tensor,
) -> None:
    """Run one AdamW update in place, unless `finite` is False (None: the gradient is known to be finite).

    The tensors have shape (blocks, 256) or (blocks, 1), except the 0-dim `scalars`, `finite` and `seed`.
    """
    factor, step_size, inverse_root_bias, decay_factor = scalars
    old = working if master is None else master
    gradient = gradient.to(old.dtype) * factor
    first, second = read_moments(moments, moment_format, old.dtype)
    first = first.lerp(gradient, 1 - _FIRST_DECAY)
    second = (second * _SECOND_DECAY).addcmul(gradient, gradient, value=1 - _SECOND_DECAY)
    new = old * decay_factor - step_size * first / (second.sqrt() * inverse_root_bias + _EPSILON)
    new = new if finite is None else torch.where(finite, new, old)
    for name, stored in store_moments(first, second, moment_format, seed).items():
        moments[name].copy_(stored if finite is None else torch.where(finite, stored, moments[name]))
    if master is not None:
        master.copy_(new)
    working.copy_(new)


def make_optimiser(
    parameters: Mapping[str, nn.Parameter] | Iterable[tuple[str, nn.Parameter]],
    *,
    weight_decay: float,
    decay_all: bool,
    device: torch.device | None = None,
    compute_dtype: torch.dtype | None = None,
    moments: MomentFormat = "float32",
    offload: bool = False,
    compiled: bool = False,
) -> AdamW | None:
    """Return AdamW for the trainable parameters, or None if there are none. `device` None: that of the parameters."""
    trainable = {name: parameter for name, parameter in dict(parameters).items() if parameter.requires_grad}
    if not trainable:
        return None
    return AdamW(
        trainable,
        device=next(iter(trainable.values())).device if device is None else device,
        weight_decay=weight_decay,
        decay_all=decay_all,
        compute_dtype=compute_dtype,
        moments=moments,
        offload=offload,
        compiled=compiled,
    )


def set_learning_rate(optimiser: AdamW | None, rate: float) -> None:
    if optimiser is not None:
        optimiser.set_learning_rate(rate)


@torch.no_grad()
def step_optimiser(
    optimiser: AdamW | None,
    finite: Tensor | None = None,
    *,
    slides: int,
    clip_norm: float,
    loss_scale: Tensor | None = None,
) -> None:
    """Update with the mean gradient of `slides` slides, unscaled and clipped to `clip_norm` (0: no clipping).

    If `finite` is False, the gradients are cleared and nothing else changes. None: they are known to be finite.
    """
    if optimiser is None:
        return
    factor = torch.full((), 1 / slides, dtype=torch.float64, device=optimiser.device)
    if loss_scale is not None:
        factor = factor / loss_scale
    if clip_norm and (gradients := optimiser.gradients()):
        norm = _total_norm(gradients) * factor
        factor = factor * (clip_norm / (norm + 1e-6)).clamp(max=1.0)
    optimiser.step(factor=factor, finite=finite)


def _total_norm(gradients: list[Tensor]) -> Tensor:
    """Return the total norm of all gradients, computed in at least float32."""
    dtype = max((master_dtype(gradient.dtype) for gradient in gradients), key=lambda each: each.itemsize)
    return torch.stack(torch._foreach_norm(gradients, 2, dtype=dtype)).norm()


def bytes_per_parameter(*, low_precision: bool, moments: MomentFormat, offload: bool) -> dict[str, float]:
    """Return the bytes of one trainable parameter on the device, without its gradient."""
    return {
        "weights": 2.0 if low_precision else 4.0,
        "master weights": 4.0 if low_precision and not offload else 0.0,
        "moments": 0.0 if offload else moment_bytes(moments),
    }


def _detect_format(state: Mapping[str, Tensor]) -> MomentFormat | None:
    """Return the format of the moments in a checkpoint."""
    first = state.get("0000/first")
    return None if first is None else _FORMAT_BY_DTYPE.get(first.dtype)


def _same_shape_and_dtype(saved: Tensor | None, stored: Tensor) -> bool:
    return saved is not None and saved.shape == stored.shape and saved.dtype == stored.dtype


def _equal(saved: Tensor | None, expected: Tensor) -> bool:
    return saved is not None and torch.equal(saved.cpu(), expected)
