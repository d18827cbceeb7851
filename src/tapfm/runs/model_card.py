"""The model card of an export: training, usage, data, metrics and licence."""

from __future__ import annotations

import re
from collections.abc import Mapping

from tapfm.cohort.splits import SPLITS, VALIDATION
from tapfm.encoders.timm_folder import extra_timm_arguments
from tapfm.evaluation.predictions import AucScores
from tapfm.results.markdown import markdown_table
from tapfm.results.table import Cell, Column, Table, table_row
from tapfm.runs.base_weights import BaseWeights, read_base_weights
from tapfm.runs.folder import RunFolder
from tapfm.runs.hub import forbids_derivatives
from tapfm.runs.saved_model import SavedModel
from tapfm.tasks.catalog import target_kinds
from tapfm.tasks.labels import label_count_cells, label_count_columns
from tapfm.tasks.target import TargetKinds

# licence identifiers of the Hugging Face Hub; others are written as "other" with a name
_HUB_LICENCES = ("apache-2.0", "mit", "unknown", "cc-by-4.0", "cc-by-nc-4.0", "cc-by-nc-nd-4.0", "cc-by-nc-sa-4.0")


def format_model_card(saved: SavedModel, run_folder: RunFolder, scores_by_split: Mapping[str, AucScores]) -> str:
    """Return the text of README.md. It contains no ids of slides or patients, and no folders."""
    card, metadata = saved.card, saved.metadata
    adapted, weights = metadata["encoder"]["adapted"], read_export_base_weights(saved)
    lines = [
        "---",
        *(["library_name: timm"] if adapted else []),
        *_licence_yaml_lines(card.licence if weights.are_published else "unknown"),
        *([f"base_model: {card.repository}"] if weights.are_published and card.repository else []),
        "tags: [pathology, whole-slide-image, tapfm]",
        "---",
        "",
        f"# {_title(saved, weights)}",
        "",
        _training_sentence(saved, weights),
        "",
        *(_encoder_usage_lines(saved, weights) if adapted else _aggregator_usage_lines(saved)),
        "## Base weights",
        "",
        "The weights of the encoder before adaptation:" if adapted else "The weights that computed the features:",
        "",
        *_weights_lines(weights),
        "",
        "## Data",
        "",
        *_data_lines(run_folder, target_kinds(metadata["targets"], metadata.get("labels"))),
        "",
        "## Metrics",
        "",
        *_metric_lines(scores_by_split),
        "",
        "## Licence",
        "",
        *_licence_lines(saved, weights),
        "",
        "## Limitations",
        "",
        "For research only; not a medical device. The metrics are for the slides above and may not hold for other "
        "scanners, stains or populations.",
        "",
    ]
    return "\n".join(lines)


def read_export_base_weights(saved: SavedModel) -> BaseWeights:
    """Return the encoder weights that the run of a model started from."""
    encoder = saved.metadata["encoder"]
    recorded = {"weights": encoder.get("base_weights"), "features_source": encoder.get("features_source")}
    return read_base_weights(recorded, encoder["base_weights_sha256"], saved.card, adapted=encoder["adapted"])


def _licence_yaml_lines(licence: str) -> list[str]:
    """Return the YAML lines of the licence in the header of the card."""
    if licence.lower() in _HUB_LICENCES:
        return [f"license: {licence.lower()}"]
    return ["license: other", f"license_name: {re.sub('[^a-z0-9.]+', '-', licence.lower()).strip('-')}"]


def _title(saved: SavedModel, weights: BaseWeights) -> str:
    """Return the title, which names the encoder only if its published weights were used."""
    name, targets = saved.card.name, ", ".join(saved.metadata["targets"])
    if not saved.metadata["encoder"]["adapted"]:
        features = f"features of another tool ({weights.other_tool})" if weights.other_tool else f"{name} features"
        return f"Aggregator of {features} for {targets}"
    return f"{name}{'' if weights.are_published else ' architecture with other weights'}, adapted to {targets}"


def _training_sentence(saved: SavedModel, weights: BaseWeights) -> str:
    """Return a sentence about how the model was trained."""
    metadata, name = saved.metadata, saved.card.name
    aggregator = f"aggregator `{metadata['aggregator']['name']}`"
    settings = f"recipe `{metadata['recipe']}`, seed {metadata['seed']}, epoch {metadata['epoch']}"
    unclear = {None: "it is not known whether its weights are the published ones", False: "not its published weights"}
    if not metadata["encoder"]["adapted"]:
        if weights.other_tool:
            encoder = (
                f"The features are from files of another tool ({weights.other_tool}), assumed to be {name} features"
            )
        elif weights.are_published:
            encoder = f"The encoder is the published {name}"
        else:
            encoder = f"The features are those of the {name} architecture; {unclear[weights.are_published]}"
        return f"{encoder}. The {aggregator} was trained with tapfm: {settings}."
    encoder = name if weights.are_published else f"The {name} architecture ({unclear[weights.are_published]})"
    return (
        f"{encoder} was adapted with tapfm to slide labels ({', '.join(metadata['targets'])}): "
        f"method `{metadata['method']}`, {aggregator}, scope `{metadata['scope']}`, {settings}."
    )


