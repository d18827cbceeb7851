"""`tapfm doctor`: findings, advice and exit code."""

import importlib.metadata
import io
import json
import subprocess
import sys

import pytest
import torch
from fake_hub import TOKEN, FakeHub
from packaging.requirements import Requirement
from rich.console import Console

from tapfm.cli.doctor import _print_findings as print_findings
from tapfm.encoders.catalog import find_encoder_card
from tapfm.viewer import assets
from tapfm.workflows import doctor


def run_doctor(tmp_path, *arguments, environment=None):
    return subprocess.run(
        [sys.executable, "-c", "from tapfm.cli.main import main; main()", "doctor", *arguments],
        env=environment or FakeHub().environment(tmp_path),
        capture_output=True,
        text=True,
        check=False,
    )


def parse_findings(result):
    return {finding["subject"]: finding for finding in json.loads(result.stdout)}


def test_working_machine_passes_and_every_note_has_advice(tmp_path):
    result = run_doctor(tmp_path, "--json")
    assert result.returncode == 0, result.stdout
    findings = parse_findings(result)
    assert {"Python", "torch", "timm", "GPU", "OpenSlide", "Hugging Face token", "weights", "disk"} <= findings.keys()
    assert all(finding["advice"] for finding in findings.values() if finding["status"] == "note")
    assert findings["torch"]["found"] == torch.__version__.partition("+")[0]
    assert "14 gated encoders" in findings["Hugging Face token"]["found"]
    assert "hf auth login" in findings["Hugging Face token"]["advice"]


def test_damaged_cached_weights_are_broken(tmp_path):
    card = find_encoder_card("phikon")
    snapshot = tmp_path / "hf" / "hub" / "models--owkin--phikon" / "snapshots" / card.revision
    snapshot.mkdir(parents=True)
    (snapshot / card.file).write_bytes(b"not what was published")
    result = run_doctor(tmp_path)
    assert result.returncode == 1
    assert "weights phikon" in result.stdout
    assert "Broken: weights phikon" in result.stdout
    assert "--force-download" in result.stdout
    assert card.sha256 in parse_findings(run_doctor(tmp_path, "--json"))["weights phikon"]["found"]


def test_offline_sends_no_requests(tmp_path):
    with FakeHub().serve() as hub:
        result = run_doctor(tmp_path, "--offline", "--json", environment=hub.environment(tmp_path, HF_TOKEN=TOKEN))
    assert "--offline" in parse_findings(result)["Hugging Face token"]["found"]
    assert hub.requests == []
    assert TOKEN not in result.stdout


@pytest.mark.parametrize(
    ("requirement", "status"),
    [
        ("numpy>=1", "ok"),
        ("numpy>=99", "broken"),
        ("no-such-package>=1", "broken"),
        ("numpy>=99; extra == 'slides'", "note"),
    ],
)
def test_installed_versions_are_compared_with_requirements(requirement, status):
    (finding,) = doctor._package_findings([requirement])
    assert finding.status == status
    assert ("pip install" in finding.advice) == (status != "ok")


def test_missing_optional_package_is_not_reported():
    assert list(doctor._package_findings(["no-such-package>=1; extra == 'slides'"])) == []


def test_openslide_that_cannot_be_loaded_is_broken(monkeypatch):
    def fail(_):
        raise OSError("libopenslide.so.1: cannot open shared object file")

    monkeypatch.setattr(doctor.importlib, "import_module", fail)
    finding = doctor._openslide_finding()
    assert finding.status == "broken"
    assert "pip install openslide-bin" in finding.advice


def test_little_disk_space_is_noted(monkeypatch, tmp_path):
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda _: type("Usage", (), {"free": 2**30}))
    finding = doctor._disk_finding(tmp_path / "not" / "yet" / "there")
    assert finding.status == "note"
    assert "1.0 GiB free" in finding.found


def test_gated_encoders_are_grouped_by_access(tmp_path):
    with FakeHub().serve() as hub:
        findings = parse_findings(run_doctor(tmp_path, "--json", environment=hub.environment(tmp_path, HF_TOKEN=TOKEN)))
    assert "user lab" in findings["Hugging Face token"]["found"]
    assert findings["gated encoders, access"]["found"] == "uni2-h"
    assert findings["gated encoders, unknown"]["found"] == "virchow2"
    assert {"uni", "h-optimus-1", "virchow"} <= set(findings["gated encoders, no access"]["found"].split(", "))
    assert "tapfm encoders" in findings["gated encoders, no access"]["advice"]


def test_unreachable_hub_is_noted(tmp_path):
    with FakeHub().serve() as hub:
        pass  # the server is stopped
    result = run_doctor(tmp_path, "--json", environment=hub.environment(tmp_path, HF_TOKEN=TOKEN))
    assert result.returncode == 0, result.stderr
    assert "cannot be reached" in parse_findings(result)["Hugging Face token"]["found"]


def test_missing_packages_are_reported_without_traceback(tmp_path):
    """Setting a module to None in sys.modules makes its import fail."""
    program = (
        "import sys; sys.modules.update({'packaging.requirements': None}); "
        "import importlib.util as u; find = u.find_spec; "
        "u.find_spec = lambda name, *a: None if name == 'huggingface_hub' else find(name, *a); "
        "from tapfm.cli.main import main; main()"
    )
    result = subprocess.run(
        [sys.executable, "-c", program, "doctor", "--json"],
        env=FakeHub().environment(tmp_path),
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 1, result.stderr
    assert parse_findings(result)["packaging"]["status"] == "broken"


def test_rejected_token_is_broken(tmp_path):
    with FakeHub().serve() as hub:
        result = run_doctor(tmp_path, "--json", environment=hub.environment(tmp_path, HF_TOKEN="hf_bad"))
    assert result.returncode == 1
    assert parse_findings(result)["Hugging Face token"]["status"] == "broken"


def test_findings_are_readable_in_a_narrow_terminal():
    console = Console(width=60, record=True, file=io.StringIO())
    note = doctor.Finding("GPU", "note", "none; torch uses the CPU", "Install one.")
    print_findings([note, doctor.Finding("x", "broken", "y", "z")], console)
    text = console.export_text()
    assert "Broken: x" in text
    assert all(len(line) <= 60 for line in text.splitlines())


def test_missing_viewer_pages_are_noted(monkeypatch, tmp_path):
    (tmp_path / "index.html").write_text("<!doctype html>")
    monkeypatch.setattr(assets.read_assets, "__defaults__", (tmp_path,))
    assert doctor._viewer_finding().status == "ok"
    monkeypatch.setattr(assets.read_assets, "__defaults__", (tmp_path / "none",))
    found = doctor._viewer_finding()
    assert (found.status, "make setup" in found.advice) == ("note", True)


def test_required_packages_match_the_package_metadata():
    requirements = [each for each in importlib.metadata.requires("tapfm") if "extra ==" not in each]
    required = {normalise(Requirement(each).name) for each in requirements}
    assert set(map(normalise, doctor._REQUIRED_PACKAGES)) == required - {"openslide-bin", "packaging"}


def normalise(name):
    return name.lower().replace("_", "-")
