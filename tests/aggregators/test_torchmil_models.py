"""Models of torchmil as aggregators: each works, with its own loss and map of tiles and, if it has one, its graph."""

import inspect
import subprocess
import sys

import numpy as np
import pytest
import torch
from support import POSITIVE, TASK, relative_difference, small_encoder, some_tiles, whole_loss

from tapfm.adaptation.chunked import Chunking
from tapfm.adaptation.learner import Learner, OptimiserSettings
from tapfm.adaptation.two_graph import AdaptationSettings
from tapfm.aggregators.catalog import aggregator_card, build_aggregator
from tapfm.aggregators.torchmil_catalog import TORCHMIL_MODELS
from tapfm.errors import InputError, SettingError, UnknownNameError
from tapfm.inference.bags import Bag
from tapfm.runs.model import SlideModel
from tapfm.runs.model import _AggregatorWithCoordinates as AggregatorWithCoordinates

models = pytest.importorskip("torchmil.models")

from tapfm.aggregators.torchmil_models import _neighbours as neighbours  # noqa: E402

every_model = pytest.mark.parametrize("model", TORCHMIL_MODELS)
SMALL = {
    "TransMIL": {"att_dim": 16, "n_landmarks": 4},
    "GTP": {"att_dim": 16, "n_clusters": 4},
    "TransformerABMIL": {"transf_att_dim": 16},
    "CAMIL": {"nystrom_att_dim": 16, "n_landmarks": 4},
}
# what cannot be an aggregator of tapfm, and why
LEFT_OUT = {
    "MILModel": "the base of all",
    "MILModelWrapper": "a wrapper",
    "IIBMIL": "its prototypes are updated outside of any gradient, and are no parameters that a checkpoint holds",
    "VAEABMIL": "needs a variational autoencoder of the user's",
    "SETMIL": "needs all tiles of a grid",
    "ProbSmoothABMIL": "its answer is drawn at random",
    "TransformerProbSmoothABMIL": "its answer is drawn at random",
    "SmoothABMIL": "a variant of ProbSmoothABMIL",
    "SmABMIL": "its spectral norms are no parameters that a checkpoint holds",
    "SmTransformerABMIL": "its spectral norms are no parameters that a checkpoint holds",
}


def built(model, feature_size=24):
    torch.manual_seed(0)
    return build_aggregator(f"torchmil:{model}", feature_size, 1, options=SMALL.get(model, {}))


