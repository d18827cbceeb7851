"""`tapfm doctor`: check the installation, the GPU, access to encoders, cached weights and disk space."""

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
_REQUIRED_PACKAGES = (
    *("torch", "timm", "safetensors", "huggingface_hub", "typer", "rich", "numpy", "openslide-python", "pydicom"),
    *("tifffile", "imagecodecs", "pillow", "opencv-python-headless", "h5py", "pydantic", "matplotlib", "tensorboard"),
    *("pyarrow", "jinja2", "fastapi", "uvicorn", "scipy", "scikit-learn", "openpyxl"),
)
_NO_GPU_ADVICE = "Use small encoders; adapting a large encoder needs an NVIDIA GPU."
_HUB, _TOKEN = "Hugging Face Hub", "Hugging Face token"
_LARGEST_WEIGHTS = 5 * _GIB  # a ViT-g in float32


@options
class DoctorOptions:
    """Options of `tapfm doctor`."""

    _: KW_ONLY
    offline: Annotated[bool, Option("Do not contact the Hugging Face Hub to check the access to gated encoders.")] = (
        False
    )


@dataclass(frozen=True)
class Finding:
    """Result of one check.

    status: `ok`, `note` (works with limitations: see the advice) or `broken` (required, and does not work).
    """

    subject: str
    status: Status
    found: str
    advice: str = ""


@command_function(DoctorOptions)
def doctor(options: DoctorOptions, console: Console) -> list[Finding]:
    """Check the machine and return the findings in the order of the printed table."""
    from tapfm.encoders.catalog import load_encoder_cards

    findings = [_python_finding(), *_package_findings(), _torch_finding(), _openslide_finding(), _viewer_finding()]
    if importlib.util.find_spec("huggingface_hub") is None:
        return findings  # it is already reported as missing
    with console.status("checking the access to gated encoders"):
        findings += _hub_findings(offline=options.offline)
    with console.status("hashing cached weights (only the first time)"):
        findings += list(_cached_weights_findings(load_encoder_cards().values()))
    findings.append(_disk_finding(_hub_cache()))
    return findings


def _python_finding() -> Finding:
    # pip does not install tapfm for a Python version that is too old
    return Finding("Python", "ok", f"{platform.python_version()} at {sys.executable}")


def _package_findings(requirements: Iterable[str] | None = None) -> Iterator[Finding]:
    """Check the versions of all required packages, and of installed optional ones."""
    import importlib.metadata

    if requirements is None:
        try:
            requirements = importlib.metadata.requires("tapfm") or []
        except importlib.metadata.PackageNotFoundError:
            found = "tapfm is not installed but runs from source: versions are not checked"
            yield Finding("packages", "note", found, "To install it: make setup")
            requirements = _REQUIRED_PACKAGES
    try:
        from packaging.requirements import Requirement
    except ModuleNotFoundError:
        yield Finding("packaging", "broken", "missing; versions cannot be checked", "pip install packaging")
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
    try:
        import torch

        if torch.cuda.is_available():
            free, total = torch.cuda.mem_get_info()
            precision = "bfloat16" if torch.cuda.is_bf16_supported(including_emulation=False) else "float16"
            found = f"{torch.cuda.get_device_name()}, {total / _GIB:.0f} GiB ({free / _GIB:.0f} free), {precision}"
            from tapfm.encoders.precision import can_compile_on_gpu

            if not can_compile_on_gpu(torch.device("cuda")):
                advice = "For faster training: pip install triton, and install a C compiler and python3-dev"
                return Finding("GPU", "note", f"{found}, torch.compile does not work", advice)
            return Finding("GPU", "ok", f"{found}, torch.compile works")
        if torch.backends.mps.is_available():
            return Finding("GPU", "note", "Apple GPU, not supported; tapfm uses the CPU", _NO_GPU_ADVICE)
    except Exception as error:  # a broken installation can raise anything
        return Finding("torch", "broken", f"{type(error).__name__}: {error}", "pip install --force-reinstall torch")
    return Finding("GPU", "note", "none; torch uses the CPU", _NO_GPU_ADVICE)


def _openslide_finding() -> Finding:
    try:
        openslide = importlib.import_module("openslide")
    except ModuleNotFoundError:
        advice = "pip install openslide-python openslide-bin"
        return Finding("OpenSlide", "broken", "not installed; slides cannot be read", advice)
    except Exception as error:  # the Python package is installed, but the C library is not
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        return Finding("OpenSlide", "broken", reason, "pip install openslide-bin")
    return Finding("OpenSlide", "ok", f"library {openslide.__library_version__}, Python {openslide.__version__}")


def _viewer_finding() -> Finding:
    from tapfm.errors import InputError
    from tapfm.viewer.assets import read_assets

    try:
        read_assets()
    except InputError as error:
        return Finding("viewer", "note", error.message, error.hint)
    return Finding("viewer", "ok", "web pages are installed")


