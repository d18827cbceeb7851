"""The models that predict: where and how they compute, and whether float8 says what bfloat16 does."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace

import numpy as np
import torch
from rich.console import Console

from tapfm.adaptation.bags import PixelBags, SlideFailed, SlideTiles
from tapfm.app.advice import counted
from tapfm.app.build_run import labelled
from tapfm.app.evaluating.member_predictions import model_of_tiles
from tapfm.app.evaluating.members import Evaluated, Member
from tapfm.app.final_predictions import bags_in_turn
from tapfm.app.looking import looking_precision
from tapfm.app.run_data import SlideOfRun
from tapfm.contracts import Encoded
from tapfm.encoders.inference import make_ready, usual_batch
from tapfm.errors import RunError
from tapfm.evaluation.predictions import sigmoid
from tapfm.model import SlideModel
from tapfm.prediction.whole_slide import Models
from tapfm.tiles.augment import Augmentation

AHEAD_BYTES = 2**28  # of pixels that are read ahead: some hundred tiles keep any encoder busy
COMPARED_TILES = 1024  # of a slide, evenly spread, by which float8 is held against bfloat16
MOST_CHANGE = 0.01  # of a probability, above which float8 is refused


@dataclass(frozen=True)
class Computing:
    """Where and how to compute; what is None is chosen by what there is to do."""

    device: torch.device
    workers: int  # processes that read
    batch: int | None = None
    precision: str = "auto"  # which each model learnt in
    compiled: bool | None = None


def load_models(
    evaluated: Evaluated,
    slides: Sequence[SlideOfRun],
    computing: Computing,
    console: Console,
    weights: Future[list[SlideModel]] | None = None,
) -> list[SlideModel]:
    """Make the members ready to look at all tiles of these slides, with the weights that are being loaded, if any."""
    tiles = sum(len(slide.tiles) for slide in slides if slide.tiles is not None)
    ready = []
    for member in evaluated.members:
        loaded = weights.result().pop(0) if weights is not None else None  # what is kept there would stay in memory
        if computing.precision == "float8":
            ready.append(in_float8(member, loaded, slides, tiles, computing, console))
            continue
        device, precision = computing.device, computing.precision
        ready.append(model_of_tiles(member, device, precision, tiles=tiles, compiled=computing.compiled, loaded=loaded))
    return ready


def in_float8(
    member: Member,
    loaded: SlideModel | None,
    slides: Sequence[SlideOfRun],
    tiles: int,
    computing: Computing,
    console: Console,
) -> SlideModel:
    """Load a member in float8, if by that it says of the first slide that can be read what it says in bfloat16."""
    precision = looking_precision("float8", computing.device)
    exact = model_of_tiles(member, computing.device, "bfloat16", tiles=COMPARED_TILES, loaded=loaded)
    encoder = copy.deepcopy(exact.encoder)
    assert encoder is not None
    ready = make_ready(encoder, precision, tiles=tiles, compiled=computing.compiled)
    fast = replace(exact, encoder=encoder, looking=ready)
    for slide in slides:
        change, compared = largest_change(exact, fast, slide, computing)
        if not compared:
            continue
        of = f"{slide.row.slide_id} ({counted(compared, 'tile')})"
        said = f"float8 changes probabilities of {of} by {change:.4f} at most"
        if change > MOST_CHANGE:
            raise RunError(
                f"{said}; {MOST_CHANGE:g} is allowed.", hint="Predict with --precision bfloat16, or leave it out."
            )
        console.print(f"{said}.", markup=False, soft_wrap=True)
        break
    return fast


def largest_change(exact: SlideModel, fast: SlideModel, slide: SlideOfRun, computing: Computing) -> tuple[float, int]:
    """Compare what two models say of the same tiles; gives the largest change of a probability, and how many tiles."""
    assert slide.tiles is not None
    assert exact.encoder is not None
    rows = np.unique(np.linspace(0, len(slide.tiles) - 1, min(COMPARED_TILES, len(slide.tiles))).astype(np.int64))
    some = replace(slide, tiles=replace(slide.tiles, positions=slide.tiles.positions[rows]))
    assert some.tiles is not None
    models = Models([exact, fast], batch=computing.batch or usual_batch(exact.encoder), may_shrink=True)
    bags = PixelBags(
        {some.row.slide_id: SlideTiles(some.row.path, some.tiles)},
        tile_px=models.tile_px,
        augmentation=Augmentation(),  # of training bags, which are not asked for
        device=computing.device,
        workers=computing.workers,
        ahead_bytes=AHEAD_BYTES,
    )
    [(_, bag)] = bags_in_turn(bags, labelled([some]), models, lambda: None)
    if isinstance(bag, SlideFailed):
        return 0.0, 0
    assert isinstance(bag.content, Encoded)
    before, after = models.ask_each(some.row.slide_id, bag.content, bag.places)
    changes = [abs(sigmoid(before.logits[target]) - sigmoid(after.logits[target])) for target in models.targets]
    return max(changes), bag.tiles
