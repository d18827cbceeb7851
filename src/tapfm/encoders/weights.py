"""Find the weights of an encoder (cache, hub, file or folder), check digest, names and shapes, and load them.

timm's own loading is not used: it resamples mismatched tensors silently and leaves some models with random weights.
"""

from __future__ import annotations

import argparse
import json
import pickle
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, NamedTuple

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
from tapfm.encoders.catalog import find_encoder_card
from tapfm.encoders.conversion import StateDict, convert_to_timm
from tapfm.encoders.vit import VitEncoder
from tapfm.errors import (
    GatedWeightsError,
    WeightsDigestError,
    WeightsError,
    WeightsMismatchError,
    WeightsNotFoundError,
)
from tapfm.runtime.files import file_sha256

_SUFFIXES = (".safetensors", ".bin", ".pth", ".pt")
_MAX_LISTED = 5  # mismatches named in an error

WeightsSource = Literal["package", "hub", "local"]  # comes with tapfm; Hugging Face Hub; a file that the user passed


@dataclass(frozen=True)
class Provenance:
    """Source of the weights of an encoder."""

    file: Path
    sha256: str
    published: bool | None  # whether the digest is that of the published file; None if that is unknown
    position_embedding: str  # how the position embedding was resampled, if at all
    source: WeightsSource
    repository: str | None = None  # on the Hugging Face Hub, if they are from there
    revision: str | None = None

    def as_json(self) -> dict[str, str | None]:
        """Return the source of the file without its folder, for the files of a run."""
        return {
            "source": self.source,
            "repository": self.repository,
            "revision": self.revision,
            "file": self.file.name,
        }


