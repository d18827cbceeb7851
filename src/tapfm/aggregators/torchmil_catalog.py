"""The models of torchmil that can be used as aggregators: a table that can be read without torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    pass


TORCHMIL = "torchmil:"  # what the names of its models begin with


@dataclass(frozen=True)
class TorchmilModel:
    """A model of torchmil that can be used: what it is, and whether it needs the graph of neighbouring tiles."""

    summary: str
    uses_graph: bool = False


TORCHMIL_MODELS = {
    "ABMIL": TorchmilModel("attention-based MIL (Ilse et al., 2018)"),
    "CLAM_SB": TorchmilModel("CLAM of a single branch (Lu et al., 2021)"),
    "DSMIL": TorchmilModel("dual-stream MIL (Li et al., 2021)"),
    "DTFDMIL": TorchmilModel("pseudo-bags, and attention over them (Zhang et al., 2022)"),
    "TransMIL": TorchmilModel("a Nystrom transformer over tiles (Shao et al., 2021)"),
    "TransformerABMIL": TorchmilModel("a transformer over tiles, then attention (Castro-Macias et al., 2024)"),
    "PatchGCN": TorchmilModel("convolutions over neighbouring tiles (Chen et al., 2021)", uses_graph=True),
    "DeepGraphSurv": TorchmilModel("spectral convolutions over neighbouring tiles (Li et al., 2018)", uses_graph=True),
    "GTP": TorchmilModel("a transformer over clusters of tiles (Zheng et al., 2022)", uses_graph=True),
    "CAMIL": TorchmilModel("a transformer, with attention to neighbours (Fourkioti et al., 2024)", uses_graph=True),
}
