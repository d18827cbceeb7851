"""An exported run: the adapted encoder as a timm folder, the aggregator beside it, and a model card."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch
from rich.console import Console
from torch import Tensor

from tapfm.cohort.splits import TEST, VALIDATION
from tapfm.contracts import EncodedTiles
from tapfm.encoders.inference import wrap_encoder
from tapfm.encoders.timm_folder import (
    CONFIG,
    WEIGHTS,
    check_timm_folder,
    refuse_foreign,
    timm_arguments,
    write_timm_folder,
)
from tapfm.errors import InputError, WeightsMismatchError
from tapfm.evaluation.predictions import AucScores, Unit, compute_scores, read_predictions
from tapfm.runs.checkpoint import save_checkpoint
from tapfm.runs.folder import RunFolder
from tapfm.runs.hub import push_folder, refuse_bad_repository, refuse_no_derivatives, refuse_without_token
from tapfm.runs.model import SlideModel
from tapfm.runs.model_card import model_card
from tapfm.runs.saved_model import AGGREGATOR, DESCRIPTION, SavedModel, load_aggregator, load_export, load_run
from tapfm.runs.thresholds import thresholds_to_export
from tapfm.runtime.files import write_atomically
from tapfm.runtime.output_folder import locked, refuse_other_files, remove_unfinished
from tapfm.runtime.seeding import rng_for
from tapfm.tasks.catalog import target_kinds
from tapfm.version import __version__

_TILES = 4  # of the slide that the check uses


def export_run(
    run: Path,
    out: Path,
    *,
    push_to: str | None,
    despite_no_derivatives: bool,
    private: bool,
    force: bool,
    console: Console,
) -> None:
    """Write the folder, check it by loading it again, and push it to the hub if `push_to` names a repository."""
    saved, run_folder = load_run(run), RunFolder(run)
    if push_to is not None:
        refuse_bad_repository(push_to)
        refuse_no_derivatives(saved.card, despite_no_derivatives=despite_no_derivatives)
        if not saved.description["encoder"]["adapted"]:
            raise InputError(
                f"{run} has a fixed encoder, so there is no adapted one to push.",
                hint="Without --push-to-hub its aggregator is exported.",
            )
        refuse_without_token()
    refuse_foreign(out)
    if not (out / AGGREGATOR).exists():  # README.md would be overwritten, and all files be pushed
        stopped = (WEIGHTS, CONFIG)  # of an export that was stopped
        refuse_other_files(out, ours=stopped, hint="Give a new folder with --out, such as exported.")
    _refuse_own_base(run_folder, out)
    if not force:
        _refuse_other_run(run_folder, out)
    with locked(out, "tapfm export"):
        remove_unfinished(out)
        _write_export(saved, run_folder, out)
        _check_export(saved, out)
    if run_folder.last.exists() and not run_folder.finished():
        done = run_folder.epochs_done()
        console.print(f"The run is not finished: this is the best of {done:,} epoch{'s' * (done > 1)} so far.")
    what = "encoder (timm), aggregator" if saved.model.encoder is not None else "aggregator"
    said = f"Exported to {out}: {what} and model card; loaded again, the logits are the same."
    console.print(said, markup=False, soft_wrap=True)
    if saved.model.encoder is not None:
        arguments = f", {needed}" if (needed := timm_arguments(saved.card)) else ""
        call = f'timm.create_model("local-dir:{out}", pretrained=True{arguments})'
        console.print(f"In Python: {call}", markup=False, soft_wrap=True)
    if push_to is not None:
        address = push_folder(
            out, push_to, card=saved.card, despite_no_derivatives=despite_no_derivatives, private=private
        )
        console.print(f"Pushed to {address}{' (private)' if private else ''}", markup=False, soft_wrap=True)


def _refuse_other_run(run_folder: RunFolder, out: Path) -> None:
    """Refuse to overwrite the export of another run."""
    try:
        of_run = json.loads((out / DESCRIPTION).read_text("utf-8")).get("run")
    except (OSError, ValueError, AttributeError):
        return
    if of_run != run_folder.identity():
        raise InputError(
            f"{out} holds the export of another run.", hint="Give another folder with --out, or --force to replace it."
        )


def _refuse_own_base(run_folder: RunFolder, out: Path) -> None:
    """Refuse to overwrite the weights that the run started from: it could not be resumed, or exported again."""
    base = run_folder.settings()["encoder"].get("weights")
    if base is not None and Path(base).resolve() in (out.resolve(), (out / WEIGHTS).resolve()):
        raise InputError(
            f"{out} holds the weights that {run_folder.folder} started from.", hint="Give another folder with --out."
        )


def _write_export(saved: SavedModel, run_folder: RunFolder, out: Path) -> None:
    """Write encoder, aggregator, description and card; the description last, as it marks an export."""
    out.mkdir(parents=True, exist_ok=True)
    (out / DESCRIPTION).unlink(missing_ok=True)
    if saved.model.encoder is None:
        for name in (CONFIG, WEIGHTS):  # an earlier export's
            (out / name).unlink(missing_ok=True)
    else:
        write_timm_folder(saved.model.encoder, saved.card, out, about={"targets": saved.description["targets"]})
    aggregator = {f"aggregator/{name}": each.detach() for name, each in saved.model.aggregator.named_parameters()}
    save_checkpoint(out / AGGREGATOR, aggregator, {"tapfm": __version__, "kind": "aggregator"})
    write_atomically(out / "README.md", model_card(saved, run_folder, _final_scores(run_folder)).encode())
    thresholds = thresholds_to_export(run_folder.folder, saved.model.task.targets)
    description = {"tapfm": __version__} | saved.description | {"thresholds": thresholds}
    write_atomically(out / DESCRIPTION, json.dumps(description, indent=2).encode())


def _final_scores(run_folder: RunFolder) -> Mapping[str, AucScores]:
    """Score the predictions of a run, split by split; there are none before it is finished."""
    unit: Unit = run_folder.settings()["selection"]["unit"]
    targets = target_kinds(run_folder.settings()["task"]["targets"])
    found = {}
    for split in (VALIDATION, TEST):
        path = run_folder.folder / f"predictions-{split}.csv"
        if path.exists():
            found[split] = compute_scores(read_predictions(path, targets), targets, unit)
    return found


@torch.no_grad()
def _check_export(saved: SavedModel, out: Path) -> None:
    """Load the folder as users will, and compare its logits of a slide of noise with those of the run's model."""
    model, noise = saved.model, rng_for("export")
    places = torch.arange(float(_TILES))[:, None].expand(-1, 2)  # one beside the other
    if model.encoder is None:
        feature_size = saved.description["aggregator"]["feature_size"]
        features, attention = noise.normal(size=(_TILES, feature_size)), noise.random(_TILES)
        encoded = EncodedTiles(
            torch.tensor(features, dtype=torch.float32), torch.tensor(attention, dtype=torch.float32)
        )
        again = replace(model, aggregator=load_aggregator(out, saved.description, model.device).train(False))
        ours, theirs = (each.aggregator_for(places)(*encoded).logits_C for each in (model, again))
    else:
        check_timm_folder(out, model.encoder)
        side = model.encoder.tile_px
        tiles = torch.from_numpy(noise.integers(0, 256, (_TILES, 3, side, side), "uint8"))
        again = load_export(out).model
        ours, theirs = (_logits_of_tiles(each, tiles, places) for each in (model, again))
    if not torch.allclose(ours, theirs, atol=1e-5):
        raise WeightsMismatchError(
            f"{out} was written, but loaded again it gives other logits: {ours.tolist()} and {theirs.tolist()}.",
            hint="Please report it.",
        )


@torch.no_grad()
def _logits_of_tiles(model: SlideModel, tiles: Tensor, coordinates: Tensor | None = None) -> Tensor:
    """Return the logits of a bag of tiles."""
    assert model.encoder is not None
    encoded = wrap_encoder(model.encoder).encode(tiles, len(tiles))
    return model.aggregator_for(coordinates)(*encoded).logits_C
