"""The catalogue of aggregators, and errors of invalid names and options."""

import inspect
import subprocess
import sys

import pytest
import torch

from tapfm.aggregators.abmil import Abmil
from tapfm.aggregators.catalog import AGGREGATORS, build_aggregator, find_aggregator_card
from tapfm.errors import SettingError, UnknownNameError


def test_catalogue_does_not_import_torch():
    code = "import sys; import tapfm.aggregators.catalog; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("name", AGGREGATORS)
def test_options_and_defaults_of_a_card_match_its_class(name):
    card = find_aggregator_card(name)
    parameters = inspect.signature(type(build_aggregator(name, 8, 1))).parameters
    shared = {"feature_size", "targets", "layer_norm"} | ({"tau"} if card.uses_raw_attention else set())
    assert shared <= set(parameters)
    own = {key: parameter.default for key, parameter in parameters.items() if key not in shared}
    assert {key: option.default for key, option in card.options.items()} == own
    assert all(option.accepts(option.default) for option in card.options.values())
    assert card.name == name
    assert card.summary


def test_arguments_reach_the_aggregator():
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
    options = find_aggregator_card("abmil").complete_options({"dropout": 0})
    assert options == {"hidden": 512, "attention": 256, "gated": True, "dropout": 0}


def test_unknown_aggregator_is_an_error_with_suggestions():
    with pytest.raises(UnknownNameError, match="no aggregator named 'ABMILL'") as raised:
        find_aggregator_card("ABMILL")
    assert "Did you mean: abmil" in raised.value.hint
    assert "cls-attention" in raised.value.hint


def test_unknown_option_is_an_error_that_lists_the_options():
    with pytest.raises(UnknownNameError, match="no option of the aggregator abmil named 'hiden'") as raised:
        build_aggregator("abmil", 8, 1, options={"hiden": 4})
    assert "Did you mean: hidden" in raised.value.hint
    assert "hidden, attention, gated, dropout" in raised.value.hint
    with pytest.raises(UnknownNameError) as raised:
        build_aggregator("mean", 8, 1, options={"hidden": 4})
    assert raised.value.hint.endswith("none")


@pytest.mark.parametrize(
    ("option", "value", "valid"),
    [
        ("hidden", 0, "an integer, at least 1"),
        ("hidden", 6.0, "an integer"),
        ("hidden", True, "an integer"),
        ("dropout", 1, "a number, at least 0, below 1"),
        ("dropout", float("nan"), "a number"),
        ("dropout", "0.5", "a number"),
        ("dropout", False, "a number"),
        ("gated", 1, "true or false"),
    ],
)
def test_option_of_wrong_type_or_out_of_range_is_an_error(option, value, valid):
    with pytest.raises(SettingError, match=f"option {option} of the aggregator abmil is") as raised:
        build_aggregator("abmil", 8, 1, options={option: value})
    assert valid in raised.value.hint


def test_text_option_must_be_one_of_its_choices():
    with pytest.raises(SettingError, match="option branches of the aggregator clam is 'double'") as raised:
        build_aggregator("clam", 8, 1, options={"branches": "double"})
    assert 'It has to be "single" or "multi"; the default is single.' in raised.value.hint
    for value in (True, 1, 0.5):
        assert not find_aggregator_card("clam").options["branches"].accepts(value)
    assert build_aggregator("clam", 8, 3, options={"branches": "multi"}).scores.score.weight.shape[0] == 3


def test_error_of_unknown_aggregator_mentions_torchmil():
    with pytest.raises(UnknownNameError) as raised:
        find_aggregator_card("transmil")
    assert raised.value.hint.endswith("torchmil:MODEL")
