"""RUN.toml: recipes, validation, and `tapfm config`."""

import contextlib
import re
import shlex
import signal
import sys
import tomllib

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tapfm.aggregators.catalog import AGGREGATORS
from tapfm.cli.main import main
from tapfm.config.loading import _add_override as add_override
from tapfm.config.loading import list_settings, load_config, resolve_config
from tapfm.config.settings import AggregatorSection
from tapfm.config.text import format_config, format_starter_config, format_toml_value
from tapfm.errors import InputError, SettingError

RECIPES, METHODS = ("paper", "reference"), ("tapfm", "finetune", "fixed")
ENCODERS = ("uni", "gigapath", "h-optimus-0", "virchow2", "tapfm-pocket")
CASES = [(recipe, method, encoder) for recipe in RECIPES for method in METHODS for encoder in ENCODERS]
COMMENTED_SETTING = re.compile(r"# (\w+ = .*)")
EXAMPLE = "# not set; "


def make_starter_config(recipe="paper", method="tapfm", encoder="uni", **given):
    """Return the starter file of `tapfm config`."""
    nothing = dict.fromkeys(("cohort", "tiles", "features", "folder"))
    text, _ = format_starter_config(**(nothing | {"recipe": recipe, "encoder": encoder, "method": method} | given))
    return text


def load_text(folder, text, *changes):
    (folder / "run.toml").write_text(text)
    return load_config(folder / "run.toml", changes)


def resolve_with(*changes, recipe="paper", method="tapfm", encoder="uni"):
    """Resolve the starter file with overrides such as "schedule.epochs=5"."""
    tables = tomllib.loads(make_starter_config(recipe, method, encoder))
    for change in changes:
        add_override(tables, change)
    return resolve_config(tables)


def find_problems(*changes, **given):
    """Return the problems that the error lists."""
    with pytest.raises(SettingError) as caught:
        resolve_with(*changes, **given)
    first, *lines = caught.value.message.splitlines()
    assert first == f"The configuration has {'1 problem' if len(lines) == 1 else f'{len(lines)} problems'}:"
    assert caught.value.hint.endswith("tapfm config")
    return [line.strip() for line in lines]


@pytest.fixture
def tapfm(monkeypatch, capsys):
    """Return a function that runs a command in this process and returns exit code, stdout and stderr."""
    handler = signal.getsignal(signal.SIGTERM)

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["tapfm", *map(str, arguments)])
        with pytest.raises(SystemExit) as stopped:
            main()
        return (stopped.value.code, *capsys.readouterr())

    yield run
    signal.signal(signal.SIGTERM, handler)


# Recipes


@pytest.mark.parametrize(("encoder", "tiles"), [("uni", 300), ("gigapath", 100), ("h-optimus-0", 75)])
@pytest.mark.parametrize("method", ["tapfm", "finetune"])
def test_number_of_sampled_tiles_is_that_of_the_paper(encoder, tiles, method):
    for recipe in RECIPES:
        assert resolve_with(recipe=recipe, method=method, encoder=encoder).adaptation.tiles_per_slide == tiles


@pytest.mark.parametrize(("method", "epochs"), [("tapfm", 20), ("finetune", 50), ("fixed", 50)])
def test_recipe_paper_is_the_protocol_of_the_paper(method, epochs):
    config = resolve_with(method=method)
    assert config.optimiser.model_dump() == {
        "encoder_lr": 1e-6,
        "aggregator_lr": 1e-5,
        "weight_decay": 1e-4,
        "decay_all": True,
        "clip_norm": 0,
        "slides_per_step": 1,
        "moments": "auto",
    }
    assert config.schedule.model_dump() == {
        "epochs": epochs,
        "first_cycle": 10,
        "cycle_factor": 2,
        "encoder_lr_min": 0,
        "aggregator_lr_min": 0,
    }
    assert config.augmentation.model_dump() == {
        "flip": 0.5,
        "rotate_90": True,
        "blur": 0.5,
        "blur_radius": (0.1, 0.8),
        "stain_jitter": 0,
    }
    assert (config.adaptation.tau, config.adaptation.beta, config.adaptation.bag_gradient) == (1, 0, "before")
    assert (config.head.layer_norm, config.head.label_smoothing) == (False, 0)
    assert (config.task.weighting, config.selection.validation_tiles) == ("balanced", "all")


