"""A model that learns: its two optimisers, one slide at a time, and everything that has to be saved of it.

Nothing here waits for the device: what a step computed is read by whoever gets its report.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from tapfm.adaptation.chunked import Chunking, RandomState
from tapfm.adaptation.loss_scale import LossScale
from tapfm.adaptation.moments import MomentFormat
from tapfm.adaptation.optimisers import AdamW, LearningRateSchedule, make_optimiser, set_rate, step_optimiser
from tapfm.adaptation.two_graph import (
    Adaptation,
    StepReport,
    aggregator_graph,
    gradient_norms,
    no_update,
    two_graph_step,
)
from tapfm.contracts import Aggregator, EncodedTiles, Targets
from tapfm.encoders.adapters import trained_parameters
from tapfm.encoders.precision import cast_weights
from tapfm.errors import TapfmError
from tapfm.inference.bags import Bag
from tapfm.runs.model import SlideModel, refuse_misfit
from tapfm.runtime.device_memory import free_memory, unify_memory_errors


@dataclass(frozen=True)
class OptimiserSettings:
    """How the two optimisers go about it.

    weights_dtype: of the encoder's weights in the device's memory; the optimiser then keeps float32 ones beside them.
    wide_gradients: sum up gradients in float32, whatever the weights are; needed where there are several to be summed.
    moments, offload: how and where the encoder's optimiser keeps what it remembers.
    compiled: run its update as compiled code.
    """

    encoder_lr: float = 1e-6
    aggregator_lr: float = 1e-5
    encoder_lr_min: float = 0.0
    aggregator_lr_min: float = 0.0
    weight_decay: float = 1e-4
    decay_all: bool = True
    clip_norm: float = 0.0
    slides_per_step: int = 1
    schedule: LearningRateSchedule = LearningRateSchedule()  # noqa: RUF009 - frozen
    weights_dtype: torch.dtype | None = None
    wide_gradients: bool = True
    moments: MomentFormat = "float32"
    offload: bool = False
    compiled: bool = False


@dataclass(frozen=True)
class _PendingSlide:
    """A slide to learn from."""

    bag: Bag
    targets: Targets
    slide_id: str


class Learner:
    """Encoder and aggregator with an AdamW each. `shrunk` is told of a chunk that had to be made smaller."""

    def __init__(
        self,
        model: SlideModel,
        adaptation: Adaptation,
        optimisation: OptimiserSettings,
        *,
        shrunk: Callable[[int], object] = lambda _: None,
    ) -> None:
        self.model, self.adaptation, self.optimisation, self.shrunk = model, adaptation, optimisation, shrunk
        make = partial(
            make_optimiser,
            device=model.device,
            weight_decay=optimisation.weight_decay,
            decay_all=optimisation.decay_all,
        )
        self._encoder_optimiser = None
        if model.encoder is not None:
            self._encoder_optimiser = make(
                trained_parameters(model.encoder),
                compute_dtype=optimisation.weights_dtype,
                moments=optimisation.moments,
                offload=optimisation.offload,
                compiled=optimisation.compiled,
            )
            if optimisation.weights_dtype is not None:
                cast_weights(model.encoder, optimisation.weights_dtype)  # what does not learn
            model.encoder.to(model.device)
            if optimisation.wide_gradients:
                self._widen_gradients()
        self._aggregator_optimiser = make(model.aggregator.named_parameters())
        scaled = model.encoder is not None and adaptation.compute_dtype == torch.float16
        self._loss_scale = LossScale(model.device) if scaled else None
        self._lessons: list[_PendingSlide] = []  # since the last update
        self._all_finite: Tensor | None = None
        self._encoder_changes = False

    @property
    def moments(self) -> str:
        """How the encoder's optimiser stores its moments."""
        return self.optimisation.moments

    def rates(self, epoch: int) -> tuple[float, float]:
        """Give the learning rates of an epoch: encoder, aggregator."""
        o = self.optimisation
        return (
            o.schedule.rate(epoch, o.encoder_lr, o.encoder_lr_min) if self._encoder_optimiser is not None else 0.0,
            o.schedule.rate(epoch, o.aggregator_lr, o.aggregator_lr_min),
        )

    def begin_epoch(self, epoch: int) -> None:
        """Set the learning rates, and training mode."""
        encoder_rate, aggregator_rate = self.rates(epoch)
        set_rate(self._encoder_optimiser, encoder_rate)
        set_rate(self._aggregator_optimiser, aggregator_rate)
        self.model.train()

    def learn(self, bag: Bag, targets: Targets, *, now: bool, slide_id: str) -> StepReport:
        """Take one slide's step; its gradients are applied `now` (the mean of all waiting ones) or wait.

        Where the device's memory ends, everything since the last update starts over, from the same random state, with
        half as many tiles at once.
        """
        if not self._lessons:
            self._begun = _StepSnapshot(self)
        self._lessons.append(_PendingSlide(bag, targets, slide_id))
        self._encoder_changes = False
        todo = self._lessons[-1:]
        while True:
            try:
                with unify_memory_errors():
                    for lesson in todo[:-1]:
                        self._take(lesson, now=False)
                    report = self._take(todo[-1], now=now)
                    break
            except torch.OutOfMemoryError as error:
                smaller = self._smaller_chunks(todo, error)
            # out of the handler, whose traceback holds on to what has to be freed
            self.adaptation = replace(self.adaptation, chunking=smaller)
            self._begun.put_back()
            self._widen_gradients()
            free_memory(self.model.device)
            self.shrunk(smaller.tiles or 1)
            todo = self._lessons
        if now:
            self._lessons, self._all_finite = [], None
        return report

    def flush(self) -> None:
        """Apply gradients that wait for a slide which did not come."""
        if self._lessons:
            assert self._all_finite is not None
            finite = self._all_finite
            self._update_aggregator(finite)
            if self.model.encoder is not None:
                # with a loss scale, infinite gradients of the encoder are no error, and so not among the checks
                norms = gradient_norms(self.model.encoder, None).norms
                self._update_encoder(finite & norms.isfinite().all())
            self._lessons, self._all_finite = [], None

    def _smaller_chunks(self, lessons: list[_PendingSlide], error: torch.OutOfMemoryError) -> Chunking:
        """Half as many tiles at once, where that can help and nothing would be applied twice."""
        slide_id, device = lessons[-1].slide_id, self.model.device
        if self._encoder_changes:
            raise TapfmError(
                f"Slide '{slide_id}': the memory of {device} ended in the middle of the encoder's update, which cannot "
                "be taken back.",
                hint="Go on from the last checkpoint with more of it left: --set machine.offload_optimiser=true, or a "
                "smaller adaptation.chunk.\nSee what would fit: tapfm plan RUN.toml",
            ) from error
        tiles = max(lesson.bag.tiles for lesson in lessons)
        smaller = self.adaptation.chunking.halved(tiles)
        if smaller is None or self.model.encoder is None:
            raise TapfmError(
                f"Slide '{slide_id}': the memory of {device} does not hold one step of this model.",
                hint="See what would fit: tapfm plan RUN.toml",
            ) from error
        return smaller

    def _take(self, lesson: _PendingSlide, *, now: bool) -> StepReport:
        aggregator = self.model.aggregator_for(lesson.bag.coordinates)
        if isinstance(lesson.bag.content, EncodedTiles):
            report = _aggregator_step(aggregator, self.model, lesson.bag.content, lesson.targets)
            if now:
                self._update_aggregator(report.checks.all())
        else:
            assert self.model.encoder is not None
            report = two_graph_step(
                self.model.encoder,
                aggregator,
                self.model.task,
                lesson.bag.content,
                lesson.targets,
                adaptation=self.adaptation,
                update_aggregator=self._update_aggregator if now else no_update,
                update_encoder=self._update_encoder if now else no_update,
                loss_scale=None if self._loss_scale is None else self._loss_scale.value,
                slide=lesson.slide_id,
            )
        if self._loss_scale is not None:
            # a step that was skipped for its scale has no gradient to tell of
            norm = report.norm_encoder
            report = report._replace(
                norm_encoder=torch.where(norm.isfinite(), norm, torch.zeros_like(norm)),
                checks=report.checks.and_also("gradient of the encoder, at any scale,", self._loss_scale.usable()),
            )
        finite = report.checks.all()
        self._all_finite = finite if self._all_finite is None else self._all_finite & finite
        return report

    def _update_aggregator(self, finite: Tensor) -> None:
        self._update(self._aggregator_optimiser, finite)

    def _update_encoder(self, finite: Tensor) -> None:
        self._encoder_changes = True
        if self._loss_scale is None:
            self._update(self._encoder_optimiser, finite)
        else:
            self._update(self._encoder_optimiser, finite, loss_scale=self._loss_scale.value)
            self._loss_scale.advance(finite)

    def _update(self, optimiser: AdamW | None, finite: Tensor, *, loss_scale: Tensor | None = None) -> None:
        finite = finite if self._all_finite is None else finite & self._all_finite
        clip_norm = self.optimisation.clip_norm
        step_optimiser(optimiser, finite, slides=len(self._lessons), clip_norm=clip_norm, loss_scale=loss_scale)

    def _widen_gradients(self) -> None:
        """Sum the encoder's gradients up in float32."""
        assert self.model.encoder is not None
        for parameter in trained_parameters(self.model.encoder).values():
            if parameter.dtype in (torch.bfloat16, torch.float16):
                parameter.grad_dtype = torch.float32

    def weights(self) -> dict[str, Tensor]:
        """Everything that training changes, in full precision; the rest of the encoder is the base model's."""
        of_encoder = {} if self._encoder_optimiser is None else self._encoder_optimiser.masters()
        return {
            **{
                f"aggregator/{name}": parameter.detach() for name, parameter in self.model.aggregator.named_parameters()
            },
            **{f"encoder/{name}": master for name, master in of_encoder.items()},
        }

    def state(self) -> dict[str, Tensor]:
        """Weights, moments and random generators: all that the next step depends on."""
        state = self.weights()
        for owner, part in self._parts_with_state().items():
            state |= {f"moments/{owner}/{name}": value for name, value in part.state().items()}
        state["random/cpu"] = torch.get_rng_state()
        if self.model.device.type == "cuda":
            state["random/cuda"] = torch.cuda.get_rng_state(self.model.device)
        return state

    def restore_weights(self, state: Mapping[str, Tensor]) -> None:
        """Put weights back where `weights` took them."""
        ours = self.weights()
        refuse_misfit(ours, state)
        for name, parameter in self.model.aggregator.named_parameters():
            parameter.data.copy_(state[f"aggregator/{name}"])
        if self._encoder_optimiser is not None:
            names = (name.removeprefix("encoder/") for name in ours if name.startswith("encoder/"))
            self._encoder_optimiser.load_masters({name: state[f"encoder/{name}"] for name in names})

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Put everything back where `state` took it."""
        self.restore_weights(state)
        for owner, part in self._parts_with_state().items():
            start = f"moments/{owner}/"
            part.restore({name.removeprefix(start): t for name, t in state.items() if name.startswith(start)})
        torch.set_rng_state(state["random/cpu"])
        if self.model.device.type == "cuda" and "random/cuda" in state:
            torch.cuda.set_rng_state(state["random/cuda"], self.model.device)

    def _parts_with_state(self) -> dict[str, AdamW | LossScale]:
        parts = {
            "encoder": self._encoder_optimiser,
            "aggregator": self._aggregator_optimiser,
            "loss_scale": self._loss_scale,
        }
        return {name: part for name, part in parts.items() if part is not None}


class _StepSnapshot:
    """How things were before a step that may have to start over: the encoder is not changed before its end."""

    def __init__(self, learner: Learner) -> None:
        self._learner = learner
        self._random = RandomState(learner.model.device)
        self._aggregator = [parameter.detach().clone() for parameter in learner.model.aggregator.parameters()]
        optimiser = learner._aggregator_optimiser
        self._moments = {} if optimiser is None else {k: v.clone() for k, v in optimiser.state().items()}

    def put_back(self) -> None:
        """Forget everything since."""
        model, optimiser = self._learner.model, self._learner._aggregator_optimiser
        for parameter, before in zip(model.aggregator.parameters(), self._aggregator, strict=True):
            parameter.data.copy_(before)
            parameter.grad = None
        if optimiser is not None:
            optimiser.restore(self._moments)
        if model.encoder is not None:
            model.encoder.zero_grad()
        self._learner._all_finite = None
        self._random.put_back()


def _aggregator_step(aggregator: Aggregator, model: SlideModel, encoded: EncodedTiles, targets: Targets) -> StepReport:
    """Graph 1 alone: stored features have no encoder behind them."""
    z_KD, r_K = encoded.z_KD.clone().requires_grad_(), encoded.r_K.clone().requires_grad_()
    graph = aggregator_graph(aggregator, model.task, z_KD, r_K, targets.to(z_KD.device))
    graph.add_to_aggregator()
    nothing = graph.loss.new_zeros(())
    return StepReport(
        logits_C=graph.logits_C,
        loss_agg=graph.loss,
        loss_feature=nothing,
        loss_attention=graph.loss_attention,
        loss_regular=nothing,
        loss_pfm=nothing,
        norm_g_z=graph.g_z_KD.norm(),
        norm_g_r=graph.g_r_K.norm(),
        norm_encoder=nothing,
        graphs_kept=0,
        checks=graph.checks(),
    )
