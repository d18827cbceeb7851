"""`tapfm doctor`: what this machine can do, finding by finding, each with what to do about it."""

from __future__ import annotations

import importlib
import importlib.util
import platform
import shutil
import sys
from collections.abc import Iterable, Iterator
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from rich.console import Console

from tapfm.runtime.options import Option, command_function, options

if TYPE_CHECKING:
    from tapfm.encoders.card import EncoderCard

Status = Literal["ok", "note", "broken"]
_GIB = 2**30
_RUNS_WITH = (
    *("torch", "timm", "safetensors", "huggingface_hub", "typer", "rich", "numpy", "openslide-python", "tifffile"),
    *("imagecodecs", "pillow", "opencv-python-headless", "h5py", "pydantic", "matplotlib", "tensorboard", "pyarrow"),
    *("jinja2", "fastapi", "uvicorn", "scipy", "scikit-learn"),
)
_SMALL_ONLY = "Small encoders only; adapting a large one needs an NVIDIA GPU."
_LARGEST_WEIGHTS = 5 * _GIB  # a ViT-g in float32


@options
class DoctorOptions:
    """Options of `tapfm doctor`."""

    _: KW_ONLY
    offline: Annotated[bool, Option("Do not ask the hub which gated encoders open.")] = False


@dataclass(frozen=True)
class Finding:
    """Result of one check. `note`: works, but read the advice; `broken`: needed, and does not work."""

    subject: str
    status: Status
    found: str
    advice: str = ""


@command_function(DoctorOptions)
def doctor(options: DoctorOptions, console: Console) -> list[Finding]:
    """Check what this machine can do; the findings have the order of the table."""
    from tapfm.encoders.catalog import encoder_cards

    findings = [_python_finding(), *_package_findings(), _torch_finding(), _openslide_finding(), _viewer_finding()]
    if importlib.util.find_spec("huggingface_hub") is None:
        return findings  # named as missing above
    with console.status("asking the hub which encoders open"):
        findings += _hub_findings(offline=options.offline)
    with console.status("hashing cached weights (remembered for the next time)"):
        findings += list(_cached_weights_findings(encoder_cards().values()))
    findings.append(_disk_finding(_hub_cache()))
    return findings


def _python_finding() -> Finding:
    """Python itself; an older one than pyproject.toml asks for cannot have installed tapfm."""
    return Finding("Python", "ok", f"{platform.python_version()} at {sys.executable}")


def _package_findings(requirements: Iterable[str] | None = None) -> Iterator[Finding]:
    """Compare every package tapfm asks for with what is installed; those of extras only where they are there."""
    import importlib.metadata

    if requirements is None:
        try:
            requirements = importlib.metadata.requires("tapfm") or []
        except importlib.metadata.PackageNotFoundError:
            yield Finding("packages", "note", "tapfm runs from its source: only what is missing is told", "make setup")
            requirements = _RUNS_WITH
    try:
        from packaging.requirements import Requirement
    except ModuleNotFoundError:
        yield Finding("packaging", "broken", "missing, so versions were not compared", "pip install packaging")
        return
    for requirement in map(Requirement, requirements):
        needed = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        advice = f"pip install '{requirement.name}{requirement.specifier}'"
        try:
            version = importlib.metadata.version(requirement.name)
        except importlib.metadata.PackageNotFoundError:
            if needed:
                yield Finding(requirement.name, "broken", "missing", advice)
            continue
        if requirement.specifier.contains(version, prereleases=True):
            yield Finding(requirement.name, "ok", version)
        else:
            yield Finding(requirement.name, "broken" if needed else "note", version, advice)


def _torch_finding() -> Finding:
    """The accelerator, as torch sees it."""
    try:
        import torch

        if torch.cuda.is_available():
            free, total = torch.cuda.mem_get_info()
            precision = "bfloat16" if torch.cuda.is_bf16_supported(including_emulation=False) else "float16"
            found = f"{torch.cuda.get_device_name()}, {total / _GIB:.0f} GiB ({free / _GIB:.0f} free), {precision}"
            from tapfm.encoders.precision import can_compile

            if not can_compile(torch.device("cuda")):
                needed = "For faster steps: pip install triton, a C compiler and Python's headers (python3-dev)"
                return Finding("GPU", "note", f"{found}, does not compile", needed)
            return Finding("GPU", "ok", f"{found}, compiles")
        if torch.backends.mps.is_available():
            return Finding("GPU", "note", "Apple GPU", _SMALL_ONLY)
    except Exception as error:  # whatever a broken install raises is the finding
        return Finding("torch", "broken", f"{type(error).__name__}: {error}", "pip install --force-reinstall torch")
    return Finding("GPU", "note", "none: torch uses the CPU", _SMALL_ONLY)


def _openslide_finding() -> Finding:
    """The library that opens slides."""
    try:
        openslide = importlib.import_module("openslide")
    except ModuleNotFoundError:
        advice = "pip install openslide-python openslide-bin"
        return Finding("OpenSlide", "broken", "not installed: slides cannot be read", advice)
    except Exception as error:  # the Python part is there, the library is not
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        return Finding("OpenSlide", "broken", reason, "pip install openslide-bin")
    return Finding("OpenSlide", "ok", f"library {openslide.__library_version__}, Python {openslide.__version__}")


