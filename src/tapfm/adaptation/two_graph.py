"""Algorithm 1 of the paper: one training step for one slide, with two graphs and two updates.

K tiles, D feature size, C targets (see `contracts.py`). Equation and line numbers are the paper's. Where the paper is
ambiguous or contradicts itself, docs/explanation/paper-and-code.md states what is computed here and why.

    1. Encode the tiles. Detach the features z and the raw attention r from the encoder's graph.
    2. Graph 1 (aggregator): compute L_agg and its gradients at the aggregator's parameters, at z and at r.
       Update the aggregator.
    3. Graph 2 (encoder): compute L_PFM from z, r and those detached gradients, and backpropagate it.
       Update the encoder.

With bag_gradient = "before", lambda = 1 and beta = 0, the encoder's gradient equals ordinary end-to-end
backpropagation of L_agg. With lambda = 0, it equals end-to-end backpropagation with constant raw attention (for
`cls-attention`: with constant tile weights).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from tapfm.adaptation.chunked import Chunking, EncodedBag
from tapfm.adaptation.subset import sample_subset
from tapfm.contracts import Aggregator, EncodedTiles, Targets, Task, TileEncoder, Tiles
from tapfm.errors import LabelError, NonFiniteError, SettingError

CosineLossVariant = Literal["paper", "descending"]
BagGradient = Literal["before", "after", "joint"]


@dataclass(frozen=True)
class AdaptationSettings:
    """Settings of the two-graph step.

    lambda_: weight of the attention loss (eq. 7).
    beta: weight of the cosine loss of the appendix. 0 turns it off.
    cosine_loss: "paper" adds 1 - cos(z, g), which turns z towards the gradient, that is uphill; "descending" adds
        1 + cos(z, g).
    bag_gradient: when the gradients at z and r are computed: "before" the aggregator's update (Algorithm 1) or "after"
        it (Proposition 1). "joint" is the order that Proposition 1 argues against: the encoder is updated first, then
        the aggregator with a gradient from the updated encoder. It needs one more forward pass.
    chunking: how the bag is split for the encoder. It does not change the result.
    backward_tiles: backpropagate through this many tiles only. Tiles with larger gradients are sampled more often and
        weighted such that the expected gradient is the full gradient. None: through all tiles.
    compute_dtype: dtype of autocast for the encoder. None: no autocast. torch.float16 requires a `loss_scale`.
        The aggregator's graph is always in at least float32.
    """

    lambda_: float = 1.0
    beta: float = 0.0
    cosine_loss: CosineLossVariant = "paper"
    bag_gradient: BagGradient = "before"
    chunking: Chunking = field(default_factory=Chunking)
    backward_tiles: int | None = None
    compute_dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        if not (0 <= self.lambda_ < math.inf and 0 <= self.beta < math.inf):
            raise SettingError(
                f"lambda and beta must be finite and not negative; got {self.lambda_} and {self.beta}.",
                hint="The defaults are lambda = 1 and beta = 0.",
            )
        for name, kind in (("cosine_loss", CosineLossVariant), ("bag_gradient", BagGradient)):
            if getattr(self, name) not in get_args(kind):
                valid = " or ".join(f"'{value}'" for value in get_args(kind))
                raise SettingError(f"{name} must be {valid}; got {getattr(self, name)!r}.")
        if self.backward_tiles is not None and self.backward_tiles < 1:
            raise SettingError(
                f"backward_tiles must be at least 1; got {self.backward_tiles}.", hint="Use None for all tiles."
            )
        if self.compute_dtype not in (None, torch.bfloat16, torch.float16):
            raise SettingError(
                f"compute_dtype must be torch.bfloat16, torch.float16 or None; got {self.compute_dtype}."
            )


class FiniteChecks(NamedTuple):
    """Named checks for NaN and infinity. The results stay on the device, so that a step does not synchronise."""

    names: tuple[str, ...]
    finite: Tensor  # bool, one per name

    def all(self) -> Tensor:
        """Return whether all values are finite, as a 0-dim tensor on the device."""
        return self.finite.all()

    def add_check(self, name: str, finite: Tensor) -> FiniteChecks:
        return FiniteChecks((*self.names, name), torch.cat([self.finite, finite.view(1)]))

    def raise_if_not_finite(self, slide: str, step: int) -> None:
        """Synchronise with the device. Raise `NonFiniteError` with the name of the first check that failed."""
        for name, good in zip(self.names, self.finite.tolist(), strict=True):
            if not good:
                raise NonFiniteError(
                    f"Slide '{slide}', step {step}: the {name} is not finite. It was not used to update weights.",
                    hint="Lower the learning rates or turn on gradient clipping. Check the tiles of the slide.",
                )


class StepReport(NamedTuple):
    """Results of one step, as tensors without a graph. The logits and L_agg are those before any update."""

    logits_C: Tensor
    loss_agg: Tensor  # eq. 4
    loss_feature: Tensor  # eq. 5
    loss_attention: Tensor  # eq. 6
    loss_cosine: Tensor  # L_reg of the appendix
    loss_pfm: Tensor  # eq. 7
    norm_g_z: Tensor
    norm_g_r: Tensor
    norm_encoder: Tensor  # norm of the encoder's whole .grad, which is a sum if the caller accumulates gradients
    graphs_kept: int  # chunks that were encoded only once
    checks: FiniteChecks


# Updates weights. Its argument is a 0-dim bool tensor: whether the gradients are finite.
UpdateFunction = Callable[[Tensor], object]


def no_update(finite: Tensor) -> None:
    """Do nothing: the gradients stay in .grad for the caller."""


def skip_unless_finite(update: Callable[[], object]) -> UpdateFunction:
    """Wrap an optimiser's `step` for `two_graph_step`: `update` is called only if the gradients are finite.

    The returned function synchronises with the device.
    """

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
    adaptation: AdaptationSettings = AdaptationSettings(),  # noqa: B008 - frozen
    update_aggregator: UpdateFunction = no_update,
    update_encoder: UpdateFunction = no_update,
    loss_scale: Tensor | None = None,
    slide: str = "?",
) -> StepReport:
    """Run Algorithm 1 for one slide. Gradients are accumulated in .grad.

    If the gradients are not finite, `update_aggregator` and `update_encoder` must not change any weight. This function
    does not wait for the device to check values, so it does not raise for non-finite ones: call
    `checks.raise_if_not_finite` of the returned report.

    `loss_scale` multiplies the encoder's loss (for float16). The encoder's .grad is then scaled as well.
    """
    if not bool(targets.known_C.any()):
        raise LabelError(f"Slide '{slide}' has no label.", hint="Exclude it from the training split.")
    if adaptation.compute_dtype == torch.float16 and loss_scale is None:
        raise SettingError(
            "float16 requires a loss_scale: without one, small gradients underflow to 0.", hint="Start with 65536."
        )

    # PFM forward pass; detach features and attention from its graph            (lines 5-10)
    subset_size = adaptation.backward_tiles
    if subset_size is not None and subset_size >= len(tiles_K3hw):
        subset_size = None  # all tiles, so graphs can be kept
    chunking = adaptation.chunking if subset_size is None else Chunking(adaptation.chunking.tiles, keep_graphs=0)
    bag = EncodedBag(encoder, tiles_K3hw, chunking, adaptation.compute_dtype)
    graphs_kept = bag.graphs_kept
    z_KD, r_K = bag.z_KD.requires_grad_(), bag.r_K.requires_grad_()
    targets = targets.to(z_KD.device)

    # Graph 1, the aggregator: loss, gradients, update                          (lines 11-15)
    graph = compute_aggregator_gradients(aggregator, task, z_KD, r_K, targets)
    logits_C, loss_agg = graph.logits_C, graph.task_loss
    checks = [graph.check_finite()]
    if adaptation.bag_gradient != "joint":
        graph.accumulate_gradients()
        update_aggregator(checks[0].all())
    if adaptation.bag_gradient == "after":
        graph = compute_aggregator_gradients(aggregator, task, z_KD, r_K, targets)
        checks.append(graph.check_finite())

    # Gradients at the tiles, detached from the aggregator's graph              (lines 16-18)
    g_z_KD, g_r_K = graph.g_z_KD, graph.g_r_K

    # Graph 2, the PFM: eq. 7 is a sum over tiles, so it can be computed chunk by chunk  (lines 19-21)
    def pfm_loss(encoded: EncodedTiles, rows: slice | Tensor) -> Tensor:
        """Return L_PFM of each of these tiles."""
        # eq. 5, with the sign that descends
        loss_K = (encoded.z_KD * g_z_KD[rows]).sum(1)
        # eq. 6, at the raw attention: sum_i r_i g_ri has the same gradient as sum_i a_i g_ai, because g_r is already
        # backpropagated through softmax and min-max
        loss_K = loss_K + adaptation.lambda_ * encoded.r_K * g_r_K[rows]
        if adaptation.beta:
            loss_K = loss_K + adaptation.beta * _cosine_loss(encoded.z_KD, g_z_KD[rows], adaptation.cosine_loss)
        return loss_K

    if subset_size is None:
        bag.backward(pfm_loss, loss_scale)
    else:
        subset = sample_subset(EncodedTiles(z_KD, r_K), g_z_KD, g_r_K, adaptation.lambda_, subset_size)
        bag.backward_subset(subset, pfm_loss, loss_scale)
    gradients = compute_gradient_norms(encoder, loss_scale)
    norm_encoder = gradients.norms.norm()
    update_encoder(torch.stack([norm_encoder.isfinite(), *(check.all() for check in checks)]).all())
    if loss_scale is None:  # with a loss scale, infinite gradients are not an error: they mean that it is too large
        checks.append(FiniteChecks(gradients.names, gradients.norms.isfinite()))

    if adaptation.bag_gradient == "joint":
        chunking = Chunking(adaptation.chunking.tiles, keep_graphs=0)
        bag = EncodedBag(encoder, tiles_K3hw, chunking, adaptation.compute_dtype)
        after_update = compute_aggregator_gradients(
            aggregator, task, bag.z_KD.requires_grad_(), bag.r_K.requires_grad_(), targets
        )
        checks.append(after_update.check_finite())
        after_update.accumulate_gradients()
        update_aggregator(checks[-1].all())

    with torch.no_grad():
        loss_feature = (z_KD * g_z_KD).sum()
        loss_cosine = _cosine_loss(z_KD, g_z_KD, adaptation.cosine_loss).sum()
        return StepReport(
            logits_C=logits_C,
            loss_agg=loss_agg,
            loss_feature=loss_feature,
            loss_attention=graph.loss_attention,
            loss_cosine=loss_cosine,
            loss_pfm=loss_feature + adaptation.lambda_ * graph.loss_attention + adaptation.beta * loss_cosine,
            norm_g_z=g_z_KD.norm(),
            norm_g_r=g_r_K.norm(),
            norm_encoder=norm_encoder,
            graphs_kept=graphs_kept,
            checks=FiniteChecks(
                sum((check.names for check in checks), ()), torch.cat([check.finite for check in checks])
            ),
        )


class AggregatorGradients(NamedTuple):
    """Losses and gradients of graph 1 after its backward pass. All tensors are detached."""

    logits_C: Tensor
    task_loss: Tensor  # can be compared between aggregators
    total_loss: Tensor  # task loss plus the aggregator's extra loss; the gradients are those of this loss
    loss_attention: Tensor
    g_z_KD: Tensor
    g_r_K: Tensor
    parameter_gradients: list[tuple[str, torch.nn.Parameter, Tensor]]

    def check_finite(self) -> FiniteChecks:
        """Check the loss and all gradients for NaN and infinity."""
        gradients = {f"gradient of the aggregator's {name}": gradient for name, _, gradient in self.parameter_gradients}
        tensors = {
            "aggregator loss": self.total_loss,
            "gradient at the tile features": self.g_z_KD,
            "gradient at the raw attention": self.g_r_K,
            **gradients,
        }
        return FiniteChecks(tuple(tensors), torch.stack([tensor.isfinite().all() for tensor in tensors.values()]))

    def accumulate_gradients(self) -> None:
        """Add the parameter gradients to .grad, as backward() would."""
        for _, parameter, gradient in self.parameter_gradients:
            if parameter.grad is None:
                parameter.grad = gradient.clone()  # autograd may return one tensor for several parameters
            else:
                parameter.grad += gradient


def compute_aggregator_gradients(
    aggregator: Aggregator, task: Task, z_KD: Tensor, r_K: Tensor, targets: Targets
) -> AggregatorGradients:
    """Compute L_agg of one slide (graph 1), and the gradients of L_agg plus extra loss. g_r is 0 if r_K is unused."""
    with torch.autocast(z_KD.device.type, enabled=False):
        output = aggregator(z_KD, r_K)
        logits_C, tile_weights = output.logits_C, output.tile_weights
        if not logits_C.shape == targets.labels_C.shape == (len(task.target_kinds),):
            raise LabelError(
                f"The task has {len(task.target_kinds)} targets ({', '.join(task.target_kinds)}), but the aggregator's "
                f"logits have shape {tuple(logits_C.shape)} and the slide's labels have shape "
                f"{tuple(targets.labels_C.shape)}.",
                hint="The aggregator needs one logit per target, and Task.encode one label per target (None: missing).",
            )
        task_loss = task.loss(logits_C, targets)
        total_loss = task_loss if output.extra_loss is None else task_loss + output.extra_loss(task, targets)
        named = [(name, parameter) for name, parameter in aggregator.named_parameters() if parameter.requires_grad]
        parameters = [parameter for _, parameter in named]
        weights = [tile_weights] if tile_weights is not None and tile_weights.requires_grad else []
        g_z_KD, g_r_K, *others = torch.autograd.grad(
            total_loss, [z_KD, r_K, *weights, *parameters], allow_unused=True, materialize_grads=True
        )
    g_weights, g_parameters = others[: len(weights)], others[len(weights) :]
    loss_attention = sum(
        ((a.detach() * g_a).sum() for a, g_a in zip(weights, g_weights, strict=True)),
        start=task_loss.new_zeros(()),
    )
    return AggregatorGradients(
        logits_C=logits_C.detach(),
        task_loss=task_loss.detach(),
        total_loss=total_loss.detach(),
        loss_attention=loss_attention,
        g_z_KD=g_z_KD,
        g_r_K=g_r_K,
        parameter_gradients=[(*pair, gradient) for pair, gradient in zip(named, g_parameters, strict=True)],
    )


def _cosine_loss(z_KD: Tensor, g_z_KD: Tensor, variant: CosineLossVariant) -> Tensor:
    """Return 1 - cos(z_i, g_zi) of each tile, or 1 + cos for "descending". A tile whose gradient is 0 gets 0."""
    scale_K1 = g_z_KD.abs().amax(1, keepdim=True)
    has_gradient_K = scale_K1[:, 0] > 0
    # rescaled, because the square of a tiny gradient underflows to 0
    scaled_KD = g_z_KD / torch.where(scale_K1 > 0, scale_K1, torch.ones_like(scale_K1))
    cos_K = torch.cosine_similarity(z_KD, scaled_KD, dim=1)
    loss_K = 1 - cos_K if variant == "paper" else 1 + cos_K
    return torch.where(has_gradient_K, loss_K, torch.zeros_like(loss_K))


class GradientNorms(NamedTuple):
    """Norm of the gradient of each parameter of the encoder, in at least float32."""

    names: tuple[str, ...]
    norms: Tensor


def compute_gradient_norms(encoder: TileEncoder, loss_scale: Tensor | None) -> GradientNorms:
    """Return the norm of every .grad, divided by `loss_scale`."""
    named = list(encoder.named_parameters())
    gradients = {name: parameter.grad for name, parameter in named if parameter.grad is not None}
    if not gradients:
        return GradientNorms((), named[0][1].new_zeros(0, dtype=torch.float32))
    dtype = torch.promote_types(next(iter(gradients.values())).dtype, torch.float32)
    norms = torch.stack(torch._foreach_norm(list(gradients.values()), dtype=dtype))
    names = tuple(f"gradient of {name}" for name in gradients)
    return GradientNorms(names, norms if loss_scale is None else norms / loss_scale)
