"""An exported encoder to the Hugging Face hub: private unless told otherwise, and only where its licence allows it."""

from __future__ import annotations

import re
from pathlib import Path

from tapfm.encoders.card import EncoderCard
from tapfm.errors import InputError, TapfmError
from tapfm.runtime.files import UNFINISHED

_FLAG = "--despite-no-derivatives"
_LOG_IN = "Log in with a token that may write: hf auth login (or set HF_TOKEN)."
_NEEDED = ("config.json", "model.safetensors")
_NOT_PUSHED = [".*", "*/.*", f"*{UNFINISHED}"]


def push_folder(
    folder: Path, repository: str, *, card: EncoderCard, despite_no_derivatives: bool, private: bool = True
) -> str:
    """Make the repository, if it is not there, upload the folder to it, and return its address."""
    refuse_bad_repository(repository)
    refuse_no_derivatives(card, despite_no_derivatives=despite_no_derivatives)
    missing = [name for name in _NEEDED if not (folder / name).is_file()]
    if missing:
        raise InputError(
            f"{folder} is not an exported encoder: it has no {' and no '.join(missing)}.",
            hint="Export it first: tapfm export runs/NAME --out DIR",
        )
    refuse_without_token()
    from huggingface_hub import HfApi

    try:
        hub = HfApi()
        address = str(hub.create_repo(repository, private=private, exist_ok=True))
        if private and not hub.model_info(repository).private:  # it was there before
            raise InputError(
                f"{address} exists and is public, so that everybody would see what is pushed.",
                hint=f"Give another name, or make it private on {address}/settings",
            )
        hub.upload_folder(
            repo_id=repository,
            folder_path=folder,
            commit_message=f"{card.name}, adapted with tapfm",
            ignore_patterns=_NOT_PUSHED,
        )
    except TapfmError:
        raise
    except Exception as error:  # its client has errors of two HTTP libraries, by version
        raise _refused(repository, error) from error
    return address


def refuse_without_token() -> None:
    """Refuse before any work when nobody is logged in."""
    from huggingface_hub import get_token

    if get_token() is None:
        raise InputError("Nobody is logged in to the hub on this machine.", hint=_LOG_IN)


def refuse_bad_repository(repository: str) -> None:
    """Refuse what cannot be a repository's name before anything is asked of the hub."""
    part = r"[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?"
    valid = re.fullmatch(rf"{part}/{part}", repository) and not re.search(r"--|\.\.|\.git$", repository)
    if not valid or len(repository) > 96:
        raise InputError(
            f"'{repository}' is not the name of a repository on the hub.",
            hint="Give owner/name: letters, digits, single '-' and '.', '_'; for example my-lab/uni-fgfr3.",
        )


def forbids_derivatives(licence: str) -> bool:
    """Say whether a licence, as cards name it, lets nobody pass on changed copies."""
    return re.search(r"\bND\b|no[ -]?deriv", licence, re.IGNORECASE) is not None


def refuse_no_derivatives(card: EncoderCard, *, despite_no_derivatives: bool) -> None:
    """Refuse to share an adapted encoder that its licence does not let anybody share, unless it was asked for."""
    if forbids_derivatives(card.licence) and not despite_no_derivatives:
        raise InputError(
            f"The licence of {card.name} ({card.licence}) does not let you share adapted versions of it.",
            hint=f"Keep the folder to yourself; or, if its owners have allowed it: {_FLAG}",
        )


def _refused(repository: str, error: Exception) -> InputError:
    """Say why the hub, or the way to it, did not take the folder."""
    causes: list[BaseException] = [error]
    while (cause := causes[-1].__cause__) is not None:
        causes.append(cause)
    answers = [getattr(each, "response", None) for each in causes]
    status = next((answer.status_code for answer in answers if answer is not None), None)
    owner = repository.partition("/")[0]
    if status == 401:
        return InputError("The hub does not know the token of this machine.", hint=_LOG_IN)
    if status in (403, 404):
        return InputError(
            f"The hub does not let you write to {repository}.",
            hint=f"Is {owner} you, or an organisation whose models you may write? {_LOG_IN}",
        )
    reason = (str(causes[-1]) or type(causes[-1]).__name__).splitlines()[0]
    if status is None:
        return InputError(
            f"{repository} could not be pushed: {reason}", hint="Is there network? Try again with the same command."
        )
    return InputError(
        f"The hub did not take {repository} (status {status}): {reason}", hint="Try again later, with the same command."
    )
