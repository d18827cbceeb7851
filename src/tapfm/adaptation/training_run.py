"""A training run: train with a configuration, and write a run folder with the best weights and their predictions."""

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
from tapfm.encoders.catalog import find_encoder_card
from tapfm.errors import Interrupted, NonFiniteError, RunError, SlidesFailedError
from tapfm.evaluation.predictions import AucScores, LabelledSlide, compute_scores, write_predictions
from tapfm.inference.bags import Bags
from tapfm.inference.cohort import FinishedSlides, count_slide, predict_cohort
from tapfm.inference.predictor import Predictor
from tapfm.inference.slide_bags import make_bags
from tapfm.results.figure_drawing import write_png
from tapfm.runs.curves import build_training_figure
from tapfm.runs.data import RunData, complete_class_texts, list_labelled_slides
from tapfm.runs.folder import RunFolder, collect_environment
from tapfm.runs.run_progress import RunProgress
from tapfm.runs.summary import write_summary
from tapfm.runtime.devices import choose_device
from tapfm.runtime.files import file_sha256
from tapfm.runtime.interrupts import StopSignalHandler
from tapfm.runtime.messages import format_command, format_count
from tapfm.runtime.output_folder import check_no_other_files, lock_folder, remove_unfinished_files
from tapfm.runtime.progress import SlideProgress


@dataclass(frozen=True)
class TrainingResult:
    """Result of a training run."""

    folder: Path
    best_epoch: int  # counted from 1
    scores: dict[str, AucScores]  # by split, on all tiles
    failed: dict[str, str]  # reason by slide
    allowed_failures: int


def run_training(
    config: RunConfig,
    data: RunData,
    folder: Path,
    *,
    resume: bool,
    workers: int,
    console: Console,
    resume_command: str | None = None,
    label: str = "",
) -> TrainingResult:
    """Train, or resume the run in the folder. Then predict the validation and test slides with all tiles.

    Raises `Interrupted` after a signal; a checkpoint is saved before.

    resume_command: shown in messages; None for the command that resumes this run. label: shown with the progress.
    """
    run_folder, config = RunFolder(folder, resume_command), complete_class_texts(config, data)
    with lock_folder(folder, "tapfm train"), StopSignalHandler(console.print) as stop:
        remove_unfinished_files(folder, folder / "checkpoints")
        _check_run_folder(run_folder, config, data, resume=resume)
        config = _keep_saved_moments(run_folder, config)
        device = choose_device(config.machine.device)
        learner, weights_sha256, weights, plan = build_learner(config, data, device)
        learner.on_smaller_chunks = partial(_report_out_of_memory, console)
        if run_folder.has_run:
            run_folder.check_same_encoder_weights(weights_sha256)
        progress = run_folder.load_progress(learner) or RunProgress()
        if not progress.finished and len(progress.failed) > config.machine.allow_failures:
            progress.clear_failures()  # more failed slides than allowed: they are tried again
        progress.failed |= data.failed
        if not progress.finished:
            run_folder.check_disk_space(learner)
        tiles = data.slides[0].tiles
        tiling = None if tiles is None else tiles.tiling_settings
        environment = collect_environment(device, weights_sha256, weights, _describe_feature_source(data), tiling)
        if run_folder.has_run:
            run_folder.add_environment(environment)
        else:
            run_folder.create(config, data, environment)
        _print_start(config, data, device, learner, console)
        if plan is not None and learner.model.encoder is not None:
            for line in describe_plan(plan, EncoderShape.from_encoder(learner.model.encoder)):
                console.print(f"  {line}", markup=False, soft_wrap=True)
        training, validation, test = (
            list_labelled_slides(data.slides_in(split)) for split in (TRAIN, VALIDATION, TEST)
        )
        if progress.finished:
            console.print("Training is already finished. Only the predictions are completed and written.")
        elif progress.step:
            slides = format_count(len(training), "training slide")
            console.print(f"Resuming in epoch {progress.epoch + 1}, after {progress.position:,} of {slides}.")
        try:
            if not progress.finished:
                bags = _make_bags(config, data, learner, workers)
                display = TrainingDisplay(
                    console, config.schedule.epochs, len(training), len(validation), folder, label=label
                )
                with closing(display):
                    fit(
                        learner,
                        bags,
                        training,
                        validation,
                        build_training_settings(config),
                        run_folder,
                        display,
                        progress=progress,
                        stop_signal=stop.signal_number,
                    )
            _print_best_epoch(progress, config, console)
            slides_by_split = {VALIDATION: validation, TEST: test}
            return _predict_validation_and_test(
                config, data, learner, run_folder, progress, slides_by_split, workers, stop, console
            )
        except SlidesFailedError as error:
            command = f"{run_folder.resume_command} --allow-failures {len(progress.failed)}"
            raise SlidesFailedError(error.message, hint=f"Fix the slides, or resume without them: {command}") from error
        except NonFiniteError as error:
            hint = f"{error.hint}\nA run with other settings needs a new folder: pass a new --out."
            raise NonFiniteError(error.message, hint=hint) from error
        except Interrupted:
            _draw_curves(run_folder, config, progress)
            console.print(
                f"Stopped. The run is saved. To resume: {run_folder.resume_command}", soft_wrap=True, markup=False
            )
            raise


