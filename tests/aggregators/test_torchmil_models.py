"""Models of torchmil as aggregators, with their losses, tile scores and graphs."""

import inspect
import subprocess
import sys

import numpy as np
import pytest
import torch
from support import POSITIVE, TASK, random_tiles, relative_difference, small_encoder, total_loss

from tapfm.adaptation.chunked import Chunking
from tapfm.adaptation.learner import Learner, OptimiserSettings
from tapfm.adaptation.two_graph import AdaptationSettings
from tapfm.aggregators.catalog import build_aggregator, find_aggregator_card
from tapfm.aggregators.torchmil_catalog import TORCHMIL_MODELS
from tapfm.errors import InputError, SettingError, UnknownNameError
from tapfm.inference.bags import Bag
from tapfm.runs.model import SlideModel
from tapfm.runs.model import _AggregatorWithCoordinates as AggregatorWithCoordinates

models = pytest.importorskip("torchmil.models")

from tapfm.aggregators.torchmil_models import _build_adjacency as build_adjacency  # noqa: E402

every_model = pytest.mark.parametrize("model", TORCHMIL_MODELS)
SMALL = {
    "TransMIL": {"att_dim": 16, "n_landmarks": 4},
    "GTP": {"att_dim": 16, "n_clusters": 4},
    "TransformerABMIL": {"transf_att_dim": 16},
    "CAMIL": {"nystrom_att_dim": 16, "n_landmarks": 4},
}
# models that cannot be aggregators of tapfm, and the reason
UNSUPPORTED = {
    "MILModel": "base class",
    "MILModelWrapper": "a wrapper",
    "IIBMIL": "its prototypes are not parameters, so a checkpoint does not contain them",
    "VAEABMIL": "needs a variational autoencoder as an argument",
    "SETMIL": "needs a complete grid of tiles",
    "ProbSmoothABMIL": "its output is random",
    "TransformerProbSmoothABMIL": "its output is random",
    "SmoothABMIL": "a variant of ProbSmoothABMIL",
    "SmABMIL": "its spectral norms are not parameters, so a checkpoint does not contain them",
    "SmTransformerABMIL": "its spectral norms are not parameters, so a checkpoint does not contain them",
}


def build_small_model(model, feature_size=24):
    torch.manual_seed(0)
    return build_aggregator(f"torchmil:{model}", feature_size, 1, options=SMALL.get(model, {}))


