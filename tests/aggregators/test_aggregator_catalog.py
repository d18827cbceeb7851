"""The catalogue of aggregators, and what is refused before anything is built."""

import inspect
import subprocess
import sys

import pytest
import torch

from tapfm.aggregators.abmil import Abmil
from tapfm.aggregators.catalog import AGGREGATORS, aggregator_card, build_aggregator
from tapfm.errors import SettingError, UnknownNameError


def test_the_catalogue_is_read_without_torch():
    code = "import sys; import tapfm.aggregators.catalog; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("name", AGGREGATORS)
def test_a_cards_options_and_defaults_are_those_of_its_class(name):
    card = aggregator_card(name)
    parameters = inspect.signature(type(build_aggregator(name, 8, 1))).parameters
    shared = {"feature_size", "targets", "layer_norm"} | ({"tau"} if card.uses_attention else set())
    assert shared <= set(parameters)
    own = {key: parameter.default for key, parameter in parameters.items() if key not in shared}
    assert {key: option.default for key, option in card.options.items()} == own
    assert all(option.takes(option.default) for option in card.options.values())
    assert card.name == name
    assert card.summary


def test_what_is_given_reaches_the_aggregator():
    assert build_aggregator("cls-attention", 8, 2, tau=0.3).tau == 0.3
    aggregator = build_aggregator(
        "abmil", 8, 2, layer_norm=True, options={"hidden": 6, "attention": 4, "gated": False, "dropout": 0.25}
    )
    assert isinstance(aggregator, Abmil)
    assert aggregator.project[0].weight.shape == (6, 8)
    assert aggregator.scores.content[0].weight.shape == (4, 6)
    assert aggregator.scores.gate is None
    assert aggregator.project[2].p == 0.25
    assert aggregator.classifier.weight.shape == (2, 6)
    assert isinstance(aggregator.norm, torch.nn.LayerNorm)


def test_options_are_completed_with_defaults():
    settings = aggregator_card("abmil").settings({"dropout": 0})
    assert settings == {"hidden": 512, "attention": 256, "gated": True, "dropout": 0}


def test_an_unknown_aggregator_is_refused_with_the_nearest():
    with pytest.raises(UnknownNameError, match="no aggregator named 'ABMILL'") as refusal:
        aggregator_card("ABMILL")
    assert "Did you mean: abmil" in refusal.value.hint
    assert "cls-attention" in refusal.value.hint


def test_an_unknown_option_is_refused_with_those_there_are():
    with pytest.raises(UnknownNameError, match="no option of the aggregator abmil named 'hiden'") as refusal:
        build_aggregator("abmil", 8, 1, options={"hiden": 4})
    assert "Did you mean: hidden" in refusal.value.hint
    assert "hidden, attention, gated, dropout" in refusal.value.hint
    with pytest.raises(UnknownNameError) as refusal:
        build_aggregator("mean", 8, 1, options={"hidden": 4})
    assert refusal.value.hint.endswith("none")


@pytest.mark.parametrize(
    ("option", "value", "valid"),
    [
        ("hidden", 0, "a whole number, at least 1"),
        ("hidden", 6.0, "a whole number"),
        ("hidden", True, "a whole number"),
        ("dropout", 1, "a number, at least 0, below 1"),
        ("dropout", float("nan"), "a number"),
        ("dropout", "0.5", "a number"),
        ("dropout", False, "a number"),
        ("gated", 1, "true or false"),
    ],
)
def test_an_option_of_the_wrong_type_or_out_of_range_is_refused(option, value, valid):
    with pytest.raises(SettingError, match=f"option {option} of the aggregator abmil is") as refusal:
        build_aggregator("abmil", 8, 1, options={option: value})
    assert valid in refusal.value.hint


def test_a_text_is_one_of_its_choices():
    with pytest.raises(SettingError, match="option branches of the aggregator clam is 'double'") as refusal:
        build_aggregator("clam", 8, 1, options={"branches": "double"})
    assert 'It has to be "single" or "multi"; the default is single.' in refusal.value.hint
    for value in (True, 1, 0.5):
        assert not aggregator_card("clam").options["branches"].takes(value)
    assert build_aggregator("clam", 8, 3, options={"branches": "multi"}).scores.score.weight.shape[0] == 3


def test_a_name_of_torchmil_is_offered_where_none_is_known():
    with pytest.raises(UnknownNameError) as refusal:
        aggregator_card("transmil")
    assert refusal.value.hint.endswith("torchmil:MODEL")
