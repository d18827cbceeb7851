"""A model that learns: its two optimisers, one slide at a time, and everything that has to be saved of it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from tapfm.adaptation.bags import Bag
from tapfm.adaptation.optimisers import Schedule, make_optimiser, optimiser_state, restore_optimiser, set_rate, update
from tapfm.adaptation.two_graph import (
    Adaptation,
    StepReport,
    aggregator_graph,
    no_update,
    refuse_non_finite,
    two_graph_step,
)
from tapfm.contracts import Aggregator, Encoded, Targets
from tapfm.encoders.adapters import trained_parameters
from tapfm.errors import CheckpointError
from tapfm.model import SlideModel


@dataclass(frozen=True)
class Optimisation:
    """How the two optimisers go about it."""

    encoder_lr: float = 1e-6
    aggregator_lr: float = 1e-5
    encoder_lr_min: float = 0.0
    aggregator_lr_min: float = 0.0
    weight_decay: float = 1e-4
    decay_all: bool = True
    clip_norm: float = 0.0
    slides_per_step: int = 1
    schedule: Schedule = Schedule()  # noqa: RUF009 - frozen


class Learner:
    """Encoder and aggregator with an AdamW each."""

    def __init__(self, model: SlideModel, adaptation: Adaptation, optimisation: Optimisation) -> None:
        self.model, self.adaptation, self.optimisation = model, adaptation, optimisation
        make = partial(make_optimiser, weight_decay=optimisation.weight_decay, decay_all=optimisation.decay_all)
        self._encoder_optimiser = make(model.encoder.named_parameters() if model.encoder is not None else ())
        self._aggregator_optimiser = make(model.aggregator.named_parameters())
        self.slides_waiting = 0  # whose gradients are summed up

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

    def learn(self, bag: Bag, targets: Targets, *, now: bool, slide_id: str, step: int) -> StepReport:
        """Take one slide's step; its gradients are applied `now` (the mean of all waiting ones) or wait."""
        self.slides_waiting += 1
        targets = Targets(targets.labels_C.to(self.model.device), targets.known_C.to(self.model.device))
        apply = partial(update, slides=self.slides_waiting, clip_norm=self.optimisation.clip_norm)
        update_aggregator = partial(apply, self._aggregator_optimiser) if now else no_update
        update_encoder = partial(apply, self._encoder_optimiser) if now else no_update
        aggregator = self.model.aggregator_of(bag.places)
        if isinstance(bag.content, Encoded):
            report = self._aggregator_step(aggregator, bag.content, targets, slide_id, step)
            update_aggregator()
        else:
            assert self.model.encoder is not None
            report = two_graph_step(
                self.model.encoder,
                aggregator,
                self.model.task,
                bag.content,
                targets,
                adaptation=self.adaptation,
                update_aggregator=update_aggregator,
                update_encoder=update_encoder,
                slide=slide_id,
                step=step,
            )
        if now:
            self.slides_waiting = 0
        return report

    def flush(self) -> None:
        """Apply gradients that wait for a slide which did not come."""
        if self.slides_waiting:
            for optimiser in (self._aggregator_optimiser, self._encoder_optimiser):
                update(optimiser, slides=self.slides_waiting, clip_norm=self.optimisation.clip_norm)
            self.slides_waiting = 0

    def _aggregator_step(
        self, aggregator: Aggregator, encoded: Encoded, targets: Targets, slide_id: str, step: int
    ) -> StepReport:
        """Graph 1 alone: stored features have no encoder behind them."""
        z_KD, r_K = encoded.z_KD.clone().requires_grad_(), encoded.r_K.clone().requires_grad_()
        graph = aggregator_graph(aggregator, self.model.task, z_KD, r_K, targets)
        refuse_non_finite(graph.to_check(), slide_id, step)
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
        )

    def weights(self) -> dict[str, Tensor]:
        """Everything that training changes; the rest of the encoder is the base model's."""
        return {name: parameter.detach() for name, parameter in self._parameters().items()}

    def state(self) -> dict[str, Tensor]:
        """Weights, moments and random generators: all that the next step depends on."""
        names = {parameter: name for name, parameter in self._parameters().items()}
        moments = optimiser_state(self._encoder_optimiser, names) | optimiser_state(self._aggregator_optimiser, names)
        state = self.weights() | {f"moments/{name}": value for name, value in moments.items()}
        state["random/cpu"] = torch.get_rng_state()
        if self.model.device.type == "cuda":
            state["random/cuda"] = torch.cuda.get_rng_state(self.model.device)
        return state

    def restore_weights(self, state: dict[str, Tensor]) -> None:
        """Put weights back where `weights` took them."""
        restore_weights(self._parameters(), state)

    def restore(self, state: dict[str, Tensor]) -> None:
        """Put everything back where `state` took it."""
        self.restore_weights(state)
        names = {parameter: name for name, parameter in self._parameters().items()}
        moments = {name.removeprefix("moments/"): t for name, t in state.items() if name.startswith("moments/")}
        restore_optimiser(self._encoder_optimiser, names, moments)
        restore_optimiser(self._aggregator_optimiser, names, moments)
        torch.set_rng_state(state["random/cpu"])
        if self.model.device.type == "cuda" and "random/cuda" in state:
            torch.cuda.set_rng_state(state["random/cuda"], self.model.device)

    def _parameters(self) -> dict[str, nn.Parameter]:
        return changing_parameters(self.model)


def changing_parameters(model: SlideModel) -> dict[str, nn.Parameter]:
    """Name what training changes: the aggregator, and of the encoder what is not frozen."""
    encoder = trained_parameters(model.encoder) if model.encoder is not None else {}
    return {
        **{f"aggregator/{name}": parameter for name, parameter in model.aggregator.named_parameters()},
        **{f"encoder/{name}": parameter for name, parameter in encoder.items()},
    }


def restore_weights(parameters: dict[str, nn.Parameter], state: dict[str, Tensor]) -> None:
    """Fill parameters from a checkpoint; refuse one that does not fit."""
    for name, parameter in parameters.items():
        if name not in state or state[name].shape != parameter.shape:
            raise CheckpointError(
                f"The checkpoint does not fit: {name} has another shape, or is missing.",
                hint="Was it made with another encoder, aggregator or scope?",
            )
        with torch.no_grad():
            parameter.copy_(state[name])
