"""Cross-validation in one command: train a model for each fold, and evaluate all of them out of fold.

Each fold is an ordinary run. Each patient is then predicted by the model of the fold that tests this patient, and the
models of all folds together are an ensemble for other cohorts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console

from tapfm.adaptation.training_run import run_training
from tapfm.cohort.cohort_table import Cohort, read_cohort
from tapfm.cohort.splits import TEST, fold_names, format_names
from tapfm.config.settings import RunConfig
from tapfm.errors import CohortError, Interrupted, RunError
from tapfm.evaluation.fold_table import build_fold_table
from tapfm.evaluation.metric_tables import OUT_OF_FOLD
from tapfm.evaluation.model_evaluation import (
    BaselinePredictions,
    EvaluatedTable,
    EvaluationSettings,
    evaluate_predictions,
)
from tapfm.evaluation.predictions import Prediction, read_predictions, write_predictions
from tapfm.results.document import Section
from tapfm.results.estimate import Estimate
from tapfm.results.table import Table
from tapfm.runs.cross_validation import EVALUATION_FOLDER, CrossValidationFolder
from tapfm.runs.data import RunData, complete_class_texts, read_run_data
from tapfm.runs.ensemble import write_ensemble
from tapfm.runs.evaluation_data import EvaluationRequest
from tapfm.runs.folder import FAILURE_COLUMNS, RunFolder
from tapfm.runs.model_folder import open_model_folder
from tapfm.runs.thresholds import choose_model_thresholds
from tapfm.runtime.csv_files import read_csv, write_csv
from tapfm.runtime.device_memory import release_cached_memory
from tapfm.runtime.devices import choose_device
from tapfm.runtime.files import digest_files
from tapfm.runtime.interrupts import StopSignalHandler
from tapfm.runtime.messages import format_command, format_count
from tapfm.runtime.output_folder import lock_folder, remove_unfinished_files
from tapfm.runtime.workers import choose_worker_count
from tapfm.tasks.catalog import target_arguments, target_kinds
from tapfm.tasks.label_columns import TargetRequest
from tapfm.tasks.target import BASELINE
from tapfm.workflows.evaluation_run import (
    BASELINE_PREDICTIONS_FILE,
    Evaluation,
    run_evaluation,
    write_description,
    write_results,
)
from tapfm.workflows.split import SplitOptions, create_splits, split_warnings

_MAX_LISTED = 10  # slides or patients in a message


@dataclass(frozen=True)
class FoldResult:
    """A fold: its run folder, and the evaluation of its model on its test slides."""

    folder: Path
    evaluation: Evaluation


@dataclass(frozen=True)
class CrossValidation:
    """Result of a cross-validation."""

    folder: Path  # also an ensemble of the models of all folds
    folds: tuple[FoldResult, ...]
    evaluation: Evaluation  # of the out-of-fold predictions of all folds
    allowed_failures: int

    @property
    def auc(self) -> dict[str, Estimate]:
        """AUC of each target on the out-of-fold predictions, with its confidence interval."""
        return self.evaluation.auc

    @property
    def failed(self) -> dict[str, str]:
        """Failed slides of all folds: the reason by slide_id."""
        return self.evaluation.failed

    @property
    def table(self) -> Table:
        """The AUCs of the folds, their mean, and the AUC of the out-of-fold predictions."""
        by_fold = {each.folder.name: each.evaluation.results for each in self.folds}
        return build_fold_table(by_fold, self.evaluation.results)


@dataclass(frozen=True)
class _Fold:
    """A fold to train."""

    number: int  # N of the column fold_N
    position: str  # such as "fold 2 of 5"
    config: RunConfig
    folder: Path  # run folder


def cross_validate(config: RunConfig, folds: int, folder: Path, *, resume: bool, console: Console) -> CrossValidation:
    """Train and evaluate a model for each fold, or resume this. Raises `Interrupted` after a signal."""
    files = CrossValidationFolder(folder, folds)
    config = _without_fold(config, console)
    with lock_folder(folder, "tapfm train --folds"), StopSignalHandler(console.print) as stop:
        remove_unfinished_files(folder)
        files.check(config, resume=resume)
        planned = _plan_folds(config, folds, files, console)
        _check_folds(planned, files, console)
        files.start(config)
        results = []
        for fold in planned:
            _stop_if_requested(stop, files, console)
            _train_fold(fold, files, console)
            results.append(_evaluate_fold(fold, files, console))
        _stop_if_requested(stop, files, console)
        write_ensemble(folder, [fold.folder for fold in planned], "folds")
        return _evaluate_out_of_fold(planned, results, files)


def _without_fold(config: RunConfig, console: Console) -> RunConfig:
    """Return the configuration without `cohort.fold`, because all folds are trained."""
    if config.cohort.fold is None:
        return config
    _print(console, f"cohort.fold = {config.cohort.fold} is not used: --folds trains every fold.")
    return _change_cohort(config, fold=None)


def _with_fold_table(config: RunConfig, table: Path, cohort: Cohort) -> RunConfig:
    """Return the configuration with the table of the new folds, which tapfm wrote: in UTF-8, and already joined.

    cohort: that of the original table, whose column of patients may be from the joined table.
    """
    column = cohort.patient_column if config.cohort.patient_column else None
    changes = {"encoding": None, "clini": None, "clam_splits": None, "patient_column": column}
    return _change_cohort(config, table=table.absolute(), **changes)


def _change_cohort(config: RunConfig, **changes: Path | str | int | None) -> RunConfig:
    return config.model_copy(update={"cohort": config.cohort.model_copy(update=changes)})


def _plan_folds(config: RunConfig, count: int, files: CrossValidationFolder, console: Console) -> list[_Fold]:
    """Return the folds of the cohort table. If it has none, create folds by patient and write them to folds.csv."""
    cohort = read_cohort(config.cohort.table, config.cohort.table_options)
    if fold_names(cohort):
        _check_number_of_folds(cohort, config, count)
    else:
        table_config = _with_fold_table(config, files.table, cohort)
        if files.is_started and files.table.is_file():
            _check_table_unchanged(cohort, config, table_config)
        else:
            _create_folds(cohort, config, count, files.table, console)
        config = table_config
        cohort = read_cohort(config.cohort.table, config.cohort.table_options)
    names = fold_names(cohort)
    _print(console, f"Folds: the columns {', '.join(names)} of {config.cohort.table}.")
    planned = []
    for position, name in enumerate(names, start=1):
        number = int(name.removeprefix("fold_"))
        fold_config = _change_cohort(config, fold=number)
        planned.append(_Fold(number, f"fold {position} of {count}", fold_config, files.run(number)))
    return planned


def _check_number_of_folds(cohort: Cohort, config: RunConfig, count: int) -> None:
    """Raise CohortError unless the cohort table has this number of folds."""
    names, table = fold_names(cohort), config.cohort.table
    if len(names) != count:
        raise CohortError(
            f"{table} has {format_count(len(names), 'fold')} ({', '.join(names)}), but --folds is {count}.",
            hint=f"Use the folds of the table: --folds {len(names)}\nOr use {_new_folds_hint(config, count)}",
        )


def _create_folds(cohort: Cohort, config: RunConfig, count: int, table: Path, console: Console) -> None:
    """Create folds by patient, and write the cohort table with them."""
    if any(row.split for row in cohort.rows):
        _print(
            console,
            f"The column split of {config.cohort.table} is not used: all {len(cohort):,} slides are in the folds, also "
            "its test slides and slides without a split.",
            "bold yellow",
        )
    options = SplitOptions(config.cohort.table, out=table, folds=count, seed=config.seed, force=True)
    request = TargetRequest(tuple(config.task.targets), config.class_texts)
    result = create_splits(options, config.cohort.table_options, request, console)
    _print(
        console,
        f"Created {count} folds by patient with seed {config.seed}, stratified by {', '.join(config.task.targets)}: "
        f"{table}",
    )
    for warning in split_warnings(result):
        _print(console, warning, "yellow")


def _check_table_unchanged(cohort: Cohort, config: RunConfig, table_config: RunConfig) -> None:
    """Raise RunError if the slides, patients or labels differ from those that the folds were created from."""
    table = table_config.cohort.table
    before = _list_labelled_rows(read_cohort(table, table_config.cohort.table_options), config)
    now = _list_labelled_rows(cohort, config)
    changed = [slide_id for slide_id in {**before, **now} if before.get(slide_id) != now.get(slide_id)]
    if changed:
        raise RunError(
            f"Slides, patients or labels of {config.cohort.table} have changed since the folds in {table} were "
            f"created: {format_names(changed, _MAX_LISTED)}.",
            hint="Restore the original table, or start a new cross-validation with another --out.",
        )


def _list_labelled_rows(cohort: Cohort, config: RunConfig) -> dict[str, tuple[str | None, ...]]:
    """Return patient and labels by slide id."""
    targets = config.task.targets
    return {row.slide_id: (row.patient_id, row.cohort, *map(row.labels.get, targets)) for row in cohort.rows}


def _check_folds(folds: Sequence[_Fold], files: CrossValidationFolder, console: Console) -> None:
    """Check the data of every fold before the first is trained, and that no patient is tested in two folds."""
    tested: dict[tuple[str | None, str], int] = {}
    repeated: dict[str, tuple[int, int]] = {}
    patients: set[tuple[str | None, str]] = set()
    for fold in folds:
        data = read_run_data(fold.config)
        run_folder = RunFolder(fold.folder, files.resume_command)
        if run_folder.has_run:
            run_folder.check_settings_and_slides_unchanged(complete_class_texts(fold.config, data), data)
        patients |= _find_patients(data)
        test_patients = _find_patients(data, TEST)
        if not test_patients:
            raise CohortError(
                f"{fold.config.cohort.table} has no labelled test slide in the column fold_{fold.number}.",
                hint=f"Each fold needs test slides. Use {_new_folds_hint(fold.config, len(folds))}",
            )
        for patient in sorted(test_patients, key=str):
            if (other := tested.setdefault(patient, fold.number)) != fold.number:
                repeated[patient[1]] = other, fold.number
    if repeated:
        listed = [f"{patient} (fold_{a} and fold_{b})" for patient, (a, b) in repeated.items()]
        new_folds = _new_folds_hint(folds[0].config, len(folds))
        raise CohortError(
            f"{format_count(len(repeated), 'patient')} of {folds[0].config.cohort.table} would be tested in two folds: "
            f"{format_names(listed, _MAX_LISTED)}.",
            hint=f"Each patient may be in the test split of one fold only. Use {new_folds}",
        )
    if untested := len(patients - tested.keys()):
        _print(
            console,
            f"{format_count(untested, 'patient')} in no test split: without an out-of-fold prediction.",
            "bold yellow",
        )


def _find_patients(data: RunData, split_name: str | None = None) -> set[tuple[str | None, str]]:
    """Return cohort and id of the patients of a split, or of all splits."""
    slides = data.slides if split_name is None else data.slides_in(split_name)
    return {(slide.row.cohort, slide.row.patient_id) for slide in slides}


def _new_folds_hint(config: RunConfig, count: int) -> str:
    """Return how to create other folds, as a phrase that follows "use"."""
    table = config.cohort.table
    out = table.with_name(f"{table.stem}-{count}-folds.csv")
    texts = {name: each for name, each in config.class_texts.items() if "negative" in each}
    options = [*config.cohort.table_options.command_arguments()]
    options += target_arguments(target_kinds(config.task.targets, texts))
    command = format_command("split", table, "--out", out, "--folds", str(count), "--force", *options)
    return f"new folds (--set cohort.table={out}), created by: {command}"


def _stop_if_requested(stop: StopSignalHandler, files: CrossValidationFolder, console: Console) -> None:
    """Raise `Interrupted` if a signal was received between two folds."""
    if (number := stop.signal_number()) is not None:
        _print(console, f"Stopped. The finished folds are saved. To resume: {files.resume_command}")
        raise Interrupted(number)


def _train_fold(fold: _Fold, files: CrossValidationFolder, console: Console) -> None:
    """Train a fold, or resume its training. A finished fold is not trained again."""
    title, machine = f"{fold.position[0].upper()}{fold.position[1:]}", fold.config.machine
    if files.is_finished(fold.number, machine.allow_failures):
        _print(console, f"{title} is already trained: {fold.folder}", "bold")
        return
    _print(console, f"{title}: {fold.folder}", "bold")
    run_training(
        fold.config,
        read_run_data(fold.config),
        fold.folder,
        resume=True,
        workers=choose_worker_count(None if machine.workers == "auto" else machine.workers),
        console=console,
        resume_command=files.resume_command,
        label=fold.position,
    )
    release_cached_memory(choose_device(machine.device))


def _evaluate_fold(fold: _Fold, files: CrossValidationFolder, console: Console) -> FoldResult:
    """Evaluate the model of a fold on its test slides."""
    machine = fold.config.machine
    evaluation = run_evaluation(
        fold.folder,
        EvaluationRequest(),
        EvaluationSettings(),
        fold.folder / EVALUATION_FOLDER,
        device=machine.device,
        workers=choose_worker_count(None if machine.workers == "auto" else machine.workers),
        colours=files.colours,
        resume=True,
        console=console,
    )
    release_cached_memory(choose_device(machine.device))
    return FoldResult(fold.folder, evaluation)


def _evaluate_out_of_fold(
    folds: Sequence[_Fold], results: Sequence[FoldResult], files: CrossValidationFolder
) -> CrossValidation:
    """Compute and write the metrics of the out-of-fold predictions of all folds."""
    model, config = open_model_folder(files.path), folds[0].config
    settings = EvaluationSettings(config.selection.unit)
    predictions = tuple(each for result in results for each in result.evaluation.predictions)
    baseline = _pool_baseline(results)
    first = results[0].evaluation.results
    about = dict(first.about) | {
        **model.build_identifying_metadata(),
        "table": config.cohort.table.name,
        "table_sha256": digest_files(config.cohort.table, config.cohort.clini),
        "split": OUT_OF_FOLD,
    }
    without_label = tuple(each for result in results for each in result.evaluation.results.slides_without_label)
    write_description(files.path, about)
    evaluated = evaluate_predictions(
        predictions,
        model.targets,
        settings,
        thresholds=choose_model_thresholds(model, config.selection.unit, settings.sensitivity),
        groups=(),
        baseline=baseline,
        table=EvaluatedTable(config.cohort.table.name, (), without_label),
        about=about,
    )
    failures = _collect_failures(results)
    evaluated = replace(
        evaluated,
        failed={row["slide_id"]: row["reason"] for row in failures if row["problem"] == "failed"},
        tiles_skipped=sum(result.evaluation.results.tiles_skipped for result in results),
    )
    write_predictions(files.path / "predictions.csv", predictions, model.targets)
    write_csv(files.path / "failures.csv", FAILURE_COLUMNS, failures)
    result = CrossValidation(
        files.path,
        tuple(results),
        Evaluation(files.path, evaluated, predictions),
        config.machine.allow_failures,
    )
    section = Section("Folds", [result.table])
    write_results(files.path, evaluated, predictions, baseline.predictions, model.targets, [section])
    return result


def _pool_baseline(results: Sequence[FoldResult]) -> BaselinePredictions:
    """Return the predictions of the baseline of every fold for its test slides; none if a fold has no baseline."""
    pooled: list[Prediction] = []
    for result in results:
        file, note = result.evaluation.folder / BASELINE_PREDICTIONS_FILE, result.evaluation.results.baseline_note
        if not file.is_file():
            return BaselinePredictions((), (), f"{result.folder.name}: {note}")
        pooled += read_predictions(file)
    return BaselinePredictions(tuple(pooled), (), f"Each fold has its own {BASELINE}. {results[0].folder.name}: {note}")


def _collect_failures(results: Sequence[FoldResult]) -> list[dict[str, str]]:
    """Return the rows of failures.csv of all trainings and evaluations, with each failed slide once."""
    tables = [folder / "failures.csv" for each in results for folder in (each.folder, each.evaluation.folder)]
    rows = {(row["slide_id"], row["problem"]): row for table in tables for row in read_csv(table)}
    return list(rows.values())


def _print(console: Console, text: str, style: str = "") -> None:
    console.print(text, style=style, markup=False, soft_wrap=True)
