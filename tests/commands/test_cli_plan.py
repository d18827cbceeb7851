"""`tapfm plan`, without a GPU and without weights."""

import contextlib
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
    """Return a function that plans a run. Its cohort does not exist: only the settings matter."""

    def run(*options, encoder="uni", **changes):
        (tmp_path / "run.toml").write_text(RUN.format(encoder=encoder))
        given = [part for name, value in changes.items() for part in ("--set", f"{name.replace('__', '.')}={value}")]
        return tapfm("plan", tmp_path / "run.toml", *options, *given)

    return run


def parse_json(result):
    assert result.returncode == 0, result.output
    return json.loads(result.output)


def test_plan_for_one_gpu_lists_all_parts(plan):
    result = plan("--gpu-memory", 24)
    assert result.returncode == 0
    text = " ".join(result.output.split())
    assert "uni: 303,350,784 parameters" in text
    assert "scope full" in text
    assert "One pass: all 300 tiles" in text
    assert "23.0 GiB free: 98% of 24 GiB, minus 0.5 GiB for CUDA" in text
    for part in ("weights", "master weights", "moments", "gradients", "graph", "temporary", "tiles and features"):
        assert part in text
    (gpu,) = parse_json(plan("--gpu-memory", 24, "--json"))["gpus"]
    peak_bytes = gpu["plan"]["peak_bytes"]
    for size in (peak_bytes, gpu["free_bytes"] - peak_bytes):
        assert f"{size / GIB:.2f}" in text
    for other in ("adaptation.scope=full", "adaptation.scope=last:4", "adaptation.scope=lora:16"):
        assert other in text


def test_json_contains_the_plan_and_alternatives(plan):
    output = parse_json(plan("--gpu-memory", 24, "--json"))
    (gpu,) = output["gpus"]
    chosen = gpu["plan"]
    assert (output["encoder"], output["tiles"], chosen["strategy"]) == ("uni", 300, "one-pass")
    assert sum(chosen["parts"].values()) == chosen["peak_bytes"] < gpu["free_bytes"] < 24 * GIB
    assert len(chosen["recompute"]) == 24
    assert {row["set"] for row in output["alternatives"]} >= {
        "adaptation.scope=lora:16",
        "adaptation.backward_tiles=75",
    }


def test_each_gpu_has_a_row(plan):
    output = parse_json(plan("--gpu-memory", 1, "--gpu-memory", 8, "--gpu-memory", 80, "--json"))
    small, middle, large = (gpu["plan"] for gpu in output["gpus"])
    assert small is None
    assert middle["passes"] > large["passes"] == 3
    table = plan("--gpu-memory", 1, "--gpu-memory", 80).output
    assert "does not fit" in table
    assert "one-pass" in table


def test_common_gpu_sizes_are_shown_without_a_gpu(plan, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    result = plan()
    assert result.returncode == 0
    assert "No GPU found" in result.output
    for gb in memory_plan._COMMON_SIZES_GB:
        assert f"{gb:g} GB" in result.output


@pytest.mark.parametrize(
    ("limit", "source"), [(12, "12.0 GiB allowed by machine.gpu_memory_gib"), (30, "22.0 GiB free")]
)
def test_memory_of_this_gpu_is_the_free_memory_or_a_lower_limit(plan, monkeypatch, limit, source):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda _: (22 * GIB, 24 * GIB))
    monkeypatch.setattr("torch.cuda.device", contextlib.nullcontext)
    monkeypatch.setattr("torch.cuda.is_bf16_supported", lambda **_: True)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda _: "GPU 1")
    monkeypatch.setattr(memory_plan, "can_compile_on_gpu", lambda _: True)
    result = plan(machine__gpu_memory_gib=limit)
    assert result.returncode == 0, result.output
    assert f"{source}, of 24.0 GiB" in " ".join(result.output.split())