def _hub_findings(*, offline: bool) -> list[Finding]:
    """Check the Hugging Face token, and which gated encoders it gives access to."""
    from concurrent.futures import ThreadPoolExecutor

    from huggingface_hub import HfApi, get_token

    from tapfm.encoders.catalog import load_encoder_cards

    gated = [card for card in load_encoder_cards().values() if card.gate != "none"]
    token = get_token()
    if token is None:
        advice = (
            "Run: hf auth login. Then request access on the encoder's page; tapfm encoders NAME prints its address."
        )
        found = f"no token; the {len(gated)} gated encoders cannot be downloaded"
        return [Finding(_TOKEN, "note", found, advice)]
    if offline:
        return [Finding(_TOKEN, "ok", "found; not checked because of --offline")]
    api = HfApi(token=token)
    try:
        user = api.whoami()["name"]
    except Exception as error:
        status = _http_status(error)
        if status is None:
            advice = "Cached and local weights can still be used."
            return [Finding(_TOKEN, "note", f"found; the {_HUB} cannot be reached", advice)]
        if status in (401, 403):
            advice = "Create a new token, then run: hf auth login"
            return [Finding(_TOKEN, "broken", f"rejected by the {_HUB}", advice)]
        return [Finding(_TOKEN, "note", f"found; the {_HUB} returned error {status}", "Try again later.")]

    def has_access(card: EncoderCard) -> bool | None:
        try:
            api.auth_check(card.repository)
        except Exception as error:
            return False if _http_status(error) in (401, 403, 404) else None
        return True

    with ThreadPoolExecutor(8) as pool:
        access = dict(zip((card.key for card in gated), pool.map(has_access, gated), strict=True))
    findings = [Finding(_TOKEN, "ok", f"found, user {user}")]
    if names := [name for name, granted in access.items() if granted is True]:
        findings.append(Finding("gated encoders, access", "ok", ", ".join(names)))
    if names := [name for name, granted in access.items() if granted is False]:
        advice = "Request access on the encoder's page; tapfm encoders NAME prints its address."
        findings.append(Finding("gated encoders, no access", "note", ", ".join(names), advice))
    if names := [name for name, granted in access.items() if granted is None]:
        findings.append(Finding("gated encoders, unknown", "note", ", ".join(names), "Try again later."))
    return findings


def _http_status(error: Exception) -> int | None:
    """Return the HTTP status code of an error, or None if there was no response.

    The error classes differ between versions of huggingface_hub, but all have a `response`.
    """
    status = getattr(getattr(error, "response", None), "status_code", None)
    return status if isinstance(status, int) else None


def _hub_cache() -> Path:
    from huggingface_hub.constants import HF_HUB_CACHE

    return Path(HF_HUB_CACHE)


def _cached_weights_findings(cards: Iterable[EncoderCard]) -> Iterator[Finding]:
    """Yield the SHA-256 check of every encoder whose weights are cached or come with tapfm."""
    from huggingface_hub import try_to_load_from_cache

    from tapfm.runtime.files import file_sha256

    none_found = True
    for card in cards:
        cached = try_to_load_from_cache(card.repository, card.file, revision=card.revision) if card.repository else None
        found = card.package_folder / card.file if card.packaged else Path(cached) if isinstance(cached, str) else None
        if found is None:
            continue
        if not found.is_file():
            advice = f"Reinstall tapfm: {card.redownload_command}"
            yield Finding(f"weights {card.key}", "broken", f"missing in {found.parent}", advice)
            continue
        none_found = none_found and card.packaged
        digest = file_sha256(found)
        size = f"{found.stat().st_size / _GIB:.2f} GiB" if not card.packaged else "part of tapfm"
        if card.sha256 is None:
            yield Finding(
                f"weights {card.key}", "ok", f"{size}, SHA-256 {digest} (there is no published one to compare with)"
            )
        elif digest == card.sha256:
            yield Finding(f"weights {card.key}", "ok", f"{size}, SHA-256 {digest} as published")
        else:
            repair = "Reinstall tapfm" if card.packaged else "Download it again"
            advice = f"The file is damaged. {repair}: {card.redownload_command}"
            found_digest = f"{size}, SHA-256 {digest}, expected {card.sha256}"
            yield Finding(f"weights {card.key}", "broken", found_digest, advice)
    if none_found:
        yield Finding(
            "weights", "note", f"none cached in {_hub_cache()}", "To download some: tapfm encoders NAME --check"
        )


def _disk_finding(folder: Path) -> Finding:
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    if free < _LARGEST_WEIGHTS:
        advice = "The largest encoder needs 5 GiB. Free some space, or set HF_HOME to a folder on another disk."
        return Finding("disk", "note", f"{free / _GIB:.1f} GiB free at {folder}", advice)
    return Finding("disk", "ok", f"{free / _GIB:.0f} GiB free at {folder}")
