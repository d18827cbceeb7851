"""`tapfm embed`: features of the encoder, interruption and resume, and failures."""

import os
import shutil
import signal
import subprocess
import sys
import threading
from dataclasses import replace
from types import SimpleNamespace

import h5py
import numpy as np
import pytest
import torch
from cohort_files import read_rows
from command_line import start_tapfm, wait_for
from rich.console import Console
from slide_files import copy_slide, damage, section, write_slide

from tapfm.cli.main import main
from tapfm.cohort.cohort_table import SlideRow, read_cohort
from tapfm.encoders.features import FEATURES_VERSION, read_features
from tapfm.encoders.weights import load_encoder
from tapfm.errors import InputError
from tapfm.inference.cohort_embedding import embed_cohort
from tapfm.inference.embedding_jobs import EmbeddingSettings, make_job
from tapfm.runtime.cohort_job import RESUME_HINT
from tapfm.runtime.devices import choose_autocast_dtype, choose_device
from tapfm.runtime.output_folder import lock_folder
from tapfm.slides.opening import open_slide
from tapfm.tiles.store import TileSet, tile_file_path, write_tiles

POCKET = ("--encoder", "tapfm-pocket", "--device", "cpu")
TILES_PER_SIDE = 5  # of a slide


@pytest.fixture(scope="module")
def pocket():
    loaded = load_encoder("tapfm-pocket")
    loaded.encoder.eval()
    return loaded


@pytest.fixture(autouse=True)
def restore_signal_handlers():
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def tapfm(monkeypatch, capsys):
    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["tapfm", *map(str, arguments)])
        with pytest.raises(SystemExit) as exited:
            main()
        captured = capsys.readouterr()
        return SimpleNamespace(returncode=exited.value.code or 0, stdout=captured.out, stderr=captured.err)

    return run


def make_tile_set(slide_id, columns=TILES_PER_SIDE, tile_px=224, fingerprint="of the tiles"):
    positions = np.array([[224 * x, 224 * y] for y in range(columns) for x in range(columns)])
    side_px = 224 * columns
    return TileSet(
        slide_id, positions, 224, tile_px, 0.5, 0.5, 0, (side_px, side_px), fingerprint=fingerprint, summary={}
    )


@pytest.fixture(scope="module")
def slides_folder(tmp_path_factory):
    """Write slides whose TIFF blocks are the tiles, so that damaging a block damages one tile."""
    folder, side_px = tmp_path_factory.mktemp("slides"), 224 * TILES_PER_SIDE
    for i in range(3):
        pixels = section(side_px, side_px, seed=i, tissue=(0, 0, 1, 1))
        write_slide(folder / f"s{i}.svs", pixels, tile_px=224, downsamples=(1,))
    return folder


@pytest.fixture
def make_cohort(tmp_path, slides_folder):
    def make(count=3):
        """Write a cohort table, which repeats the three slides if needed, and tiles; return the paths."""
        shutil.copytree(slides_folder, tmp_path, dirs_exist_ok=True)
        for i in range(3, count):
            copy_slide(tmp_path / f"s{i % 3}.svs", tmp_path / f"s{i}.svs")
        lines = ["slide_id,path", *(f"case-{i},s{i}.svs" for i in range(count))]
        (tmp_path / "cohort.csv").write_text("\n".join(lines) + "\n")
        for i in range(count):
            write_tiles(tmp_path / "tiles", make_tile_set(f"case-{i}"), "trident")
        return tmp_path / "cohort.csv", tmp_path / "tiles", tmp_path / "features"

    return make


def feature_files(out):
    return {path.name: path.read_bytes() for path in sorted(out.glob("*.h5"))}


def modification_times(out):
    return {path.name: path.stat().st_mtime_ns for path in out.glob("*.h5")}


