"""Descriptions of the files that tapfm writes, and of every column, key and attribute in them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import get_args

from reference_text import code, code_list

from tapfm.runtime.steps import StepState
from tapfm.slides.scale import ScaleSource
from tapfm.study.stability import MEASURES as STABILITY
from tapfm.tasks.binary_metrics import MAIN_METRICS, THRESHOLD_FREE
from tapfm.tasks.binary_metrics import METRIC_NAMES as METRICS
from tapfm.tasks.target import BASELINE

Meanings = Mapping[str, str]


@dataclass(frozen=True)
class Format:
    """Description of a file format, with the meanings of its names that are not in COMMON.

    `file` is the path of a sample file. `same_format` lists other sample files with the same names. If `shared_group`
    is set, this group of names is the same as in the file `shared_with`, and is documented only there. `name_patterns`
    maps regular expressions to a placeholder, so that several similar names are documented as one.
    """

    file: str
    title: str
    description: str
    meanings: Meanings = field(default_factory=dict)
    shared_with: str | None = None
    shared_group: str | None = None
    same_format: tuple[str, ...] = ()
    name_patterns: Meanings = field(default_factory=dict)


LOGIT = "output of the model, before the sigmoid; for an ensemble, the logit of the mean probability"

# names that have the same meaning in all files
COMMON: Meanings = {
    "slide_id": "id of the slide; names of files of this slide contain it",
    "patient_id": "id of the patient; the slide id if the table has none",
    "cohort": "name of the slide's cohort, from the cohort table; may be empty",
    "split": "`train`, `val` or `test`; empty if the slide has no split",
    "path": "path of the slide file; a relative path is relative to the folder of the table",
    "target": "target: the label column that is predicted",
    "TARGET": "label of each target: 0, 1 or the text of a class, as in the table; empty if it is not known",
    "label": "label from the table: 0, 1 or the text of a class; empty if it is not known",
    "positive_class": "positive class of the target: 1, or its text in the table; `probability` is its probability",
    "probability": "sigmoid of the logit",
    "logit": LOGIT,
    "tiles": "number of tiles used",
    "tiles_failed": "number of tiles that could not be read and were skipped",
    "reason": "why the slide failed",
    "hint": "what to do next",
    "seconds": "duration in seconds",
    "tapfm": "version of tapfm that wrote the file",
    "model": "title of the model, as in the paper",
    "targets": "label columns that are predicted",
    "members": "for each run or export in the model: `run`, the fingerprint of the run, and `weights_sha256`, a digest "
    "of its weight files",
    "ci_low": "95% confidence interval, lower bound",
    "ci_high": "95% confidence interval, upper bound",
    "p_delong": "p value of DeLong's test",
    "p_bootstrap": "p value of the patient bootstrap",
    "p_holm": "p value after Holm's correction for all comparisons of the same target (in a study: cohort and target)",
    "best_epoch": "best epoch, mean over runs",
    "name": "TRIDENT and CLAM: id of the slide",
    "savetodir": "TRIDENT: name of a folder, `patches` or `features`",
    "run": "fingerprint of the run's configuration and split",
    "encoder": "name of the encoder, as in `tapfm encoders`",
    "aggregator": "name of the aggregator",
    "tile_px": "side of a tile after resizing, in pixels",
    "side_px0": "side of a tile on the slide, in level-0 pixels",
    "tapfm_fingerprint": "fingerprint of all inputs that determine the content; only files of tapfm have it",
    "mpp": "microns per pixel of level 0",
    "width_px0": "width of the slide, in level-0 pixels",
    "height_px0": "height of the slide, in level-0 pixels",
    "type": "`FeatureCollection`",
    "features[].type": "`Feature`",
    "features[].geometry": "outline, in level-0 pixels relative to the corner of the scanned bounds",
    "features[].id": "id, which stays the same if the file is written again",
    "unit": "unit of the metrics: `slide` or `patient`",
    "resamples": "number of bootstrap resamples for confidence intervals",
    "seed": "random seed",
    "notes": "notes for the reader",
    "patients": "number of patients",
    "epoch": "epoch, counted from 1",
    "tiles_per_second": "training and validation tiles per second",
    "peak_memory_gib": "peak memory in GiB: of the GPU, or of the process if there is no GPU",
    "variant": "name of the variant",
    "slides": "number of slides",
}

FEATURES_SOURCE = (
    "tool that wrote the stored features, and the encoder that they name; null if it was tapfm, or without stored "
    "features"
)
WEIGHTS_SOURCE = (
    "where these weights are from: `source` (`package`, `hub` or `local`), `repository` and `revision` on the Hugging "
    "Face Hub, and name of the file; null with stored features"
)
ENCODER_TENSORS = "trainable parameters of the encoder, in float32; with LoRA, only its adapters"
TARGET_OR_MEAN = "target: the label column that is predicted, or `macro` for the mean of several targets"
PREDICTION_MPP_SOURCE = f"source of mpp: {code_list(get_args(ScaleSource))}, or `tiles` (those of an earlier --mpp)"
MISSING_REASON = "why a value is missing, or that some bootstrap resamples or targets are excluded"

TILING_COLUMNS: Meanings = {
    "status": "`ok`, `failed`, or `not tiled` if `--only` excludes the slide",
    "mpp_source": f"source of mpp: {code_list(get_args(ScaleSource))} (only in `tapfm predict`)",
    "tissue": "tissue detection method, or `annotation` if a file of `--tissue-mask` was used",
    "achieved_mpp": "microns per pixel of the tiles, whose sides are rounded to whole level-0 pixels",
    "tiles": "number of tiles that passed the filters",
    "tiles_padded": "number of these tiles that extend past the right or bottom edge (`--edge-tiles pad`)",
    "tissue_mm2": "area of the tissue, in mm²",
    "removed_background": "number of tiles removed: too little tissue",
    "removed_padding": "number of tiles removed: padding of the scanner",
    "removed_pen": "number of tiles removed: pen marks",
    "removed_blur": "number of tiles removed: out of focus",
    "removed_unreadable": "number of tiles removed: could not be decoded",
    "removed_edge": "number of tiles removed: enough tissue, but past the right or bottom edge; empty if an older "
    "version tiled the slide",
    "removed_edge_mm2": "area of the tissue in these tiles that is in no other tile, in mm²",
    "warnings": "warnings about the slide",
    "reason": "why the slide failed or was not tiled",
}

TILE_ATTRIBUTES: Meanings = {
    "coords": "x and y of the top left corner of each tile, in level-0 pixels",
    "achieved_mpp": "microns per pixel of the tiles",
    "overlap_px": "overlap of neighbouring tiles, in pixels after resizing",
    "slide_height_px0": "height of the slide, in level-0 pixels",
    "slide_width_px0": "width of the slide, in level-0 pixels",
    "slide_mpp": "microns per pixel of level 0",
    "target_mpp": "requested microns per pixel",
    "tapfm_spec": "JSON: the settings of `tapfm tile` that determine the tiles",
    "tapfm_summary": "JSON: the slide's row of `summary.csv`, except `seconds`",
}

FORMATS: dict[str, list[Format]] = {
    "Tables of slides": [
        Format(
            "split.csv",
            "cohort.csv, split.csv",
            "One row per slide. `tapfm synth` and `tapfm inspect --write-cohort` write this file, and `tapfm split` "
            "adds the splits. Any other column is a label or a property to group by. With `--folds`, the splits are in "
            "the columns `fold_0`, `fold_1`, and so on. Tables with other names of columns, Excel files and tables of "
            "other tools can be read too: see [Your cohort table](../how-to/your-cohort-table.md).",
            {
                "site": "synthetic slides: site where the slide was stained",
                "scanner": "synthetic slides: scanner",
                "objective": "synthetic slides: `20x` or `40x`",
            },
            same_format=("synthetic/cohort.csv", "synthetic/external.csv"),
        ),
        Format(
            "cohort.csv",
            "cohort.csv of tapfm inspect",
            "Written by `tapfm inspect --write-cohort` as a template to fill in.",
            {
                "patient_id": "empty; fill in the id of the patient",
                "mpp": "microns per pixel of level 0; fill it in if the slide file has none. It has priority over the "
                "slide file",
            },
        ),
    ],
    "Tiles": [
        Format(
            "tiles/patches/ID_patches.h5",
            "patches/ID_patches.h5",
            "Coordinates of the tiles of a slide, in TRIDENT's layout. Attributes that are not marked as TRIDENT's are "
            "added by tapfm, under names that neither TRIDENT nor CLAM uses. With `--edge-tiles pad`, the file also "
            "has the dataset `padded` (bool): which tiles extend past the right or bottom edge.",
            {
                **TILE_ATTRIBUTES,
                "patch_size": "TRIDENT: side of a tile after resizing, in pixels",
                "patch_size_level0": "TRIDENT: side of a tile on the slide, in level-0 pixels",
                "level0_magnification": "TRIDENT: `target_magnification` x `patch_size_level0` / `patch_size`",
                "level0_width": "TRIDENT: width of the slide, in level-0 pixels",
                "level0_height": "TRIDENT: height of the slide, in level-0 pixels",
                "overlap": "TRIDENT: the same as `overlap_px`",
                "target_magnification": "TRIDENT: requested magnification: 20 at 0.5 microns per pixel",
            },
        ),
        Format(
            "tiles-clam/patches/ID.h5",
            "patches/ID.h5",
            "Coordinates of the tiles of a slide, in CLAM's layout (`tapfm tile --layout clam`), always at level 0. "
            "With `--edge-tiles pad`, it also has the dataset `padded`, as in `patches/ID_patches.h5`.",
            {
                **TILE_ATTRIBUTES,
                "patch_size": "CLAM: side of a tile at `patch_level`: 448 at 40x, where TRIDENT has 224",
                "patch_level": "CLAM: level of the coordinates, 0",
                "downsample": "CLAM: downsample factor of that level, 1",
                "level_dim": "CLAM: width and height of the slide, in level-0 pixels",
                "downsampled_level_dim": "CLAM: the same as `level_dim`",
                "save_path": "CLAM: name of the folder that contains this file",
            },
        ),
        Format(
            "tiles/summary.csv",
            "summary.csv of tapfm tile",
            "One row per slide.",
            TILING_COLUMNS,
            same_format=("tiles-clam/summary.csv",),
        ),
        Format(
            "tiles/failures.csv",
            "failures.csv of tapfm tile and tapfm embed",
            "One row per slide that failed.",
            same_format=("tiles-clam/failures.csv", "features/failures.csv"),
        ),
        Format(
            "tiles/tissue/ID.geojson",
            "tissue/ID.geojson",
            "Outline of the tissue, for QuPath. Save a corrected outline in another folder, and pass that folder to "
            "`tapfm tile --tissue-mask`.",
            {
                "features[].properties.objectType": "`annotation`",
                "features[].properties.classification": "name and colour of its class",
                "features[].properties.tissue_id": "number of the tissue component, starting at 0",
            },
            same_format=("tiles-clam/tissue/ID.geojson",),
        ),
    ],
    "Features": [
        Format(
            "features/ID.h5",
            "ID.h5",
            "Features of the tiles of a slide, written by `tapfm embed` in TRIDENT's layout. D is the size of a "
            "feature. With tiles of `--edge-tiles pad`, it also has the dataset `padded`, as in "
            "`patches/ID_patches.h5`.",
            {
                "features": "one feature vector per tile",
                "coords": "x and y of the top left corner of each tile that could be read, in level-0 pixels",
                "attention": "raw attention of the encoder (eq. 1), which `cls-attention` and `cls-gated` need",
                "encoder_tile_px": "side of the encoder's input, in pixels",
                "feature": "`cls` (CLS token) or `cls+mean` (CLS token, then the mean of the patch tokens)",
                "precision": "precision of the encoder",
                "weights_sha256": "SHA-256 of the encoder's weights",
            },
            shared_with="tiles/patches/ID_patches.h5",
            shared_group="Attributes of `coords`",
        ),
        Format(
            "features/summary.csv",
            "summary.csv of tapfm embed",
            "One row per slide.",
            {
                "status": "`ok`, `failed`, or `not embedded` if `--only` excludes the slide",
                "reason": "why the slide failed or was not embedded",
                "tiles": "number of tiles with features",
            },
        ),
    ],
    "A run": [
        Format(
            "runs/first/split.csv",
            "split.csv of a run",
            "The slides of a run, as they were when the run started.",
            {
                "tiles": "number of tiles of the slide; empty if stored features are used",
                "digest": "digest of the slide's tiles or features, to detect changes",
            },
        ),
        Format(
            "runs/first/history.jsonl",
            "history.jsonl",
            "One JSON object per line, one line per epoch. Losses and norms are means over the training "
            "slides, `val_loss` over the validation slides.",
            {
                "loss_agg": "task loss (eq. 4)",
                "loss_feature": "feature loss (eq. 5)",
                "loss_attention": "attention loss (eq. 6)",
                "loss_cosine": "cosine loss (appendix)",
                "loss_pfm": "encoder loss (eq. 7)",
                "norm_g_z": "norm of the gradient at the features",
                "norm_g_r": "norm of the gradient at the raw attention",
                "norm_encoder": "norm of the encoder's gradient; with several slides per step, of the sum so far",
                "train_auc": "AUC by target on training slides, from the predictions before each update",
                "train_macro_auc": "mean of `train_auc` over targets",
                "val_auc": "AUC by target on validation slides",
                "val_macro_auc": "mean of `val_auc` over targets",
                "val_undefined": "targets without an AUC, with the reason",
                "val_loss": "task loss (eq. 4) on validation slides",
                "encoder_lr": "learning rate of the encoder",
                "aggregator_lr": "learning rate of the aggregator",
                "slides": "number of slides used for training",
                "slides_failed": "number of slides that have failed so far, without those that could be read later",
                "tiles": "number of tiles used for training",
                "data_wait_fraction": "fraction of the time spent waiting for tiles",
                "score": "selection score of the epoch: `val_macro_auc`; the negative `val_loss` if there is no "
                "AUC; the epoch, counted from 0, if there are no validation predictions",
            },
        ),
        Format(
            "runs/first/predictions-test.csv",
            "predictions-val.csv, predictions-test.csv",
            "Predictions of the best epoch on all tiles of each slide: one row per slide and target. `predictions.csv` "
            "and `predictions-baseline.csv` of an evaluation have the same columns. `tapfm compare` also reads tables "
            "of other tools with the columns `patient_id`, `slide_id`, `target`, `label` and `probability`.",
            same_format=(
                "runs/first/predictions-val.csv",
                "evaluated/predictions.csv",
                "evaluated/predictions-baseline.csv",
            ),
        ),
        Format(
            "runs/first/failures.csv",
            "failures.csv of a run or an evaluation",
            "Slides that failed, and slides with skipped tiles.",
            {
                "problem": "`failed`, or `tiles skipped`",
                "tiles_skipped": "number of skipped tiles, if the slide did not fail",
                "reason": "why the slide failed, or why tiles were skipped",
            },
            same_format=("evaluated/failures.csv",),
        ),
        Format(
            "runs/first/environment.json",
            "environment.json",
            "A list with one entry for the start of the run and one for each time it was resumed. An entry describes "
            "everything except the configuration that can affect the result.",
            {
                "[].tapfm": "version of tapfm",
                "[].python": "version of Python",
                "[].platform": "operating system",
                "[].cores": "processor cores",
                "[].threads": "number of torch threads, which affects rounding",
                "[].device": "device; for a GPU with its name and memory",
                "[].cuda": "version of CUDA; null without a GPU",
                "[].packages": "versions of relevant packages",
                "[].weights_sha256": "SHA-256 of the encoder's weights before adaptation",
                "[].weights": WEIGHTS_SOURCE,
                "[].features_source": FEATURES_SOURCE,
                "[].tiles": "tiling settings of the training tiles, to tile other slides in the same way; null if "
                "stored features are used or the settings are unknown",
                "[].command": "command line",
            },
        ),
        Format(
            "runs/first/checkpoints/best.safetensors",
            "checkpoints/best.safetensors",
            "Parameters that training changed, at the best epoch. All other parameters are those of the base model.",
            {
                "aggregator/": "parameters of the aggregator",
                "encoder/": ENCODER_TENSORS,
                "kind": "`best`",
                "score": "selection score of the epoch",
                "row": "the epoch's line of `history.jsonl`",
            },
        ),
        Format(
            "runs/first/checkpoints/last.safetensors",
            "checkpoints/last.safetensors",
            "Everything that is needed to resume the run.",
            {
                "aggregator/": "parameters of the aggregator",
                "encoder/": ENCODER_TENSORS,
                "moments/": "moments of the two optimisers",
                "random/": "states of the random number generators",
                "kind": "`last`",
                "moments": "storage format of the encoder's moments: `float32`, `bfloat16` or `int8`",
                "config": "the configuration",
                "progress": "epoch, position in the epoch, best epoch, failures and history so far",
            },
        ),
    ],
    "An evaluation": [
        Format(
            "evaluated/metrics.csv",
            "metrics.csv",
            "One row per model, subgroup, target and metric, and one row per target for the difference of AUC between "
            "the model and the baseline. The metrics are "
            + ", ".join(code(name) for name in METRICS)
            + ". Those with `_at_chosen` use the threshold for the requested sensitivity. "
            + ", ".join(code(name) for name in THRESHOLD_FREE)
            + " use no threshold, and the others use Youden's. Subgroups have only "
            + ", ".join(code(name) for name in MAIN_METRICS)
            + ", and only for the model.",
            {
                "model": f"`model`, `{BASELINE}`, or `model - {BASELINE}` for the difference",
                "subgroup": "subgroup of `--by`; empty for all slides",
                "target": TARGET_OR_MEAN,
                "metric": "name of the metric",
                "value": "value of the metric",
                "delong_low": "DeLong's 95% confidence interval of an AUC, lower bound",
                "delong_high": "DeLong's 95% confidence interval of an AUC, upper bound",
                "units": "number of slides or patients with a label",
                "positives": "number of positive slides or patients",
                "reason": MISSING_REASON,
            },
        ),
        Format(
            "evaluated/metrics.json",
            "metrics.json",
            "All results of an evaluation as nested data.",
            {
                "evaluation": "content of `evaluation.json`",
                "failed": "slides that failed, with the reason",
                "without_label": "slides without a label",
                "thresholds": "thresholds by target, and the slides they were chosen on",
                "models": "metrics by model, subgroup (`all` for all slides), target and metric name",
                "baseline": "description of the baseline",
                "model_minus_baseline": "difference of AUC between model and baseline by target, with tests",
            },
        ),
        Format(
            "evaluated/evaluation.json",
            "evaluation.json",
            "The evaluated model, the slides it was evaluated on, and the settings.",
            {
                "model": "model folder given on the command line",
                "kind": "`run`, `export`, `ensemble of folds` or `ensemble of seeds`",
                "cohort": "`own` (the cohort table of the run) or `external`",
                "table": "file name of the cohort table",
                "table_sha256": "SHA-256 of the cohort table",
                "split": "evaluated split, or `all`; null for an external cohort without `--split`; `out-of-fold` for "
                "a cross-validation",
                "from": "input of the model: `tiles` or `features`",
                "sensitivity": "requested sensitivity of the second threshold",
                "by": "columns that define subgroups",
            },
        ),
        Format(
            "evaluated/colours.csv",
            "colours.csv",
            "Colour statistics of up to 64 tiles of each slide, for the colour baseline. `CHANNEL` is `red`, `green` "
            "or `blue`.",
            {
                "key": "fingerprint of all inputs that determine the colour statistics",
                "CHANNEL_mean": "mean, from 0 to 255",
                "CHANNEL_sd": "standard deviation",
                "CHANNEL_skewness": "skewness",
                "CHANNEL_percentile_N": "percentiles: 5, 25, 75 and 95",
            },
            name_patterns={r"^(red|green|blue)_": "CHANNEL_", r"percentile_\d+$": "percentile_N"},
        ),
    ],
    "A comparison": [
        Format(
            "compared/comparison.csv",
            "comparison.csv",
            "One row per pair of models and target, on the patients that all models have.",
            {
                "first": "first model",
                "second": "second model",
                "target": TARGET_OR_MEAN,
                "auc_first": "AUC of the first model",
                "auc_second": "AUC of the second model",
                "difference": "AUC of the first model minus AUC of the second",
                "reason": MISSING_REASON,
            },
        ),
        Format(
            "compared/comparison.json",
            "comparison.json",
            "All results of a comparison as nested data.",
            {
                "files": "table of predictions of each model",
                "excluded": "patients and slides of each model that are missing in another model",
                "partial_labels": "patients or slides with a label in only some models; this label is used for all",
                "auc": "AUC with its confidence interval, by model and target",
                "pairs": "paired comparisons: `difference` has `value`, `low`, `high` and `reason`; the outer `reason` "
                "is that of `p_delong`",
            },
        ),
        Format(
            "compared/excluded.csv",
            "excluded.csv",
            "One row for each model and each patient or slide that it has and another model lacks. These patients and "
            "slides are excluded from the comparison.",
            {
                "model": "model whose predictions include the patient or slide",
                "patient": "patient id; `PATIENT (slide SLIDE)` if other slides of the patient are compared",
            },
        ),
    ],
    "A prediction": [
        Format(
            "predicted/prediction.json",
            "prediction.json",
            "Model, targets and call thresholds. This file identifies a prediction folder. With `--mpp`, it also has "
            "the key `mpp`, and with `--precision float8` the key `precision`.",
            {
                "model": "model folder given on the command line",
                "kind": "`run`, `export`, `ensemble of folds` or `ensemble of seeds`",
                "calls": "thresholds by target, their source, and the requested sensitivity",
            },
        ),
        Format(
            "predicted/predictions.csv",
            "predictions.csv",
            "One row per slide and target: the columns of every table of predictions, and the call.",
            {
                "threshold": "threshold of the probability, chosen on validation slides; empty if there are none",
                "call": "1 if the probability reaches the threshold, otherwise 0; empty without a threshold",
                "warning": "why the prediction is unreliable: `only N tiles` for fewer than 20 tiles, otherwise empty",
                "mpp_source": PREDICTION_MPP_SOURCE,
            },
        ),
        Format(
            "predicted/failures.csv",
            "failures.csv of a prediction",
            "Slides that failed, slides whose images could not be drawn, and slides with skipped tiles.",
            {
                "problem": "stage that failed: `tiles`, `read`, `predict` or `draw`; or `tiles skipped`",
                "reason": "why the slide failed, or how many tiles were skipped",
            },
        ),
        Format(
            "predicted/per-slide/ID/slide.json",
            "per-slide/ID/slide.json",
            "The slide and its predictions. It is written when the slide is finished.",
            {
                "path": "path of the slide file, which may have been moved since",
                "split": "`train`, `val` or `test`; null if the slide has no split",
                "bounds": "scanned area: `x_px0`, `y_px0`, `width_px0` and `height_px0`",
                "columns": "columns of `tiles.parquet`, except x and y",
                "targets.TARGET.logit": LOGIT,
                "targets.TARGET.probability": "sigmoid of the logit",
                "targets.TARGET.threshold": "threshold of the probability; null if there are no validation slides",
                "targets.TARGET.call": "1 if the probability reaches the threshold, otherwise 0; null without "
                "a threshold",
                "warning": "why the prediction is unreliable: `only N tiles` for fewer than 20 tiles, otherwise empty",
                "mpp_source": f"{PREDICTION_MPP_SOURCE}; null if unknown",
                "targets.TARGET.label": "label from the table, or null",
                "targets.TARGET.constant": "logit = constant + sum of contributions; null if the model has no "
                "contributions or is an ensemble",
                "key": "fingerprint of the weights, the tiles and the slide files",
            },
        ),
        Format(
            "predicted/per-slide/ID/tiles.parquet",
            "per-slide/ID/tiles.parquet",
            "One row per tile. A column whose values differ by target is named `weight.TARGET` or `score.TARGET`. "
            "Aggregators that score tiles without weights have `score` instead of `weight`. Some aggregators have no "
            "contributions. For an ensemble, values are means over its members. With tiles of `--edge-tiles pad`, the "
            "column `padded` (bool) follows `y`: whether the tile extends past the right or bottom edge.",
            {
                "x": "left edge, in level-0 pixels",
                "y": "upper edge, in level-0 pixels",
                "attention": "raw attention of the encoder (eq. 1)",
                "weight": "weight of the tile; weights sum to 1 over all tiles",
                "contribution.TARGET": "contribution of the tile to the target's logit",
            },
        ),
        Format(
            "predicted/per-slide/ID/tiles.geojson",
            "per-slide/ID/tiles.geojson",
            "The tiles for QuPath, one per line.",
            {
                "features[].properties.objectType": "`tile`",
                "features[].properties.isLocked": "true",
                "features[].properties.measurements": "columns of `tiles.parquet` (`padded` as 0 or 1), and "
                "percentiles of the contributions; without contributions, of the scores, weights or attention",
                "features[].properties.classification": "class of the tenth of tiles with the highest percentile, "
                "and of that with the lowest: name and colour. With several targets, the first one counts",
            },
        ),
    ],
    "An export": [
        Format(
            "exported/model.safetensors",
            "model.safetensors",
            "The adapted encoder with the parameter names of timm, which loads the folder as `local-dir:FOLDER`.",
            {"*": "parameters, with their names in timm", "format": "`pt`", "tapfm": "name of the encoder"},
        ),
        Format(
            "exported/config.json",
            "config.json",
            "Configuration for timm, with additional information for tapfm.",
            {
                "architecture": "name of the architecture in timm",
                "num_classes": "number of classes, 0",
                "num_features": "size of the CLS token",
                "global_pool": "`token`: timm returns the CLS token",
                "model_args": "arguments of the architecture",
                "pretrained_cfg": "input size, mean and standard deviation of the pixels, licence",
                "tapfm": "encoder, feature, scale and targets",
            },
        ),
        Format(
            "exported/aggregator.safetensors",
            "aggregator.safetensors",
            "Parameters of the aggregator.",
            {"aggregator/": "parameters of the aggregator", "kind": "`aggregator`"},
        ),
        Format(
            "exported/tapfm.json",
            "tapfm.json",
            "Description of the model, which makes the export independent of the run folder.",
            {
                "encoder.name": "name of the encoder",
                "encoder.adapted": "false if the encoder was fixed",
                "encoder.base_weights_sha256": "SHA-256 of the encoder's weights before adaptation",
                "encoder.base_weights": WEIGHTS_SOURCE,
                "encoder.features_source": FEATURES_SOURCE,
                "aggregator.name": "name of the aggregator",
                "aggregator.options": "options of the aggregator",
                "aggregator.tau": "temperature of the softmax that gives the tile weights",
                "aggregator.layer_norm": "whether there is a LayerNorm before the head",
                "aggregator.feature_size": "size of a feature",
                "training_labels": "number of positive and labelled slides of the training split, by target",
                "tiles": "tiling settings of the training tiles, as in `environment.json`",
                "epoch": "best epoch, whose weights are exported",
                "method": "`tapfm`, `finetune` or `fixed`",
                "scope": "trained part of the encoder: `adaptation.scope`",
                "recipe": "recipe of the run",
                "seed": "seed of the run",
                "thresholds": "for `slide` and for `patient`: thresholds by target, Youden's (`youden`) and those that "
                "reach `sensitivity` (`chosen`); null if there are no validation predictions",
            },
        ),
        Format(
            "ensemble/ensemble.json",
            "ensemble.json",
            "Several runs as one model that averages their probabilities. `tapfm train --folds` and `tapfm study` "
            "write it; you can also write it by hand.",
            {
                "kind": "`folds` or `seeds`: how the members differ",
                "members[]": "folders of runs or exports, relative to this file",
            },
        ),
        Format(
            "cross-validated/cross-validation.json",
            "cross-validation.json",
            "Marks the folder of a cross-validation (`tapfm train --folds`). Its other files are those of an "
            "evaluation.",
            {"folds": "number of folds"},
        ),
    ],
    "A study": [
        Format(
            "study/study.json",
            "study.json",
            "All results of a study as a list of sections. `tapfm report` builds its page from this file.",
            {
                "[].title": "title of the section",
                "[].blocks[]": "paragraphs, tables and figures of the section; `kind` is the type",
            },
        ),
        Format(
            "study/table_binary.csv",
            "table_binary.csv, table_multilabel.csv",
            "One row per model, cohort and target.",
            {
                "method": f"`fixed`, `finetune`, `tapfm` or `{BASELINE}`",
                "cohort": "`test` or `external`",
                "target": TARGET_OR_MEAN,
                "slides": "number of slides of these patients",
                "auc": "AUC, mean over seeds",
                "seeds": "number of seeds in the mean",
                "seed_sd": "standard deviation over seeds",
                "difference_to_best": "AUC of this model minus the highest AUC of this cohort and target",
                "difference_to_best_low": "95% confidence interval of the difference, lower bound",
                "difference_to_best_high": "95% confidence interval of the difference, upper bound",
                "rank": "rank of the AUC among the models for this cohort and target; 1 is the highest",
                "reason": MISSING_REASON,
                "validation_auc": "AUC on validation slides, mean over runs",
                "validation_ci_low": "95% confidence interval of `validation_auc`, lower bound; empty with folds",
                "validation_ci_high": "95% confidence interval of `validation_auc`, upper bound; empty with folds",
                "validation_patients": "number of validation patients",
                "validation_slides": "number of slides of these patients",
                "validation_reason": "why the validation AUC or its interval is missing",
                "runs": "number of finished runs",
                "chosen": "1 if the model is chosen on validation for this target: highest validation AUC; if equal, "
                "lowest validation loss; otherwise 0",
            },
        ),
        Format(
            "study/costs.csv",
            "costs.csv",
            "One row per model.",
            {
                "runs": "number of finished runs",
                "epochs": "number of epochs, mean over runs",
                "seconds_per_epoch": "duration of an epoch in seconds",
                "seconds": "duration of a run in seconds",
                "peak_memory_gib": "peak memory in GiB, maximum over runs: of the GPU, or of the process if there is "
                "no GPU",
            },
        ),
        Format(
            "study/ablation.csv",
            "ablation.csv",
            "One row per model and variant, with the fit log L = a + b epoch of the training loss L.",
            {
                "reason": "why the fit or the test AUC is missing",
                "a": "intercept of the fit",
                "b": "slope of the fit; the loss falls if it is below 0",
                "b_low": "95% confidence interval of b, lower bound",
                "b_high": "95% confidence interval of b, upper bound",
                "r_squared": "coefficient of determination of the fit",
                "first_epoch": "first epoch of the fit",
                "last_epoch": "last epoch of the fit",
                "val_auc": "AUC on validation slides",
                "test_auc": "AUC on test slides",
                "test_auc_low": "95% confidence interval of `test_auc`, lower bound",
                "test_auc_high": "95% confidence interval of `test_auc`, upper bound",
            },
        ),
        Format(
            "study/stability.csv",
            "stability.csv",
            "One row per run. L is the training loss, from epoch 2.",
            {
                "run": "name of the run",
                "order": "order of the updates, `adaptation.bag_gradient`: `before`, `after` or `joint`",
            }
            | STABILITY,
        ),
        Format(
            "study/forgetting.csv",
            "forgetting.csv",
            "One row per model: results of a linear probe on tiles of another task, before and after the encoder was "
            "adapted. `WHEN` is `before`, `after`, or `change` (after minus before).",
            {
                "runs": "number of runs in the mean",
                "tiles": "number of test tiles",
                "accuracy_WHEN": "accuracy of the probe",
                "auc_WHEN": "mean AUC of each class against the others",
                "accuracy_WHEN_low": "95% confidence interval, lower bound",
                "accuracy_WHEN_high": "95% confidence interval, upper bound",
                "auc_WHEN_low": "95% confidence interval, lower bound",
                "auc_WHEN_high": "95% confidence interval, upper bound",
                "cosine_distance": "mean cosine distance (1 - cos) between features before and after",
                "linear_cka": "linear CKA: similarity of the features, independent of rotation and scale; 1 for "
                "identical features",
            },
            name_patterns={r"_(before|after|change)": "_WHEN"},
        ),
        Format(
            "study/status.csv",
            "status.csv",
            "One row per step, such as `embed`, `train` or `evaluate test`.",
            {
                "run": "run or ensemble that the step belongs to, or `features of ENCODER`",
                "step": "name of the step",
                "state": code_list(get_args(StepState)),
                "reason": "why the step failed or was not run",
                "command": "command that repeats the step",
                "log": "file with the output of the step, relative to the study folder",
            },
        ),
    ],
    "A synthetic cohort": [
        Format(
            "synthetic/truth/tiles.csv",
            "truth/tiles.csv",
            "One row per tile of the default grid, 224 px at 0.5 microns per pixel.",
            {
                "x_px0": "left edge, in level-0 pixels",
                "y_px0": "upper edge, in level-0 pixels",
                "tissue": "fraction of the tile that is tissue",
                "TARGET": "fraction of the tile that shows the target's morphology",
            },
        ),
        Format(
            "synthetic/truth/ID.json",
            "truth/ID.json",
            "Meaning of the pixel values of `truth/ID.png`.",
            {
                "foci": "foci of the slide: those of its positive targets, then those that only "
                "resemble the focus of a target",
                "values": "pixel value of each compartment and focus",
            },
        ),
        Format(
            "synthetic/truth/ID.geojson",
            "truth/ID.geojson",
            "Foci and artefacts, as QuPath annotations.",
            {
                "features[].properties.objectType": "`annotation`",
                "features[].properties.classification": "name and colour of its class",
            },
        ),
        Format(
            "synthetic/synth.json",
            "synth.json",
            "Settings and files of the cohort.",
            {
                "key": "fingerprint of the settings and of the version of the generator",
                "settings": "settings of `tapfm synth`",
                "slides[]": "slide files",
            },
        ),
    ],
}

# images and pages, and files whose format other programs define
OTHER_FILES: Meanings = {
    "run.toml": "configuration of a run: [all settings](configuration.md)",
    "runs/first/config.toml": "run: its configuration, with all defaults filled in",
    "report.html": "report: a run or a study on one page that needs no network",
    "runs/first/summary.md": "run: summary of the results",
    "runs/first/curves.png": "run: losses and AUC by epoch",
    "runs/first/tensorboard/*": "run: TensorBoard event files",
    "tiles*/index.html": "tiles: page of all overlays",
    "tiles*/overlays/ID.png": "tiles: overlay of tissue, tiles and removed tiles",
    "evaluated/metrics.md": "evaluation: all metrics on one page",
    "evaluated/roc.png": "evaluation: ROC curves",
    "evaluated/pr.png": "evaluation: precision-recall curves",
    "evaluated/reliability.png": "evaluation: calibration",
    "evaluated/scores.png": "evaluation: probabilities by label",
    "compared/comparison.md": "comparison: all results on one page",
    "compared/differences.png": "comparison: differences with confidence intervals",
    "predicted/per-slide/ID/heatmap-*.png": "prediction: heatmaps over the slide, with colour bar and scale bar",
    "predicted/per-slide/ID/heatmap-*.tif": "prediction: the same heatmaps as pyramidal TIFF for OpenSlide and QuPath",
    "predicted/per-slide/ID/gallery-*.png": "prediction: the tiles with the highest and the lowest values",
    "exported/README.md": "export: the model card",
    "study/*.md": "study: `study.md` has all results on one page, and the other files have one table each",
    "study/table_*.tex": "study: the table of AUCs for LaTeX",
    "study/roc.png": "study: ROC curves of the first seed of each model, for each cohort and target",
    "study/curves.png": "study: validation AUC and training loss of all models by epoch",
    "study/ablation-*.png": "ablation or stability study: training losses, and their logarithms with the fitted lines",
    "synthetic/README.md": "synthetic cohort: description",
    "synthetic/contact-sheet.jpg": "synthetic cohort: thumbnails of up to 40 slides",
    "synthetic/slides/ID.svs": "synthetic cohort: the slides",
    "synthetic/external/ID.svs": "synthetic cohort: the slides of the external cohort",
    "synthetic/truth/ID.png": "synthetic cohort: ground truth of compartments and foci, 1 micron per pixel",
}
