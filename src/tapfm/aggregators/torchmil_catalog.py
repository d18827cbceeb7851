"""The models of torchmil that can be used as aggregators. Does not import torch."""

from __future__ import annotations

from dataclasses import dataclass

TORCHMIL_PREFIX = "torchmil:"  # of aggregator names


@dataclass(frozen=True)
class _TorchmilModel:
    """A supported model of torchmil; `uses_graph`: it needs the graph of adjacent tiles."""

    summary: str
    uses_graph: bool = False


TORCHMIL_MODELS = {
    "ABMIL": _TorchmilModel("attention-based MIL (Ilse et al., 2018)"),
    "CLAM_SB": _TorchmilModel("CLAM with a single branch (Lu et al., 2021)"),
    "DSMIL": _TorchmilModel("dual-stream MIL (Li et al., 2021)"),
    "DTFDMIL": _TorchmilModel("attention over pseudo-bags (Zhang et al., 2022)"),
    "TransMIL": _TorchmilModel("Nystrom transformer over tiles (Shao et al., 2021)"),
    "TransformerABMIL": _TorchmilModel("transformer over tiles, then attention (Castro-Macias et al., 2024)"),
    "PatchGCN": _TorchmilModel("graph convolutions over adjacent tiles (Chen et al., 2021)", uses_graph=True),
    "DeepGraphSurv": _TorchmilModel(
        "spectral graph convolutions over adjacent tiles (Li et al., 2018)", uses_graph=True
    ),
    "GTP": _TorchmilModel("transformer over clusters of tiles (Zheng et al., 2022)", uses_graph=True),
    "CAMIL": _TorchmilModel("transformer with attention to adjacent tiles (Fourkioti et al., 2024)", uses_graph=True),
}
