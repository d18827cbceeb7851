"""Compare implementations of AdamW: torch, tapfm, torchao and bitsandbytes. Time, memory and accuracy of a step.

    python benchmarks/optimisers.py                                    # a ViT-S on the CPU
    python benchmarks/optimisers.py --device cuda                      # a ViT-L and a ViT-g; about 40 GiB (estimate)
    python benchmarks/optimisers.py --only accuracy --check-steps 3000
    python benchmarks/optimisers.py --json out/optimisers.json

torchao and bitsandbytes are optional: pip install torchao bitsandbytes. A library that is missing is skipped.

Speed: parameters have the shapes of an encoder, gradients are random. In each round, every optimiser is built, warmed
up and timed, one after the other. `ratio` is the median over rounds of the time relative to torch's fused AdamW, with
its range. On the CPU, times are CPU times of this process, which other processes hardly influence. `first step` is the
wall time of the first step, with an empty compiler cache.

Memory: `state` is the size of moments and float32 master weights on any device. `extra` is the additional peak memory
of a later step: allocated bytes on CUDA, resident memory of the process on the CPU (Linux only, and coarse).

Accuracy: a tensor of 16,384 elements and fixed gradients. `difference` is |p - p64| / |p64 - p0|, where p64 is AdamW in
float64, and p are the most precise values of the optimiser: its master weights if it has them, else its weights. With
bfloat16 weights, tapfm keeps float32 master weights. For torch (except `no master weights`) and in the rows named
`master weights`, this script keeps them. The other rows update bfloat16 weights, torchao with stochastic rounding.
Gradients are
    even      noise around a constant, with the same scale for all elements
    spread    the same, but the scales of the elements differ by up to a factor of 1,000
    tiny      like `spread`, times 1e-7
    falling   half of the elements fall to a thousandth after 50 steps; only these are compared. Their second moment
              then decreases by 0.1% per step, which rounding to nearest would lose
`resumed` shows whether a run that is saved, loaded into a new optimiser and continued with another random seed gives
the same bits as an uninterrupted run. Prints Markdown.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import gc
import importlib
import json
import os
import platform
import re
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
import torch._dynamo
from torch import Tensor, nn

import tapfm
from tapfm.adaptation.moments import MomentFormat
from tapfm.adaptation.optimisers import AdamW
from tapfm.encoders.build import build_vit
from tapfm.encoders.catalog import find_encoder_card

RATE, WEIGHT_DECAY = 1e-5, 0.01
REFERENCE = "torch, fused"
CPU_ENCODERS, CUDA_ENCODERS = ("dinov2-s14",), ("uni", "h-optimus-0")
CASES = ("even", "spread", "tiny", "falling")
SHAPE = (64, 256)  # of the tensor for accuracy: large enough that every library uses 8 bits
Weights = Literal["float32", "bfloat16"]
MIB = 2**20


class Optimiser(Protocol):
    """Interface of the compared optimisers."""

    def step(self, gradients: list[Tensor]) -> None:
        """Update with these gradients."""
        ...

    def precise_weights(self) -> list[Tensor]:
        """Return the parameters in the highest precision that is stored."""
        ...

    def state_tensors(self) -> Iterator[Tensor]:
        """Yield all tensors that are stored between steps, except the weights."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Return weights and optimiser state."""
        ...

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Load what `state_dict` returned."""
        ...


class TapfmOptimiser:
    """AdamW of tapfm."""

    def __init__(self, parameters: list[nn.Parameter], **options: Any) -> None:
        self._parameters = {f"{number:04d}": parameter for number, parameter in enumerate(parameters)}
        device = parameters[0].device
        if parameters[0].dtype == torch.bfloat16:
            options["compute_dtype"] = torch.bfloat16
        self._optimiser = AdamW(self._parameters, device=device, weight_decay=WEIGHT_DECAY, decay_all=True, **options)
        self._optimiser.set_learning_rate(RATE)

    def step(self, gradients: list[Tensor]) -> None:
        for parameter, gradient in zip(self._parameters.values(), gradients, strict=True):
            parameter.grad = gradient
        self._optimiser.step()

    def precise_weights(self) -> list[Tensor]:
        masters = self._optimiser.master_weights()
        return [masters[name] for name in self._parameters]

    def state_tensors(self) -> Iterator[Tensor]:
        for shard in self._optimiser.shards:
            yield from shard.moments.values()
            if shard.master is not None:
                yield shard.master

    def state_dict(self) -> dict[str, Any]:
        return {"masters": self._optimiser.master_weights(), "state": self._optimiser.state()}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        self._optimiser.load_master_weights(saved["masters"])
        self._optimiser.restore(saved["state"])


class TorchOptimiser:
    """An optimiser with torch's interface. With `masters`, it updates float32 copies of the weights."""

    def __init__(
        self,
        parameters: list[nn.Parameter],
        optimiser_class: Callable[..., torch.optim.Optimizer],
        masters: bool,
        **options: Any,
    ) -> None:
        self._weights = parameters
        self._updated = [nn.Parameter(p.detach().float()) for p in parameters] if masters else parameters
        self._masters = masters
        self._optimiser = optimiser_class(self._updated, lr=RATE, weight_decay=WEIGHT_DECAY, **options)

    @torch.no_grad()
    def step(self, gradients: list[Tensor]) -> None:
        for parameter, gradient in zip(self._updated, gradients, strict=True):
            parameter.grad = gradient.to(parameter.dtype)
        self._optimiser.step()
        self._optimiser.zero_grad()
        if self._masters:
            torch._foreach_copy_(tuple(self._weights), tuple(self._updated))

    def precise_weights(self) -> list[Tensor]:
        return [parameter.detach() for parameter in self._updated]

    def state_tensors(self) -> Iterator[Tensor]:
        for state in self._optimiser.state.values():
            for value in state.values():
                yield from plain_tensors(value)
        if self._masters:
            yield from self._updated

    def state_dict(self) -> dict[str, Any]:
        return {"updated": self.precise_weights(), "state": self._optimiser.state_dict()}

    @torch.no_grad()
    def load_state_dict(self, saved: dict[str, Any]) -> None:
        torch._foreach_copy_(tuple(self._updated), tuple(saved["updated"]))
        if self._masters:
            torch._foreach_copy_(tuple(self._weights), tuple(self._updated))
        self._optimiser.load_state_dict(saved["state"])


