"""Weights: found (cache, hub, file or folder), checked (digest, names, shapes), and put into the encoder.

timm's own loading is not used: it resamples what does not fit, and some models come up with random weights.
"""

from __future__ import annotations

import argparse
import json
import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from huggingface_hub import hf_hub_download, try_to_load_from_cache
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
)
from safetensors import SafetensorError
from safetensors.torch import load_file
from timm.layers import resample_abs_pos_embed
from torch import Tensor, nn

from tapfm.encoders.build import build_vit
from tapfm.encoders.card import EncoderCard, Feature, Resampling
from tapfm.encoders.catalog import encoder_card
from tapfm.encoders.conversion import State, to_timm
from tapfm.encoders.vit import VitEncoder
from tapfm.errors import (
    GatedWeightsError,
    WeightsDigestError,
    WeightsError,
    WeightsMismatchError,
    WeightsNotFoundError,
)
from tapfm.runtime.files import sha256_of

_SUFFIXES = (".safetensors", ".bin", ".pth", ".pt")
_SHOWN = 5  # mismatches named in an error


@dataclass(frozen=True)
class Provenance:
    """Where an encoder's weights came from."""

    file: Path
    sha256: str
    published: bool | None  # does the digest match the published one; None where none is known
    positions: str  # what was done to the position table


class LoadedEncoder(NamedTuple):
    """An encoder with its weights, and where they came from."""

    encoder: VitEncoder
    card: EncoderCard
    provenance: Provenance


def load_encoder(
    encoder: str | EncoderCard,
    *,
    weights: str | Path | None = None,
    tile_px: int | None = None,
    feature: Feature | None = None,
    extra: Mapping[str, Any] | None = None,
) -> LoadedEncoder:
    """Load an encoder of the catalogue (or a card) onto the CPU.

    `weights`: a file or a hub-shaped folder; default: the hub's cache, then the hub. `tile_px` and `feature` override
    the card's; another tile size resamples the position table. `extra` goes to timm (for example drop_path_rate).
    """
    card = encoder_card(encoder) if isinstance(encoder, str) else encoder
    found = _local_weights(card, Path(weights).expanduser()) if weights is not None else _hub_weights(card)
    digest = sha256_of(found.file)
    published = None if card.sha256 is None else digest == card.sha256
    if found.claims_to_be_published and published is False:
        raise WeightsDigestError(
            f"{found.file} is not the published {card.file} of {card.name}: its SHA-256 is {digest}, "
            f"expected {card.sha256}.",
            hint=f"Fetch it again: {card.fetch_again_command}. "
            f"Weights of your own: name the file itself, --weights {found.file}",
        )
    if found.config is not None:
        _check_config(found.config, card)
    vit = _empty_vit(card, tile_px, extra)
    state = to_timm(_read_checkpoint(found.file))
    positions = _fit_positions(state, vit, card)
    _put(state, into=vit, file=found.file, card=card)
    ready = VitEncoder(vit, mean=card.mean, std=card.std, feature=feature or card.feature)
    return LoadedEncoder(ready, card, Provenance(found.file, digest, published, positions))


class _FoundWeights(NamedTuple):
    """A weights file, whether it stands for the published one, and the config.json beside it, if any."""

    file: Path
    claims_to_be_published: bool
    config: Path | None = None


def _local_weights(card: EncoderCard, path: Path) -> _FoundWeights:
    """Take a file as it is; in a folder look for the published name, then for the usual ones."""
    if path.is_file():
        if path.suffix not in _SUFFIXES:
            raise WeightsError(f"{path} is not a weights file.", hint=f"Weights end in {', '.join(_SUFFIXES)}.")
        return _FoundWeights(path, claims_to_be_published=False, config=_beside(path))
    if not path.is_dir():
        raise WeightsNotFoundError(
            f"There is no file or folder {path}.",
            hint="Give --weights a weights file or a folder of the hub's shape.",
        )
    names = list(dict.fromkeys([card.file, "model.safetensors", "pytorch_model.bin"]))
    folders = [path]
    if card.repository:  # the hub's cache keeps models--owner--name/snapshots/revision/
        cached = path / f"models--{card.repository.replace('/', '--')}" / "snapshots"
        folders += [cached / card.revision] if card.revision else sorted(cached.glob("*"))
    for folder in folders:
        for name in names:
            if (folder / name).is_file():
                config = _beside(folder / name)
                return _FoundWeights(folder / name, name == card.file and not _is_exported(config), config)
    raise WeightsNotFoundError(
        f"The folder {path} holds no weights of {card.name}: looked for {', '.join(names)}.",
        hint=f"It should look like a copy of {card.page or 'its download page'}.",
    )


def _is_exported(config: Path | None) -> bool:
    """Recognise a folder that `tapfm export` wrote: adapted weights, under the published name."""
    try:
        return config is not None and "tapfm" in json.loads(config.read_text())
    except (OSError, ValueError, TypeError):
        return False


