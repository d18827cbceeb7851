"""`tapfm train`: from a configuration to a run folder with a selected model."""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from rich.console import Console

from tapfm.adaptation.display import TrainingWatcher
from tapfm.adaptation.encoder_shape import EncoderShape
from tapfm.adaptation.from_config import build_learner, plan_of
from tapfm.adaptation.learner import Learner
from tapfm.adaptation.plan_text import describe
from tapfm.adaptation.trainer import fit
from tapfm.cohort.splits import TEST, TRAIN, VALIDATION
from tapfm.config.settings import RunConfig
from tapfm.encoders.catalog import encoder_card
from tapfm.errors import Interrupted, NonFiniteError, RunError, SlidesFailedError
from tapfm.evaluation.predictions import LabelledSlide, Scores, scores, write_predictions
from tapfm.inference.bags import Bags
from tapfm.inference.cohort import FinishedSlides, count_slide, predict_cohort
from tapfm.inference.predictor import Predictor
from tapfm.inference.slide_bags import make_bags
from tapfm.runs.curves import draw_curves
from tapfm.runs.data import RunData, labelled
from tapfm.runs.folder import RunFolder, environment_of
from tapfm.runs.progress import Progress
from tapfm.runs.summary import write_summary
from tapfm.runtime.devices import choose_device
from tapfm.runtime.files import sha256_of
from tapfm.runtime.interrupts import StopRequests
from tapfm.runtime.messages import command, counted
from tapfm.runtime.output_folder import locked, remove_unfinished
from tapfm.runtime.progress import Counter


@dataclass(frozen=True)
class RunResult:
    """What came of a run."""

    folder: Path
    best_epoch: int  # counted from 1
    scores: dict[str, Scores]  # by split, on all tiles
    failed: dict[str, str]


def train(config: RunConfig, data: RunData, folder: Path, *, resume: bool, workers: int, console: Console) -> RunResult:
    """Train, or go on where the run in the folder is; then predict validation and test slides on all tiles.

    Raises `Interrupted` when a signal asked it to stop; the run is saved then.
    """
    run_folder = RunFolder(folder)
    with locked(folder, "tapfm train"), StopRequests(console.print) as stop:
        remove_unfinished(folder, folder / "checkpoints")
        refuse_wrong_start(run_folder, config, data, resume=resume)
        config = as_it_was_saved(run_folder, config)
        device = choose_device(config.machine.device)
        learner, weights_sha256, plan = build_learner(config, data, device)
        learner.shrunk = partial(say_that_memory_ended, console)
        if run_folder.begun:
            run_folder.refuse_other_weights(weights_sha256)
        progress = run_folder.load_progress(learner) or Progress()
        if not progress.finished and len(progress.failed) > config.machine.allow_failures:
            progress.forget_failures()  # gone on with without leave to fail: they were mended, or will fail again
        progress.failed |= data.failed
        if not progress.finished:
            run_folder.check_space(learner)
        tiles = data.slides[0].tiles
        laid = None if tiles is None else tiles.laid
        environment = environment_of(device, weights_sha256, features_made_by(data), laid)
        if run_folder.begun:
            run_folder.note_environment(environment)
        else:
            run_folder.begin(config, data, environment)
        say_what_begins(config, data, device, learner, console)
        if plan is not None and learner.model.encoder is not None:
            for line in describe(plan, EncoderShape.of(learner.model.encoder)):
                console.print(f"  {line}", markup=False, soft_wrap=True)
        if progress.finished:
            console.print("The run is finished; its predictions are looked at again.")
        elif progress.step:
            console.print(f"Going on at epoch {progress.epoch + 1}, after {counted(progress.step, 'step')}.")
        training, validation, test = (labelled(data.of(split)) for split in (TRAIN, VALIDATION, TEST))
        try:
            if not progress.finished:
                bags = bags_of_run(config, data, learner, workers)
                watcher = TrainingWatcher(console, config.schedule.epochs, len(training), len(validation), folder)
                with closing(watcher) as seen:
                    fit(
                        learner,
                        bags,
                        training,
                        validation,
                        plan_of(config),
                        run_folder,
                        seen,
                        progress=progress,
                        asked_to_stop=stop.asked,
                    )
            say_what_was_kept(progress, config, console)
            held_out = {VALIDATION: validation, TEST: test}
            return conclude(config, data, learner, run_folder, progress, held_out, workers, stop, console)
        except SlidesFailedError as error:
            go_on = f"{resume_command(folder)} --allow-failures {len(progress.failed)}"
            raise SlidesFailedError(error.message, hint=f"Mend them, or go on without them: {go_on}") from error
        except NonFiniteError as error:
            hint = f"{error.hint}\nThat makes it another run: give a new --out."
            raise NonFiniteError(error.message, hint=hint) from error
        except Interrupted:
            draw_run(run_folder, config, progress)
            console.print(f"Stopped and saved. To go on: {resume_command(folder)}", soft_wrap=True, markup=False)
            raise


