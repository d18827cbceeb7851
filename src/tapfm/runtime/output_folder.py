"""Folders that a command writes to: one run at a time, and nothing half-written left in them."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

from tapfm.errors import InputError, RunError
from tapfm.runtime.files import UNFINISHED

OUTPUT_MARK = ".tapfm-output"  # a file in folders that tapfm writes to


@contextmanager
def locked(folder: Path, command: str, other_folder: str = "give another folder with --out") -> Iterator[None]:
    """Keep a second run, and other commands, out of the folder; the lock goes with the process, however it ends."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / OUTPUT_MARK).open("a+")
    except OSError as error:
        raise InputError(
            f"{folder} cannot be written to ({error}).", hint=f"{other_folder[0].upper()}{other_folder[1:]}."
        ) from error
    with lock:
        try:
            import fcntl

            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except ImportError:
            pass  # not on Windows
        except BlockingIOError as error:
            raise InputError(
                f"Another {command} is at work in {folder}.", hint=f"Wait for it, or {other_folder}."
            ) from error
        except OSError:
            pass  # a file system without locks
        lock.seek(0)
        writer = lock.read().strip()
        if writer not in ("", command):
            raise InputError(
                f"{folder} is what {writer} wrote: {command} would mix its files with others.",
                hint=f"{other_folder[0].upper()}{other_folder[1:]}.",
            )
        if not writer:
            lock.write(command)
            lock.flush()
        yield


def remove_unfinished(*folders: Path) -> None:
    """Remove what a killed run was writing; not below these folders, where another command may be at work."""
    for folder in folders:
        for path in folder.glob(f".*{UNFINISHED}"):
            path.unlink(missing_ok=True)


def refuse_other_files(folder: Path, *, ours: Collection[str] = (), hint: str) -> None:
    """Refuse a folder that holds files besides `ours` and hidden ones; a folder that does not exist is fine."""
    if folder.exists() and not folder.is_dir():
        raise RunError(f"{folder} is a file.", hint=hint)
    names = sorted(path.name for path in folder.glob("[!.]*"))
    if others := [name for name in names if name not in ours]:
        raise RunError(f"{folder} has other files in it, such as {others[0]}.", hint=hint)
