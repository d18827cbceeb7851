"""Models of torchmil as aggregators: `torchmil:TransMIL`. Optional: pip install "tapfm[torchmil]".

Each is built by torchmil and asked once a slide, for its logit, its attention to tiles and what its own loss is made
of. The slide's loss is the task's, with its class weights, in place of torchmil's plain cross-entropy; the model's
other terms are added as they are there.
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

from tapfm.aggregators.option import Option
from tapfm.aggregators.torchmil_catalog import TORCHMIL, TORCHMIL_MODELS
from tapfm.contracts import BagOutput, Targets, Task
from tapfm.errors import InputError, SettingError

_LANDMARKS = 256  # of CAMIL, whose own default is none, without which it cannot run
_TOUCHING = 1.01  # tile sides between the corners of neighbours; positions are rounded to pixels

_Loss = Callable[[Task, Targets], Tensor]


class TorchmilAggregator(nn.Module):
    """A model of torchmil. One that needs a graph gets it from the places of the tiles: those that touch are joined."""

    def __init__(
        self, feature_size: int, targets: int = 1, *, model: str, layer_norm: bool = False, **options: Any
    ) -> None:
        super().__init__()
        assert targets == 1, "the card refuses others"
        assert not layer_norm
        self.uses_positions = TORCHMIL_MODELS[model].uses_graph
        self.ask = _ASK.get(model, _ask_for_attention)
        if model == "CAMIL":
            options = {"n_landmarks": _LANDMARKS} | options
        try:
            self.model: nn.Module = _class_of(model)(in_shape=(feature_size,), **options)
        except (AssertionError, ValueError, RuntimeError, ZeroDivisionError) as error:
            raise SettingError(
                f"torchmil cannot build {model} for features of size {feature_size} ({error}).",
                hint=f"Change its options: {', '.join(read_options(model))}",
            ) from error
        if model == "CLAM_SB":
            self.model.inst_loss_fn = _SmoothSvm()

    def forward(self, z_KD: Tensor, r_K: Tensor, positions_K2: Tensor | None = None) -> BagOutput:  # noqa: ARG002
        """Pool the tiles of one slide."""
        graph = {}
        if self.uses_positions:
            assert positions_K2 is not None, "the slide model refuses it"
            graph = {"adj": _neighbours(positions_K2.to(z_KD))[None]}
        asked = self.ask(self.model, z_KD[None], graph)
        return BagOutput(asked.logit, None, tile_scores=asked.heat, extra_loss=asked.extra_loss)


def _class_of(model: str) -> Any:
    """Import a model's class."""
    try:
        with torch.device("cpu"):  # it computes with tensors when imported, also where sizes are tried on "meta"
            import torchmil.models
    except ImportError as error:
        raise InputError(
            f"The aggregator {TORCHMIL}{model} is torchmil's, which cannot be imported ({error}).",
            hint='Install it: pip install "tapfm[torchmil]"',
        ) from error
    return getattr(torchmil.models, model)


def read_options(model: str) -> dict[str, Option]:
    """Read the options of a model from its constructor: those that are numbers, texts, true or false."""
    constructor = _class_of(model).__init__
    kinds = typing.get_type_hints(constructor)
    return {
        name: Option(parameter.default, kind=kinds[name], at_least=0)
        for name, parameter in inspect.signature(constructor).parameters.items()
        if kinds.get(name) in (int, float, bool, str) and name != "inst_loss_name"  # see SmoothSvm
    }


def _neighbours(positions_K2: Tensor) -> Tensor:
    """Join tiles that touch, also at a corner: D^-1/2 A D^-1/2, (K, K). A tile without neighbours is its own."""
    apart = torch.cdist(positions_K2, positions_K2, p=torch.inf)
    joined = (apart < _TOUCHING).to(positions_K2).fill_diagonal_(0)
    joined.diagonal().copy_(joined.sum(1) == 0)
    scale = joined.sum(1).rsqrt()
    return scale[:, None] * joined * scale


class _TorchmilOutput(NamedTuple):
    """What a model said: its logit (1,), a score for each tile, and the rest of its loss."""

    logit: Tensor
    heat: Tensor | None
    extra_loss: _Loss | None = None


def _ask_for_attention(model: Any, tiles: Tensor, graph: dict[str, Tensor]) -> _TorchmilOutput:
    """Ask a model that can give its attention and has no loss but the bag's."""
    logit, attention = model(tiles, **graph, return_att=True)
    return _TorchmilOutput(logit, attention[0])


def _ask_dsmil(model: Any, tiles: Tensor, graph: dict[str, Tensor]) -> _TorchmilOutput:
    """Also learn the logit of the critical tile."""
    logit, attention, of_tiles = model(tiles, **graph, return_att=True, return_inst_pred=True)
    return _TorchmilOutput(logit, attention[0, :, 0], lambda task, targets: task.loss(of_tiles.amax(1), targets))