def as_it_was_saved(run_folder: RunFolder, config: RunConfig) -> RunConfig:
    """Let a run that goes on keep the form of its moments, if that is left open: less of the GPU may be free now."""
    if config.optimiser.moments != "auto" or not run_folder.last.exists():
        return config
    moments = run_folder.saved_moments()
    return config.model_copy(update={"optimiser": config.optimiser.model_copy(update={"moments": moments})})


def say_that_memory_ended(console: Console, tiles: int) -> None:
    """Tell of a step that started over."""
    console.print(
        f"The GPU's memory ended: the step starts over with {counted(tiles, 'tile')} at once, and so it goes on.",
        style="bold yellow",
        markup=False,
        soft_wrap=True,
    )


def refuse_wrong_start(run_folder: RunFolder, config: RunConfig, data: RunData, *, resume: bool) -> None:
    """Keep a run from being written over, or gone on with as another."""
    if not run_folder.begun:
        ours = ("environment.json", "split.csv")  # of a run that was stopped before it had begun
        names = [path.name for path in run_folder.folder.iterdir()]
        others = [name for name in names if not name.startswith(".") and name not in ours]
        if others:
            raise RunError(
                f"{run_folder.folder} has other files in it, such as {others[0]}.",
                hint="Give a new folder with --out, for example runs/first.",
            )
        return
    if not resume:
        finished = run_folder.last.exists() and run_folder.finished()
        go_on = f"Go on with it: {resume_command(run_folder.folder)}"
        raise RunError(
            f"{run_folder.folder} holds {'a finished run' if finished else 'a run'}.",
            hint=f"{export_command(run_folder.folder) if finished else go_on}\nOr begin another with --out.",
        )
    run_folder.refuse_changes(config, data, resume_command(run_folder.folder))


def resume_command(folder: Path) -> str:
    """Say what to type to go on; the folder has its own configuration."""
    return command("train", folder / "config.toml", "--out", folder, "--resume")


def export_command(folder: Path) -> str:
    """Say what to type when it is done."""
    return command("export", folder, "--out", Path("exported") / folder.name)


def conclude(
    config: RunConfig,
    data: RunData,
    learner: Learner,
    run_folder: RunFolder,
    progress: Progress,
    slides: dict[str, list[LabelledSlide]],
    workers: int,
    stop: StopRequests,
    console: Console,
) -> RunResult:
    """Predict with the best epoch's weights on all tiles, and write what the folder says of itself."""
    draw_run(run_folder, config, progress)
    best = run_folder.load_best(learner)
    digest = sha256_of(run_folder.best)
    learner.model.train(False)
    predictor = Predictor.of_training(learner.model, on_retry=console.print)
    result: dict[str, Scores] = {}
    for split, of_split in slides.items():
        wanted = [slide for slide in of_split if slide.slide_id not in progress.failed]
        if not wanted:
            continue
        finished = FinishedSlides(run_folder.folder / f".predictions-{split}.jsonl", digest)
        with closing(Counter(console, f"all tiles, {split}", len(wanted))) as counter:
            final = predict_cohort(
                predictor,
                bags_of_run(config, data, learner, workers),
                wanted,
                finished,
                on_slide=partial(count_slide, counter),
                stop_signal=stop.asked,
            )
        progress.failed |= final.failed
        progress.skipped |= final.skipped
        write_predictions(run_folder.folder / f"predictions-{split}.csv", final.predictions)
        result[split] = scores(final.predictions, data.targets, config.selection.unit)
    run_folder.write_tables(progress)
    write_summary(run_folder, config, data, progress, result)
    return RunResult(run_folder.folder, int(best["epoch"]), result, dict(progress.failed))


def bags_of_run(config: RunConfig, data: RunData, learner: Learner, workers: int) -> Bags:
    """Return the bags of all slides of a run."""
    model = learner.model
    return make_bags(
        data.slides,
        tile_px=None if model.encoder is None else model.encoder.tile_px,
        device=model.device,
        workers=workers,
        ahead_bytes=int(config.machine.read_ahead_gib * 2**30),
    )


def draw_run(run_folder: RunFolder, config: RunConfig, progress: Progress) -> None:
    """Draw the curves of the epochs there are."""
    if progress.history:
        best = None if progress.best_epoch is None else progress.best_epoch + 1
        made_of = f"{config.encoder.name}, {config.adaptation.method}, {config.aggregator.name}"
        title = f"{', '.join(config.task.targets)}: {made_of}"
        draw_curves(run_folder.folder / "curves.png", progress.history, best, title)


