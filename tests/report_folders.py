"""Run, evaluation, prediction and study folders with invented values, for tests of reports."""

import hashlib
import json
from dataclasses import replace
from datetime import date

import numpy as np
from predicted_slides import make_tile_table, predicted_file, predicted_slide, write_prediction
from rich.console import Console
from slide_files import section, write_slide

from tapfm.config.study import resolve_study
from tapfm.evaluation.metric_tables import MODEL, EvaluationResults, MetricRow
from tapfm.evaluation.metric_values import ChosenThresholds, choose_thresholds, compute_metrics
from tapfm.evaluation.metrics_json import format_metrics_json
from tapfm.evaluation.predictions import Prediction, write_predictions
from tapfm.prediction.folder import PREDICTION_JSON, PredictionFolder, TargetPrediction
from tapfm.report.report_creation import PageOptions, create_report
from tapfm.results.document import Paragraph, Section, write_sections_json
from tapfm.results.table import table_csv
from tapfm.study.comparison import compare_study, tidy_table, wide_table
from tapfm.study.costs import costs_table
from tapfm.study.figures import curves_figure
from tapfm.study.folder import StudyFolder
from tapfm.study.results import ModelResult, StudyResults
from tapfm.study.runs import PlannedRun, list_models
from tapfm.tasks.binary_target import _sigmoid as sigmoid
from tapfm.tasks.catalog import target_kinds