def _ask_clam(model: Any, tiles: Tensor, graph: dict[str, Tensor]) -> _TorchmilOutput:
    """Also tell tiles of high and of low attention apart."""
    logit, attention, embedded = model(tiles, **graph, return_att=True, return_emb=True)
    return _TorchmilOutput(
        logit, attention[0], lambda _, targets: model.compute_inst_loss(attention, embedded, targets.labels_C)
    )


class _SmoothSvm(nn.Module):
    """The smooth top-1 SVM loss: cross-entropy that asks for a lead of 1.

    torchmil 1.0.2's own compares every tile with the class of every other one, for want of a dimension, and its
    cross-entropy (`inst_loss_name`) does not run.
    """

    def forward(self, logits: Tensor, classes: Tensor) -> Tensor:
        """Compare logits (n, 2) with classes (n, 1)."""
        labels = classes.squeeze(-1).long()
        return F.cross_entropy(logits + (1 - F.one_hot(labels, 2)), labels)


def _ask_dtfd(model: Any, tiles: Tensor, graph: dict[str, Tensor]) -> _TorchmilOutput:
    """Also learn the logits of the pseudo-bags that the tiles are dealt out to."""
    with _dealt_by_torch(model):
        everything = torch.ones(tiles.shape[:2], device=tiles.device)  # its way to distil needs a mask
        logit, of_bags, of_tiles = model(tiles, everything, **graph, return_pseudo_pred=True, return_inst_cam=True)

    def extra_loss(task: Task, targets: Targets) -> Tensor:
        return torch.stack([task.loss(bag, targets) for bag in of_bags[0].split(1)]).mean()

    return _TorchmilOutput(logit, of_tiles[0], extra_loss)


@contextmanager
def _dealt_by_torch(model: nn.Module) -> Iterator[None]:
    """Have numpy's shuffle follow torch's generator, which a resumed run restores; the same each time when looking."""
    before = np.random.get_state()  # the one that torchmil uses
    np.random.seed(int(torch.randint(2**32, ())) if model.training else 0)
    try:
        yield
    finally:
        np.random.set_state(before)


def _ask_transmil(model: Any, tiles: Tensor, graph: dict[str, Tensor]) -> _TorchmilOutput:
    """Take what CLS attends to in the last layer from its own row: torchmil would make the whole K x K matrix."""
    attention, seen = model.layers[-1].att_module, list[Tensor]()
    hook = attention.register_forward_pre_hook(lambda _, arguments: seen.append(arguments[0]))
    try:
        logit = model(tiles, **graph)
    finally:
        hook.remove()
    with torch.no_grad():
        return _TorchmilOutput(logit, _cls_row(attention, seen[0])[1 : 1 + tiles.shape[1]])


def _cls_row(attention: Any, tokens: Tensor) -> Tensor:
    """Compute the first row of a Nystrom attention, mean over heads."""
    from torchmil.nn.attention.nystrom_attention import moore_penrose_iter_pinv

    landmarks, padding = attention.n_landmarks, -tokens.shape[1] % attention.n_landmarks
    padded = F.pad(tokens, (0, 0, padding, 0))[0]
    query, key, _ = (
        each.unflatten(-1, (attention.n_heads, -1)).transpose(-3, -2) for each in attention._qkv(padded)
    )  # (heads, tokens, size)
    query = query * attention.scale_factor
    query_marks, key_marks = (each.unflatten(1, (landmarks, -1)).mean(2) for each in (query, key))
    first = (query[:, padding : padding + 1] @ key_marks.mT).softmax(-1)
    between = moore_penrose_iter_pinv((query_marks @ key_marks.mT).softmax(-1)[None], attention.pinv_iterations)[0]
    row = first @ between @ (query_marks @ key.mT).softmax(-1)
    return row[:, 0, padding:].mean(0)


def _ask_gtp(model: Any, tiles: Tensor, graph: dict[str, Tensor]) -> _TorchmilOutput:
    """Also learn the clusters. Its map is found by going back through the model, so not while it learns."""
    heat = None
    if not model.training:
        with torch.enable_grad():
            heat = model(tiles.detach(), **graph, return_cam=True)[1][0].detach()
    logit, terms = model(tiles, **graph, return_loss=True)
    return _TorchmilOutput(logit, heat, lambda *_: torch.stack(list(terms.values())).sum())


_ASK: dict[str, Callable[[Any, Tensor, dict[str, Tensor]], _TorchmilOutput]] = {
    "CLAM_SB": _ask_clam,
    "DSMIL": _ask_dsmil,
    "DTFDMIL": _ask_dtfd,
    "TransMIL": _ask_transmil,
    "GTP": _ask_gtp,
}
