"""What the files that tapfm writes are, and what every column, key and attribute in them means: it stands here once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import get_args

from reference_text import any_of, code

from tapfm.runtime.steps import State
from tapfm.slides.scale import ScaleSource
from tapfm.study.stability import MEASURES as STABILITY
from tapfm.tasks.binary_metrics import NAMES as METRICS

Meanings = Mapping[str, str]


@dataclass(frozen=True)
class Format:
    """A file: where it is in the lab, what it is, and what its names mean beyond COMMON.

    `alike` names other files of the same form; `like`, one that is so in a part, whose meanings are not told twice.
    """

    file: str
    title: str
    about: str
    meanings: Meanings = field(default_factory=dict)
    like: str | None = None
    like_group: str | None = None  # only what this group has is like that of the other file
    alike: tuple[str, ...] = ()
    families: Meanings = field(default_factory=dict)  # names that differ in a part, by a pattern: how they are written


# names that mean the same in every file that has them
COMMON: Meanings = {
    "slide_id": "id of the slide; files of its own are named by it",
    "patient_id": "patient; that of the slide where the table has none",
    "cohort": "cohort, as the table says; empty where it says nothing",
    "split": "`train`, `val` or `test`",
    "path": "the slide's file; a relative path starts at the table",
    "target": "label column that is predicted",
    "TARGET": "label of each target: 0, 1, or empty where it is not known",
    "label": "what the table says: 0, 1, or empty",
    "probability": "sigmoid of the logit",
    "logit": "what the model says, before the sigmoid",
    "tiles": "tiles that were used",
    "tiles_failed": "tiles that could not be read and were skipped",
    "status": "`ok`, `failed`, or that `--only` left it out",
    "reason": "why",
    "what_to_do": "what to type or change next",
    "seconds": "seconds that it took",
    "why": "why a number is missing",
    "tapfm": "version that wrote it",
    "model": "model or method, as tables name it",
    "targets": "label columns that are predicted",
    "members": "each run of the model: `run`, its fingerprint, and `weights_sha256`, that of its weights",
    "low": "95% interval, lower end",
    "high": "95% interval, upper end",
    "p_delong": "p by DeLong's test",
    "p_bootstrap": "p by resampling patients",
    "p_holm": "p after Holm's correction for the comparisons of the same target, in a study of the same column",
    "best_epoch": "epoch that was kept, mean over runs",
    "name": "TRIDENT and CLAM: id of the slide",
    "savetodir": "TRIDENT: folder",
    "run": "fingerprint of configuration and split of the run",
    "encoder": "key of the encoder",
    "aggregator": "name of the aggregator",
    "tile_px": "side of a tile as it is read, in pixels",
    "side_px0": "side of a tile on the slide, in level-0 pixels",
    "tapfm_fingerprint": "of everything that decided the content; tells that the file is tapfm's",
    "mpp": "microns per pixel of level 0",
    "width_px0": "width of the slide, in level-0 pixels",
    "height_px0": "height of the slide, in level-0 pixels",
    "type": "`FeatureCollection`",
    "features[].type": "`Feature`",
    "features[].geometry": "outline, in level-0 pixels counted from the corner of the scanned bounds",
    "features[].id": "the same whenever it is written again",
    "unit": "`slide` or `patient`: what is counted",
    "resamples": "draws of patients for intervals",
    "seed": "of the random numbers",
    "notes": "what a reader has to know",
    "patients": "patients that are counted",
    "epoch": "epoch, counted from 1",
    "tiles_per_second": "speed, validation included",
    "peak_memory_gib": "most memory: of the GPU, without one of the process",
    "variant": "value of what is varied",
    "slides": "slides that are counted",
}

MADE_BY = "what files of stored features say of their maker, where another tool wrote them"

OUTCOME_OF_TILES: Meanings = {
    "mpp_source": f"who says so, of {any_of(get_args(ScaleSource))}; the manifest is the table",
    "tissue": "how tissue was found: a method, or drawn",
    "achieved_mpp": "microns per pixel at which tiles come out, after rounding to whole level-0 pixels",
    "tiles": "tiles that were kept",
    "tissue_mm2": "area of the tissue, in mm²",
    "removed_background": "tiles left out: too little tissue",
    "removed_padding": "tiles left out: padding of the scanner",
    "removed_pen": "tiles left out: pen",
    "removed_blur": "tiles left out: out of focus",
    "removed_unreadable": "tiles left out: could not be decoded",
    "warnings": "what is odd about the slide",
}

ATTRIBUTES_OF_TILES: Meanings = {
    "coords": "x and y of each tile's top left corner, in level-0 pixels",
    "achieved_mpp": "microns per pixel at which tiles come out",
    "overlap_px": "pixels that neighbouring tiles share, at the tile's scale",
    "slide_height_px0": "height of the slide, in level-0 pixels",
    "slide_width_px0": "width of the slide, in level-0 pixels",
    "slide_mpp": "microns per pixel of level 0",
    "target_mpp": "microns per pixel that were asked for",
    "tapfm_spec": "JSON: the settings of `tapfm tile` that decided which tiles there are",
    "tapfm_summary": "JSON: the slide's line of `summary.csv`",
}

FORMATS: dict[str, list[Format]] = {
    "Tables of slides": [
        Format(
            "split.csv",
            "cohort.csv, split.csv",
            "A line for each slide. `tapfm synth` and `tapfm inspect --write-cohort` write one, `tapfm split` adds the "
            "splits; any other column is a label or a fact to group by. With `--folds` the splits are in columns "
            "`fold_0`, `fold_1`, and so on. [Tables of other tools](../how-to/tile-your-slides.md) are understood too.",
            {
                "site": "painted slides: where it was stained",
                "scanner": "painted slides: what it was scanned by",
                "objective": "painted slides: `20x` or `40x`",
            },
            alike=("painted/cohort.csv", "painted/external.csv"),
        ),
        Format(
            "cohort.csv",
            "cohort.csv of tapfm inspect",
            "What `tapfm inspect --write-cohort` writes, to be filled in.",
            {"mpp": "microns per pixel of level 0, to fill in where the slide does not say; it wins over the slide"},
        ),
    ],
    "Tiles": [
        Format(
            "tiles/patches/ID_patches.h5",
            "patches/ID_patches.h5",
            "Where the tiles of a slide are, in TRIDENT's layout. Attributes that are not marked are tapfm's: "
            "they come on top, under names that neither it nor CLAM uses.",
            {
                **ATTRIBUTES_OF_TILES,
                "patch_size": "TRIDENT: side of a tile as it is read, in pixels",
                "patch_size_level0": "TRIDENT: its side on the slide, in level-0 pixels",
                "level0_magnification": "TRIDENT: the effective one, 40 at 0.25 microns per pixel, 37.77 at 0.2645",
                "level0_width": "TRIDENT: width of the slide, in level-0 pixels",
                "level0_height": "TRIDENT: height of the slide, in level-0 pixels",
                "overlap": "TRIDENT: pixels that neighbouring tiles share",
                "target_magnification": "TRIDENT: 20 at 0.5 microns per pixel",
            },
        ),
        Format(
            "tiles-clam/patches/ID.h5",
            "patches/ID.h5",
            "The same in CLAM's layout (`tapfm tile --layout clam`), always at level 0.",
            {
                **ATTRIBUTES_OF_TILES,
                "patch_size": "CLAM: side of a tile at `patch_level`, so 448 where TRIDENT says 224 at 40x",
                "patch_level": "CLAM: 0",
                "downsample": "CLAM: of that level, so 1",
                "level_dim": "CLAM: width and height of the slide, in level-0 pixels",
                "downsampled_level_dim": "CLAM: the same",
                "save_path": "CLAM: folder",
            },
        ),
        Format(
            "tiles/summary.csv",
            "summary.csv of tapfm tile",
            "A line for each slide.",
            OUTCOME_OF_TILES,
            alike=("tiles-clam/summary.csv",),
        ),
        Format(
            "tiles/failures.csv",
            "failures.csv of tapfm tile and tapfm embed",
            "A line for each slide that failed.",
            alike=("tiles-clam/failures.csv", "features/failures.csv"),
        ),
        Format(
            "tiles/tissue/ID.geojson",
            "tissue/ID.geojson",
            "The outline of the tissue, for QuPath; corrected, it goes to `tapfm tile --tissue-mask`.",
            {
                "features[].properties.objectType": "`annotation`",
                "features[].properties.classification": "name and colour of its class",
                "features[].properties.tissue_id": "number of the piece, from 0",
            },
            alike=("tiles-clam/tissue/ID.geojson",),
        ),
    ],
    "Features": [
        Format(
            "features/ID.h5",
            "ID.h5",
            "What an encoder says of a slide's tiles: `tapfm embed`. TRIDENT's layout; D is the size of a feature.",
            {
                "features": "a feature vector for each tile",
                "coords": "x and y of each tile's top left corner, in level-0 pixels; of tiles that could be read",
                "attention": "raw attention of the encoder (eq. 1), which `cls-attention` and `cls-gated` need",
                "encoder_tile_px": "side of a tile as the encoder takes it",
                "feature": "`cls`, or `cls+mean`: with the mean of the patch tokens",
                "precision": "in which the encoder ran",
                "weights_sha256": "SHA-256 of the encoder's weights",
            },
            like="tiles/patches/ID_patches.h5",
            like_group="Attributes of `coords`",
        ),
        Format(
            "features/summary.csv",
            "summary.csv of tapfm embed",
            "A line for each slide.",
            {"tiles": "tiles that have features"},
        ),
    ],
    "A run": [
        Format(
            "runs/first/split.csv",
            "split.csv of a run",
            "The slides that a run was made from, as they were.",
            {
                "tiles": "tiles of the slide; empty where features are stored",
                "digest": "tells its tiles, or features, from others",
            },
        ),
        Format(
            "runs/first/history.jsonl",
            "history.jsonl",
            "A line of JSON for each epoch. Losses and norms are means over its slides.",
            {
                "loss_agg": "the task's loss (eq. 4)",
                "loss_feature": "feature loss (eq. 5)",
                "loss_attention": "attention loss (eq. 6)",
                "loss_regular": "cosine term (appendix)",
                "loss_pfm": "the encoder's loss (eq. 7)",
                "norm_g_z": "norm of the gradient at the features",
                "norm_g_r": "norm of the gradient at the raw attention",
                "norm_encoder": "norm of the encoder's gradient",
                "train_auc": "AUC by target on training slides, each as it was before its update",
                "train_macro_auc": "its mean over targets",
                "val_auc": "AUC by target on validation slides",
                "val_macro_auc": "its mean over targets",
                "val_undefined": "targets without an AUC, and why",
                "val_loss": "loss on validation slides",
                "encoder_lr": "learning rate of the encoder",
                "aggregator_lr": "learning rate of the aggregator",
                "slides": "slides that were learnt from",
                "slides_failed": "slides that have failed so far",
                "tiles": "tiles that were learnt from",
                "waiting_share": "part of the time spent waiting for tiles",
                "score": "what the best epoch is chosen by: validation AUC; else the negative loss; else the epoch",
            },
        ),
        Format(
            "runs/first/predictions-test.csv",
            "predictions-val.csv, predictions-test.csv",
            "What the best epoch says of all tiles of each slide: a line for each slide and target. `tapfm compare` "
            "also reads tables of other tools that have `patient_id`, `slide_id`, `target`, `label` and `probability`.",
            alike=("runs/first/predictions-val.csv", "evaluated/predictions.csv", "evaluated/predictions-baseline.csv"),
        ),
        Format(
            "runs/first/failures.csv",
            "failures.csv of a run or an evaluation",
            "Slides that failed, and slides of which tiles were skipped.",
            {"what": "`failed`, or `tiles skipped`", "tiles_skipped": "how many, where the slide did not fail"},
            alike=("evaluated/failures.csv",),
        ),
        Format(
            "runs/first/environment.json",
            "environment.json",
            "A list: what the result may depend on besides the configuration, where the run was begun and wherever it "
            "was resumed.",
            {
                "[].tapfm": "version of tapfm",
                "[].python": "version of Python",
                "[].platform": "operating system",
                "[].cores": "processor cores",
                "[].threads": "threads of torch, by which sums are rounded",
                "[].device": "device, of a GPU with its name and memory",
                "[].cuda": "version of CUDA; null without a GPU",
                "[].packages": "versions of the packages that matter",
                "[].weights_sha256": "SHA-256 of the encoder's weights, before it was adapted",
                "[].features_made_by": MADE_BY,
                "[].tiles": "how the tiles that were learnt from were laid, so that other slides get the same",
                "[].command": "what was typed",
            },
        ),
        Format(
            "runs/first/checkpoints/best.safetensors",
            "checkpoints/best.safetensors",
            "What training changed, at the best epoch; the rest is the base model.",
            {
                "aggregator/": "parameters of the aggregator",
                "encoder/": "parameters of the encoder that learn; with LoRA its adapters only",
                "kind": "`best`",
                "score": "what it was chosen by",
                "row": "its line of `history.jsonl`",
            },
        ),
        Format(
            "runs/first/checkpoints/last.safetensors",
            "checkpoints/last.safetensors",
            "All that is needed to go on.",
            {
                "aggregator/": "parameters of the aggregator",
                "encoder/": "parameters of the encoder that learn, in float32",
                "moments/": "moments of the two optimisers",
                "random/": "state of the generators",
                "kind": "`last`",
                "moments": "in which form the moments are: `float32`, `bfloat16` or `int8`",
                "config": "the configuration",
                "progress": "epoch, position, best epoch, failures and history so far",
            },
        ),
    ],
    "An evaluation": [
        Format(
            "evaluated/metrics.csv",
            "metrics.csv",
            "A line for each metric, and for each difference of AUC between the model and the baseline. The metrics "
            "are "
            + ", ".join(code(name) for name in METRICS)
            + "; `_at_chosen` is at the threshold with the sensitivity that was asked for, the others at Youden's.",
            {
                "model": "`model`, the baseline, or the difference of both",
                "subgroup": "group of `--by`; empty: all",
                "metric": "which figure",
                "value": "its value",
                "delong_low": "of an AUC: DeLong's interval, lower end",
                "delong_high": "of an AUC: DeLong's interval, upper end",
                "units": "slides or patients with a label",
                "positives": "how many of them are positive",
            },
        ),
        Format(
            "evaluated/metrics.json",
            "metrics.json",
            "All of it, nested.",
            {
                "evaluation": "`evaluation.json`",
                "failed": "slides that failed, and why",
                "without_label": "slides that have no label",
                "thresholds": "thresholds by target, and which slides they were chosen on",
                "models": "figures by model, subgroup (`all`), target and metric",
                "baseline": "what the baseline is made of",
                "model_minus_baseline": "difference of AUC by target, with its tests",
            },
        ),
        Format(
            "evaluated/evaluation.json",
            "evaluation.json",
            "What was evaluated, and on what.",
            {
                "model": "the folder that was given",
                "kind": "`run`, `export`, `ensemble of folds` or `ensemble of seeds`",
                "cohort": "`own`: that of the training; `external`",
                "table": "name of the table",
                "table_sha256": "SHA-256 of the table",
                "split": "which split; null: every slide",
                "from": "`tiles` or `features`",
                "sensitivity": "what the second threshold was chosen for",
                "by": "columns of the subgroups",
            },
        ),
        Format(
            "evaluated/colours.csv",
            "colours.csv",
            "Colour statistics of each slide, for the baseline: of 64 tiles. `CHANNEL` is `red`, `green` or `blue`.",
            {
                "key": "names the colours by everything that decides them",
                "CHANNEL_mean": "mean, of 0 to 255",
                "CHANNEL_sd": "standard deviation",
                "CHANNEL_skewness": "skewness",
                "CHANNEL_percentile_N": "percentiles: 5, 25, 75 and 95",
            },
            families={r"^(red|green|blue)_": "CHANNEL_", r"percentile_\d+$": "percentile_N"},
        ),
    ],
    "A comparison": [
        Format(
            "compared/comparison.csv",
            "comparison.csv",
            "A line for each pair of methods and target, on the patients that all of them have.",
            {
                "first": "a method",
                "second": "another",
                "auc_first": "AUC of the first",
                "auc_second": "AUC of the second",
                "difference": "the first less the second",
            },
        ),
        Format(
            "compared/comparison.json",
            "comparison.json",
            "All of it, nested.",
            {
                "files": "the table of each method",
                "left_out": "patients of each method that some other lacks",
                "label_conflicts": "whom only some methods have a label of; that label is used",
                "auc": "AUC with its interval, by method and target",
                "pairs": "as in `comparison.csv`",
            },
        ),
        Format(
            "compared/left_out.csv",
            "left_out.csv",
            "A line for each patient that a method has and some other lacks.",
            {"method": "the method", "patient": "the patient"},
        ),
    ],
    "A prediction": [
        Format(
            "predicted/prediction.json",
            "prediction.json",
            "Which model, which targets, where the thresholds come from. It marks the folder.",
            {
                "model": "the folder that was given",
                "kind": "`run`, `export`, `ensemble of folds` or `ensemble of seeds`",
                "calls": "thresholds by target, what they come from, and the sensitivity that was asked for",
            },
        ),
        Format(
            "predicted/predictions.csv",
            "predictions.csv",
            "A line for each slide and target: the columns of every table of predictions, then the call.",
            {
                "threshold": "of the probability, chosen on validation slides; empty without any",
                "call": "1 where the probability reaches the threshold",
            },
        ),
        Format(
            "predicted/failures.csv",
            "failures.csv of a prediction",
            "Slides that failed, slides that lack pictures, and slides of which tiles were skipped.",
            {"what": "`tiles`, `read`, `predict`, `draw`, or `tiles skipped`"},
        ),
        Format(
            "predicted/per-slide/ID/slide.json",
            "per-slide/ID/slide.json",
            "The slide and what was said of it. It is written when the slide is done.",
            {
                "path": "the slide's file, which may have moved since",
                "bounds": "what was scanned: `x_px0`, `y_px0`, `width_px0` and `height_px0`",
                "columns": "those of `tiles.parquet`, besides x and y",
                "targets.TARGET.logit": "what the model says, before the sigmoid",
                "targets.TARGET.probability": "sigmoid of the logit",
                "targets.TARGET.threshold": "of the probability; null without validation slides",
                "targets.TARGET.call": "1 where the probability reaches it",
                "targets.TARGET.label": "what the table says, or null",
                "targets.TARGET.constant": "logit = constant + sum of contributions; null where there are none",
                "key": "fingerprint of the weights, the tiles and the slide's files",
            },
        ),
        Format(
            "predicted/per-slide/ID/tiles.parquet",
            "per-slide/ID/tiles.parquet",
            "A line for each tile. A column whose values differ by target is `weight.TARGET` or `score.TARGET`; "
            "`score` stands where an aggregator scores tiles by something else than a weight.",
            {
                "x": "left edge, in level-0 pixels",
                "y": "upper edge, in level-0 pixels",
                "attention": "raw attention of the encoder (eq. 1)",
                "weight": "the tile's share of the slide: 1 over all tiles",
                "contribution.TARGET": "what the tile gives to the target's logit",
            },
        ),
        Format(
            "predicted/per-slide/ID/tiles.geojson",
            "per-slide/ID/tiles.geojson",
            "The tiles for QuPath, one to a line.",
            {
                "features[].properties.objectType": "`tile`",
                "features[].properties.isLocked": "true",
                "features[].properties.measurements": "columns of `tiles.parquet`, and percentiles of the main ones",
                "features[].properties.classification": "of the highest and the lowest tenth: name and colour",
            },
        ),
    ],
    "An export": [
        Format(
            "exported/model.safetensors",
            "model.safetensors",
            "The adapted encoder, under the names of timm, which loads the folder as `local-dir:FOLDER`.",
            {"*": "parameters by their names in timm", "format": "`pt`", "tapfm": "key of the encoder"},
        ),
        Format(
            "exported/config.json",
            "config.json",
            "What timm needs to build the encoder, and what it does not know.",
            {
                "architecture": "name of the architecture in timm",
                "num_classes": "0",
                "num_features": "size of a feature",
                "global_pool": "how timm makes a feature of tokens",
                "model_args": "arguments of the architecture",
                "pretrained_cfg": "size, mean and standard deviation of the pixels, licence",
                "tapfm": "encoder, feature, scale and targets",
            },
        ),
        Format(
            "exported/aggregator.safetensors",
            "aggregator.safetensors",
            "From tiles to the slide.",
            {"aggregator/": "parameters of the aggregator", "kind": "`aggregator`"},
        ),
        Format(
            "exported/tapfm.json",
            "tapfm.json",
            "All that is needed to use the model, without the run.",
            {
                "encoder.name": "key of the encoder",
                "encoder.adapted": "false where it was fixed",
                "encoder.began_with_sha256": "SHA-256 of its weights, before it was adapted",
                "encoder.features_made_by": MADE_BY,
                "aggregator.name": "name of the aggregator",
                "aggregator.options": "its options",
                "aggregator.tau": "temperature of the tile weights",
                "aggregator.layer_norm": "whether a LayerNorm stands before the head",
                "aggregator.feature_size": "size of a feature",
                "training_labels": "positive and labelled slides of the training split, by target",
                "tiles": "how tiles were laid, in the words of `tapfm tile`",
                "epoch": "epoch that was kept",
                "method": "`tapfm`, `finetune` or `fixed`",
                "scope": "what of the encoder learnt",
                "recipe": "recipe of the run",
                "seed": "seed of the run",
                "thresholds": "of slides and of patients: Youden's and that of a sensitivity, by target",
            },
        ),
        Format(
            "ensemble/ensemble.json",
            "ensemble.json",
            "Several runs as one model, whose probabilities are averaged. `tapfm study` writes it; it can be written "
            "by hand.",
            {
                "kind": "`folds` or `seeds`: how the members differ",
                "members[]": "folders of runs or exports, relative to it",
            },
        ),
    ],
    "A study": [
        Format(
            "study/study.json",
            "study.json",
            "All results of a study as data, from which `tapfm report` makes its page: a list of sections.",
            {
                "[].title": "title of a section",
                "[].blocks[]": "its paragraphs, tables and figures; `kind` says which of them it is",
            },
        ),
        Format(
            "study/table_binary.csv",
            "table_binary.csv, table_multilabel.csv",
            "A line for each method, cohort and target.",
            {
                "regime": "`fixed`, `finetune` or `tapfm`; or the baseline",
                "cohort": "`test` or `external`",
                "auc": "AUC, mean over seeds",
                "seeds": "runs that it is the mean of",
                "seed_sd": "standard deviation over seeds",
                "minus_best": "this method less the best",
                "minus_best_low": "its 95% interval, lower end",
                "minus_best_high": "its 95% interval, upper end",
                "rank": "1 is the best of its column",
            },
        ),
        Format(
            "study/costs.csv",
            "costs.csv",
            "A line for each method.",
            {
                "runs": "runs that are finished",
                "epochs": "epochs, mean over runs",
                "seconds_per_epoch": "time of an epoch",
                "seconds": "time of a run",
            },
        ),
        Format(
            "study/ablation.csv",
            "ablation.csv",
            "A line for each variant, with the fit log L = a + b epoch.",
            {
                "a": "of the fit",
                "b": "of the fit: below 0 the loss falls",
                "b_low": "95% interval of b, lower end",
                "b_high": "95% interval of b, upper end",
                "r_squared": "how well it fits",
                "first_epoch": "first epoch of the fit",
                "last_epoch": "last epoch of the fit",
                "val_auc": "AUC on validation slides",
                "test_auc": "AUC on test slides",
                "test_auc_low": "its 95% interval, lower end",
                "test_auc_high": "its 95% interval, upper end",
            },
        ),
        Format(
            "study/stability.csv",
            "stability.csv",
            "A line for each run.",
            {"run": "name of the run", "order": "`before`, `after` or `joint`: order of the updates"} | STABILITY,
        ),
        Format(
            "study/forgetting.csv",
            "forgetting.csv",
            "A line for each method: a linear probe on tiles of another task, before and after the encoder was "
            "adapted. `WHEN` is `before`, `after`, or `change`: after less before.",
            {
                "runs": "runs that it is the mean of",
                "tiles": "tiles that were tested on",
                "accuracy_WHEN": "accuracy of the probe",
                "auc_WHEN": "mean AUC of a class against the others",
                "accuracy_WHEN_low": "95% interval, lower end",
                "accuracy_WHEN_high": "95% interval, upper end",
                "auc_WHEN_low": "95% interval, lower end",
                "auc_WHEN_high": "95% interval, upper end",
                "cosine_distance": "how far features turned: mean of 1 - cos",
                "linear_cka": "how alike they are whatever their rotation and scale: 1 is the same",
            },
            families={r"_(before|after|change)": "_WHEN"},
        ),
        Format(
            "study/status.csv",
            "status.csv",
            "A line for each step of each run.",
            {
                "run": "name of the run",
                "step": "what is done",
                "state": any_of(get_args(State)),
                "command": "what to type to repeat it",
                "log": "the file with what it said",
            },
        ),
    ],
    "A painted cohort": [
        Format(
            "painted/truth/tiles.csv",
            "truth/tiles.csv",
            "A line for each tile of the usual grid, 224 px at 0.5 microns per pixel.",
            {
                "x_px0": "left edge, in level-0 pixels",
                "y_px0": "upper edge, in level-0 pixels",
                "tissue": "part of the tile that is tissue",
                "TARGET": "part of the tile that shows the target's morphology",
            },
        ),
        Format(
            "painted/truth/ID.json",
            "truth/ID.json",
            "What the values of `truth/ID.png` mean.",
            {
                "foci": "what is planted: targets, then what only resembles them",
                "values": "value of each compartment and focus in the picture",
            },
        ),
        Format(
            "painted/truth/ID.geojson",
            "truth/ID.geojson",
            "Foci and accidents, as annotations of QuPath.",
            {
                "features[].properties.objectType": "`annotation`",
                "features[].properties.classification": "name and colour of its class",
            },
        ),
        Format(
            "painted/synth.json",
            "synth.json",
            "What was painted.",
            {
                "key": "fingerprint of the settings and of PAINTING_VERSION",
                "settings": "as they were given",
                "slides[]": "the slides' files",
            },
        ),
    ],
}

# files to look at, or that other programs define
OTHERS: Meanings = {
    "run.toml": "a configuration: [all settings](configuration.md)",
    "runs/first/config.toml": "of a run: its configuration, with nothing left open",
    "report.html": "what `tapfm report` writes: a run or a study on one page that fetches nothing",
    "runs/first/summary.md": "of a run: all of it on a page",
    "runs/first/curves.png": "of a run: losses and AUC by epoch",
    "runs/first/tensorboard/*": "of a run: event files of TensorBoard",
    "tiles*/index.html": "of tiles: all overlays on a page",
    "tiles*/overlays/ID.png": "of tiles: tissue, tiles, what was left out",
    "evaluated/metrics.md": "of an evaluation: its figures on a page",
    "evaluated/roc.png": "of an evaluation: ROC curves",
    "evaluated/pr.png": "of an evaluation: precision and recall",
    "evaluated/reliability.png": "of an evaluation: calibration",
    "evaluated/scores.png": "of an evaluation: probabilities by label",
    "compared/comparison.md": "of a comparison: all of it on a page",
    "compared/differences.png": "of a comparison: differences with intervals",
    "predicted/per-slide/ID/heatmap-*.png": "of a prediction: maps over the slide, with colour bar and scale bar",
    "predicted/per-slide/ID/heatmap-*.tif": "of a prediction: the same as pyramids that OpenSlide and QuPath open",
    "predicted/per-slide/ID/gallery-*.png": "of a prediction: the tiles at both ends",
    "exported/README.md": "of an export: the model card",
    "study/*.md": "of a study: `study.md` has all results on a page, and the others have one table each",
    "study/table_*.tex": "of a study: the table of AUCs for LaTeX",
    "study/roc.png": "of a study: ROC curves of all methods, for each cohort and target",
    "study/curves.png": "of a study: validation AUC and training loss of all methods by epoch",
    "study/ablation-*.png": "of an ablation: training losses, and their logarithms with the fitted lines",
    "painted/README.md": "of a painted cohort: what it is",
    "painted/contact-sheet.jpg": "of a painted cohort: slides at a glance",
    "painted/slides/ID.svs": "of a painted cohort: the slides",
    "painted/external/ID.svs": "of a painted cohort: the slides of the external cohort",
    "painted/truth/ID.png": "of a painted cohort: compartments and foci, 1 micron per pixel",
}
