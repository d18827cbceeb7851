"""AdamW in the forms that cards of all sizes need, and its learning rates: cosine annealing with warm restarts.

It updates one shard of the parameters after the other, see shards.py. Offloaded, masters and moments live in the host's
memory and visit the device a shard at a time. Nothing in a step waits for the device: learning rate, step count,
clipping and whether the gradient is finite at all are tensors on it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from tapfm.adaptation.moments import (
    BLOCK,
    MomentFormat,
    moment_bytes,
    no_moments,
    read_moments,
    scrambled,
    store_moments,
)
from tapfm.adaptation.shards import ParameterSlice, Shard, flat_gradient, layout_of, master_dtype, shard_places
from tapfm.errors import CheckpointError

_CPU_PIECE_ELEMENTS = 2**16
_FIRST_DECAY, _SECOND_DECAY, _EPSILON = 0.9, 0.999, 1e-8
_STEP, _LAYOUT = "step", "layout"  # in a checkpoint, beside the moments of each shard
_FORMS: dict[torch.dtype, MomentFormat] = {
    torch.float64: "float32",
    torch.float32: "float32",
    torch.bfloat16: "bfloat16",
    torch.uint8: "int8",
}
_STRIDE = 0x9E3779B1 - 2**32  # far apart in int32, so that steps and shards do not share random numbers


@dataclass(frozen=True)
class LearningRateSchedule:
    """Cosine annealing with warm restarts: the first cycle has `first_cycle` epochs, each next one `factor` times."""

    first_cycle: int = 10
    factor: int = 2

    def rate(self, epoch: int, highest: float, lowest: float = 0.0) -> float:
        """Give the learning rate of an epoch, counted from 0; a function of the epoch, so there is no state to save."""
        length, into = self.first_cycle, epoch
        while into >= length:
            into -= length
            length *= self.factor
        return lowest + (highest - lowest) * (1 + math.cos(math.pi * into / length)) / 2


class AdamW:
    """Decoupled weight decay, betas 0.9 and 0.999; parameters become views of its shards and live on `device`.

    A trainable parameter without a gradient counts as one whose gradient is 0.
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
        self.form, self.offload, self.weight_decay = moments, offload, weight_decay
        self._update = torch.compile(_update_shard, dynamic=True) if compiled else _update_shard
        self._rate = torch.zeros((), dtype=torch.float64, device=device)
        self.device = self._rate.device  # cuda:0, where cuda was given
        self._step = torch.zeros((), dtype=torch.int64, device=device)
        self._always = torch.ones((), dtype=torch.bool, device=device)
        # biases and norms are vectors: decayed too, or not
        decayed = {name: p for name, p in parameters.items() if p.ndim > 1 or decay_all}
        others = {name: p for name, p in parameters.items() if name not in decayed}
        self.shards = tuple(
            self._lay(places, decayed=named is decayed, compute_dtype=compute_dtype)
            for named in (decayed, others)
            for places in shard_places(named)
        )
        self._numbers = torch.arange(len(self.shards), dtype=torch.int32, device=device)
        self._layout = layout_of(self.shards)

    def _lay(self, places: tuple[ParameterSlice, ...], *, decayed: bool, compute_dtype: torch.dtype | None) -> Shard:
        """Copy parameters into a shard, and let them be views of it."""
        blocks = -(-(places[-1].start + places[-1].parameter.numel()) // BLOCK)
        own = places[0].parameter.dtype
        precise, computed = master_dtype(own), compute_dtype or own
        home = torch.device("cpu") if self.offload else self.device
        pinned = self.offload and self.device.type == "cuda"
        working = torch.zeros(blocks, BLOCK, dtype=computed, device=self.device)
        master = None
        if computed != precise:
            master = torch.zeros(blocks, BLOCK, dtype=precise, device=home, pin_memory=pinned)
        for place in places:
            for flat in (working, master):
                if flat is not None:
                    place.of(flat).copy_(place.parameter.data)
            place.parameter.grad = None
            place.parameter.data = place.of(working)
        return Shard(places, decayed, working, master, no_moments(self.form, blocks, precise, home, pinned=pinned))

    def set_rate(self, rate: float) -> None:
        """Set the learning rate."""
        self._rate.fill_(rate)

    def gradients(self) -> list[Tensor]:
        """Give the gradients that the next step takes."""
        return [p.parameter.grad for shard in self.shards for p in shard.places if p.parameter.grad is not None]

    @torch.no_grad()
    def step(self, *, factor: Tensor | float = 1.0, finite: Tensor | None = None) -> None:
        """Update with the gradients times `factor`, and forget them; where `finite` is False nothing else changes."""
        finite = self._always if finite is None else finite
        self._step += finite
        seeds = scrambled(self._step.to(torch.int32) * _STRIDE + self._numbers)
        scalars = self._scalars(factor)
        for shard, seed in zip(self.shards, seeds, strict=True):
            self._step_shard(shard, scalars[shard.precise.dtype, shard.decayed], finite, seed)

    def _step_shard(self, shard: Shard, scalars: tuple[Tensor, ...], finite: Tensor, seed: Tensor) -> None:
        """Update a shard; what visits the device for that has left when the next one comes."""
        kept = dict(self._kept(shard))
        here = {name: t.to(self.device, non_blocking=True) for name, t in kept.items()}
        master = here.pop("master", None)
        gradient = flat_gradient(shard)
        if self.device.type == "cpu":
            self._update_in_pieces(gradient, shard.working, master, here, scalars, finite, seed)
            return
        self._update(gradient, shard.working, master, here, self.form, scalars, finite, seed)
        if self.offload:
            for name, visitor in {"master": master, **here}.items():
                if visitor is not None:
                    kept[name].copy_(visitor, non_blocking=True)

    def _update_in_pieces(
        self,
        gradient: Tensor,
        working: Tensor,
        master: Tensor | None,
        moments: dict[str, Tensor],
        scalars: tuple[Tensor, ...],
        finite: Tensor,
        seed: Tensor,
    ) -> None:
        """Update a shard on the CPU, whose caches hold what is in between of a piece; looking costs nothing there."""
        if not finite:
            return
        piece = _CPU_PIECE_ELEMENTS // BLOCK
        for start in range(0, len(working), piece):
            rows = slice(start, start + piece)
            self._update(
                gradient[rows],
                working[rows],
                None if master is None else master[rows],
                {name: kept[rows] for name, kept in moments.items()},
                self.form,
                scalars,
                None,
                seed + start * BLOCK,
            )

    def _scalars(self, factor: Tensor | float) -> dict[tuple[torch.dtype, bool], tuple[Tensor, ...]]:
        """Compute the numbers of a step on the device, in float64: 1 - 0.999 has four digits in float32."""
        step = self._step.to(torch.float64)
        step_size = self._rate / (1 - _FIRST_DECAY**step)
        per_root_of_bias = (1 - _SECOND_DECAY**step).rsqrt()  # a division by it would be one more of each element
        scale = torch.ones_like(self._rate) * factor
        exact = {
            decayed: (scale, step_size, per_root_of_bias, 1 - self._rate * (self.weight_decay if decayed else 0.0))
            for decayed in (False, True)
        }
        kinds = {(shard.precise.dtype, shard.decayed) for shard in self.shards}
        return {(dtype, decayed): tuple(n.to(dtype) for n in exact[decayed]) for dtype, decayed in kinds}

    def masters(self) -> dict[str, Tensor]:
        """Give the full-precision value of every parameter: views, which the next step changes."""
        self._settle()
        return {place.name: place.of(shard.precise) for shard in self.shards for place in shard.places}

    @torch.no_grad()
    def load_masters(self, values: Mapping[str, Tensor]) -> None:
        """Set parameters, in full precision and in the one that is computed with; refuse what does not fit."""
        masters = self.masters()
        for name, master in masters.items():
            if name not in values or values[name].shape != master.shape:
                raise CheckpointError(
                    f"The checkpoint does not fit: {name} has another shape, or is missing.",
                    hint="Was it made with another encoder, aggregator or scope?",
                )
        for name, master in masters.items():
            master.copy_(values[name])
        for shard in self.shards:
            if shard.master is not None:
                shard.working.copy_(shard.master)

    def state(self) -> dict[str, Tensor]:
        """Give the moments and the count of steps as they are kept, no copies: `0007/first`, ..., `step`, `layout`."""
        self._settle()
        return dict(self._moments()) | {_STEP: self._step, _LAYOUT: self._layout}

    @torch.no_grad()
    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Put back what `state` gave; refuse another form of moments, or other parameters."""
        self._settle()
        given = _form_of(state)
        if given is not None and given != self.form:
            raise CheckpointError(
                f"The checkpoint's moments are {given}, and the optimiser's are {self.form}.",
                hint=f'Go on with optimiser.moments = "{given}", or begin anew.',
            )
        moments = dict(self._moments())
        misfits = [name for name, kept in moments.items() if not _same_kind(state.get(name), kept)]
        if misfits or _STEP not in state or not _same_tensor(state.get(_LAYOUT), self._layout):
            raise CheckpointError(
                "The checkpoint's moments are those of other parameters, or lie otherwise.",
                hint="Was it made with another encoder, aggregator or scope? By another version of tapfm: begin anew.",
            )
        for name, kept in moments.items():
            kept.copy_(state[name])
        self._step.copy_(state[_STEP])

    def _moments(self) -> Iterator[tuple[str, Tensor]]:
        for number, shard in enumerate(self.shards):
            for name, kept in shard.moments.items():
                yield f"{number:04d}/{name}", kept

    def _kept(self, shard: Shard) -> Iterator[tuple[str, Tensor]]:
        if shard.master is not None:
            yield "master", shard.master
        yield from shard.moments.items()

    def _settle(self) -> None:
        """Wait for what is on its way to the host."""
        if self.offload and self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def _update_shard(
    gradient: Tensor,
    working: Tensor,
    master: Tensor | None,
    moments: dict[str, Tensor],
    form: MomentFormat,
    scalars: tuple[Tensor, ...],
    finite: Tensor | None,
    seed: Tensor,
) -> None:
    """Take AdamW's step in place, unless the gradient is not `finite` (None: it is).

    Every tensor but the 0-dim ones has shape (blocks, 256), or (blocks, 1).
    """
    factor, step_size, per_root_of_bias, keep = scalars
    old = working if master is None else master
    gradient = gradient.to(old.dtype) * factor
    first, second = read_moments(moments, form, old.dtype)
    first = first.lerp(gradient, 1 - _FIRST_DECAY)
    second = (second * _SECOND_DECAY).addcmul(gradient, gradient, value=1 - _SECOND_DECAY)
    new = old * keep - step_size * first / (second.sqrt() * per_root_of_bias + _EPSILON)
    new = new if finite is None else torch.where(finite, new, old)
    for name, kept in store_moments(first, second, form, seed).items():
        moments[name].copy_(kept if finite is None else torch.where(finite, kept, moments[name]))
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
    """Make AdamW for what is trainable, on `device` (None: where it is); nothing where nothing is."""
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


def set_rate(optimiser: AdamW | None, rate: float) -> None:
    """Set the learning rate, where there is something to learn."""
    if optimiser is not None:
        optimiser.set_rate(rate)


@torch.no_grad()
def step_optimiser(
    optimiser: AdamW | None,
    finite: Tensor | None = None,
    *,
    slides: int,
    clip_norm: float,
    loss_scale: Tensor | None = None,
) -> None:
    """Step with the mean gradient of `slides`, of an unscaled loss, clipped to `clip_norm` (0: not at all).

    Where `finite` is False nothing changes, but gradients are forgotten; None: they are known to be finite.
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
    """Give the norm of all gradients together, summed up in float32 or better."""
    dtype = max((master_dtype(gradient.dtype) for gradient in gradients), key=lambda each: each.itemsize)
    return torch.stack(torch._foreach_norm(gradients, 2, dtype=dtype)).norm()


def bytes_by_part(*, lowered: bool, moments: MomentFormat, offload: bool) -> dict[str, float]:
    """Say what a trainable parameter takes on the device all the time; its gradient takes as much as it, or 4."""
    return {
        "weights": 2.0 if lowered else 4.0,
        "masters": 4.0 if lowered and not offload else 0.0,
        "moments": 0.0 if offload else moment_bytes(moments),
    }


def _form_of(state: Mapping[str, Tensor]) -> MomentFormat | None:
    """Tell which form the moments of a checkpoint have."""
    first = state.get("0000/first")
    return None if first is None else _FORMS.get(first.dtype)


def _same_kind(given: Tensor | None, kept: Tensor) -> bool:
    """Tell whether a tensor can be put in place of another."""
    return given is not None and given.shape == kept.shape and given.dtype == kept.dtype


def _same_tensor(given: Tensor | None, expected: Tensor) -> bool:
    """Tell whether two tensors on whatever device are one."""
    return given is not None and torch.equal(given.cpu(), expected)
