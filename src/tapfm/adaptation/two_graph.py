"""Algorithm 1: one slide, two graphs, two updates. Read it beside the paper.

K tiles, D feature size, C targets. Equation numbers are the paper's; where it leaves something open or contradicts
itself, docs/paper-and-code.md says what is computed here and why.

With bag_gradient = "before", lambda = 1 and beta = 0 the encoder's gradient equals ordinary end-to-end
backpropagation of L_agg; with lambda = 0 it equals end-to-end backpropagation with the raw attention held constant,
and with it the tile weights of `cls-attention`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from tapfm.adaptation.chunked import Chunking, EncodedBag
from tapfm.contracts import Aggregator, Encoded, Targets, Task, TileEncoder
from tapfm.errors import LabelError, NonFiniteError, SettingError

Cosine = Literal["paper", "descending"]
BagGradient = Literal["before", "after", "joint"]


@dataclass(frozen=True)
class Adaptation:
    """The settings of the step.

    lambda_: weight of the attention loss (eq. 7).
    beta: weight of the cosine term of the appendix, 0 by default.
    cosine: "paper" adds 1 - cos(z, g), which turns z towards the gradient, uphill; "descending" adds 1 + cos(z, g).
    bag_gradient: are the gradients at the tiles those "before" the aggregator's update (Algorithm 1) or "after" it
        (Proposition 1)? "joint" is what the proposition argues against: the encoder is updated first, and the
        aggregator's gradient is taken with the updated encoder, for one more forward.
    chunking: how the bag goes through the encoder; it does not change the result.
    compute_dtype: torch.bfloat16 runs the encoder under autocast; None in the precision of its weights. The
        aggregator's graph is always in float32 or better.
    """

    lambda_: float = 1.0
    beta: float = 0.0
    cosine: Cosine = "paper"
    bag_gradient: BagGradient = "before"
    chunking: Chunking = field(default_factory=Chunking)
    compute_dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        if not (0 <= self.lambda_ < math.inf and 0 <= self.beta < math.inf):
            raise SettingError(
                f"lambda and beta must be finite and not negative; got {self.lambda_} and {self.beta}.",
                hint="The paper uses lambda = 1 and beta = 0.",
            )
        for name, kind in (("cosine", Cosine), ("bag_gradient", BagGradient)):
            if getattr(self, name) not in get_args(kind):
                valid = " or ".join(f"'{value}'" for value in get_args(kind))
                raise SettingError(f"{name} must be {valid}; got {getattr(self, name)!r}.")
        if self.compute_dtype not in (None, torch.bfloat16):
            raise SettingError(
                f"compute_dtype must be torch.bfloat16 or None; got {self.compute_dtype}.",
                hint="float16 would lose small gradients without a loss scaler.",
            )


class StepReport(NamedTuple):
    """What a step computed, as tensors without a graph; logits and L_agg are those before any update."""

    logits_C: Tensor
    loss_agg: Tensor  # eq. 4
    loss_feature: Tensor  # eq. 5
    loss_attention: Tensor  # eq. 6
    loss_regular: Tensor  # appendix
    loss_pfm: Tensor  # eq. 7
    norm_g_z: Tensor
    norm_g_r: Tensor
    norm_encoder: Tensor  # of the encoder's whole gradient
    graphs_kept: int


def no_update() -> None:
    """Leave the gradients in .grad, for the caller to use."""


def two_graph_step(
    encoder: TileEncoder,
    aggregator: Aggregator,
    task: Task,
    tiles_K3hw: Tensor,
    targets: Targets,
    *,
    adaptation: Adaptation = Adaptation(),  # noqa: B008 - frozen
    update_aggregator: Callable[[], object] = no_update,
    update_encoder: Callable[[], object] = no_update,
    slide: str = "?",
    step: int = 0,
) -> StepReport:
    """One slide's step of Algorithm 1; gradients are added to .grad, `update_*` are the optimisers' step functions."""
    if not bool(targets.known_C.any()):
        raise LabelError(f"Slide '{slide}' has no label at all.", hint="Leave it out of the training split.")

    # PFM forward pass; features and attention leave its graph                     (lines 5-10)
    bag = EncodedBag(encoder, tiles_K3hw, adaptation.chunking, adaptation.compute_dtype)
    graphs_kept = bag.graphs_kept
    z_KD, r_K = bag.z_KD.requires_grad_(), bag.r_K.requires_grad_()

    # Graph 1, the aggregator: its loss, its gradient, the gradients at its inputs (lines 11-15)
    graph = aggregator_graph(aggregator, task, z_KD, r_K, targets)
    refuse_non_finite(graph.to_check(), slide, step)
    logits_C, loss_agg = graph.logits_C, graph.loss
    if adaptation.bag_gradient != "joint":
        graph.add_to_aggregator()
        update_aggregator()
    if adaptation.bag_gradient == "after":
        graph = aggregator_graph(aggregator, task, z_KD, r_K, targets)
        refuse_non_finite(graph.to_check(), slide, step)

    # The gradients leave the aggregator's graph                                   (lines 16-18)
    g_z_KD, g_r_K = graph.g_z_KD, graph.g_r_K

    # Graph 2, the PFM: eq. 7, a sum over tiles, so that any pieces will do         (lines 19-21)
    def loss_of_rows(encoded: Encoded, rows: slice) -> Tensor:
        loss = (encoded.z_KD * g_z_KD[rows]).sum()  # eq. 5, with the sign that descends
        # eq. 6: at the raw attention, sum_i r_i g_ri has the gradient that sum_i a_i g_ai has through minmax, softmax
        loss = loss + adaptation.lambda_ * (encoded.r_K * g_r_K[rows]).sum()
        if adaptation.beta:
            loss = loss + adaptation.beta * cosine_term(encoded.z_KD, g_z_KD[rows], adaptation.cosine)
        return loss

    bag.backward(loss_of_rows)
    norm_encoder = gradient_norm(encoder)
    if not bool(norm_encoder.isfinite()):
        gradients = {f"gradient of {n}": p.grad for n, p in encoder.named_parameters() if p.grad is not None}
        refuse_non_finite(gradients, slide, step)
    update_encoder()

    if adaptation.bag_gradient == "joint":
        bag = EncodedBag(encoder, tiles_K3hw, Chunking(adaptation.chunking.tiles, keep=0), adaptation.compute_dtype)
        moved = aggregator_graph(aggregator, task, bag.z_KD.requires_grad_(), bag.r_K.requires_grad_(), targets)
        refuse_non_finite(moved.to_check(), slide, step)
        moved.add_to_aggregator()
        update_aggregator()

    with torch.no_grad():
        loss_feature = (z_KD * g_z_KD).sum()
        loss_regular = cosine_term(z_KD, g_z_KD, adaptation.cosine)
        return StepReport(
            logits_C=logits_C,
            loss_agg=loss_agg,
            loss_feature=loss_feature,
            loss_attention=graph.loss_attention,
            loss_regular=loss_regular,
            loss_pfm=loss_feature + adaptation.lambda_ * graph.loss_attention + adaptation.beta * loss_regular,
            norm_g_z=g_z_KD.norm(),
            norm_g_r=g_r_K.norm(),
            norm_encoder=norm_encoder,
            graphs_kept=graphs_kept,
        )


class AggregatorGraph(NamedTuple):
    """Graph 1 after its backward pass: nothing in it has a graph any more."""

    logits_C: Tensor
    loss: Tensor  # the task's, which can be compared between aggregators
    loss_whole: Tensor  # with what the aggregator adds of its own: this is what descends
    loss_attention: Tensor
    g_z_KD: Tensor
    g_r_K: Tensor
    aggregator_gradients: list[tuple[str, torch.nn.Parameter, Tensor]]

    def to_check(self) -> dict[str, Tensor]:
        """Name what must be finite before anything is updated."""
        return {
            "aggregator loss": self.loss_whole,
            "gradient at the tile features": self.g_z_KD,
            "gradient at the raw attention": self.g_r_K,
            **{f"gradient of the aggregator's {name}": gradient for name, _, gradient in self.aggregator_gradients},
        }

    def add_to_aggregator(self) -> None:
        """Accumulate the aggregator's own gradient in .grad, as backward() would."""
        for _, parameter, gradient in self.aggregator_gradients:
            if parameter.grad is None:
                parameter.grad = gradient.clone()  # autograd may hand out one tensor for several parameters
            else:
                parameter.grad += gradient


