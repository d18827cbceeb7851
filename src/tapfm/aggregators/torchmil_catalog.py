"""The models of torchmil that can be used as aggregators: a table that can be read without torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    pass


TORCHMIL = "torchmil:"  # what the names of its models begin with


@dataclass(frozen=True)
class _TorchmilModel:
    """A model of torchmil that can be used: what it is, and whether it needs the graph of neighbouring tiles."""

    summary: str
    uses_graph: bool = False


TORCHMIL_MODELS = {
    "ABMIL": _TorchmilModel("attention-based MIL (Ilse et al., 2018)"),
    "CLAM_SB": _TorchmilModel("CLAM of a single branch (Lu et al., 2021)"),
    "DSMIL": _TorchmilModel("dual-stream MIL (Li et al., 2021)"),
    "DTFDMIL": _TorchmilModel("pseudo-bags, and attention over them (Zhang et al., 2022)"),
    "TransMIL": _TorchmilModel("a Nystrom transformer over tiles (Shao et al., 2021)"),
    "TransformerABMIL": _TorchmilModel("a transformer over tiles, then attention (Castro-Macias et al., 2024)"),
    "PatchGCN": _TorchmilModel("convolutions over neighbouring tiles (Chen et al., 2021)", uses_graph=True),
    "DeepGraphSurv": _TorchmilModel("spectral convolutions over neighbouring tiles (Li et al., 2018)", uses_graph=True),
    "GTP": _TorchmilModel("a transformer over clusters of tiles (Zheng et al., 2022)", uses_graph=True),
    "CAMIL": _TorchmilModel("a transformer, with attention to neighbours (Fourkioti et al., 2024)", uses_graph=True),
}