def plain_tensors(value: Any) -> Iterator[Tensor]:
    """Yield a tensor, or the inner tensors of a tensor subclass."""
    if isinstance(value, Tensor):
        if hasattr(value, "__tensor_flatten__"):
            names, _ = value.__tensor_flatten__()
            yield from (getattr(value, name) for name in names)
        else:
            yield value


BuildOptimiser = Callable[[list[nn.Parameter]], Optimiser]


def tapfm_adamw(moments: MomentFormat, *, compiled: bool = False, offload: bool = False) -> BuildOptimiser:
    return lambda parameters: TapfmOptimiser(parameters, moments=moments, compiled=compiled, offload=offload)


def torch_adamw(
    optimiser_class: Callable[..., torch.optim.Optimizer], *, masters: bool = False, **options: Any
) -> BuildOptimiser:
    return lambda parameters: TorchOptimiser(parameters, optimiser_class, masters, **options)


def list_optimisers(weights: Weights, device: torch.device) -> dict[str, BuildOptimiser]:
    """Return the optimisers to compare for this dtype of the weights. The first one is the reference."""
    low_precision = weights == "bfloat16"  # the other libraries need float32 master weights from this script
    builders: dict[str, BuildOptimiser] = {
        REFERENCE: torch_adamw(torch.optim.AdamW, masters=low_precision, fused=True),
        "torch, foreach": torch_adamw(torch.optim.AdamW, masters=low_precision, foreach=True),
    }
    if low_precision:
        builders["torch, fused, no master weights"] = torch_adamw(torch.optim.AdamW, fused=True)
    formats: tuple[MomentFormat, ...] = ("float32", "bfloat16", "int8")
    builders |= {f"tapfm, {moments}": tapfm_adamw(moments) for moments in formats}
    builders |= {f"tapfm, {moments}, compiled": tapfm_adamw(moments, compiled=True) for moments in formats}
    if device.type == "cuda":
        builders |= {
            f"tapfm, {moments}, offloaded": tapfm_adamw(moments, compiled=True, offload=True)
            for moments in ("float32", "int8")
        }
    if torchao := import_optional("torchao.optim"):
        builders["torchao AdamW8bit"] = torch_adamw(torchao.AdamW8bit, bf16_stochastic_round=low_precision)
        if low_precision:
            builders["torchao AdamW8bit, master weights"] = torch_adamw(torchao.AdamW8bit, masters=True)
        plain = getattr(import_optional("torchao.optim.adam"), "_AdamW", None)
        if plain is not None:
            builders["torchao _AdamW"] = torch_adamw(plain, bf16_stochastic_round=low_precision)
    if bitsandbytes := import_optional("bitsandbytes.optim"):
        builders["bitsandbytes AdamW8bit"] = torch_adamw(bitsandbytes.AdamW8bit)
        if low_precision:
            builders["bitsandbytes AdamW8bit, master weights"] = torch_adamw(bitsandbytes.AdamW8bit, masters=True)
    return builders


