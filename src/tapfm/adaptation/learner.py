"""The model in training: encoder and aggregator with their optimisers, and their state for checkpoints.

A step waits for the device only to sample `backward_tiles`, and in aggregators that read values on the CPU, such as
`clam`. The caller reads the values of a `StepReport` later.
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
from tapfm.adaptation.optimisers import AdamW, LearningRateSchedule, make_optimiser, set_learning_rate, step_optimiser
from tapfm.adaptation.two_graph import (
    AdaptationSettings,
    StepReport,
    compute_aggregator_gradients,
    compute_gradient_norms,
    no_update,
    two_graph_step,
)
from tapfm.contracts import Aggregator, EncodedTiles, Targets
from tapfm.encoders.adapters import trainable_parameters
from tapfm.encoders.precision import cast_weights
from tapfm.errors import TapfmError
from tapfm.inference.bags import Bag
from tapfm.runs.model import SlideModel, check_parameter_shapes
from tapfm.runtime.device_memory import release_cached_memory, unify_memory_errors


@dataclass(frozen=True)
class OptimiserSettings:
    """Settings of the two optimisers.

    clip_norm: maximum norm of the gradient; 0: no clipping.
    slides_per_step: slides whose gradients are averaged for one update.
    weights_dtype: dtype of the encoder's weights on the device; the optimiser then stores float32 master weights as
        well. None: unchanged.
    float32_gradients: accumulate the encoder's gradients in float32 even if its weights have a lower precision. Needed
        if one update sums several backward passes.
    moments, offload: storage format and place of the encoder's moments, see `AdamW`.
    compiled: compile the update of the encoder's optimiser.
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
    float32_gradients: bool = True
    moments: MomentFormat = "float32"
    offload: bool = False
    compiled: bool = False


@dataclass(frozen=True)
class _PendingSlide:
    """A slide whose gradients are not applied yet."""

    bag: Bag
    targets: Targets
    slide_id: str