@pytest.mark.parametrize("method", METHODS)
def test_recipe_reference_differs_only_where_the_scripts_do(method):
    paper, reference = (resolve_with(recipe=recipe, method=method).as_tables() for recipe in RECIPES)
    differing = {
        f"{section}.{key}": value
        for section in paper
        if isinstance(paper[section], dict)
        for key, value in reference[section].items()
        if value != paper[section][key]
    }
    assert differing == {
        "task.weighting": "reference",
        "head.layer_norm": True,
        "head.label_smoothing": 0.1,
        "adaptation.tau": 0.1,
        "optimiser.weight_decay": 0.01,
        "optimiser.decay_all": False,
        "schedule.first_cycle": reference["schedule"]["epochs"],
        "schedule.encoder_lr_min": 1e-8,
        "schedule.aggregator_lr_min": 1e-7,
        "selection.validation_tiles": 1000,
    }


def test_first_cycle_of_recipe_reference_is_the_whole_run():
    assert resolve_with("schedule.epochs=5", recipe="reference").schedule.first_cycle == 5
    assert resolve_with("schedule.epochs=5", "schedule.first_cycle=3", recipe="reference").schedule.first_cycle == 3
    assert resolve_with("schedule.epochs=5").schedule.first_cycle == 10


@pytest.mark.parametrize(
    ("method", "aggregator", "attention_loss", "uses_tiles"),
    [("tapfm", "cls-attention", 1, 300), ("fixed", "abmil", 0, "all")],
)
def test_method_sets_aggregator_attention_loss_and_tiles(method, aggregator, attention_loss, uses_tiles):
    config = resolve_with(method=method)
    assert config.aggregator.name == aggregator
    assert config.adaptation.lambda_ == attention_loss
    assert config.adaptation.tiles_per_slide == uses_tiles


def test_packaged_encoder_has_larger_learning_rates():
    for recipe in RECIPES:
        config = resolve_with(recipe=recipe, encoder="tapfm-pocket")
        assert (config.optimiser.encoder_lr, config.optimiser.aggregator_lr) == (1e-4, 1e-3)


def test_number_of_tiles_of_a_timm_encoder_depends_on_its_size():
    assert resolve_with(encoder="timm:vit_tiny_patch16_224").adaptation.tiles_per_slide == 300


def test_aggregator_options_are_completed_with_defaults():
    options = resolve_with("aggregator.options.gated=false", method="finetune").aggregator.options
    assert options == {"hidden": 512, "attention": 256, "gated": False, "dropout": 0.0}
    assert resolve_with("aggregator.name=mean", method="finetune").aggregator.options == {}


def test_cohort_tiles_encoder_and_targets_are_sufficient():
    config = resolve_config(
        {"cohort": {"table": "c"}, "tiles": {"folder": "t"}, "encoder": {"name": "uni"}, "task": {"targets": ["A"]}}
    )
    assert (config.recipe, config.adaptation.method, config.seed) == ("paper", "tapfm", 0)


# The starter file and the resolved file


@pytest.mark.parametrize(("recipe", "method", "encoder"), CASES)
def test_resolved_file_resolves_to_itself(tmp_path, recipe, method, encoder):
    config = load_text(tmp_path, make_starter_config(recipe, method, encoder))
    assert (config.recipe, config.adaptation.method, config.encoder.name) == (recipe, method, encoder)
    (tmp_path / "elsewhere").mkdir()
    again = load_text(tmp_path / "elsewhere", format_config(config))
    assert again == config
    assert format_config(again) == format_config(config)


