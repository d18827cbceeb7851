"""Algorithm 1: one slide, two graphs, two updates. Read it beside the paper.

K tiles, D feature size, C targets. Equation numbers are the paper's; where it leaves something open or contradicts
itself, docs/explanation/paper-and-code.md says what is computed here and why.

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
from tapfm.adaptation.subset import draw_subset
from tapfm.contracts import Aggregator, EncodedTiles, Targets, Task, TileEncoder, Tiles
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
    backward_tiles: back-propagate through so many tiles, drawn by the size of their gradients and weighted so that
        the mean over draws is the whole gradient; None: through all of them.
    compute_dtype: runs the encoder under autocast; None: in the precision of its weights. torch.float16 needs a
        `loss_scale`. The aggregator's graph is always in float32 or better.
    """

    lambda_: float = 1.0
    beta: float = 0.0
    cosine: Cosine = "paper"
    bag_gradient: BagGradient = "before"
    chunking: Chunking = field(default_factory=Chunking)
    backward_tiles: int | None = None
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
        if self.backward_tiles is not None and self.backward_tiles < 1:
            raise SettingError(
                f"backward_tiles must be at least 1; got {self.backward_tiles}.", hint="None is for all tiles."
            )
        if self.compute_dtype not in (None, torch.bfloat16, torch.float16):
            raise SettingError(
                f"compute_dtype must be torch.bfloat16, torch.float16 or None; got {self.compute_dtype}."
            )


