"""The settings of RUN.toml.

`tapfm config` writes the description of a setting as a comment, and docs/reference/configuration.md lists it.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PrivateAttr

from tapfm.cohort.table_options import MISSING_VALUES, TableOptions
from tapfm.config.recipes import Method, Recipe

NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Probability = Annotated[float, Field(ge=0, le=1)]
Count = Annotated[int, Field(ge=1)]  # at least 1
Texts = Annotated[list[str], BeforeValidator(lambda value: [value] if isinstance(value, str) else value)]
BlurRadius = Annotated[float, Field(ge=0.01, le=16)]  # the limits of `tiles.augment.Augmentation`


class SettingsModel(BaseModel):
    """A table of RUN.toml or STUDY.toml."""

    model_config = ConfigDict(extra="forbid", frozen=True)


def setting(description: str, **arguments: Any) -> Any:
    """Declare a setting with its description."""
    return Field(description=description, **arguments)


class TableSection(SettingsModel):
    """A cohort table and how to read it."""

    table: Path = setting("cohort table with slides, patients, labels and splits; `tapfm split` adds the splits")
    slides: Path | None = setting(
        "folder of the slide files, if the cohort table has no paths or the files were moved",
        default=None,
        examples=["slides"],
    )
    patient_column: str | None = setting(
        "column with the patient of each slide; by default recognised by its name, such as patient_id or case_id",
        default=None,
        examples=["patient_id"],
    )
    slides_are_patients: bool = setting(
        "every slide is from another patient: do not warn that the table has no column of patients", default=False
    )
    missing_values: list[str] = setting(
        "texts that mean a missing value, in upper or lower case; an empty cell always does",
        default_factory=lambda: list(MISSING_VALUES),
    )
    encoding: str | None = setting(
        "encoding of the table if it is not UTF-8 or UTF-16, such as cp1252 (Windows) or latin-1",
        default=None,
        examples=["cp1252"],
    )
    clini: Path | None = setting(
        "STAMP's table of patients and labels, to join with a table of slides", default=None, examples=["clini.csv"]
    )
    clam_splits: Path | None = setting(
        "CLAM's splits_0.csv, or the folder with splits_0.csv, splits_1.csv, ...; they replace the column of the table",
        default=None,
        examples=["splits"],
    )

    @property
    def extra_missing_values(self) -> list[str]:
        """Texts of missing values beside the default ones."""
        return [text for text in self.missing_values if text not in MISSING_VALUES]

    @property
    def table_options(self) -> TableOptions:
        """How to read the table."""
        return TableOptions(
            slides=self.slides,
            encoding=self.encoding,
            patient_column=self.patient_column or "",
            slides_are_patients=self.slides_are_patients,
            missing_values=tuple(self.missing_values),
            clini=self.clini,
            clam_splits=self.clam_splits,
        )


class CohortSection(TableSection):
    """The slides and their labels."""

    fold: int | None = setting(
        "number N of a cross-validation fold: use the column fold_N of the table instead of the column `split`",
        default=None,
        ge=0,
        examples=[0],
    )


class TilesSection(SettingsModel):
    """The folders of tiles and stored features."""

    folder: Path | None = setting("output folder of `tapfm tile`, TRIDENT or CLAM", default=None, examples=["tiles"])
    features: Path | None = setting(
        'folder of features from `tapfm embed`, TRIDENT, CLAM or STAMP; only for method = "fixed"',
        default=None,
        examples=["features"],
    )


class EncoderSection(SettingsModel):
    """The foundation model."""

    name: str = setting("a name from `tapfm encoders`, or timm:<architecture>")
    weights: Path | None = setting(
        "weights file or folder; by default from the tapfm package or the Hugging Face cache, else downloaded",
        default=None,
        examples=["model.safetensors"],
    )


class AggregatorSection(SettingsModel):
    """The aggregator, which computes a slide prediction from tile features."""

    name: str = setting(
        "cls-attention (the paper's), cls-gated, abmil, dsmil, clam, varmil, mean, max, or torchmil:<Model>"
    )
    options: dict[str, Any] = setting("options of the aggregator, such as { gated = false }", default_factory=dict)


class ClassesOfTarget(SettingsModel):
    """Texts of the two classes of a target in the cohort table."""

    positive: Texts = setting("texts of the positive class", min_length=1)
    negative: Texts = setting("texts of the negative class; empty: the only other value", default_factory=list)


class TaskSection(SettingsModel):
    """The targets to predict."""

    targets: list[str] = setting("label columns of the cohort table; one model predicts all of them", min_length=1)
    labels: dict[str, ClassesOfTarget] = setting(
        "texts of the classes of targets whose labels are not 0 and 1, such as "
        '{ EGFR = { positive = ["MUT"], negative = ["WT"] } }',
        default_factory=dict,
    )
    weighting: Literal["balanced", "reference"] = setting(
        "how class weights are computed from the training labels: balanced (as in the paper) or reference (as in the "
        "authors' scripts)"
    )


class AdaptationSection(SettingsModel):
    """The training method: losses, trained part of the encoder, tiles per slide and memory."""

    method: Method = setting(
        "tapfm (the paper's), finetune (no attention loss; any aggregator) or fixed (frozen encoder, stored features)",
        default="tapfm",
    )
    scope: str = setting(
        'trainable part of the encoder: "full", "last:4" (last 4 blocks) or "lora:16" (LoRA of rank 16)', default="full"
    )
    lambda_: NotNegative = setting(
        'weight of the attention loss, which trains the encoder\'s CLS attention; only for method = "tapfm"',
        alias="lambda",
    )
    beta: NotNegative = setting(
        "weight of the cosine loss, which is computed from the cosine similarity between a tile's feature vector and "
        "the gradient of the aggregator's loss at this vector; 0: not used"
    )
    cosine_loss: Literal["paper", "descending"] = setting(
        "formula of the cosine loss (see beta): paper (1 - cos, as published) or descending (1 + cos, which moves "
        "features down the gradient)",
        default="paper",
    )
    tau: Positive = setting(
        "temperature of the softmax over tiles that turns CLS attention into tile weights; larger: more uniform"
    )
    bag_gradient: Literal["before", "after", "joint"] = setting(
        "before or after: compute the encoder's gradient before or after the aggregator is updated; joint: update the "
        "encoder first, then the aggregator with the new features (the paper argues against it)",
        default="before",
    )
    tiles_per_slide: Count | Literal["all"] = setting(
        "tiles sampled from each training slide; a new sample in every epoch"
    )
    backward_tiles: Annotated[int, Field(ge=0)] = setting(
        "number of tiles for the backward pass: a random subset of the sampled tiles, weighted so that the expected "
        "gradient stays the same; 0: all sampled tiles",
        default=0,
    )
    precision: Literal["auto", "float32", "bfloat16", "float16"] = setting(
        "compute dtype of the encoder; auto: bfloat16 if the GPU supports it, else float16; float32 without a GPU",
        default="auto",
    )
    chunk: Count | Literal["auto", "all"] = setting(
        "tiles encoded at the same time; only affects memory and speed; auto: chosen by the memory plan", default="auto"
    )
    recompute: Literal["auto", "nothing", "pointwise", "mlp", "block"] = setting(
        "activation checkpointing: what the backward pass recomputes to save memory; auto: chosen by the memory plan, "
        "which `tapfm plan` shows",
        default="auto",
    )


class HeadSection(SettingsModel):
    """The linear classification head."""

    layer_norm: bool = setting("apply LayerNorm before the head")
    label_smoothing: Annotated[float, Field(ge=0, lt=1)] = setting(
        "label smoothing: 0.1 changes the labels 0 and 1 to 0.05 and 0.95"
    )


class OptimiserSection(SettingsModel):
    """The two AdamW optimisers, one of the encoder and one of the aggregator."""

    encoder_lr: NotNegative = setting("learning rate of the encoder")
    aggregator_lr: NotNegative = setting("learning rate of the aggregator")
    weight_decay: NotNegative = setting("weight decay of both optimisers")
    decay_all: bool = setting("apply weight decay to biases and normalisation layers as well")
    clip_norm: NotNegative = setting("maximum gradient norm of each optimiser; 0: no clipping", default=0.0)
    slides_per_step: Count = setting("slides per optimiser step (gradient accumulation)", default=1)
    moments: Literal["auto", "float32", "bfloat16", "int8"] = setting(
        "dtype of the AdamW moments of the encoder; auto: float32 (in GPU or CPU memory), but bfloat16 or int8 if "
        "float32 does not fit or would be much slower",
        default="auto",
    )


class ScheduleSection(SettingsModel):
    """The learning rate schedule: cosine annealing with warm restarts, per epoch."""

    epochs: Count = setting("passes over the training slides")
    first_cycle: Count = setting("length of the first learning rate cycle, in epochs")
    cycle_factor: Count = setting("each learning rate cycle is this many times as long as the previous one")
    encoder_lr_min: NotNegative = setting("minimum learning rate of the encoder")
    aggregator_lr_min: NotNegative = setting("minimum learning rate of the aggregator")


class AugmentationSection(SettingsModel):
    """The augmentation of training tiles."""

    flip: Probability = setting("probability of a horizontal flip")
    rotate_90: bool = setting("rotate by 0, 90, 180 or 270 degrees at random")
    blur: Probability = setting("probability of a Gaussian blur")
    blur_radius: tuple[BlurRadius, BlurRadius] = setting(
        "minimum and maximum standard deviation of the blur, in tile pixels"
    )
    stain_jitter: Annotated[float, Field(ge=0, lt=1)] = setting(
        "strength s of the stain jitter, from 0 (none) to below 1; the amount of each stain (haematoxylin, eosin and a "
        "residual) is multiplied by a random factor from 1 - s to 1 + s, and shifted by up to s times the fraction of "
        "light that the pixel absorbs",
        default=0.0,
    )


class SelectionSection(SettingsModel):
    """The selection of the best epoch by the validation AUC, and early stopping."""

    validation_tiles: Count | Literal["all"] = setting(
        "tiles sampled from each validation slide, the same in every epoch; final metrics use all tiles"
    )
    patience: int = setting("stop after this many epochs without a better validation AUC; 0: never", default=0, ge=0)
    unit: Literal["slide", "patient"] = setting(
        "unit of the AUC in all splits: slide, or patient (mean probability of the patient's slides)", default="slide"
    )


class MachineSection(SettingsModel):
    """Settings of the machine, and the number of failed slides to allow. They may differ when a run is resumed."""

    device: str = setting("auto (a GPU if there is one), cpu, cuda, cuda:1, ...", default="auto")
    gpu_memory_gib: Positive | None = setting("maximum GPU memory to use, in GiB", default=None, examples=[24.0])
    offload_optimiser: bool | Literal["auto"] = setting(
        "store the optimiser state in CPU memory; auto: as the memory plan chooses", default="auto"
    )
    compile: bool | Literal["auto"] = setting(
        "compile the encoder blocks with torch.compile; auto: on a GPU where this works", default="auto"
    )
    tf32: bool = setting(
        "multiply float32 matrices in TensorFloat-32: faster, but only about three significant digits", default=False
    )
    workers: Annotated[int, Field(ge=0)] | Literal["auto"] = setting(
        "worker processes that read tiles; auto: one per core", default="auto"
    )
    prefetch_gib: Positive = setting("CPU memory for prefetched tiles or cached features, in GiB", default=1.0)
    checkpoint_minutes: Positive = setting("minutes between checkpoints within an epoch", default=30.0)
    allow_failures: int = setting("stop the run if more than this number of slides fail", default=0, ge=0)


@dataclass(frozen=True)
class _GivenSettings:
    """The settings that the user gave, as TOML tables. The others are defaults of the recipe."""

    # not compared: configurations with the same values are equal, whether the values were given or are defaults
    tables: Mapping[str, Any] = field(default_factory=dict, compare=False)


class RunConfig(SettingsModel):
    """The complete configuration of a run."""

    recipe: Recipe = setting("source of the defaults: paper, or reference (the authors' scripts)", default="paper")
    seed: int = setting(
        "random seed; the same seed gives the same run on a CPU, and up to rounding on a GPU", default=0, ge=0, lt=2**63
    )
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
    selection: SelectionSection  # of the best epoch
    machine: MachineSection = Field(default_factory=MachineSection)
    _given: _GivenSettings = PrivateAttr(default_factory=_GivenSettings)

    def with_given_settings(self, tables: Mapping[str, Any]) -> RunConfig:
        """Return a copy that remembers which settings the user gave."""
        remembering = self.model_copy()
        remembering._given = _GivenSettings(copy.deepcopy(dict(tables)))
        return remembering

    def given_tables(self) -> dict[str, Any]:
        """Return the settings that the user gave as TOML tables; empty if they are not known."""
        return copy.deepcopy(dict(self._given.tables))

    @property
    def class_texts(self) -> dict[str, dict[str, list[str]]]:
        """Texts of the classes by target, as far as they are given."""
        return {
            target: {name: list(texts) for name, texts in each if texts} for target, each in self.task.labels.items()
        }

    def as_tables(self) -> dict[str, Any]:
        """Return the settings as TOML tables, without settings that are None."""
        return self.model_dump(mode="json", by_alias=True, exclude_none=True)