def _keep_saved_moments(run_folder: RunFolder, config: RunConfig) -> RunConfig:
    """If `optimiser.moments` is auto, use the moment format of the checkpoint: the free memory may differ now."""
    if config.optimiser.moments != "auto" or not run_folder.last_checkpoint.exists():
        return config
    moments = run_folder.read_adamw_moment_format()
    return config.model_copy(update={"optimiser": config.optimiser.model_copy(update={"moments": moments})})


def _report_out_of_memory(console: Console, tiles: int) -> None:
    console.print(
        f"GPU out of memory; retrying with {format_count(tiles, 'tile')} per chunk, also in later steps.",
        style="bold yellow",
        markup=False,
        soft_wrap=True,
    )


def _check_run_folder(run_folder: RunFolder, config: RunConfig, data: RunData, *, resume: bool) -> None:
    """Raise `RunError` if the folder has other files, a different run, or any run if `resume` is False."""
    if not run_folder.has_run:
        check_no_other_files(
            run_folder.folder,
            allowed=("environment.json", "split.csv"),  # left by a run that stopped before its first step
            hint="Pass a new folder, for example --out runs/first.",
        )
        return
    if not resume:
        finished = run_folder.last_checkpoint.exists() and run_folder.is_training_finished()
        export_hint = f"To export it: {_export_command(run_folder.folder)}"
        resume_hint = f"To resume it: {run_folder.resume_command}"
        raise RunError(
            f"{run_folder.folder} already contains {'a finished run' if finished else 'a run'}.",
            hint=f"{export_hint if finished else resume_hint}\nTo start a new run, pass a new --out.",
        )
    run_folder.check_settings_and_slides_unchanged(config, data)


def _export_command(folder: Path) -> str:
    return format_command("export", folder, "--out", Path("exported") / folder.name)