def aggregator_graph(
    aggregator: Aggregator, task: Task, z_KD: Tensor, r_K: Tensor, targets: Targets
) -> AggregatorGraph:
    """L_agg of one slide and its gradients; an aggregator that never looks at r_K gets g_r = 0."""
    with torch.autocast(z_KD.device.type, enabled=False):
        output = aggregator(z_KD, r_K)
        logits_C, tile_weights = output.logits_C, output.tile_weights
        if not logits_C.shape == targets.labels_C.shape == (len(task.targets),):
            raise LabelError(
                f"The task has {len(task.targets)} targets ({', '.join(task.targets)}), the aggregator gives "
                f"{tuple(logits_C.shape)} logits and the slide has {tuple(targets.labels_C.shape)} labels.",
                hint="All three must agree: build the aggregator with as many targets as the task has.",
            )
        loss = task.loss(logits_C, targets)
        whole = loss if output.extra_loss is None else loss + output.extra_loss(task, targets)
        named = [(name, parameter) for name, parameter in aggregator.named_parameters() if parameter.requires_grad]
        parameters = [parameter for _, parameter in named]
        weights = [tile_weights] if tile_weights is not None and tile_weights.requires_grad else []
        g_z_KD, g_r_K, *others = torch.autograd.grad(
            whole, [z_KD, r_K, *weights, *parameters], allow_unused=True, materialize_grads=True
        )
    g_weights, of_parameters = others[: len(weights)], others[len(weights) :]
    loss_attention = sum(
        ((a.detach() * g_a).sum() for a, g_a in zip(weights, g_weights, strict=True)),
        start=loss.new_zeros(()),
    )
    return AggregatorGraph(
        logits_C=logits_C.detach(),
        loss=loss.detach(),
        loss_whole=whole.detach(),
        loss_attention=loss_attention,
        g_z_KD=g_z_KD,
        g_r_K=g_r_K,
        aggregator_gradients=[(*pair, gradient) for pair, gradient in zip(named, of_parameters, strict=True)],
    )


