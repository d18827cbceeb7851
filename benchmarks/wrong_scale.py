"""What does a wrong scale do to a prediction? The same slides, with other microns per pixel in the table.

    python benchmarks/wrong_scale.py                          # about half an hour on two cores
    python benchmarks/wrong_scale.py --work out/scale --json out/scale.json

Paints a cohort, adapts tapfm-pocket on some of its slides (TAPFM, tiles at their true scale), and predicts the test
slides several times: with the scale that their files state, with a multiple of it in the column `mpp`, and with that
of 40x slides doubled, as if they were 20x. Everything is a command of tapfm. Prints Markdown: AUC with DeLong's
interval, his paired p against the true scale, and how far probabilities and calls are from those there.
"""

from __future__ import annotations

import argparse
import csv
import json
import platform
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from operator import mul
from pathlib import Path

import numpy as np

import tapfm
from tapfm.metrics.delong import auc_difference, auc_interval
from tapfm.slides.opening import open_slide

TARGET = "FGFR3"
PROGRAM = "from tapfm.cli.main import main; main()"
Line = Mapping[str, str]


@dataclass
class Row:
    """The test slides, predicted with one way to fill the column `mpp`."""

    scale: str
    wrong: int  # slides whose scale is not the true one
    tiles: float  # of a slide, in the mean
    auc: float | None
    low: float | None
    high: float | None
    p: float | None  # of the same AUC as at the true scale, paired
    change: float  # of a probability, in the mean over slides
    calls_changed: int


def command(*words: object) -> None:
    """Run tapfm; what it says is shown where it fails."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *map(str, words)], capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        raise SystemExit(f"tapfm {words[0]} ended with code {done.returncode}:\n{done.stdout}{done.stderr}")


def trained(work: Path, slides: int, tiles: int, epochs: int) -> Path:
    """Paint, tile and train; what is there already is kept."""
    cohort, run = work / "painted" / "cohort.csv", work / "run"
    command(
        *("synth", work / "painted", "--slides", slides, "--external", 2, "--tiles", tiles, "--difficulty", "easy"),
        *("--prevalence", 0.4, "--fractions", 0.3, 0.1, 0.6),
    )
    command("tile", cohort, "--out", work / "tiles")
    if not (work / "run.toml").exists():
        words = ("--tiles", work / "tiles", "--encoder", "tapfm-pocket", "--target", TARGET)
        command("config", "--cohort", cohort, *words, "--out", work / "run.toml")
    command("train", work / "run.toml", "--out", run, "--resume", "--set", f"schedule.epochs={epochs}")
    return run


def test_slides(cohort: Path) -> list[dict[str, str]]:
    """Read the lines of the test slides, with the true scale of each and its whole path."""
    with cohort.open(newline="") as file:
        lines = [line for line in csv.DictReader(file) if line["split"] == "test"]
    for line in lines:
        path = cohort.parent / line["path"]
        slide = open_slide(path)
        line |= {"path": str(path.resolve()), "mpp": str(slide.metadata.mpp_in_file)}
        slide.close()
    return lines


def predicted(work: Path, run: Path, lines: Sequence[Line], name: str, said: Callable[[float], float]) -> list[Line]:
    """Predict with the scale that is said of each slide."""
    table, out = work / f"{name}.csv", work / "predicted" / name
    with table.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(lines[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(dict(line) | {"mpp": f"{said(float(line['mpp'])):.6g}"} for line in lines)
    command("predict", "--model", run, table, "--out", out, "--resume")
    with (out / "predictions.csv").open(newline="") as file:
        return sorted(csv.DictReader(file), key=lambda line: line["slide_id"])


def row_of(scale: str, wrong: int, now: Sequence[Line], true: Sequence[Line]) -> Row:
    probabilities, at_true = (np.array([float(line["probability"]) for line in lines]) for lines in (now, true))
    positive = np.array([line["label"] == "1" for line in now])
    estimate = auc_interval(positive, probabilities)
    pairs = list(zip(now, true, strict=True))
    return Row(
        scale=scale,
        wrong=wrong,
        tiles=sum(int(line["tiles"]) for line in now) / len(now),
        auc=estimate.value,
        low=estimate.low,
        high=estimate.high,
        p=None if now is true else auc_difference(positive, probabilities, at_true).p,
        change=float(np.abs(probabilities - at_true).mean()),
        calls_changed=sum(a["call"] != b["call"] for a, b in pairs),
    )


def measure(work: Path, run: Path, factors: Sequence[float]) -> list[Row]:
    lines = test_slides(work / "painted" / "cohort.csv")
    true = predicted(work, run, lines, "true", lambda mpp: mpp)
    rows = [row_of("true", 0, true, true)]
    fine = sum(float(line["mpp"]) < 0.375 for line in lines)
    as_20x = predicted(work, run, lines, "as-20x", lambda mpp: 2 * mpp if mpp < 0.375 else mpp)
    rows.append(row_of("40x slides said to be 20x", fine, as_20x, true))
    for factor in factors:
        now = predicted(work, run, lines, f"times-{factor:g}", partial(mul, factor))
        rows.append(row_of(f"all x {factor:g}", len(lines), now, true))
    return rows


def table(rows: Sequence[Row]) -> str:
    def interval(row: Row) -> str:
        if row.auc is None:
            return "-"
        return f"{row.auc:.3f}" + ("" if row.low is None else f" ({row.low:.3f} to {row.high:.3f})")

    def in_words(p: float | None) -> str:
        return "" if p is None else (f"{p:.3f}" if p >= 0.001 else "below 0.001")

    lines = [
        "| um per pixel | slides that are wrong | tiles of a slide | AUC | p | change of probability | calls changed |",
        "|---|--:|--:|--:|--:|--:|--:|",
    ]
    lines += [
        f"| {row.scale} | {row.wrong} | {row.tiles:.0f} | {interval(row)} | {in_words(row.p)} | {row.change:.3f} | "
        f"{row.calls_changed} |"
        for row in rows
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--slides", type=int, default=80, help="in all; 60 of 100 are tested on")
    parser.add_argument("--tiles", type=int, default=40, help="of a slide, about")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--factors", type=float, nargs="+", default=[0.5, 0.8, 0.95, 1.05, 1.25, 2.0])
    parser.add_argument("--work", type=Path, help="keep slides, run and predictions here; what is there is not redone")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        work = chosen.work or Path(name)
        run = trained(work, chosen.slides, chosen.tiles, chosen.epochs)
        rows = measure(work, run, chosen.factors)
    print(f"tapfm {tapfm.__version__}, {platform.machine()}; tapfm-pocket, adapted; {chosen.slides} painted slides\n")
    print(table(rows))
    if chosen.json is not None:
        chosen.json.parent.mkdir(parents=True, exist_ok=True)
        chosen.json.write_text(json.dumps([asdict(row) for row in rows], indent=1))


if __name__ == "__main__":
    main()
