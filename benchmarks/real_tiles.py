"""A comparison on real tissue: bags of real H&E tiles with a known rule, and an encoder with real pretrained weights.

    python benchmarks/real_tiles.py train --tiles crc --weights dinov2_small.safetensors --results real_tiles.jsonl
    python benchmarks/real_tiles.py report --tiles crc --results real_tiles.jsonl

`crc` holds {train,test}/{AC,H,S,T,V}/*.webp, colorectal tiles of 160 px: adenocarcinoma, healthy, serrated, tubular,
villous. A bag stands for a slide. Binary: positive where a tenth of its tiles is AC, the rest drawn from H, S, T, V;
negative without AC. Multi-label: background H, and each of AC, S, T, V in a tenth of the tiles with its own prevalence.
Training and validation bags draw from disjoint tiles of `train`, test bags from `test`; they are the same for every
method, and but for the training bags the same for every seed.

Stages: "rates" chooses the learning rates of each method on validation bags of a seed that is not used again; "binary"
is every method at K = 50; "large" (K = 200) and "multilabel" are the rows that lead on validation. Each finished job is
a line of the results, and is not repeated; Ctrl-C loses the jobs under way.
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
from tapfm.evaluation.method_comparison import compare_methods
from tapfm.evaluation.predictions import Prediction
from tapfm.metrics import logistic
from tapfm.metrics.ranking import auc
from tapfm.results.estimate import Estimate
from tapfm.runtime.seeding import make_rng
from tapfm.tasks.catalog import build_task, target_kinds
from tapfm.tasks.cross_entropy import encode_labels
from tapfm.tiles.augment import Augmentation, augment

CLASSES = ("AC", "H", "S", "T", "V")
TARGETS = {"binary": ("AC",), "multilabel": ("AC", "S", "T", "V")}
PREVALENCE = {"AC": 0.16, "S": 0.26, "T": 0.27, "V": 0.05}  # of the multi-label bags; half of the binary ones
SHARE = 0.1  # of a bag's tiles that are of a class that is present
FOR_VALIDATION = 200 / 700  # of the tiles of each class in `train`
METHODS = (
    *(("fixed", name) for name in ("mean", "abmil", "cls-attention", "cls-gated")),
    *(("finetune", name) for name in ("mean", "abmil", "cls-attention", "cls-gated")),
    *(("tapfm", name) for name in ("cls-attention", "cls-gated")),
)
BASELINES = ("fixed", "finetune")
STAGES = ("rates", "binary", "large", "multilabel")
AUGMENTATION = Augmentation(stain_jitter=0.1)  # the paper's, and stain: colour is a shortcut on such tiles
WEIGHT_DECAY = 1e-4
ENCODED_AT_ONCE = 256

Rows = NDArray[np.int64]


@dataclass(frozen=True)
class Sizes:
    """How much of everything."""

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
    """One training."""

    stage: str
    regime: str
    aggregator: str
    task: str
    tiles: int
    seed: int
    encoder_rate: float
    aggregator_rate: float

    @property
    def method(self) -> tuple[str, str]:
        """What is compared."""
        return self.regime, self.aggregator


class Bags(NamedTuple):
    """Bags as rows of the tiles' table."""

    rows: Rows  # (bags, K)
    labels: NDArray[np.int64]  # (bags, targets)