def test_tiles_option_sets_the_number_of_tiles(plan):
    large = parse_json(plan("--gpu-memory", 24, "--tiles-per-slide", 4096, "--json"))
    assert large["gpus"][0]["plan"]["strategy"] != "one-pass"
    failed = plan("--gpu-memory", 24, adaptation__tiles_per_slide="all")
    assert failed.returncode == 2
    assert "--tiles-per-slide" in failed.output
    planned = plan("--gpu-memory", 24, "--tiles-per-slide", 9, "--json", adaptation__tiles_per_slide="all")
    assert parse_json(planned)["tiles"] == 9


def test_all_tiles_means_those_of_the_largest_slide(workspace):
    result = tapfm(
        *("plan", workspace / "run.toml", "--set", "adaptation.tiles_per_slide=all", "--gpu-memory", 8, "--json")
    )
    assert parse_json(result)["tiles"] == 4


def test_plan_follows_the_settings(plan):
    output = parse_json(plan("--gpu-memory", 24, "--json", adaptation__chunk=50, adaptation__scope="last:2"))
    chosen = output["gpus"][0]["plan"]
    assert (chosen["chunk"], output["shape"]["trainable_blocks"]) == (50, 2)
    changes = {"adaptation__recompute": "block", "optimiser__moments": "int8", "machine__offload_optimiser": "true"}
    chosen = parse_json(plan("--gpu-memory", 24, "--json", adaptation__backward_tiles=30, **changes))["gpus"][0]["plan"]
    assert (set(chosen["recompute"]), chosen["moments"], chosen["offload"]) == ({"block"}, "int8", True)
    assert (chosen["backward_tiles"], chosen["graphs_kept"]) == (30, 0)
    assert (
        parse_json(plan("--gpu-memory", 24, "--json", adaptation__precision="float32"))["gpus"][0]["plan"]["parts"][
            "weights"
        ]
        == 4 * output["shape"]["parameters"]
    )


def test_error_lists_settings_that_fit(plan):
    result = plan("--gpu-memory", 6, encoder="h-optimus-0")
    assert result.returncode == 2
    assert "does not fit into GPU memory: it needs at least" in result.output
    (fitting,) = [line for line in result.output.splitlines() if "fit on this GPU: " in line]
    assert "adaptation.scope=last:4 (" in fitting
    assert "adaptation.scope=full" not in fitting
    assert "fit on a GPU with 8 GB." in result.output
    assert "Traceback" not in result.output


def test_error_names_a_setting_that_prevents_a_fitting_plan(plan):
    result = plan("--gpu-memory", 10, "--tiles-per-slide", 500, encoder="h-optimus-0", adaptation__chunk="all")
    assert result.returncode == 2
    assert "adaptation.chunk to auto" in result.output
    assert plan("--gpu-memory", 10, "--tiles-per-slide", 500, encoder="h-optimus-0").returncode == 0


def test_settings_listed_in_the_error_fit(tmp_path):
    (tmp_path / "run.toml").write_text(RUN.format(encoder="h-optimus-0"))
    with pytest.raises(SettingError) as caught:
        memory_plan.plan_memory(load_config(tmp_path / "run.toml"), gpu_memory=[6], tiles=None)
    scopes = [word.split("=")[1] for word in caught.value.hint.split() if word.startswith("adaptation.scope=")]
    assert scopes
    for scope in scopes:
        config = load_config(tmp_path / "run.toml", [f"adaptation.scope={scope}"])
        assert memory_plan.plan_memory(config, gpu_memory=[6], tiles=None).plans[0].plan is not None


def test_method_fixed_needs_no_plan(plan):
    result = plan(adaptation__method="fixed", aggregator__name="abmil", adaptation__lambda=0)
    assert result.returncode == 0
    assert "fixed" in result.output
    assert parse_json(plan("--json", adaptation__method="fixed", aggregator__name="abmil"))["gpus"] == []


@pytest.mark.parametrize("gb", [0, -3, 0.4])
def test_too_small_gpu_memory_is_an_error(plan, gb):
    result = plan(f"--gpu-memory={gb}")
    assert result.returncode == 2
    assert f"--gpu-memory {gb:g} is too small" in result.output