@pytest.mark.parametrize(("recipe", "method", "encoder"), CASES)
def test_all_settings_of_the_starter_file_can_be_uncommented(tmp_path, recipe, method, encoder):
    lines = make_starter_config(recipe, method, encoder).splitlines()
    without_examples = [line if EXAMPLE in line else COMMENTED_SETTING.sub(r"\1", line) for line in lines]
    assert load_text(tmp_path, "\n".join(without_examples)) == load_text(tmp_path, "\n".join(lines))
    everything = tomllib.loads("\n".join(COMMENTED_SETTING.sub(r"\1", line) for line in lines))
    written = {(name,) for name in everything} | {
        (name, key) for name, table in everything.items() if isinstance(table, dict) for key in table
    }
    assert written == set(list_settings())
    assert resolve_config(everything).cohort.fold == 0


@pytest.mark.parametrize(("recipe", "method"), [(recipe, method) for recipe in RECIPES for method in METHODS])
def test_each_setting_of_the_starter_file_can_be_uncommented_alone(tmp_path, recipe, method):
    lines = make_starter_config(recipe, method).splitlines()
    unchanged = load_text(tmp_path, "\n".join(lines))
    commented = [index for index, line in enumerate(lines) if COMMENTED_SETTING.fullmatch(line)]
    assert len(commented) > 30
    for index in commented:
        config = load_text(tmp_path, "\n".join([*lines[:index], lines[index].removeprefix("# "), *lines[index + 1 :]]))
        assert (config == unchanged) == (EXAMPLE not in lines[index]), lines[index]


def test_every_setting_has_a_description():
    for line in make_starter_config().splitlines():
        if COMMENTED_SETTING.fullmatch(line) or re.match(r"\w+ = ", line):
            assert re.search(r"  # \S+ \S+", line), line
    for name in AGGREGATORS:
        assert name in AggregatorSection.model_fields["name"].description


keys = st.from_regex(r"[A-Za-z0-9_-]+", fullmatch=True)
values = st.recursive(
    st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=3),
    max_leaves=6,
)


@given(values)
@example("\x7f")  # JSON does not escape it, TOML requires it
def test_formatted_toml_is_read_back(value):
    assert tomllib.loads(f"x = {format_toml_value(value)}")["x"] == value
    tables = {}
    add_override(tables, f"section.key={format_toml_value(value)}")
    assert tables == {"section": {"key": value}}


@settings(max_examples=200)
@given(st.dictionaries(st.sampled_from(sorted(list_settings())) | st.tuples(keys), values, min_size=1, max_size=4))
def test_any_file_is_valid_or_raises_input_error(given_settings):
    tables = tomllib.loads(make_starter_config())
    for (section, *key), value in given_settings.items():
        if key and isinstance(tables.get(section), dict):
            tables[section][key[0]] = value
        else:
            tables[section] = value
    with contextlib.suppress(InputError):
        config = resolve_config(tables)
        assert resolve_config(tomllib.loads(format_config(config))) == config


# Invalid settings


def test_all_unknown_settings_are_reported_with_suggestions():
    assert find_problems(
        "adaptation.lamda=1", "sede=3", "optimizer.encoder_lr=1", "schedule.epoch=5", "head.quux=1"
    ) == [
        "adaptation.lamda: unknown setting; did you mean adaptation.lambda?",
        "head.quux: unknown setting",
        "schedule.epoch: unknown setting; did you mean schedule.epochs?",
        "sede: unknown setting; did you mean seed?",
        "optimizer: unknown setting; did you mean optimiser?",
    ]


