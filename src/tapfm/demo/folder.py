"""Layout of a demo folder."""

from __future__ import annotations

from pathlib import Path

from tapfm.demo.sizes import ENCODER

COHORTS = ("test", "external")


class DemoFolder:
    """Paths of the files in a demo folder."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.state = path / "demo.json"  # finished steps, and the duration of each
        self.synthetic = path / "synthetic"  # slides, their cohort tables, and the ground truth of the signal
        self.split = path / "split.csv"  # cohort table with the split, without external slides
        self.external = self.synthetic / "external.csv"  # cohort table of the external slides
        self.study_file = path / "study.toml"
        self.study = path / "study"
        self.auc_table = self.study / "table_binary.csv"
        self.tapfm_run = self.study / "runs" / ENCODER / "tapfm" / "cls-attention" / "seed0"
        self.report = path / "report.html"
        self.attention_check = path / "attention-check.json"  # how well attention ranks tiles with the signal
        self.attention_check_image = path / "attention-check.png"  # heatmaps of one slide

    def cohort_table(self, cohort: str) -> Path:
        """Return the path of the cohort table: of all splits if `cohort` is "test", or of the external slides."""
        return self.split if cohort == "test" else self.external

    def tiles(self, cohort: str) -> Path:
        return self.path / ("tiles" if cohort == "test" else "tiles-external")

    def predictions(self, cohort: str) -> Path:
        """Return the folder with the predictions of the TAPFM run for `test` or `external`."""
        return self.path / "predictions" / cohort