def import_optional(module: str) -> Any:
    """Import a module, or return None if its library is not installed."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] != module.split(".")[0]:
            raise
        return None


@dataclass
class SpeedRow:
    """Time and memory of one optimiser."""

    encoder: str
    weights: str
    optimiser: str
    first_step_s: float = 0.0
    step_s: float = 0.0
    ratio: float = 0.0
    smallest_ratio: float = 0.0
    largest_ratio: float = 0.0
    state_bytes: int = 0
    parameters: int = 0
    extra_bytes: int = 0
    seconds: list[float] = field(default_factory=list)  # one per round


def measure_speed(
    encoder: str, weights: Weights, device: torch.device, rounds: int, steps: int, names: list[str]
) -> list[SpeedRow]:
    """Time all optimisers on the parameters of an encoder, in turn."""
    with torch.device("meta"):
        shapes = [parameter.shape for parameter in build_vit(find_encoder_card(encoder)).parameters()]
    generator = torch.Generator(device).manual_seed(0)
    dtype = getattr(torch, weights)
    gradients = [torch.randn(shape, generator=generator, device=device).to(dtype) for shape in shapes]
    count = sum(shape.numel() for shape in shapes)
    builders = select(list_optimisers(weights, device), names)
    rows = {name: SpeedRow(encoder, weights, name, parameters=count) for name in builders}
    for _ in range(rounds):
        for name, build in builders.items():
            measure_round(rows[name], build, gradients, steps)
            gc.collect()
            if device.type == "cuda":
                torch.cuda.empty_cache()
    for row in rows.values():
        row.step_s = statistics.median(row.seconds)
        ratios = [own / other for own, other in zip(row.seconds, rows[REFERENCE].seconds, strict=True)]
        row.ratio, row.smallest_ratio, row.largest_ratio = statistics.median(ratios), min(ratios), max(ratios)
    return list(rows.values())


def measure_round(row: SpeedRow, build: BuildOptimiser, gradients: list[Tensor], steps: int) -> None:
    """Build an optimiser, and add its measurements of one round to a row."""
    device = gradients[0].device
    parameters = [nn.Parameter(0.02 * torch.ones_like(gradient)) for gradient in gradients]
    optimiser = build(parameters)
    first = time_call(device, lambda: optimiser.step(gradients))
    row.first_step_s = row.first_step_s or first
    optimiser.step(gradients)
    before = reset_peak_memory(device)
    optimiser.step(gradients)
    row.extra_bytes = max(row.extra_bytes, peak_bytes(device) - before)

    def run_steps() -> None:
        for _ in range(steps):
            optimiser.step(gradients)

    clock = time.perf_counter if device.type == "cuda" else time.process_time
    row.seconds.append(time_call(device, run_steps, clock) / steps)
    row.state_bytes = sum({t.data_ptr(): t.nbytes for t in optimiser.state_tensors()}.values())


def time_call(device: torch.device, call: Callable[[], object], now: Callable[[], float] = time.perf_counter) -> float:
    synchronize(device)
    start = now()
    call()
    synchronize(device)
    return now() - start


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def reset_peak_memory(device: torch.device) -> int:
    """Reset the peak memory, and return the memory in use."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        return torch.cuda.memory_allocated(device)
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").malloc_trim(0)  # so that memory that is used again is counted
        Path("/proc/self/clear_refs").write_text("5")  # resets the peak of resident memory (Linux)
    return peak_bytes(device)


