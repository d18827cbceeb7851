"""Small slides with a planted signal, a small encoder, and the other arguments of `fit`."""

import cv2
import numpy as np
import torch
from slide_files import EOSIN, write_slide
from support import small_encoder

from tapfm.adaptation.chunked import Chunking
from tapfm.adaptation.learner import Learner, OptimiserSettings
from tapfm.adaptation.trainer import TrainingSettings, fit
from tapfm.adaptation.two_graph import AdaptationSettings
from tapfm.aggregators.cls_attention import ClsAttention
from tapfm.evaluation.predictions import LabelledSlide
from tapfm.inference.bags import PixelBags, SlideTiles
from tapfm.runs.model import SlideModel
from tapfm.tasks.binary import BinaryTask
from tapfm.tiles.augment import Augmentation
from tapfm.tiles.store import TileSet

TILE_PX, TILES_PER_ROW = 42, 5
# columns of history.jsonl that differ between otherwise equal runs
TIMING_COLUMNS = ("seconds", "tiles_per_second", "data_wait_fraction", "peak_memory_gib")
NO_AUGMENTATION = Augmentation(flip=0.0, rotate_90=False, blur=0.0)


def render_image(positive, seed):
    """Draw 25 tiles with nuclei. In a positive slide, half of the tiles have large nuclei."""
    rng = np.random.default_rng(seed)
    side_px = TILE_PX * TILES_PER_ROW
    image = np.full((side_px, side_px, 3), EOSIN, np.float32) + rng.normal(0, 3, 3)
    has_signal = rng.permutation(TILES_PER_ROW**2) < TILES_PER_ROW**2 // 2
    for tile in range(TILES_PER_ROW**2):
        left, top = tile % TILES_PER_ROW * TILE_PX, tile // TILES_PER_ROW * TILE_PX
        radius = 7 if positive and has_signal[tile] else 3
        for x, y in rng.integers(8, TILE_PX - 8, (6 if radius == 3 else 2, 2)).tolist():
            cv2.circle(image, (left + x, top + y), radius, (110, 70, 150), -1)
    image += rng.normal(0, 4, image.shape)
    return np.clip(image, 0, 255).astype(np.uint8)


def tile_positions():
    steps = np.arange(TILES_PER_ROW) * TILE_PX
    return np.array([(x, y) for y in steps for x in steps], np.int64)


def write_slides(folder, count):
    """Write slides s00, s01, ... Every second slide is positive."""
    folder.mkdir(exist_ok=True)
    for i in range(count):
        write_slide(folder / f"s{i:02}.svs", render_image(i % 2 == 1, seed=i), downsamples=(1,), tile_px=64)
    return {
        f"s{i:02}": SlideTiles(folder / f"s{i:02}.svs", TileSet(f"s{i:02}", tile_positions(), TILE_PX, TILE_PX))
        for i in range(count)
    }


def label_slides(slides, split="train", labels=None, patients=None):
    labels = labels or [int(name[1:]) % 2 for name in slides]
    return [
        LabelledSlide(name, patients[i] if patients else name, {"target": labels[i]}, split)
        for i, name in enumerate(slides)
    ]


def make_learner(seed=0, rate=1e-3, device="cpu", compute_dtype=None, **optimiser_settings):
    encoder = small_encoder("registers", dtype=torch.float32, seed=seed).to(device)
    torch.manual_seed(seed)
    aggregator = ClsAttention(encoder.feature_size).to(device)
    model = SlideModel(encoder, aggregator, BinaryTask.from_training_labels("target", [0, 1]), compute_dtype)
    settings = {"encoder_lr": rate, "aggregator_lr": 10 * rate} | optimiser_settings
    adaptation = AdaptationSettings(chunking=Chunking(tiles=16), compute_dtype=compute_dtype)
    return Learner(model, adaptation, OptimiserSettings(**settings))


def make_bags(slides, *, workers=0, prefetch_bytes=2**30, device="cpu"):
    return PixelBags(
        slides, tile_px=TILE_PX, device=torch.device(device), workers=workers, prefetch_bytes=prefetch_bytes
    )


class TrainingRecorder:
    """Checkpoint writer and listener of `fit` that keeps everything in memory."""

    def __init__(self):
        self.last = self.best = None
        self.saves, self.events, self.failures = 0, [], []

    def save_last(self, learner, progress):
        self.saves += 1
        self.last = {name: t.clone() for name, t in learner.state().items()}, progress.as_json()

    def save_best(self, learner, progress):
        self.best = {name: t.clone() for name, t in learner.weights().items()}, progress.best_epoch

    def on_pass_start(self, phase, epoch, slides, done):
        self.events.append((phase, epoch, slides, done))

    def on_slide_end(self, progress):
        pass

    def on_epoch_end(self, row, *, best):
        self.events.append((row["epoch"], best))

    def on_slide_failed(self, slide_id, reason):
        self.failures.append((slide_id, reason))

    def on_warning(self, message):
        self.events.append(message)


def run_fit(learner, slides, *, training, validation=(), recorder=None, workers=0, **arguments):
    """Call `fit` with default values for the settings that are not given."""
    keywords = {name: arguments.pop(name) for name in ("progress", "stop_signal") if name in arguments}
    settings = TrainingSettings(**({"epochs": 2, "tiles_per_slide": 8} | arguments))
    recorder = recorder or TrainingRecorder()
    bags = make_bags(slides, workers=workers, device=learner.model.device)
    return fit(learner, bags, training, list(validation), settings, recorder, recorder, **keywords)