def _beside(file: Path) -> Path | None:
    """Find the config.json that lies with a weights file."""
    config = file.parent / "config.json"
    return config if config.is_file() else None


def _hub_weights(card: EncoderCard) -> _FoundWeights:
    """Take the file from the hub's cache, or else from the hub; or from tapfm itself, where it comes with it."""
    if card.packaged:
        if not (card.package_folder / card.file).is_file():
            raise WeightsNotFoundError(
                f"{card.file} of {card.name}, which comes with tapfm, is gone from {card.package_folder}.",
                hint=f"Install tapfm again: {card.fetch_again_command}",
            )
        return _local_weights(card, card.package_folder)
    if not card.repository:
        raise WeightsNotFoundError(
            f"{card.name} is not on the hub.",
            hint=f"Get {card.file} ({card.notes}), then: tapfm encoders {card.key} --check --weights {card.file}",
        )
    cached = try_to_load_from_cache(card.repository, card.file, revision=card.revision)
    if isinstance(cached, str):
        return _FoundWeights(Path(cached), claims_to_be_published=True)
    try:
        file = hf_hub_download(card.repository, card.file, revision=card.revision)
    except GatedRepoError as error:
        raise _gated(card) from error
    except RepositoryNotFoundError as error:
        if card.gate != "none":  # to strangers the hub says of a gated model that it does not exist
            raise _gated(card) from error
        raise WeightsNotFoundError(
            f"The hub has no repository {card.repository}.", hint="Give the weights with --weights FILE."
        ) from error
    except (LocalEntryNotFoundError, OfflineModeIsEnabled, ConnectionError) as error:
        raise WeightsNotFoundError(
            f"The weights of {card.name} are not in the hub's cache and the hub cannot be reached.",
            hint=f"On a machine with network: {card.fetch_command}; then copy the cache, or give --weights FILE.",
        ) from error
    except (EntryNotFoundError, HfHubHTTPError) as error:
        raise WeightsNotFoundError(
            f"The hub did not give {card.file} of {card.repository}: {str(error).splitlines()[0]}",
            hint="Try again later, or give the weights with --weights FILE.",
        ) from error
    return _FoundWeights(Path(file), claims_to_be_published=True)


def _gated(card: EncoderCard) -> GatedWeightsError:
    """Build the error that says how to get access."""
    wait = " and wait for approval" if card.gate == "manual" else ""
    return GatedWeightsError(
        f"{card.name} is gated: its owners ask you to accept their licence ({card.licence}) first.",
        hint=f"1. Accept it on {card.page}{wait}. 2. Log in: hf auth login (or set HF_TOKEN). 3. Run this again.",
    )


def _empty_vit(card: EncoderCard, tile_px: int | None, extra: Mapping[str, Any] | None) -> nn.Module:
    """Build the architecture without allocating it, so that a parameter the file lacks cannot be left random."""
    with torch.device("meta"):
        vit = build_vit(card, tile_px=tile_px, extra=extra)
    computed = {name for name, _ in vit.named_buffers()} - set(vit.state_dict())
    # Buffers that no checkpoint holds (rotary periods) are computed when the model is built, so build it for real.
    return build_vit(card, tile_px=tile_px, extra=extra) if computed else vit


