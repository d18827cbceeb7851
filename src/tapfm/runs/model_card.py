"""The model card of an export: what it is, what it was made from, how well it does, and what may be done with it."""

from __future__ import annotations

import re
from collections.abc import Mapping

from tapfm.cohort.splits import SPLITS, VALIDATION
from tapfm.encoders.timm_folder import timm_arguments
from tapfm.evaluation.predictions import AucScores
from tapfm.results.markdown import markdown_table
from tapfm.results.table import Cell, Column, Table, table_row
from tapfm.runs.folder import RunFolder
from tapfm.runs.hub import forbids_derivatives
from tapfm.runs.saved_model import SavedModel
from tapfm.tasks.catalog import target_kinds
from tapfm.tasks.labels import count_cells, count_columns

_KNOWN_TO_THE_HUB = ("apache-2.0", "mit", "cc-by-4.0", "cc-by-nc-4.0", "cc-by-nc-nd-4.0", "cc-by-nc-sa-4.0")


def model_card(saved: SavedModel, run_folder: RunFolder, result: Mapping[str, AucScores]) -> str:
    """Write README.md; it names no slide and no patient."""
    card, facts = saved.card, saved.description
    targets = ", ".join(facts["targets"])
    adapted = facts["encoder"]["adapted"]
    title = f"{card.name}, adapted to {targets}" if adapted else f"An aggregator of {card.name} features for {targets}"
    lines = [
        "---",
        *(["library_name: timm"] if adapted else []),
        *_licence_keys(card.licence),
        *([f"base_model: {card.repository}"] if card.repository else []),
        "tags: [pathology, whole-slide-image, tapfm]",
        "---",
        "",
        f"# {title}",
        "",
        _made_line(saved),
        "",
        *(_use_lines(saved) if adapted else _use_of_features(saved)),
        "## Data",
        "",
        *_data_lines(run_folder, facts["targets"]),
        "",
        "## Figures",
        "",
        *_figure_lines(result),
        "",
        "## Licence",
        "",
        *_licence_lines(saved),
        "",
        "## Limits",
        "",
        "For research; not a medical device. The figures are of the slides above and say nothing of other scanners, "
        "stains or populations.",
        "",
    ]
    return "\n".join(lines)


def _licence_keys(licence: str) -> list[str]:
    """Name the licence as the hub does, or make an identifier of its name, which YAML could misread as it is."""
    if licence.lower() in _KNOWN_TO_THE_HUB:
        return [f"license: {licence.lower()}"]
    return ["license: other", f"license_name: {re.sub('[^a-z0-9.]+', '-', licence.lower()).strip('-')}"]


def _made_line(saved: SavedModel) -> str:
    """Say how it was made."""
    facts, name = saved.description, saved.card.name
    aggregator = f"aggregator `{facts['aggregator']['name']}`"
    how = f"recipe `{facts['recipe']}`, seed {facts['seed']}, epoch {facts['epoch']}"
    if not facts["encoder"]["adapted"]:
        made_by = facts["encoder"].get("features_made_by")
        encoder = (
            f"The encoder is {name} as published"
            if made_by is None
            else f"The features came from files of another tool ({made_by}) and were taken for those of {name}"
        )
        return f"{encoder}; the {aggregator} was trained by tapfm: {how}."
    return (
        f"{name} was adapted from slide labels ({', '.join(facts['targets'])}) by tapfm: method `{facts['method']}`, "
        f"{aggregator}, scope `{facts['scope']}`, {how}."
    )


def _licence_lines(saved: SavedModel) -> list[str]:
    """Say under which licence the base model is."""
    card = saved.card
    page = f" ([its page]({card.page}))" if card.page else ""
    lines = [f"The base model, {card.name}, has the licence {card.licence}{page}."]
    if saved.description["encoder"]["adapted"] and forbids_derivatives(card.licence):
        lines.append("It forbids sharing derivatives, and this model is one.")
    return lines


def _use_lines(saved: SavedModel) -> list[str]:
    """Show how to load the encoder."""
    card = saved.card
    arguments = f", {needed}" if (needed := timm_arguments(card)) else ""
    mean, std = (tuple(round(value, 6) for value in values) for values in (card.mean, card.std))
    return [
        "## Use",
        "",
        "```python",
        *(["import functools", "", "import timm", "import torch", ""] if arguments else ["import timm", ""]),
        f'encoder = timm.create_model("local-dir:FOLDER", pretrained=True{arguments}).eval()',
        "```",
        "",
        f"Tiles of {card.tile_px} px"
        + (f" ({card.name} was trained at {' and '.join(map(str, card.mpp))} um per pixel)" if card.mpp else "")
        + f", normalised with mean {mean} and standard deviation {std}. The feature is the CLS token"
        + (" and the mean of the patch tokens" if card.feature == "cls+mean" else "")
        + " after the final norm. `aggregator.safetensors` and `tapfm.json` turn tiles into a prediction.",
        "",
    ]


def _use_of_features(saved: SavedModel) -> list[str]:
    """Show how to use an aggregator without an encoder of its own."""
    size = saved.description["aggregator"]["feature_size"]
    return [
        "## Use",
        "",
        "```python",
        "import tapfm",
        'aggregator = tapfm.load("FOLDER").model.aggregator',
        "```",
        "",
        f"It takes the features of all tiles of a slide (tiles x {size}) and their raw attention (`tapfm embed`).",
        "",
    ]


def _data_lines(run_folder: RunFolder, targets: list[str]) -> list[str]:
    """Count slides, patients and labels by split."""
    kinds, slides = target_kinds(targets), run_folder.slides()
    columns = [Column("split", text=True), Column("patients"), Column("slides")]
    columns += count_columns(kinds)
    rows = []
    for split in SPLITS:
        of_split = [row for row in slides if row["split"] == split]
        patients = len({row["patient_id"] for row in of_split})
        rows.append(table_row(split, patients, len(of_split), *count_cells(of_split, kinds)))
    return [markdown_table(Table(columns, rows)).rstrip()]


def _figure_lines(result: Mapping[str, AucScores]) -> list[str]:
    """Write AUCs by split, or why there are none."""
    if not result:
        return ["None: the run was not finished when this was exported, or no slide was held out."]
    rows = [
        table_row(
            split, target, Cell(value, why=scores.why_undefined.get(target, "")), f"{scores.count:,} {scores.unit}s"
        )
        for split, scores in result.items()
        for target, value in scores.auc.items()
    ]
    columns = [Column("split", text=True), Column("target", text=True), Column("AUC"), Column("of")]
    return [
        "On all tiles of each slide" + (f"; the epoch was chosen on {VALIDATION}." if VALIDATION in result else "."),
        "",
        markdown_table(Table(columns, rows)).rstrip(),
    ]
