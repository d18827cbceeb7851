"""Compare AdamW with small state: torch's, ours, torchao's and bitsandbytes'. Time, memory and accuracy of a step.

    python benchmarks/optimisers.py                                    # a ViT-S on the CPU
    python benchmarks/optimisers.py --device cuda                      # a ViT-L and a ViT-g; about 40 GiB (estimate)
    python benchmarks/optimisers.py --only accuracy --check-steps 3000
    python benchmarks/optimisers.py --json out/optimisers.json

torchao and bitsandbytes are optional: pip install torchao bitsandbytes. A library that is missing is skipped.

Speed: parameters have the shapes of an encoder, gradients are random. In each round every optimiser is built, warmed up
and timed, one after the other; `ratio` is the median of the rounds' ratios to torch's fused AdamW, with their range. On
the CPU, a step is timed in processor time of this process, which other processes on the machine hardly change. `first
step` is the first one in this process, with an empty compiler cache, by the clock.

Memory: `state` counts the bytes of moments and float32 masters on any device. `extra` is the peak during a later step
above what was in use before it: allocated bytes on CUDA, resident memory of the process on the CPU (Linux only, and
coarse).

Accuracy: a tensor of 16,384 elements and fixed gradients. `difference` is |p - p64| / |p64 - p0|, where p64 is AdamW in
float64 and p the most precise values the optimiser keeps: masters, or else weights. With bfloat16 weights, `masters`
means that this script keeps float32 copies for an optimiser that has none of its own (torch: unless `no masters`); the
others update bfloat16 weights, torchao's with stochastic rounding. Gradients are
    even      noise around a constant, of one size for all elements
    spread    the same, but the elements of a block differ by up to 1,000 times in size
    tiny      like `spread`, times 1e-7
    falling   half of the elements fall to a thousandth after 50 steps; these are compared. Their second moment then
              shrinks by 0.1% per step, which rounding to nearest loses
`resumed` says whether a run that is saved, loaded into a new optimiser and continued with another random seed has the
same bits as one without a break. Prints Markdown.
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
from tapfm.encoders.catalog import encoder_card

RATE, WEIGHT_DECAY = 1e-5, 0.01
REFERENCE = "torch, fused"
CPU_ENCODERS, CUDA_ENCODERS = ("dinov2-s14",), ("uni", "h-optimus-0")
CASES = ("even", "spread", "tiny", "falling")
SHAPE = (64, 256)  # of the tensor whose accuracy is checked: large enough for every library to use 8 bits
Weights = Literal["float32", "bfloat16"]
MIB = 2**20


class Optimiser(Protocol):
    """What the benchmark needs of an optimiser."""

    def step(self, gradients: list[Tensor]) -> None:
        """Update with these gradients."""
        ...

    def precise(self) -> list[Tensor]:
        """Give the most precise values of the parameters that are kept."""
        ...

    def state_tensors(self) -> Iterator[Tensor]:
        """Yield every tensor that is kept between steps, weights left out."""
        ...

    def save(self) -> dict[str, Any]:
        """Give what a checkpoint has to hold."""
        ...

    def load(self, saved: dict[str, Any]) -> None:
        """Continue from a checkpoint."""
        ...


class Ours:
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

    def precise(self) -> list[Tensor]:
        masters = self._optimiser.master_weights()
        return [masters[name] for name in self._parameters]

    def state_tensors(self) -> Iterator[Tensor]:
        for shard in self._optimiser.shards:
            yield from shard.moments.values()
            if shard.master is not None:
                yield shard.master

    def save(self) -> dict[str, Any]:
        return {"masters": self._optimiser.master_weights(), "state": self._optimiser.state()}

    def load(self, saved: dict[str, Any]) -> None:
        self._optimiser.load_master_weights(saved["masters"])
        self._optimiser.restore(saved["state"])


class Library:
    """An optimiser with torch's interface; with `masters`, float32 copies of the weights are what it updates."""

    def __init__(
        self, parameters: list[nn.Parameter], kind: Callable[..., torch.optim.Optimizer], masters: bool, **options: Any
    ) -> None:
        self._weights = parameters
        self._updated = [nn.Parameter(p.detach().float()) for p in parameters] if masters else parameters
        self._masters = masters
        self._optimiser = kind(self._updated, lr=RATE, weight_decay=WEIGHT_DECAY, **options)

    @torch.no_grad()
    def step(self, gradients: list[Tensor]) -> None:
        for parameter, gradient in zip(self._updated, gradients, strict=True):
            parameter.grad = gradient.to(parameter.dtype)
        self._optimiser.step()
        self._optimiser.zero_grad()
        if self._masters:
            torch._foreach_copy_(tuple(self._weights), tuple(self._updated))

    def precise(self) -> list[Tensor]:
        return [parameter.detach() for parameter in self._updated]

    def state_tensors(self) -> Iterator[Tensor]:
        for state in self._optimiser.state.values():
            for value in state.values():
                yield from plain_tensors(value)
        if self._masters:
            yield from self._updated

    def save(self) -> dict[str, Any]:
        return {"updated": self.precise(), "state": self._optimiser.state_dict()}

    @torch.no_grad()
    def load(self, saved: dict[str, Any]) -> None:
        torch._foreach_copy_(tuple(self._updated), tuple(saved["updated"]))
        if self._masters:
            torch._foreach_copy_(tuple(self._weights), tuple(self._updated))
        self._optimiser.load_state_dict(saved["state"])