class Tissue:
    """The tiles: pixels, classes, and which belong to which split."""

    def __init__(self, folder: Path, tile_px: int) -> None:
        files = [(split, path) for split in ("train", "test") for path in sorted((folder / split).glob("*/*.webp"))]
        if not files:
            raise SystemExit(f"{folder} has no tiles: {{train,test}}/{{{','.join(CLASSES)}}}/*.webp are looked for.")
        self.classes = np.array([CLASSES.index(path.parent.name) for _, path in files])
        self.splits = np.array([split for split, _ in files])
        for kind in range(len(CLASSES)):
            of_class = np.flatnonzero((self.classes == kind) & (self.splits == "train"))
            chosen = make_rng("validation", kind).permutation(of_class)[: round(FOR_VALIDATION * len(of_class))]
            self.splits[chosen] = "val"
        self.pixels = torch.from_numpy(np.stack([read_tile(path, tile_px) for _, path in files]))

    def of(self, split: str) -> Rows:
        """List the tiles of a split."""
        return np.flatnonzero(self.splits == split)

    @cached_property
    def histograms(self) -> NDArray[np.int64]:
        """Count the values of each channel of each tile."""
        from tapfm.tiles.colours import colour_histograms

        return np.stack([colour_histograms(tile[None]) for tile in self.pixels.numpy()])

    def bags(self, split: str, task: str, tiles: int, count: int, *address: int | str) -> Bags:
        """Draw bags by the rule of the task."""
        rng = make_rng(split, task, tiles, *address)
        labels = np.zeros((count, len(TARGETS[task])), dtype=np.int64)
        for column, target in enumerate(TARGETS[task]):
            share = 0.5 if task == "binary" else PREVALENCE[target]
            labels[rng.permutation(count)[: max(2, round(share * count))], column] = 1
        own = self.of(split)
        pools = {name: own[self.classes[own] == kind] for kind, name in enumerate(CLASSES)}
        background = ("H", "S", "T", "V") if task == "binary" else ("H",)
        rows = []
        for of_bag in labels:
            present = [pools[target] for target, label in zip(TARGETS[task], of_bag, strict=True) if label]
            planted = [draw(rng, pool, round(SHARE * tiles)) for pool in present]
            rest = np.concatenate([pools[name] for name in background])
            rows.append(np.concatenate([*planted, draw(rng, rest, tiles - sum(map(len, planted)))]))
        return Bags(np.stack(rows), labels)


def read_tile(path: Path, tile_px: int) -> NDArray[np.uint8]:
    """Read a tile and cut its middle; one that is smaller is enlarged."""
    with Image.open(path) as image:
        picture = image.convert("RGB")
        if picture.width < tile_px:
            picture = picture.resize((tile_px, tile_px), Image.Resampling.BICUBIC)
        margin = (picture.width - tile_px) // 2
        pixels = np.asarray(picture)[margin : margin + tile_px, margin : margin + tile_px]
    return np.ascontiguousarray(pixels.transpose(2, 0, 1))


def draw(rng: np.random.Generator, pool: Rows, count: int) -> Rows:
    """Draw tiles, each once where there are enough."""
    return rng.choice(pool, count, replace=count > len(pool))