class Checks(NamedTuple):
    """What has to be finite, and whether it is; on the device, so that nobody has to wait for it in the step."""

    names: tuple[str, ...]
    finite: Tensor  # a bool for each

    def all(self) -> Tensor:
        """Say whether everything is."""
        return self.finite.all()

    def and_also(self, name: str, finite: Tensor) -> Checks:
        """Add one."""
        return Checks((*self.names, name), torch.cat([self.finite, finite.view(1)]))

    def refuse(self, slide: str, step: int) -> None:
        """Wait for the device, and stop where something is not finite, naming it, and slide and step."""
        for name, good in zip(self.names, self.finite.tolist(), strict=True):
            if not good:
                raise NonFiniteError(
                    f"Slide '{slide}', step {step}: the {name} is not finite. Nothing was updated with it.",
                    hint="Lower the learning rates, or turn gradient clipping on; look at the slide's tiles.",
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
    checks: Checks


def no_update(finite: Tensor) -> None:
    """Leave the gradients in .grad, for the caller to use."""


def when_finite(update: Callable[[], object]) -> Callable[[Tensor], object]:
    """Make an update of an optimiser's `step` that cannot look at the device: it waits for the device."""

    def checked(finite: Tensor) -> object:
        return update() if bool(finite) else None

    return checked


def two_graph_step(
    encoder: TileEncoder,
    aggregator: Aggregator,
    task: Task,
    tiles_K3hw: Tiles,
    targets: Targets,
    *,
    adaptation: Adaptation = Adaptation(),  # noqa: B008 - frozen
    update_aggregator: Callable[[Tensor], object] = no_update,
    update_encoder: Callable[[Tensor], object] = no_update,
    loss_scale: Tensor | None = None,
    slide: str = "?",
) -> StepReport:
    """One slide's step of Algorithm 1; gradients are added to .grad.

    `update_*` are told whether the gradients are finite, as a tensor on the device: where they are not, an update must
    change nothing. So nobody waits for the device here. Whoever reads the report asks its `checks`.
    `loss_scale` multiplies the encoder's loss, for float16; its gradient in .grad is scaled as well.
    """
    if not bool(targets.known_C.any()):
        raise LabelError(f"Slide '{slide}' has no label at all.", hint="Leave it out of the training split.")
    if adaptation.compute_dtype == torch.float16 and loss_scale is None:
        raise SettingError("float16 needs a loss_scale: without one small gradients vanish.", hint="Begin with 65536.")

    # PFM forward pass; features and attention leave its graph                     (lines 5-10)
    drawn = adaptation.backward_tiles
    if drawn is not None and drawn >= len(tiles_K3hw):
        drawn = None  # all of them, so that graphs may be kept
    chunking = adaptation.chunking if drawn is None else Chunking(adaptation.chunking.tiles, keep=0)
    bag = EncodedBag(encoder, tiles_K3hw, chunking, adaptation.compute_dtype)
    graphs_kept = bag.graphs_kept
    z_KD, r_K = bag.z_KD.requires_grad_(), bag.r_K.requires_grad_()
    targets = targets.to(z_KD.device)

    # Graph 1, the aggregator: its loss, its gradient, the gradients at its inputs (lines 11-15)
    graph = aggregator_graph(aggregator, task, z_KD, r_K, targets)
    logits_C, loss_agg = graph.logits_C, graph.loss
    checks = [graph.checks()]
    if adaptation.bag_gradient != "joint":
        graph.add_to_aggregator()
        update_aggregator(checks[0].all())
    if adaptation.bag_gradient == "after":
        graph = aggregator_graph(aggregator, task, z_KD, r_K, targets)
        checks.append(graph.checks())

    # The gradients leave the aggregator's graph                                   (lines 16-18)
    g_z_KD, g_r_K = graph.g_z_KD, graph.g_r_K

    # Graph 2, the PFM: eq. 7, a sum over tiles, so that any pieces will do         (lines 19-21)
    def loss_of_tiles(encoded: EncodedTiles, rows: slice | Tensor) -> Tensor:
        loss_K = (encoded.z_KD * g_z_KD[rows]).sum(1)  # eq. 5, with the sign that descends
        # eq. 6: at the raw attention, sum_i r_i g_ri has the gradient that sum_i a_i g_ai has through minmax, softmax
        loss_K = loss_K + adaptation.lambda_ * encoded.r_K * g_r_K[rows]
        if adaptation.beta:
            loss_K = loss_K + adaptation.beta * _cosine_term(encoded.z_KD, g_z_KD[rows], adaptation.cosine)
        return loss_K

    if drawn is None:
        bag.backward(loss_of_tiles, loss_scale)
    else:
        subset = draw_subset(EncodedTiles(z_KD, r_K), g_z_KD, g_r_K, adaptation.lambda_, drawn)
        bag.backward_through(subset, loss_of_tiles, loss_scale)
    gradients = gradient_norms(encoder, loss_scale)
    norm_encoder = gradients.norms.norm()
    update_encoder(torch.stack([norm_encoder.isfinite(), *(check.all() for check in checks)]).all())
    if loss_scale is None:  # with one, infinite gradients are what tells that it is too large
        checks.append(Checks(gradients.names, gradients.norms.isfinite()))

    if adaptation.bag_gradient == "joint":
        bag = EncodedBag(encoder, tiles_K3hw, Chunking(adaptation.chunking.tiles, keep=0), adaptation.compute_dtype)
        moved = aggregator_graph(aggregator, task, bag.z_KD.requires_grad_(), bag.r_K.requires_grad_(), targets)
        checks.append(moved.checks())
        moved.add_to_aggregator()
        update_aggregator(checks[-1].all())

    with torch.no_grad():
        loss_feature = (z_KD * g_z_KD).sum()
        loss_regular = _cosine_term(z_KD, g_z_KD, adaptation.cosine).sum()
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
            checks=Checks(sum((check.names for check in checks), ()), torch.cat([check.finite for check in checks])),
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

    def checks(self) -> Checks:
        """Name what must be finite before anything is updated."""
        gradients = {
            f"gradient of the aggregator's {name}": gradient for name, _, gradient in self.aggregator_gradients
        }
        return _checks_of(
            {
                "aggregator loss": self.loss_whole,
                "gradient at the tile features": self.g_z_KD,
                "gradient at the raw attention": self.g_r_K,
                **gradients,
            }
        )

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


def _cosine_term(z_KD: Tensor, g_z_KD: Tensor, cosine: Cosine) -> Tensor:
    """L_reg = sum_i 1 - cos(z_i, g_zi), tile by tile; a tile whose gradient is 0 contributes 0."""
    scale_K1 = g_z_KD.abs().amax(1, keepdim=True)
    has_gradient_K = scale_K1[:, 0] > 0
    unit_KD = g_z_KD / torch.where(scale_K1 > 0, scale_K1, torch.ones_like(scale_K1))  # tiny g: its square is 0
    cos_K = torch.cosine_similarity(z_KD, unit_KD, dim=1)
    term_K = 1 - cos_K if cosine == "paper" else 1 + cos_K
    return torch.where(has_gradient_K, term_K, torch.zeros_like(term_K))


class GradientNorms(NamedTuple):
    """Of each of the encoder's gradients, in float32 or better."""

    names: tuple[str, ...]
    norms: Tensor


def gradient_norms(encoder: TileEncoder, loss_scale: Tensor | None) -> GradientNorms:
    """Take the norm of each .grad, without the scale."""
    named = list(encoder.named_parameters())
    gradients = {name: parameter.grad for name, parameter in named if parameter.grad is not None}
    if not gradients:
        return GradientNorms((), named[0][1].new_zeros(0, dtype=torch.float32))
    wide = torch.promote_types(next(iter(gradients.values())).dtype, torch.float32)
    norms = torch.stack(torch._foreach_norm(list(gradients.values()), dtype=wide))
    names = tuple(f"gradient of {name}" for name in gradients)
    return GradientNorms(names, norms if loss_scale is None else norms / loss_scale)


def _checks_of(tensors: dict[str, Tensor]) -> Checks:
    """Look for a NaN or infinity in each tensor, without waiting for the device."""
    return Checks(tuple(tensors), torch.stack([tensor.isfinite().all() for tensor in tensors.values()]))