class LoadedEncoder(NamedTuple):
    """An encoder with its weights, its card, and where the weights came from."""

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

    weights: a file, or a folder with the layout of a Hub repository or of the Hugging Face cache. Default: the file in
        the tapfm package for an encoder that comes with tapfm, otherwise the Hugging Face cache, then the Hub.
    tile_px, feature: override those of the card; another tile size resamples the position embedding.
    extra: additional arguments for timm, such as drop_path_rate.
    """
    card = find_encoder_card(encoder) if isinstance(encoder, str) else encoder
    found = (
        _find_local_weights(card, Path(weights).expanduser()) if weights is not None else _find_published_weights(card)
    )
    digest = file_sha256(found.file)
    published = None if card.sha256 is None else digest == card.sha256
    if found.expect_published and published is False:
        download = f": {card.redownload_command}" if card.repository or card.packaged else f" ({card.notes})"
        raise WeightsDigestError(
            f"{found.file} is not the published {card.file} of {card.name}: its SHA-256 is {digest}, "
            f"expected {card.sha256}.",
            hint=f"Download it again{download}. To use your own weights, pass the file: --weights {found.file}",
        )
    if found.config is not None:
        _check_config(found.config, card)
    vit = _build_empty_vit(card, tile_px, extra)
    state = convert_to_timm(_read_checkpoint(found.file))
    position_embedding = _resample_to_tile_size(state, vit, card)
    _load_state(state, into=vit, file=found.file, card=card)
    ready = VitEncoder(vit, mean=card.mean, std=card.std, feature=feature or card.feature)
    provenance = Provenance(found.file, digest, published, position_embedding, found.source)
    if found.source == "hub":
        revision = card.revision or _find_snapshot_revision(found.file)
        provenance = replace(provenance, repository=card.repository, revision=revision)
    return LoadedEncoder(ready, card, provenance)


class _FoundWeights(NamedTuple):
    """A weights file and the config.json next to it. `expect_published`: its SHA-256 must be that of the card."""

    file: Path
    expect_published: bool
    config: Path | None = None
    source: WeightsSource = "local"


def _find_local_weights(card: EncoderCard, path: Path) -> _FoundWeights:
    """Return a file itself; in a folder, look for the published file name and then for the usual names."""
    if path.is_file():
        if path.suffix not in _SUFFIXES:
            raise WeightsError(
                f"{path} is not a weights file.", hint=f"Use a file that ends in {', '.join(_SUFFIXES)}."
            )
        return _FoundWeights(path, expect_published=False, config=_find_config(path))
    if not path.is_dir():
        raise WeightsNotFoundError(
            f"There is no file or folder {path}.",
            hint="Pass a weights file to --weights, or a folder with the layout of a Hugging Face Hub repository.",
        )
    names = list(dict.fromkeys([card.file, "model.safetensors", "pytorch_model.bin"]))
    folders = [path]
    if card.repository:  # the layout of the Hugging Face cache: models--owner--name/snapshots/revision/
        cached = path / f"models--{card.repository.replace('/', '--')}" / "snapshots"
        folders += [cached / card.revision] if card.revision else sorted(cached.glob("*"))
    for folder in folders:
        for name in names:
            if (folder / name).is_file():
                config = _find_config(folder / name)
                return _FoundWeights(folder / name, name == card.file and not _is_exported(config), config)
    raise WeightsNotFoundError(
        f"The folder {path} has no weights of {card.name}: looked for {', '.join(names)}.",
        hint=f"Copy the files of {card.page or 'its download page'} to the folder.",
    )


def _is_exported(config: Path | None) -> bool:
    """Return whether `tapfm export` wrote the folder: adapted weights with the published file name."""
    try:
        return config is not None and "tapfm" in json.loads(config.read_text())
    except (OSError, ValueError, TypeError):
        return False


def _find_config(file: Path) -> Path | None:
    """Return the config.json in the folder of a weights file, if any."""
    config = file.parent / "config.json"
    return config if config.is_file() else None


def _find_published_weights(card: EncoderCard) -> _FoundWeights:
    """Return the file from the tapfm package, the Hugging Face cache, or the hub."""
    if card.packaged:
        if not (card.package_folder / card.file).is_file():
            raise WeightsNotFoundError(
                f"{card.file} of {card.name}, which comes with tapfm, is missing from {card.package_folder}.",
                hint=f"Install tapfm again: {card.redownload_command}",
            )
        return _find_local_weights(card, card.package_folder)._replace(source="package")
    if not card.repository:
        download = f"Download {card.file} ({card.notes}), and pass it" if card.sha256 else "Pass a weights file"
        raise WeightsNotFoundError(f"{card.name} is not on the Hugging Face Hub.", hint=f"{download}: --weights FILE")
    cached = try_to_load_from_cache(card.repository, card.file, revision=card.revision)
    if isinstance(cached, str):
        return _FoundWeights(Path(cached), expect_published=True, source="hub")
    try:
        file = hf_hub_download(card.repository, card.file, revision=card.revision)
    except GatedRepoError as error:
        raise _make_gated_error(card) from error
    except RepositoryNotFoundError as error:
        if card.gate != "none":  # for users without access, the hub reports a gated model as not found
            raise _make_gated_error(card) from error
        raise WeightsNotFoundError(
            f"The Hugging Face Hub has no repository {card.repository}.", hint="Pass a weights file: --weights FILE"
        ) from error
    except (LocalEntryNotFoundError, OfflineModeIsEnabled, ConnectionError) as error:
        raise WeightsNotFoundError(
            f"The weights of {card.name} are not in the Hugging Face cache, and the Hub cannot be reached.",
            hint=f"On a machine with network access, run: {card.download_command}. Then copy the cache, or pass "
            "--weights FILE.",
        ) from error
    except (EntryNotFoundError, HfHubHTTPError) as error:
        raise WeightsNotFoundError(
            f"Could not download {card.file} of {card.repository}: {str(error).splitlines()[0]}",
            hint="Try again later, or pass a weights file: --weights FILE",
        ) from error
    return _FoundWeights(Path(file), expect_published=True, source="hub")


def _find_snapshot_revision(file: Path) -> str | None:
    """Return the revision of a file in the Hugging Face cache: the name of the folder below `snapshots`."""
    return next((folder.name for folder, parent in pairwise(file.parents) if parent.name == "snapshots"), None)


def _make_gated_error(card: EncoderCard) -> GatedWeightsError:
    wait = " and wait for approval" if card.gate == "manual" else ""
    return GatedWeightsError(
        f"{card.name} is gated: you have to accept its licence ({card.licence}) first.",
        hint=f"1. Accept it on {card.page}{wait}. 2. Log in: hf auth login (or set HF_TOKEN). "
        "3. Run the command again.",
    )


def _build_empty_vit(card: EncoderCard, tile_px: int | None, extra: Mapping[str, Any] | None) -> nn.Module:
    """Build the architecture on the meta device, so that no parameter can keep random values."""
    with torch.device("meta"):
        vit = build_vit(card, tile_px=tile_px, extra=extra)
    computed = {name for name, _ in vit.named_buffers()} - set(vit.state_dict())
    # Buffers that are not in checkpoints (rotary periods) are computed when the model is built on a real device.
    return build_vit(card, tile_px=tile_px, extra=extra) if computed else vit


def _read_checkpoint(file: Path) -> Mapping[str, Any]:
    """Read a weights file; pickles are loaded with `weights_only`, so that no code runs."""
    with file.open("rb") as opened:
        start = opened.read(64)
    if not start or start.startswith((b"version https://git-lfs", b"<")):
        content = "empty" if not start else "a web page or a git LFS pointer, not a weights file"
        raise WeightsError(f"{file} is {content}.", hint="Download the file again (git LFS: git lfs pull).")
    try:
        if file.suffix == ".safetensors":
            return load_file(file)
        # The training script of DINO saves its command line, an argparse.Namespace, with the weights.
        with torch.serialization.safe_globals([argparse.Namespace]):
            loaded = torch.load(file, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise WeightsError(
            f"{file} is not a checkpoint, or contains Python objects other than tensors. They could run code, so tapfm "
            "does not load it.",
            hint="If you trust the file, save it again with torch.save(model.state_dict(), ...).",
        ) from error
    except (SafetensorError, RuntimeError, EOFError, LookupError, ValueError) as error:
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise WeightsError(
            f"{file} cannot be read as weights: {reason}", hint="Download, copy or export it again."
        ) from error
    if not isinstance(loaded, Mapping):
        raise WeightsMismatchError(
            f"{file} contains a {type(loaded).__name__}, not a dictionary of tensors.", hint="Save a state_dict()."
        )
    return loaded


def _load_state(state: StateDict, *, into: nn.Module, file: Path, card: EncoderCard) -> None:
    """Load every parameter from the checkpoint. Raises WeightsMismatchError, which lists the first mismatches."""
    wanted = into.state_dict()
    missing = [f"  missing     {name} {list(wanted[name].shape)}" for name in wanted if name not in state]
    unexpected = [f"  unexpected  {name} {list(state[name].shape)}" for name in state if name not in wanted]
    reshaped = [
        f"  wrong shape {name}: {list(state[name].shape)} in the file, {list(tensor.shape)} in the encoder"
        for name, tensor in wanted.items()
        if name in state and state[name].shape != tensor.shape
    ]
    if missing or unexpected or reshaped:
        shown = [line for kind in (reshaped, missing, unexpected) for line in kind[:_MAX_LISTED]]
        raise WeightsMismatchError(
            f"{file} does not match {card.name} ({len(missing)} tensors missing, {len(unexpected)} unexpected, "
            f"{len(reshaped)} of the wrong shape):\n" + "\n".join(shown),
            hint=f"Is it the file of another encoder? The published file is {card.file} of {card.page or card.name}.",
        )
    bad = [name for name, tensor in state.items() if not tensor.is_floating_point() or not tensor.isfinite().all()]
    if bad:
        raise WeightsMismatchError(
            f"{file} contains integers, NaN or infinite values: {', '.join(bad[:_MAX_LISTED])}.",
            hint="Save the original weights in float32 or bfloat16, or use another checkpoint.",
        )
    # Copied: tensors that share memory in the file would be tied in training.
    copied = {name: tensor.to(torch.float32, copy=True) for name, tensor in state.items()}
    into.load_state_dict(copied, strict=True, assign=True)


def _resample_to_tile_size(state: StateDict, vit: Any, card: EncoderCard) -> str:
    """Resample the position embedding to the tile size of the encoder, in place; return a description.

    If its size is not that of the card, it is not changed; loading fails later if it does not match the encoder.
    """
    embedding = state.get("pos_embed")
    if embedding is None or vit.pos_embed is None:
        return "rotary, nothing to resample" if vit.pos_embed is None else "missing"
    patch = int(vit.patch_embed.patch_size[0])
    old, new = card.position_px // patch, int(vit.patch_embed.grid_size[0])
    prefix = vit.pos_embed.shape[1] - new * new
    if old == new or embedding.shape[1] != prefix + old * old:
        return "as trained"
    method: Resampling = card.resampling or "timm"
    state["pos_embed"] = _resample_positions(embedding.float(), old, new, prefix, method)
    return f"resampled from {old} x {old} to {new} x {new} patches as {method} does"


def _resample_positions(embedding: Tensor, old: int, new: int, prefix: int, method: Resampling) -> Tensor:
    """Resample a square position embedding with the method of the encoder's original code."""
    if method == "timm":  # antialiased
        resampled: Tensor = resample_abs_pos_embed(embedding, [new, new], [old, old], num_prefix_tokens=prefix)
        return resampled
    grid = embedding[:, prefix:].unflatten(1, (old, old)).permute(0, 3, 1, 2)
    if method == "transformers":
        grid = F.interpolate(grid, size=(new, new), mode="bicubic", align_corners=False)
    else:  # DINO passes the scale, plus a small offset, instead of the size
        grid = F.interpolate(grid, scale_factor=(new + 0.1) / old, mode="bicubic")
    return torch.cat([embedding[:, :prefix], grid.permute(0, 2, 3, 1).flatten(1, 2)], dim=1)


