"""Learner settings from a configuration: GPU memory limit and dtypes."""

import pytest
import torch

from tapfm.adaptation import from_config
from tapfm.bench.models import make_default_config

GIB = 2**30


class StopBuilding(Exception):  # noqa: N818 - not an error
    pass


@pytest.mark.parametrize("method", ["fixed", "tapfm"])
def test_gpu_memory_limit_applies_to_every_method(monkeypatch, method):
    """Method fixed has no step plan, but the limit applies to it as well."""
    limits = []
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (12 * GIB, 16 * GIB))
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda fraction, _: limits.append(fraction))

    def stop_building(*_):
        raise StopBuilding

    for name in ("_check_stored_features", "load_trainable_encoder"):
        monkeypatch.setattr(from_config, name, stop_building)
    config = make_default_config("tapfm-pocket", "float32")
    sections = {
        "adaptation": config.adaptation.model_copy(update={"method": method}),
        "machine": config.machine.model_copy(update={"gpu_memory_gib": 4.0}),
    }
    with pytest.raises(StopBuilding):
        from_config.build_learner(config.model_copy(update=sections), None, torch.device("cuda"))
    assert limits == [0.25]


@pytest.mark.parametrize(("precision", "dtypes"), [("float32", (None, None)), ("bfloat16", (None, torch.bfloat16))])
def test_cpu_uses_autocast_and_float32_weights(precision, dtypes):
    config = make_default_config("tapfm-pocket", precision)
    assert from_config.select_dtypes(config, torch.device("cpu")) == dtypes


def test_gpu_uses_bfloat16_weights_but_autocast_for_float16(monkeypatch):
    for dtype, expected in ((torch.bfloat16, (torch.bfloat16, None)), (torch.float16, (None, torch.float16))):
        monkeypatch.setattr(from_config, "choose_autocast_dtype", lambda *_, dtype=dtype: dtype)
        assert from_config.select_dtypes(make_default_config("tapfm-pocket", "auto"), torch.device("cuda")) == expected
