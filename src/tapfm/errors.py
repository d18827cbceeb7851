"""Every error tapfm raises on purpose, each with a hint of what to type or change next.

TapfmError                          exit code 1
├── NonFiniteError                  a loss or gradient is NaN or infinite: the run stops
├── TileReadError                   pixels of a slide that cannot be decoded: retried, skipped, counted
├── DiskFullError                   no room for a checkpoint; the last good one stays
├── DeviceMemoryError               out of memory with the smallest batch: retrying cannot help
├── SlidesFailedError               exit code 3: some slides failed, the rest are done
├── CommandFailedError              a command that another one ran failed; has its exit code
└── InputError                      exit code 2: something that was given is wrong
    ├── UnknownNameError            no such encoder, ...: the nearest names are offered
    ├── SettingError                a setting outside its range
    ├── TileError                   tiles of the wrong type, shape or size
    ├── LabelError                  labels that cannot be used
    ├── CohortError                 a cohort's table, with every problem it has
    ├── RunError                    a folder of a run that cannot be used, or gone on with, as asked
    ├── CheckpointError             a file that is no checkpoint of ours
    ├── TileStoreError              a file of tile coordinates that cannot be used
    ├── FeatureStoreError           a file of features that cannot be used
    ├── SlideError                  a slide that cannot be used: it costs that slide only
    │   ├── UnreadableSlideError    missing, damaged, or of no format we read
    │   ├── ScaleError              its microns per pixel are absent, implausible or contradicted
    │   └── NoTissueError           nothing on it to tile
    ├── UnsupportedEncoderError     an architecture whose CLS attention we cannot read
    └── WeightsError                weights missing, gated, damaged or not fitting
        ├── WeightsNotFoundError
        ├── GatedWeightsError
        ├── WeightsDigestError
        └── WeightsMismatchError
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class TapfmError(Exception):
    """Base of the tree: what went wrong, and a hint of what to do next."""

    exit_code = 1

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.hint = hint

    def __str__(self) -> str:
        message = super().__str__()
        return f"{message}\n{self.hint}" if self.hint else message

    @property
    def message(self) -> str:
        """What went wrong, without the hint."""
        return super().__str__()


class NonFiniteError(TapfmError):
    """A loss or a gradient is NaN or infinite."""


class TileReadError(TapfmError):
    """Pixels of a slide that cannot be decoded."""


class DiskFullError(TapfmError):
    """No room for a checkpoint."""


class DeviceMemoryError(TapfmError):
    """A device is out of memory even with the smallest batch."""


class SlidesFailedError(TapfmError):
    """Some slides failed, and the rest are done."""

    exit_code = 3


class CommandFailedError(TapfmError):
    """A command that another command ran has failed."""

    def __init__(self, message: str, *, hint: str = "", exit_code: int) -> None:
        super().__init__(message, hint=hint)
        self.exit_code = exit_code


class InputError(TapfmError):
    """Something that was given is wrong."""

    exit_code = 2


class UnknownNameError(InputError):
    """A name that stands in no table; the nearest ones are offered."""

    @classmethod
    def of(cls, kind: str, name: str, known: Iterable[str], *, see: str) -> UnknownNameError:
        """Look for the nearest names."""
        spelled = {each.lower(): each for each in known}
        near = [spelled[each] for each in difflib.get_close_matches(name.lower(), spelled, n=3, cutoff=0.5)]
        nearest = f"Nearest: {', '.join(near)}. " if near else ""
        return cls(f"There is no {kind} called '{name}'.", hint=f"{nearest}All of them: {see}")


class SettingError(InputError):
    """A setting outside its range."""


class TileError(InputError):
    """Tiles of the wrong type, shape or size."""


class LabelError(InputError):
    """Labels that cannot be used."""


class CohortError(InputError):
    """A cohort's table, with every problem it has."""


class RunError(InputError):
    """A folder of a run that cannot be used, or gone on with, as asked."""


class CheckpointError(InputError):
    """A file that is no checkpoint of ours."""


class TileStoreError(InputError):
    """A file of tile coordinates that cannot be used."""


class FeatureStoreError(InputError):
    """A file of features that cannot be used."""


class SlideError(InputError):
    """A slide that cannot be used."""


class UnreadableSlideError(SlideError):
    """A slide that is missing, damaged, or of no format we read."""


class ScaleError(SlideError):
    """Microns per pixel that are absent, implausible or contradicted."""


class NoTissueError(SlideError):
    """A slide without anything to tile."""


class UnsupportedEncoderError(InputError):
    """An architecture whose CLS attention cannot be read."""


class WeightsError(InputError):
    """Weights that cannot be used."""


class WeightsNotFoundError(WeightsError):
    """No such file, and the hub does not give it either."""


class GatedWeightsError(WeightsError):
    """The model's owners ask for a licence to be accepted first."""


class WeightsDigestError(WeightsError):
    """A file whose SHA-256 is not the published one."""


class WeightsMismatchError(WeightsError):
    """A checkpoint that does not fit the encoder exactly."""


class Interrupted(Exception):  # noqa: N818 - not an error: the user asked for it
    """A signal asked the command to stop; what is finished is saved."""

    def __init__(self, signal_number: int) -> None:
        super().__init__(signal_number)
        self.signal_number = signal_number
