"""Models of torchmil as aggregators: `torchmil:TransMIL`. Optional: pip install torchmil.

torchmil builds each model. For each slide, the model returns its logit, its tile scores and the terms of its loss.
Losses of logits (of the slide, the critical tile or pseudo-bags) are those of the task, with class weights, instead of
torchmil's cross-entropy. The other terms are added with the same weight as in torchmil.
"""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tapfm.aggregators.aggregator_option import AggregatorOption
from tapfm.aggregators.torchmil_catalog import TORCHMIL_MODELS, TORCHMIL_PREFIX
from tapfm.contracts import BagOutput, Targets, Task
from tapfm.errors import InputError, SettingError

# torchmil has no default for the landmarks of CAMIL, which cannot run without them
_DEFAULT_OPTIONS: dict[str, dict[str, Any]] = {"CAMIL": {"n_landmarks": 256}}
_MAX_NEIGHBOUR_DISTANCE = 1.01  # in units of the tile side; not 1, because tile positions are rounded to pixels

_Loss = Callable[[Task, Targets], Tensor]


class TorchmilAggregator(nn.Module):
    """A model of torchmil. Graph models get the graph of adjacent tiles."""

    def __init__(
        self, feature_size: int, targets: int = 1, *, model: str, layer_norm: bool = False, **options: Any
    ) -> None:
        super().__init__()
        assert targets == 1, "torchmil models have one target"  # checked by AggregatorCard.check
        assert not layer_norm
        self.uses_coordinates = TORCHMIL_MODELS[model].uses_graph
        self.run_model = _RUN_FUNCTIONS.get(model, _run_attention_model)
        options = _DEFAULT_OPTIONS.get(model, {}) | options
        try:
            self.model: nn.Module = _import_model_class(model)(in_shape=(feature_size,), **options)
        except (AssertionError, ValueError, RuntimeError, ZeroDivisionError) as error:
            raise SettingError(
                f"torchmil cannot build {model} for features of size {feature_size} ({error}).",
                hint=f"Change the options of the aggregator: {', '.join(read_options(model))}",
            ) from error
        if model == "CLAM_SB":
            self.model.inst_loss_fn = _SmoothSvmLoss()

    def forward(self, z_KD: Tensor, r_K: Tensor, coordinates_K2: Tensor | None = None) -> BagOutput:  # noqa: ARG002
        """Pool the tiles of one slide. The raw attention `r_K` is not used."""
        graph = {}
        if self.uses_coordinates:
            assert coordinates_K2 is not None, "graph models need tile coordinates"  # checked by SlideModel
            graph = {"adj": _build_adjacency(coordinates_K2.to(z_KD))[None]}
        output = self.run_model(self.model, z_KD[None], graph)
        return BagOutput(output.logit, None, tile_scores=output.tile_scores, extra_loss=output.extra_loss)


def _import_model_class(model: str) -> Any:
    try:
        with torch.device("cpu"):  # its import computes with tensors, which fails on "meta"
            import torchmil.models
    except ImportError as error:
        raise InputError(
            f"The aggregator {TORCHMIL_PREFIX}{model} needs the package torchmil, which cannot be imported ({error}).",
            hint="Install it: pip install torchmil",
        ) from error
    return getattr(torchmil.models, model)


def read_options(model: str) -> dict[str, AggregatorOption]:
    """Return the options of a model: the arguments of its constructor that are numbers, strings or booleans."""
    constructor = _import_model_class(model).__init__
    kinds, defaults = typing.get_type_hints(constructor), _DEFAULT_OPTIONS.get(model, {})
    return {
        name: AggregatorOption(defaults.get(name, parameter.default), kind=kinds[name], at_least=0)
        for name, parameter in inspect.signature(constructor).parameters.items()
        if kinds.get(name) in (int, float, bool, str) and name != "inst_loss_name"  # see _SmoothSvmLoss
    }


def _build_adjacency(coordinates_K2: Tensor) -> Tensor:
    """Return the normalised adjacency matrix D^-1/2 A D^-1/2 of tiles that share an edge or a corner, (K, K).

    A tile without neighbours is connected to itself.
    """
    distances = torch.cdist(coordinates_K2, coordinates_K2, p=torch.inf)
    adjacency = (distances < _MAX_NEIGHBOUR_DISTANCE).to(coordinates_K2).fill_diagonal_(0)
    adjacency.diagonal().copy_(adjacency.sum(1) == 0)
    scale = adjacency.sum(1).rsqrt()
    return scale[:, None] * adjacency * scale


class _TorchmilOutput(NamedTuple):
    """Output of a model: logit (1,), tile scores (K,), and the terms of its loss other than the slide loss."""

    logit: Tensor
    tile_scores: Tensor | None
    extra_loss: _Loss | None = None


def _run_attention_model(model: Any, tiles: Tensor, graph: dict[str, Tensor]) -> _TorchmilOutput:
    """Run a model that returns its attention and has no extra loss."""
    logit, attention = model(tiles, **graph, return_att=True)
    return _TorchmilOutput(logit, attention[0])


def _run_dsmil(model: Any, tiles: Tensor, graph: dict[str, Tensor]) -> _TorchmilOutput:
    """Run DSMIL; its extra loss is that of the critical tile."""
    logit, attention, tile_logits = model(tiles, **graph, return_att=True, return_inst_pred=True)
    return _TorchmilOutput(logit, attention[0, :, 0], lambda task, targets: task.loss(tile_logits.amax(1), targets))


