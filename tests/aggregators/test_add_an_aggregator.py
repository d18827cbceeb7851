"""docs/how-to/add-an-aggregator.md: its example runs unchanged, and its tables match the catalogue."""

import re
import sys
from pathlib import Path

from tapfm.aggregators.catalog import AGGREGATORS
from tapfm.aggregators.torchmil_catalog import TORCHMIL_MODELS

PAGE = (Path(__file__).parents[2] / "docs" / "how-to" / "add-an-aggregator.md").read_text()


def test_example_of_the_page_runs_unchanged(workspace_copy, monkeypatch, capsys):
    module, training = re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    assert len((module + training).splitlines()) < 80
    (workspace_copy / "top_mean.py").write_text(module)
    monkeypatch.chdir(workspace_copy)
    monkeypatch.syspath_prepend(workspace_copy)
    monkeypatch.delitem(sys.modules, "top_mean", raising=False)
    try:
        exec(compile(training, "add-an-aggregator.md", "exec"), {})
    finally:
        AGGREGATORS.pop("top-mean", None)
    assert re.fullmatch(r"\{'FGFR3': [\d.]+\}", capsys.readouterr().out.splitlines()[-1])


def test_page_lists_every_aggregator():
    listed = set(re.findall(r"^\| `([^`]+)`", PAGE, re.MULTILINE))
    assert listed >= {*AGGREGATORS, "torchmil:<Model>"}
    for model in TORCHMIL_MODELS:
        assert f"`{model}`" in PAGE
