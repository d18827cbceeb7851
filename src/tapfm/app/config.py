"""RUN.toml: everything that decides a run. Unknown keys and wrong values are refused, all of them at once."""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from tapfm.aggregators.catalog import aggregator_card
from tapfm.app.recipes import Method, Recipe, recipe_settings
from tapfm.encoders.adapters import Scope
from tapfm.encoders.catalog import encoder_card
from tapfm.errors import InputError, SettingError

NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Share = Annotated[float, Field(ge=0, le=1)]
Count = Annotated[int, Field(ge=1)]


class Section(BaseModel):
    """A table of RUN.toml."""

    model_config = ConfigDict(extra="forbid", frozen=True, populate_by_name=True)


def says(text: str, **arguments: Any) -> Any:
    """Make a field with its comment in `tapfm config`."""
    return Field(description=text, **arguments)


class CohortSection(Section):
    """Which slides."""

    table: Path = says("slides, patients, splits and labels; `tapfm split` makes the splits")
    slides: Path | None = says(
        "where to look for slides that the table names without their path", default=None, examples=["slides"]
    )
    fold: int | None = says("use the column fold_N of the table instead of split", default=None, ge=0, examples=[0])


class TilesSection(Section):
    """Their tiles."""

    folder: Path | None = says("what `tapfm tile` wrote (TRIDENT's and CLAM's folders will do)", default=None)
    features: Path | None = says("what `tapfm embed` wrote, for method fixed", default=None, examples=["features"])


class EncoderSection(Section):
    """The foundation model."""

    name: str = says("one of `tapfm encoders`, or timm:<architecture>")
    weights: Path | None = says(
        "a weights file or folder; without: the hub's cache, then the hub", default=None, examples=["model.safetensors"]
    )


class AggregatorSection(Section):
    """From tiles to a slide."""

    name: str = says("cls-attention (the paper's), abmil, mean")
    options: dict[str, Any] = says("settings of its own, such as { gated = false }", default_factory=dict)


class TaskSection(Section):
    """What is predicted."""

    targets: list[str] = says("label columns of the table; several make a multi-label task", min_length=1)
    weighting: Literal["balanced", "reference"] = says(
        "class weights from the training split: balanced (the paper's) or reference"
    )


class AdaptationSection(Section):
    """The step."""

    method: Method = says("tapfm, finetune (lambda 0, any aggregator), or fixed (stored features)")
    scope: str = says('what of the encoder learns: "full", "last:4" (blocks) or "lora:16" (rank)', default="full")
    lambda_: NotNegative = says("weight of the attention loss", alias="lambda")
    beta: NotNegative = says("weight of the cosine term")
    cosine: Literal["paper", "descending"] = says("its form: 1 - cos as printed, or 1 + cos", default="paper")
    tau: Positive = says("temperature of the tile weights")
    bag_gradient: Literal["before", "after"] = says("of the aggregator's update", default="before")
    tiles_per_slide: Count | Literal["all"] = says("drawn anew each epoch")
    chunk: Count | Literal["auto", "all"] = says("tiles in the encoder at once; changes memory only", default="auto")
    precision: Literal["auto", "float32", "bfloat16"] = says("auto: bfloat16 where the GPU has it", default="auto")
    checkpoint_blocks: bool = says("keep less of each tile in memory, for a second forward", default=False)


class HeadSection(Section):
    """The linear head."""

    layer_norm: bool = says("a LayerNorm before it")
    label_smoothing: Annotated[float, Field(ge=0, lt=1)] = says("0.1 moves a label of 1 to 0.95")


class OptimiserSection(Section):
    """Two AdamW."""

    encoder_lr: NotNegative = says("learning rate of the encoder")
    aggregator_lr: NotNegative = says("learning rate of the aggregator")
    weight_decay: NotNegative = says("of both")
    decay_all: bool = says("decay biases and norms too")
    clip_norm: NotNegative = says("largest norm of a gradient; 0: not clipped", default=0.0)
    slides_per_step: Count = says("slides whose gradients are averaged before an update", default=1)


