"""The errors of tapfm, each with a message and usually a hint that says what to do next; and `Interrupted`.

TapfmError                          exit code 1
├── NonFiniteError                  a loss, gradient or logit is NaN or infinite; the command stops, or a slide fails
├── TileReadError                   pixels of a slide cannot be decoded; a few such tiles are skipped after a retry
├── DiskFullError                   no space to write a file; its previous version is intact
├── DeviceMemoryError               out of memory while loading a model, or while encoding a single tile
├── SlidesFailedError               exit code 3: too many slides failed; finished work is saved
├── CommandFailedError              a command started by another command failed; has that command's exit code
└── InputError                      exit code 2: invalid input
    ├── UnknownNameError            unknown encoder, column, ...; the message suggests similar names
    ├── SettingError                settings are invalid, contradictory, or need more GPU memory than there is
    ├── TileError                   tiles have the wrong type, shape or size
    ├── LabelError                  labels cannot be used
    ├── CohortError                 a cohort table, or its slides, splits or tiles, cannot be used as requested
    ├── RunError                    a run, export, ensemble or output folder cannot be used or resumed as requested
    ├── CheckpointError             a checkpoint is missing, invalid, or does not match the model or the optimiser
    ├── TileStoreError              a file of tile coordinates cannot be used
    ├── FeatureStoreError           a feature file cannot be used
    ├── SlideError                  a slide cannot be used; the other slides are not affected
    │   ├── UnreadableSlideError    missing, damaged or in an unsupported format
    │   ├── ScaleError              mpp is missing, implausible or contradictory
    │   └── NoTilesError            no tile is left: no tissue, all tiles removed, or a slide smaller than a tile
    ├── UnsupportedEncoderError     an encoder or its architecture is not supported
    └── WeightsError                encoder weights are missing, gated, damaged or do not match
        ├── WeightsNotFoundError
        ├── GatedWeightsError
        ├── WeightsDigestError
        └── WeightsMismatchError

`Interrupted` is not a TapfmError: a signal stopped the command. The exit code is 128 + the number of the signal.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class TapfmError(Exception):
    """Base class: a message that says what happened, and a hint that says what to do next (may be empty)."""

    exit_code = 1

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.hint = hint

    def __str__(self) -> str:
        message = super().__str__()
        return f"{message}\n{self.hint}" if self.hint else message

    @property
    def message(self) -> str:
        """The message without the hint."""
        return super().__str__()


class NonFiniteError(TapfmError):
    """A value that must be finite, such as a loss, a gradient or a logit, is NaN or infinite."""


class TileReadError(TapfmError):
    """The pixels of some tiles cannot be decoded."""


class DiskFullError(TapfmError):
    """There is no space on the disk to write a file."""


class DeviceMemoryError(TapfmError):
    """A device is out of memory while loading a model, or while encoding a single tile."""


class SlidesFailedError(TapfmError):
    """More slides failed than allowed, or all of them. Finished work is saved."""

    exit_code = 3


class CommandFailedError(TapfmError):
    """A command started by another command failed."""

    def __init__(self, message: str, *, hint: str = "", exit_code: int) -> None:
        super().__init__(message, hint=hint)
        self.exit_code = exit_code


class InputError(TapfmError):
    """Invalid input."""

    exit_code = 2


class UnknownNameError(InputError):
    """An unknown name."""

    @classmethod
    def with_suggestions(cls, kind: str, name: str, known: Iterable[str], *, see: str) -> UnknownNameError:
        """Return the error with the most similar known names.

        see: all known names, or where they are listed.
        """
        by_lowercase = {each.lower(): each for each in known}
        matches = difflib.get_close_matches(name.lower(), by_lowercase, n=3, cutoff=0.5)
        suggestion = f"Did you mean: {', '.join(by_lowercase[each] for each in matches)}? " if matches else ""
        return cls(f"There is no {kind} named '{name}'.", hint=f"{suggestion}Available: {see}")


class SettingError(InputError):
    """Settings are invalid, contradict each other, or need more GPU memory than there is."""


class TileError(InputError):
    """Tiles have the wrong type, shape or size."""


class LabelError(InputError):
    """Labels cannot be used."""


class CohortError(InputError):
    """A cohort table, or the slides, splits, tiles or features that belong to it, cannot be used as requested."""


class RunError(InputError):
    """A run, export, ensemble or output folder cannot be used or resumed as requested."""


class CheckpointError(InputError):
    """A checkpoint is missing, is not a valid tapfm checkpoint, or does not match the model or the optimiser."""


class TileStoreError(InputError):
    """A file of tile coordinates cannot be used."""


class FeatureStoreError(InputError):
    """A feature file cannot be used."""


class SlideError(InputError):
    """A slide cannot be used."""


class UnreadableSlideError(SlideError):
    """A slide file is missing, damaged or in an unsupported format."""


class ScaleError(SlideError):
    """The microns per pixel (mpp) of a slide are missing, implausible or contradictory."""


class NoTilesError(SlideError):
    """A slide has no tiles: no tissue was detected, all tiles were removed, or it is smaller than a tile."""


class UnsupportedEncoderError(InputError):
    """An encoder or its architecture is not supported, for example because it has no CLS token."""


class WeightsError(InputError):
    """Encoder weights cannot be used."""


class WeightsNotFoundError(WeightsError):
    """Weights were not found at a path, in the tapfm package or on the Hugging Face Hub."""


class GatedWeightsError(WeightsError):
    """The model is gated: its licence has to be accepted first."""


class WeightsDigestError(WeightsError):
    """The SHA-256 of encoder weights differs from the published one, or from that of the weights used in training."""


class WeightsMismatchError(WeightsError):
    """A weights file, its configuration or an export does not match the encoder or the model."""


class Interrupted(Exception):  # noqa: N818 - not an error: the user requested it
    """A signal stopped the command; finished work is saved."""

    def __init__(self, signal_number: int) -> None:
        super().__init__(signal_number)
        self.signal_number = signal_number
