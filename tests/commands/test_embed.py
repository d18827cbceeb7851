"""`tapfm embed` as a user types it: the encoder's own numbers, whole files however it ends, and honest failures."""

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
from cohort_files import rows_of
from command_line import start, wait_for
from rich.console import Console
from slide_files import damage, section, write_slide

from tapfm.cli.main import main
from tapfm.cohort.cohort_table import SlideRow, read_cohort
from tapfm.encoders.features import FEATURES_VERSION, read_features
from tapfm.encoders.weights import load_encoder
from tapfm.errors import InputError
from tapfm.inference.cohort_embedding import embed_cohort
from tapfm.inference.embedding_jobs import EmbeddingSettings, make_job
from tapfm.runtime.cohort_job import RESUME_HINT
from tapfm.runtime.devices import choose_device, choose_precision
from tapfm.runtime.output_folder import lock_folder
from tapfm.slides.opening import open_slide
from tapfm.tiles.store import TileSet, tile_file_path, write_tiles

POCKET = ("--encoder", "tapfm-pocket", "--device", "cpu")
COLUMNS = 5  # tiles across a slide, and down


@pytest.fixture(scope="module")
def pocket():
    loaded = load_encoder("tapfm-pocket")
    loaded.encoder.eval()
    return loaded


@pytest.fixture(autouse=True)
def signals():
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def tapfm(monkeypatch, capsys):
    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["tapfm", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            main()
        said = capsys.readouterr()
        return SimpleNamespace(returncode=ended.value.code or 0, stdout=said.out, stderr=said.err)

    return run


def grid(slide_id, columns=COLUMNS, tile_px=224, fingerprint="of the tiles"):
    positions = np.array([[224 * x, 224 * y] for y in range(columns) for x in range(columns)])
    side_px = 224 * columns
    return TileSet(
        slide_id, positions, 224, tile_px, 0.5, 0.5, 0, (side_px, side_px), fingerprint=fingerprint, summary={}
    )


@pytest.fixture(scope="module")
def painted(tmp_path_factory):
    """Write slides whose blocks are the tiles."""
    folder, side_px = tmp_path_factory.mktemp("painted"), 224 * COLUMNS
    for i in range(3):
        pixels = section(side_px, side_px, seed=i, tissue=(0, 0, 1, 1))
        write_slide(folder / f"s{i}.svs", pixels, tile_px=224, downsamples=(1,))
    return folder


@pytest.fixture
def lab(tmp_path, painted):
    def make(count=3):
        """Make a table of the slides, in turn where it has more, and their tiles."""
        shutil.copytree(painted, tmp_path, dirs_exist_ok=True)
        lines = ["slide_id,path", *(f"case-{i},s{i % 3}.svs" for i in range(count))]
        (tmp_path / "cohort.csv").write_text("\n".join(lines) + "\n")
        for i in range(count):
            write_tiles(tmp_path / "tiles", grid(f"case-{i}"), "trident")
        return tmp_path / "cohort.csv", tmp_path / "tiles", tmp_path / "features"

    return make


def feature_files(out):
    return {path.name: path.read_bytes() for path in sorted(out.glob("*.h5"))}


def times(out):
    return {path.name: path.stat().st_mtime_ns for path in out.glob("*.h5")}


def test_features_and_attention_are_the_encoders_own(tmp_path, lab, tapfm, pocket):
    cohort, tiles, out = lab()
    result = tapfm("embed", cohort, *POCKET, "--tiles", tiles, "--out", out, "--workers", 0, "--batch", 10)
    assert result.returncode == 0, result.stderr
    assert "Embedded 3 of 3 slides: 75 tiles of 128 features, by tapfm-pocket in float32." in result.stdout
    fixed = f"--set adaptation.method=fixed --set tiles.features={out}"
    assert f"Next: tapfm train RUN.toml --out runs/fixed {fixed}" in result.stdout
    assert "are read as" not in result.stderr
    slide = open_slide(tmp_path / "s1.svs")
    pixels = np.stack([slide.read(x, y, 224, 224) for x, y in grid("case-1").positions.tolist()])
    with torch.no_grad():
        expected = pocket.encoder(torch.from_numpy(pixels.transpose(0, 3, 1, 2).copy()))
    stored = read_features(out / "case-1.h5")
    np.testing.assert_allclose(stored.features, expected.z_KD.numpy(), rtol=0, atol=1e-5)
    np.testing.assert_allclose(stored.attention, expected.r_K.numpy(), rtol=1e-5, atol=0)
    np.testing.assert_array_equal(stored.positions, grid("case-1").positions)
    assert (stored.slide_id, stored.encoder, stored.origin) == ("case-1", "tapfm-pocket", "tapfm")
    with h5py.File(out / "case-1.h5") as file:
        assert file["features"].attrs["weights_sha256"] == pocket.provenance.sha256
        assert file["features"].attrs["precision"] == "float32"
    rows = rows_of(out / "summary.csv")
    assert [(row["slide_id"], row["status"], row["tiles"], row["tiles_failed"]) for row in rows] == [
        (f"case-{i}", "ok", "25", "0") for i in range(3)
    ]
    assert all(float(row["seconds"]) >= 0 for row in rows)
    assert rows_of(out / "failures.csv") == []


def test_any_number_of_workers_makes_the_same_files(tmp_path, lab, tapfm):
    cohort, tiles, _ = lab()
    made = []
    for workers in (0, 1, 2):
        out = tmp_path / f"w{workers}"
        assert tapfm("embed", cohort, *POCKET, "--tiles", tiles, "--out", out, "--workers", workers).returncode == 0
        made.append(feature_files(out))
    assert len(made[0]) == 3
    assert made[0] == made[1] == made[2]


def test_what_was_made_with_the_same_settings_is_kept_and_nothing_else(lab, tapfm):
    cohort, tiles, out = lab()
    command = ("embed", cohort, *POCKET, "--tiles", tiles, "--out", out, "--workers", 0)
    tapfm(*command)
    first, summary = times(out), (out / "summary.csv").read_text()
    again = tapfm(*command, "--batch", 3)
    assert "3 of 3 slides are already embedded with these settings." in again.stderr
    assert "Embedded 3 of 3 slides: 75 tiles" in again.stdout
    assert (times(out), (out / "summary.csv").read_text()) == (first, summary)
    write_tiles(tiles, grid("case-1", columns=4), "trident")
    one = tapfm(*command)
    assert "2 of 3 slides are already embedded" in one.stderr
    assert {name for name, time in times(out).items() if time != first[name]} == {"case-1.h5"}
    assert len(read_features(out / "case-1.h5")) == 16
    coarse = tapfm(*command, "--precision", "bfloat16", "--only", "case-0")
    assert "already" not in coarse.stderr
    assert "Embedded 1 of 3 slides: 25 tiles of 128 features, by tapfm-pocket in bfloat16" in coarse.stdout
    assert [row["status"] for row in rows_of(out / "summary.csv")] == ["ok", "not embedded", "not embedded"]
    before = times(out)
    tapfm(*command, "--precision", "bfloat16", "--only", "case-0", "--force")
    assert {name for name, time in times(out).items() if time != before[name]} == {"case-0.h5"}
    (out / "case-0.h5").write_bytes(b"half")
    tapfm(*command)
    assert len(read_features(out / "case-0.h5")) == 25


def test_a_failure_removes_features_of_other_settings_and_keeps_those_that_are_valid(lab, tapfm, monkeypatch):
    cohort, tiles, out = lab()
    command = ("embed", cohort, *POCKET, "--tiles", tiles, "--out", out, "--workers", 0)
    tapfm(*command)
    first = times(out)

    def defect(*_, **__):
        raise RuntimeError("a defect")

    monkeypatch.setattr("tapfm.inference.cohort_embedding.write_features", defect)
    assert tapfm(*command, "--force").returncode == 3
    assert times(out) == first
    assert tapfm(*command, "--precision", "bfloat16").returncode == 3
    assert times(out) == {}


def test_everything_that_decides_features_is_in_the_key(tmp_path, lab, pocket):
    _, tiles, out = lab(1)
    row = SlideRow("case-0", tmp_path / "s0.svs", "P")

    def key(settings=None):
        return make_job(row, tiles, out, settings or EmbeddingSettings(pocket), "").key

    def changed(**changes):
        return key(EmbeddingSettings(pocket._replace(**changes)))

    keys = [
        key(),
        key(EmbeddingSettings(pocket, "bfloat16")),
        key(EmbeddingSettings(pocket, "float8")),
        changed(provenance=replace(pocket.provenance, sha256="other")),
        changed(card=replace(pocket.card, key="other")),
        changed(card=replace(pocket.card, mean=(0.5, 0.5, 0.5))),
        changed(encoder=load_encoder(pocket.card, feature="cls+mean").encoder),
    ]
    write_tiles(tiles, grid("case-0", fingerprint="other"), "trident")
    assert key() == keys[0]  # the same tiles, from another version of the code
    write_tiles(tiles, replace(grid("case-0"), positions=grid("case-0").positions[1:]), "trident")
    keys.append(key())
    write_tiles(tiles, replace(grid("case-0"), side_px0=200), "trident")
    keys.append(key())
    os.utime(row.path, ns=(1, 1))
    keys.append(key())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tapfm.inference.embedding_jobs.FEATURES_VERSION", FEATURES_VERSION + 1)
        keys.append(key())
    assert len(set(keys)) == len(keys)
    keys.pop()
    assert key(EmbeddingSettings(pocket, batch=1)) == changed(card=replace(pocket.card, notes="more")) == keys[-1]


def test_a_damaged_slide_in_the_middle_costs_only_itself(tmp_path, lab, tapfm):
    cohort, tiles, out = lab()
    command = ("embed", cohort, *POCKET, "--tiles", tiles, "--out", out, "--workers", 1)
    tapfm(*command)
    whole = feature_files(out)
    (tmp_path / "s1.svs").write_bytes(b"nothing")
    result = tapfm(*command)
    assert result.returncode == 3
    assert "Embedded 2 of 3 slides: 50 tiles" in result.stdout
    assert f"1 failed: {out / 'failures.csv'}" in result.stdout
    assert "failed case-1: none of 25 tiles can be read" in result.stderr
    (row,) = rows_of(out / "failures.csv")
    assert "s1.svs is not a slide" in row["reason"]
    assert f"tapfm inspect {tmp_path / 's1.svs'}" in row["hint"]
    assert feature_files(out) == {name: data for name, data in whole.items() if name != "case-1.h5"}
    others = tapfm(*command, "--only", "case-0")
    assert others.returncode == 0
    assert [row["status"] for row in rows_of(out / "summary.csv")] == ["ok", "failed", "ok"]
    assert tapfm(*command, "--allow-failures", 1).returncode == 0


def test_up_to_five_percent_of_the_tiles_may_be_unreadable(tmp_path, lab, tapfm):
    cohort, tiles, out = lab(2)
    command = ("embed", cohort, *POCKET, "--tiles", tiles, "--out", out, "--workers", 0)
    tapfm(*command)
    whole = read_features(out / "case-0.h5")
    damage(tmp_path / "s0.svs", [7])
    damage(tmp_path / "s1.svs", [7, 8])
    result = tapfm(*command)
    assert result.returncode == 3
    assert "1 tiles on 1 slides could not be read" in result.stdout
    stored, rest = read_features(out / "case-0.h5"), np.arange(25) != 7
    np.testing.assert_array_equal(stored.positions, whole.positions[rest])
    np.testing.assert_allclose(stored.features, whole.features[rest], rtol=0, atol=1e-5)
    np.testing.assert_allclose(stored.attention, whole.attention[rest], rtol=1e-5, atol=0)
    first, second = rows_of(out / "summary.csv")
    assert (first["status"], first["tiles"], first["tiles_failed"]) == ("ok", "24", "1")
    assert "2 of its 25 tiles cannot be read" in second["reason"]
    assert not (out / "case-1.h5").exists()
    again = tapfm(*command)
    assert "1 of 2 slides are already embedded" in again.stderr
    assert rows_of(out / "summary.csv")[0]["tiles_failed"] == "1"


def test_a_slide_that_is_read_in_parts_keeps_each_tile_with_its_position(tmp_path, lab, tapfm):
    cohort, tiles, out = lab(1)
    positions = np.tile(grid("case-0").positions, (12, 1))  # 300 tiles: more than are read at a time
    write_tiles(tiles, replace(grid("case-0"), positions=positions), "trident")
    damage(tmp_path / "s0.svs", [24])
    result = tapfm("embed", cohort, *POCKET, "--tiles", tiles, "--out", out, "--workers", 0)
    assert result.returncode == 0, result.stderr
    stored = read_features(out / "case-0.h5")
    np.testing.assert_array_equal(stored.positions, positions[np.arange(300) % 25 != 24])
    np.testing.assert_allclose(stored.features, np.tile(stored.features[:24], (12, 1)), rtol=0, atol=1e-5)


def test_slides_without_usable_tiles_say_how_to_make_them(lab, tapfm):
    cohort, tiles, out = lab(4)
    tile_file_path(tiles, "case-0", "trident").unlink()
    tile_file_path(tiles, "case-1", "trident").write_bytes(b"half")
    write_tiles(tiles, replace(grid("case-2"), positions=np.empty((0, 2), np.int64)), "trident")
    result = tapfm("embed", cohort, *POCKET, "--tiles", tiles, "--out", out, "--workers", 0)
    assert result.returncode == 3
    assert "Embedded 1 of 4 slides: 25 tiles" in result.stdout
    failures = rows_of(out / "failures.csv")
    for row, says in zip(failures, ("no file of its tiles", "cannot be read as HDF5", "has no tiles"), strict=True):
        assert says in row["reason"]
        assert row["hint"] == f"tapfm tile {cohort} --out {tiles} --only {row['slide_id']}"
    assert failures[0]["hint"] in result.stdout


def test_tiles_of_another_size_are_read_at_the_encoders_and_that_is_said_once(lab, tapfm):
    cohort, tiles, out = lab(2)
    for i in range(2):
        write_tiles(tiles, grid(f"case-{i}", columns=2, tile_px=256), "clam")
        tile_file_path(tiles, f"case-{i}", "trident").unlink()
    result = tapfm("embed", cohort, *POCKET, "--tiles", tiles, "--out", out, "--workers", 0)
    assert result.stderr.count("Tiles of 256 px are read as 224 px, at 0.571 um per pixel.") == 1
    assert read_features(out / "case-0.h5").features.shape == (4, 128)


@pytest.mark.parametrize("blow", [signal.SIGINT, signal.SIGTERM])
def test_a_run_that_is_stopped_says_how_to_go_on_and_goes_on(lab, tapfm, blow):
    cohort, tiles, out = lab(10)
    command = ("embed", cohort, *POCKET, "--tiles", tiles, "--out", out, "--workers", 1)
    over = threading.Event()

    def strike():
        while not over.wait(0.005):
            if len(times(out)) >= 2:
                os.kill(os.getpid(), blow)
                return

    striker = threading.Thread(target=strike)
    striker.start()
    stopped = tapfm(*command)
    over.set()
    striker.join()
    assert stopped.returncode == 128 + blow, stopped.stderr
    assert "Stopped. " + RESUME_HINT in stopped.stderr
    assert goes_on(tapfm, command, out)


def test_a_run_that_is_killed_leaves_whole_files_and_goes_on(lab, tapfm):
    cohort, tiles, out = lab(10)
    command = ("embed", cohort, *POCKET, "--tiles", tiles, "--out", out, "--workers", 1)
    process = start(*command)
    wait_for(lambda: len(times(out)) >= 2, process)
    process.kill()
    process.communicate()
    (out / ".case-9.h5.abc.unfinished").write_bytes(b"half")
    assert goes_on(tapfm, command, out)


def goes_on(tapfm, command, out):
    done = times(out)
    assert 2 <= len(done) < 10
    for name in done:
        assert len(read_features(out / name)) == 25
    result = tapfm(*command)
    assert f"{len(done)} of 10 slides are already embedded" in result.stderr
    assert "Embedded 10 of 10 slides: 250 tiles" in result.stdout
    assert not list(out.rglob("*.unfinished"))
    return done.items() <= times(out).items()


def test_features_of_another_tool_are_not_touched(lab, tapfm):
    cohort, tiles, out = lab()
    out.mkdir()
    with h5py.File(out / "case-1.h5", "w") as file:
        file["features"] = np.zeros((3, 8), np.float32)
    before = feature_files(out)
    result = tapfm("embed", cohort, *POCKET, "--tiles", tiles, "--out", out)
    assert result.returncode == 2
    assert "1 files that tapfm embed did not write, such as case-1.h5" in result.stderr
    assert feature_files(out) == before


def test_two_runs_in_one_folder_are_refused(lab, tapfm):
    cohort, tiles, out = lab(1)
    with lock_folder(out, "tapfm embed"):
        second = tapfm("embed", cohort, *POCKET, "--tiles", tiles, "--out", out)
    assert second.returncode == 2
    assert "Another tapfm embed is at work" in second.stderr


def test_a_folder_that_cannot_be_written_to_is_told(lab, pocket):
    cohort, tiles, out = lab(1)
    (out / "case-0.h5").mkdir(parents=True)  # a file cannot take its place
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
    ("arguments", "says"),
    [
        (["--encoder", "tapfm-poket"], "Did you mean: tapfm-pocket"),
        (["--tiles", "absent"], "Make them: tapfm tile "),
        (["--only", "case-9"], "Ids there are: case-0"),
        (["--precision", "half"], "auto, float32, bfloat16"),
        (["--precision", "float8", "--device", "cpu"], "does not compute in float8"),
        (["--device", "tpu"], "'tpu' is not a device"),
        (["--device", "cuda:99"], "There are: cpu"),
        (["--weights", "absent.bin"], "no file or folder absent.bin"),
        (["--workers", "-1"], "has to be at least"),
        (["--batch", "0"], "has to be at least"),
    ],
)
def test_wrong_use_is_told_and_nothing_is_written(lab, tapfm, arguments, says):
    cohort, tiles, out = lab(1)
    result = tapfm("embed", cohort, *POCKET, "--tiles", tiles, "--out", out, *arguments)
    assert result.returncode == 2, result.stderr
    assert says in result.stderr
    assert not out.exists()


