"""The encoder weights that a run started from, described for its model card and for reports. Does not import torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tapfm.encoders.card import EncoderCard

_SOURCES = {
    "package": "the file that comes with tapfm",
    "local": "a local file",
    "features": "features that tapfm embed computed",
    "unknown": "not recorded by the version of tapfm that started the run",
}


@dataclass(frozen=True)
class BaseWeights:
    """The weights before adaptation, or those that computed the stored features of a run with a fixed encoder."""

    card: EncoderCard  # of the encoder that the run was configured with
    sha256: str | None
    source: str  # package, hub, local; features of tapfm or of another tool; unknown
    file: str | None = None
    repository: str | None = None  # on the Hugging Face Hub, if the file is from there
    revision: str | None = None
    other_tool: str = ""  # tool and encoder that created the stored features, if not tapfm

    @property
    def are_published(self) -> bool | None:
        """Whether they are the published weights of the encoder; None if that is unknown."""
        if self.sha256 is None:
            return None
        if self.card.sha256 is not None:
            return self.sha256 == self.card.sha256
        return True if self.source in ("hub", "package") else None

    def describe(self) -> dict[str, str]:
        """Return what is known about the weights, as titles and texts."""
        comes_from = _SOURCES.get(self.source, "")
        if self.source == "hub":
            revision = f", revision {self.revision}" if self.revision else ""
            comes_from = f"Hugging Face Hub: {self.repository}{revision}"
        elif self.other_tool:
            comes_from = f"features of another tool: {self.other_tool}"
        lines = {"source": comes_from, "file": self.file or "", "SHA-256": self.sha256 or "not recorded"}
        return {title: text for title, text in lines.items() if text} | {
            f"published weights of {self.card.name}": self._compare_with_published()
        }

    def _compare_with_published(self) -> str:
        if self.sha256 is None:
            return "unknown, because the SHA-256 was not recorded"
        if self.card.sha256 is None:
            return "yes" if self.are_published else "unknown, because tapfm has no SHA-256 of the published file"
        return "yes, the same SHA-256" if self.are_published else f"no, the published file has {self.card.sha256}"


def read_base_weights(
    recorded: Mapping[str, Any], sha256: str | None, card: EncoderCard, *, adapted: bool
) -> BaseWeights:
    """Return the weights from what a run or an export recorded.

    recorded: `weights` and `features_source` as in environment.json; they may be missing in files of older versions.
    """
    if other_tool := recorded.get("features_source"):
        return BaseWeights(card, sha256, "other tool", other_tool=other_tool)
    if not adapted:
        return BaseWeights(card, sha256, "features" if sha256 else "unknown")
    weights = recorded.get("weights") or {}
    source = weights.get("source", "unknown")
    return BaseWeights(card, sha256, source, weights.get("file"), weights.get("repository"), weights.get("revision"))
