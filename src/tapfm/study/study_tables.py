"""Write the tables and figures of the finished runs, study.md with all of them, and study.json for `tapfm report`.

The same runs always give byte-identical files.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tapfm.cohort.splits import SPLITS
from tapfm.config.settings import RunConfig
from tapfm.config.study import StudyConfig
from tapfm.errors import InputError
from tapfm.results.document import Block, Paragraph, Section, write_sections_json
from tapfm.results.figure import Figure
from tapfm.results.figure_drawing import write_png
from tapfm.results.latex import latex_table
from tapfm.results.markdown import markdown_sections
from tapfm.results.table import Column, Row, Table, table_csv, table_row
from tapfm.runtime.csv_files import read_csv
from tapfm.runtime.files import write_atomically
from tapfm.runtime.messages import format_count
from tapfm.study.ablation import ablation_table, fit_losses
from tapfm.study.comparison import StudyComparison, compare_study, tidy_table, wide_table
from tapfm.study.costs import costs_table
from tapfm.study.figures import curves_figure, log_losses_figure, losses_figure, roc_figure
from tapfm.study.folder import StudyFolder
from tapfm.study.forgetting import describe_forgetting, forgetting_table, summarise_probes
from tapfm.study.headline import RESULT_TITLE, build_study_headline, read_headline_rows
from tapfm.study.results import StudyResults, collect_results
from tapfm.study.runs import METHOD_ORDER, list_runs, resolve_run_config
from tapfm.study.stability import (
    describe_stability,
    measure_stability,
    stability_means_table,
    stability_runs_table,
)
from tapfm.study.status import read_status
from tapfm.tasks.labels import label_count_cells, label_count_columns
from tapfm.tasks.target import TargetKinds


@dataclass(frozen=True)
class _StudyPart:
    """A section that is also written to its own files: NAME.csv, NAME.md and its figures."""

    title: str
    name: str
    table: Table
    csv_table: Table | None = None  # table of NAME.csv, if it differs
    sentences: Sequence[str] = ()
    figures: Mapping[str, Figure] = field(default_factory=dict)  # by file name

    def section(self) -> Section:
        if not self.table.rows:
            return Section(self.title, [Paragraph("No results yet.")])
        return Section(self.title, [self.table, *map(Paragraph, self.sentences), *self.figures.values()])


def write_study_tables(study: StudyConfig, folder: StudyFolder) -> tuple[Table, Table]:
    """Write the tables and figures of a study, and return the table of AUCs and the headline."""
    results = collect_results(study, folder)
    comparison = compare_study(results)
    auc = _auc_part(results, comparison)
    curves = {"curves.png": curves_figure(results)} if results.models else {}
    parts = [auc, _StudyPart("Convergence, time and memory", "costs", costs_table(results), figures=curves)]
    if study.report in ("ablation", "stability"):
        fits = fit_losses(results, comparison)
        figures = {"ablation-raw.png": losses_figure(fits), "ablation-log.png": log_losses_figure(fits)}
        title = "Log-linear fit of the training loss"
        parts.append(_StudyPart(title, "ablation", ablation_table(fits), figures=figures if fits else {}))
    if study.report == "stability":
        runs = measure_stability(results)
        tables, sentences = (stability_means_table(runs), stability_runs_table(runs)), describe_stability(runs)
        parts.append(_StudyPart("Stability", "stability", *tables, sentences))
    if study.report == "forgetting":
        probes = summarise_probes(results)
        sentences = describe_forgetting(probes)
        parts.append(_StudyPart("Forgetting", "forgetting", forgetting_table(probes), sentences=sentences))
    csv_rows = csv.DictReader(io.StringIO(table_csv(tidy_table(comparison))))
    headline = build_study_headline(read_headline_rows(list(csv_rows)), with_choice=True)
    result = Section(RESULT_TITLE, [headline if headline.rows else Paragraph("No results yet.")])
    sections = [Section("Overview", _overview(results)), result, *(part.section() for part in parts)]
    _write_files(folder.path, study, parts, [*sections, *_failed_steps_sections(study, folder)])
    write_sections_json(folder.path / "study.json", sections)  # `tapfm report` reads failures from status.csv
    return auc.table, headline


def _write_files(folder: Path, study: StudyConfig, parts: Sequence[_StudyPart], sections: Sequence[Section]) -> None:
    figures = {file: figure for part in parts for file, figure in part.figures.items()}
    files = {figure.title: file for file, figure in figures.items()}
    texts = {"study.md": markdown_sections(study.name, sections, files)}
    for part in parts:
        texts[f"{part.name}.csv"] = table_csv(part.csv_table or part.table)
        texts[f"{part.name}.md"] = markdown_sections(part.title, [Section("", part.section().blocks)], files)
    caption = (
        f"{study.name}: AUC with 95% confidence interval (bootstrap of patients), and p value of a paired test against "
        "the model with the highest AUC of the column (Holm-corrected). N: number of patients. Bold, underlined: "
        "highest and second highest AUC of the column; this is not the choice of a model, which is made on validation."
    )
    label = "multi_label" if study.is_multilabel else "comparison"
    texts[f"{parts[0].name}.tex"] = latex_table(parts[0].table, caption, label)
    for name, text in texts.items():
        write_atomically(folder / name, text.encode())
    for name, figure in figures.items():
        write_png(folder / name, figure)


def _auc_part(results: StudyResults, comparison: StudyComparison) -> _StudyPart:
    name = "table_multilabel" if results.study.is_multilabel else "table_binary"
    roc = roc_figure(results)
    tables = wide_table(comparison, results.study), tidy_table(comparison)
    return _StudyPart("AUC", name, *tables, figures={} if roc is None else {"roc.png": roc})


def _overview(results: StudyResults) -> list[Block]:
    """Return the number of finished runs, the notes of the study, its main settings and the sizes of its splits."""
    study = results.study
    finished = sum(len(each.histories) for each in results.models)
    total = format_count(len(list_runs(study)), "run")
    summary = f"{finished} of {total} finished. Compared: {_describe_settings(study)}."
    tables = [_settings_table(study, results.folder), _split_sizes_table(results)]
    return [*map(Paragraph, [summary, *study.notes]), *(table for table in tables if table.rows)]


def _describe_settings(study: StudyConfig) -> str:
    """Return what a study compares, such as "encoder uni; method tapfm; aggregator cls-gated; target EGFR; seed 0"."""
    aggregators = [*(study.aggregators if set(study.methods) - {"tapfm"} else [])]
    aggregators += study.tapfm_aggregators if "tapfm" in study.methods else []
    listed: dict[str, Sequence[str]] = {
        "encoder": study.encoders,
        "method": study.methods,
        "aggregator": list(dict.fromkeys(aggregators)),
        "variant": [each.name for each in study.variants],
        "target": study.targets,
    }
    parts = [f"{noun}{'s'[: len(values) > 1]} {', '.join(values)}" for noun, values in listed.items() if values]
    parts += [format_count(len(study.folds), "fold")] if study.folds else []
    parts += [f"seed {study.seeds[0]}" if len(study.seeds) == 1 else f"{len(study.seeds)} seeds"]
    return "; ".join(parts)


def _settings_table(study: StudyConfig, folder: StudyFolder) -> Table:
    """Return the tiles, epochs and learning rates of each method."""
    configs: dict[str, list[RunConfig]] = {}
    for run in list_runs(study):
        try:
            config = resolve_run_config(study, run, folder.features(run.model.encoder))
        except InputError:
            continue  # listed under the failed steps
        configs.setdefault(run.model.method, []).append(config)
    titles = ("method", "tiles per slide and step", "epochs", "encoder learning rate", "aggregator learning rate")
    rows = [
        table_row(
            method,
            _join_values([each.adaptation.tiles_per_slide for each in configs[method]]),
            _join_values([each.schedule.epochs for each in configs[method]]),
            "" if method == "fixed" else _join_values([each.optimiser.encoder_lr for each in configs[method]]),
            _join_values([each.optimiser.aggregator_lr for each in configs[method]]),
        )
        for method in METHOD_ORDER
        if method in configs
    ]
    return Table([Column(title, text=True) for title in titles], rows)


def _join_values(values: Sequence[object]) -> str:
    return ", ".join(f"{value:g}" if isinstance(value, float) else str(value) for value in dict.fromkeys(values))


def _split_sizes_table(results: StudyResults) -> Table:
    """Return the number of slides, patients and positives of each split."""
    study = results.study
    finished = {run for each in results.models for run in each.histories}
    slides: dict[str, dict[str, str]] = {}
    for run in list_runs(study):
        if run.name in finished:  # a run with one target has only the labels of this target
            for row in read_csv(results.folder.run(run) / "split.csv"):
                slides.setdefault(row["slide_id"], {}).update(row)
    cohorts = {f"all ({len(study.folds)} folds)": list(slides.values())} if study.folds else {}
    for split in () if study.folds else SPLITS:
        cohorts[split] = [row for row in slides.values() if row["split"] == split]
    external: dict[str, dict[str, str]] = {}
    for each in results.models:
        for prediction in (slide for seed in each.predictions.get("external", []) for slide in seed):
            row = external.setdefault(prediction.slide_id, {"patient_id": prediction.patient_id})
            row["cohort"] = prediction.cohort or ""
            kinds = study.target_kinds
            row |= {target: kinds[target].format_label(label) for target, label in prediction.labels.items()}
    cohorts |= {"external": list(external.values())} if external else {}
    columns = [Column("split", text=True), Column("slides"), Column("patients")]
    columns += label_count_columns(study.target_kinds)
    return Table(columns, [_size_row(name, rows, study.target_kinds) for name, rows in cohorts.items() if finished])


def _size_row(name: str, slides: Sequence[Mapping[str, str]], targets: TargetKinds) -> Row:
    patients = len({(row["cohort"], row["patient_id"]) for row in slides})
    return table_row(name, len(slides), patients, *label_count_cells(slides, targets))


def _failed_steps_sections(study: StudyConfig, folder: StudyFolder) -> list[Section]:
    """Return one section with the failed steps of this study, or none. status.csv may also contain other runs."""
    runs = list_runs(study)
    names = {run.name for run in runs} | {f"{run.model.name}/ensemble-seed{run.seed}" for run in runs}
    columns = [Column(title, text=True) for title in ("run", "step", "reason", "command", "log")]
    rows = [
        table_row(run, step, reason, command, log)
        for run, step, state, reason, command, log in read_status(folder).values()
        if state == "failed" and (run in names or run.startswith("features of "))
    ]
    return [Section("Failed steps", [Table(columns, rows)])] if rows else []
