"""Export the model of a run: the adapted encoder as a timm folder, the aggregator, metadata and a model card."""

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
    CONFIG_FILE,
    WEIGHTS_FILE,
    check_replaceable_model,
    check_timm_folder,
    extra_timm_arguments,
    write_timm_folder,
)
from tapfm.errors import InputError, WeightsMismatchError
from tapfm.evaluation.predictions import AucScores, Unit, compute_scores, read_predictions
from tapfm.runs.checkpoint import save_checkpoint
from tapfm.runs.ensemble import EXPORT_METADATA_FILE
from tapfm.runs.folder import RunFolder
from tapfm.runs.hub import check_hub_token_exists, check_licence_allows_sharing, check_repository_name, push_folder
from tapfm.runs.model import SlideModel
from tapfm.runs.model_card import format_model_card, read_export_base_weights
from tapfm.runs.saved_model import AGGREGATOR_FILE, SavedModel, load_aggregator, load_export, load_run
from tapfm.runs.thresholds import choose_export_thresholds
from tapfm.runtime.files import write_atomically
from tapfm.runtime.output_folder import check_no_other_files, lock_folder, remove_unfinished_files
from tapfm.runtime.seeding import make_rng
from tapfm.tasks.catalog import target_kinds
from tapfm.version import __version__

_CHECK_TILE_COUNT = 4  # random tiles for comparing the logits of the export with those of the run


def export_run(
    run: Path,
    out: Path,
    *,
    push_to: str | None,
    owner_permission: bool,
    private: bool,
    force: bool,
    console: Console,
) -> None:
    """Export a run to the folder `out`, and check that the loaded export gives the logits of the run.

    push_to: repository on the Hugging Face Hub to push the export to; None: do not push.
    owner_permission: the owners of the encoder permit sharing adapted versions, although the licence forbids it.
    force: also replace the export of another run.
    """
    saved, run_folder = load_run(run), RunFolder(run)
    if push_to is not None:
        check_repository_name(push_to)
        check_licence_allows_sharing(saved.card, owner_permission=owner_permission)
        if not saved.metadata["encoder"]["adapted"]:
            raise InputError(
                f"{run} has a fixed encoder, so there is no adapted encoder to push.",
                hint="Omit --push-to-hub to export only the aggregator.",
            )
        check_hub_token_exists()
    check_replaceable_model(out)
    if not (out / AGGREGATOR_FILE).exists():
        # a new export must not overwrite README.md of another project, nor push its files
        written_first = (WEIGHTS_FILE, CONFIG_FILE)  # an interrupted export may have left them
        check_no_other_files(out, allowed=written_first, hint="Choose a new folder, for example --out exported.")
    _check_out_is_not_base_weights(run_folder, out)
    if not force:
        _check_out_is_not_export_of_other_run(run_folder, out)
    unfinished = run_folder.last_checkpoint.exists() and not run_folder.is_training_finished()
    with lock_folder(out, "tapfm export"):
        remove_unfinished_files(out)
        _write_export(saved, run_folder, out)
        _check_written_export(saved, out)
    if unfinished:
        done = run_folder.count_epochs()
        console.print(f"The run is not finished. Exporting the best of {done:,} epoch{'s' * (done > 1)} so far.")
    parts = "encoder (timm), aggregator" if saved.model.encoder is not None else "aggregator"
    message = f"Exported to {out}: {parts} and model card. Check passed: the export gives the same logits as the run."
    console.print(message, markup=False, soft_wrap=True)
    if saved.model.encoder is not None:
        arguments = f", {needed}" if (needed := extra_timm_arguments(saved.card)) else ""
        call = f'timm.create_model("local-dir:{out}", pretrained=True{arguments})'
        console.print(f"To load the encoder in Python: {call}", markup=False, soft_wrap=True)
    if push_to is not None:
        address = push_folder(out, push_to, card=saved.card, owner_permission=owner_permission, private=private)
        console.print(f"Pushed to {address}{' (private)' if private else ''}", markup=False, soft_wrap=True)


def _check_out_is_not_export_of_other_run(run_folder: RunFolder, out: Path) -> None:
    """Raise InputError if `out` contains the export of another run."""
    try:
        exported_run = json.loads((out / EXPORT_METADATA_FILE).read_text("utf-8")).get("run")
    except (OSError, ValueError, AttributeError):
        return
    if exported_run != run_folder.compute_run_id():
        raise InputError(
            f"{out} contains the export of another run.",
            hint="Choose another folder with --out, or replace that export with --force.",
        )


