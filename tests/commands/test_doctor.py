"""The doctor: what it finds, what it advises, and when it exits with 1."""

import importlib.metadata
import io
import json
import subprocess
import sys

import pytest
import torch
from hub_stand_in import TOKEN, Hub
from packaging.requirements import Requirement
from rich.console import Console

from tapfm.cli.doctor import _print_findings as print_findings
from tapfm.encoders.catalog import encoder_card
from tapfm.viewer import assets
from tapfm.workflows import doctor


def run_doctor(tmp_path, *arguments, environment=None):
    return subprocess.run(
        [sys.executable, "-c", "from tapfm.cli.main import main; main()", "doctor", *arguments],
        env=environment or Hub().environment(tmp_path),
        capture_output=True,
        text=True,
        check=False,
    )


def findings_of(result):
    return {finding["subject"]: finding for finding in json.loads(result.stdout)}


def test_a_sound_machine_passes_and_every_note_says_what_to_do(tmp_path):
    result = run_doctor(tmp_path, "--json")
    assert result.returncode == 0, result.stdout
    findings = findings_of(result)
    assert {"Python", "torch", "timm", "GPU", "OpenSlide", "hub token", "weights", "disk"} <= findings.keys()
    assert all(finding["advice"] for finding in findings.values() if finding["status"] == "note")
    assert findings["torch"]["found"] == torch.__version__.partition("+")[0]
    assert "14 gated encoders stay closed" in findings["hub token"]["found"]
    assert "hf auth login" in findings["hub token"]["advice"]


def test_damaged_weights_in_the_cache_are_found_and_fail(tmp_path):
    card = encoder_card("phikon")
    snapshot = tmp_path / "hf" / "hub" / "models--owkin--phikon" / "snapshots" / card.revision
    snapshot.mkdir(parents=True)
    (snapshot / card.file).write_bytes(b"not what was published")
    result = run_doctor(tmp_path)
    assert result.returncode == 1
    assert "weights phikon" in result.stdout
    assert "Broken: weights phikon" in result.stdout
    assert "--force-download" in result.stdout
    assert card.sha256 in findings_of(run_doctor(tmp_path, "--json"))["weights phikon"]["found"]


def test_a_token_is_not_sent_anywhere_when_offline(tmp_path):
    with Hub().served() as hub:
        result = run_doctor(tmp_path, "--offline", "--json", environment=hub.environment(tmp_path, HF_TOKEN=TOKEN))
    assert "not asked" in findings_of(result)["hub token"]["found"]
    assert hub.asked == []
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
def test_versions_are_compared_with_what_is_asked_for(requirement, status):
    (finding,) = doctor._package_findings([requirement])
    assert finding.status == status
    assert ("pip install" in finding.advice) == (status != "ok")


def test_a_missing_package_of_an_extra_is_no_finding():
    assert list(doctor._package_findings(["no-such-package>=1; extra == 'slides'"])) == []


def test_an_openslide_that_does_not_load_is_broken(monkeypatch):
    def fail(_):
        raise OSError("libopenslide.so.1: cannot open shared object file")

    monkeypatch.setattr(doctor.importlib, "import_module", fail)
    finding = doctor._openslide_finding()
    assert finding.status == "broken"
    assert "pip install openslide-bin" in finding.advice


def test_little_room_on_the_disk_is_noted(monkeypatch, tmp_path):
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda _: type("Usage", (), {"free": 2**30}))
    finding = doctor._disk_finding(tmp_path / "not" / "yet" / "there")
    assert finding.status == "note"
    assert "1.0 GiB free" in finding.found


def test_gated_encoders_are_sorted_by_what_the_token_opens(tmp_path):
    with Hub().served() as hub:
        findings = findings_of(run_doctor(tmp_path, "--json", environment=hub.environment(tmp_path, HF_TOKEN=TOKEN)))
    assert "user lab" in findings["hub token"]["found"]
    assert findings["gated, open"]["found"] == "uni2-h"
    assert findings["gated, no answer"]["found"] == "virchow2"
    assert {"uni", "h-optimus-1", "virchow"} <= set(findings["gated, closed"]["found"].split(", "))
    assert "Accept the licence" in findings["gated, closed"]["advice"]


def test_a_hub_that_cannot_be_reached_is_a_note(tmp_path):
    with Hub().served() as hub:
        pass  # its port is closed again
    result = run_doctor(tmp_path, "--json", environment=hub.environment(tmp_path, HF_TOKEN=TOKEN))
    assert result.returncode == 0, result.stderr
    assert "cannot be reached" in findings_of(result)["hub token"]["found"]


def test_missing_packages_are_findings_and_not_tracebacks(tmp_path):
    """A module of None in sys.modules is, for Python, one that is not installed."""
    program = (
        "import sys; sys.modules.update({'packaging.requirements': None}); "
        "import importlib.util as u; find = u.find_spec; "
        "u.find_spec = lambda name, *a: None if name == 'huggingface_hub' else find(name, *a); "
        "from tapfm.cli.main import main; main()"
    )
    result = subprocess.run(
        [sys.executable, "-c", program, "doctor", "--json"],
        env=Hub().environment(tmp_path),
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 1, result.stderr
    assert findings_of(result)["packaging"]["status"] == "broken"


def test_a_token_that_the_hub_refuses_is_broken(tmp_path):
    with Hub().served() as hub:
        result = run_doctor(tmp_path, "--json", environment=hub.environment(tmp_path, HF_TOKEN="hf_bad"))
    assert result.returncode == 1
    assert findings_of(result)["hub token"]["status"] == "broken"


def test_the_report_is_readable_on_a_narrow_terminal():
    console = Console(width=60, record=True, file=io.StringIO())
    note = doctor.Finding("GPU", "note", "none: torch uses the CPU", "Get one.")
    print_findings([note, doctor.Finding("x", "broken", "y", "z")], console)
    text = console.export_text()
    assert "Broken: x" in text
    assert all(len(line) <= 60 for line in text.splitlines())


def test_pages_of_the_viewer_that_are_not_built_are_told(monkeypatch, tmp_path):
    (tmp_path / "index.html").write_text("<!doctype html>")
    monkeypatch.setattr(assets.read_assets, "__defaults__", (tmp_path,))
    assert doctor._viewer_finding().status == "ok"
    monkeypatch.setattr(assets.read_assets, "__defaults__", (tmp_path / "none",))
    found = doctor._viewer_finding()
    assert (found.status, "make setup" in found.advice) == ("note", True)


def test_what_is_looked_for_without_an_installed_package_is_what_the_package_asks_for():
    asked = {plain(Requirement(each).name) for each in importlib.metadata.requires("tapfm") if "extra ==" not in each}
    assert set(map(plain, doctor._RUNS_WITH)) == asked - {"openslide-bin", "packaging"}


def plain(name):
    return name.lower().replace("_", "-")
