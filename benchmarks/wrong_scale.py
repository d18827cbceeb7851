"""Measure the effect of wrong microns per pixel on predictions.

    python benchmarks/wrong_scale.py                          # about half an hour on two cores
    python benchmarks/wrong_scale.py --work out/scale --json out/scale.json

Generates a synthetic cohort, adapts tapfm-pocket on some of its slides at their true scale, and predicts the test
slides several times: with the microns per pixel of the slide files, with multiples of them in the column `mpp`, and
with those of 40x slides doubled, as if they were 20x slides. Prints Markdown: the AUC with DeLong's
confidence interval, the p value of DeLong's paired test against the true scale, and the changes of probabilities and
calls.
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
TableRow = Mapping[str, str]


@dataclass
class Row:
    """Results for one variant of the column `mpp`."""

    scale: str
    wrong: int  # slides with a wrong scale
    tiles: float  # mean per slide
    auc: float | None
    low: float | None
    high: float | None
    p: float | None  # paired test against the true scale
    change: float  # mean absolute change of a probability
    calls_changed: int


def run_command(*arguments: object) -> None:
    """Run a tapfm command. If it fails, exit with its output."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *map(str, arguments)], capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        raise SystemExit(f"tapfm {arguments[0]} failed with exit code {done.returncode}:\n{done.stdout}{done.stderr}")


def train_model(work: Path, slides: int, tiles: int, epochs: int) -> Path:
    """Generate, tile and train, and return the run folder. Finished steps are not repeated."""
    cohort, run = work / "synthetic" / "cohort.csv", work / "run"
    run_command(
        *("synth", work / "synthetic", "--slides", slides, "--external", 2, "--tiles-per-slide", tiles),
        *("--difficulty", "easy", "--prevalence", 0.4, "--fractions", 0.3, 0.1, 0.6),
    )
    run_command("tile", cohort, "--out", work / "tiles")
    if not (work / "run.toml").exists():
        options = ("--tiles", work / "tiles", "--encoder", "tapfm-pocket", "--target", TARGET)
        run_command("config", "--cohort", cohort, *options, "--out", work / "run.toml")
    run_command("train", work / "run.toml", "--out", run, "--resume", "--set", f"schedule.epochs={epochs}")
    return run


def read_test_slides(cohort: Path) -> list[dict[str, str]]:
    """Return the rows of the test slides, with their true scale and absolute path."""
    with cohort.open(newline="") as file:
        lines = [line for line in csv.DictReader(file) if line["split"] == "test"]
    for line in lines:
        path = cohort.parent / line["path"]
        slide = open_slide(path)
        line |= {"path": str(path.resolve()), "mpp": str(slide.metadata.mpp_in_file)}
        slide.close()
    return lines


def predict(
    work: Path, run: Path, lines: Sequence[TableRow], name: str, change_mpp: Callable[[float], float]
) -> list[TableRow]:
    """Predict the slides with changed microns per pixel."""
    table, out = work / f"{name}.csv", work / "predicted" / name
    with table.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(lines[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(dict(line) | {"mpp": f"{change_mpp(float(line['mpp'])):.6g}"} for line in lines)
    run_command("predict", "--model", run, table, "--out", out, "--resume")
    with (out / "predictions.csv").open(newline="") as file:
        return sorted(csv.DictReader(file), key=lambda line: line["slide_id"])


def make_row(scale: str, wrong: int, changed: Sequence[TableRow], true: Sequence[TableRow]) -> Row:
    probabilities, at_true = (np.array([float(line["probability"]) for line in lines]) for lines in (changed, true))
    positive = np.array([line["label"] == "1" for line in changed])
    estimate = auc_interval(positive, probabilities)
    pairs = list(zip(changed, true, strict=True))
    return Row(
        scale=scale,
        wrong=wrong,
        tiles=sum(int(line["tiles"]) for line in changed) / len(changed),
        auc=estimate.value,
        low=estimate.low,
        high=estimate.high,
        p=None if changed is true else auc_difference(positive, probabilities, at_true).p,
        change=float(np.abs(probabilities - at_true).mean()),
        calls_changed=sum(a["call"] != b["call"] for a, b in pairs),
    )


def measure(work: Path, run: Path, factors: Sequence[float]) -> list[Row]:
    lines = read_test_slides(work / "synthetic" / "cohort.csv")
    true = predict(work, run, lines, "true", lambda mpp: mpp)
    rows = [make_row("true", 0, true, true)]
    count_40x = sum(float(line["mpp"]) < 0.375 for line in lines)
    as_20x = predict(work, run, lines, "as-20x", lambda mpp: 2 * mpp if mpp < 0.375 else mpp)
    rows.append(make_row("40x slides treated as 20x", count_40x, as_20x, true))
    for factor in factors:
        changed = predict(work, run, lines, f"times-{factor:g}", partial(mul, factor))
        rows.append(make_row(f"all x {factor:g}", len(lines), changed, true))
    return rows


def format_table(rows: Sequence[Row]) -> str:
    def format_auc(row: Row) -> str:
        if row.auc is None:
            return "-"
        return f"{row.auc:.3f}" + ("" if row.low is None else f" ({row.low:.3f} to {row.high:.3f})")

    def format_p(p: float | None) -> str:
        return "" if p is None else (f"{p:.3f}" if p >= 0.001 else "below 0.001")

    lines = [
        "| microns per pixel | slides with a wrong scale | tiles per slide | AUC | p | change of probability "
        "| calls changed |",
        "|---|--:|--:|--:|--:|--:|--:|",
    ]
    lines += [
        f"| {row.scale} | {row.wrong} | {row.tiles:.0f} | {format_auc(row)} | {format_p(row.p)} | {row.change:.3f} | "
        f"{row.calls_changed} |"
        for row in rows
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--slides", type=int, default=80, help="number of slides; 60%% are test slides")
    parser.add_argument("--tiles", type=int, default=40, help="approximate tiles per slide")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--factors", type=float, nargs="+", default=[0.5, 0.8, 0.95, 1.05, 1.25, 2.0])
    parser.add_argument("--work", type=Path, help="keep slides, run and predictions in this folder, to resume")
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        work = arguments.work or Path(temporary)
        run = train_model(work, arguments.slides, arguments.tiles, arguments.epochs)
        rows = measure(work, run, arguments.factors)
    print(
        f"tapfm {tapfm.__version__}, {platform.machine()}; tapfm-pocket, adapted; {arguments.slides} synthetic slides\n"
    )
    print(format_table(rows))
    if arguments.json is not None:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps([asdict(row) for row in rows], indent=1))


if __name__ == "__main__":
    main()