def random_bag(tiles, feature_size=24):
    generator = torch.Generator().manual_seed(0)
    z_KD = torch.randn(tiles, feature_size, generator=generator)
    positions = torch.stack([torch.arange(tiles) % 5, torch.arange(tiles) // 5], 1).float()
    return z_KD, torch.zeros(tiles), positions


def run_aggregator(aggregator, z_KD, r_K, positions):
    return SlideModel(None, aggregator, TASK).aggregator_for(positions)(z_KD, r_K)


def test_every_model_of_torchmil_is_supported_or_listed_as_unsupported():
    available = {name for name, each in vars(models).items() if inspect.isclass(each)}
    assert available == set(TORCHMIL_MODELS) | set(UNSUPPORTED)
    for name, model in TORCHMIL_MODELS.items():
        arguments = inspect.signature(getattr(models, name).forward).parameters
        assert ("adj" in arguments) is model.uses_graph


@every_model
@pytest.mark.parametrize("tiles", [1, 12])
def test_output_has_logit_tile_scores_and_finite_gradients(model, tiles):
    aggregator, (z_KD, r_K, positions) = build_small_model(model), random_bag(tiles)
    z_KD.requires_grad_()
    total_loss(run_aggregator(aggregator, z_KD, r_K, positions), TASK, POSITIVE).backward()
    assert z_KD.grad.isfinite().all()
    assert z_KD.grad.norm() > 0
    assert not list(aggregator.buffers()), "a checkpoint contains only parameters"
    aggregator.eval()
    with torch.no_grad():
        output = run_aggregator(aggregator, z_KD, r_K, positions)
    assert output.logits_C.shape == (1,)
    assert output.heatmap_scores.shape == (tiles,)
    assert output.heatmap_scores.isfinite().all()
    assert torch.equal(run_aggregator(aggregator, z_KD, r_K, positions).logits_C, output.logits_C), (
        "inference is deterministic"
    )


@every_model
def test_logit_and_loss_terms_are_those_of_torchmil(model):
    """Except for the slide loss, which is that of the task, and the instance loss of CLAM, which tapfm corrects."""
    aggregator, (z_KD, r_K, positions) = build_small_model(model).eval(), random_bag(12)
    output = run_aggregator(aggregator, z_KD, r_K, positions)
    graph = {"adj": build_adjacency(positions)[None]} if aggregator.uses_coordinates else {}
    if model == "DTFDMIL":
        graph = {"mask": torch.ones(1, 12)}
        np.random.seed(0)  # it assigns tiles to pseudo-bags at random
    logit, losses = aggregator.model.compute_loss(torch.ones(1), z_KD[None], **graph)
    if model == "DSMIL":  # here torchmil returns the mean of its two streams
        logit = aggregator.model(z_KD[None])
    torch.testing.assert_close(output.logits_C, logit)
    _, *extra_terms = losses.values()
    assert (output.extra_loss is not None) is bool(extra_terms)
    if extra_terms:
        weight = TASK.weights.positive if model in ("DSMIL", "DTFDMIL") else 1.0  # class weight of the task
        torch.testing.assert_close(output.extra_loss(TASK, POSITIVE), weight * sum(extra_terms))


def test_tile_scores_of_transmil_are_its_attention():
    aggregator = build_small_model("TransMIL").eval()
    for tiles in (1, 3, 12, 30):
        z_KD, r_K, _ = random_bag(tiles)
        _, attention = aggregator.model(z_KD[None], return_att=True)
        torch.testing.assert_close(aggregator(z_KD, r_K).heatmap_scores, attention[0], rtol=1e-4, atol=1e-6)


def test_adjacent_tiles_are_connected():
    positions = torch.tensor([[0.0, 0.0], [1.0, 0.0], [2.005, 1.0], [9.0, 9.0]])  # one is rounded, one has no neighbour
    adjacency = build_adjacency(positions)
    half = 2**-0.5
    expected = torch.tensor([[0, half, 0, 0], [half, 0, half, 0], [0, half, 0, 0], [0, 0, 0, 1]])
    torch.testing.assert_close(adjacency, expected)
    assert build_adjacency(positions[:1]).tolist() == [[1]]


def test_graph_depends_on_positions_not_on_tile_order():
    aggregator, (z_KD, r_K, positions) = build_small_model("PatchGCN").eval(), random_bag(12)
    order = torch.randperm(12, generator=torch.Generator().manual_seed(1))
    logit = run_aggregator(aggregator, z_KD, r_K, positions).logits_C
    torch.testing.assert_close(run_aggregator(aggregator, z_KD[order], r_K, positions[order]).logits_C, logit)
    assert not torch.allclose(run_aggregator(aggregator, z_KD[order], r_K, positions).logits_C, logit, atol=1e-6)


def test_graph_model_without_positions_is_an_error():
    model = SlideModel(None, build_small_model("GTP"), TASK)
    z_KD, r_K, _ = random_bag(5)
    with pytest.raises(InputError, match="uses tile coordinates") as raised:
        model.aggregator_for()(z_KD, r_K)
    assert "tapfm embed" in raised.value.hint


@every_model
def test_chunked_training_has_the_gradient_of_one_pass(model):
    gradients = []
    for chunking in (Chunking(), Chunking(2, keep_graphs=0)):
        encoder = small_encoder(dtype=torch.float32)
        slide = SlideModel(encoder, build_small_model(model, encoder.feature_size), TASK)
        learner = Learner(
            slide, AdaptationSettings(lambda_=0.0, chunking=chunking), OptimiserSettings(aggregator_lr=1e-3)
        )
        learner.start_epoch(0)
        tiles = random_tiles(encoder)
        bag_of_tiles = Bag(tiles, np.arange(5), coordinates=random_bag(5)[2])
        torch.manual_seed(1)
        learner.train_step(bag_of_tiles, POSITIVE, update=False, slide_id="s")
        gradients.append(torch.cat([each.grad.flatten() for each in encoder.parameters() if each.grad is not None]))
    assert gradients[0].norm() > 0
    assert relative_difference(*gradients) < 1e-3  # float32
    losses = [learner.train_step(bag_of_tiles, POSITIVE, update=True, slide_id="s").loss_agg for _ in range(6)]
    assert losses[-1] < losses[0]


def test_pseudo_bags_depend_on_torch_seed_and_leave_numpy_state_unchanged():
    aggregator = build_aggregator("torchmil:DTFDMIL", 24, 1, options={"distill_mode": "afs"})
    z_KD, r_K, _ = random_bag(30)
    before = np.random.get_state()[1].tolist()
    logits = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        logits.append(aggregator(z_KD, r_K).logits_C)
    assert torch.equal(logits[0], logits[1])
    assert not torch.equal(logits[0], logits[2])
    assert np.random.get_state()[1].tolist() == before


def test_unknown_model_is_an_error_that_lists_the_models():
    with pytest.raises(UnknownNameError, match="no torchmil model named 'TransMill'") as raised:
        find_aggregator_card("torchmil:TransMill")
    assert "Did you mean: TransMIL" in raised.value.hint
    assert "PatchGCN" in raised.value.hint


def test_several_targets_are_an_error():
    with pytest.raises(SettingError, match="torchmil:TransMIL supports one target, but there are 2") as raised:
        build_aggregator("torchmil:TransMIL", 8, 2)
    assert "cls-gated" in raised.value.hint


def test_layer_norm_is_an_error():
    with pytest.raises(SettingError, match="has its own head") as raised:
        build_aggregator("torchmil:ABMIL", 8, 1, layer_norm=True)
    assert "head.layer_norm = false" in raised.value.hint


def test_options_are_arguments_of_the_constructor():
    aggregator = build_aggregator("torchmil:ABMIL", 8, 1, options={"gated": True, "att_dim": 4, "att_act": "relu"})
    assert aggregator.model.pool.gated
    assert aggregator.model.pool.fc1.module.weight.shape == (4, 8)
    with pytest.raises(UnknownNameError, match="no option of the aggregator torchmil:ABMIL named 'gatted'") as raised:
        build_aggregator("torchmil:ABMIL", 8, 1, options={"gatted": True})
    assert raised.value.hint.startswith("Did you mean: gated")
    assert raised.value.hint.endswith("Available: att_dim, att_act, gated")
    for options, valid in (
        ({"gated": 1}, "true or false"),
        ({"att_dim": 4.0}, "an integer"),
        ({"att_act": 3}, "a string"),
        ({"feat_ext": "x"}, "Available"),
    ):
        with pytest.raises(InputError) as raised:
            build_aggregator("torchmil:ABMIL", 8, 1, options=options)
        assert valid in raised.value.hint


def test_error_of_torchmil_is_reported_with_its_reason():
    with pytest.raises(SettingError, match=r"torchmil cannot build ABMIL .*'tanh', 'relu' or 'gelu'"):
        build_aggregator("torchmil:ABMIL", 8, 1, options={"att_act": "sine"})
    with pytest.raises(SettingError, match=r"torchmil cannot build TransMIL .*at least 2"):
        build_aggregator("torchmil:TransMIL", 8, 1, options={"n_layers": 1})


def test_error_without_torchmil_says_how_to_install_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "torchmil", None)
    monkeypatch.setitem(sys.modules, "torchmil.models", None)
    with pytest.raises(InputError, match="torchmil:DSMIL needs the package torchmil") as raised:
        build_aggregator("torchmil:DSMIL", 8, 1)
    assert "pip install torchmil" in raised.value.hint


def test_cards_and_other_aggregators_do_not_import_torchmil():
    code = (
        "import sys; from tapfm.aggregators.catalog import find_aggregator_card, build_aggregator;"
        "find_aggregator_card('torchmil:TransMIL').check(1, layer_norm=False); assert 'torch' not in sys.modules;"
        "build_aggregator('abmil', 8, 1); assert 'torchmil' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_aggregator_with_positions_has_the_same_parameters():
    aggregator = build_small_model("PatchGCN")
    with_positions = SlideModel(None, aggregator, TASK).aggregator_for(random_bag(5)[2])
    assert isinstance(with_positions, AggregatorWithCoordinates)
    assert dict(with_positions.named_parameters()) == dict(aggregator.named_parameters())
    assert SlideModel(None, build_small_model("ABMIL"), TASK).aggregator_for(None) is not None


def test_torchmil_can_be_imported_on_the_meta_device():
    """Runs are loaded this way, and the import of torchmil computes with tensors."""
    code = (
        "import torch; from tapfm.aggregators.catalog import build_aggregator\n"
        "with torch.device('meta'): build_aggregator('torchmil:TransMIL', 8, 1)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