def say_what_begins(config: RunConfig, data: RunData, device: torch.device, learner: Learner, console: Console) -> None:
    """Tell what is about to be learnt, from what, and what is odd about it."""
    counts = ", ".join(f"{len(data.of(split)):,} {split}" for split in (TRAIN, VALIDATION, TEST))
    learning = sum(tensor.numel() for tensor in learner.weights().values())
    dtype = learner.optimisation.weights_dtype or learner.model.compute_dtype or torch.float32
    precision = str(dtype).removeprefix("torch.")
    lines = [
        f"{', '.join(data.targets)} from {counts} slides; {config.adaptation.method} with {config.aggregator.name}, "
        f"{config.encoder.name}; {learning / 1e6:,.2f} M parameters learn on {device} in {precision}."
    ]
    if data.without_label:
        lines.append(f"Without a label of these targets, and not used: {counted(len(data.without_label), 'slide')}.")
    if data.failed:
        lines.append(f"Without tiles, and left out: {counted(len(data.failed), 'slide')} (failures.csv).")
    if not data.of(VALIDATION):
        lines.append("There is no validation slide, so the last epoch will be kept.")
    elif lacking := [target for target in data.targets if not has_both_classes(data, target)]:
        lines.append(f"Validation has one class only of {', '.join(lacking)}: no AUC there.")
        if len(lacking) == len(data.targets):
            lines.append("So the epoch with the lowest validation loss will be kept.")
    lines += unnamed_encoder(config, data)
    sides = {slide.tiles.tile_px for slide in data.slides if slide.tiles is not None}
    if learner.model.encoder is not None and (other := sides - {learner.model.encoder.tile_px}):
        lines.append(f"Tiles of {', '.join(map(str, other))} px are read as {learner.model.encoder.tile_px} px.")
    for line in lines:
        console.print(line, markup=False, soft_wrap=True)


def has_both_classes(data: RunData, target: str) -> bool:
    """Say whether the validation slides have a positive and a negative."""
    return {0, 1} <= {slide.labels[target] for slide in data.of(VALIDATION)}


def features_made_by(data: RunData) -> str | None:
    """Say whose files of features were learnt from, where they are not ours."""
    features = data.slides[0].features
    if features is None or features.facts.origin == "tapfm":
        return None
    return f"{features.facts.origin}, {features.facts.encoder or 'encoder not named'}"


def unnamed_encoder(config: RunConfig, data: RunData) -> list[str]:
    """Tell when files of features do not say which encoder made them."""
    features = data.slides[0].features
    if features is None or features.facts.origin == "tapfm":
        return []
    facts, card = features.facts, encoder_card(config.encoder.name)
    said = f"say '{facts.encoder}'" if facts.encoder else "do not say which encoder made them"
    line = f"These features ({facts.origin}) {said}; they are taken for those of {card.name}, as configured."
    if facts.size != card.feature_size:
        line += f" It makes {card.feature_size:,} numbers of a tile, and they have {facts.size:,}: it was another one."
    return [line]


def say_what_was_kept(progress: Progress, config: RunConfig, console: Console) -> None:
    """Tell which epoch is the best."""
    early = (
        f" (no better one in {config.selection.patience} epochs, so it ended early)" if progress.stopped_early else ""
    )
    console.print(f"Kept: epoch {(progress.best_epoch or 0) + 1} of {len(progress.history)}{early}.", markup=False)


def show(result: RunResult, console: Console) -> None:
    """Tell the final figures and where to look."""
    for split, of_split in result.scores.items():
        values = ", ".join(
            f"{target} {'-' if value is None else f'{value:.3f}'}" for target, value in of_split.auc.items()
        )
        console.print(f"AUC on {counted(of_split.count, of_split.unit)} of {split}, all tiles: {values}", markup=False)
        for target, why in of_split.why_undefined.items():
            console.print(f"  no AUC of {target}: {why}", markup=False)
    if result.failed:
        console.print(f"{counted(len(result.failed), 'slide')} failed: {result.folder}/failures.csv", markup=False)
    console.print(f"Look at it: {result.folder}/summary.md and curves.png", markup=False, soft_wrap=True)
    following = command("evaluate", result.folder, "--out", Path("evaluations") / result.folder.name)
    console.print(f"Next: {following}", markup=False, soft_wrap=True)
    console.print(f"To use it elsewhere: {export_command(result.folder)}", markup=False, soft_wrap=True)