def _run_clam(model: Any, tiles: Tensor, graph: dict[str, Tensor]) -> _TorchmilOutput:
    """Run CLAM; its extra loss separates tiles of high attention from tiles of low attention."""
    logit, attention, embedded = model(tiles, **graph, return_att=True, return_emb=True)
    return _TorchmilOutput(
        logit, attention[0], lambda _, targets: model.compute_inst_loss(attention, embedded, targets.labels_C)
    )


class _SmoothSvmLoss(nn.Module):
    """Smooth top-1 SVM loss: cross-entropy with a margin of 1.

    Replaces the loss of torchmil 1.0.2, which lacks a dimension and so compares every tile with the classes of all
    tiles. The other loss of torchmil's CLAM, cross-entropy (`inst_loss_name`), raises an error.
    """

    def forward(self, logits: Tensor, classes: Tensor) -> Tensor:
        """Compute the loss of logits (n, 2) and classes (n, 1)."""
        labels = classes.squeeze(-1).long()
        return F.cross_entropy(logits + (1 - F.one_hot(labels, 2)), labels)


def _run_dtfd(model: Any, tiles: Tensor, graph: dict[str, Tensor]) -> _TorchmilOutput:
    """Run DTFD-MIL, which assigns tiles to pseudo-bags at random; its extra loss is that of the pseudo-bags."""
    with _seed_numpy_from_torch(training=model.training):
        mask = torch.ones(tiles.shape[:2], device=tiles.device)  # its distillation does not run without a mask
        logit, bag_logits, tile_scores = model(tiles, mask, **graph, return_pseudo_pred=True, return_inst_cam=True)

    def extra_loss(task: Task, targets: Targets) -> Tensor:
        return torch.stack([task.loss(bag, targets) for bag in bag_logits[0].split(1)]).mean()

    return _TorchmilOutput(logit, tile_scores[0], extra_loss)


@contextmanager
def _seed_numpy_from_torch(*, training: bool) -> Iterator[None]:
    """Seed numpy's global generator, which torchmil uses, from torch's, which a resumed run restores.

    During inference the seed is 0.
    """
    before = np.random.get_state()
    np.random.seed(int(torch.randint(2**32, ())) if training else 0)
    try:
        yield
    finally:
        np.random.set_state(before)


def _run_transmil(model: Any, tiles: Tensor, graph: dict[str, Tensor]) -> _TorchmilOutput:
    """Run TransMIL; compute only the CLS row of its last attention, where torchmil would compute the K x K matrix."""
    attention, attention_inputs = model.layers[-1].att_module, list[Tensor]()
    hook = attention.register_forward_pre_hook(lambda _, arguments: attention_inputs.append(arguments[0]))
    try:
        logit = model(tiles, **graph)
    finally:
        hook.remove()
    with torch.no_grad():
        cls_row = _compute_cls_row(attention, attention_inputs[0])
    return _TorchmilOutput(logit, cls_row[1 : 1 + tiles.shape[1]])


def _compute_cls_row(attention: Any, tokens: Tensor) -> Tensor:
    """Compute the first row of a Nystrom attention matrix, averaged over heads."""
    from torchmil.nn.attention.nystrom_attention import moore_penrose_iter_pinv

    landmarks, padding = attention.n_landmarks, -tokens.shape[1] % attention.n_landmarks
    padded = F.pad(tokens, (0, 0, padding, 0))[0]
    query, key, _ = (
        each.unflatten(-1, (attention.n_heads, -1)).transpose(-3, -2) for each in attention._qkv(padded)
    )  # (heads, tokens, size)
    query = query * attention.scale_factor
    query_landmarks, key_landmarks = (each.unflatten(1, (landmarks, -1)).mean(2) for each in (query, key))
    cls_kernel = (query[:, padding : padding + 1] @ key_landmarks.mT).softmax(-1)
    landmark_kernel = moore_penrose_iter_pinv(
        (query_landmarks @ key_landmarks.mT).softmax(-1)[None], attention.pinv_iterations
    )[0]
    row = cls_kernel @ landmark_kernel @ (query_landmarks @ key.mT).softmax(-1)
    return row[:, 0, padding:].mean(0)


def _run_gtp(model: Any, tiles: Tensor, graph: dict[str, Tensor]) -> _TorchmilOutput:
    """Run GTP; its extra loss is that of its clusters. Tile scores need a backward pass, so training has none."""
    tile_scores = None
    if not model.training:
        with torch.enable_grad():
            tile_scores = model(tiles.detach(), **graph, return_cam=True)[1][0].detach()
    logit, terms = model(tiles, **graph, return_loss=True)
    return _TorchmilOutput(logit, tile_scores, lambda *_: torch.stack(list(terms.values())).sum())


_RUN_FUNCTIONS: dict[str, Callable[[Any, Tensor, dict[str, Tensor]], _TorchmilOutput]] = {
    "CLAM_SB": _run_clam,
    "DSMIL": _run_dsmil,
    "DTFDMIL": _run_dtfd,
    "TransMIL": _run_transmil,
    "GTP": _run_gtp,
}
