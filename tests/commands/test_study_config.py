"""STUDY.toml, presets, and the runs of a study."""

import tomllib
from pathlib import Path

import pytest

from tapfm.config.loading import resolve_config
from tapfm.config.study import format_study, load_study, resolve_study
from tapfm.errors import InputError, SettingError, UnknownNameError
from tapfm.study.folder import StudyFolder
from tapfm.study.preset_studies import (
    PresetOptions,
    build_mini_study,
    build_preset_study,
    expand_preset_name,
    format_preset_toml,
)
from tapfm.study.preset_studies import _preset_tables as preset_tables
from tapfm.study.presets import PRESETS
from tapfm.study.runs import list_models, list_runs, resolve_run_config, select_runs
from tapfm.study.study_plan import plan_study

SLIDES = {"cohort": {"table": "c.csv", "tiles": "tiles"}}
SMALL = {"name": "small", "targets": ["FGFR3"], "encoders": ["tapfm-pocket"], **SLIDES}


def make_study(**changes):
    return resolve_study(SMALL | changes)


def run_names(config):
    return [run.name for run in list_runs(config)]


def test_runs_are_all_combinations_with_seeds_outermost():
    config = make_study(methods=["tapfm", "fixed"], aggregators=["abmil", "mean"], seeds=[0, 1])
    assert run_names(config) == [
        f"tapfm-pocket/{model}/seed{seed}"
        for seed in (0, 1)
        for model in ("fixed/abmil", "fixed/mean", "tapfm/cls-attention")
    ]


def test_folds_variants_and_targets_have_separate_folders():
    variants = [{"name": "lambda 0.5", "settings": {"adaptation": {"lambda": 0.5}}}]
    config = make_study(methods=["tapfm"], folds=[0, 2], variants=variants)
    assert run_names(config) == [f"tapfm-pocket/tapfm/cls-attention/lambda-0.5/fold{fold}/seed0" for fold in (0, 2)]
    separate = make_study(methods=["tapfm"], targets=["FGFR3", "TP53"], task="binary")
    assert run_names(separate) == [f"{target}/tapfm-pocket/tapfm/cls-attention/seed0" for target in ("FGFR3", "TP53")]
    together = make_study(methods=["tapfm"], targets=["FGFR3", "TP53"])
    assert together.is_multilabel
    assert len(run_names(together)) == 1


def test_titles_are_as_in_the_paper():
    config = make_study(
        encoders=["UNI", "h-optimus-0"], aggregators=["varmil"], tapfm_aggregators=["cls-attention", "cls-gated"]
    )
    titles = [model.title for model in list_models(config)]
    assert titles[:4] == ["UNI + VarMIL", "H-optimus-0 + VarMIL", "UNI + VarMIL (FT)", "H-optimus-0 + VarMIL (FT)"]
    assert titles[4:6] == ["UNI (TAPFM)", "UNI (TAPFM, cls-gated)"]