def _viewer_finding() -> Finding:
    """The pages of `tapfm view`: a wheel has them, a checkout where npm has built them."""
    from tapfm.errors import InputError
    from tapfm.viewer.assets import read_assets

    try:
        read_assets()
    except InputError as error:
        return Finding("viewer", "note", error.message, error.hint)
    return Finding("viewer", "ok", "its pages are built")


def _hub_findings(*, offline: bool) -> list[Finding]:
    """The hub token, and which gated encoders it opens."""
    from concurrent.futures import ThreadPoolExecutor

    from huggingface_hub import HfApi, get_token

    from tapfm.encoders.catalog import encoder_cards

    gated = [card for card in encoder_cards().values() if card.gate != "none"]
    token = get_token()
    if token is None:
        advice = "hf auth login; then accept each licence on the encoder's page: tapfm encoders NAME"
        return [Finding("hub token", "note", f"none: the {len(gated)} gated encoders stay closed", advice)]
    if offline:
        return [Finding("hub token", "ok", "there; not asked which encoders it opens (--offline)")]
    api = HfApi(token=token)
    try:
        user = api.whoami()["name"]
    except Exception as error:
        status = _answered(error)
        if status is None:
            found, advice = "there; the hub cannot be reached", "Cached and local weights still work."
            return [Finding("hub token", "note", found, advice)]
        if status in (401, 403):
            return [Finding("hub token", "broken", "the hub refuses it", "hf auth login, with a new token")]
        return [Finding("hub token", "note", f"there; the hub answered with error {status}", "Try again later.")]

    def opens(card: EncoderCard) -> bool | None:
        try:
            api.auth_check(card.repository)
        except Exception as error:
            return False if _answered(error) in (401, 403, 404) else None
        return True

    with ThreadPoolExecutor(8) as pool:
        answers = list(zip(gated, pool.map(opens, gated), strict=True))
    findings = [Finding("hub token", "ok", f"there, of user {user}")]
    if names := [card.key for card, answer in answers if answer is True]:
        findings.append(Finding("gated, open", "ok", ", ".join(names)))
    if names := [card.key for card, answer in answers if answer is False]:
        advice = "Accept the licence on the encoder's page: tapfm encoders NAME"
        findings.append(Finding("gated, closed", "note", ", ".join(names), advice))
    if names := [card.key for card, answer in answers if answer is None]:
        findings.append(Finding("gated, no answer", "note", ", ".join(names), "Try again later."))
    return findings


def _answered(error: Exception) -> int | None:
    """Read the hub's status code from an error, or None where there was no answer.

    Each version of the client has its own errors; an answer is what they have in common.
    """
    status = getattr(getattr(error, "response", None), "status_code", None)
    return status if isinstance(status, int) else None


def _hub_cache() -> Path:
    """Where the hub's client keeps files."""
    from huggingface_hub.constants import HF_HUB_CACHE

    return Path(HF_HUB_CACHE)


def _cached_weights_findings(cards: Iterable[EncoderCard]) -> Iterator[Finding]:
    """Every encoder whose weights are here already, with their digest."""
    from huggingface_hub import try_to_load_from_cache

    from tapfm.runtime.files import file_sha256

    none_found = True
    for card in cards:
        cached = try_to_load_from_cache(card.repository, card.file, revision=card.revision) if card.repository else None
        found = card.package_folder / card.file if card.packaged else Path(cached) if isinstance(cached, str) else None
        if found is None:
            continue
        if not found.is_file():
            advice = f"Install tapfm again: {card.redownload_command}"
            yield Finding(f"weights {card.key}", "broken", f"gone from {found.parent}", advice)
            continue
        none_found = none_found and card.packaged  # what comes with tapfm is no sign of a cache
        digest = file_sha256(found)
        size = f"{found.stat().st_size / _GIB:.2f} GiB" if not card.packaged else "comes with tapfm"
        if card.sha256 is None:
            yield Finding(f"weights {card.key}", "ok", f"{size}, SHA-256 {digest} (no published one to compare)")
        elif digest == card.sha256:
            yield Finding(f"weights {card.key}", "ok", f"{size}, SHA-256 {digest} as published")
        else:
            advice = f"Damaged; fetch it again: {card.redownload_command}"
            yield Finding(f"weights {card.key}", "broken", f"{size}, SHA-256 {digest}, not {card.sha256}", advice)
    if none_found:
        yield Finding("weights", "note", f"none cached in {_hub_cache()}", "tapfm encoders NAME --check fetches them")


def _disk_finding(folder: Path) -> Finding:
    """Room for weights."""
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    if free < _LARGEST_WEIGHTS:
        advice = "The largest encoder needs 5 GiB: free some, or set HF_HOME to a folder on another disk."
        return Finding("disk", "note", f"{free / _GIB:.1f} GiB free at {folder}", advice)
    return Finding("disk", "ok", f"{free / _GIB:.0f} GiB free at {folder}")
