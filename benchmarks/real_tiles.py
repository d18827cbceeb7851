"""Compare models on bags of real H&E tiles with a known labelling rule, and an encoder with pretrained weights.

    python benchmarks/real_tiles.py train --tiles crc --weights dinov2_small.safetensors --results real_tiles.jsonl
    python benchmarks/real_tiles.py report --tiles crc --results real_tiles.jsonl

`crc` contains {train,test}/{AC,H,S,T,V}/*.webp: colorectal tiles of 160 px (adenocarcinoma, healthy, serrated, tubular,
villous). A bag represents a slide. Binary task: in a positive bag, a tenth of the tiles is AC and the rest is sampled
from H, S, T and V; a negative bag has no AC. Multi-label task: AC, S, T and V are the targets, each with its own
prevalence. For each positive target, a tenth of the tiles is of that class; the rest is H. Training and validation bags
are sampled from disjoint tiles of `train`, test bags from `test`. They are the same for every model; only the training
bags depend on the seed.

Stages: "rates" selects the learning rates of each model on validation bags, with a seed that is not used again.
"binary" compares all models with K = 50. "large" (K = 200) and "multilabel" compare TAPFM with the fixed and the
fine-tuned model that are best on validation bags. Each finished job is one line of the results file and is not
repeated. Ctrl-C discards running jobs.
"""

from __future__ import annotations

import argparse
import copy
import json
import multiprocessing
import queue
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from tapfm.adaptation.chunked import Chunking
from tapfm.adaptation.optimisers import LearningRateSchedule, make_optimiser, set_learning_rate, step_optimiser
from tapfm.adaptation.two_graph import AdaptationSettings, compute_aggregator_gradients, two_graph_step
from tapfm.aggregators.catalog import build_aggregator
from tapfm.contracts import EncodedTiles
from tapfm.encoders.inference import wrap_encoder
from tapfm.encoders.vit import VitEncoder
from tapfm.encoders.weights import load_encoder
from tapfm.evaluation.model_comparison import compare_models
from tapfm.evaluation.predictions import Prediction
from tapfm.metrics import logistic
from tapfm.metrics.ranking import auc
from tapfm.results.estimate import Estimate
from tapfm.runtime.seeding import make_rng
from tapfm.tasks.catalog import build_task, target_kinds
from tapfm.tasks.cross_entropy import encode_labels
from tapfm.tiles.augment import Augmentation, augment
from tapfm.tiles.colour_statistics import colour_histograms, colour_statistics

CLASSES = ("AC", "H", "S", "T", "V")
TARGETS = {"binary": ("AC",), "multilabel": ("AC", "S", "T", "V")}
PREVALENCE = {"AC": 0.16, "S": 0.26, "T": 0.27, "V": 0.05}  # of multi-label bags; 0.5 for binary bags
POSITIVE_TILE_FRACTION = 0.1  # of a bag's tiles, for each positive target
VALIDATION_FRACTION = 200 / 700  # of the tiles of each class in `train`
MODELS = (
    *(("fixed", name) for name in ("mean", "abmil", "cls-attention", "cls-gated")),
    *(("finetune", name) for name in ("mean", "abmil", "cls-attention", "cls-gated")),
    *(("tapfm", name) for name in ("cls-attention", "cls-gated")),
)
BASELINES = ("fixed", "finetune")
STAGES = ("rates", "binary", "large", "multilabel")
AUGMENTATION = Augmentation(
    stain_jitter=0.1
)  # as in the paper, and stain jitter, because colour is a shortcut in these tiles
WEIGHT_DECAY = 1e-4
ENCODE_BATCH = 256

Rows = NDArray[np.int64]


@dataclass(frozen=True)
class Sizes:
    """Numbers of bags, tiles, seeds and epochs, and the learning rates to try."""

    training_bags: int = 120
    validation_bags: int = 100
    test_bags: int = 300
    tiles: int = 50
    tiles_large: int = 200
    seeds: int = 5
    epochs: int = 10
    epochs_fixed: int = 30
    encoder_rates: tuple[float, ...] = (1e-6, 3e-6, 1e-5)
    aggregator_rates: tuple[float, ...] = (1e-3, 3e-3)
    aggregator_rates_fixed: tuple[float, ...] = (1e-4, 1e-3, 1e-2)


