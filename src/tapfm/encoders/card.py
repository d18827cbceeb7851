"""Encoder cards: architecture, input, weights and licence of an encoder. Does not import torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields
from importlib import resources
from pathlib import Path
from typing import Any, Literal

from tapfm.errors import InputError

Feature = Literal["cls", "cls+mean"]


Resampling = Literal["timm", "transformers", "dino"]


TIMM_PREFIX = "timm:"


@dataclass(frozen=True)
class EncoderCard:
    """Metadata of one encoder; `cards.toml` documents the fields."""

    key: str
    name: str
    architecture: str
    parameters: int
    prefix_tokens: int
    feature: Feature
    feature_size: int
    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    tile_px: int
    position_px: int
    mpp: tuple[float, ...]
    gflops: float | None
    precision: str
    licence: str
    gate: Literal["none", "terms", "manual"]
    repository: str
    file: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    resampling: Resampling | None = None
    revision: str | None = None
    sha256: str | None = None
    packaged: bool = False
    notes: str = ""

    def __post_init__(self) -> None:
        if self.position_px != self.tile_px and self.resampling is None:
            raise InputError(
                f"Encoder card '{self.key}': its position embedding is for {self.position_px} px, its tiles have "
                f"{self.tile_px} px, and the field `resampling` is missing.",
                hint='Add `resampling` to the card: "timm", "transformers" or "dino".',
            )

    @property
    def download_command(self) -> str:
        """The command that downloads the published file, if it is on the Hub, or that installs tapfm again."""
        if self.packaged:
            return "pip install --force-reinstall --no-deps . (in the tapfm checkout)"
        revision = f" --revision {self.revision}" if self.revision else ""
        return f"hf download {self.repository} {self.file}{revision}"

    @property
    def redownload_command(self) -> str:
        """The command that replaces a damaged file."""
        return self.download_command if self.packaged else f"{self.download_command} --force-download"

    @property
    def package_folder(self) -> Path:
        """The folder of the file in the package, for encoders that come with tapfm."""
        return Path(str(resources.files("tapfm.encoders").joinpath("packaged", self.key)))

    @property
    def page(self) -> str:
        """URL of the model page, with its licence and access form."""
        return f"https://huggingface.co/{self.repository}" if self.repository else ""


def card_from_table(key: str, table: Mapping[str, Any]) -> EncoderCard:
    """Build a card from a TOML table. Raises InputError for unknown or missing fields."""
    known = {f.name for f in fields(EncoderCard)} - {"key"}
    required = {f.name for f in fields(EncoderCard) if f.default is MISSING and f.default_factory is MISSING} - {"key"}
    unknown, missing = sorted(set(table) - known), sorted(required - set(table))
    if unknown or missing:
        raise InputError(
            f"Encoder card '{key}': unknown fields {unknown}, missing fields {missing}.",
            hint=f"Valid fields: {', '.join(sorted(known))}.",
        )
    values: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in table.items()}
    return EncoderCard(key=key, **values)