@pytest.mark.parametrize(
    ("given_name", "meant"),
    [
        ("schedule.encoder_lr", "optimiser.encoder_lr"),  # not schedule.encoder_lr_min
        ("epochs", "schedule.epochs"),
        ("epoch", "schedule.epochs"),
        ("machine.seed", "seed"),
        ("task.name", "encoder.name or aggregator.name"),
        ("adaptation.lambda_", "adaptation.lambda"),
    ],
)
def test_setting_in_the_wrong_section_suggests_the_right_one(given_name, meant):
    assert find_problems(f"{given_name}=1") == [f"{given_name}: unknown setting; did you mean {meant}?"]


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ('schedule.epochs="5"', "input should be a valid integer; got '5'"),
        ("schedule.epochs=5.0", "input should be a valid integer; got 5.0"),
        ("schedule.epochs=0", "input should be greater than or equal to 1; got 0"),
        ("schedule.first_cycle=2024-01-31", "input should be a valid integer; got '2024-01-31'"),
        ("seed=true", "input should be a valid integer; got True"),
        ("seed=-1", "input should be greater than or equal to 0; got -1"),
        ("seed=9223372036854775808", "input should be less than 9223372036854775808; got 9223372036854775808"),
        ("head.layer_norm=1", "input should be a valid boolean; got 1"),
        ("head.label_smoothing=1.0", "input should be less than 1; got 1.0"),
        ('adaptation.tau="1"', "input should be a valid number; got '1'"),
        ("adaptation.tau=0", "input should be greater than 0; got 0"),
        ("adaptation.beta=inf", "input should be a finite number; got inf"),
        ("adaptation.lambda=nan", "input should be a finite number; got nan"),
        ("adaptation.tiles_per_slide=0", "input should be greater than or equal to 1 or 'all'; got 0"),
        ("adaptation.chunk=some", "input should be a valid integer or 'auto' or 'all'; got 'some'"),
        ("adaptation.method=tap", "input should be 'tapfm', 'finetune' or 'fixed'; got 'tap'"),
        ("recipe=papers", "input should be 'paper' or 'reference'; got 'papers'"),
        ("recipe=[]", "input should be 'paper' or 'reference'; got []"),
        ("encoder.name=5", "input should be a valid string; got 5"),
        ("aggregator.name=[]", "input should be a valid string; got []"),
        ("task.targets=FGFR3", 'must be a list, such as ["A", "B"] or [1, 2]; got \'FGFR3\''),
        ("task.targets=[]", "list should have at least 1 item after validation, not 0; got []"),
        ('task.targets=["A", 1, 2]', "input should be a valid string; got 2"),
        ("augmentation.flip=1.5", "input should be less than or equal to 1; got 1.5"),
        ("augmentation.blur_radius=[0.1]", "has too few items; got [0.1]"),
        ("augmentation.blur_radius=[0, 1]", "input should be greater than or equal to 0.01; got 0"),
        ("augmentation.blur_radius=[0.1, 17]", "input should be less than or equal to 16; got 17"),
        ("augmentation.stain_jitter=1.0", "input should be less than 1; got 1.0"),
        ("machine.workers=-1", "input should be greater than or equal to 0 or 'auto'; got -1"),
        ("cohort.fold=-1", "input should be greater than or equal to 0; got -1"),
    ],
)
def test_wrong_type_or_range_is_reported_in_one_line(change, problem):
    assert find_problems(change) == [f"{change.partition('=')[0]}: {problem}"]


def test_section_that_is_not_a_table_lists_its_settings():
    assert find_problems("head=3", "schedule=[]") == [
        "head: must be a table, [head], with layer_norm, label_smoothing",
        "schedule: must be a table, [schedule], with epochs, first_cycle, cycle_factor, encoder_lr_min, "
        "aggregator_lr_min",
    ]


def test_missing_settings_are_reported():
    with pytest.raises(SettingError) as caught:
        resolve_config({"cohort": {}})
    assert [line.strip() for line in caught.value.message.splitlines()[1:]] == [
        "cohort.table: is not set",
        "tiles: is not set",
        "encoder: is not set",
        "task.targets: is not set",
    ]


def test_unknown_encoder_is_reported_with_suggestions_and_other_problems():
    (encoder, other) = find_problems("encoder.name=virchwo2", "schedule.epochs=0")
    assert encoder.startswith("encoder.name: There is no encoder named 'virchwo2'. Did you mean: virchow2")
    assert other.startswith("schedule.epochs: ")
    (known,) = find_problems("encoder.name=conch")
    assert "attention pool over the tokens" in known
    (architecture,) = find_problems("encoder.name=timm:vit_tiny_patch16_225")
    assert "vit_tiny_patch16_224" in architecture