QUICK = Sizes(
    training_bags=4,
    validation_bags=6,
    test_bags=8,
    tiles=10,
    tiles_large=20,
    seeds=1,
    epochs=2,
    epochs_fixed=2,
    encoder_rates=(1e-5,),
    aggregator_rates=(1e-3,),
    aggregator_rates_fixed=(1e-3,),
)
RATES_SEED = 100


@dataclass(frozen=True)
class Job:
    """One training run."""

    stage: str
    method: str
    aggregator: str
    task: str
    tiles: int
    seed: int
    encoder_rate: float
    aggregator_rate: float

    @property
    def model(self) -> tuple[str, str]:
        """Method and aggregator."""
        return self.method, self.aggregator


class Bags(NamedTuple):
    """Bags of tiles, given by their indices."""

    rows: Rows  # (bags, K)
    labels: NDArray[np.int64]  # (bags, targets)


class TileDataset:
    """All tiles: pixels, classes and splits."""

    def __init__(self, folder: Path, tile_px: int) -> None:
        files = [(split, path) for split in ("train", "test") for path in sorted((folder / split).glob("*/*.webp"))]
        if not files:
            raise SystemExit(f"{folder} has no tiles. Expected: {{train,test}}/{{{','.join(CLASSES)}}}/*.webp")
        self.classes = np.array([CLASSES.index(path.parent.name) for _, path in files])
        self.splits = np.array([split for split, _ in files])
        for kind in range(len(CLASSES)):
            candidates = np.flatnonzero((self.classes == kind) & (self.splits == "train"))
            selected = make_rng("validation", kind).permutation(candidates)[
                : round(VALIDATION_FRACTION * len(candidates))
            ]
            self.splits[selected] = "val"
        self.pixels = torch.from_numpy(np.stack([read_tile(path, tile_px) for _, path in files]))

    def tiles_in(self, split: str) -> Rows:
        """Return the indices of the tiles of a split."""
        return np.flatnonzero(self.splits == split)

    @cached_property
    def histograms(self) -> NDArray[np.int64]:
        """Colour histograms of each tile."""
        return np.stack([colour_histograms(tile[None]) for tile in self.pixels.numpy()])

    def sample_bags(self, split: str, task: str, tiles: int, count: int, *rng_key: int | str) -> Bags:
        """Sample bags with the labelling rule of the task."""
        rng = make_rng(split, task, tiles, *rng_key)
        labels = np.zeros((count, len(TARGETS[task])), dtype=np.int64)
        for column, target in enumerate(TARGETS[task]):
            prevalence = 0.5 if task == "binary" else PREVALENCE[target]
            labels[rng.permutation(count)[: max(2, round(prevalence * count))], column] = 1
        split_tiles = self.tiles_in(split)
        pools = {name: split_tiles[self.classes[split_tiles] == kind] for kind, name in enumerate(CLASSES)}
        background = ("H", "S", "T", "V") if task == "binary" else ("H",)
        rows = []
        for bag_labels in labels:
            present = [pools[target] for target, label in zip(TARGETS[task], bag_labels, strict=True) if label]
            positive_tiles = [sample(rng, pool, round(POSITIVE_TILE_FRACTION * tiles)) for pool in present]
            rest = np.concatenate([pools[name] for name in background])
            rest_count = tiles - sum(map(len, positive_tiles))
            rows.append(np.concatenate([*positive_tiles, sample(rng, rest, rest_count)]))
        return Bags(np.stack(rows), labels)


def read_tile(path: Path, tile_px: int) -> NDArray[np.uint8]:
    """Read a tile and crop its centre. A smaller tile is enlarged."""
    with Image.open(path) as image:
        resized = image.convert("RGB")
        if resized.width < tile_px:
            resized = resized.resize((tile_px, tile_px), Image.Resampling.BICUBIC)
        margin = (resized.width - tile_px) // 2
        pixels = np.asarray(resized)[margin : margin + tile_px, margin : margin + tile_px]
    return np.ascontiguousarray(pixels.transpose(2, 0, 1))