def _weights_lines(weights: BaseWeights) -> list[str]:
    """Return a table of where the base weights come from."""
    rows = [table_row(title, text) for title, text in weights.describe().items()]
    return [markdown_table(Table([Column("", text=True), Column("", text=True)], rows)).rstrip()]


def _licence_lines(saved: SavedModel, weights: BaseWeights) -> list[str]:
    card = saved.card
    page = f" ([model page]({card.page}))" if card.page else ""
    forbidden = saved.metadata["encoder"]["adapted"] and forbids_derivatives(card.licence)
    if weights.are_published:
        lines = [f"The licence of the base model, {card.name}, is {card.licence}{page}."]
        return [*lines, "It does not allow sharing derivatives, such as this model."] if forbidden else lines
    verb = "are" if weights.are_published is False else "may be"
    restriction = ", which does not allow sharing derivatives" if forbidden else ""
    return [
        f"The licence of the published weights of {card.name} is {card.licence}{page}{restriction}.",
        f"The weights of this model {verb} others. Their own licence applies, and the above one if they are derived "
        "from those weights.",
    ]


def _encoder_usage_lines(saved: SavedModel, weights: BaseWeights) -> list[str]:
    """Return the section about loading the encoder."""
    card = saved.card
    arguments = f", {needed}" if (needed := extra_timm_arguments(card)) else ""
    mean, std = (tuple(round(value, 6) for value in values) for values in (card.mean, card.std))
    scales = " and ".join(map(str, card.mpp))
    return [
        "## Use",
        "",
        "```python",
        *(["import functools", "", "import timm", "import torch", ""] if arguments else ["import timm", ""]),
        f'encoder = timm.create_model("local-dir:FOLDER", pretrained=True{arguments}).eval()',
        "```",
        "",
        f"The input is tiles of {card.tile_px} px"
        + (f" ({card.name} was pretrained at {scales} um per pixel)" if scales and weights.are_published else "")
        + f", normalised with mean {mean} and standard deviation {std}. The feature is the CLS token"
        + (" and the mean of the patch tokens" if card.feature == "cls+mean" else "")
        + " after the final norm. To predict slides, use this folder with `tapfm predict`, which also reads "
        "`aggregator.safetensors` and `tapfm.json`.",
        "",
    ]


def _aggregator_usage_lines(saved: SavedModel) -> list[str]:
    """Return the section about using an aggregator that was trained on features of a fixed encoder."""
    size = saved.metadata["aggregator"]["feature_size"]
    return [
        "## Use",
        "",
        "```python",
        "import tapfm",
        'aggregator = tapfm.load("FOLDER").model.aggregator',
        "```",
        "",
        f"The input is the features of all tiles of a slide (tiles x {size}) and their raw attention, as computed by "
        "`tapfm embed`.",
        "",
    ]


def _data_lines(run_folder: RunFolder, kinds: TargetKinds) -> list[str]:
    """Return a table of patients, slides and labels by split."""
    slide_rows = run_folder.read_split_rows()
    columns = [Column("split", text=True), Column("patients"), Column("slides")]
    columns += label_count_columns(kinds)
    rows = []
    for split in SPLITS:
        split_rows = [row for row in slide_rows if row["split"] == split]
        patients = len({row["patient_id"] for row in split_rows})
        rows.append(table_row(split, patients, len(split_rows), *label_count_cells(split_rows, kinds)))
    return [markdown_table(Table(columns, rows)).rstrip()]


def _metric_lines(scores_by_split: Mapping[str, AucScores]) -> list[str]:
    """Return a table of AUCs by split, or the reason why there are none."""
    if not scores_by_split:
        return ["No metrics: the run was not finished when it was exported, or it has no validation and test slides."]
    rows = [
        table_row(
            split,
            target,
            Cell(value, reason=scores.undefined_reasons.get(target, "")),
            f"{scores.count:,} {scores.unit}s",
        )
        for split, scores in scores_by_split.items()
        for target, value in scores.auc.items()
    ]
    columns = [Column("split", text=True), Column("target", text=True), Column("AUC"), Column("number")]
    return [
        "Predicted on all tiles of each slide"
        + (f". The epoch was selected on {VALIDATION}." if VALIDATION in scores_by_split else "."),
        "",
        markdown_table(Table(columns, rows)).rstrip(),
    ]