class Trainer:
    """Runs jobs, one after the other, on one device."""

    def __init__(self, tissue: Tissue, encoder: VitEncoder, sizes: Sizes, device: torch.device) -> None:
        self.tissue, self.sizes, self.device = tissue, sizes, device
        self.dtype = torch.bfloat16 if device.type == "cuda" else None
        self.base = encoder.to(device).eval()
        self.pixels = tissue.pixels.to(device)
        self.stored: EncodedTiles | None = None  # by the encoder before training, for the fixed regime

    def run(self, job: Job) -> dict[str, Any]:
        """Train, keep the epoch that is best on validation, and look at the test bags once."""
        start = time.monotonic()
        torch.manual_seed(job.seed)
        sizes, fixed = self.sizes, job.regime == "fixed"
        training = self.tissue.bags("train", job.task, job.tiles, sizes.training_bags, job.seed)
        validation = self.tissue.bags("val", job.task, job.tiles, sizes.validation_bags)
        test = self.tissue.bags("test", job.task, job.tiles, sizes.test_bags)
        targets = TARGETS[job.task]
        labels = {name: training.labels[:, column].tolist() for column, name in enumerate(targets)}
        task = build_task(labels)
        encoder = self.base if fixed else copy.deepcopy(self.base)
        aggregator = build_aggregator(job.aggregator, encoder.feature_size, len(targets)).to(self.device)
        epochs = sizes.epochs_fixed if fixed else sizes.epochs
        learning = (aggregator,) if fixed else (aggregator, encoder)
        optimisers = [
            make_optimiser(module.named_parameters(), weight_decay=WEIGHT_DECAY, decay_all=True) for module in learning
        ]
        rates = (job.aggregator_rate, job.encoder_rate)
        schedule = LearningRateSchedule(first_cycle=epochs)
        lambda_ = 1.0 if job.regime == "tapfm" else 0.0
        adaptation = AdaptationSettings(lambda_=lambda_, chunking=Chunking(), compute_dtype=self.dtype)

        def updates(number: int) -> Any:
            return lambda finite=None: step_optimiser(optimisers[number], finite, slides=1, clip_norm=0.0)

        before = self.look(encoder, aggregator, test, targets)
        best: dict[str, Any] = {"validation_auc": -1.0}
        kept: list[dict[str, Tensor]] = []
        history = []
        for epoch in range(epochs):
            for optimiser, rate in zip(optimisers, rates, strict=False):
                set_learning_rate(optimiser, schedule.rate(epoch, rate))
            aggregator.train()
            losses = []
            for number in make_rng(job.seed, "order", epoch).permutation(len(training.rows)).tolist():
                rows = torch.from_numpy(training.rows[number]).to(self.device)
                known = encode_labels(training.labels[number].tolist(), device=self.device)
                if fixed:
                    z_KD, r_K = (part[rows].requires_grad_() for part in self.features())
                    graph = compute_aggregator_gradients(aggregator, task, z_KD, r_K, known)
                    graph.accumulate_gradients()
                    updates(0)()
                    losses.append(graph.task_loss)
                else:
                    tiles = augment(self.pixels[rows], AUGMENTATION, job.seed, epoch, number)
                    report = two_graph_step(
                        encoder,
                        aggregator,
                        task,
                        tiles,
                        known,
                        adaptation=adaptation,
                        update_aggregator=updates(0),
                        update_encoder=updates(1),
                        slide=str(number),
                    )
                    losses.append(report.loss_agg)
            seen = self.look(encoder, aggregator, validation, targets)
            history.append([float(torch.stack(losses).mean()), seen.auc])
            if seen.auc > best["validation_auc"]:
                best = {"validation_auc": seen.auc, "best_epoch": epoch + 1}
                kept = [copy.deepcopy(module.state_dict()) for module in learning]
        for module, state in zip(learning, kept, strict=True):
            module.load_state_dict(state)
        after = self.look(encoder, aggregator, test, targets)
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
        """Encode every tile once with the encoder as it came."""
        if self.stored is None:
            self.stored = wrap_encoder(self.base, self.dtype).encode(self.pixels, ENCODED_AT_ONCE)
        return self.stored

    @torch.no_grad()
    def look(self, encoder: VitEncoder, aggregator: Any, bags: Bags, targets: Sequence[str]) -> Looked:
        """Predict bags without augmentation; each tile is encoded once, however many bags it is in."""
        aggregator.eval()
        used, places = np.unique(bags.rows, return_inverse=True)
        rows = torch.from_numpy(used).to(self.device)
        stored = self.features() if encoder is self.base else None
        encoded = (
            EncodedTiles(stored.z_KD[rows], stored.r_K[rows])
            if stored is not None
            else wrap_encoder(encoder, self.dtype).encode(self.pixels[rows], ENCODED_AT_ONCE)
        )
        logits, found = [], []
        for of_bag, labels, tiles in zip(places.reshape(bags.rows.shape), bags.labels, bags.rows, strict=True):
            chosen = torch.from_numpy(of_bag).to(self.device)
            output = aggregator(encoded.z_KD[chosen], encoded.r_K[chosen])
            logits.append(output.logits_C.double().tolist())
            heatmap_scores = output.heatmap_scores.double().cpu().numpy().reshape(-1, len(chosen))
            for column, (target, label) in enumerate(zip(targets, labels, strict=True)):
                if label:
                    truth = self.tissue.classes[tiles] == CLASSES.index(target)
                    row = heatmap_scores[column if len(heatmap_scores) > 1 else 0]
                    found.append(auc(truth, row) or 0.0)
        columns = [
            auc(bags.labels[:, column] == 1, np.array([each[column] for each in logits]))
            for column in range(len(targets))
        ]
        return Looked(float(np.mean([each for each in columns if each is not None])), logits, float(np.mean(found)))


class Looked(NamedTuple):
    """What came of looking at bags."""

    auc: float  # mean over targets
    logits: list[list[float]]
    tile_auc: float  # how well tile scores find the tiles of a class, mean over the bags and targets that have it


