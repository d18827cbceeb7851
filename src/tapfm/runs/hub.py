"""Push an export (encoder, aggregator, model card) to the Hugging Face Hub, by default to a private repository.

The licence of the encoder must allow sharing derivatives, or its owners must have given permission.
"""

from __future__ import annotations

import re
from pathlib import Path

from tapfm.encoders.card import EncoderCard
from tapfm.errors import InputError, TapfmError
from tapfm.runtime.files import UNFINISHED_SUFFIX

_PERMISSION_OPTION = "--owner-permission"
_LOGIN_HINT = "Log in with a token that has write access: hf auth login (or set HF_TOKEN)."
_REQUIRED_FILES = ("config.json", "model.safetensors")  # timm needs them to load the encoder from the hub
_IGNORE_PATTERNS = [".*", "*/.*", f"*{UNFINISHED_SUFFIX}"]  # hidden and unfinished files, which are not pushed


def push_folder(
    folder: Path, repository: str, *, card: EncoderCard, owner_permission: bool, private: bool = True
) -> str:
    """Create the repository if it does not exist, upload the folder, and return the URL of the repository."""
    check_repository_name(repository)
    check_licence_allows_sharing(card, owner_permission=owner_permission)
    missing = [name for name in _REQUIRED_FILES if not (folder / name).is_file()]
    if missing:
        raise InputError(
            f"{folder} is not an exported encoder: it has no {' and no '.join(missing)}.",
            hint="Export a run with an adapted encoder first: tapfm export runs/NAME --out DIR",
        )
    check_hub_token_exists()
    from huggingface_hub import HfApi

    try:
        hub = HfApi()
        address = str(hub.create_repo(repository, private=private, exist_ok=True))
        if private and not hub.model_info(repository).private:  # a repository that already existed
            raise InputError(
                f"{address} exists and is public, so everybody could see the pushed files.",
                hint=f"Choose another repository name, make the repository private on {address}/settings, "
                "or pass --public.",
            )
        hub.upload_folder(
            repo_id=repository,
            folder_path=folder,
            commit_message=f"{card.name}, adapted with tapfm",
            ignore_patterns=_IGNORE_PATTERNS,
        )
    except TapfmError:
        raise
    except Exception as error:  # the client raises errors of two HTTP libraries, depending on its version
        raise _make_push_error(repository, error) from error
    return address


def check_hub_token_exists() -> None:
    """Raise InputError if no access token for the hub is found. Does not check that the hub accepts the token."""
    from huggingface_hub import get_token

    if get_token() is None:
        raise InputError("No user is logged in to the Hugging Face Hub on this machine.", hint=_LOGIN_HINT)


def check_repository_name(repository: str) -> None:
    """Raise InputError if this is not a valid repository name of the Hugging Face Hub."""
    part = r"[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?"
    valid = re.fullmatch(rf"{part}/{part}", repository) and not re.search(r"--|\.\.|\.git$", repository)
    if not valid or len(repository) > 96:
        raise InputError(
            f"'{repository}' is not a valid repository name.",
            hint="Use owner/name, for example my-lab/uni-fgfr3, with at most 96 characters. Both parts may contain "
            "letters, digits, '-', '_' and '.', but not '--' or '..'. They must start and end with a letter or digit. "
            "The name must not end with '.git'.",
        )


def forbids_derivatives(licence: str) -> bool:
    """Return whether the licence of an encoder card forbids sharing modified versions."""
    return re.search(r"\bND\b|no[ -]?deriv", licence, re.IGNORECASE) is not None


def check_licence_allows_sharing(card: EncoderCard, *, owner_permission: bool) -> None:
    """Raise InputError if the licence of the encoder forbids sharing adapted versions.

    owner_permission: the owners of the encoder permit sharing, whatever the licence says.
    """
    if forbids_derivatives(card.licence) and not owner_permission:
        raise InputError(
            f"The licence of {card.name} ({card.licence}) does not allow sharing adapted versions.",
            hint="Do not share the exported folder. "
            f"If the owners of {card.name} gave you permission, pass {_PERMISSION_OPTION}.",
        )


def _make_push_error(repository: str, error: Exception) -> InputError:
    """Return the error to raise when a push failed, with the reason that the hub or the network gave."""
    causes: list[BaseException] = [error]
    while (cause := causes[-1].__cause__) is not None:
        causes.append(cause)
    responses = [getattr(each, "response", None) for each in causes]
    status = next((response.status_code for response in responses if response is not None), None)
    owner = repository.partition("/")[0]
    if status == 401:
        return InputError("The Hugging Face Hub rejected the token of this machine.", hint=_LOGIN_HINT)
    if status in (403, 404):
        return InputError(
            f"You have no write access to {repository} on the Hugging Face Hub.",
            hint=f"Is {owner} your user name, or an organisation with write access for you? {_LOGIN_HINT}",
        )
    reason = (str(causes[-1]) or type(causes[-1]).__name__).splitlines()[0]
    if status is None:
        return InputError(
            f"The model could not be pushed to {repository}: {reason}",
            hint="Check the network connection, then run the command again.",
        )
    return InputError(
        f"The model could not be pushed to {repository} (HTTP status {status}): {reason}",
        hint="Run the command again later.",
    )
