"""RUN.toml: everything that decides a run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from tapfm.config.recipes import Method, Recipe

NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]


Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]


Share = Annotated[float, Field(ge=0, le=1)]


Count = Annotated[int, Field(ge=1)]


class Section(BaseModel):
    """A table of RUN.toml."""

    model_config = ConfigDict(extra="forbid", frozen=True)


def setting(text: str, **arguments: Any) -> Any:
    """Make a field with its comment in `tapfm config`."""
    return Field(description=text, **arguments)


class CohortSection(Section):
    """Which slides."""

    table: Path = setting("slides, patients, splits and labels; `tapfm split` makes the splits")
    slides: Path | None = setting(
        "where to look for slides that the table names without their path", default=None, examples=["slides"]
    )
    fold: int | None = setting("use the column fold_N of the table instead of split", default=None, ge=0, examples=[0])


class TilesSection(Section):
    """Their tiles."""

    folder: Path | None = setting(
        "what `tapfm tile` wrote (TRIDENT's and CLAM's folders will do)", default=None, examples=["tiles"]
    )
    features: Path | None = setting("what `tapfm embed` wrote, for method fixed", default=None, examples=["features"])


class EncoderSection(Section):
    """The foundation model."""

    name: str = setting("one of `tapfm encoders`, or timm:<architecture>")
    weights: Path | None = setting(
        "a weights file or folder; without: the hub's cache, then the hub", default=None, examples=["model.safetensors"]
    )


class AggregatorSection(Section):
    """From tiles to a slide."""

    name: str = setting(
        "cls-attention (the paper's), cls-gated, abmil, dsmil, clam, varmil, mean, max, or torchmil:<Model>"
    )
    options: dict[str, Any] = setting("settings of its own, such as { gated = false }", default_factory=dict)


class TaskSection(Section):
    """What is predicted."""

    targets: list[str] = setting("label columns of the table; several make a multi-label task", min_length=1)
    weighting: Literal["balanced", "reference"] = setting(
        "class weights from the training split: balanced (the paper's) or reference"
    )


class AdaptationSection(Section):
    """The step."""

    method: Method = setting("tapfm, finetune (lambda 0, any aggregator), or fixed (stored features)", default="tapfm")
    scope: str = setting('what of the encoder learns: "full", "last:4" (blocks) or "lora:16" (rank)', default="full")
    lambda_: NotNegative = setting("weight of the attention loss", alias="lambda")
    beta: NotNegative = setting("weight of the cosine term")
    cosine: Literal["paper", "descending"] = setting("its form: 1 - cos as printed, or 1 + cos", default="paper")
    tau: Positive = setting("temperature of the tile weights")
    bag_gradient: Literal["before", "after", "joint"] = setting(
        "of the aggregator's update; joint: encoder first, which the paper argues against", default="before"
    )
    tiles_per_slide: Count | Literal["all"] = setting("drawn anew each epoch")
    backward_tiles: Annotated[int, Field(ge=0)] = setting(
        "go back through so many drawn tiles only, weighted for all; 0: through all", default=0
    )
    precision: Literal["auto", "float32", "bfloat16", "float16"] = setting(
        "auto: bfloat16 where the GPU has it, else float16; float32 without a GPU", default="auto"
    )
    chunk: Count | Literal["auto", "all"] = setting("tiles in the encoder at once; changes memory only", default="auto")
    recompute: Literal["auto", "nothing", "pointwise", "mlp", "block"] = setting(
        "what backward computes again to save memory; auto: `tapfm plan`", default="auto"
    )


class HeadSection(Section):
    """The linear head."""

    layer_norm: bool = setting("a LayerNorm before it")
    label_smoothing: Annotated[float, Field(ge=0, lt=1)] = setting("0.1 moves a label of 1 to 0.95")


class OptimiserSection(Section):
    """Two AdamW."""

    encoder_lr: NotNegative = setting("learning rate of the encoder")
    aggregator_lr: NotNegative = setting("learning rate of the aggregator")
    weight_decay: NotNegative = setting("of both")
    decay_all: bool = setting("decay biases and norms too")
    clip_norm: NotNegative = setting("largest norm of a gradient; 0: not clipped", default=0.0)
    slides_per_step: Count = setting("slides whose gradients are averaged before an update", default=1)
    moments: Literal["auto", "float32", "bfloat16", "int8"] = setting(
        "how AdamW remembers; auto: float32 where it fits the GPU", default="auto"
    )


class ScheduleSection(Section):
    """Cosine annealing with warm restarts, per epoch."""

    epochs: Count = setting("passes over the training slides")
    first_cycle: Count = setting("epochs to the first restart")
    cycle_factor: Count = setting("each cycle is so many times longer than the one before")
    encoder_lr_min: NotNegative = setting("where the encoder's learning rate ends")
    aggregator_lr_min: NotNegative = setting("where the aggregator's ends")


class AugmentationSection(Section):
    """What is done to training tiles."""

    flip: Share = setting("probability of a horizontal flip")
    quarter_turns: bool = setting("turn by 0, 90, 180 or 270 degrees")
    blur: Share = setting("probability of a Gaussian blur")
    blur_radius: tuple[Positive, Positive] = setting("its radius, from and to, in pixels")
    stain_jitter: NotNegative = setting("strength of a change of stain; 0: none", default=0.0)


class SelectionSection(Section):
    """Which epoch is kept."""

    validation_tiles: Count | Literal["all"] = setting("per slide, the same ones each epoch; final figures are on all")
    patience: int = setting("stop after so many epochs without a better one; 0: never", default=0, ge=0)
    unit: Literal["slide", "patient"] = setting("what an AUC counts; patients average their slides", default="slide")


class MachineSection(Section):
    """What does not change the result: may differ when a run is resumed."""

    device: str = setting("auto, cpu, cuda, cuda:1, ...", default="auto")
    gpu_memory_gib: Positive | None = setting("use no more of the GPU's memory", default=None, examples=[24.0])
    offload_optimiser: bool | Literal["auto"] = setting(
        "AdamW's memory in the machine's; auto: where the GPU's is too small", default="auto"
    )
    compile: bool | Literal["auto"] = setting("compile the encoder's blocks; auto: on a GPU", default="auto")
    tf32: bool = setting("float32 products in TensorFloat-32: faster, three digits", default=False)
    workers: Annotated[int, Field(ge=0)] | Literal["auto"] = setting("processes that read tiles", default="auto")
    read_ahead_gib: Positive = setting("memory for tiles read ahead", default=1.0)
    save_minutes: Positive = setting("time between checkpoints within an epoch", default=30.0)
    allow_failures: int = setting("slides that may fail before the run stops", default=0, ge=0)


class RunConfig(Section):
    """A run, with nothing left open."""

    recipe: Recipe = setting("where settings that are not given come from: paper or reference", default="paper")
    seed: int = setting("the same seed gives the same run", default=0, ge=0, lt=2**63)
    cohort: CohortSection
    tiles: TilesSection
    encoder: EncoderSection
    aggregator: AggregatorSection
    task: TaskSection
    adaptation: AdaptationSection
    head: HeadSection
    optimiser: OptimiserSection
    schedule: ScheduleSection
    augmentation: AugmentationSection
    selection: SelectionSection
    machine: MachineSection = Field(default_factory=MachineSection)

    def as_tables(self) -> dict[str, Any]:
        """Give it back as TOML has it; what is not set is left out."""
        return self.model_dump(mode="json", by_alias=True, exclude_none=True)