def test_features_and_attention_are_those_of_the_encoder(tmp_path, make_cohort, tapfm, pocket):
    cohort, tiles, out = make_cohort()
    result = tapfm("embed", cohort, *POCKET, "--tiles", tiles, "--out", out, "--workers", 0, "--batch", 10)
    assert result.returncode == 0, result.stderr
    for text in ("3 of 3 slides", "75 tiles", "feature size 128", "tapfm-pocket", "float32"):
        assert text in result.stdout
    fixed = f"--set adaptation.method=fixed --set tiles.features={out}"
    assert f"Next: tapfm train RUN.toml --out runs/fixed {fixed}" in result.stdout
    assert "are rescaled" not in result.stderr
    slide = open_slide(tmp_path / "s1.svs")
    pixels = np.stack([slide.read(x, y, 224, 224) for x, y in make_tile_set("case-1").positions.tolist()])
    with torch.no_grad():
        expected = pocket.encoder(torch.from_numpy(pixels.transpose(0, 3, 1, 2).copy()))
    stored = read_features(out / "case-1.h5")
    np.testing.assert_allclose(stored.features, expected.z_KD.numpy(), rtol=0, atol=1e-5)
    np.testing.assert_allclose(stored.attention, expected.r_K.numpy(), rtol=1e-5, atol=0)
    np.testing.assert_array_equal(stored.positions, make_tile_set("case-1").positions)
    assert (stored.slide_id, stored.encoder, stored.origin) == ("case-1", "tapfm-pocket", "tapfm")
    with h5py.File(out / "case-1.h5") as file:
        assert file["features"].attrs["weights_sha256"] == pocket.provenance.sha256
        assert file["features"].attrs["precision"] == "float32"
    rows = read_rows(out / "summary.csv")
    assert [(row["slide_id"], row["status"], row["tiles"], row["tiles_failed"]) for row in rows] == [
        (f"case-{i}", "ok", "25", "0") for i in range(3)
    ]
    assert all(float(row["seconds"]) >= 0 for row in rows)
    assert read_rows(out / "failures.csv") == []


@pytest.mark.parametrize("workers", [0, 1])
def test_padded_tiles_are_white_outside_the_slide_and_marked(tmp_path, make_cohort, tapfm, pocket, workers):
    cohort, tiles, out = make_cohort(1)
    positions = np.array([[0, 0], [1000, 0], [1000, 1024]])  # the slide has 1120 x 1120 pixels
    tile_set = replace(make_tile_set("case-0"), positions=positions, padded=np.array([False, True, True]))
    write_tiles(tiles, tile_set, "trident")
    result = tapfm("embed", cohort, *POCKET, "--tiles", tiles, "--out", out, "--workers", workers)
    assert result.returncode == 0, result.stderr
    slide = open_slide(tmp_path / "s0.svs").read_level(0, 0, 0, 1120, 1120)
    pixels = np.full((3, 224, 224, 3), 255, np.uint8)
    pixels[0] = slide[:224, :224]
    pixels[1, :, :120] = slide[:224, 1000:]
    pixels[2, :96, :120] = slide[1024:, 1000:]
    with torch.no_grad():
        expected = pocket.encoder(torch.from_numpy(pixels.transpose(0, 3, 1, 2).copy()))
    stored = read_features(out / "case-0.h5")
    np.testing.assert_allclose(stored.features, expected.z_KD.numpy(), rtol=0, atol=1e-5)
    np.testing.assert_array_equal(stored.positions, positions)
    with h5py.File(out / "case-0.h5") as file:
        assert np.asarray(file["padded"]).tolist() == [False, True, True]


def test_number_of_workers_does_not_change_the_files(tmp_path, make_cohort, tapfm):
    cohort, tiles, _ = make_cohort()
    written = []
    for workers in (0, 1, 2):
        out = tmp_path / f"w{workers}"
        assert tapfm("embed", cohort, *POCKET, "--tiles", tiles, "--out", out, "--workers", workers).returncode == 0
        written.append(feature_files(out))
    assert len(written[0]) == 3
    assert written[0] == written[1] == written[2]