def sample(rng: np.random.Generator, pool: Rows, count: int) -> Rows:
    """Sample tiles, without replacement if there are enough."""
    return rng.choice(pool, count, replace=count > len(pool))


class Trainer:
    """Runs training jobs on one device."""

    def __init__(self, dataset: TileDataset, encoder: VitEncoder, sizes: Sizes, device: torch.device) -> None:
        self.dataset, self.sizes, self.device = dataset, sizes, device
        self.dtype = torch.bfloat16 if device.type == "cuda" else None
        self.base = encoder.to(device).eval()
        self.pixels = dataset.pixels.to(device)
        self.stored: EncodedTiles | None = None  # features of the pretrained encoder, for method fixed

    def run(self, job: Job) -> dict[str, Any]:
        """Train, restore the epoch with the best validation AUC, and predict the test bags."""
        start = time.monotonic()
        torch.manual_seed(job.seed)
        sizes, fixed = self.sizes, job.method == "fixed"
        training = self.dataset.sample_bags("train", job.task, job.tiles, sizes.training_bags, job.seed)
        validation = self.dataset.sample_bags("val", job.task, job.tiles, sizes.validation_bags)
        test = self.dataset.sample_bags("test", job.task, job.tiles, sizes.test_bags)
        targets = TARGETS[job.task]
        labels = {name: training.labels[:, column].tolist() for column, name in enumerate(targets)}
        task = build_task(labels)
        encoder = self.base if fixed else copy.deepcopy(self.base)
        aggregator = build_aggregator(job.aggregator, encoder.feature_size, len(targets)).to(self.device)
        epochs = sizes.epochs_fixed if fixed else sizes.epochs
        modules = (aggregator,) if fixed else (aggregator, encoder)
        optimisers = [
            make_optimiser(module.named_parameters(), weight_decay=WEIGHT_DECAY, decay_all=True) for module in modules
        ]
        rates = (job.aggregator_rate, job.encoder_rate)
        schedule = LearningRateSchedule(first_cycle=epochs)
        lambda_ = 1.0 if job.method == "tapfm" else 0.0
        adaptation = AdaptationSettings(lambda_=lambda_, chunking=Chunking(), compute_dtype=self.dtype)

        def make_update(number: int) -> Any:
            return lambda finite=None: step_optimiser(optimisers[number], finite, slides=1, clip_norm=0.0)

        before = self.predict_bags(encoder, aggregator, test, targets)
        best: dict[str, Any] = {"validation_auc": -1.0}
        best_states: list[dict[str, Tensor]] = []
        history = []
        for epoch in range(epochs):
            for optimiser, rate in zip(optimisers, rates, strict=False):
                set_learning_rate(optimiser, schedule.rate(epoch, rate))
            aggregator.train()
            losses = []
            for number in make_rng(job.seed, "order", epoch).permutation(len(training.rows)).tolist():
                rows = torch.from_numpy(training.rows[number]).to(self.device)
                bag_targets = encode_labels(training.labels[number].tolist(), device=self.device)
                if fixed:
                    z_KD, r_K = (part[rows].requires_grad_() for part in self.features())
                    graph = compute_aggregator_gradients(aggregator, task, z_KD, r_K, bag_targets)
                    graph.accumulate_gradients()
                    make_update(0)()
                    losses.append(graph.task_loss)
                else:
                    tiles = augment(self.pixels[rows], AUGMENTATION, job.seed, epoch, number)
                    report = two_graph_step(
                        encoder,
                        aggregator,
                        task,
                        tiles,
                        bag_targets,
                        adaptation=adaptation,
                        update_aggregator=make_update(0),
                        update_encoder=make_update(1),
                        slide=str(number),
                    )
                    losses.append(report.loss_agg)
            predicted = self.predict_bags(encoder, aggregator, validation, targets)
            history.append([float(torch.stack(losses).mean()), predicted.auc])
            if predicted.auc > best["validation_auc"]:
                best = {"validation_auc": predicted.auc, "best_epoch": epoch + 1}
                best_states = [copy.deepcopy(module.state_dict()) for module in modules]
        for module, state in zip(modules, best_states, strict=True):
            module.load_state_dict(state)
        after = self.predict_bags(encoder, aggregator, test, targets)
        return (
            asdict(job)
            | best
            | {
                "test_auc": after.auc,
                "test_logits": after.logits,
                "tile_auc_before": before.tile_auc,
                "tile_auc_after": after.tile_auc,
                "history": history,
                "seconds": round(time.monotonic() - start, 1),
                "device": torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else "CPU",
            }
        )

    def features(self) -> EncodedTiles:
        """Return the features of all tiles from the pretrained encoder."""
        if self.stored is None:
            self.stored = wrap_encoder(self.base, self.dtype).encode(self.pixels, ENCODE_BATCH)
        return self.stored

    @torch.no_grad()
    def predict_bags(self, encoder: VitEncoder, aggregator: Any, bags: Bags, targets: Sequence[str]) -> BagPredictions:
        """Predict bags without augmentation. Each tile is encoded once, even if it is in several bags."""
        aggregator.eval()
        used, indices = np.unique(bags.rows, return_inverse=True)
        rows = torch.from_numpy(used).to(self.device)
        stored = self.features() if encoder is self.base else None
        encoded = (
            EncodedTiles(stored.z_KD[rows], stored.r_K[rows])
            if stored is not None
            else wrap_encoder(encoder, self.dtype).encode(self.pixels[rows], ENCODE_BATCH)
        )
        logits, tile_aucs = [], []
        for bag_indices, labels, tiles in zip(indices.reshape(bags.rows.shape), bags.labels, bags.rows, strict=True):
            selected = torch.from_numpy(bag_indices).to(self.device)
            output = aggregator(encoded.z_KD[selected], encoded.r_K[selected])
            logits.append(output.logits_C.double().tolist())
            heatmap_scores = output.heatmap_scores.double().cpu().numpy().reshape(-1, len(selected))
            for column, (target, label) in enumerate(zip(targets, labels, strict=True)):
                if label:
                    truth = self.dataset.classes[tiles] == CLASSES.index(target)
                    row = heatmap_scores[column if len(heatmap_scores) > 1 else 0]
                    tile_aucs.append(auc(truth, row) or 0.0)
        columns = [
            auc(bags.labels[:, column] == 1, np.array([each[column] for each in logits]))
            for column in range(len(targets))
        ]
        return BagPredictions(
            float(np.mean([each for each in columns if each is not None])), logits, float(np.mean(tile_aucs))
        )


