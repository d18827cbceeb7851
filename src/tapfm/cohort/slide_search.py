"""Find the file of a slide: at the path in the table, or by its name below a folder."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

from tapfm.cohort.slide_paths import file_name_of, parse_slide_path
from tapfm.slides.opening import SLIDE_SUFFIXES, find_slides, is_slide_name

_FEATURE_SUFFIXES = (".h5", ".pt")  # columns such as FILENAME of STAMP contain feature files instead of slides


class SlideFinder:
    """Finds slides below a folder by file name or id. Searches on first use.

    explicit: whether the user passed the folder with --slides.
    """

    def __init__(self, folder: Path, *, explicit: bool) -> None:
        self.folder, self.explicit = folder, explicit
        self.row_by_file: dict[Path, int] = {}  # row of the table that uses each file found
        self._found: dict[str, list[Path]] | None = None

    def find(self, name: str) -> list[Path]:
        """Return the slides with this file name, or with this id if the name has no slide suffix."""
        if self._found is None:
            self._found = defaultdict(list)
            for path in find_slides(self.folder):
                for key in {path.name, slide_id_from_name(path.name)}:
                    self._found[key].append(path)
        # a missing slide must not be replaced by another file with the same id
        return self._found.get(name) or ([] if is_slide_name(name) else self._found.get(slide_id_from_name(name), []))


def slide_id_from_name(name: str) -> str:
    """Return a file name without the suffix of a slide or feature file; other dots are part of the id."""
    stem = file_name_of(name)
    for suffix in (*_FEATURE_SUFFIXES, ".ome.tiff", ".ome.tif", *SLIDE_SUFFIXES):
        if stem.lower().endswith(suffix) and len(stem) > len(suffix):
            return stem[: -len(suffix)]
    return stem


def find_slide_path(row: int, text: str, slide_name: str, base: Path, finder: SlideFinder) -> tuple[Path, str, str]:
    """Return a slide's path, why the file is missing (else empty), and why the table is wrong (else empty).

    The file is at the path `text` of the table, or has the name of the slide below the slides folder. If the table
    contains a slide path with folders, another file of that name is used only if the user passed the slides folder,
    because it may belong to another patient.
    """
    given = parse_slide_path(text) if text else None
    is_slide_path = given is not None and not text.lower().endswith(_FEATURE_SUFFIXES)
    name = file_name_of(text or slide_name)
    expected = base / (given if given is not None else slide_name)
    try:
        if is_slide_path and given is not None:
            for path in (base / text, base / given, finder.folder / given):
                if path.exists():
                    return path, "", ""
        found = finder.find(name) if not is_slide_path or finder.explicit or name == text else []
    except OSError as error:  # a name that is too long, or a folder that may not be read
        return expected, "", f"{expected} cannot be read ({error.strerror})"
    if len(found) > 1:
        return expected, "", f"several files match {name}: {', '.join(map(str, found))}"
    if len(found) == 1:
        if (first := finder.row_by_file.setdefault(found[0], row)) != row:
            return expected, "", f"the only file found for {name} is {found[0]}, which row {first} already uses"
        return found[0], "", ""
    searched_name = name if is_slide_name(name) else f"{slide_id_from_name(name)}.*"
    return (
        expected,
        f"{expected} does not exist" if is_slide_path else f"no slide {searched_name} below {finder.folder}",
        "",
    )
