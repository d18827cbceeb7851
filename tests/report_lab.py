"""Folders as `tapfm train`, `evaluate`, `predict` and `study` leave them, with numbers that are made up."""

import hashlib
import json
from dataclasses import replace
from datetime import date

import numpy as np
from predicted_slides import predicted_file, predicted_slide, table_of, write_prediction
from rich.console import Console
from slide_files import section, write_slide

from tapfm.config.study import resolve_study
from tapfm.evaluation.metric_tables import MODEL, EvaluationResults, MetricRow
from tapfm.evaluation.metric_values import ChosenThresholds, choose_thresholds, compute_metrics
from tapfm.evaluation.metrics_json import metrics_json
from tapfm.evaluation.predictions import Prediction, write_predictions
from tapfm.prediction.folder import PREDICTION_JSON, PredictionFolder, TargetPrediction
from tapfm.report.making import PageOptions, make_report
from tapfm.results.document import Paragraph, Section, write_sections
from tapfm.results.table import table_csv
from tapfm.study.comparison import compare_study, tidy_table, wide_table
from tapfm.study.costs import costs_table
from tapfm.study.figures import curves_figure
from tapfm.study.folder import StudyFolder
from tapfm.study.results import MethodResult, StudyResults
from tapfm.study.runs import PlannedRun, list_methods
from tapfm.tasks.binary_target import _sigmoid as sigmoid
from tapfm.tasks.catalog import target_kinds

TODAY = date(2026, 3, 9)
TARGETS = ("FGFR3",)
CONFIGURATION = """recipe = "paper"
seed = 0

[cohort]
table = "{table}"

[encoder]
name = "{encoder}"

[aggregator]
name = "cls-attention"

[task]
targets = {targets}

[adaptation]
method = "{method}"

[schedule]
epochs = {epochs}

[selection]
unit = "patient"
"""


def predictions(count, *, split="test", strength=1.5, targets=TARGETS, seed=0, start=0):
    """Slides of which every second is positive, with logits that are higher by `strength` where they are."""
    rng = np.random.default_rng(seed)
    return [
        Prediction(
            slide_id=f"S{start + i:03}",
            patient_id=f"P{start + i:03}",
            split=split,
            cohort="ours",
            labels={target: (i + place) % 2 for place, target in enumerate(targets)},
            logits={
                target: float(rng.normal() + strength * ((i + place) % 2 - 0.5)) for place, target in enumerate(targets)
            },
            tiles=40 + i,
        )
        for i in range(count)
    ]


def history(epochs):
    return [
        {
            "epoch": epoch,
            "loss_agg": 0.7 / epoch,
            "val_loss": 0.65,
            "loss_pfm": 0.1 / epoch,
            "train_macro_auc": 0.6,
            "val_auc": {},
            "val_macro_auc": 0.8 if epoch == 2 else 0.7,
            "score": 0.8 if epoch == 2 else 0.7,
            "seconds": 30.0,
            "peak_memory_gib": 1.5,
            "tiles_per_second": 100.0,
        }
        for epoch in range(1, epochs + 1)
    ]


def make_run(folder, *, targets=TARGETS, finished=True, epochs=3, encoder="tapfm-pocket", method="tapfm", **of_slides):
    """A run of 12 training, 8 validation and 10 test slides."""
    folder.mkdir(parents=True)
    table = folder.parent / "cohort.csv"
    written = CONFIGURATION.format(
        table=table.as_posix(), encoder=encoder, targets=json.dumps(targets), method=method, epochs=epochs
    )
    (folder / "config.toml").write_text(written)
    splits = {
        split: predictions(count, split=split, targets=targets, start=start, **of_slides)
        for split, count, start in (("train", 12, 100), ("val", 8, 200), ("test", 10, 0))
    }
    lines = [",".join(["slide_id", "patient_id", "cohort", "split", *targets, "tiles", "digest"])]
    for split, slides in splits.items():
        for each in slides:
            labels = [str(each.labels[target]) for target in targets]
            lines.append(",".join([each.slide_id, each.patient_id, "ours", split, *labels, str(each.tiles), "d"]))
    (folder / "split.csv").write_text("\n".join(lines) + "\n")
    environment = {"tapfm": "0.1.0", "device": "cpu", "cuda": None, "packages": {"torch": "2.6"}}
    (folder / "environment.json").write_text(json.dumps([environment]))
    (folder / "failures.csv").write_text("slide_id,problem,tiles_skipped,reason\n")
    (folder / "history.jsonl").write_text(
        "".join(json.dumps(row) + "\n" for row in history(epochs)[: 3 if finished else 1])
    )
    (folder / "checkpoints").mkdir()
    (folder / "checkpoints" / "best.safetensors").write_bytes(str(folder).encode())
    if finished:
        for split in ("val", "test"):
            write_predictions(folder / f"predictions-{split}.csv", splits[split])
        (folder / "summary.md").write_text("done")
    return folder


def digest_of(run):
    return hashlib.sha256((run / "checkpoints" / "best.safetensors").read_bytes()).hexdigest()