class BagPredictions(NamedTuple):
    """Predictions of bags and their metrics."""

    auc: float  # mean over targets
    logits: list[list[float]]
    tile_auc: float  # AUC of tile scores for the tiles of a target, mean over positive bags and targets


class Results:
    """Results file: one line of JSON per finished job."""

    def __init__(self, path: Path) -> None:
        self.path = path
        text = path.read_text("utf-8") if path.exists() else ""
        self.rows: list[dict[str, Any]] = [json.loads(line) for line in text.splitlines() if line.endswith("}")]
        self.has_partial_line = bool(text) and not text.endswith("\n")  # from a process that was killed

    def add(self, row: dict[str, Any]) -> None:
        self.rows.append(row)
        with self.path.open("a", encoding="utf-8") as file:
            file.write("\n" * self.has_partial_line + json.dumps(row) + "\n")
        self.has_partial_line = False

    def is_finished(self, job: Job) -> bool:
        return any(all(row[name] == value for name, value in asdict(job).items()) for row in self.rows)

    def rows_in(self, stage: str) -> list[dict[str, Any]]:
        """Return the results of the jobs of a stage."""
        return [row for row in self.rows if row["stage"] == stage]

    def best_rates(self, model: tuple[str, str]) -> tuple[float, float]:
        """Return the learning rates with the best validation AUC, the lower ones in a tie."""
        rows = [row for row in self.rows_in("rates") if (row["method"], row["aggregator"]) == model]
        best = max(rows, key=lambda row: (row["validation_auc"], -row["encoder_rate"], -row["aggregator_rate"]))
        return best["encoder_rate"], best["aggregator_rate"]

    def best_models(self) -> list[tuple[str, str]]:
        """Return the models for the later stages: the best of each baseline by validation AUC, and all of TAPFM.

        Also the paper's aggregator without the attention loss, to measure the effect of that loss.
        """
        best = [max((each for each in MODELS if each[0] == method), key=self.validation_auc) for method in BASELINES]
        tapfm_models = [model for model in MODELS if model[0] == "tapfm"]
        return list(dict.fromkeys([*best, ("finetune", "cls-attention"), *tapfm_models]))

    def validation_auc(self, model: tuple[str, str]) -> float:
        """Return the mean validation AUC over the seeds of the binary stage."""
        rows = [row for row in self.rows_in("binary") if (row["method"], row["aggregator"]) == model]
        return float(np.mean([row["validation_auc"] for row in rows]))