def test_unknown_aggregator_is_reported_with_suggestions():
    (problem,) = find_problems("aggregator.name=abmill", method="finetune")
    assert problem.startswith("aggregator.name: There is no aggregator named 'abmill'. Did you mean: abmil")


@pytest.mark.parametrize("aggregator", ["abmil", "mean"])
def test_tapfm_needs_an_aggregator_that_uses_the_attention(aggregator):
    (problem,) = find_problems(f"aggregator.name={aggregator}")
    assert problem.startswith(f"aggregator.name: '{aggregator}' does not use the encoder's attention")
    assert 'adaptation.method = "finetune"' in problem
    assert resolve_with(f"aggregator.name={aggregator}", "adaptation.method=finetune").adaptation.lambda_ == 0


@pytest.mark.parametrize(
    ("method", "change", "problem"),
    [
        (
            "finetune",
            "adaptation.lambda=0.5",
            "adaptation.lambda: must be 0 with method finetune, which has no attention loss; got 0.5",
        ),
        (
            "fixed",
            "adaptation.lambda=1",
            "adaptation.lambda: must be 0 with method fixed, which has no attention loss; got 1",
        ),
        (
            "fixed",
            "adaptation.backward_tiles=64",
            "adaptation.backward_tiles: must be 0 with method fixed, which does not train the encoder; got 64",
        ),
        (
            "fixed",
            "optimiser.moments=int8",
            "optimiser.moments: must be auto with method fixed, which does not train the encoder; got int8",
        ),
        (
            "tapfm",
            "augmentation.blur_radius=[0.8, 0.1]",
            "augmentation.blur_radius: the minimum 0.8 is larger than the maximum 0.1",
        ),
        ("tapfm", 'task.targets=["A", "B", "A"]', "task.targets: a target is listed twice"),
        (
            "tapfm",
            "schedule.encoder_lr_min=1e-3",
            "schedule.encoder_lr_min: 0.001 is larger than optimiser.encoder_lr, 1e-06",
        ),
        (
            "tapfm",
            "schedule.aggregator_lr_min=1",
            "schedule.aggregator_lr_min: 1 is larger than optimiser.aggregator_lr, 1e-05",
        ),
    ],
)
def test_contradictory_settings_are_reported(method, change, problem):
    assert find_problems(change, method=method) == [problem]


@pytest.mark.parametrize("scope", ["last:0", "lora:0", "full:3", "last", "some", "last:-1", ""])
def test_invalid_scope_lists_valid_ones(scope):
    (problem,) = find_problems(f'adaptation.scope="{scope}"')
    assert problem.startswith("adaptation.scope: ")
    assert f"'{scope}'" in problem
    assert "lora:16" in problem


def test_each_method_needs_its_input_folder():
    tables = tomllib.loads(make_starter_config()) | {"tiles": {}}
    for method, problem in (
        ("tapfm", "tiles.folder: is not set.*`tapfm tile`"),
        ("fixed", "tiles.features: is not set.*`tapfm embed`"),
    ):
        with pytest.raises(SettingError, match=problem):
            resolve_config(tables | {"adaptation": {"method": method}})


def test_invalid_aggregator_options_list_valid_values():
    found = find_problems(
        "aggregator.options.gatd=false",
        "aggregator.options.hidden=1.5",
        "aggregator.options.dropout=1",
        "aggregator.options.gated=1",
        method="finetune",
    )
    assert [line.partition(": ")[0] for line in found] == [
        f"aggregator.options.{name}" for name in ("hidden", "gated", "dropout", "gatd")
    ]
    for line, valid in zip(
        found,
        ("an integer, at least 1", "true or false", "a number, at least 0, below 1", "Did you mean: gated"),
        strict=True,
    ):
        assert valid in line
    assert (
        "aggregator.options.hidden"
        in find_problems("aggregator.options.hidden=8", "aggregator.name=mean", method="fixed")[0]
    )