class Results:
    """Finished jobs, a line each."""

    def __init__(self, path: Path) -> None:
        self.path = path
        text = path.read_text("utf-8") if path.exists() else ""
        self.rows: list[dict[str, Any]] = [json.loads(line) for line in text.splitlines() if line.endswith("}")]
        self.cut_off = bool(text) and not text.endswith("\n")  # a line that was being written when all was killed

    def add(self, row: dict[str, Any]) -> None:
        """Append a job."""
        self.rows.append(row)
        with self.path.open("a", encoding="utf-8") as file:
            file.write("\n" * self.cut_off + json.dumps(row) + "\n")
        self.cut_off = False

    def has(self, job: Job) -> bool:
        """Say whether a job is done."""
        return any(all(row[name] == value for name, value in asdict(job).items()) for row in self.rows)

    def of(self, stage: str) -> list[dict[str, Any]]:
        """List the jobs of a stage."""
        return [row for row in self.rows if row["stage"] == stage]

    def best_rates(self, method: tuple[str, str]) -> tuple[float, float]:
        """Choose learning rates by validation bags; of equal ones the lower."""
        rows = [row for row in self.of("rates") if (row["regime"], row["aggregator"]) == method]
        best = max(rows, key=lambda row: (row["validation_auc"], -row["encoder_rate"], -row["aggregator_rate"]))
        return best["encoder_rate"], best["aggregator_rate"]

    def leading(self) -> list[tuple[str, str]]:
        """Choose rows to go on with, by validation bags: the best fixed and the best finetuned; and all of TAPFM.

        Beside them the paper's aggregator without the attention loss: what TAPFM adds is measured against it.
        """
        best = [max((each for each in METHODS if each[0] == regime), key=self.validation_auc) for regime in BASELINES]
        of_tapfm = [method for method in METHODS if method[0] == "tapfm"]
        return list(dict.fromkeys([*best, ("finetune", "cls-attention"), *of_tapfm]))

    def validation_auc(self, method: tuple[str, str]) -> float:
        """Give the mean over seeds of the binary stage."""
        rows = [row for row in self.of("binary") if (row["regime"], row["aggregator"]) == method]
        return float(np.mean([row["validation_auc"] for row in rows]))


def jobs_of(stage: str, sizes: Sizes, results: Results) -> Iterator[Job]:
    """List the jobs of a stage, seed after seed, so that a part of them can be compared too."""
    if stage == "rates":
        for regime, aggregator in METHODS:
            fixed = regime == "fixed"
            for encoder_rate in (0.0,) if fixed else sizes.encoder_rates:
                for aggregator_rate in sizes.aggregator_rates_fixed if fixed else sizes.aggregator_rates:
                    yield Job(
                        stage, regime, aggregator, "binary", sizes.tiles, RATES_SEED, encoder_rate, aggregator_rate
                    )
        return
    task = "multilabel" if stage == "multilabel" else "binary"
    tiles = sizes.tiles_large if stage == "large" else sizes.tiles
    for seed in range(sizes.seeds):
        for method in METHODS if stage == "binary" else results.leading():
            yield Job(stage, *method, task, tiles, seed, *results.best_rates(method))