def cosine_term(z_KD: Tensor, g_z_KD: Tensor, cosine: Cosine) -> Tensor:
    """L_reg = sum_i 1 - cos(z_i, g_zi); a tile whose gradient is 0 contributes 0."""
    scale_K1 = g_z_KD.abs().amax(1, keepdim=True)
    has_gradient_K = scale_K1[:, 0] > 0
    unit_KD = g_z_KD / torch.where(scale_K1 > 0, scale_K1, torch.ones_like(scale_K1))  # tiny g: its square is 0
    cos_K = torch.cosine_similarity(z_KD, unit_KD, dim=1)
    term_K = 1 - cos_K if cosine == "paper" else 1 + cos_K
    return torch.where(has_gradient_K, term_K, torch.zeros_like(term_K)).sum()


def gradient_norm(encoder: TileEncoder) -> Tensor:
    """Norm of the whole of the encoder's .grad."""
    gradients = [parameter.grad for _, parameter in encoder.named_parameters() if parameter.grad is not None]
    return torch.nn.utils.get_total_norm(gradients)


def refuse_non_finite(tensors: dict[str, Tensor], slide: str, step: int) -> None:
    """Stop, naming the first tensor with a NaN or infinity, and slide and step."""
    finite = torch.stack([tensor.isfinite().all() for tensor in tensors.values()])
    if bool(finite.all()):  # the only wait for the device
        return
    name = next(name for name, good in zip(tensors, finite.tolist(), strict=True) if not good)
    raise NonFiniteError(
        f"Slide '{slide}', step {step}: the {name} is not finite. Nothing was updated with it.",
        hint="Lower the learning rates, or turn gradient clipping on; look at the slide's tiles.",
    )
