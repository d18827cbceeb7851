"""Generate file-formats.md: every file that tapfm writes, with names read from sample files and their meanings.

Raises ValueError if a name has no meaning, a meaning has no name, or a file has no description.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterator
from dataclasses import replace
from itertools import groupby
from pathlib import Path

from reference_meanings import COMMON, FORMATS, OTHER_FILES, Format, Meanings
from reference_readers import Entry, read_entries
from reference_samples import SLIDE
from reference_text import code, escape_text, format_page, format_paragraph, format_table


def generate_formats_page(samples: Path) -> str:
    """Return file-formats.md, from a folder of sample files."""
    used: set[str] = set()
    blocks = [
        ["# File formats"],
        format_paragraph(
            "The contents of the files that tapfm writes and that other programs may want to read. `make docs` "
            "generates this page from sample files. Tables are CSV files in UTF-8 with a header; predictions and "
            "metrics are written in full precision. Level-0 pixels are pixels of the slide's finest level. `ID` is a "
            "slide id, and `TARGET` is the name of a label column. Files whose names start with a dot are internal."
        ),
    ]
    for heading, formats in FORMATS.items():
        blocks.append([f"## {heading}"])
        for file_format in formats:
            blocks += _format_blocks(samples, file_format, used)
    if unused := COMMON.keys() - used:
        raise ValueError(f"COMMON has meanings for names that no file has: {', '.join(sorted(unused))}")
    _check_all_files_described(samples)
    rows = [[code(_shown_name(name)), escape_text(description)] for name, description in OTHER_FILES.items()]
    return format_page(*blocks, ["## Images, pages and other files"], format_table(["file", "contents"], rows))


def _format_blocks(samples: Path, file_format: Format, used: set[str]) -> Iterator[list[str]]:
    """Yield the description of a file, then a table of names for each group."""
    known = file_format.meanings.keys() | COMMON.keys()
    entries = _merge_names(read_entries(_sample_path(samples, file_format.file), known), file_format.name_patterns)
    _check_same_names(samples, file_format, entries)
    shared_group = file_format.shared_group
    entries = [entry for entry in entries if shared_group is None or entry.group != shared_group]
    meanings = find_meanings(file_format, entries, used)
    yield [f"### {file_format.title}"]
    yield format_paragraph(file_format.description)
    for group, group_entries in groupby(entries, key=lambda entry: entry.group):
        if group:
            yield [f"{group}:"]
        yield _entry_table(list(group_entries), meanings)
    if shared_group is not None:
        yield [f"{shared_group}: as in `{_shown_name(file_format.shared_with or '')}`."]


def _merge_names(entries: list[Entry], name_patterns: Meanings) -> list[Entry]:
    """Replace the varying part of names by its placeholder, and remove the duplicates."""
    merged: dict[Entry, None] = {}
    for entry in entries:
        name = entry.name
        for pattern, placeholder in name_patterns.items():
            name = re.sub(pattern, placeholder, name)
        merged[replace(entry, name=name)] = None
    return list(merged)


def _entry_table(entries: list[Entry], meanings: Meanings) -> list[str]:
    if any(entry.kind for entry in entries):
        rows = [[code(entry.name), entry.kind, escape_text(meanings[entry.name])] for entry in entries]
        return format_table(["name", "type", "meaning"], rows)
    return format_table(
        ["name", "meaning"], [[code(entry.name), escape_text(meanings[entry.name])] for entry in entries]
    )


def find_meanings(file_format: Format, entries: list[Entry], used: set[str]) -> dict[str, str]:
    """Return the meaning of every name, from the format or from COMMON; add the names from COMMON to `used`."""
    names = [entry.name for entry in entries]
    if missing := [name for name in names if name not in file_format.meanings and name not in COMMON]:
        raise ValueError(
            f"{file_format.file}: no meaning for {', '.join(missing)}. Add it to tools/reference_meanings.py."
        )
    if unused := [name for name in file_format.meanings if name not in names]:
        raise ValueError(
            f"{file_format.file} has no {', '.join(unused)}. Remove the meaning from tools/reference_meanings.py."
        )
    used.update(name for name in names if name not in file_format.meanings)
    return {name: file_format.meanings.get(name, COMMON.get(name, "")) for name in names}


def _check_same_names(samples: Path, file_format: Format, entries: list[Entry]) -> None:
    """Raise ValueError if files that are documented as having the same names differ."""
    known = file_format.meanings.keys() | COMMON.keys()
    names = [entry.name for entry in entries]
    for other in file_format.same_format:
        if [entry.name for entry in read_entries(_sample_path(samples, other), known)] != names:
            raise ValueError(f"{other} and {file_format.file} are documented together, but their names differ.")
    if file_format.shared_with is not None:
        group = file_format.shared_group
        own = [entry for entry in entries if entry.group == group]
        other_entries = read_entries(_sample_path(samples, file_format.shared_with), known)
        if own != [entry for entry in other_entries if entry.group == group]:
            raise ValueError(f"{file_format.file}: {group} differ from those of {file_format.shared_with}.")


def _check_all_files_described(samples: Path) -> None:
    """Raise ValueError if a sample file has no description, or a description has no sample file."""
    described = [name for formats in FORMATS.values() for each in formats for name in (each.file, *each.same_format)]
    patterns = [*described, *OTHER_FILES]
    files = {
        _general_name(samples, path)
        for path in samples.rglob("*")
        if path.is_file() and not any(part.startswith(".") for part in path.relative_to(samples).parts)
    }
    if undescribed := sorted(file for file in files if not any(fnmatch.fnmatchcase(file, each) for each in patterns)):
        raise ValueError(f"No description for {', '.join(undescribed)}. Add it to tools/reference_meanings.py.")
    if absent := [pattern for pattern in patterns if not fnmatch.filter(files, pattern)]:
        raise ValueError(
            f"No sample file for {', '.join(absent)}. Delete its description in tools/reference_meanings.py."
        )


def _sample_path(samples: Path, name: str) -> Path:
    return samples / name.replace("ID", SLIDE)


def _general_name(samples: Path, path: Path) -> str:
    """Return the path of a sample file with `ID` instead of the slide id."""
    parts = path.relative_to(samples).as_posix().split("/")
    return "/".join(f"ID{part[4:]}" if part[:1] in "SX" and part[1:4].isdecimal() else part for part in parts)


def _shown_name(name: str) -> str:
    """Return the path of a sample file without the folder that the user chooses."""
    folders = ("runs/first", "evaluated", "compared", "predicted", "exported", "synthetic", "tiles*", "tiles", "study")
    return next((name.removeprefix(f"{each}/") for each in folders if name.startswith(f"{each}/")), name)
