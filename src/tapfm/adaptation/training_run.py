"""A training run: from a configuration to a run folder with the best epoch's weights and their predictions."""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from rich.console import Console

from tapfm.adaptation.display import TrainingDisplay
from tapfm.adaptation.encoder_shape import EncoderShape
from tapfm.adaptation.from_config import build_learner, build_training_settings
from tapfm.adaptation.learner import Learner
from tapfm.adaptation.plan_text import describe_plan
from tapfm.adaptation.trainer import fit
from tapfm.cohort.splits import TEST, TRAIN, VALIDATION
from tapfm.config.settings import RunConfig
from tapfm.encoders.catalog import encoder_card
from tapfm.errors import Interrupted, NonFiniteError, RunError, SlidesFailedError
from tapfm.evaluation.predictions import AucScores, LabelledSlide, compute_scores, write_predictions
from tapfm.inference.bags import Bags
from tapfm.inference.cohort import FinishedSlides, count_slide, predict_cohort
from tapfm.inference.predictor import Predictor
from tapfm.inference.slide_bags import make_bags
from tapfm.results.drawing import write_png
from tapfm.runs.curves import training_figure
from tapfm.runs.data import RunData, labelled_slides
from tapfm.runs.folder import RunFolder, describe_environment
from tapfm.runs.progress import RunProgress
from tapfm.runs.summary import write_summary
from tapfm.runtime.devices import choose_device
from tapfm.runtime.files import file_sha256
from tapfm.runtime.interrupts import StopSignalHandler
from tapfm.runtime.messages import format_command, format_count
from tapfm.runtime.output_folder import check_no_other_files, lock_folder, remove_unfinished
from tapfm.runtime.progress import SlideProgress


@dataclass(frozen=True)
class TrainingResult:
    """Result of a training run."""

    folder: Path
    best_epoch: int  # counted from 1
    scores: dict[str, AucScores]  # by split, on all tiles
    failed: dict[str, str]  # why each slide failed
    allowed_failures: int


def run_training(
    config: RunConfig, data: RunData, folder: Path, *, resume: bool, workers: int, console: Console
) -> TrainingResult:
    """Train, or resume the run in the folder; then predict validation and test slides on all tiles.

    Raises `Interrupted` after a signal; the run is saved then.
    """
    run_folder = RunFolder(folder)
    with lock_folder(folder, "tapfm train"), StopSignalHandler(console.print) as stop:
        remove_unfinished(folder, folder / "checkpoints")
        _refuse_wrong_start(run_folder, config, data, resume=resume)
        config = _keep_saved_moments(run_folder, config)
        device = choose_device(config.machine.device)
        learner, weights_sha256, plan = build_learner(config, data, device)
        learner.on_smaller_chunks = partial(_report_out_of_memory, console)
        if run_folder.has_run:
            run_folder.check_same_weights(weights_sha256)
        progress = run_folder.load_progress(learner) or RunProgress()
        if not progress.finished and len(progress.failed) > config.machine.allow_failures:
            progress.clear_failures()  # resumed without --allow-failures: they were fixed, or will fail again
        progress.failed |= data.failed
        if not progress.finished:
            run_folder.check_disk_space(learner)
        tiles = data.slides[0].tiles
        laid = None if tiles is None else tiles.tiling_settings
        environment = describe_environment(device, weights_sha256, _describe_feature_source(data), laid)
        if run_folder.has_run:
            run_folder.add_environment(environment)
        else:
            run_folder.create(config, data, environment)
        _print_start(config, data, device, learner, console)
        if plan is not None and learner.model.encoder is not None:
            for line in describe_plan(plan, EncoderShape.of(learner.model.encoder)):
                console.print(f"  {line}", markup=False, soft_wrap=True)
        if progress.finished:
            console.print("The run is finished; its predictions are written again.")
        elif progress.step:
            console.print(f"Resuming in epoch {progress.epoch + 1}, after {format_count(progress.step, 'step')}.")
        training, validation, test = (labelled_slides(data.slides_in(split)) for split in (TRAIN, VALIDATION, TEST))
        try:
            if not progress.finished:
                bags = _make_bags(config, data, learner, workers)
                listener = TrainingDisplay(console, config.schedule.epochs, len(training), len(validation), folder)
                with closing(listener) as seen:
                    fit(
                        learner,
                        bags,
                        training,
                        validation,
                        build_training_settings(config),
                        run_folder,
                        seen,
                        progress=progress,
                        stop_signal=stop.signal_number,
                    )
            _print_kept_epoch(progress, config, console)
            held_out = {VALIDATION: validation, TEST: test}
            return _predict_held_out(config, data, learner, run_folder, progress, held_out, workers, stop, console)
        except SlidesFailedError as error:
            without = f"{_resume_command(folder)} --allow-failures {len(progress.failed)}"
            raise SlidesFailedError(error.message, hint=f"Fix them, or resume without them: {without}") from error
        except NonFiniteError as error:
            hint = f"{error.hint}\nOther settings make it another run: give a new --out."
            raise NonFiniteError(error.message, hint=hint) from error
        except Interrupted:
            _draw_curves(run_folder, config, progress)
            console.print(f"Stopped and saved. To resume: {_resume_command(folder)}", soft_wrap=True, markup=False)
            raise