def _check_out_is_not_base_weights(run_folder: RunFolder, out: Path) -> None:
    """Raise InputError if `out` contains the encoder weights that the run started from, and still needs."""
    base = run_folder.read_settings()["encoder"].get("weights")
    if base is not None and Path(base).resolve() in (out.resolve(), (out / WEIGHTS_FILE).resolve()):
        raise InputError(
            f"{out} contains the encoder weights that {run_folder.folder} started from. The export would replace them.",
            hint="Choose another folder with --out.",
        )


def _write_export(saved: SavedModel, run_folder: RunFolder, out: Path) -> None:
    """Write encoder, aggregator, model card and tapfm.json; tapfm.json last, because it marks a complete export."""
    out.mkdir(parents=True, exist_ok=True)
    (out / EXPORT_METADATA_FILE).unlink(missing_ok=True)
    if saved.model.encoder is None:
        for name in (CONFIG_FILE, WEIGHTS_FILE):  # encoder files of an earlier export
            (out / name).unlink(missing_ok=True)
    else:
        published = read_export_base_weights(saved).are_published
        card = saved.card if published else replace(saved.card, licence="unknown")
        write_timm_folder(saved.model.encoder, card, out, metadata={"targets": saved.metadata["targets"]})
    aggregator = {f"aggregator/{name}": each.detach() for name, each in saved.model.aggregator.named_parameters()}
    save_checkpoint(out / AGGREGATOR_FILE, aggregator, {"tapfm": __version__, "kind": "aggregator"})
    write_atomically(
        out / "README.md", format_model_card(saved, run_folder, _compute_final_scores(run_folder)).encode()
    )
    thresholds = choose_export_thresholds(run_folder.folder, saved.model.task.target_kinds)
    metadata = {"tapfm": __version__} | saved.metadata | {"thresholds": thresholds}
    write_atomically(out / EXPORT_METADATA_FILE, json.dumps(metadata, indent=2).encode())


def _compute_final_scores(run_folder: RunFolder) -> Mapping[str, AucScores]:
    """Compute the AUCs of a run by split, from its predictions; empty if the run has not written predictions yet."""
    unit: Unit = run_folder.read_settings()["selection"]["unit"]
    task = run_folder.read_settings()["task"]
    targets = target_kinds(task["targets"], task.get("labels"))
    scores_by_split = {}
    for split in (VALIDATION, TEST):
        path = run_folder.folder / f"predictions-{split}.csv"
        if path.exists():
            scores_by_split[split] = compute_scores(read_predictions(path, targets), targets, unit)
    return scores_by_split


@torch.no_grad()
def _check_written_export(saved: SavedModel, out: Path) -> None:
    """Load the export, and raise WeightsMismatchError if its logits for random tiles differ from those of the run."""
    model, noise = saved.model, make_rng("export")
    coordinates = torch.arange(float(_CHECK_TILE_COUNT))[:, None].expand(-1, 2)  # adjacent tiles
    if model.encoder is None:
        feature_size = saved.metadata["aggregator"]["feature_size"]
        features, attention = noise.normal(size=(_CHECK_TILE_COUNT, feature_size)), noise.random(_CHECK_TILE_COUNT)
        encoded = EncodedTiles(
            torch.tensor(features, dtype=torch.float32), torch.tensor(attention, dtype=torch.float32)
        )
        loaded = replace(model, aggregator=load_aggregator(out, saved.metadata, model.device).train(False))
        expected, found = (each.aggregator_for(coordinates)(*encoded).logits_C for each in (model, loaded))
    else:
        check_timm_folder(out, model.encoder)
        side = model.encoder.tile_px
        tiles = torch.from_numpy(noise.integers(0, 256, (_CHECK_TILE_COUNT, 3, side, side), "uint8"))
        loaded = load_export(out).model
        expected, found = (_predict_logits(each, tiles, coordinates) for each in (model, loaded))
    if not torch.allclose(expected, found, atol=1e-5):
        raise WeightsMismatchError(
            f"The export {out} does not give the logits of the run: {found.tolist()} instead of {expected.tolist()}.",
            hint="Please report this bug.",
        )


@torch.no_grad()
def _predict_logits(model: SlideModel, tiles: Tensor, coordinates: Tensor | None = None) -> Tensor:
    assert model.encoder is not None
    encoded = wrap_encoder(model.encoder).encode(tiles, len(tiles))
    return model.aggregator_for(coordinates)(*encoded).logits_C