def _read_checkpoint(file: Path) -> Mapping[str, Any]:
    """Read a weights file; pickles only as tensors, never as code."""
    with file.open("rb") as opened:
        start = opened.read(64)
    if not start or start.startswith((b"version https://git-lfs", b"<")):
        what = "empty" if not start else "a page or a pointer to the file, not the file itself"
        raise WeightsError(f"{file} is {what}.", hint="Fetch the file again (for git LFS: git lfs pull).")
    try:
        if file.suffix == ".safetensors":
            return load_file(file)
        # DINO's training script puts its command line, a plain Namespace, beside the weights.
        with torch.serialization.safe_globals([argparse.Namespace]):
            loaded = torch.load(file, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise WeightsError(
            f"{file} is not a checkpoint, or holds Python objects besides tensors, which could run code and are not "
            "opened.",
            hint="Save it again with torch.save(model.state_dict(), ...) where you trust it.",
        ) from error
    except (SafetensorError, RuntimeError, EOFError, LookupError, ValueError) as error:
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise WeightsError(f"{file} cannot be read as weights: {reason}", hint="Fetch the file again.") from error
    if not isinstance(loaded, Mapping):
        raise WeightsMismatchError(
            f"{file} holds a {type(loaded).__name__}, not a table of tensors.", hint="Save a state_dict()."
        )
    return loaded


def _put(state: State, *, into: nn.Module, file: Path, card: EncoderCard) -> None:
    """Fill every parameter from the checkpoint, or refuse naming the first that do not fit."""
    wanted = into.state_dict()
    missing = [f"  missing     {name} {list(wanted[name].shape)}" for name in wanted if name not in state]
    unexpected = [f"  unexpected  {name} {list(state[name].shape)}" for name in state if name not in wanted]
    reshaped = [
        f"  wrong shape {name}: {list(state[name].shape)} in the file, {list(tensor.shape)} in the encoder"
        for name, tensor in wanted.items()
        if name in state and state[name].shape != tensor.shape
    ]
    if missing or unexpected or reshaped:
        shown = [line for kind in (reshaped, missing, unexpected) for line in kind[:_SHOWN]]
        raise WeightsMismatchError(
            f"{file} does not fit {card.name} ({len(missing)} tensors missing, {len(unexpected)} unexpected, "
            f"{len(reshaped)} of the wrong shape):\n" + "\n".join(shown),
            hint=f"Is it another encoder's file? The published one is {card.file} of {card.page or card.name}.",
        )
    bad = [name for name, tensor in state.items() if not tensor.is_floating_point() or not tensor.isfinite().all()]
    if bad:
        raise WeightsMismatchError(
            f"{file} holds values that are no weights (integers, NaN or infinity): {', '.join(bad[:_SHOWN])}.",
            hint="Save the encoder in float32, float16 or bfloat16.",
        )
    # Copies: tensors that share memory in the file would stay tied in training.
    own = {name: tensor.to(torch.float32, copy=True) for name, tensor in state.items()}
    into.load_state_dict(own, strict=True, assign=True)


def _fit_positions(state: State, vit: Any, card: EncoderCard) -> str:
    """Bring the position table to the encoder's tile size, if the card or the caller asked for another one.

    A table of another size than the card's is left alone, so that it is refused unless it fits as it is.
    """
    table = state.get("pos_embed")
    if table is None or vit.pos_embed is None:
        return "rotary, nothing to resample" if vit.pos_embed is None else "missing"
    patch = int(vit.patch_embed.patch_size[0])
    old, new = card.position_px // patch, int(vit.patch_embed.grid_size[0])
    prefix = vit.pos_embed.shape[1] - new * new
    if old == new or table.shape[1] != prefix + old * old:
        return "as trained"
    method: Resampling = card.resampling or "timm"
    state["pos_embed"] = _resample_positions(table.float(), old, new, prefix, method)
    return f"resampled from {old} x {old} to {new} x {new} patches as {method} does"


def _resample_positions(table: Tensor, old: int, new: int, prefix: int, method: Resampling) -> Tensor:
    """Resample a square position table the way the encoder's own code does."""
    if method == "timm":  # antialiased
        resampled: Tensor = resample_abs_pos_embed(table, [new, new], [old, old], num_prefix_tokens=prefix)
        return resampled
    grid = table[:, prefix:].unflatten(1, (old, old)).permute(0, 3, 1, 2)
    if method == "transformers":
        grid = F.interpolate(grid, size=(new, new), mode="bicubic", align_corners=False)
    else:  # DINO gives the scale, with a little added, instead of the size
        grid = F.interpolate(grid, scale_factor=(new + 0.1) / old, mode="bicubic")
    return torch.cat([table[:, :prefix], grid.permute(0, 2, 3, 1).flatten(1, 2)], dim=1)


def _check_config(config: Path, card: EncoderCard) -> None:
    """Compare what shapes cannot tell (heads, epsilon, activation) with a config.json of transformers or timm."""
    try:
        facts = json.loads(config.read_text())
        facts = {**facts, **facts.get("model_args", {})}
    except (ValueError, TypeError, AttributeError) as error:
        raise WeightsError(
            f"{config} is not a model's configuration: {error}", hint="Move it away, or fetch it again."
        ) from error
    with torch.device("meta"):
        vit: Any = build_vit(card)
    block = vit.blocks[0]
    activation = type(block.mlp.act).__name__.lower() if hasattr(block.mlp, "act") else None
    ours = {"num_attention_heads": block.attn.num_heads, "num_heads": block.attn.num_heads}
    if facts.get("model_type") in ("vit", "dinov2", "dinov2_with_registers"):
        ours["layer_norm_eps"] = block.norm1.eps
        if not facts.get("use_swiglu_ffn"):  # SwiGLU ignores hidden_act
            ours["hidden_act"] = activation
    elif isinstance(facts.get("act_layer"), str):
        ours["act_layer"] = activation
    wrong = [
        f"{name} is {facts[name]} in {config}, {value} in the encoder"
        for name, value in ours.items()
        if name in facts and facts[name] != value
    ]
    if wrong:
        raise WeightsMismatchError(
            f"The weights do not fit {card.name}: {'; '.join(wrong)}.", hint="Is it another encoder's folder?"
        )
