"""Small bags and one aggregator of each variant, for the tests of this folder."""

import torch
from support import randomise

from tapfm.aggregators.catalog import AGGREGATORS, build_aggregator
from tapfm.tasks.multilabel import MultiLabelTask

# name and options of each aggregator of the catalogue, and of variants with other options
VARIANTS = {name: (name, {}) for name in AGGREGATORS} | {
    "abmil, plain": ("abmil", {"gated": False}),
    "clam, multi": ("clam", {"branches": "multi", "instances": 2}),
    "dsmil, with values": ("dsmil", {"values": True, "nonlinear": False}),
}
THREE_TARGETS = MultiLabelTask.from_training_labels({"EGFR": [1, 0, 0], "KRAS": [1, 1, 0], "MET": [1, 0, 0]})


def build_variant(variant, feature_size=8, targets=3, **settings):
    name, options = VARIANTS[variant]
    torch.manual_seed(0)
    aggregator = build_aggregator(name, feature_size, targets, options=options, **settings).double()
    randomise(aggregator)
    return aggregator


def random_bag(tiles=7, feature_size=8, seed=0):
    generator = torch.Generator().manual_seed(seed)
    z_KD = torch.randn(tiles, feature_size, generator=generator, dtype=torch.float64)
    return z_KD, 1e-3 * torch.rand(tiles, generator=generator, dtype=torch.float64)