class ScheduleSection(Section):
    """Cosine annealing with warm restarts, per epoch."""

    epochs: Count = says("passes over the training slides")
    first_cycle: Count = says("epochs to the first restart")
    cycle_factor: Count = says("each cycle is so many times longer than the one before")
    encoder_lr_min: NotNegative = says("where the encoder's learning rate ends")
    aggregator_lr_min: NotNegative = says("where the aggregator's ends")


class AugmentationSection(Section):
    """What is done to training tiles."""

    flip: Share = says("probability of a horizontal flip")
    quarter_turns: bool = says("turn by 0, 90, 180 or 270 degrees")
    blur: Share = says("probability of a Gaussian blur")
    blur_radius: tuple[Positive, Positive] = says("its radius, from and to, in pixels")
    stain_jitter: NotNegative = says("strength of a change of stain; 0: none", default=0.0)


class SelectionSection(Section):
    """Which epoch is kept."""

    validation_tiles: Count | Literal["all"] = says("per slide, the same ones each epoch; final figures are on all")
    patience: int = says("stop after so many epochs without a better one; 0: never", default=0, ge=0)
    unit: Literal["slide", "patient"] = says("what an AUC counts; patients average their slides", default="slide")


class MachineSection(Section):
    """What does not change the result: may differ when a run is resumed."""

    device: str = says("auto, cpu, cuda, cuda:1, ...", default="auto")
    workers: Annotated[int, Field(ge=0)] | Literal["auto"] = says("processes that read tiles", default="auto")
    read_ahead_gib: Positive = says("memory for tiles read ahead", default=1.0)
    save_minutes: Positive = says("time between checkpoints within an epoch", default=30.0)
    allow_failures: int = says("slides that may fail before the run stops", default=0, ge=0)


class RunConfig(Section):
    """A run, with nothing left open."""

    recipe: Recipe = says("where settings that are not given come from: paper or reference", default="paper")
    seed: int = says("the same seed gives the same run", default=0, ge=0)
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


PATHS = (("cohort", "table"), ("cohort", "slides"), ("tiles", "folder"), ("tiles", "features"), ("encoder", "weights"))
DEFAULT_ENCODER = "uni"


def load_config(file: Path, changes: Sequence[str] = ()) -> RunConfig:
    """Read RUN.toml with `--set` changes on top. Paths in the file start at the file, others where we are."""
    try:
        tables = tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(
            f"{file} cannot be read ({error.strerror}).", hint="Write one to start from: tapfm config > run.toml"
        ) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InputError(f"{file} is not TOML: {error}.", hint="See what it should look like: tapfm config") from error
    resolve_paths(tables, file.parent)
    changed: dict[str, Any] = {}
    for change in changes:
        put_change(changed, change)
    resolve_paths(changed, Path())
    merge(tables, changed)
    return resolve(tables, str(file))


def resolve(tables: Mapping[str, Any], where: str = "The configuration") -> RunConfig:
    """Fill in the recipe and check everything."""
    problems = shape_problems(tables)
    filled: dict[str, Any] = {}
    if not problems:
        recipe, method = tables.get("recipe", "paper"), tables.get("adaptation", {}).get("method", "tapfm")
        card = encoder_card(str(tables.get("encoder", {}).get("name", DEFAULT_ENCODER)))
        if recipe in ("paper", "reference") and method in ("tapfm", "finetune", "fixed"):
            filled = dict(recipe_settings(recipe, card, method))
            filled["adaptation"] = {"method": method} | filled["adaptation"]
    merge(filled, tables)
    config = None
    if not problems:
        try:
            config = RunConfig.model_validate(filled)
        except ValidationError as error:
            problems = [told(each, filled) for each in error.errors()]
        else:
            problems = list(contradictions(config))
    if config is None or problems:
        count = "a problem" if len(problems) == 1 else f"{len(problems)} problems"
        raise SettingError(
            f"{where} has {count}:\n  " + "\n  ".join(problems),
            hint="All settings, with what they mean: tapfm config",
        )
    return config


def shape_problems(tables: Mapping[str, Any]) -> list[str]:
    """Find what would make sense of nothing else: a section that is no table."""
    return [
        f"{name}: is a table, [{name}], with {', '.join(valid_keys((name,)))}"
        for name, value in tables.items()
        if valid_keys((name,)) and not isinstance(value, Mapping)
    ]


