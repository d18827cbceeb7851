"""Labelled tiles of another task, for the linear probe: images in one folder per class."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tapfm.errors import InputError
from tapfm.runtime.messages import format_count
from tapfm.runtime.seeding import make_rng

_SUFFIXES = {".png", ".jpg", ".jpeg", ".tif", ".tiff", ".bmp"}
_MIN_IMAGES = 2  # per class and split


@dataclass(frozen=True)
class ProbeTile:
    """An image file and its class."""

    path: Path
    label: str


@dataclass(frozen=True)
class ProbeTileSet:
    """Training and test tiles of a task."""

    classes: tuple[str, ...]
    train: tuple[ProbeTile, ...]
    test: tuple[ProbeTile, ...]


def find_probe_tiles(folder: Path, seed: int = 0) -> ProbeTileSet:
    """Return the tiles in train/CLASS/ and test/CLASS/, or in CLASS/ with a random half of each class for testing."""
    hint = "The folder must contain one folder of images per class, or train/ and test/ with such folders."
    if not folder.is_dir():
        raise InputError(f"There is no folder {folder}.", hint=hint)
    if (folder / "train").is_dir() and (folder / "test").is_dir():
        train, test = _list_tiles(folder / "train"), _list_tiles(folder / "test")
    else:
        train, test = [], []
        tiles = _list_tiles(folder)
        for label in dict.fromkeys(tile.label for tile in tiles):
            members = [tile for tile in tiles if tile.label == label]
            order = make_rng(seed, "probe", label).permutation(len(members))
            train += [members[i] for i in sorted(order[: len(members) // 2])]
            test += [members[i] for i in sorted(order[len(members) // 2 :])]
    classes = sorted({each.label for each in (*train, *test)})
    if len(classes) < 2:
        raise InputError(f"The probe needs at least 2 classes, but {folder} has {len(classes)}.", hint=hint)
    for label in classes:
        for split, tiles in (("training", train), ("testing", test)):
            if (count := sum(tile.label == label for tile in tiles)) < _MIN_IMAGES:
                raise InputError(
                    f"Class {label} in {folder} has {format_count(count, 'image')} for {split}; at least {_MIN_IMAGES} "
                    "are needed.",
                    hint=f"Add images to this class, or remove the class. {hint}",
                )
    return ProbeTileSet(tuple(classes), tuple(train), tuple(test))


def _list_tiles(folder: Path) -> list[ProbeTile]:
    """Return the images of each class folder, sorted by name."""
    return [
        ProbeTile(path, class_folder.name)
        for class_folder in sorted(folder.iterdir())
        if class_folder.is_dir() and not class_folder.name.startswith(".")
        for path in sorted(class_folder.iterdir())
        if path.suffix.lower() in _SUFFIXES
    ]
