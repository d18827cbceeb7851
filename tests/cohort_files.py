"""Helpers for tests: write a cohort of synthetic slides, and read CSV tables and tile files."""

import csv

from slide_files import section, write_slide


def make_cohort(folder, count=4, side_px=1200):
    folder.mkdir(exist_ok=True)
    lines = ["slide_id,path,patient_id,mpp,FGFR3"]
    for i in range(count):
        write_slide(folder / f"s{i}.svs", section(side_px, side_px, seed=i), mpp=0.25 if i % 2 else 0.5)
        lines.append(f"case-{i},s{i}.svs,P{i},,{i % 2}")
    (folder / "cohort.csv").write_text("\n".join(lines) + "\n")
    return folder / "cohort.csv"


def read_rows(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def read_tile_files(out):
    return {path.name: path.read_bytes() for path in sorted((out / "patches").glob("*.h5"))}