def _check_config(config: Path, card: EncoderCard) -> None:
    """Check heads, epsilon and activation, which shapes do not show, against a config.json of transformers or timm."""
    try:
        values = json.loads(config.read_text())
        values = {**values, **values.get("model_args", {})}
    except (ValueError, TypeError, AttributeError) as error:
        raise WeightsError(
            f"{config} is not a model configuration: {error}", hint="Remove the file, or download it again."
        ) from error
    with torch.device("meta"):
        vit: Any = build_vit(card)
    block = vit.blocks[0]
    activation = type(block.mlp.act).__name__.lower() if hasattr(block.mlp, "act") else None
    expected = {"num_attention_heads": block.attn.num_heads, "num_heads": block.attn.num_heads}
    if values.get("model_type") in ("vit", "dinov2", "dinov2_with_registers"):
        expected["layer_norm_eps"] = block.norm1.eps
        if not values.get("use_swiglu_ffn"):  # SwiGLU ignores hidden_act
            expected["hidden_act"] = activation
    elif isinstance(values.get("act_layer"), str):
        expected["act_layer"] = activation
    wrong = [
        f"{name} is {values[name]} in {config}, {value} in the encoder"
        for name, value in expected.items()
        if name in values and values[name] != value
    ]
    if wrong:
        raise WeightsMismatchError(
            f"The weights do not match {card.name}: {'; '.join(wrong)}.", hint="Is it the folder of another encoder?"
        )