# --set, paths and files


@pytest.mark.parametrize(
    ("change", "section", "key", "value"),
    [
        ("adaptation.lambda=0.25", "adaptation", "lambda_", 0.25),
        ("adaptation.lambda = 1", "adaptation", "lambda_", 1.0),
        ("adaptation.scope=lora:16", "adaptation", "scope", "lora:16"),
        ('adaptation.scope="last:4"', "adaptation", "scope", "last:4"),
        ("head.layer_norm=true", "head", "layer_norm", True),
        ("optimiser.encoder_lr=3e-6", "optimiser", "encoder_lr", 3e-6),
        ('task.targets=["EGFR", "KRAS"]', "task", "targets", ["EGFR", "KRAS"]),
        ("adaptation.tiles_per_slide=all", "adaptation", "tiles_per_slide", "all"),
        ("machine.device=cuda:1", "machine", "device", "cuda:1"),
    ],
)
def test_set_parses_numbers_texts_and_lists(tmp_path, change, section, key, value):
    config = load_text(tmp_path, make_starter_config(), change)
    assert getattr(getattr(config, section), key) == value


def test_last_set_takes_precedence_and_can_set_the_recipe(tmp_path):
    config = load_text(tmp_path, make_starter_config(), "seed=1", "recipe=reference", "seed=2")
    assert (config.seed, config.adaptation.tau, config.schedule.first_cycle) == (2, 0.1, 20)


@pytest.mark.parametrize("change", ["seed", "=3", "adaptation.=3", ".seed=3", "", "a..b=1"])
def test_malformed_set_shows_an_example(tmp_path, change):
    with pytest.raises(SettingError, match="key=value") as caught:
        load_text(tmp_path, make_starter_config(), change)
    assert "--set adaptation.lambda=0.5" in caught.value.hint


def test_paths_are_relative_to_the_file_or_to_the_current_folder_with_set(tmp_path, monkeypatch):
    (tmp_path / "study").mkdir()
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    text = make_starter_config().replace('# weights = "model.safetensors"', 'weights = "/data/model.bin"')
    config = load_text(tmp_path / "study", text, "tiles.folder=tiles", "cohort.slides=~/slides")
    assert config.cohort.table == tmp_path / "study" / "cohort.csv"
    assert config.tiles.folder == tmp_path / "here" / "tiles"
    assert str(config.encoder.weights) == "/data/model.bin"
    assert config.cohort.slides.is_absolute()
    assert "~" not in str(config.cohort.slides)


def test_tilde_with_unknown_user_is_a_file_name(tmp_path):
    config = load_text(tmp_path, make_starter_config().replace('"cohort.csv"', '"~nobody-is-called-so.csv"'))
    assert config.cohort.table == tmp_path / "~nobody-is-called-so.csv"


def test_file_with_byte_order_mark_is_read(tmp_path):
    (tmp_path / "run.toml").write_text(make_starter_config(), encoding="utf-8-sig")
    assert load_config(tmp_path / "run.toml").encoder.name == "uni"


@pytest.mark.parametrize("content", [b"seed = ", b"seed = 1\nseed = 2", b"\xff\xfe", b"[cohort\n"])
def test_invalid_toml_names_the_file(tmp_path, content):
    (tmp_path / "run.toml").write_bytes(content)
    with pytest.raises(InputError, match=r"run\.toml is not a valid TOML file: "):
        load_config(tmp_path / "run.toml")


def test_problems_name_the_file(tmp_path):
    with pytest.raises(SettingError, match=re.escape(f"{tmp_path / 'run.toml'} has 1 problem:\n  seed: ")):
        load_text(tmp_path, make_starter_config().replace("seed = 0", 'seed = "x"'))
    with pytest.raises(SettingError, match=re.escape(str(tmp_path / "run.toml")) + ".*command-line.* 1 problem"):
        load_text(tmp_path, make_starter_config(), "seed=x")


