"""`tapfm plan`: without a GPU and without weights."""

import json

import pytest
from command_line import tapfm

from tapfm.adaptation import memory_plan
from tapfm.adaptation.step_costs import GIB
from tapfm.config.loading import load_config
from tapfm.errors import SettingError

RUN = """
[cohort]
table = "cohort.csv"
[tiles]
folder = "tiles"
features = "features"
[encoder]
name = "{encoder}"
[task]
targets = ["FGFR3"]
"""


@pytest.fixture
def plan(tmp_path):
    """Plan a run whose cohort is not there: only its settings count."""

    def run(*options, encoder="uni", **changes):
        (tmp_path / "run.toml").write_text(RUN.format(encoder=encoder))
        given = [part for name, value in changes.items() for part in ("--set", f"{name.replace('__', '.')}={value}")]
        return tapfm("plan", tmp_path / "run.toml", *options, *given)

    return run


def of(result):
    assert result.returncode == 0, result.said
    return json.loads(result.said)


def test_one_card_is_told_in_full(plan):
    result = plan("--gpu-memory", 24)
    assert result.returncode == 0
    said = " ".join(result.said.split())
    assert "uni, 303,350,784 parameters, all of which learn (scope full); 300 tiles a step." in said
    assert "One pass: all 300 tiles at once, each encoded once." in said
    assert "of 24 GB about 23.5 GiB are there, of which CUDA takes 0.5" in said
    for part in ("weights", "master weights", "moments", "gradients", "graph", "working", "together", "left, for gaps"):
        assert part in said
    for other in ("adaptation.scope=full", "adaptation.scope=last:4", "adaptation.scope=lora:16"):
        assert other in said


def test_json_has_what_the_tables_have(plan):
    tables = of(plan("--gpu-memory", 24, "--json"))
    (card,) = tables["gpus"]
    chosen = card["plan"]
    assert (tables["encoder"], tables["tiles"], chosen["strategy"]) == ("uni", 300, "one-pass")
    assert sum(chosen["parts"].values()) == chosen["peak_bytes"] < card["free_bytes"] < 24 * GIB
    assert len(chosen["recompute"]) == 24
    assert {row["set"] for row in tables["alternatives"]} >= {
        "adaptation.scope=lora:16",
        "adaptation.backward_tiles=75",
    }


def test_each_card_has_a_row(plan):
    tables = of(plan("--gpu-memory", 1, "--gpu-memory", 8, "--gpu-memory", 80, "--json"))
    small, middle, large = (card["plan"] for card in tables["gpus"])
    assert small is None
    assert middle["passes"] > large["passes"] == 3
    said = plan("--gpu-memory", 1, "--gpu-memory", 80).said
    assert "does not fit" in said
    assert "one-pass" in said


def test_without_a_gpu_the_usual_cards_are_shown(plan, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    result = plan()
    assert result.returncode == 0
    assert "There is no GPU here: tapfm train would use the CPU." in result.said
    for gb in memory_plan._USUAL_CARDS:
        assert f"{gb:g} GB" in result.said


def test_the_number_of_tiles_can_be_given(plan):
    assert of(plan("--gpu-memory", 24, "--tiles", 4096, "--json"))["gpus"][0]["plan"]["strategy"] != "one-pass"
    refused = plan("--gpu-memory", 24, adaptation__tiles_per_slide="all")
    assert refused.returncode == 2
    assert "--tiles" in refused.said
    assert of(plan("--gpu-memory", 24, "--tiles", 9, "--json", adaptation__tiles_per_slide="all"))["tiles"] == 9


def test_all_tiles_are_those_of_the_largest_slide(lab):
    result = tapfm(*("plan", lab / "run.toml", "--set", "adaptation.tiles_per_slide=all", "--gpu-memory", 8, "--json"))
    assert of(result)["tiles"] == 4


def test_settings_are_kept_to(plan):
    tables = of(plan("--gpu-memory", 24, "--json", adaptation__chunk=50, adaptation__scope="last:2"))
    chosen = tables["gpus"][0]["plan"]
    assert (chosen["chunk"], tables["shape"]["trainable_blocks"]) == (50, 2)
    changes = {"adaptation__recompute": "block", "optimiser__moments": "int8", "machine__offload_optimiser": "true"}
    chosen = of(plan("--gpu-memory", 24, "--json", adaptation__backward_tiles=30, **changes))["gpus"][0]["plan"]
    assert (set(chosen["recompute"]), chosen["moments"], chosen["offload"]) == ({"block"}, "int8", True)
    assert (chosen["backward_tiles"], chosen["kept"]) == (30, 0)
    assert (
        of(plan("--gpu-memory", 24, "--json", adaptation__precision="float32"))["gpus"][0]["plan"]["parts"]["weights"]
        == 4 * tables["shape"]["parameters"]
    )


def test_where_nothing_fits_it_says_what_would(plan):
    result = plan("--gpu-memory", 6, encoder="h-optimus-0")
    assert result.returncode == 2
    assert "does not fit: it needs at least" in result.said
    (would,) = [line for line in result.said.splitlines() if line.startswith("This would fit on the card: ")]
    assert "adaptation.scope=last:4 (" in would
    assert "adaptation.scope=full" not in would
    assert "fits a card of 8 GB." in result.said
    assert "Traceback" not in result.said


def test_what_would_fit_does_fit(tmp_path):
    (tmp_path / "run.toml").write_text(RUN.format(encoder="h-optimus-0"))
    with pytest.raises(SettingError) as caught:
        memory_plan.plan_memory(load_config(tmp_path / "run.toml"), gpu_memory=[6], tiles=None)
    offered = [word.split("=")[1] for word in caught.value.hint.split() if word.startswith("adaptation.scope=")]
    assert offered
    for scope in offered:
        config = load_config(tmp_path / "run.toml", [f"adaptation.scope={scope}"])
        assert memory_plan.plan_memory(config, gpu_memory=[6], tiles=None).rows[0].plan is not None


def test_method_fixed_trains_no_encoder(plan):
    result = plan(adaptation__method="fixed", aggregator__name="abmil", adaptation__lambda=0)
    assert result.returncode == 0
    assert "trains no encoder" in result.said
    assert of(plan("--json", adaptation__method="fixed", aggregator__name="abmil"))["gpus"] == []


@pytest.mark.parametrize("gb", [0, -3, 0.4])
def test_a_card_without_memory_is_refused(plan, gb):
    result = plan(f"--gpu-memory={gb}")
    assert result.returncode == 2
    assert "leaves nothing" in result.said
