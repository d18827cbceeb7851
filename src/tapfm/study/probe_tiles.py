"""Tiles of another task: pictures in a folder for each class, learnt from and tested on."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tapfm.errors import InputError
from tapfm.runtime.seeding import make_rng

_SUFFIXES = {".png", ".jpg", ".jpeg", ".tif", ".tiff", ".bmp"}
_LEAST = 2  # pictures of a class, on either side


@dataclass(frozen=True)
class ProbeTile:
    """A tile and its class."""

    path: Path
    label: str


@dataclass(frozen=True)
class ProbeTileSet:
    """The tiles of a task."""

    classes: tuple[str, ...]
    train: tuple[ProbeTile, ...]
    test: tuple[ProbeTile, ...]


def find_probe_tiles(folder: Path, seed: int = 0) -> ProbeTileSet:
    """Find train/CLASS/ and test/CLASS/; else CLASS/, of which half is tested on, drawn by the seed."""
    hint = "It has to hold a folder of pictures for each class, or train/ and test/ with such folders."
    if not folder.is_dir():
        raise InputError(f"There is no folder {folder}.", hint=hint)
    if (folder / "train").is_dir() and (folder / "test").is_dir():
        train, test = _list_tiles(folder / "train"), _list_tiles(folder / "test")
    else:
        train, test = [], []
        found = _list_tiles(folder)
        for label in dict.fromkeys(each.label for each in found):
            of_class = [each for each in found if each.label == label]
            order = make_rng(seed, "probe", label).permutation(len(of_class))
            train += [of_class[i] for i in sorted(order[: len(of_class) // 2])]
            test += [of_class[i] for i in sorted(order[len(of_class) // 2 :])]
    classes = sorted({each.label for each in (*train, *test)})
    if len(classes) < 2:
        raise InputError(f"{folder} has pictures of {len(classes)} classes.", hint=hint)
    for label in classes:
        for side, pictures in (("train", train), ("test", test)):
            if (count := sum(each.label == label for each in pictures)) < _LEAST:
                raise InputError(f"Class {label} of {folder} has {count} pictures to {side} on.", hint=hint)
    return ProbeTileSet(tuple(classes), tuple(train), tuple(test))


def _list_tiles(folder: Path) -> list[ProbeTile]:
    """List the pictures of each class, in the order of their names."""
    return [
        ProbeTile(path, of_class.name)
        for of_class in sorted(folder.iterdir())
        if of_class.is_dir() and not of_class.name.startswith(".")
        for path in sorted(of_class.iterdir())
        if path.suffix.lower() in _SUFFIXES
    ]