def told(error: Any, tables: Mapping[str, Any]) -> str:
    """Say one problem in words, with the nearest valid name for an unknown one."""
    place = tuple(str(part) for part in error["loc"] if not is_branch(part))
    name = ".".join(place)
    if error["type"] == "extra_forbidden":
        near = difflib.get_close_matches(place[-1], valid_keys(place[:-1]), n=1, cutoff=0.5)
        elsewhere = [
            f"{section}.{place[-1]}" for section in RunConfig.model_fields if place[-1] in valid_keys((section,))
        ]
        did_you_mean = f"; did you mean {'.'.join((*place[:-1], near[0]))}?" if near else ""
        if elsewhere and not near:
            did_you_mean = f"; did you mean {elsewhere[0]}?"
        return f"{name}: there is no such setting{did_you_mean}"
    if error["type"] == "missing":
        return f"{name}: is missing"
    value: Any = tables
    for part in place:
        value = value.get(part) if isinstance(value, Mapping) else value
    message = str(error["msg"])
    return f"{name}: {message[0].lower()}{message[1:]}; got {value!r}"


def is_branch(part: int | str) -> bool:
    """Recognise what pydantic adds to a place for each of several types."""
    return isinstance(part, str) and (part in ("int", "float") or "[" in part)


def valid_keys(place: tuple[str, ...]) -> list[str]:
    """List the keys of a table, as they are written."""
    model: Any = RunConfig
    for part in place:
        field = model.model_fields.get(part)
        model = field.annotation if field is not None else None
        if not (isinstance(model, type) and issubclass(model, Section)):
            return []
    return [field.alias or name for name, field in model.model_fields.items()]


def contradictions(config: RunConfig) -> Iterator[str]:
    """Find settings that are each valid and do not go together."""
    method, aggregator = config.adaptation.method, aggregator_card(config.aggregator.name)
    if method == "tapfm" and not aggregator.uses_attention:
        yield (
            f"aggregator.name: '{aggregator.name}' does not use the encoder's attention, so method tapfm would be "
            'finetune; say adaptation.method = "finetune", or use cls-attention'
        )
    if method != "tapfm" and config.adaptation.lambda_ != 0:
        yield f"adaptation.lambda: is 0 with method {method}; got {config.adaptation.lambda_:g}"
    if method == "fixed" and config.tiles.features is None:
        yield "tiles.features: is missing; method fixed learns from what `tapfm embed` wrote"
    if method != "fixed" and config.tiles.folder is None:
        yield f"tiles.folder: is missing; method {method} learns from what `tapfm tile` wrote"
    low, high = config.augmentation.blur_radius
    if low > high:
        yield f"augmentation.blur_radius: from {low:g} to {high:g} is no range"
    if len(set(config.task.targets)) < len(config.task.targets):
        yield "task.targets: names a target twice"
    try:
        Scope.parse(config.adaptation.scope)
    except SettingError as error:
        yield f"adaptation.scope: {error.message}"
    for name in config.aggregator.options:
        if name not in aggregator.options:
            valid = ", ".join(aggregator.options) or "none"
            yield f"aggregator.options.{name}: there is no such option of {aggregator.name}; there is: {valid}"


def put_change(tables: dict[str, Any], change: str) -> None:
    """Read `--set section.key=value`; a value that is not TOML is text."""
    name, equals, text = change.partition("=")
    parts = name.strip().split(".")
    if not equals or not all(parts):
        raise SettingError(
            f"--set {change} is not of the form key=value.", hint="For example: --set adaptation.lambda=0.5"
        )
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text
    for part in reversed(parts):
        value = {part: value}
    merge(tables, value)


def merge(below: dict[str, Any], above: Mapping[str, Any]) -> None:
    """Lay tables over tables, in place."""
    for name, value in above.items():
        if isinstance(value, Mapping) and isinstance(below.get(name), Mapping):
            below[name] = dict(below[name])
            merge(below[name], value)
        else:
            below[name] = value


def resolve_paths(tables: dict[str, Any], base: Path) -> None:
    """Make paths whole, so that they mean the same wherever the run is resumed from."""
    for section, key in PATHS:
        table = tables.get(section)
        if isinstance(table, dict) and isinstance(table.get(key), str):
            table[key] = str((base / Path(table[key]).expanduser()).absolute())
