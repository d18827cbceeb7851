"""Output folders of commands: locking, and checks of their content."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

from tapfm.errors import InputError, RunError
from tapfm.runtime.files import UNFINISHED_SUFFIX

OUTPUT_MARKER = ".tapfm-output"  # file in each output folder: contains the command, which locks it while running


@contextmanager
def lock_folder(folder: Path, command: str, suggestion: str = "choose another folder with --out") -> Iterator[None]:
    """Lock an output folder for one process of one command. The lock is released when the process exits for any reason.

    Raises InputError if the folder is in use, is not writable, or contains the output of another command.

    suggestion: what to do instead of using this folder, as a phrase for the hint of the error.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / OUTPUT_MARKER).open("a+")
    except OSError as error:
        raise InputError(
            f"{folder} cannot be written to ({error}).", hint=f"{suggestion[0].upper()}{suggestion[1:]}."
        ) from error
    with lock:
        try:
            import fcntl

            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except ImportError:
            pass  # Windows has no fcntl
        except BlockingIOError as error:
            raise InputError(
                f"Another tapfm command is running in {folder}.", hint=f"Wait until it has finished, or {suggestion}."
            ) from error
        except OSError:
            pass  # the file system has no locks
        lock.seek(0)
        previous_command = lock.read().strip()
        if previous_command not in ("", command):
            raise InputError(
                f"{folder} contains the output of {previous_command}; {command} cannot write to it.",
                hint=f"{suggestion[0].upper()}{suggestion[1:]}.",
            )
        if not previous_command:
            lock.write(command)
            lock.flush()
        yield


def remove_unfinished_files(*folders: Path) -> None:
    """Delete temporary files that a killed process left in these folders. Subfolders are not searched."""
    for folder in folders:
        for path in folder.glob(f".*{UNFINISHED_SUFFIX}"):
            path.unlink(missing_ok=True)


def check_no_other_files(folder: Path, *, allowed: Collection[str] = (), hint: str) -> None:
    """Raise RunError if a folder contains files or folders that are neither hidden nor named in `allowed`.

    A missing folder is accepted. A file instead of a folder also raises RunError.
    """
    if folder.exists() and not folder.is_dir():
        raise RunError(f"{folder} is a file, not a folder.", hint=hint)
    names = sorted(path.name for path in folder.glob("[!.]*"))
    if others := [name for name in names if name not in allowed]:
        more = " and other files" if len(others) > 1 else ""
        raise RunError(f"{folder} cannot be the output folder: it already contains {others[0]}{more}.", hint=hint)