def test_method_settings_override_study_settings_and_variants_override_both():
    config = make_study(
        methods=["fixed", "tapfm"],
        settings={
            "schedule": {"epochs": 3},
            "adaptation": {"tiles_per_slide": 5},
            "fixed": {"schedule": {"epochs": 7}, "adaptation": {"tiles_per_slide": "all"}},
        },
        weights={"tapfm-pocket": "w.safetensors"},
        variants=[{"name": "more", "settings": {"adaptation": {"tau": 0.5}}}],
        folds=[1],
    )
    fixed, tapfm = (resolve_run_config(config, run, Path("features")) for run in list_runs(config))
    assert (fixed.schedule.epochs, fixed.adaptation.tiles_per_slide, fixed.adaptation.tau) == (7, "all", 0.5)
    assert (tapfm.schedule.epochs, tapfm.adaptation.tiles_per_slide) == (3, 5)
    assert (fixed.tiles.features, tapfm.tiles.features) == (Path("features"), None)
    assert tapfm.encoder.weights == Path("w.safetensors")
    assert tapfm.cohort.fold == 1
    assert tapfm.selection.unit == "patient"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sedes": [0]}, "did you mean seeds?"),
        ({"encoders": ["unni"]}, "'unni'"),
        ({"aggregators": ["abmli"]}, "'abmli'"),
        ({"methods": ["frozen"]}, "methods.0: input should be 'tapfm', 'finetune' or 'fixed'; got 'frozen'"),
        ({"settings": {"adaptation": {"lamda": 1}}}, "settings.adaptation.lamda: unknown setting; did you mean"),
        ({"settings": {"tapfm": {"sched": {}}}}, "settings.tapfm.sched: unknown setting"),
        ({"settings": {"tapfm": {"machine": {"allow_failures": 2}}}}, "settings.tapfm.machine.allow_failures"),
        (
            {"variants": [{"name": "v", "settings": {"machine": {"allow_failures": 2}}}]},
            "variants v.machine.allow_failures",
        ),
        ({"seeds": [1, 1]}, "seeds: 1 is listed twice"),
        ({"task": "multilabel"}, "multilabel needs at least two targets"),
        ({"report": "forgetting"}, "probe: missing"),
        ({"report": "ablation"}, "variants: missing"),
        ({"report": "stability", "variants": [{"name": "a"}]}, "before, after and joint"),
        ({"report": "stability", "methods": ["tapfm", "fixed"]}, "methods: "),
        ({"settings": {"adaptation": {"first": 1, "second": 1}}}, "settings.adaptation.second: unknown setting"),
        ({"variants": [{"name": "../a"}]}, "cannot be a folder"),
        ({"cohort": {"table": "c.csv"}}, "cohort.tiles: is not set"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_invalid_settings_are_an_error(changes, message):
    with pytest.raises(SettingError) as error:
        make_study(**changes)
    assert message in error.value.message


def test_all_problems_are_reported_at_once():
    with pytest.raises(SettingError, match="3 problems"):
        make_study(encoders=["uni"], seeds=[0, 0], aggregators=["abmli"], folds=[1, 1])


def test_paths_are_relative_to_the_file(tmp_path):
    text = format_study(
        SMALL
        | {
            "weights": {"tapfm-pocket": "w.safetensors"},
            "external": {"table": "x.csv", "tiles": "/whole"},
            "variants": [{"name": "other", "settings": {"encoder": {"weights": "v.safetensors"}}}],
        }
    )
    (tmp_path / "study.toml").write_text(text)
    config = load_study(tmp_path / "study.toml")
    assert config.cohort.table == tmp_path / "c.csv"
    assert config.external.tiles == Path("/whole")
    assert config.weights == {"tapfm-pocket": tmp_path / "w.safetensors"}
    assert config.variants[0].settings["encoder"]["weights"] == str(tmp_path / "v.safetensors")


def test_missing_or_malformed_file_is_an_error(tmp_path):
    with pytest.raises(InputError, match=r"absent\.toml"):
        load_study(tmp_path / "absent.toml")
    (tmp_path / "bad.toml").write_text("name =")
    with pytest.raises(InputError, match="TOML"):
        load_study(tmp_path / "bad.toml")


def test_study_written_as_toml_can_be_read_back():
    config = make_study(
        settings={"adaptation": {"lambda": 0.5}, "fixed": {"schedule": {"epochs": 3}}},
        variants=[{"name": "a", "settings": {"aggregator": {"options": {"gated": False}}}}, {"name": "b"}],
        weights={"tapfm-pocket": "a/b c.safetensors"},
        notes=['with "quotes"'],
    )
    assert resolve_study(tomllib.loads(format_study(config.as_tables()))) == config


def test_only_selects_runs_by_pattern_or_folder():
    config = make_study(methods=["fixed", "tapfm"], aggregators=["abmil", "mean"], seeds=[0, 1])
    runs = list_runs(config)
    assert len(select_runs(runs, [])) == 6
    assert {run.model.method for run in select_runs(runs, ["*/tapfm/*"])} == {"tapfm"}
    assert len(select_runs(runs, ["tapfm-pocket/fixed"])) == 4
    assert [run.seed for run in select_runs(runs, ["*/mean/seed1"])] == [1]
    with pytest.raises(InputError, match="--only nothing matches no run"):
        select_runs(runs, ["nothing"])


def test_run_with_invalid_settings_is_reported_and_others_are_planned(tmp_path):
    config = make_study(
        methods=["finetune", "tapfm"], variants=[{"name": "half", "settings": {"adaptation": {"lambda": 0.5}}}]
    )
    plan = plan_study(config, StudyFolder(tmp_path))
    assert list(plan.configs) == ["tapfm-pocket/tapfm/cls-attention/half/seed0"]
    assert (
        "adaptation.lambda: must be 0 with method finetune" in plan.problems["tapfm-pocket/finetune/abmil/half/seed0"]
    )
    with pytest.raises(SettingError, match="run of the study small has valid settings"):
        plan_study(make_study(methods=["tapfm"], settings={"adaptation": {"lambda": -1}}), StudyFolder(tmp_path))


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_is_valid_in_both_scales_and_as_a_file(name, tmp_path):
    options = PresetOptions(cohort=Path("c.csv"), external=Path("x.csv"), probe_tiles=Path("probe"))
    full = build_preset_study(name, options)
    mini = build_mini_study(name, tmp_path)
    for config in (full, mini):
        plan = plan_study(config, StudyFolder(tmp_path))
        assert not plan.problems
        assert plan.runs
    assert "nothing about real tissue" in mini.notes[0]
    assert "K = " in mini.notes[1]
    text = format_preset_toml(name, PresetOptions(), tmp_path / "study.toml")
    (tmp_path / "study.toml").write_text(text)
    written = load_study(tmp_path / "study.toml")
    assert written.cohort.table == tmp_path / "split.csv"
    assert run_names(written) == run_names(full)


def test_presets_have_the_settings_of_the_paper():
    options = PresetOptions(cohort=Path("c.csv"))
    table1 = build_preset_study("paper-table1", options)
    assert len(run_names(table1)) == 3 * 4 * 2 + 3 * 2
    configs = {run.name: resolve_run_config(table1, run, Path("f")) for run in list_runs(table1)}
    assert configs["uni/tapfm/cls-attention/seed0"].schedule.epochs == 20
    assert configs["uni/finetune/abmil/seed0"].schedule.epochs == 50
    assert configs["h-optimus-0/tapfm/cls-attention/seed0"].adaptation.tiles_per_slide == 75
    lambdas = build_preset_study("ablation-lambda", options)
    values = [resolve_run_config(lambdas, run, Path("f")).adaptation.lambda_ for run in list_runs(lambdas)]
    assert values == [0.25, 0.5, 0.75, 1.0]
    tiles = build_preset_study("ablation-tiles", options)
    assert [resolve_run_config(tiles, run, Path("f")).adaptation.tiles_per_slide for run in list_runs(tiles)] == [
        25,
        50,
        75,
    ]
    assert preset_tables("layers", options)["variants"][3]["settings"] == {"adaptation": {"scope": "last:12"}}


def test_options_change_a_preset_and_missing_options_are_an_error():
    options = PresetOptions(cohort=Path("c.csv"), targets=("A", "B"), encoders=("uni",), seeds=(3,), folds=(0, 1))
    config = build_preset_study("paper-table1", options)
    assert (config.targets, config.encoders, config.seeds, config.folds) == (["A", "B"], ["uni"], [3], [0, 1])
    assert config.external is None
    with pytest.raises(InputError, match="needs a cohort"):
        build_preset_study("paper-table1", PresetOptions())
    with pytest.raises(InputError, match="tiles of another task"):
        build_preset_study("forgetting", PresetOptions(cohort=Path("c.csv")))
    with pytest.raises(UnknownNameError, match="'paper-table'"):
        expand_preset_name("paper-table", mini=False)
    with pytest.raises(InputError, match="only with --scale mini"):
        expand_preset_name("all", mini=False)
    assert len(expand_preset_name("all", mini=True)) == 5


def test_configuration_of_a_run_can_be_read_back():
    config = make_study(methods=["tapfm"])
    (run,) = list_runs(config)
    assert resolve_config(resolve_run_config(config, run, Path("f")).as_tables()) == resolve_run_config(
        config, run, Path("f")
    )
