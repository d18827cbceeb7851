"""Changed settings: `--set`, `tapfm.configure` and `tapfm config` recompute the same defaults."""

import pickle
import tomllib
from itertools import product

import pytest
from command_line import tapfm as run_command
from hypothesis import given, settings
from hypothesis import strategies as st

import tapfm
from tapfm.config.loading import load_config, override_settings
from tapfm.config.text import format_config, format_toml_value
from tapfm.errors import InputError, SettingError

RUN = """
seed = 7
cohort.table = "cohort.csv"
tiles = { folder = "tiles", features = "features" }
task.targets = ["FGFR3"]
"""
RECIPES = ("paper", "reference")
ENCODERS = ("uni", "h-optimus-0", "tapfm-pocket")
METHODS_AND_AGGREGATORS = (  # None: the default of the method
    *product(("tapfm",), (None, "cls-gated")),
    *product(("finetune", "fixed"), (None, "mean", "dsmil", "cls-attention")),
)
CHOICES = [
    {"recipe": recipe, "encoder": {"name": encoder}, "adaptation": {"method": method}}
    | ({"aggregator": {"name": aggregator}} if aggregator else {})
    for recipe, encoder, (method, aggregator) in product(RECIPES, ENCODERS, METHODS_AND_AGGREGATORS)
]


def write_run(folder, choice, more=""):
    """Write a RUN.toml with some choices, and further lines."""
    lines = [f"{name} = {format_toml_value(value)}" for name, value in choice.items()]
    file = folder / "run.toml"
    file.write_text("\n".join([RUN, more, *lines]) + "\n")
    return file


def as_overrides(choice):
    """Return the options of --set for settings in tables."""
    return [
        f"{section}.{key}={format_toml_value(each)}" if isinstance(value, dict) else f"{section}={value}"
        for section, value in choice.items()
        for key, each in (value.items() if isinstance(value, dict) else [("", "")])
    ]


def change_in_every_way(file, change):
    """Return the configuration that each way of changing settings creates, without repetitions."""
    overrides, config = as_overrides(change), tapfm.configure(file)
    found = [
        load_config(file, overrides),
        tapfm.configure(file, **change),
        override_settings(config, overrides),
        override_settings(pickle.loads(pickle.dumps(config)), overrides),
    ]
    for override in overrides:  # one by one
        config = override_settings(config, [override])
    return [each for index, each in enumerate([*found, config]) if each not in found[:index]]


@pytest.mark.parametrize("choice", CHOICES, ids=lambda choice: " ".join(as_overrides(choice)))
def test_every_way_of_changing_settings_gives_the_same_defaults(tmp_path, choice):
    for first in (CHOICES[0], CHOICES[-1]):
        if choice.get("aggregator") is None and "aggregator" in first:
            continue  # the aggregator of the file stays
        (config,) = change_in_every_way(write_run(tmp_path, first), order_for_single_steps(first, choice))
        assert config == load_config(write_run(tmp_path, choice))


def order_for_single_steps(first, choice):
    """Return the settings in an order in which each of them can be changed alone."""
    from_tapfm = first["adaptation"]["method"] == "tapfm"
    return {name: choice[name] for name in sorted(choice, reverse=not from_tapfm)}


given_settings = st.fixed_dictionaries(
    {},
    optional={
        "adaptation": st.fixed_dictionaries(
            {}, optional={"tau": st.sampled_from([0.1, 1.0]), "tiles_per_slide": st.just(300)}
        ),
        "schedule": st.fixed_dictionaries(
            {}, optional={"epochs": st.sampled_from([5, 20, 50]), "first_cycle": st.just(10)}
        ),
        "head": st.fixed_dictionaries({}, optional={"layer_norm": st.booleans()}),
    },
)
changed_settings = st.fixed_dictionaries(
    {},
    optional={
        "recipe": st.sampled_from(RECIPES),
        "encoder": st.fixed_dictionaries({"name": st.sampled_from(ENCODERS)}),
        "adaptation": st.fixed_dictionaries({"method": st.sampled_from(["tapfm", "finetune", "fixed"])}),
        "schedule": st.fixed_dictionaries({"epochs": st.integers(1, 60)}),
        "seed": st.integers(0, 9),
    },
)


@settings(max_examples=60)
@given(given_settings, changed_settings)
def test_settings_that_were_given_are_kept_and_all_others_recomputed(tmp_path_factory, in_file, change):
    folder = tmp_path_factory.mktemp("run")
    file = folder / "run.toml"
    file.write_text(format_run(in_file))
    (config,) = change_in_every_way(file, change)
    for tables in (in_file, change):
        for section, values in tables.items():
            for key, value in values.items() if isinstance(values, dict) else ():
                if tables is change or key not in change.get(section, {}):
                    assert getattr(getattr(config, section), key) == value
    assert config.given_tables().keys() == tomllib.loads(file.read_text()).keys() | change.keys()