# `tapfm config`


def test_config_command_creates_a_file_that_it_can_resolve(tmp_path, tapfm, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, text, _ = tapfm(
        "config", "--recipe", "reference", "--encoder", "H-optimus-0", "--method", "finetune", "--target", "EGFR"
    )
    assert code == 0
    (tmp_path / "run.toml").write_text(text)
    code, shown, _ = tapfm("config", "run.toml", "--set", "schedule.epochs=7")
    assert code == 0
    tables = tomllib.loads(shown)
    assert (tables["recipe"], tables["encoder"]["name"], tables["task"]["targets"]) == (
        "reference",
        "h-optimus-0",
        ["EGFR"],
    )
    assert tables["schedule"]["epochs"] == tables["schedule"]["first_cycle"] == 7
    assert tables["cohort"]["table"] == str(tmp_path / "cohort.csv")


def test_default_targets_are_columns_with_both_labels(tmp_path, tapfm):
    table = tmp_path / "cohort.csv"
    table.write_text("slide_id,path,EGFR,grade,KRAS,MET\na,a.svs,0,high,1,0\nb,b.svs,1,low,0,0\nc,c.svs,,mid,,0\n")
    code, _, error = tapfm("config", "--cohort", table)
    assert code == 2
    assert "2 columns can be the target" in error
    assert "EGFR: 0 (1), 1 (1); 1 missing (empty: 1)" in error
    both = ("--target", "EGFR", "--target", "KRAS")
    assert tomllib.loads(tapfm("config", "--cohort", table, *both)[1])["task"]["targets"] == ["EGFR", "KRAS"]
    code, text, notes = tapfm("config", "--cohort", table, "--target", "MET")
    assert tomllib.loads(text)["task"]["targets"] == ["MET"]
    assert "Target MET: 0 positive and 3 negative slides" in notes
    table.write_text("slide_id,path,grade,EGFR\na,a.svs,high,1\nb,b.svs,mid,0\nc,c.svs,low,NA\n")
    code, text, notes = tapfm("config", "--cohort", table)
    assert tomllib.loads(text)["task"]["targets"] == ["EGFR"]
    assert "Target EGFR: 1 positive and 1 negative slides; 1 missing (NA: 1)" in notes
    table.write_text("slide_id,path,grade\na,a.svs,high\n")
    code, _, error = tapfm("config", "--cohort", table)
    assert code == 2
    assert "no column can be the target" in error
    assert "grade: high (1)" in error


def test_text_labels_and_table_options_are_written_to_the_file(tmp_path, tapfm):
    table = tmp_path / "cohort.csv"
    table.write_text("slide_id,Case,EGFR status\na,P1,MUT\nb,P2,WT\nc,P3,?\n", encoding="utf-16")
    options = ("--positive", "EGFR status=MUT", "--missing", "?", "--patient-column", "case")
    assert tapfm("config", "--cohort", table, *options, "--out", tmp_path / "run.toml")[0] == 0
    config = load_config(tmp_path / "run.toml")
    assert config.task.targets == ["EGFR status"]
    assert config.class_texts == {"EGFR status": {"positive": ["MUT"], "negative": ["WT"]}}
    assert config.cohort.patient_column == "case"
    assert config.cohort.extra_missing_values == ["?"]
    shown = tapfm("config", tmp_path / "run.toml")[1]
    (tmp_path / "shown.toml").write_text(shown)
    assert load_config(tmp_path / "shown.toml") == config


@pytest.mark.parametrize("linked", [False, True])
def test_paths_are_correct_in_a_file_in_another_folder(tmp_path, tapfm, monkeypatch, linked):
    (tmp_path / "work").mkdir()
    (tmp_path / "far" / "away" / "runs").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "work")
    if linked:
        (tmp_path / "work" / "out").symlink_to(tmp_path / "far" / "away" / "runs")
    (tmp_path / "work" / "cohort.csv").write_text("slide_id,path,A,split\na,a.svs,0,train\nb,b.svs,1,train\n")
    features = tmp_path / "features"
    code, printed, messages = tapfm(
        *(
            "config",
            "--cohort",
            "cohort.csv",
            "--tiles",
            "../tiles",
            "--features",
            features,
            "--out",
            "out/first/run.toml",
        )
    )
    assert (code, printed) == (0, "")
    assert "tapfm train out/first/run.toml --out runs/first" in messages.split("Next:")[1]
    config = load_config(tmp_path / "work" / "out" / "first" / "run.toml")
    assert config.cohort.table.samefile(tmp_path / "work" / "cohort.csv")
    assert config.tiles.folder.resolve() == tmp_path / "tiles"
    assert config.tiles.features == features