def test_only_slides_with_changed_settings_or_tiles_are_embedded_again(make_cohort, tapfm):
    cohort, tiles, out = make_cohort()
    command = ("embed", cohort, *POCKET, "--tiles", tiles, "--out", out, "--workers", 0)
    tapfm(*command)
    first, summary = modification_times(out), (out / "summary.csv").read_text()
    again = tapfm(*command, "--batch", 3)
    assert "3 of 3 slides are already embedded with these settings." in again.stderr
    assert "3 of 3 slides " in again.stdout
    assert "75 tiles" in again.stdout
    assert (modification_times(out), (out / "summary.csv").read_text()) == (first, summary)
    write_tiles(tiles, make_tile_set("case-1", columns=4), "trident")
    changed = tapfm(*command)
    assert "2 of 3 slides are already embedded" in changed.stderr
    assert {name for name, time in modification_times(out).items() if time != first[name]} == {"case-1.h5"}
    assert len(read_features(out / "case-1.h5")) == 16
    coarse = tapfm(*command, "--precision", "bfloat16", "--only", "case-0")
    assert "already" not in coarse.stderr
    for text in ("1 of 3 slides", "25 tiles", "bfloat16"):
        assert text in coarse.stdout
    assert [row["status"] for row in read_rows(out / "summary.csv")] == ["ok", "not embedded", "not embedded"]
    before = modification_times(out)
    tapfm(*command, "--precision", "bfloat16", "--only", "case-0", "--force")
    assert {name for name, time in modification_times(out).items() if time != before[name]} == {"case-0.h5"}
    (out / "case-0.h5").write_bytes(b"truncated")
    tapfm(*command)
    assert len(read_features(out / "case-0.h5")) == 25


def test_failed_slide_keeps_valid_features_and_removes_outdated_ones(make_cohort, tapfm, monkeypatch):
    cohort, tiles, out = make_cohort()
    command = ("embed", cohort, *POCKET, "--tiles", tiles, "--out", out, "--workers", 0)
    tapfm(*command)
    first = modification_times(out)

    def raise_error(*_, **__):
        raise RuntimeError("a defect")

    monkeypatch.setattr("tapfm.inference.cohort_embedding.write_features", raise_error)
    assert tapfm(*command, "--force").returncode == 3
    assert modification_times(out) == first
    assert tapfm(*command, "--precision", "bfloat16").returncode == 3
    assert modification_times(out) == {}


def test_key_depends_on_everything_that_features_depend_on(tmp_path, make_cohort, pocket):
    _, tiles, out = make_cohort(1)
    row = SlideRow("case-0", tmp_path / "s0.svs", "P")

    def compute_key(settings=None):
        return make_job(row, tiles, out, settings or EmbeddingSettings(pocket), "").key

    def key_with(**changes):
        return compute_key(EmbeddingSettings(pocket._replace(**changes)))

    keys = [
        compute_key(),
        compute_key(EmbeddingSettings(pocket, "bfloat16")),
        compute_key(EmbeddingSettings(pocket, "float8")),
        key_with(provenance=replace(pocket.provenance, sha256="other")),
        key_with(card=replace(pocket.card, key="other")),
        key_with(card=replace(pocket.card, mean=(0.5, 0.5, 0.5))),
        key_with(encoder=load_encoder(pocket.card, feature="cls+mean").encoder),
    ]
    write_tiles(tiles, make_tile_set("case-0", fingerprint="other"), "trident")
    assert compute_key() == keys[0]  # the same tiles, written by another version of tapfm
    write_tiles(tiles, replace(make_tile_set("case-0"), positions=make_tile_set("case-0").positions[1:]), "trident")
    keys.append(compute_key())
    write_tiles(tiles, replace(make_tile_set("case-0"), side_px0=200), "trident")
    keys.append(compute_key())
    os.utime(row.path, ns=(1, 1))
    keys.append(compute_key())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tapfm.inference.embedding_jobs.FEATURES_VERSION", FEATURES_VERSION + 1)
        keys.append(compute_key())
    assert len(set(keys)) == len(keys)
    keys.pop()
    assert (
        compute_key(EmbeddingSettings(pocket, batch=1)) == key_with(card=replace(pocket.card, notes="more")) == keys[-1]
    )