def plain_tensors(value: Any) -> Iterator[Tensor]:
    """Yield a tensor, or the tensors that one of a subclass is made of."""
    if isinstance(value, Tensor):
        if hasattr(value, "__tensor_flatten__"):
            names, _ = value.__tensor_flatten__()
            yield from (getattr(value, name) for name in names)
        else:
            yield value


Build = Callable[[list[nn.Parameter]], Optimiser]


def ours(moments: MomentFormat, *, compiled: bool = False, offload: bool = False) -> Build:
    return lambda parameters: Ours(parameters, moments=moments, compiled=compiled, offload=offload)


def library(kind: Callable[..., torch.optim.Optimizer], *, masters: bool = False, **options: Any) -> Build:
    return lambda parameters: Library(parameters, kind, masters, **options)


def optimisers(weights: Weights, device: torch.device) -> dict[str, Build]:
    """List what can be compared with weights of this type; torch's fused AdamW comes first."""
    lowered = weights == "bfloat16"  # others than ours then need float32 masters that we keep for them
    found: dict[str, Build] = {
        REFERENCE: library(torch.optim.AdamW, masters=lowered, fused=True),
        "torch, foreach": library(torch.optim.AdamW, masters=lowered, foreach=True),
    }
    if lowered:
        found["torch, fused, no masters"] = library(torch.optim.AdamW, fused=True)
    forms: tuple[MomentFormat, ...] = ("float32", "bfloat16", "int8")
    found |= {f"tapfm, {form}": ours(form) for form in forms}
    found |= {f"tapfm, {form}, compiled": ours(form, compiled=True) for form in forms}
    if device.type == "cuda":
        found |= {f"tapfm, {form}, offloaded": ours(form, compiled=True, offload=True) for form in ("float32", "int8")}
    if torchao := optional("torchao.optim"):
        found["torchao AdamW8bit"] = library(torchao.AdamW8bit, bf16_stochastic_round=lowered)
        if lowered:
            found["torchao AdamW8bit, masters"] = library(torchao.AdamW8bit, masters=True)
        plain = getattr(optional("torchao.optim.adam"), "_AdamW", None)
        if plain is not None:
            found["torchao _AdamW"] = library(plain, bf16_stochastic_round=lowered)
    if bitsandbytes := optional("bitsandbytes.optim"):
        found["bitsandbytes AdamW8bit"] = library(bitsandbytes.AdamW8bit)
        if lowered:
            found["bitsandbytes AdamW8bit, masters"] = library(bitsandbytes.AdamW8bit, masters=True)
    return found


def optional(module: str) -> Any:
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
    seconds: list[float] = field(default_factory=list)  # one of each round


