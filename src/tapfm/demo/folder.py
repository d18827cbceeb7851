"""The folder of a demo."""

from __future__ import annotations

from pathlib import Path

from tapfm.demo.sizes import ENCODER

COHORTS = ("test", "external")


class DemoFolder:
    """Names the files of a demo."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.state = path / "demo.json"  # steps that are done, and their seconds
        self.synthetic = path / "synthetic"  # slides, their tables, and where the signal is
        self.split = path / "split.csv"  # table of the development cohort, with its split
        self.external = self.synthetic / "external.csv"  # table of the external cohort
        self.study_file = path / "study.toml"
        self.study = path / "study"
        self.results = self.study / "table_binary.csv"  # AUCs of the study
        self.adapted = self.study / "runs" / ENCODER / "tapfm" / "cls-attention" / "seed0"  # run folder of TAPFM
        self.report = path / "report.html"
        self.attention_check = path / "attention-check.json"  # how well attention finds the painted signal
        self.attention_check_image = path / "attention-check.png"  # the same for one slide

    def table(self, cohort: str) -> Path:
        """Table of the cohort `test` or `external`."""
        return self.split if cohort == "test" else self.external

    def tiles(self, cohort: str) -> Path:
        """Tiles of a cohort."""
        return self.path / ("tiles" if cohort == "test" else "tiles-external")

    def predictions(self, cohort: str) -> Path:
        """Predictions of the adapted model for a cohort."""
        return self.path / "predictions" / cohort