def format_run(tables):
    lines = [
        f"{section}.{key} = {format_toml_value(value)}"
        for section, values in tables.items()
        for key, value in values.items()
    ]
    return "\n".join([RUN, 'encoder.name = "uni"', *lines]) + "\n"


def test_command_and_functions_agree(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    file = write_run(tmp_path, CHOICES[0])
    options = ["adaptation.method=fixed", "encoder.name=tapfm-pocket", "tiles.features=other"]
    shown = run_command("config", file, *(part for option in options for part in ("--set", option)))
    assert shown.returncode == 0
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "shown.toml").write_text(shown.stdout)
    expected = load_config(file, options)
    assert (expected.aggregator.name, expected.adaptation.lambda_, expected.schedule.epochs) == ("abmil", 0, 50)
    assert load_config(tmp_path / "elsewhere" / "shown.toml") == expected
    assert override_settings(tapfm.configure(file), options) == expected
    change = {"adaptation": {"method": "fixed"}, "encoder": {"name": "tapfm-pocket"}, "tiles": {"features": "other"}}
    assert tapfm.configure(file, **change) == expected


def test_options_of_the_aggregator_are_recomputed_for_another_aggregator(tmp_path):
    file = write_run(tmp_path, {"encoder": {"name": "uni"}, "adaptation": {"method": "fixed"}})
    (config,) = change_in_every_way(file, {"aggregator": {"name": "dsmil"}})
    assert config == load_config(file, ["aggregator.name=dsmil"])
    assert "hidden" not in config.aggregator.options
    (config,) = change_in_every_way(file, {"aggregator": {"options": {"gated": False}}})
    assert config.aggregator.options == {"hidden": 512, "attention": 256, "gated": False, "dropout": 0.0}
    file = write_run(
        tmp_path,
        {"encoder": {"name": "uni"}, "adaptation": {"method": "fixed"}, "aggregator": {"options": {"hidden": 8}}},
    )
    for change in (load_config, lambda path, overrides: override_settings(tapfm.configure(path), overrides)):
        with pytest.raises(SettingError, match=r"aggregator\.options\.hidden: .*dsmil"):
            change(file, ["aggregator.name=dsmil"])


def test_override_of_a_complete_file_keeps_all_other_settings(tmp_path):
    """The config.toml of a run and the output of `tapfm config RUN.toml` contain every setting."""
    resolved = load_config(write_run(tmp_path, {"encoder": {"name": "uni"}, "recipe": "reference"}))
    file = tmp_path / "config.toml"
    file.write_text(format_config(resolved))
    (changed,) = change_in_every_way(file, {"encoder": {"name": "h-optimus-0"}, "schedule": {"epochs": 3}})
    values = resolved.as_tables()
    values["encoder"]["name"], values["schedule"]["epochs"] = "h-optimus-0", 3
    assert changed.as_tables() == values
    with pytest.raises(SettingError, match=r"adaptation\.lambda: must be 0 with method fixed") as caught:
        load_config(file, ["adaptation.method=fixed"])
    assert "--set keeps all other settings" in caught.value.hint


def test_copied_configuration_keeps_its_changes(tmp_path):
    """pydantic's `model_copy` changes values without this package: they count as given."""
    config = tapfm.configure(write_run(tmp_path, {"encoder": {"name": "uni"}}))
    copied = config.model_copy(update={"schedule": config.schedule.model_copy(update={"epochs": 3})})
    changed = override_settings(copied, ["seed=1"])
    assert (changed.schedule.epochs, changed.seed) == (3, 1)


def test_changing_a_result_does_not_change_its_source(tmp_path):
    given = {"targets": ["FGFR3"]}
    config = tapfm.configure(write_run(tmp_path, {"encoder": {"name": "uni"}}), task=given)
    config.given_tables()["task"]["targets"].append("TP53")
    given["targets"].append("KRAS")
    assert override_settings(config, ["seed=1"]).task.targets == ["FGFR3"]


@pytest.mark.parametrize("as_given", [str, lambda path: path, tapfm.configure], ids=["text", "path", "configuration"])
def test_functions_accept_the_run_file_as_text_path_or_configuration(tmp_path, as_given):
    run = as_given(write_run(tmp_path, {"encoder": {"name": "tapfm-pocket"}}))
    planned = tapfm.plan(run, gpu_memory=24, set=["adaptation.tiles_per_slide=30"])
    assert planned.tiles == 30
    assert tapfm.plan(run, set=["adaptation.method=fixed"]) is None
    with pytest.raises(InputError, match=r"cohort\.csv does not exist"):
        tapfm.train(run, out=tmp_path / "run", set=["adaptation.method=fixed"])