def list_jobs(stage: str, sizes: Sizes, results: Results) -> Iterator[Job]:
    """Yield the jobs of a stage, seed by seed, so that partial results can be compared."""
    if stage == "rates":
        for method, aggregator in MODELS:
            fixed = method == "fixed"
            for encoder_rate in (0.0,) if fixed else sizes.encoder_rates:
                for aggregator_rate in sizes.aggregator_rates_fixed if fixed else sizes.aggregator_rates:
                    yield Job(
                        stage, method, aggregator, "binary", sizes.tiles, RATES_SEED, encoder_rate, aggregator_rate
                    )
        return
    task = "multilabel" if stage == "multilabel" else "binary"
    tiles = sizes.tiles_large if stage == "large" else sizes.tiles
    for seed in range(sizes.seeds):
        for model in MODELS if stage == "binary" else results.best_models():
            yield Job(stage, *model, task, tiles, seed, *results.best_rates(model))


def run_worker(arguments: argparse.Namespace, jobs: Any, rows: Any) -> None:
    """Run jobs from a queue until it contains None."""
    torch.set_num_threads(max(1, torch.get_num_threads() // arguments.processes))
    trainer = make_trainer(arguments)
    while (job := jobs.get()) is not None:
        rows.put(trainer.run(job))


def make_trainer(arguments: argparse.Namespace) -> Trainer:
    loaded = load_encoder(arguments.encoder, weights=arguments.weights, tile_px=arguments.tile_px)
    return Trainer(
        TileDataset(arguments.tiles, arguments.tile_px),
        loaded.encoder,
        choose_sizes(arguments),
        torch.device(arguments.device),
    )


def choose_sizes(arguments: argparse.Namespace) -> Sizes:
    return QUICK if arguments.quick else Sizes()


def train(arguments: argparse.Namespace) -> None:
    """Run all stages. With --processes, several jobs share a GPU, because one small encoder does not use it fully."""
    results, deadline = Results(arguments.results), time.monotonic() + 60 * arguments.minutes
    context = multiprocessing.get_context("spawn")
    jobs, rows = context.Queue(), context.Queue()
    workers: list[SpawnProcess] = []
    try:
        for stage in arguments.stages:
            todo = [job for job in list_jobs(stage, choose_sizes(arguments), results) if not results.is_finished(job)]
            running = 0
            while todo or running:
                while todo and running < arguments.processes and time.monotonic() < deadline:
                    if len(workers) < arguments.processes:
                        workers.append(context.Process(target=run_worker, args=(arguments, jobs, rows)))
                        workers[-1].start()
                    jobs.put(todo.pop(0))
                    running += 1
                if not running:
                    print(f"Time limit reached; {len(todo)} jobs of stage {stage} are left. Run again to resume.")
                    return
                try:
                    row = rows.get(timeout=5)
                except queue.Empty:
                    if all(worker.is_alive() for worker in workers):
                        continue
                    raise SystemExit(
                        "A worker process crashed; its message is above. Run the same command again to resume."
                    ) from None
                running -= 1
                results.add(row)
                print(
                    f"{stage:10} {row['method']:8} {row['aggregator']:13} seed {row['seed']:<3} K {row['tiles']:<3} "
                    f"rates {row['encoder_rate']:g} {row['aggregator_rate']:g}: validation {row['validation_auc']:.3f} "
                    f"(epoch {row['best_epoch']}), test {row['test_auc']:.3f}, "
                    f"tile AUC {row['tile_auc_before']:.2f} to {row['tile_auc_after']:.2f}, {row['seconds']:.0f} s",
                    flush=True,
                )
    finally:
        for _ in workers:
            jobs.put(None)
        for worker in workers:
            worker.join(timeout=30)
            worker.terminate()


def report(arguments: argparse.Namespace) -> None:
    """Print the tables as Markdown."""
    results, dataset = Results(arguments.results), TileDataset(arguments.tiles, arguments.tile_px)
    devices = ", ".join(sorted({row["device"] for row in results.rows}))
    print(f"{arguments.encoder} at {arguments.tile_px} px; {devices}.\n")
    for stage, title in (
        ("binary", "Binary, K = {tiles}"),
        ("large", "Binary, K = {tiles}"),
        ("multilabel", "Multi-label, K = {tiles}, mean AUC of four targets"),
    ):
        rows = results.rows_in(stage)
        if rows:
            print(f"### {title.format(tiles=rows[0]['tiles'])}\n")
            print("\n".join(format_stage(rows, dataset, choose_sizes(arguments))) + "\n")


def format_stage(rows: Sequence[dict[str, Any]], dataset: TileDataset, sizes: Sizes) -> list[str]:
    """Return the tables of a stage: test AUC with CI, paired test against the best model, and AUC of tile scores."""
    task, tiles = rows[0]["task"], rows[0]["tiles"]
    targets = TARGETS[task]
    test = dataset.sample_bags("test", task, tiles, sizes.test_bags)
    rows_by_model: dict[str, list[dict[str, Any]]] = {}
    for row in sorted(rows, key=lambda row: row["seed"]):
        rows_by_model.setdefault(f"{row['method']} + {row['aggregator']}", []).append(row)
    # only seeds that every model has, because training bags depend on the seed
    seeds = sorted(set.intersection(*({row["seed"] for row in each} for each in rows_by_model.values())))
    rows_by_model = {name: [row for row in each if row["seed"] in seeds] for name, each in rows_by_model.items()}
    logits = {name: [row["test_logits"] for row in each] for name, each in rows_by_model.items()}
    logits["colour statistics"] = [colour_logits(dataset, task, tiles, sizes, seed, test) for seed in seeds]
    models = {name: [make_predictions(each, test, targets) for each in by_seed] for name, by_seed in logits.items()}
    shown_target = targets[0] if len(targets) == 1 else "macro"
    aucs = compare_models(models, target_kinds(targets), "patient", against=next(iter(models))).aucs
    best = max(rows_by_model, key=lambda name: aucs[name, shown_target].value or 0.0)
    pairs = {
        pair.second if pair.first == best else pair.first: pair
        for pair in compare_models(models, target_kinds(targets), "patient", against=best).pairs
        if pair.target == shown_target
    }
    lines = [
        f"{len(test.rows)} test bags, {sizes.training_bags} training bags, {len(seeds)} seeds.",
        "",
        "| model | mean AUC of seeds | range over seeds | p vs. best | tile AUC before | tile AUC after "
        "| learning rates | best epoch |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name in sorted(models, key=lambda name: -(aucs[name, shown_target].value or 0.0)):
        each, estimate = rows_by_model.get(name, []), aucs[name, shown_target]
        by_seed = [mean_auc(one, test) for one in logits[name]]
        p_holm = None if name == best else pairs[name].p_holm
        p = "best" if name == best else "-" if p_holm is None else f"{p_holm:.3f}"
        details = (
            f"{np.mean([row['tile_auc_before'] for row in each]):.2f} "
            f"| {np.mean([row['tile_auc_after'] for row in each]):.2f} "
            f"| {each[0]['encoder_rate']:g}, {each[0]['aggregator_rate']:g} "
            f"| {', '.join(str(row['best_epoch']) for row in each)}"
            if each
            else "| | |"
        )
        lines.append(
            f"| {name} | {format_estimate(estimate)} | {min(by_seed):.3f} to {max(by_seed):.3f} | {p} | {details} |"
        )
    lines += [
        "",
        "| model, values by seed | test AUC | validation AUC | training loss, last epoch | tile AUC after |",
        "|---|---|---|---|---|",
    ]
    for name, each in rows_by_model.items():
        columns = [
            [f"{row['test_auc']:.3f}" for row in each],
            [f"{row['validation_auc']:.3f}" for row in each],
            [f"{row['history'][-1][0]:.2f}" for row in each],
            [f"{row['tile_auc_after']:.2f}" for row in each],
        ]
        lines.append(f"| {name} | {' | '.join(', '.join(column) for column in columns)} |")
    return lines


def format_estimate(estimate: Estimate) -> str:
    """Return an AUC with its confidence interval, if it has one."""
    interval = "" if estimate.low is None else f" ({estimate.low:.3f} to {estimate.high:.3f})"
    return f"{estimate.value:.3f}{interval}"


def mean_auc(logits: Sequence[Sequence[float]], bags: Bags) -> float:
    """Return the AUC of bags, averaged over targets."""
    columns = range(bags.labels.shape[1])
    return float(np.mean([auc(bags.labels[:, c] == 1, np.array([each[c] for each in logits])) or 0.0 for c in columns]))


def make_predictions(logits: Sequence[Sequence[float]], bags: Bags, targets: Sequence[str]) -> list[Prediction]:
    """Return predictions in which each bag is a slide and a patient."""
    return [
        Prediction(
            slide_id=f"bag {number}",
            patient_id=f"bag {number}",
            split="test",
            cohort=None,
            labels=dict(zip(targets, map(int, labels), strict=True)),
            logits=dict(zip(targets, bag_logits, strict=True)),
            tiles=bags.rows.shape[1],
        )
        for number, (bag_logits, labels) in enumerate(zip(logits, bags.labels, strict=True))
    ]


def colour_logits(
    dataset: TileDataset, task: str, tiles: int, sizes: Sizes, seed: int, test: Bags
) -> list[list[float]]:
    """Return the logits of the colour baseline for the test bags."""
    training = dataset.sample_bags("train", task, tiles, sizes.training_bags, seed)
    training_features, test_features = (
        np.array([colour_statistics(dataset.histograms[rows].sum(0)) for rows in bags.rows])
        for bags in (training, test)
    )
    columns = [
        logistic.fit_logistic(training_features, training.labels[:, column]).logits(test_features)
        for column in range(training.labels.shape[1])
    ]
    return np.stack(columns, axis=1).tolist()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=("train", "report"))
    parser.add_argument("--tiles", type=Path, required=True, help="folder with {train,test}/{AC,H,S,T,V}/*.webp")
    parser.add_argument(
        "--results", type=Path, required=True, help="results file; finished jobs in it are not repeated"
    )
    parser.add_argument("--encoder", default="dinov2-s14")
    parser.add_argument("--weights", type=Path, help="weights file; default: download from the Hugging Face Hub")
    parser.add_argument("--tile-px", type=int, default=154)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--processes", type=int, default=1, help="training jobs that run at the same time")
    parser.add_argument("--stages", nargs="+", choices=STAGES, default=list(STAGES))
    parser.add_argument("--minutes", type=float, default=float("inf"), help="start no new jobs after this many minutes")
    parser.add_argument("--quick", action="store_true", help="only a few bags, to test the script")
    arguments = parser.parse_args()
    {"train": train, "report": report}[arguments.action](arguments)


if __name__ == "__main__":
    main()