def test_the_folder_of_the_tiles_keeps_its_tables(lab, tapfm):
    cohort, tiles, _ = lab(1)
    (tiles / "summary.csv").write_text("of the tiles")
    result = tapfm("embed", cohort, *POCKET, "--tiles", tiles, "--out", tiles)
    assert result.returncode == 2
    assert "is the folder of the tiles" in result.stderr
    assert (tiles / "summary.csv").read_text() == "of the tiles"


def test_help_and_what_is_wrong_at_first_sight_do_not_wait_for_torch(lab):
    cohort, tiles, out = lab(1)
    program = """
import sys
from tapfm.cli.main import main
for arguments in {every!r}:
    sys.argv = ["tapfm", "embed", *arguments]
    try:
        main()
    except SystemExit as ended:
        print("ended with", ended.code)
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
    said = subprocess.run(
        [sys.executable, "-c", program.format(every=every)], capture_output=True, text=True, check=True
    )
    assert said.stdout.count("ended with 2") == 4, said.stderr
    assert "ended with 0" in said.stdout
    assert said.stdout.splitlines()[-1] == "False"


def test_the_device_is_a_gpu_where_there_is_one():
    assert choose_device("auto").type == ("cuda" if torch.cuda.is_available() else "cpu")
    assert choose_device("cpu") == torch.device("cpu")


def test_precision_is_full_on_a_cpu_unless_asked_otherwise():
    cpu = torch.device("cpu")
    assert choose_precision("auto", cpu) is None
    assert choose_precision("float32", cpu) is None
    assert choose_precision("bfloat16", cpu) is torch.bfloat16
