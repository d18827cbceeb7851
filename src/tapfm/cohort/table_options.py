"""Options for reading a cohort table."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

# Texts that mean a missing value, ignoring case; an empty cell always does
MISSING_VALUES = (
    *("NA", "N/A", "#N/A", "#NV", "nan", "null", "none", "unknown", ".", "--", "'--"),
    *("not available", "not applicable", "not reported", "not evaluated"),  # of TCGA and cBioPortal, also in [...]
)


@dataclass(frozen=True)
class TableOptions:
    """How to read a cohort table."""

    slides: Path | None = None  # folder to search for slides
    encoding: str | None = None  # None: UTF-8 or UTF-16
    patient_column: str = ""  # empty: recognised by its name
    slides_are_patients: bool = False  # every slide is from another patient
    missing_values: tuple[str, ...] = MISSING_VALUES
    clini: Path | None = None  # STAMP's table of patients, to join with a table of slides
    clam_splits: Path | None = None  # CLAM's splits_0.csv, or the folder of splits_0.csv, splits_1.csv, ...

    def command_arguments(self) -> list[str | Path]:
        """Return these options as arguments of `tapfm split`, without those that have their default."""
        arguments: list[str | Path] = [] if self.slides is None else ["--slides", self.slides]
        arguments += ["--encoding", self.encoding] if self.encoding else []
        arguments += ["--patient-column", self.patient_column] if self.patient_column else []
        arguments += ["--slides-are-patients"] * self.slides_are_patients
        arguments += [
            part for text in self.missing_values if text not in MISSING_VALUES for part in ("--missing", text)
        ]
        arguments += [] if self.clini is None else ["--clini", self.clini]
        return arguments if self.clam_splits is None else [*arguments, "--splits", self.clam_splits]


DEFAULT_TABLE_OPTIONS = TableOptions()