def measure_speed(
    encoder: str, weights: Weights, device: torch.device, rounds: int, steps: int, names: list[str]
) -> list[SpeedRow]:
    """Time all optimisers on the parameters of an encoder, in turn."""
    with torch.device("meta"):
        shapes = [parameter.shape for parameter in build_vit(encoder_card(encoder)).parameters()]
    generator = torch.Generator(device).manual_seed(0)
    dtype = getattr(torch, weights)
    gradients = [torch.randn(shape, generator=generator, device=device).to(dtype) for shape in shapes]
    count = sum(shape.numel() for shape in shapes)
    builds = chosen(optimisers(weights, device), names)
    rows = {name: SpeedRow(encoder, weights, name, parameters=count) for name in builds}
    for _ in range(rounds):
        for name, build in builds.items():
            take_turn(rows[name], build, gradients, steps)
            gc.collect()
            if device.type == "cuda":
                torch.cuda.empty_cache()
    for row in rows.values():
        row.step_s = statistics.median(row.seconds)
        ratios = [own / other for own, other in zip(row.seconds, rows[REFERENCE].seconds, strict=True)]
        row.ratio, row.smallest_ratio, row.largest_ratio = statistics.median(ratios), min(ratios), max(ratios)
    return list(rows.values())


def take_turn(row: SpeedRow, build: Build, gradients: list[Tensor], steps: int) -> None:
    """Build an optimiser and measure it."""
    device = gradients[0].device
    parameters = [nn.Parameter(0.02 * torch.ones_like(gradient)) for gradient in gradients]
    optimiser = build(parameters)
    first = timed(device, lambda: optimiser.step(gradients))
    row.first_step_s = row.first_step_s or first
    optimiser.step(gradients)
    before = reset_peak(device)
    optimiser.step(gradients)
    row.extra_bytes = max(row.extra_bytes, peak(device) - before)

    def several() -> None:
        for _ in range(steps):
            optimiser.step(gradients)

    clock = time.perf_counter if device.type == "cuda" else time.process_time
    row.seconds.append(timed(device, several, clock) / steps)
    row.state_bytes = sum({t.data_ptr(): t.nbytes for t in optimiser.state_tensors()}.values())