def _keep_saved_moments(run_folder: RunFolder, config: RunConfig) -> RunConfig:
    """Keep the saved precision of the moments of a resumed run, if it is auto: less GPU memory may be free now."""
    if config.optimiser.moments != "auto" or not run_folder.last.exists():
        return config
    moments = run_folder.saved_moments()
    return config.model_copy(update={"optimiser": config.optimiser.model_copy(update={"moments": moments})})


def _report_out_of_memory(console: Console, tiles: int) -> None:
    console.print(
        f"GPU out of memory; retrying the step, and continuing, with {format_count(tiles, 'tile')} per chunk.",
        style="bold yellow",
        markup=False,
        soft_wrap=True,
    )


def _refuse_wrong_start(run_folder: RunFolder, config: RunConfig, data: RunData, *, resume: bool) -> None:
    """Refuse to overwrite a run, or to resume it with different settings."""
    if not run_folder.has_run:
        check_no_other_files(
            run_folder.folder,
            allowed=("environment.json", "split.csv"),  # of a run that was stopped before its first step
            hint="Give a new folder with --out, for example runs/first.",
        )
        return
    if not resume:
        finished = run_folder.last.exists() and run_folder.finished()
        resuming = f"Resume it: {_resume_command(run_folder.folder)}"
        raise RunError(
            f"{run_folder.folder} holds {'a finished run' if finished else 'a run'}.",
            hint=f"{_export_command(run_folder.folder) if finished else resuming}\nOr start another with --out.",
        )
    run_folder.check_unchanged(config, data, _resume_command(run_folder.folder))


def _resume_command(folder: Path) -> str:
    """Return the command that resumes a run; the folder has its own configuration."""
    return format_command("train", folder / "config.toml", "--out", folder, "--resume")


def _export_command(folder: Path) -> str:
    """Return the command that exports a run."""
    return format_command("export", folder, "--out", Path("exported") / folder.name)


def _predict_held_out(
    config: RunConfig,
    data: RunData,
    learner: Learner,
    run_folder: RunFolder,
    progress: RunProgress,
    slides: dict[str, list[LabelledSlide]],
    workers: int,
    stop: StopSignalHandler,
    console: Console,
) -> TrainingResult:
    """Predict with the best epoch's weights on all tiles; write tables and summary."""
    _draw_curves(run_folder, config, progress)
    best = run_folder.load_best(learner)
    digest = file_sha256(run_folder.best)
    learner.model.train(False)
    predictor = Predictor.for_training(learner.model, on_retry=console.print)
    result: dict[str, AucScores] = {}
    for split, of_split in slides.items():
        wanted = [slide for slide in of_split if slide.slide_id not in progress.failed]
        if not wanted:
            continue
        finished = FinishedSlides(run_folder.folder / f".predictions-{split}.jsonl", digest)
        with SlideProgress(console, f"all tiles, {split}", slides=len(wanted)) as slides_done:
            final = predict_cohort(
                predictor,
                _make_bags(config, data, learner, workers),
                wanted,
                finished,
                on_slide=partial(count_slide, slides_done),
                stop_signal=stop.signal_number,
            )
        progress.failed |= final.failed
        progress.skipped |= final.skipped
        write_predictions(run_folder.folder / f"predictions-{split}.csv", final.predictions, data.targets)
        result[split] = compute_scores(final.predictions, data.targets, config.selection.unit)
    run_folder.write_tables(progress)
    write_summary(run_folder, config, data, progress, result)
    return TrainingResult(
        run_folder.folder, int(best["epoch"]), result, dict(progress.failed), config.machine.allow_failures
    )