def test_damaged_slide_does_not_affect_other_slides(tmp_path, make_cohort, tapfm):
    cohort, tiles, out = make_cohort()
    command = ("embed", cohort, *POCKET, "--tiles", tiles, "--out", out, "--workers", 1)
    tapfm(*command)
    complete = feature_files(out)
    (tmp_path / "s1.svs").write_bytes(b"nothing")
    result = tapfm(*command)
    assert result.returncode == 3
    assert "2 of 3 slides " in result.stdout
    assert "50 tiles" in result.stdout
    assert "1 slide failed" in result.stdout
    assert str(out / "failures.csv") in result.stdout
    assert "failed case-1: none of 25 tiles can be read" in result.stderr
    (row,) = read_rows(out / "failures.csv")
    assert "s1.svs is not in a slide format" in row["reason"]
    assert f"tapfm inspect {tmp_path / 's1.svs'}" in row["hint"]
    assert feature_files(out) == {name: data for name, data in complete.items() if name != "case-1.h5"}
    others = tapfm(*command, "--only", "case-0")
    assert others.returncode == 0
    assert [row["status"] for row in read_rows(out / "summary.csv")] == ["ok", "failed", "ok"]
    assert tapfm(*command, "--allow-failures", 1).returncode == 0


def test_up_to_five_percent_of_tiles_may_be_unreadable(tmp_path, make_cohort, tapfm):
    cohort, tiles, out = make_cohort(2)
    command = ("embed", cohort, *POCKET, "--tiles", tiles, "--out", out, "--workers", 0)
    tapfm(*command)
    complete = read_features(out / "case-0.h5")
    damage(tmp_path / "s0.svs", [7])
    damage(tmp_path / "s1.svs", [7, 8])
    result = tapfm(*command)
    assert result.returncode == 3
    assert "1 tile of 1 slide could not be read" in result.stdout
    stored, rest = read_features(out / "case-0.h5"), np.arange(25) != 7
    np.testing.assert_array_equal(stored.positions, complete.positions[rest])
    np.testing.assert_allclose(stored.features, complete.features[rest], rtol=0, atol=1e-5)
    np.testing.assert_allclose(stored.attention, complete.attention[rest], rtol=1e-5, atol=0)
    first, second = read_rows(out / "summary.csv")
    assert (first["status"], first["tiles"], first["tiles_failed"]) == ("ok", "24", "1")
    assert "2 of its 25 tiles cannot be read" in second["reason"]
    assert not (out / "case-1.h5").exists()
    again = tapfm(*command)
    assert "1 of 2 slides are already embedded" in again.stderr
    assert read_rows(out / "summary.csv")[0]["tiles_failed"] == "1"


def test_features_of_a_slide_read_in_parts_match_their_positions(tmp_path, make_cohort, tapfm):
    cohort, tiles, out = make_cohort(1)
    positions = np.tile(make_tile_set("case-0").positions, (12, 1))  # 300 tiles: more than one part
    write_tiles(tiles, replace(make_tile_set("case-0"), positions=positions), "trident")
    damage(tmp_path / "s0.svs", [24])
    result = tapfm("embed", cohort, *POCKET, "--tiles", tiles, "--out", out, "--workers", 0)
    assert result.returncode == 0, result.stderr
    stored = read_features(out / "case-0.h5")
    np.testing.assert_array_equal(stored.positions, positions[np.arange(300) % 25 != 24])
    np.testing.assert_allclose(stored.features, np.tile(stored.features[:24], (12, 1)), rtol=0, atol=1e-5)