def timed(device: torch.device, call: Callable[[], object], now: Callable[[], float] = time.perf_counter) -> float:
    synchronize(device)
    start = now()
    call()
    synchronize(device)
    return now() - start


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def reset_peak(device: torch.device) -> int:
    """Start to measure the peak of memory; return what is in use now."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        return torch.cuda.memory_allocated(device)
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").malloc_trim(0)  # give back what is free, so that using it again shows
        Path("/proc/self/clear_refs").write_text("5")  # the peak of resident memory starts over (Linux)
    return peak(device)


def peak(device: torch.device) -> int:
    """Return the highest use of memory since `reset_peak`; 0 where it cannot be measured."""
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
    """Difference of one optimiser to AdamW in float64, for each case."""

    weights: str
    optimiser: str
    even: float
    spread: float
    tiny: float
    falling: float
    resumed: bool


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
        """Give the gradient of a step, from 0."""
        if self._case == "falling":
            small = self.compared if step >= 50 else torch.zeros_like(self.compared)
            gradient = self._sign * torch.where(small, 1e-3, 1.0)
        else:
            noise = torch.randn(SHAPE, generator=torch.Generator().manual_seed(100 + step), dtype=torch.float64)
            gradient = self._size * (noise + 0.5 * self._sign) * (1e-7 if self._case == "tiny" else 1.0)
        return gradient.to(torch.bfloat16).to(self._device, dtype)  # the same numbers for all types of weights


def start_values(device: torch.device, dtype: torch.dtype) -> nn.Parameter:
    values = 0.02 * torch.randn(SHAPE, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    return nn.Parameter(values.to(torch.bfloat16).to(device, dtype))


def run_case(build: Build, case: str, device: torch.device, dtype: torch.dtype, steps: int) -> Tensor:
    """Return the change of the parameter after so many steps, in float64, where the case compares it."""
    parameter = start_values(device, dtype)
    start = parameter.detach().cpu().to(torch.float64, copy=True)
    gradient = GradientSequence(case, device)
    optimiser = build([parameter])
    for step in range(steps):
        optimiser.step([gradient(step, dtype)])
    return (optimiser.precise()[0].detach().double().cpu() - start)[gradient.compared]


def is_resumed_exactly(build: Build, device: torch.device, dtype: torch.dtype, steps: int = 20) -> bool:
    """Save after half of the steps, continue with a new optimiser, and compare the bits of the result."""
    results = []
    for broken in (False, True):
        torch.manual_seed(0)
        gradient = GradientSequence("spread", device)
        optimiser = build([start_values(device, dtype)])
        for step in range(steps):
            if broken and step == steps // 2:
                with tempfile.TemporaryDirectory() as folder:
                    torch.save(optimiser.save(), Path(folder) / "saved.pt")
                    optimiser = build([start_values(device, dtype)])
                    optimiser.load(torch.load(Path(folder) / "saved.pt", weights_only=False))
                torch.manual_seed(1)
            optimiser.step([gradient(step, dtype)])
        results.append(optimiser.precise()[0].detach().clone())
    return torch.equal(*results)


def measure_accuracy(weights: Weights, device: torch.device, steps: int, names: list[str]) -> list[AccuracyRow]:
    """Compare all optimisers with AdamW in float64 on the CPU."""
    cpu, dtype = torch.device("cpu"), getattr(torch, weights)
    exact = {
        case: run_case(library(torch.optim.AdamW, foreach=True), case, cpu, torch.float64, steps) for case in CASES
    }
    rows = []
    for name, build in chosen(optimisers(weights, device), names).items():
        differences = {}
        for case in CASES:
            torch.manual_seed(0)
            change = run_case(build, case, device, dtype, steps)
            differences[case] = float((change - exact[case]).norm() / exact[case].norm())
        rows.append(AccuracyRow(weights, name, **differences, resumed=is_resumed_exactly(build, device, dtype)))
    return rows


def chosen(builds: dict[str, Build], names: Iterable[str]) -> dict[str, Build]:
    """Keep the optimisers whose name fits one of these patterns, and the reference."""
    pattern = "|".join(names)
    return {name: build for name, build in builds.items() if name == REFERENCE or re.search(pattern, name)}


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
        "| weights | optimiser | even: difference | spread | tiny | falling | resumed |",
        "|---|---|--:|--:|--:|--:|---|",
    ]
    lines += [
        f"| {row.weights} | {row.optimiser} | {row.even:.1e} | {row.spread:.1e} | {row.tiny:.1e} | {row.falling:.1e} | "
        f"{'same bits' if row.resumed else 'differs'} |"
        for row in rows
    ]
    return "\n".join(lines)


def versions() -> dict[str, str]:
    """Give the versions of all libraries that are compared, and name those that are missing."""
    found = {"tapfm": tapfm.__version__, "torch": torch.__version__}
    for name in ("torchao", "bitsandbytes"):
        module = optional(name)
        if module is None:
            print(f"{name} is not installed and is left out; to compare it: pip install {name}")
        else:
            found[name] = module.__version__
    return found


def processor(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        model = next(line.split(":")[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        model = platform.machine()
    return f"{model}, {torch.get_num_threads()} thread(s)"


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--encoder", nargs="+", help="whose shapes the parameters have")
    parser.add_argument("--weights", nargs="+", choices=("float32", "bfloat16"), default=["float32", "bfloat16"])
    parser.add_argument("--optimiser", nargs="+", default=[], help="regular expressions for their names")
    parser.add_argument("--only", choices=("speed", "accuracy"))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=5, help="timed steps of an optimiser in each round")
    parser.add_argument("--check-steps", type=int, default=1000, help="steps after which accuracy is compared")
    parser.add_argument("--threads", type=int, default=1, help="of torch on the CPU")
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch._dynamo.config.recompile_limit = 64  # all forms of ours share one function, which a run compiles for one form
    device = torch.device(arguments.device)
    encoders = arguments.encoder or (CUDA_ENCODERS if device.type == "cuda" else CPU_ENCODERS)
    results: dict[str, Any] = {"machine": processor(device), "versions": versions()}
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
