"""What docs/how-to/add-an-aggregator.md says: its example runs as printed, its tables are those of the catalogue."""

import re
import sys
from pathlib import Path

from tapfm.aggregators.catalog import AGGREGATORS
from tapfm.aggregators.torchmil_catalog import TORCHMIL_MODELS

PAGE = (Path(__file__).parents[2] / "docs" / "how-to" / "add-an-aggregator.md").read_text()


def test_the_example_runs_as_printed(own_lab, monkeypatch, capsys):
    module, training = re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    assert len((module + training).splitlines()) < 80
    (own_lab / "top_mean.py").write_text(module)
    monkeypatch.chdir(own_lab)
    monkeypatch.syspath_prepend(own_lab)
    monkeypatch.delitem(sys.modules, "top_mean", raising=False)
    try:
        exec(compile(training, "add-an-aggregator.md", "exec"), {})
    finally:
        AGGREGATORS.pop("top-mean", None)
    assert re.fullmatch(r"\{'FGFR3': [\d.]+\}", capsys.readouterr().out.splitlines()[-1])


def test_every_aggregator_has_its_line():
    named = set(re.findall(r"^\| `([^`]+)`", PAGE, re.MULTILINE))
    assert named >= {*AGGREGATORS, "torchmil:<Model>"}
    for model in TORCHMIL_MODELS:
        assert f"`{model}`" in PAGE
