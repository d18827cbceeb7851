"""The commands as Python functions: what the command line does, with the same names and defaults."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Console

from tapfm.cohort.manifest import read_cohort
from tapfm.config.loading import load_config, merge, resolve, resolve_paths
from tapfm.config.settings import RunConfig
from tapfm.config.study import StudyConfig, load_study
from tapfm.encoders.weights import load_encoder
from tapfm.errors import Interrupted
from tapfm.evaluation.comparing import Comparison
from tapfm.evaluation.results import settings_of
from tapfm.inference import cohort_embedding as embed_slides
from tapfm.inference.embedding_jobs import Settings
from tapfm.inference.embedding_outcomes import Report as EmbedReport
from tapfm.inference.precision import choose_inference_precision
from tapfm.prediction.drawing import Wishes
from tapfm.report import making as report_pages
from tapfm.report.slide_pictures import Settings as PictureSettings
from tapfm.runs import export as export_model
from tapfm.runs.data import read_data
from tapfm.runs.evaluation_data import Choice
from tapfm.runs.saved_model import DESCRIPTION, SavedModel, load_export, load_run
from tapfm.runtime.devices import choose_device
from tapfm.runtime.workers import available_cores
from tapfm.study import runner as study_runner
from tapfm.study.folder import StudyFolder
from tapfm.study.report import write_report
from tapfm.tiles import cohort_tiling as tile_slides
from tapfm.tiles.grid import TileSpec
from tapfm.tiles.store import Layout
from tapfm.workflows import compare as compare_models
from tapfm.workflows import evaluate as evaluate_model
from tapfm.workflows import predict as predicting
from tapfm.workflows import split as split_cohort
from tapfm.workflows import train as train_model
from tapfm.workflows.evaluate import Evaluation
from tapfm.workflows.predict import Predicted
from tapfm.workflows.train import RunResult

Where = str | Path


def split(
    cohort: Where,
    out: Where,
    *,
    fractions: tuple[float, float, float] = (0.8, 0.1, 0.1),
    folds: int | None = None,
    seed: int = 0,
    targets: Sequence[str] | None = None,
    force: bool = False,
) -> split_cohort.Made:
    """Split a cohort by patient, as `tapfm split`."""
    return split_cohort.split_cohort(
        Path(cohort),
        Path(out),
        slides_folder=None,
        targets=targets,
        fractions=fractions,
        folds=folds,
        seed=seed,
        force=force,
        workers=available_cores(),
        console=messages(),
    )


def tile(
    cohort: Where,
    out: Where,
    *,
    spec: TileSpec = TileSpec(),  # noqa: B008 - frozen
    layout: Layout = "trident",
    only: Collection[str] | None = None,
    workers: int | None = None,
    force: bool = False,
) -> tile_slides.Report:
    """Find tissue and lay tiles, as `tapfm tile`."""
    return tile_slides.tile_cohort(
        read_cohort(Path(cohort)).rows,
        Path(out),
        spec,
        only=only,
        layout=layout,
        tissue=None,
        workers=workers or available_cores(),
        force=force,
        console=messages(),
    )


def embed(
    cohort: Where,
    encoder: str,
    out: Where,
    *,
    tiles: Where = "tiles",
    weights: Where | None = None,
    device: str = "auto",
    precision: str = "auto",
    batch: int | None = None,
    compiled: bool | None = None,
    workers: int | None = None,
    force: bool = False,
) -> EmbedReport:
    """Store features and raw attention, as `tapfm embed`."""
    place = choose_device(device)
    loaded = load_encoder(encoder, weights=weights)
    loaded.encoder.to(place)
    return embed_slides.embed_cohort(
        read_cohort(Path(cohort)).rows,
        Path(tiles),
        Path(out),
        Settings(loaded, choose_inference_precision(precision, place), batch, compiled),
        tile_command=f"tapfm tile {cohort} --out {tiles}",
        only=None,
        workers=available_cores() if workers is None else workers,
        force=force,
        console=messages(),
    )


def configure(*files: Where, **settings: Any) -> RunConfig:
    """Make a configuration, from RUN.toml or from nothing, with settings such as `schedule={"epochs": 5}`."""
    tables: dict[str, Any] = {}
    for file in files:
        merge(tables, load_config(Path(file)).as_tables())
    given = {name: dict(value) if isinstance(value, Mapping) else value for name, value in settings.items()}
    for section in given.values():
        if isinstance(section, dict):
            section.update({key: str(value) for key, value in section.items() if isinstance(value, Path)})
    resolve_paths(given, Path())
    merge(tables, given)
    return resolve(tables)


def train(config: RunConfig, out: Where, *, resume: bool = False) -> RunResult:
    """Train, as `tapfm train`; Ctrl-C saves first."""
    workers = config.machine.workers
    readers = available_cores() if workers == "auto" else workers
    data = read_data(config)
    try:
        return train_model.train(config, data, Path(out), resume=resume, workers=readers, console=messages())
    except Interrupted as stopped:
        raise KeyboardInterrupt from stopped


def evaluate(
    model: Where,
    out: Where,
    *,
    cohort: Where | None = None,
    slides: Where | None = None,
    tiles: Where | None = None,
    features: Where | None = None,
    split: str | None = None,
    unit: str | None = None,
    sensitivity: float = 0.9,
    by: Sequence[str] = (),
    resamples: int = 2000,
    colours: Where | None = None,
    device: str = "auto",
    workers: int | None = None,
    allow_overlap: bool = False,
    resume: bool = False,
) -> Evaluation:
    """Evaluate a run, an export or an ensemble, as `tapfm evaluate`; Ctrl-C keeps what is done."""
    table, slides_folder, tiles_folder, features_folder, colours_file = (
        None if each is None else Path(each) for each in (cohort, slides, tiles, features, colours)
    )
    try:
        return evaluate_model.evaluate(
            Path(model),
            Choice(table, slides_folder, tiles_folder, features_folder, split, allow_overlap),
            settings_of(unit, sensitivity, by, resamples),
            Path(out),
            device=device,
            workers=available_cores() if workers is None else workers,
            colours=colours_file,
            resume=resume,
            console=messages(),
        )
    except Interrupted as stopped:
        raise KeyboardInterrupt from stopped


def compare(
    *models: Where,
    out: Where,
    unit: str = "slide",
    against: str | None = None,
    split: str = "test",
    resamples: int = 2000,
) -> Comparison:
    """Compare runs, evaluations or tables of predictions, each as PATH or "NAME=PATH", as `tapfm compare`."""
    return compare_models.compare_models(
        [str(each) for each in models], Path(out), unit=unit, against=against, split=split, resamples=resamples
    )


def study(
    study: Where | StudyConfig, out: Where, *, resume: bool = False, only: Sequence[str] = (), jobs: int = 1
) -> study_runner.Outcome:
    """Run a study and make its tables, as `tapfm study`; Ctrl-C keeps what is done."""
    config = study if isinstance(study, StudyConfig) else load_study(Path(study))
    outcome = study_runner.conduct(config, Path(out), resume=resume, only=only, console=messages(), jobs=jobs)
    if outcome.stopped_by is not None:
        raise KeyboardInterrupt
    folder = StudyFolder(Path(out))
    write_report(config, folder, list(study_runner.read_status(folder).values()))
    return outcome


def predict(
    model: Where,
    slides: Where | Sequence[Where],
    out: Where,
    *,
    heatmaps: bool = False,
    geojson: bool = False,
    tiles: Where | None = None,
    split: str | None = None,
    sensitivity: float | None = None,
    batch: int | None = None,
    device: str = "auto",
    precision: str = "auto",
    compiled: bool | None = None,
    workers: int | None = None,
    resume: bool = False,
) -> Predicted:
    """Predict whole slides, as `tapfm predict`; slides that failed are in `.failed`. Ctrl-C keeps what is done."""
    sources = [slides] if isinstance(slides, str | Path) else slides
    try:
        return predicting.predict(
            Path(model),
            [Path(source) for source in sources],
            Path(out),
            tiles=None if tiles is None else Path(tiles),
            split=split,
            wishes=Wishes(heatmaps, geojson),
            batch=batch,
            sensitivity=sensitivity,
            device=device,
            precision=precision,
            compiled=compiled,
            workers=available_cores() if workers is None else workers,
            resume=resume,
            console=messages(),
        )
    except Interrupted as stopped:
        raise KeyboardInterrupt from stopped


def export(
    run: Where,
    out: Where,
    *,
    push_to_hub: str | None = None,
    public: bool = False,
    despite_no_derivatives: bool = False,
    force: bool = False,
) -> None:
    """Write the adapted encoder for timm, the aggregator and a model card, as `tapfm export`."""
    export_model.export_run(
        Path(run),
        Path(out),
        push_to=push_to_hub,
        despite_no_derivatives=despite_no_derivatives,
        private=not public,
        force=force,
        console=messages(),
    )


def report(
    *sources: Where,
    out: Where,
    evaluations: Sequence[Where] = (),
    predictions: Sequence[Where] = (),
    runs: Sequence[str] = (),
    slides: Where | None = None,
    heatmaps: int = 12,
    tiles: int = 12,
    most_mb: float = 20.0,
    title: str | None = None,
    resamples: int = 2000,
    force: bool = False,
) -> report_pages.Made:
    """Put all about runs or a study on one page, as `tapfm report`."""
    return report_pages.make_report(
        [Path(each) for each in sources],
        Path(out),
        report_pages.Asked(
            evaluations=tuple(map(Path, evaluations)),
            predictions=tuple(map(Path, predictions)),
            runs=tuple(runs),
            title=title,
            pictures=PictureSettings(heatmaps, tiles, None if slides is None else Path(slides)),
            most_bytes=round(most_mb * 1e6),
            resamples=resamples,
            force=force,
        ),
        console=messages(),
        today=datetime.now(UTC).date(),
    )


def load(folder: Where, device: str = "auto") -> SavedModel:
    """Load the model of a run, or an exported one."""
    folder = Path(folder)
    return (load_export if (folder / DESCRIPTION).exists() else load_run)(folder, choose_device(device))


def messages() -> Console:
    """Say how it goes where the command line does."""
    return Console(stderr=True, highlight=False)