def bag(tiles, feature_size=24):
    generator = torch.Generator().manual_seed(0)
    z_KD = torch.randn(tiles, feature_size, generator=generator)
    places = torch.stack([torch.arange(tiles) % 5, torch.arange(tiles) // 5], 1).float()
    return z_KD, torch.zeros(tiles), places


def ask(aggregator, z_KD, r_K, places):
    return SlideModel(None, aggregator, TASK).aggregator_for(places)(z_KD, r_K)


def test_every_model_of_torchmil_is_offered_or_left_out_for_a_reason():
    there = {name for name, each in vars(models).items() if inspect.isclass(each)}
    assert there == set(TORCHMIL_MODELS) | set(LEFT_OUT)
    for name, facts in TORCHMIL_MODELS.items():
        needs = inspect.signature(getattr(models, name).forward).parameters
        assert ("adj" in needs) is facts.uses_graph


@every_model
@pytest.mark.parametrize("tiles", [1, 12])
def test_there_is_a_logit_a_map_and_finite_gradients(model, tiles):
    aggregator, (z_KD, r_K, places) = built(model), bag(tiles)
    z_KD.requires_grad_()
    whole_loss(ask(aggregator, z_KD, r_K, places), TASK, POSITIVE).backward()
    assert z_KD.grad.isfinite().all()
    assert z_KD.grad.norm() > 0
    assert not list(aggregator.buffers()), "a checkpoint holds parameters alone"
    aggregator.eval()
    with torch.no_grad():
        output = ask(aggregator, z_KD, r_K, places)
    assert output.logits_C.shape == (1,)
    assert output.heatmap_scores.shape == (tiles,)
    assert output.heatmap_scores.isfinite().all()
    assert torch.equal(ask(aggregator, z_KD, r_K, places).logits_C, output.logits_C), "the same each time"


@every_model
def test_its_logit_and_the_terms_of_its_loss_are_torchmils(model):
    """But for the slide's own term, which is the task's; and the instance loss of CLAM, which is mended."""
    aggregator, (z_KD, r_K, places) = built(model).eval(), bag(12)
    output = ask(aggregator, z_KD, r_K, places)
    graph = {"adj": neighbours(places)[None]} if aggregator.uses_positions else {}
    if model == "DTFDMIL":
        graph = {"mask": torch.ones(1, 12)}
        np.random.seed(0)  # how it deals tiles out
    logit, losses = aggregator.model.compute_loss(torch.ones(1), z_KD[None], **graph)
    if model == "DSMIL":  # torchmil reports the mean of its two streams, and learns both
        logit = aggregator.model(z_KD[None])
    torch.testing.assert_close(output.logits_C, logit)
    _, *others = losses.values()
    assert (output.extra_loss is not None) is bool(others)
    if others:
        weight = TASK.weights.positive if model in ("DSMIL", "DTFDMIL") else 1.0  # of slides, as the task weighs them
        torch.testing.assert_close(output.extra_loss(TASK, POSITIVE), weight * sum(others))


def test_the_map_of_transmil_is_its_attention_without_the_whole_matrix():
    aggregator = built("TransMIL").eval()
    for tiles in (1, 3, 12, 30):
        z_KD, r_K, _ = bag(tiles)
        _, attention = aggregator.model(z_KD[None], return_att=True)
        torch.testing.assert_close(aggregator(z_KD, r_K).heatmap_scores, attention[0], rtol=1e-4, atol=1e-6)


def test_tiles_that_touch_are_neighbours():
    places = torch.tensor([[0.0, 0.0], [1.0, 0.0], [2.005, 1.0], [9.0, 9.0]])  # rounded to a pixel; one is alone
    joined = neighbours(places)
    half = 2**-0.5
    expected = torch.tensor([[0, half, 0, 0], [half, 0, half, 0], [0, half, 0, 0], [0, 0, 0, 1]])
    torch.testing.assert_close(joined, expected)
    assert neighbours(places[:1]).tolist() == [[1]]


def test_a_graph_depends_on_places_and_not_on_the_order_of_tiles():
    aggregator, (z_KD, r_K, places) = built("PatchGCN").eval(), bag(12)
    order = torch.randperm(12, generator=torch.Generator().manual_seed(1))
    logit = ask(aggregator, z_KD, r_K, places).logits_C
    torch.testing.assert_close(ask(aggregator, z_KD[order], r_K, places[order]).logits_C, logit)
    assert not torch.allclose(ask(aggregator, z_KD[order], r_K, places).logits_C, logit, atol=1e-6)


def test_without_places_a_graph_is_refused():
    model = SlideModel(None, built("GTP"), TASK)
    z_KD, r_K, _ = bag(5)
    with pytest.raises(InputError, match="uses the coordinates of tiles") as refusal:
        model.aggregator_for()(z_KD, r_K)
    assert "tapfm embed" in refusal.value.hint


@every_model
def test_it_learns_with_the_encoder_in_chunks_as_in_one_pass(model):
    gradients = []
    for chunking in (Chunking(), Chunking(2, keep_graphs=0)):
        encoder = small_encoder(dtype=torch.float32)
        slide = SlideModel(encoder, built(model, encoder.feature_size), TASK)
        learner = Learner(
            slide, AdaptationSettings(lambda_=0.0, chunking=chunking), OptimiserSettings(aggregator_lr=1e-3)
        )
        learner.start_epoch(0)
        tiles = some_tiles(encoder)
        bag_of_tiles = Bag(tiles, np.arange(5), coordinates=bag(5)[2])
        torch.manual_seed(1)
        learner.train_step(bag_of_tiles, POSITIVE, update=False, slide_id="s")
        gradients.append(torch.cat([each.grad.flatten() for each in encoder.parameters() if each.grad is not None]))
    assert gradients[0].norm() > 0
    assert relative_difference(*gradients) < 1e-3  # float32
    losses = [learner.train_step(bag_of_tiles, POSITIVE, update=True, slide_id="s").loss_agg for _ in range(6)]
    assert losses[-1] < losses[0]


def test_dealing_tiles_out_follows_torchs_generator_and_leaves_numpys_alone():
    aggregator, (z_KD, r_K, _) = build_aggregator("torchmil:DTFDMIL", 24, 1, options={"distill_mode": "afs"}), bag(30)
    before = np.random.get_state()[1].tolist()
    logits = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        logits.append(aggregator(z_KD, r_K).logits_C)
    assert torch.equal(logits[0], logits[1])
    assert not torch.equal(logits[0], logits[2])
    assert np.random.get_state()[1].tolist() == before


def test_an_unknown_model_is_refused_with_those_there_are():
    with pytest.raises(UnknownNameError, match="no model of torchmil named 'TransMill'") as refusal:
        aggregator_card("torchmil:TransMill")
    assert "Did you mean: TransMIL" in refusal.value.hint
    assert "PatchGCN" in refusal.value.hint


def test_several_targets_are_refused():
    with pytest.raises(SettingError, match="torchmil:TransMIL has one logit, and there are 2 targets") as refusal:
        build_aggregator("torchmil:TransMIL", 8, 2)
    assert "cls-gated" in refusal.value.hint


def test_a_layer_norm_is_refused():
    with pytest.raises(SettingError, match="a head of its own") as refusal:
        build_aggregator("torchmil:ABMIL", 8, 1, layer_norm=True)
    assert "head.layer_norm = false" in refusal.value.hint


def test_options_are_those_of_the_constructor():
    aggregator = build_aggregator("torchmil:ABMIL", 8, 1, options={"gated": True, "att_dim": 4, "att_act": "relu"})
    assert aggregator.model.pool.gated
    assert aggregator.model.pool.fc1.module.weight.shape == (4, 8)
    with pytest.raises(UnknownNameError, match="no option of the aggregator torchmil:ABMIL named 'gatted'") as refusal:
        build_aggregator("torchmil:ABMIL", 8, 1, options={"gatted": True})
    assert refusal.value.hint.startswith("Did you mean: gated")
    assert refusal.value.hint.endswith("Available: att_dim, att_act, gated")
    for options, valid in (
        ({"gated": 1}, "true or false"),
        ({"att_dim": 4.0}, "a whole number"),
        ({"att_act": 3}, "a text"),
        ({"feat_ext": "x"}, "Available"),
    ):
        with pytest.raises(InputError) as refusal:
            build_aggregator("torchmil:ABMIL", 8, 1, options=options)
        assert valid in refusal.value.hint


def test_what_torchmil_refuses_is_said_with_its_reason():
    with pytest.raises(SettingError, match=r"torchmil cannot build ABMIL .*'tanh', 'relu' or 'gelu'"):
        build_aggregator("torchmil:ABMIL", 8, 1, options={"att_act": "sine"})
    with pytest.raises(SettingError, match=r"torchmil cannot build TransMIL .*at least 2"):
        build_aggregator("torchmil:TransMIL", 8, 1, options={"n_layers": 1})


def test_without_torchmil_it_is_said_how_to_install_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "torchmil", None)
    monkeypatch.setitem(sys.modules, "torchmil.models", None)
    with pytest.raises(InputError, match="torchmil:DSMIL is torchmil's, which cannot be imported") as refusal:
        build_aggregator("torchmil:DSMIL", 8, 1)
    assert 'pip install "tapfm[torchmil]"' in refusal.value.hint


def test_cards_and_the_other_aggregators_do_not_import_torchmil():
    code = (
        "import sys; from tapfm.aggregators.catalog import aggregator_card, build_aggregator;"
        "aggregator_card('torchmil:TransMIL').check(1, layer_norm=False); assert 'torch' not in sys.modules;"
        "build_aggregator('abmil', 8, 1); assert 'torchmil' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_an_aggregator_with_places_looks_like_any_other():
    aggregator = built("PatchGCN")
    placed = SlideModel(None, aggregator, TASK).aggregator_for(bag(5)[2])
    assert isinstance(placed, AggregatorWithCoordinates)
    assert dict(placed.named_parameters()) == dict(aggregator.named_parameters())
    assert SlideModel(None, built("ABMIL"), TASK).aggregator_for(None) is not None


def test_it_is_imported_where_sizes_are_tried_without_memory():
    """As a run is loaded: torchmil, and what it needs, computes with tensors when it is imported."""
    code = (
        "import torch; from tapfm.aggregators.catalog import build_aggregator\n"
        "with torch.device('meta'): build_aggregator('torchmil:TransMIL', 8, 1)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