def _make_bags(config: RunConfig, data: RunData, learner: Learner, workers: int) -> Bags:
    model = learner.model
    return make_bags(
        data.slides,
        tile_px=None if model.encoder is None else model.encoder.tile_px,
        device=model.device,
        workers=workers,
        prefetch_bytes=int(config.machine.prefetch_gib * 2**30),
    )


def _draw_curves(run_folder: RunFolder, config: RunConfig, progress: RunProgress) -> None:
    if progress.history:
        best = None if progress.best_epoch is None else progress.best_epoch + 1
        made_of = f"{config.encoder.name}, {config.adaptation.method}, {config.aggregator.name}"
        title = f"{', '.join(config.task.targets)}: {made_of}"
        write_png(run_folder.folder / "curves.png", training_figure(progress.history, best, title))


def _print_start(config: RunConfig, data: RunData, device: torch.device, learner: Learner, console: Console) -> None:
    """Print what is about to be trained on what, and what to know about it."""
    counts = ", ".join(f"{len(data.slides_in(split)):,} {split}" for split in (TRAIN, VALIDATION, TEST))
    learning = sum(tensor.numel() for tensor in learner.weights().values())
    dtype = learner.optimiser_settings.weights_dtype or learner.model.compute_dtype or torch.float32
    precision = str(dtype).removeprefix("torch.")
    lines = [
        f"{', '.join(data.targets)} from {counts} slides; {config.adaptation.method} with {config.aggregator.name}, "
        f"{config.encoder.name}; {learning / 1e6:,.2f} M trainable parameters on {device} in {precision}."
    ]
    if data.without_label:
        lines.append(
            f"Not used, as they have no label of these targets: {format_count(len(data.without_label), 'slide')}."
        )
    if data.failed:
        lines.append(f"Left out, as they have no tiles: {format_count(len(data.failed), 'slide')} (failures.csv).")
    if not data.slides_in(VALIDATION):
        lines.append("There are no validation slides: the last epoch will be kept.")
    elif lacking := [target for target in data.targets if not _has_both_classes(data, target)]:
        lines.append(f"The validation slides have only one class of {', '.join(lacking)}: no AUC there.")
        if len(lacking) == len(data.targets):
            lines.append("So the epoch with the lowest validation loss will be kept.")
    lines += _foreign_feature_warnings(config, data)
    sides = {slide.tiles.tile_px for slide in data.slides if slide.tiles is not None}
    if learner.model.encoder is not None and (other := sides - {learner.model.encoder.tile_px}):
        lines.append(f"Tiles of {', '.join(map(str, other))} px are resized to {learner.model.encoder.tile_px} px.")
    for line in lines:
        console.print(line, markup=False, soft_wrap=True)


def _has_both_classes(data: RunData, target: str) -> bool:
    return not data.targets[target].missing_class([slide.labels[target] for slide in data.slides_in(VALIDATION)])


def _describe_feature_source(data: RunData) -> str | None:
    """Return which tool and encoder made the feature files; None if tapfm did."""
    features = data.slides[0].features
    if features is None or features.metadata.origin == "tapfm":
        return None
    return f"{features.metadata.origin}, {features.metadata.encoder or 'encoder not named'}"


def _foreign_feature_warnings(config: RunConfig, data: RunData) -> list[str]:
    """Return a warning when feature files of another tool do not tell which encoder made them."""
    features = data.slides[0].features
    if features is None or features.metadata.origin == "tapfm":
        return []
    facts, card = features.metadata, encoder_card(config.encoder.name)
    named = f"name '{facts.encoder}'" if facts.encoder else "do not name an encoder"
    line = f"The feature files ({facts.origin}) {named}; they are used as features of {card.name}, as configured."
    if facts.size != card.feature_size:
        line += (
            f" A tile of {card.name} has {card.feature_size:,} features, these have {facts.size:,}: it was another one."
        )
    return [line]


def _print_kept_epoch(progress: RunProgress, config: RunConfig, console: Console) -> None:
    early = f" (early stopping: none better in {config.selection.patience} epochs)" if progress.stopped_early else ""
    console.print(f"Kept: epoch {(progress.best_epoch or 0) + 1} of {len(progress.history)}{early}.", markup=False)