TODAY = date(2026, 3, 9)
TARGETS = ("FGFR3",)
CONFIG_TOML = """recipe = "paper"
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


def make_predictions(count, *, split="test", strength=1.5, targets=TARGETS, seed=0, start=0):
    """Return predictions in which every second slide is positive, with logits that are higher by `strength`."""
    rng = np.random.default_rng(seed)
    return [
        Prediction(
            slide_id=f"S{start + i:03}",
            patient_id=f"P{start + i:03}",
            split=split,
            cohort="ours",
            labels={target: (i + offset) % 2 for offset, target in enumerate(targets)},
            logits={
                target: float(rng.normal() + strength * ((i + offset) % 2 - 0.5))
                for offset, target in enumerate(targets)
            },
            tiles=40 + i,
        )
        for i in range(count)
    ]


def make_history(epochs):
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


def write_run(
    folder, *, targets=TARGETS, finished=True, epochs=3, encoder="tapfm-pocket", method="tapfm", **prediction_options
):
    """Write a run folder with 12 training, 8 validation and 10 test slides, and return its path."""
    folder.mkdir(parents=True)
    table = folder.parent / "cohort.csv"
    config = CONFIG_TOML.format(
        table=table.as_posix(), encoder=encoder, targets=json.dumps(targets), method=method, epochs=epochs
    )
    (folder / "config.toml").write_text(config)
    splits = {
        split: make_predictions(count, split=split, targets=targets, start=start, **prediction_options)
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
        "".join(json.dumps(row) + "\n" for row in make_history(epochs)[: 3 if finished else 1])
    )
    (folder / "checkpoints").mkdir()
    (folder / "checkpoints" / "best.safetensors").write_bytes(str(folder).encode())
    if finished:
        for split in ("val", "test"):
            write_predictions(folder / f"predictions-{split}.csv", splits[split])
        (folder / "summary.md").write_text("done")
    return folder


def weights_digest(run):
    return hashlib.sha256((run / "checkpoints" / "best.safetensors").read_bytes()).hexdigest()


def write_evaluation(
    folder, run, *, targets=TARGETS, cohort="external", split="test", subgroup="", slides=None, with_run=None
):
    """Write an evaluation folder; of an ensemble of two runs if `with_run` is given."""
    folder.mkdir(parents=True)
    slides = slides or make_predictions(14, seed=5, start=500, targets=targets)
    chosen = ChosenThresholds(
        choose_thresholds(
            make_predictions(8, split="val", start=200, targets=targets), target_kinds(targets), "patient"
        ),
        "8 slides",
    )
    about = {
        "tapfm": "0.1.0",
        "model": str(run),
        "kind": "run" if with_run is None else "ensemble",
        "members": list_members(run, with_run),
        "targets": list(targets),
        "cohort": cohort,
        "table": "external.csv" if cohort == "external" else "cohort.csv",
        "split": None if cohort == "external" else split,
        "unit": "patient",
        "sensitivity": 0.9,
        "resamples": 50,
        "seed": 0,
    }
    values = compute_metrics(slides, target_kinds(targets), "patient", chosen.thresholds, resamples=50)
    rows = [MetricRow(MODEL, "", each) for each in values]
    rows += [MetricRow(MODEL, subgroup, each) for each in values] if subgroup else []
    rows += [MetricRow("colour baseline", "", each) for each in values]
    results = EvaluationResults(
        about, target_kinds(targets), rows, chosen, "A baseline.", slide_count=len(slides), patient_count=len(slides)
    )
    (folder / "evaluation.json").write_text(json.dumps(about))
    (folder / "metrics.json").write_bytes(format_metrics_json(results))
    write_predictions(folder / "predictions.csv", slides)
    write_predictions(folder / "predictions-baseline.csv", slides)
    (folder / "failures.csv").write_text("slide_id,problem,tiles_skipped,reason\nX9,failed,,file truncated\n")
    return folder


def list_members(*runs):
    return [{"run": "r", "weights_sha256": weights_digest(run)} for run in runs if run is not None]


def write_prediction_folder(folder, run, slides, *, targets=TARGETS, digest=None, with_run=None):
    """Write a prediction folder with four tiles per slide; `slides` are (id, path or None, probability, label)."""
    folder.mkdir(parents=True)
    about = {
        "tapfm": "0.1.0",
        "model": str(run),
        "kind": "run",
        "targets": list(targets),
        "members": [{"run": "r", "weights_sha256": digest}] if digest else list_members(run, with_run),
    }
    (folder / PREDICTION_JSON).write_text(json.dumps(about))
    (folder / "failures.csv").write_text("slide_id,reason,hint\nZ1,no tissue,Scan it again.\n")
    for number, (slide_id, path, probability, label) in enumerate(slides):
        logit = float(np.log(probability / (1 - probability)))
        prediction = TargetPrediction(logit, sigmoid(logit), 0.5, int(probability >= 0.5), label, 0.0)
        slide = predicted_slide(targets=targets) if path is None else predicted_file(path, targets=targets)
        slide = replace(
            slide, slide_id=slide_id, patient_id=f"P-{slide_id}", targets=dict.fromkeys(targets, prediction)
        )
        values = np.array([-1.0, 0.5, 2.0, 0.1]) * (number + 1)
        table = make_tile_table(slide, [[0, 0], [224, 0], [0, 224], [224, 224]], values)
        write_prediction(PredictionFolder(folder).slide_folder(slide_id), slide, table)
    return folder


def write_tissue_slide(path, seed=0):
    write_slide(path, section(448, 448, seed=seed, tissue=(0, 0, 1, 1)), tile_px=224, downsamples=(1,))
    return path


def write_study(folder, *, finished=("finetune", "tapfm"), validation=(2.5, 0.5)):
    """Write a study folder with two models, of which those in `finished` have runs.

    The second model is better on test slides. validation: strength of the signal of each model on validation slides.
    """
    folder.mkdir(parents=True)
    settings = {
        "name": "A small study",
        "targets": ["FGFR3"],
        "encoders": ["tapfm-pocket"],
        "resamples": 20,
        "methods": ["finetune", "tapfm"],
        "notes": ["Synthetic slides, not <real> ones."],
        "cohort": {"table": "c.csv", "tiles": "tiles"},
    }
    study = resolve_study(settings)
    lines = [f"{key} = {json.dumps(value)}" for key, value in settings.items() if key != "cohort"]
    (folder / "study.toml").write_text("\n".join([*lines, "[cohort]", 'table = "c.csv"', 'tiles = "tiles"']) + "\n")
    results = []
    for model, strength, val_strength in zip(list_models(study), (0.5, 2.5), validation, strict=True):
        if model.method not in finished:
            continue
        run = PlannedRun(model, 0, None)
        write_run(StudyFolder(folder).run(run), method=model.method, strength=strength)
        val_predictions = make_predictions(16, split="val", start=200, strength=val_strength)
        predictions = {"test": [make_predictions(20, strength=strength)]}
        results.append(ModelResult(model, {run.name: make_history(3)}, predictions, {run.name: val_predictions}))
    study_results = StudyResults(study, StudyFolder(folder), results, {})
    comparison = compare_study(study_results)
    (folder / "table_binary.csv").write_text(table_csv(tidy_table(comparison)))
    sections = [
        Section("Overview", [Paragraph(note) for note in study.notes]),
        Section("AUC", [wide_table(comparison, study)]),
        Section("Convergence, time and memory", [curves_figure(study_results), costs_table(study_results)]),
    ]
    write_sections_json(folder / "study.json", sections)
    (folder / "status.csv").write_text(
        "run,step,state,reason,command,log\nsome/run,train,failed,no <memory>,tapfm train x.toml,l.log\n"
        "incomplete/run,train,failed\n"
    )
    return folder


def create_test_report(source, out, **options):
    """Create a report of a folder or a list of folders; return the WrittenReport and its HTML."""
    paths = source if isinstance(source, list) else [source]
    page_options = PageOptions(**{"resamples": 50} | options)
    written = create_report(paths, out, page_options, console=Console(quiet=True), today=TODAY)
    return written, out.read_text("utf-8")
