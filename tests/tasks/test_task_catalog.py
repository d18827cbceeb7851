"""Build a task by the number of targets; the catalogue can be imported without torch."""

import subprocess
import sys

import pytest

from tapfm.errors import SettingError
from tapfm.tasks.binary import BinaryTask
from tapfm.tasks.catalog import build_task
from tapfm.tasks.multilabel import MultiLabelTask

LABELS = [1, 0, 0, None]


def test_one_target_gives_a_binary_task():
    task = build_task({"FGFR3": LABELS}, smoothing=0.1, weighting="reference")
    assert isinstance(task, BinaryTask)
    assert tuple(task.target_kinds) == ("FGFR3",)
    assert task.smoothing == 0.1
    assert task.weights.positive == pytest.approx(0.95 * 2 / 3 + 0.05 / 3)


def test_several_targets_give_a_multi_label_task():
    task = build_task({"KRAS": LABELS, "EGFR": LABELS}, smoothing=0.1, weighting="balanced")
    assert isinstance(task, MultiLabelTask)
    assert tuple(task.target_kinds) == ("KRAS", "EGFR")
    assert task.smoothing == 0.1
    assert task.weights[0].positive == 3 / 2


def test_no_target_is_rejected():
    with pytest.raises(SettingError, match="No target"):
        build_task({})


def test_catalog_does_not_import_torch():
    code = "import sys, tapfm.tasks.catalog; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