def test_failures_without_tiles_name_the_tile_command(make_cohort, tapfm):
    cohort, tiles, out = make_cohort(4)
    tile_file_path(tiles, "case-0", "trident").unlink()
    tile_file_path(tiles, "case-1", "trident").write_bytes(b"truncated")
    write_tiles(tiles, replace(make_tile_set("case-2"), positions=np.empty((0, 2), np.int64)), "trident")
    result = tapfm("embed", cohort, *POCKET, "--tiles", tiles, "--out", out, "--workers", 0)
    assert result.returncode == 3
    assert "1 of 4 slides " in result.stdout
    assert "25 tiles" in result.stdout
    failures = read_rows(out / "failures.csv")
    for row, reason in zip(failures, ("no tile file", "cannot be read as HDF5", "contains no tiles"), strict=True):
        assert reason in row["reason"]
        assert row["hint"] == f"tapfm tile {cohort} --out {tiles} --only {row['slide_id']}"
    assert failures[0]["hint"] in result.stdout


def test_rescaling_of_tiles_is_reported_once(make_cohort, tapfm):
    cohort, tiles, out = make_cohort(2)
    for i in range(2):
        write_tiles(tiles, make_tile_set(f"case-{i}", columns=2, tile_px=256), "clam")
        tile_file_path(tiles, f"case-{i}", "trident").unlink()
    result = tapfm("embed", cohort, *POCKET, "--tiles", tiles, "--out", out, "--workers", 0)
    assert result.stderr.count("Tiles of 256 px are rescaled to 224 px for the encoder, at 0.571 um per pixel.") == 1
    assert read_features(out / "case-0.h5").features.shape == (4, 128)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_command_can_be_resumed(make_cohort, tapfm, number):
    cohort, tiles, out = make_cohort(10)
    command = ("embed", cohort, *POCKET, "--tiles", tiles, "--out", out, "--workers", 1)
    finished = threading.Event()

    def send_signal():
        while not finished.wait(0.005):
            if len(modification_times(out)) >= 2:
                os.kill(os.getpid(), number)
                return

    thread = threading.Thread(target=send_signal)
    thread.start()
    stopped = tapfm(*command)
    finished.set()
    thread.join()
    assert stopped.returncode == 128 + number, stopped.stderr
    assert "Stopped. " + RESUME_HINT in stopped.stderr
    assert check_resume(tapfm, command, out)


def test_killed_command_leaves_complete_files_and_can_be_resumed(make_cohort, tapfm):
    cohort, tiles, out = make_cohort(10)
    command = ("embed", cohort, *POCKET, "--tiles", tiles, "--out", out, "--workers", 1)
    process = start_tapfm(*command)
    wait_for(lambda: len(modification_times(out)) >= 2, process)
    process.kill()
    process.communicate()
    (out / ".case-9.h5.abc.unfinished").write_bytes(b"truncated")
    assert check_resume(tapfm, command, out)


def check_resume(tapfm, command, out):
    done = modification_times(out)
    assert 2 <= len(done) < 10
    for name in done:
        assert len(read_features(out / name)) == 25
    result = tapfm(*command)
    assert f"{len(done)} of 10 slides are already embedded" in result.stderr
    assert "10 of 10 slides " in result.stdout
    assert "250 tiles" in result.stdout
    assert not list(out.rglob("*.unfinished"))
    return done.items() <= modification_times(out).items()


def test_features_of_another_tool_are_not_overwritten(make_cohort, tapfm):
    cohort, tiles, out = make_cohort()
    out.mkdir()
    with h5py.File(out / "case-1.h5", "w") as file:
        file["features"] = np.zeros((3, 8), np.float32)
    before = feature_files(out)
    result = tapfm("embed", cohort, *POCKET, "--tiles", tiles, "--out", out)
    assert result.returncode == 2
    assert "would overwrite 1 file" in result.stderr
    assert "case-1.h5" in result.stderr
    assert feature_files(out) == before