def _predict_validation_and_test(
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
    """Predict with the best weights and all tiles. Write predictions, tables and the summary."""
    _draw_curves(run_folder, config, progress)
    best = run_folder.load_best(learner)
    digest = file_sha256(run_folder.best_checkpoint)
    learner.model.train(False)
    predictor = Predictor.for_training(learner.model, on_retry=console.print)
    result: dict[str, AucScores] = {}
    for split, split_slides in slides.items():
        remaining = [slide for slide in split_slides if slide.slide_id not in progress.failed]
        if not remaining:
            continue
        finished = FinishedSlides(run_folder.folder / f".predictions-{split}.jsonl", digest)
        with SlideProgress(console, f"predicting {split}", slides=len(remaining)) as slides_done:
            final = predict_cohort(
                predictor,
                _make_bags(config, data, learner, workers),
                remaining,
                finished,
                on_slide=partial(count_slide, slides_done),
                stop_signal=stop.signal_number,
            )
        progress.failed |= final.failed
        progress.skipped |= final.skipped
        write_predictions(run_folder.folder / f"predictions-{split}.csv", final.predictions, data.targets)
        result[split] = compute_scores(final.predictions, data.targets, config.selection.unit)
    run_folder.write_history_and_failures(progress)
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
        model = f"{config.encoder.name}, {config.adaptation.method}, {config.aggregator.name}"
        title = f"{', '.join(config.task.targets)}: {model}"
        write_png(run_folder.folder / "curves.png", build_training_figure(progress.history, best, title))


def _print_start(config: RunConfig, data: RunData, device: torch.device, learner: Learner, console: Console) -> None:
    """Print targets, slides, model and device, and warnings about the data."""
    counts = ", ".join(f"{len(data.slides_in(split)):,} {split}" for split in (TRAIN, VALIDATION, TEST))
    trainable = sum(tensor.numel() for tensor in learner.weights().values())
    dtype = learner.optimiser_settings.weights_dtype or learner.model.compute_dtype or torch.float32
    precision = str(dtype).removeprefix("torch.")
    lines = [
        f"Target{'s'[: len(data.targets) > 1]} {', '.join(data.targets)}: {counts} slides. Method "
        f"{config.adaptation.method}, encoder {config.encoder.name}, aggregator {config.aggregator.name}; "
        f"{trainable:,} trainable parameters on {device} in {precision}."
    ]
    if data.slides_without_label:
        count = format_count(len(data.slides_without_label), "slide")
        lines.append(f"{count} without a label for these targets will not be used.")
    if data.failed:
        lines.append(
            f"{format_count(len(data.failed), 'slide')} without slide file, tiles or features will not be used, see "
            "failures.csv."
        )
    if not data.slides_in(VALIDATION):
        lines.append("There are no validation slides, so the last epoch will be used.")
    elif one_class_targets := [target for target in data.targets if not _validation_has_both_classes(data, target)]:
        lines.append(
            f"No validation AUC for {', '.join(one_class_targets)}: the validation slides do not have both classes."
        )
        if len(one_class_targets) == len(data.targets):
            lines.append("The epoch with the lowest validation loss will be used.")
    lines += _foreign_feature_warnings(config, data)
    sides = {slide.tiles.tile_px for slide in data.slides if slide.tiles is not None}
    if learner.model.encoder is not None and (other := sides - {learner.model.encoder.tile_px}):
        lines.append(f"Tiles of {', '.join(map(str, other))} px will be resized to {learner.model.encoder.tile_px} px.")
    for line in [*data.notes, *lines]:
        console.print(line, markup=False, soft_wrap=True)
    for warning in data.warnings:
        console.print(f"WARNING: {warning}", style="bold yellow", markup=False, soft_wrap=True)


def _validation_has_both_classes(data: RunData, target: str) -> bool:
    return not data.targets[target].missing_class([slide.labels[target] for slide in data.slides_in(VALIDATION)])


def _describe_feature_source(data: RunData) -> str | None:
    """Return the tool and encoder that created the feature files. None if tapfm did."""
    features = data.slides[0].features
    if features is None or features.metadata.origin == "tapfm":
        return None
    return f"{features.metadata.origin}, {features.metadata.encoder or 'encoder unknown'}"


def _foreign_feature_warnings(config: RunConfig, data: RunData) -> list[str]:
    """Return a warning about feature files of another tool, whose encoder cannot be checked."""
    features = data.slides[0].features
    if features is None or features.metadata.origin == "tapfm":
        return []
    metadata, card = features.metadata, find_encoder_card(config.encoder.name)
    named = f"name the encoder '{metadata.encoder}'" if metadata.encoder else "do not name their encoder"
    return [f"The feature files ({metadata.origin}) {named}. They are used as features of {card.name} (encoder.name)."]


def _print_best_epoch(progress: RunProgress, config: RunConfig, console: Console) -> None:
    early = ""
    if progress.stopped_early:
        early = f" (early stopping: no better epoch in {format_count(config.selection.patience, 'epoch')})"
    epoch = f"{(progress.best_epoch or 0) + 1} of {len(progress.history)}"
    if progress.selected_by == "last":
        console.print(
            f"Selected epoch: {epoch}, the last one, because no validation slide was predicted.", markup=False
        )
    else:
        console.print(f"Best epoch: {epoch}{early}.", markup=False)