def work(arguments: argparse.Namespace, jobs: Any, rows: Any) -> None:
    """Run jobs from a queue in a process of its own; None ends it."""
    torch.set_num_threads(max(1, torch.get_num_threads() // arguments.processes))
    trainer = make_trainer(arguments)
    while (job := jobs.get()) is not None:
        rows.put(trainer.run(job))


def make_trainer(arguments: argparse.Namespace) -> Trainer:
    """Load tiles and encoder."""
    loaded = load_encoder(arguments.encoder, weights=arguments.weights, tile_px=arguments.tile_px)
    return Trainer(
        Tissue(arguments.tiles, arguments.tile_px),
        loaded.encoder,
        parse_sizes(arguments),
        torch.device(arguments.device),
    )


def parse_sizes(arguments: argparse.Namespace) -> Sizes:
    return QUICK if arguments.quick else Sizes()


def train(arguments: argparse.Namespace) -> None:
    """Go through the stages; several processes share a GPU, which a small encoder alone cannot fill."""
    results, deadline = Results(arguments.results), time.monotonic() + 60 * arguments.minutes
    context = multiprocessing.get_context("spawn")
    jobs, rows = context.Queue(), context.Queue()
    workers: list[SpawnProcess] = []
    try:
        for stage in arguments.stages:
            todo = [job for job in jobs_of(stage, parse_sizes(arguments), results) if not results.has(job)]
            under_way = 0
            while todo or under_way:
                while todo and under_way < arguments.processes and time.monotonic() < deadline:
                    if len(workers) < arguments.processes:
                        workers.append(context.Process(target=work, args=(arguments, jobs, rows)))
                        workers[-1].start()
                    jobs.put(todo.pop(0))
                    under_way += 1
                if not under_way:
                    print(f"Time is over with {len(todo)} jobs of {stage} left: the same command goes on.")
                    return
                try:
                    row = rows.get(timeout=5)
                except queue.Empty:
                    if all(worker.is_alive() for worker in workers):
                        continue
                    raise SystemExit("A process has died: its message is above. The same command goes on.") from None
                under_way -= 1
                results.add(row)
                print(
                    f"{stage:10} {row['regime']:8} {row['aggregator']:13} seed {row['seed']:<3} K {row['tiles']:<3} "
                    f"rates {row['encoder_rate']:g} {row['aggregator_rate']:g}: validation {row['validation_auc']:.3f} "
                    f"(epoch {row['best_epoch']}), test {row['test_auc']:.3f}, tiles {row['tile_auc_before']:.2f} to "
                    f"{row['tile_auc_after']:.2f}, {row['seconds']:.0f} s",
                    flush=True,
                )
    finally:
        for _ in workers:
            jobs.put(None)
        for worker in workers:
            worker.join(timeout=30)
            worker.terminate()


def report(arguments: argparse.Namespace) -> None:
    """Print the tables, as Markdown."""
    results, tissue = Results(arguments.results), Tissue(arguments.tiles, arguments.tile_px)
    devices = ", ".join(sorted({row["device"] for row in results.rows}))
    print(f"{arguments.encoder} at {arguments.tile_px} px; {devices}.\n")
    for stage, title in (
        ("binary", "Binary, K = {tiles}"),
        ("large", "Binary, K = {tiles}"),
        ("multilabel", "Multi-label, K = {tiles}, mean AUC of four targets"),
    ):
        rows = results.of(stage)
        if rows:
            print(f"### {title.format(tiles=rows[0]['tiles'])}\n")
            print("\n".join(table_of(rows, tissue, parse_sizes(arguments))) + "\n")


def table_of(rows: Sequence[dict[str, Any]], tissue: Tissue, sizes: Sizes) -> list[str]:
    """Lay out a stage: AUC with its interval over test bags, the paired test against the best row, and tiles found."""
    task, tiles = rows[0]["task"], rows[0]["tiles"]
    targets = TARGETS[task]
    test = tissue.bags("test", task, tiles, sizes.test_bags)
    of_method: dict[str, list[dict[str, Any]]] = {}
    for row in sorted(rows, key=lambda row: row["seed"]):
        of_method.setdefault(f"{row['regime']} + {row['aggregator']}", []).append(row)
    # only seeds that every method has: a mean over other seeds would be of other training bags
    seeds = sorted(set.intersection(*({row["seed"] for row in each} for each in of_method.values())))
    of_method = {name: [row for row in each if row["seed"] in seeds] for name, each in of_method.items()}
    logits = {name: [row["test_logits"] for row in each] for name, each in of_method.items()}
    logits["colour statistics"] = [colour_logits(tissue, task, tiles, sizes, seed, test) for seed in seeds]
    methods = {name: [predictions_of(each, test, targets) for each in seeds_of] for name, seeds_of in logits.items()}
    shown = targets[0] if len(targets) == 1 else "macro"
    aucs = compare_methods(methods, target_kinds(targets), "patient", against=next(iter(methods))).aucs
    best = max(of_method, key=lambda name: aucs[name, shown].value or 0.0)
    against = {
        pair.second if pair.first == best else pair.first: pair
        for pair in compare_methods(methods, target_kinds(targets), "patient", against=best).pairs
        if pair.target == shown
    }
    lines = [
        f"{len(test.rows)} test bags, {sizes.training_bags} training bags, {len(seeds)} seeds.",
        "",
        "| method | AUC, mean of seeds | over seeds | p to best | tiles found: before | after | rates | epoch |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name in sorted(methods, key=lambda name: -(aucs[name, shown].value or 0.0)):
        each, estimate = of_method.get(name, []), aucs[name, shown]
        spread = [mean_auc(one, test) for one in logits[name]]
        p_holm = None if name == best else against[name].p_holm
        p = "best" if name == best else "-" if p_holm is None else f"{p_holm:.3f}"
        found = (
            f"{np.mean([row['tile_auc_before'] for row in each]):.2f} "
            f"| {np.mean([row['tile_auc_after'] for row in each]):.2f} "
            f"| {each[0]['encoder_rate']:g}, {each[0]['aggregator_rate']:g} "
            f"| {', '.join(str(row['best_epoch']) for row in each)}"
            if each
            else "| | |"
        )
        lines.append(f"| {name} | {in_words(estimate)} | {min(spread):.3f} to {max(spread):.3f} | {p} | {found} |")
    lines += [
        "",
        "| by seed | test AUC | validation AUC | training loss at the end | tiles found after |",
        "|---|---|---|---|---|",
    ]
    for name, each in of_method.items():
        numbers = [
            [f"{row['test_auc']:.3f}" for row in each],
            [f"{row['validation_auc']:.3f}" for row in each],
            [f"{row['history'][-1][0]:.2f}" for row in each],
            [f"{row['tile_auc_after']:.2f}" for row in each],
        ]
        lines.append(f"| {name} | {' | '.join(', '.join(column) for column in numbers)} |")
    return lines


def in_words(estimate: Estimate) -> str:
    """Write an AUC with its interval, where there is one."""
    interval = "" if estimate.low is None else f" ({estimate.low:.3f} to {estimate.high:.3f})"
    return f"{estimate.value:.3f}{interval}"


def mean_auc(logits: Sequence[Sequence[float]], bags: Bags) -> float:
    """Give the AUC of bags, mean over targets."""
    columns = range(bags.labels.shape[1])
    return float(np.mean([auc(bags.labels[:, c] == 1, np.array([each[c] for each in logits])) or 0.0 for c in columns]))


def predictions_of(logits: Sequence[Sequence[float]], bags: Bags, targets: Sequence[str]) -> list[Prediction]:
    """Put logits beside labels; a bag stands for a patient."""
    return [
        Prediction(
            slide_id=f"bag {number}",
            patient_id=f"bag {number}",
            split="test",
            cohort=None,
            labels=dict(zip(targets, map(int, labels), strict=True)),
            logits=dict(zip(targets, of_bag, strict=True)),
            tiles=bags.rows.shape[1],
        )
        for number, (of_bag, labels) in enumerate(zip(logits, bags.labels, strict=True))
    ]


def colour_logits(tissue: Tissue, task: str, tiles: int, sizes: Sizes, seed: int, test: Bags) -> list[list[float]]:
    """Predict from colours alone: what a method has to beat before it has seen any tissue."""
    # here, as it comes with the reading of slides, which a machine that only trains need not be able to do
    from tapfm.tiles.colours import colour_statistics

    training = tissue.bags("train", task, tiles, sizes.training_bags, seed)
    seen, unseen = (
        np.array([colour_statistics(tissue.histograms[rows].sum(0)) for rows in bags.rows]) for bags in (training, test)
    )
    columns = [
        logistic.fit_logistic(seen, training.labels[:, column]).logits(unseen)
        for column in range(training.labels.shape[1])
    ]
    return np.stack(columns, axis=1).tolist()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("train", "report"))
    parser.add_argument("--tiles", type=Path, required=True)
    parser.add_argument("--results", type=Path, required=True)
    parser.add_argument("--encoder", default="dinov2-s14")
    parser.add_argument("--weights", type=Path)
    parser.add_argument("--tile-px", type=int, default=154)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--stages", nargs="+", choices=STAGES, default=list(STAGES))
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin no job after so many")
    parser.add_argument("--quick", action="store_true", help="a few bags, to see that it works")
    arguments = parser.parse_args()
    {"train": train, "report": report}[arguments.what](arguments)


if __name__ == "__main__":
    main()