def test_two_commands_in_one_folder_are_an_error(make_cohort, tapfm):
    cohort, tiles, out = make_cohort(1)
    with lock_folder(out, "tapfm embed"):
        second = tapfm("embed", cohort, *POCKET, "--tiles", tiles, "--out", out)
    assert second.returncode == 2
    assert "Another tapfm command is running" in second.stderr


def test_unwritable_feature_file_is_an_error(make_cohort, pocket):
    cohort, tiles, out = make_cohort(1)
    (out / "case-0.h5").mkdir(parents=True)  # a folder in place of the file
    with pytest.raises(InputError, match="cannot be written"):
        embed_cohort(
            read_cohort(cohort).rows,
            tiles,
            out,
            EmbeddingSettings(pocket),
            tile_command="",
            only=None,
            workers=0,
            force=False,
            console=Console(quiet=True),
        )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--encoder", "tapfm-poket"], "Did you mean: tapfm-pocket"),
        (["--tiles", "absent"], "tapfm tile "),
        (["--only", "case-9"], "ids: case-0"),
        (["--precision", "half"], "auto, float32, bfloat16"),
        (["--precision", "float8", "--device", "cpu"], "does not support float8"),
        (["--device", "tpu"], "'tpu' is not a device"),
        (["--device", "cuda:99"], "Available devices: cpu"),
        (["--weights", "absent.bin"], "no file or folder absent.bin"),
        (["--workers", "-1"], "must be at least"),
        (["--batch", "0"], "must be at least"),
    ],
)
def test_invalid_options_are_an_error_and_nothing_is_written(make_cohort, tapfm, arguments, message):
    cohort, tiles, out = make_cohort(1)
    result = tapfm("embed", cohort, *POCKET, "--tiles", tiles, "--out", out, *arguments)
    assert result.returncode == 2, result.stderr
    assert message in result.stderr
    assert not out.exists()


def test_tiles_folder_as_output_is_an_error(make_cohort, tapfm):
    cohort, tiles, _ = make_cohort(1)
    (tiles / "summary.csv").write_text("of the tiles")
    result = tapfm("embed", cohort, *POCKET, "--tiles", tiles, "--out", tiles)
    assert result.returncode == 2
    assert "--out and --tiles are the same folder" in result.stderr
    assert (tiles / "summary.csv").read_text() == "of the tiles"


def test_help_and_option_errors_do_not_import_torch(make_cohort):
    cohort, tiles, out = make_cohort(1)
    program = """
import sys
from tapfm.cli.main import main
for arguments in {every!r}:
    sys.argv = ["tapfm", "embed", *arguments]
    try:
        main()
    except SystemExit as exited:
        print("exit code", exited.code)
print("torch" in sys.modules)
"""
    options = ["--encoder", "tapfm-pocket", "--out", str(out)]
    every = [
        ["--help"],
        ["absent.csv", *options],
        [str(cohort), *options, "--tiles", "absent"],
        [str(cohort), *options, "--tiles", str(tiles), "--encoder", "absent"],
        [str(cohort), *options, "--tiles", str(tiles), "--device", "absent"],
    ]
    result = subprocess.run(
        [sys.executable, "-c", program.format(every=every)], capture_output=True, text=True, check=True
    )
    assert result.stdout.count("exit code 2") == 4, result.stderr
    assert "exit code 0" in result.stdout
    assert result.stdout.splitlines()[-1] == "False"


def test_default_device_is_a_gpu_if_available():
    assert choose_device("auto").type == ("cuda" if torch.cuda.is_available() else "cpu")
    assert choose_device("cpu") == torch.device("cpu")


def test_default_precision_on_a_cpu_is_float32():
    cpu = torch.device("cpu")
    assert choose_autocast_dtype("auto", cpu) is None
    assert choose_autocast_dtype("float32", cpu) is None
    assert choose_autocast_dtype("bfloat16", cpu) is torch.bfloat16