def make_evaluation(
    folder, run, *, targets=TARGETS, cohort="external", split="test", subgroup="", slides=None, with_run=None
):
    """What `tapfm evaluate` writes, by its own writers; `with_run` makes it an ensemble of two."""
    folder.mkdir(parents=True)
    slides = slides or predictions(14, seed=5, start=500, targets=targets)
    chosen = ChosenThresholds(
        choose_thresholds(predictions(8, split="val", start=200, targets=targets), target_kinds(targets), "patient"),
        "8 slides",
    )
    about = {
        "tapfm": "0.1.0",
        "model": str(run),
        "kind": "run" if with_run is None else "ensemble",
        "members": members_of(run, with_run),
        "targets": list(targets),
        "cohort": cohort,
        "table": "external.csv" if cohort == "external" else "cohort.csv",
        "split": None if cohort == "external" else split,
        "unit": "patient",
        "sensitivity": 0.9,
        "resamples": 50,
        "seed": 0,
    }
    measured = compute_metrics(slides, target_kinds(targets), "patient", chosen.thresholds, resamples=50)
    rows = [MetricRow(MODEL, "", each) for each in measured]
    rows += [MetricRow(MODEL, subgroup, each) for each in measured] if subgroup else []
    rows += [MetricRow("colour baseline", "", each) for each in measured]
    results = EvaluationResults(
        about, target_kinds(targets), rows, chosen, "A baseline.", slides=len(slides), patients=len(slides)
    )
    (folder / "evaluation.json").write_text(json.dumps(about))
    (folder / "metrics.json").write_bytes(metrics_json(results))
    write_predictions(folder / "predictions.csv", slides)
    write_predictions(folder / "predictions-baseline.csv", slides)
    (folder / "failures.csv").write_text("slide_id,problem,tiles_skipped,reason\nX9,failed,,it is torn\n")
    return folder


def members_of(*runs):
    return [{"run": "r", "weights_sha256": digest_of(run)} for run in runs if run is not None]


def make_prediction(folder, run, slides, *, targets=TARGETS, digest=None, with_run=None):
    """What `tapfm predict` writes; `slides` are (id, path or None, probability, label) and get a grid of tiles."""
    folder.mkdir(parents=True)
    about = {
        "tapfm": "0.1.0",
        "model": str(run),
        "kind": "run",
        "targets": list(targets),
        "members": [{"run": "r", "weights_sha256": digest}] if digest else members_of(run, with_run),
    }
    (folder / PREDICTION_JSON).write_text(json.dumps(about))
    (folder / "failures.csv").write_text("slide_id,reason,hint\nZ1,it is empty,Scan it again.\n")
    for number, (slide_id, path, probability, label) in enumerate(slides):
        logit = float(np.log(probability / (1 - probability)))
        said = TargetPrediction(logit, sigmoid(logit), 0.5, int(probability >= 0.5), label, 0.0)
        made = predicted_slide(targets=targets) if path is None else predicted_file(path, targets=targets)
        made = replace(made, slide_id=slide_id, patient_id=f"P-{slide_id}", targets=dict.fromkeys(targets, said))
        table = table_of(made, [[0, 0], [224, 0], [0, 224], [224, 224]], np.array([-1.0, 0.5, 2.0, 0.1]) * (number + 1))
        write_prediction(PredictionFolder(folder).slide_folder(slide_id), made, table)
    return folder


def write_section(path, seed=0):
    write_slide(path, section(448, 448, seed=seed, tissue=(0, 0, 1, 1)), tile_px=224, downsamples=(1,))
    return path


def make_study(folder, *, finished=("finetune", "tapfm")):
    """A study of two methods, with its table."""
    folder.mkdir(parents=True)
    given = {
        "name": "A small study",
        "targets": ["FGFR3"],
        "encoders": ["tapfm-pocket"],
        "resamples": 20,
        "regimes": ["finetune", "tapfm"],
        "notes": ["Painted slides, not <real> ones."],
        "cohort": {"table": "c.csv", "tiles": "tiles"},
    }
    study = resolve_study(given)
    lines = [f"{key} = {json.dumps(value)}" for key, value in given.items() if key != "cohort"]
    (folder / "study.toml").write_text("\n".join([*lines, "[cohort]", 'table = "c.csv"', 'tiles = "tiles"']) + "\n")
    results = []
    for method, strength in zip(list_methods(study), (0.5, 2.5), strict=True):
        if method.regime not in finished:
            continue
        run = PlannedRun(method, 0, None)
        make_run(StudyFolder(folder).run(run), method=method.regime, strength=strength)
        results.append(MethodResult(method, {run.name: history(3)}, {"test": [predictions(20, strength=strength)]}))
    found = StudyResults(study, StudyFolder(folder), results, {})
    comparison = compare_study(found)
    (folder / "table_binary.csv").write_text(table_csv(tidy_table(comparison)))
    sections = [
        Section("Overview", [Paragraph(note) for note in study.notes]),
        Section("AUC", [wide_table(comparison, study)]),
        Section("Convergence, time and memory", [curves_figure(found), costs_table(found)]),
    ]
    write_sections(folder / "study.json", sections)
    (folder / "status.csv").write_text(
        "run,step,state,reason,command,log\nsome/run,train,failed,no <memory>,tapfm train x.toml,l.log\n"
        "cut/run,train,failed\n"
    )
    return folder


def page_of(source, out, **asked):
    """Make a report; gives what was made and the page."""
    sources = source if isinstance(source, list) else [source]
    asked = PageOptions(**{"resamples": 50} | asked)
    made = make_report(sources, out, asked, console=Console(quiet=True), today=TODAY)
    return made, out.read_text("utf-8")
