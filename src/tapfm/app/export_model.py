"""`tapfm export`: the adapted encoder as a timm folder, the aggregator beside it, and a model card."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from rich.console import Console

import tapfm
from tapfm.adaptation.checkpoint import save_checkpoint
from tapfm.adaptation.learner import changing_parameters
from tapfm.app.model_card import model_card
from tapfm.app.output_folder import locked, remove_unfinished
from tapfm.app.push import push_folder, refuse_bad_repository, refuse_no_derivatives
from tapfm.app.run_folder import RunFolder
from tapfm.app.saved_model import AGGREGATOR, DESCRIPTION, SavedModel, load_export, load_run
from tapfm.encoders.timm_folder import check_timm_folder, refuse_foreign, write_timm_folder
from tapfm.errors import InputError, WeightsMismatchError
from tapfm.evaluation.predictions import Scores, Unit, read_predictions, scores
from tapfm.seeding import rng_for
from tapfm.storage import write_atomically


def export_run(
    run: Path, out: Path, *, push_to: str | None, despite_no_derivatives: bool, private: bool, console: Console
) -> None:
    """Write the folder, check it by loading it again, and push it where that is asked for."""
    saved = load_run(run)
    if push_to is not None:
        refuse_bad_repository(push_to)
        refuse_no_derivatives(saved.card, despite_no_derivatives=despite_no_derivatives)
        if not saved.description["encoder"]["adapted"]:
            raise InputError(
                f"{run} has a fixed encoder, so there is no adapted one to push.",
                hint="Without --push-to-hub its aggregator is exported.",
            )
    refuse_foreign(out)
    with locked(out, "tapfm export"):
        remove_unfinished(out)
        write_export(saved, RunFolder(run), out)
        check_export(saved, out)
    progress = RunFolder(run).progress()
    if not progress.finished:
        console.print(f"The run is not finished: this is the best of {len(progress.history)} epochs so far.")
    what = "encoder (timm), aggregator" if saved.model.encoder is not None else "aggregator"
    console.print(f"Exported to {out}: {what} and model card; loaded again, it gives the same.", soft_wrap=True)
    if saved.model.encoder is not None:
        console.print(f'In Python: timm.create_model("local-dir:{out}", pretrained=True)', markup=False, soft_wrap=True)
    if push_to is not None:
        address = push_folder(
            out, push_to, card=saved.card, despite_no_derivatives=despite_no_derivatives, private=private
        )
        console.print(f"Pushed to {address}{' (private)' if private else ''}", markup=False, soft_wrap=True)


def write_export(saved: SavedModel, run_folder: RunFolder, out: Path) -> None:
    """Write encoder, aggregator, description and card; the description last, as it marks an export."""
    out.mkdir(parents=True, exist_ok=True)
    (out / DESCRIPTION).unlink(missing_ok=True)
    if saved.model.encoder is not None:
        write_timm_folder(saved.model.encoder, saved.card, out, about={"targets": saved.description["targets"]})
    aggregator = {
        name: tensor.detach() for name, tensor in changing_parameters(saved.model).items() if "aggregator/" in name
    }
    save_checkpoint(out / AGGREGATOR, aggregator, {"tapfm": tapfm.__version__, "kind": "aggregator"})
    write_atomically(out / "README.md", model_card(saved, run_folder, final_scores(run_folder)).encode())
    write_atomically(out / DESCRIPTION, json.dumps({"tapfm": tapfm.__version__} | saved.description, indent=2).encode())


def final_scores(run_folder: RunFolder) -> Mapping[str, Scores]:
    """Score the predictions of a run, split by split; none where it is not finished."""
    unit: Unit = run_folder.settings()["selection"]["unit"]
    found = {}
    for split in ("val", "test"):
        path = run_folder.folder / f"predictions-{split}.csv"
        if path.exists():
            predictions = read_predictions(path)
            found[split] = scores(predictions, run_folder.settings()["task"]["targets"], unit)
    return found


@torch.no_grad()
def check_export(saved: SavedModel, out: Path) -> None:
    """Load the folder as others will, and compare what it says of some tiles with what the run's model says."""
    if saved.model.encoder is not None:
        check_timm_folder(out, saved.model.encoder)
        again = load_export(out).model
        side = saved.model.encoder.tile_px
        tiles = torch.from_numpy(rng_for("export").integers(0, 256, (4, 3, side, side), "uint8"))
        ours, theirs = (model.logits(model.encode(tiles, 4)) for model in (saved.model, again))
        if not torch.allclose(ours, theirs, atol=1e-5):
            raise WeightsMismatchError(
                f"{out} was written, but loaded again it gives other logits: {ours.tolist()} and {theirs.tolist()}.",
                hint="Please report it.",
            )