def peak_bytes(device: torch.device) -> int:
    """Return the peak memory since `reset_peak_memory`, or 0 if it cannot be measured."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device)
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        return 0
    return 1024 * int(next(line.split()[1] for line in status.splitlines() if line.startswith("VmHWM")))


@dataclass
class AccuracyRow:
    """Differences between one optimiser and AdamW in float64, by case."""

    weights: str
    optimiser: str
    even: float
    spread: float
    tiny: float
    falling: float
    resumed_exactly: bool  # same bits as an uninterrupted run


class GradientSequence:
    """The gradients of a case, the same for every optimiser."""

    def __init__(self, case: str, device: torch.device) -> None:
        generator = torch.Generator().manual_seed(1)
        self._case, self._device = case, device
        self._size = 10 ** (-3 * torch.rand(SHAPE, generator=generator, dtype=torch.float64))
        self._sign = torch.randint(0, 2, SHAPE, generator=generator, dtype=torch.float64) * 2 - 1
        self.compared = torch.ones(SHAPE, dtype=torch.bool)
        if case == "even":
            self._size.fill_(1.0)
        if case == "falling":
            self.compared[:, ::2] = False

    def __call__(self, step: int, dtype: torch.dtype) -> Tensor:
        """Return the gradient of a step, counted from 0."""
        if self._case == "falling":
            small = self.compared if step >= 50 else torch.zeros_like(self.compared)
            gradient = self._sign * torch.where(small, 1e-3, 1.0)
        else:
            noise = torch.randn(SHAPE, generator=torch.Generator().manual_seed(100 + step), dtype=torch.float64)
            gradient = self._size * (noise + 0.5 * self._sign) * (1e-7 if self._case == "tiny" else 1.0)
        return gradient.to(torch.bfloat16).to(self._device, dtype)  # the same values for all dtypes of the weights


def start_values(device: torch.device, dtype: torch.dtype) -> nn.Parameter:
    values = 0.02 * torch.randn(SHAPE, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    return nn.Parameter(values.to(torch.bfloat16).to(device, dtype))


def run_case(build: BuildOptimiser, case: str, device: torch.device, dtype: torch.dtype, steps: int) -> Tensor:
    """Return the change of the compared elements of the parameter, in float64."""
    parameter = start_values(device, dtype)
    start = parameter.detach().cpu().to(torch.float64, copy=True)
    gradient = GradientSequence(case, device)
    optimiser = build([parameter])
    for step in range(steps):
        optimiser.step([gradient(step, dtype)])
    return (optimiser.precise_weights()[0].detach().double().cpu() - start)[gradient.compared]


def is_resumed_exactly(build: BuildOptimiser, device: torch.device, dtype: torch.dtype, steps: int = 20) -> bool:
    """Return whether saving, loading and continuing gives the same bits as an uninterrupted run."""
    results = []
    for interrupted in (False, True):
        torch.manual_seed(0)
        gradient = GradientSequence("spread", device)
        optimiser = build([start_values(device, dtype)])
        for step in range(steps):
            if interrupted and step == steps // 2:
                with tempfile.TemporaryDirectory() as folder:
                    torch.save(optimiser.state_dict(), Path(folder) / "saved.pt")
                    optimiser = build([start_values(device, dtype)])
                    optimiser.load_state_dict(torch.load(Path(folder) / "saved.pt", weights_only=False))
                torch.manual_seed(1)
            optimiser.step([gradient(step, dtype)])
        results.append(optimiser.precise_weights()[0].detach().clone())
    return torch.equal(*results)


def measure_accuracy(weights: Weights, device: torch.device, steps: int, names: list[str]) -> list[AccuracyRow]:
    """Compare all optimisers with AdamW in float64 on the CPU."""
    cpu, dtype = torch.device("cpu"), getattr(torch, weights)
    exact = {
        case: run_case(torch_adamw(torch.optim.AdamW, foreach=True), case, cpu, torch.float64, steps) for case in CASES
    }
    rows = []
    for name, build in select(list_optimisers(weights, device), names).items():
        differences = {}
        for case in CASES:
            torch.manual_seed(0)
            change = run_case(build, case, device, dtype, steps)
            differences[case] = float((change - exact[case]).norm() / exact[case].norm())
        rows.append(AccuracyRow(weights, name, **differences, resumed_exactly=is_resumed_exactly(build, device, dtype)))
    return rows


def select(builders: dict[str, BuildOptimiser], names: Iterable[str]) -> dict[str, BuildOptimiser]:
    """Return the optimisers whose name matches one of the patterns, and the reference."""
    pattern = "|".join(names)
    return {name: build for name, build in builders.items() if name == REFERENCE or re.search(pattern, name)}


def speed_table(rows: list[SpeedRow]) -> str:
    lines = [
        "| encoder | weights | optimiser | step, ms | ratio | range | first step, s | state, B/param | extra, MiB |",
        "|---|---|---|--:|--:|--:|--:|--:|--:|",
    ]
    lines += [
        f"| {row.encoder} | {row.weights} | {row.optimiser} | {1e3 * row.step_s:,.1f} | {row.ratio:.2f} | "
        f"{row.smallest_ratio:.2f} to {row.largest_ratio:.2f} | {row.first_step_s:.2f} | "
        f"{row.state_bytes / row.parameters:.2f} | {row.extra_bytes / MIB:,.0f} |"
        for row in rows
    ]
    return "\n".join(lines)


def accuracy_table(rows: list[AccuracyRow]) -> str:
    lines = [
        "| weights | optimiser | even | spread | tiny | falling | resumed |",
        "|---|---|--:|--:|--:|--:|---|",
    ]
    lines += [
        f"| {row.weights} | {row.optimiser} | {row.even:.1e} | {row.spread:.1e} | {row.tiny:.1e} | {row.falling:.1e} | "
        f"{'same bits' if row.resumed_exactly else 'differs'} |"
        for row in rows
    ]
    return "\n".join(lines)


def library_versions() -> dict[str, str]:
    """Return the versions of the compared libraries. Print which ones are missing."""
    versions = {"tapfm": tapfm.__version__, "torch": torch.__version__}
    for name in ("torchao", "bitsandbytes"):
        module = import_optional(name)
        if module is None:
            print(f"{name} is not installed and is skipped. To compare it: pip install {name}")
        else:
            versions[name] = module.__version__
    return versions


def processor_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        model = next(line.split(":")[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        model = platform.machine()
    return f"{model}, {torch.get_num_threads()} thread(s)"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--encoder", nargs="+", help="encoders whose parameter shapes are used")
    parser.add_argument("--weights", nargs="+", choices=("float32", "bfloat16"), default=["float32", "bfloat16"])
    parser.add_argument(
        "--optimiser", nargs="+", default=[], help="only optimisers whose name matches one of these regular expressions"
    )
    parser.add_argument("--only", choices=("speed", "accuracy"))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=5, help="timed steps of an optimiser in each round")
    parser.add_argument("--check-steps", type=int, default=1000, help="steps after which accuracy is compared")
    parser.add_argument("--threads", type=int, default=1, help="number of CPU threads")
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch._dynamo.config.recompile_limit = 64  # all moment formats share one compiled function
    device = torch.device(arguments.device)
    encoders = arguments.encoder or (CUDA_ENCODERS if device.type == "cuda" else CPU_ENCODERS)
    results: dict[str, Any] = {"machine": processor_name(device), "versions": library_versions()}
    print(", ".join([*(f"{name} {version}" for name, version in results["versions"].items()), results["machine"]]))
    with tempfile.TemporaryDirectory() as cache:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache
        if arguments.only != "accuracy":
            speed = [
                row
                for encoder in encoders
                for weights in arguments.weights
                for row in measure_speed(
                    encoder, weights, device, arguments.rounds, arguments.steps, arguments.optimiser
                )
            ]
            print(f"\n{arguments.rounds} rounds of {arguments.steps} steps\n\n{speed_table(speed)}", flush=True)
            results["speed"] = [asdict(row) for row in speed]
        if arguments.only != "speed":
            accuracy = [
                row
                for weights in arguments.weights
                for row in measure_accuracy(weights, device, arguments.check_steps, arguments.optimiser)
            ]
            print(f"\nAfter {arguments.check_steps:,} steps\n\n{accuracy_table(accuracy)}")
            results["accuracy"] = [asdict(row) for row in accuracy]
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