class Learner:
    """Encoder and aggregator with one AdamW each. Trains on one slide at a time.

    `on_smaller_chunks` is called with the new number of tiles per chunk after the device ran out of memory.
    """

    def __init__(
        self,
        model: SlideModel,
        adaptation: AdaptationSettings,
        optimiser_settings: OptimiserSettings,
        *,
        on_smaller_chunks: Callable[[int], object] = lambda _: None,
    ) -> None:
        self.model, self.adaptation, self.optimiser_settings = model, adaptation, optimiser_settings
        self.on_smaller_chunks = on_smaller_chunks
        make = partial(
            make_optimiser,
            device=model.device,
            weight_decay=optimiser_settings.weight_decay,
            decay_all=optimiser_settings.decay_all,
        )
        self._encoder_optimiser = None
        if model.encoder is not None:
            self._encoder_optimiser = make(
                trainable_parameters(model.encoder),
                compute_dtype=optimiser_settings.weights_dtype,
                moments=optimiser_settings.moments,
                offload=optimiser_settings.offload,
                compiled=optimiser_settings.compiled,
            )
            if optimiser_settings.weights_dtype is not None:
                cast_weights(model.encoder, optimiser_settings.weights_dtype)  # the frozen parameters
            model.encoder.to(model.device)
            if optimiser_settings.float32_gradients:
                self._accumulate_in_float32()
        self._aggregator_optimiser = make(model.aggregator.named_parameters())
        scaled = model.encoder is not None and adaptation.compute_dtype == torch.float16
        self._loss_scale = LossScale(model.device) if scaled else None
        self._pending: list[_PendingSlide] = []  # slides since the last update
        self._all_finite: Tensor | None = None
        self._encoder_updated = False

    @property
    def adamw_moment_format(self) -> str:
        """Storage format of the encoder's moments."""
        return self.optimiser_settings.moments

    def learning_rates(self, epoch: int) -> tuple[float, float]:
        """Return the learning rates of the encoder and the aggregator in an epoch."""
        settings, has_encoder = self.optimiser_settings, self._encoder_optimiser is not None
        rate = settings.schedule.rate
        return (
            rate(epoch, settings.encoder_lr, settings.encoder_lr_min) if has_encoder else 0.0,
            rate(epoch, settings.aggregator_lr, settings.aggregator_lr_min),
        )

    def start_epoch(self, epoch: int) -> None:
        """Set the learning rates of an epoch and switch to training mode."""
        encoder_rate, aggregator_rate = self.learning_rates(epoch)
        set_learning_rate(self._encoder_optimiser, encoder_rate)
        set_learning_rate(self._aggregator_optimiser, aggregator_rate)
        self.model.train()

    def train_step(self, bag: Bag, targets: Targets, *, update: bool, slide_id: str) -> StepReport:
        """Compute the gradients of one slide. If `update`, apply the mean gradient of all pending slides.

        If the device runs out of memory, retry all slides since the last update with half as many tiles per chunk,
        from the same random state.
        """
        if not self._pending:
            self._snapshot = _StepSnapshot(self)
        self._pending.append(_PendingSlide(bag, targets, slide_id))
        self._encoder_updated = False
        slides = self._pending[-1:]
        while True:
            try:
                with unify_memory_errors():
                    for slide in slides[:-1]:
                        self._run_slide(slide, update=False)
                    report = self._run_slide(slides[-1], update=update)
                    break
            except torch.OutOfMemoryError as error:
                smaller = self._choose_smaller_chunks(slides, error)
            # outside the handler: the traceback references the tensors that have to be freed
            self.adaptation = replace(self.adaptation, chunking=smaller)
            self._snapshot.restore()
            self._accumulate_in_float32()
            release_cached_memory(self.model.device)
            self.on_smaller_chunks(smaller.tiles or 1)
            slides = self._pending
        if update:
            self._pending, self._all_finite = [], None
        return report

    def apply_pending(self) -> None:
        """Apply the gradients of the pending slides. Called if the last slide of a step fails."""
        if self._pending:
            assert self._all_finite is not None
            finite = self._all_finite
            self._update_aggregator(finite)
            if self.model.encoder is not None:
                # with a loss scale, infinite encoder gradients are not an error, so `finite` does not include them
                norms = compute_gradient_norms(self.model.encoder, None).norms
                self._update_encoder(finite & norms.isfinite().all())
            self._pending, self._all_finite = [], None

    def _choose_smaller_chunks(self, slides: list[_PendingSlide], error: torch.OutOfMemoryError) -> Chunking:
        """Return a chunking with half as many tiles per chunk. Raise `TapfmError` if a retry is not possible."""
        slide_id, device = slides[-1].slide_id, self.model.device
        if self._encoder_updated:
            raise TapfmError(
                f"Slide '{slide_id}': {device} ran out of memory during or after the update of the encoder, which "
                "cannot be undone.",
                hint="Resume from the last checkpoint with --set machine.offload_optimiser=true or a smaller "
                "adaptation.chunk.\nTo see which settings fit: tapfm plan RUN.toml",
            ) from error
        tiles = max(slide.bag.tiles for slide in slides)
        smaller = self.adaptation.chunking.halve(tiles)
        if smaller is None or self.model.encoder is None:
            raise TapfmError(
                f"Slide '{slide_id}': {device} does not have enough memory for one step of this model.",
                hint="Start a new run with a smaller adaptation.tiles_per_slide, or another aggregator."
                if self.model.encoder is None
                else "To see which settings fit: tapfm plan RUN.toml",
            ) from error
        return smaller

    def _run_slide(self, slide: _PendingSlide, *, update: bool) -> StepReport:
        aggregator = self.model.aggregator_for(slide.bag.coordinates)
        if isinstance(slide.bag.content, EncodedTiles):
            report = _aggregator_step(aggregator, self.model, slide.bag.content, slide.targets)
            if update:
                self._update_aggregator(report.checks.all())
        else:
            assert self.model.encoder is not None
            report = two_graph_step(
                self.model.encoder,
                aggregator,
                self.model.task,
                slide.bag.content,
                slide.targets,
                adaptation=self.adaptation,
                update_aggregator=self._update_aggregator if update else no_update,
                update_encoder=self._update_encoder if update else no_update,
                loss_scale=None if self._loss_scale is None else self._loss_scale.value,
                slide=slide.slide_id,
            )
        if self._loss_scale is not None:
            # a step that was skipped because of its loss scale has no gradient to report
            norm = report.norm_encoder
            report = report._replace(
                norm_encoder=torch.where(norm.isfinite(), norm, torch.zeros_like(norm)),
                checks=report.checks.add_check(
                    "gradient of the encoder at any loss scale", self._loss_scale.can_decrease()
                ),
            )
        finite = report.checks.all()
        self._all_finite = finite if self._all_finite is None else self._all_finite & finite
        return report

    def _update_aggregator(self, finite: Tensor) -> None:
        self._update(self._aggregator_optimiser, finite)

    def _update_encoder(self, finite: Tensor) -> None:
        self._encoder_updated = True
        if self._loss_scale is None:
            self._update(self._encoder_optimiser, finite)
        else:
            self._update(self._encoder_optimiser, finite, loss_scale=self._loss_scale.value)
            self._loss_scale.advance(finite)

    def _update(self, optimiser: AdamW | None, finite: Tensor, *, loss_scale: Tensor | None = None) -> None:
        finite = finite if self._all_finite is None else finite & self._all_finite
        clip_norm = self.optimiser_settings.clip_norm
        step_optimiser(optimiser, finite, slides=len(self._pending), clip_norm=clip_norm, loss_scale=loss_scale)

    def _accumulate_in_float32(self) -> None:
        """Let autograd accumulate the encoder's gradients in float32."""
        assert self.model.encoder is not None
        for parameter in trainable_parameters(self.model.encoder).values():
            if parameter.dtype in (torch.bfloat16, torch.float16):
                parameter.grad_dtype = torch.float32

    def weights(self) -> dict[str, Tensor]:
        """Return all trained weights in full precision. Frozen encoder weights are not included."""
        encoder_weights = {} if self._encoder_optimiser is None else self._encoder_optimiser.master_weights()
        return {
            **{
                f"aggregator/{name}": parameter.detach() for name, parameter in self.model.aggregator.named_parameters()
            },
            **{f"encoder/{name}": master for name, master in encoder_weights.items()},
        }

    def state(self) -> dict[str, Tensor]:
        """Return weights, moments and random states: everything that the next step depends on."""
        state = self.weights()
        for owner, part in self._parts_with_state().items():
            state |= {f"moments/{owner}/{name}": value for name, value in part.state().items()}
        state["random/cpu"] = torch.get_rng_state()
        if self.model.device.type == "cuda":
            state["random/cuda"] = torch.cuda.get_rng_state(self.model.device)
        return state

    def restore_weights(self, state: Mapping[str, Tensor]) -> None:
        """Load what `weights` returned."""
        current = self.weights()
        check_parameter_shapes(current, state)
        for name, parameter in self.model.aggregator.named_parameters():
            parameter.data.copy_(state[f"aggregator/{name}"])
        if self._encoder_optimiser is not None:
            names = (name.removeprefix("encoder/") for name in current if name.startswith("encoder/"))
            self._encoder_optimiser.load_master_weights({name: state[f"encoder/{name}"] for name in names})

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Load what `state` returned."""
        self.restore_weights(state)
        for owner, part in self._parts_with_state().items():
            prefix = f"moments/{owner}/"
            part.restore({name.removeprefix(prefix): t for name, t in state.items() if name.startswith(prefix)})
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
    """State before a step, for a retry. The encoder needs no copy: there is no retry after its update."""

    def __init__(self, learner: Learner) -> None:
        self._learner = learner
        self._random = RandomState(learner.model.device)
        self._aggregator = [parameter.detach().clone() for parameter in learner.model.aggregator.parameters()]
        optimiser = learner._aggregator_optimiser
        self._moments = {} if optimiser is None else {k: v.clone() for k, v in optimiser.state().items()}

    def restore(self) -> None:
        """Undo everything since the snapshot."""
        model, optimiser = self._learner.model, self._learner._aggregator_optimiser
        for parameter, before in zip(model.aggregator.parameters(), self._aggregator, strict=True):
            parameter.data.copy_(before)
            parameter.grad = None
        if optimiser is not None:
            optimiser.restore(self._moments)
        if model.encoder is not None:
            model.encoder.zero_grad()
        self._learner._all_finite = None
        self._random.restore()


def _aggregator_step(aggregator: Aggregator, model: SlideModel, encoded: EncodedTiles, targets: Targets) -> StepReport:
    """Run graph 1 only: stored features have no encoder to train."""
    z_KD, r_K = encoded.z_KD.clone().requires_grad_(), encoded.r_K.clone().requires_grad_()
    graph = compute_aggregator_gradients(aggregator, model.task, z_KD, r_K, targets.to(z_KD.device))
    graph.accumulate_gradients()
    zero = graph.task_loss.new_zeros(())
    return StepReport(
        logits_C=graph.logits_C,
        loss_agg=graph.task_loss,
        loss_feature=zero,
        loss_attention=graph.loss_attention,
        loss_cosine=zero,
        loss_pfm=zero,
        norm_g_z=graph.g_z_KD.norm(),
        norm_g_r=graph.g_r_K.norm(),
        norm_encoder=zero,
        graphs_kept=0,
        checks=graph.check_finite(),
    )