def test_existing_file_is_not_overwritten(tmp_path, tapfm):
    file = tmp_path / "run.toml"
    file.write_text("mine")
    code, _, error = tapfm("config", "--out", file)
    assert code == 2
    assert "already exists" in error
    assert file.read_text() == "mine"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--recipe", "papers"], "'paper' or 'reference'"),
        (["--method", "tap"], "'tapfm', 'finetune' or 'fixed'"),
        (["--encoder", "virchwo2"], "Did you mean: virchow2"),
        (["--cohort", "absent.csv"], "absent.csv does not exist"),
        (["--target", "A", "--target", "A"], "a target is listed twice"),
        (["--set", "seed=1"], "tapfm config run.toml --set"),
        (["absent.toml"], "absent.toml does not exist"),
        (["."], "cannot be read (Is a directory)"),
        (
            ["run.toml", "--recipe", "paper", "--out", "x"],
            "--recipe, --out can only be used for a new configuration",
        ),
        (["run.toml", "--recipe", "paper"], "tapfm config run.toml --set"),
        (["absent.toml", "--recipe", "paper"], "absent.toml does not exist"),
        (["run.toml", "--set", "seed"], "does not have the form key=value"),
        (["run.toml", "--set", "sede=1"], "did you mean seed?"),
        (["run.toml", "--set", "encoder.name=virchwo2"], "Did you mean: virchow2"),
        (["run.toml", "--set", "aggregator.name=abmill"], "Did you mean: abmil"),
        (["run.toml", "--set", "cohort.table=\udcff.csv"], "is not valid UTF-8"),
    ],
    ids=lambda value: " ".join(value).encode("ascii", "replace").decode() if isinstance(value, list) else "",
)
def test_invalid_command_line_exits_with_2_and_a_message(tmp_path, tapfm, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.toml").write_text(make_starter_config())
    code, printed, error = tapfm("config", *arguments)
    assert (code, printed) == (2, "")
    assert message in error


def test_classes_of_an_unknown_target_are_rejected():
    assert find_problems('task.labels.XX.positive=["MUT"]') == ["task.labels: 'XX' is not one of task.targets"]


def test_command_that_creates_splits_has_the_options_of_the_table(tmp_path, tapfm):
    table = tmp_path / "cohort.csv"
    rows = "".join(f"s{i},P{i},{'MUT' if i % 2 else 'WT'}\n" for i in range(12))
    table.write_text(f"slide_id,Fall,EGFR\n{rows}")
    options = ("--positive", "EGFR=MUT", "--patient-column", "Fall")
    _, _, notes = tapfm("config", "--cohort", table, *options, "--encoder", "tapfm-pocket")
    (command,) = re.findall(r"To create them: tapfm (.*)", notes)
    arguments = [tmp_path / "s.csv" if each == "split.csv" else each for each in shlex.split(command)]
    assert tapfm(*arguments)[0] == 0
    assert (tmp_path / "s.csv").exists()


def test_a_class_with_one_text_needs_no_list():
    config = resolve_with('task.labels.FGFR3={ positive = "MUT", negative = ["WT"] }')
    assert config.class_texts == {"FGFR3": {"positive": ["MUT"], "negative": ["WT"]}}
