"""file-formats.md: every file that tapfm writes, read from real ones, with the meanings of what stands in them.

A name without a meaning, a meaning without a name, and a file that nobody describes are errors.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterator
from dataclasses import replace
from itertools import groupby
from pathlib import Path

from reference_lab import SLIDE
from reference_meanings import COMMON, FORMATS, OTHERS, Format, Meanings
from reference_readers import Entry, entries_of
from reference_text import code, page, paragraph, prose, table


def formats_page(lab: Path) -> str:
    """Write file-formats.md from the files of a lab."""
    used: set[str] = set()
    blocks = [
        ["# File formats"],
        paragraph(
            "What stands in the files that tapfm writes, and that other programs may want to read. `make docs` writes "
            "this page from files that the commands have just made. Tables are CSV in UTF-8 with a header; numbers in "
            "them come back as they were. Level-0 pixels are those of the slide's finest level. `ID` stands for a "
            "slide's id, `TARGET` for a label column. Files with a dot in front are tapfm's own."
        ),
    ]
    for heading, formats in FORMATS.items():
        blocks.append([f"## {heading}"])
        for each in formats:
            blocks += format_blocks(lab, each, used)
    if unused := COMMON.keys() - used:
        raise ValueError(f"COMMON has a meaning for what no file has: {', '.join(sorted(unused))}")
    refuse_undescribed(lab)
    rows = [[code(shown_name(name)), prose(words)] for name, words in OTHERS.items()]
    return page(*blocks, ["## To look at"], table(["file", "what"], rows))


def format_blocks(lab: Path, each: Format, used: set[str]) -> Iterator[list[str]]:
    """Write one file: what it is, then what its names mean, kind by kind."""
    entries = with_families(entries_of(path_in(lab, each.file), each.meanings.keys() | COMMON.keys()), each.families)
    refuse_differing(lab, each, entries)
    entries = [entry for entry in entries if each.like_group is None or entry.group != each.like_group]
    meanings = meanings_of(each, entries, used)
    yield [f"### {each.title}"]
    yield paragraph(each.about)
    for group, found in groupby(entries, key=lambda entry: entry.group):
        if group:
            yield [f"{group}:"]
        yield entry_table(list(found), meanings)
    if each.like_group is not None:
        yield [f"{each.like_group}: as in `{shown_name(each.like or '')}`."]


def with_families(entries: list[Entry], families: Meanings) -> list[Entry]:
    """Write names that differ in a part as one."""
    found: dict[Entry, None] = {}
    for entry in entries:
        name = entry.name
        for pattern, written in families.items():
            name = re.sub(pattern, written, name)
        found[replace(entry, name=name)] = None
    return list(found)


def entry_table(entries: list[Entry], meanings: Meanings) -> list[str]:
    """Write names with their meanings, and types where the file has them."""
    if any(entry.kind for entry in entries):
        rows = [[code(entry.name), entry.kind, prose(meanings[entry.name])] for entry in entries]
        return table(["name", "type", "meaning"], rows)
    return table(["name", "meaning"], [[code(entry.name), prose(meanings[entry.name])] for entry in entries])


def meanings_of(each: Format, entries: list[Entry], used: set[str]) -> dict[str, str]:
    """Find the meaning of every name: the file's own, or that of all files; each must be there, and be used."""
    names = [entry.name for entry in entries]
    if missing := [name for name in names if name not in each.meanings and name not in COMMON]:
        raise ValueError(f"{each.file}: nobody says what these mean: {', '.join(missing)}")
    if unused := [name for name in each.meanings if name not in names]:
        raise ValueError(f"{each.file} does not have: {', '.join(unused)}")
    used.update(name for name in names if name not in each.meanings)
    return {name: each.meanings.get(name, COMMON.get(name, "")) for name in names}


def refuse_differing(lab: Path, each: Format, entries: list[Entry]) -> None:
    """Refuse files that are said to be alike, and are not."""
    known = each.meanings.keys() | COMMON.keys()
    names = [entry.name for entry in entries]
    for other in each.alike:
        if [entry.name for entry in entries_of(path_in(lab, other), known)] != names:
            raise ValueError(f"{other} has other names than {each.file}")
    if each.like is not None:
        ours = [entry for entry in entries if entry.group == each.like_group]
        theirs = [entry for entry in entries_of(path_in(lab, each.like), known) if entry.group == each.like_group]
        if ours != theirs:
            raise ValueError(f"{each.file}: {each.like_group} are not those of {each.like}")


def refuse_undescribed(lab: Path) -> None:
    """Refuse a file that was written and that nobody describes, and a description of none."""
    described = [name for formats in FORMATS.values() for each in formats for name in (each.file, *each.alike)]
    patterns = [*described, *OTHERS]
    files = {
        name_in(lab, path)
        for path in lab.rglob("*")
        if path.is_file() and not any(part.startswith(".") for part in path.relative_to(lab).parts)
    }
    if lost := sorted(file for file in files if not any(fnmatch.fnmatchcase(file, each) for each in patterns)):
        raise ValueError(f"Nobody says what these are: {', '.join(lost)}")
    if absent := [each for each in patterns if not fnmatch.filter(files, each)]:
        raise ValueError(f"Nothing writes: {', '.join(absent)}")


def path_in(lab: Path, name: str) -> Path:
    """Find a file of the lab."""
    return lab / name.replace("ID", SLIDE)


def name_in(lab: Path, path: Path) -> str:
    """Name a file of the lab, whichever slide it is of."""
    parts = path.relative_to(lab).as_posix().split("/")
    return "/".join(f"ID{part[4:]}" if part[:1] in "SX" and part[1:4].isdecimal() else part for part in parts)


def shown_name(name: str) -> str:
    """Take off the folder of the lab, which may have any name."""
    folders = ("runs/first", "evaluated", "compared", "predicted", "exported", "painted", "tiles*", "tiles", "study")
    return next((name.removeprefix(f"{each}/") for each in folders if name.startswith(f"{each}/")), name)
