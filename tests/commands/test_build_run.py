"""From a configuration to a learner: what has no command of its own to be tested by."""

import pytest
import torch

from tapfm.adaptation import from_config as build_run
from tapfm.bench.models import settings_for

GIB = 2**30


class Reached(Exception):  # noqa: N818 - not an error
    pass


@pytest.mark.parametrize("method", ["fixed", "tapfm"])
def test_every_method_keeps_to_the_memory_it_may_use(monkeypatch, method):
    """A run from stored features has no plan, and the limit counts for it as well."""
    limits = []
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (12 * GIB, 16 * GIB))
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda share, _: limits.append(share))

    def reached(*_):
        raise Reached

    for name in ("_stored_features", "load_trainable_encoder"):
        monkeypatch.setattr(build_run, name, reached)
    config = settings_for("tapfm-pocket", "float32")
    sections = {
        "adaptation": config.adaptation.model_copy(update={"method": method}),
        "machine": config.machine.model_copy(update={"gpu_memory_gib": 4.0}),
    }
    with pytest.raises(Reached):
        build_run.build_learner(config.model_copy(update=sections), None, torch.device("cuda"))
    assert limits == [0.25]


def test_a_cpu_computes_low_precision_under_autocast_and_keeps_its_weights():
    assert build_run.select_dtypes(settings_for("tapfm-pocket", "float32"), torch.device("cpu")) == (None, None)
    assert build_run.select_dtypes(settings_for("tapfm-pocket", "bfloat16"), torch.device("cpu")) == (
        None,
        torch.bfloat16,
    )


def test_a_gpu_keeps_weights_in_bfloat16_and_casts_them_for_float16(monkeypatch):
    for dtype, expected in ((torch.bfloat16, (torch.bfloat16, None)), (torch.float16, (None, torch.float16))):
        monkeypatch.setattr(build_run, "choose_precision", lambda *_, dtype=dtype: dtype)
        assert build_run.select_dtypes(settings_for("tapfm-pocket", "auto"), torch.device("cuda")) == expected
