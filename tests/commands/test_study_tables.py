"""Tables, fits and verdicts of a study, from results that are made up."""

import csv
import io
import json
import math
import shutil
import subprocess

import numpy as np
import pytest

from tapfm.config.study import resolve_study
from tapfm.errors import InputError
from tapfm.evaluation.predictions import Prediction, write_predictions
from tapfm.study.costs import costs_markdown, costs_of
from tapfm.study.fits import (
    Trajectory,
    ablation_csv,
    ablation_markdown,
    fits_of,
    measures_of,
    stability_markdown,
    verdict,
)
from tapfm.study.folder import StudyFolder
from tapfm.study.forgetting import drawn, forgetting_csv, forgetting_markdown, summarise_probes
from tapfm.study.probe import cosine_distance, linear_cka, probe
from tapfm.study.probe_pictures import find_pictures
from tapfm.study.results import MethodResult, StudyResults, together
from tapfm.study.runs import PlannedRun, methods_of
from tapfm.study.table_text import table_csv, table_latex, table_markdown, tex
from tapfm.study.tables import make_table

SLIDES = {"cohort": {"table": "c.csv", "tiles": "tiles"}, "external": {"table": "x.csv", "tiles": "x"}}


def a_study(**changes):
    given = {"name": "A_study", "targets": ["FGFR3"], "encoders": ["tapfm-pocket"], "resamples": 200, **SLIDES}
    return resolve_study(given | {"regimes": ["finetune", "tapfm"]} | changes)


def predictions(strength, seed=0, count=30, targets=("FGFR3",), split="test"):
    """Patients whose logits are so much higher where they are positive; noise is the same for all strengths."""
    rng = np.random.default_rng(seed)
    noise = rng.normal(size=(count, len(targets)))
    return [
        Prediction(
            f"s{i}",
            f"p{i}",
            split,
            None,
            {target: (i + place) % 2 for place, target in enumerate(targets)},
            {target: float(noise[i, place] + strength * ((i + place) % 2)) for place, target in enumerate(targets)},
            tiles=5,
        )
        for i in range(count)
    ]


def history(losses, aucs=None, **more):
    aucs = aucs or [0.5 + 0.01 * i for i in range(len(losses))]
    return [
        {
            "epoch": i + 1,
            "loss_agg": loss,
            "val_macro_auc": auc,
            "score": auc,
            "norm_encoder": 1.0,
            "seconds": 2.0,
            "peak_memory_gib": 0.5 + 0.1 * i,
            "tiles_per_second": 50.0,
        }
        | {name: values[i] for name, values in more.items()}
        for i, (loss, auc) in enumerate(zip(losses, aucs, strict=True))
    ]


def results_of(study, strengths, *, folder=None, seeds=1, losses=(1.0, 0.9, 0.8), baseline=None, targets=("FGFR3",)):
    """As many methods as strengths, in the order of the table."""
    methods = []
    for method, strength in zip(methods_of(study), strengths, strict=False):
        runs = {PlannedRun(method, seed, None).name: history(losses) for seed in range(seeds)}
        made = [predictions(strength, seed=seed, targets=targets) for seed in range(seeds)]
        methods.append(MethodResult(method, runs, {"test": made, "external": made}))
    found = {("test", None): [predictions(baseline, targets=targets)]} if baseline is not None else {}
    return StudyResults(study, StudyFolder(folder), methods, found)


def rows_of(text):
    return list(csv.DictReader(io.StringIO(text)))


def test_the_best_is_bold_the_second_underlined_and_tests_are_against_the_best():
    study = a_study(aggregators=["abmil", "mean"])
    table = make_table(results_of(study, (0.5, 1.0, 2.0)))
    text = table_markdown(table, multilabel=False)
    lines = {line.split(" | ")[0].strip("| "): line for line in text.splitlines()}
    assert lines["tapfm-pocket (TAPFM)"].count("**") == 4  # test and external
    assert lines["tapfm-pocket + mean (FT)"].count("<u>") == 2
    assert "p " not in lines["tapfm-pocket (TAPFM)"]
    assert "p " in lines["tapfm-pocket + ABMIL (FT)"]
    assert "*Fine-tuned (FT) encoder with MIL aggregators*" in lines
    assert "FGFR3, test (N = 30)" in text
    rows = rows_of(table_csv(table))
    best = next(row for row in rows if row["model"] == "tapfm-pocket (TAPFM)" and row["cohort"] == "test")
    worst = next(row for row in rows if row["model"] == "tapfm-pocket + ABMIL (FT)" and row["cohort"] == "test")
    assert (best["rank"], worst["rank"]) == ("1", "3")
    assert best["p_holm"] == ""
    assert float(worst["minus_best"]) == pytest.approx(float(worst["auc"]) - float(best["auc"]))
    assert float(worst["minus_best"]) < 0
    assert float(worst["low"]) < float(worst["auc"]) < float(worst["high"])
    assert 0 < float(worst["p_holm"]) <= 1


def test_equal_methods_share_a_rank():
    table = make_table(results_of(a_study(aggregators=["abmil", "mean"]), (1.0, 1.0, 0.2)))
    ranks = [row.cells["test", "FGFR3"].rank for row in table.rows]
    assert ranks == [1, 1, 3]
    assert "<u>" not in table_markdown(table, multilabel=False)


def test_seeds_are_averaged_and_their_spread_is_told():
    table = make_table(results_of(a_study(seeds=[0, 1, 2]), (0.5, 1.0), seeds=3))
    cell = table.rows[0].cells["test", "FGFR3"]
    assert cell.seeds == 3
    assert cell.seed_sd > 0
    assert cell.auc.low < cell.auc.value < cell.auc.high
    assert "Mean over 3 seeds" in table_markdown(table, multilabel=False)


def test_the_colour_baseline_has_a_row_and_may_be_the_best():
    table = make_table(results_of(a_study(), (0.1, 0.5), baseline=3.0))
    assert table.rows[-1].title == "colours and tile count"
    assert table.rows[-1].cells["test", "FGFR3"].rank == 1
    assert ("external", "FGFR3") not in table.rows[-1].cells
    assert "| *Without an encoder* |" in table_markdown(table, multilabel=False)


def test_several_targets_of_one_model_have_their_mean_and_a_part_for_each_cohort():
    targets = ("EGFR", "KRAS")
    study = a_study(targets=list(targets))
    table = make_table(results_of(study, (0.5, 1.0), targets=targets))
    row = table.rows[0]
    mean = (row.cells["test", "EGFR"].auc.value + row.cells["test", "KRAS"].auc.value) / 2
    assert row.cells["test", "macro"].auc.value == pytest.approx(mean)
    text = table_markdown(table, multilabel=True)
    assert text.count("| Model | EGFR | KRAS | Macro average |") == 2
    assert "**External** (N = 30 patients)" in text
    written = table_latex(table, multilabel=True, caption="c", label="l")
    assert r"\multicolumn{2}{c}{\textbf{Test $(N = 30)$}}" in written
    assert r"\multicolumn{4}{c}{\textbf{External $(N = 30)$}}" in written


def test_a_model_for_each_target_has_a_column_for_each():
    study = a_study(targets=["EGFR", "KRAS"], task="binary", regimes=["tapfm"])
    methods = [
        MethodResult(method, {"r": history([1.0])}, {"test": [predictions(strength, targets=(method.target,))]})
        for method, strength in zip(methods_of(study), (0.5, 2.0), strict=True)
    ]
    table = make_table(StudyResults(study, StudyFolder(None), methods, {}))
    assert list(table.patients) == [("test", "EGFR"), ("test", "KRAS")]
    assert len(table.rows) == 1
    assert len(table.rows[0].cells) == 2


def test_an_auc_that_is_undefined_is_a_dash_and_says_why():
    study = a_study(regimes=["tapfm"])
    one_class = [each for each in predictions(1.0) if each.labels["FGFR3"] == 1]
    (method,) = methods_of(study)
    results = StudyResults(
        study, StudyFolder(None), [MethodResult(method, {"r": history([1.0])}, {"test": [one_class]})], {}
    )
    table = make_table(results)
    text = table_markdown(table, multilabel=False)
    assert "| tapfm-pocket (TAPFM) | - |" in text
    assert "no negative" in text
    assert "--" in table_latex(table, multilabel=False, caption="c", label="l")


def test_a_reason_names_those_it_is_of():
    table = make_table(results_of(a_study(), (0.5, 50.0)))
    (line,) = [note for note in table.notes if note.startswith("Test")]
    assert line.endswith("all resamples give the same value (tapfm-pocket/tapfm/cls-attention)")


def test_nothing_finished_makes_tables_that_say_so():
    results = StudyResults(a_study(), StudyFolder(None), [], {})
    table = make_table(results)
    assert table_markdown(table, multilabel=False) == "No run is finished yet.\n"
    assert costs_markdown(costs_of(results)) == "No run is finished yet.\n"
    assert ablation_markdown([]) == "No run is finished yet.\n"
    assert len(rows_of(table_csv(table))) == 0


def test_latex_is_balanced_and_escaped(tmp_path):
    table = make_table(results_of(a_study(aggregators=["abmil", "mean"]), (0.5, 1.0, 2.0), baseline=0.1))
    text = table_latex(table, multilabel=False, caption="A_study: 95% & more", label="comparison")
    body = text.replace(r"\{", "").replace(r"\}", "")
    assert body.count("{") == body.count("}")
    assert r"A\_study: 95\% \& more" in text
    for line in text.splitlines():
        if line.endswith(r"\\") and "multicolumn" not in line and line.startswith(("tapfm", "colours")):
            assert line.count("&") == 2
    assert r"\textbf{" in text
    assert r"\underline{" in text
    assert tex(r"a_b\c^d") == r"a\_b\textbackslash{}c\textasciicircum{}d"
    if shutil.which("pdflatex"):
        packages = r"\usepackage{booktabs,multirow,graphicx}"
        (tmp_path / "t.tex").write_text(rf"\documentclass{{article}}{packages}\begin{{document}}{text}\end{{document}}")
        made = subprocess.run(["pdflatex", "-halt-on-error", "t.tex"], cwd=tmp_path, capture_output=True, check=False)
        assert made.returncode == 0, made.stdout


def test_costs_are_means_and_the_highest_memory():
    results = results_of(a_study(regimes=["tapfm"]), (1.0,), losses=(1.0, 0.9, 0.8))
    (cost,) = costs_of(results)
    assert cost.numbers["best_epoch"] == 3
    assert cost.numbers["seconds"] == 6
    assert cost.numbers["seconds_per_epoch"] == 2
    assert cost.numbers["peak_memory_gib"] == pytest.approx(0.7)


def test_predictions_of_folds_are_pooled_and_a_patient_in_two_is_refused(tmp_path):
    made = predictions(1.0, count=6)
    write_predictions(tmp_path / "a.csv", made[:3])
    write_predictions(tmp_path / "b.csv", made[3:])
    assert len(together([tmp_path / "a.csv", tmp_path / "b.csv"])) == 6
    write_predictions(tmp_path / "b.csv", made[2:])
    with pytest.raises(InputError, match="Patient p2 is tested in two folds"):
        together([tmp_path / "a.csv", tmp_path / "b.csv"])


def test_the_fit_of_an_ablation_finds_the_slope():
    variants = [{"name": f"{rate}", "settings": {"adaptation": {"lambda": rate}}} for rate in (0.25, 1.0)]
    study = a_study(regimes=["tapfm"], report="ablation", variants=variants, seeds=[0, 1])
    losses = [math.exp(0.3 - 0.07 * epoch) for epoch in range(1, 26)]
    results = results_of(study, (0.5, 1.0), losses=losses, seeds=2)
    table = make_table(results)
    first, second = fits_of(results, table)
    assert first.fit.b == pytest.approx(-0.07)
    assert (first.fit.epochs_used[0], first.fit.epochs_used[-1]) == (2, 20)
    assert first.test == table.rows[0].cells["test", "FGFR3"].auc
    assert second.test.value > first.test.value
    assert first.val_auc == pytest.approx(0.74)
    row = rows_of(ablation_csv([first]))[0]
    assert float(row["r_squared"]) == pytest.approx(1.0)
    assert "-0.0700" in ablation_markdown([first])


def test_too_few_epochs_have_no_fit_and_say_so():
    variants = [{"name": "a", "settings": {"adaptation": {"lambda": 1.0}}}]
    results = results_of(a_study(regimes=["tapfm"], report="ablation", variants=variants), (0.5,), losses=(1.0, 0.9))
    fitted = fits_of(results, make_table(results))
    assert "no fit: 1 of epochs 2 to 20" in ablation_markdown(fitted)


def test_a_steady_run_measures_less_than_a_jumpy_one():
    epochs = range(1, 12)
    steady = measures_of(history([math.exp(-0.1 * epoch) for epoch in epochs]))
    jumpy = measures_of(
        history(
            [math.exp(-0.1 * epoch + 0.2 * (-1) ** epoch) for epoch in epochs],
            norm_encoder=[1.0 + e % 2 for e in epochs],
        )
    )
    assert steady["residual"] == pytest.approx(0, abs=1e-9)
    assert steady["step"] == pytest.approx(0.1)
    assert (steady["rises"], steady["norm_spread"]) == (0, 0)
    assert all(jumpy[name] > steady[name] for name in steady)
    assert measures_of(history([1.0, 0.5])) == dict.fromkeys(steady)


def made_up(joint, before, after, seed=0):
    numbers = {"joint": joint, "before": before, "after": after}
    measured = ("residual", "step", "rises", "norm_spread")
    return [
        Trajectory(order, f"{order}/seed{seed}", (seed,), dict.fromkeys(measured, value))
        for order, value in numbers.items()
    ]


@pytest.mark.parametrize(
    ("numbers", "said"),
    [
        ((3.0, 1.0, 2.0), "support"),
        ((0.5, 1.0, 2.0), "contradict"),
        ((1.5, 1.0, 2.0), "do not settle"),
        ((2.0, 2.0, 1.0), "do not settle"),
    ],
)
def test_the_verdict_follows_the_numbers(numbers, said):
    lines = verdict([each for seed in range(5) for each in made_up(*numbers, seed=seed)])
    assert said in lines[-1]
    assert "chance" not in lines[-1]
    assert "chance" in verdict(made_up(*numbers))[-1]


def test_seeds_that_disagree_settle_nothing():
    trajectories = made_up(3.0, 1.0, 2.0) + made_up(0.5, 1.0, 2.0, seed=1)
    assert "do not settle" in verdict(trajectories)[-1]
    assert "joint is above both others in 1 of 2 seeds, below both in 1" in stability_markdown(trajectories)
    assert "No seed has runs of all three orders yet" in verdict(made_up(1.0, 1.0, 1.0)[:2])[0]


@pytest.mark.parametrize("classes", [2, 3])
def test_the_probe_is_multinomial_logistic_regression_with_a_penalty_of_1(classes):
    rng = np.random.default_rng(0)
    truth = rng.integers(0, classes, 90)
    features = rng.normal(size=(90, 5)) + truth[:, None] * np.array([2.0, -1.0, 0.0, 0.2, 0.0])
    found = probe(features, truth, features, truth, classes).probabilities
    residuals = found - np.eye(classes)[truth]
    np.testing.assert_allclose(residuals.sum(0), 0, atol=1e-4)  # intercepts have no penalty
    standardised = (features - features.mean(0)) / features.std(0)
    # where the loss is smallest the weights are what the residuals leave, and the logits follow from them
    rest = np.log(found) + standardised @ standardised.T @ residuals
    intercepts = rest - rest.mean(1, keepdims=True)
    np.testing.assert_allclose(intercepts, np.broadcast_to(intercepts[0], intercepts.shape), atol=1e-3)
    probed = probe(features[:60], truth[:60], features[60:], truth[60:], classes)
    assert 0.5 < probed.accuracy <= 1


def test_drift_is_nothing_where_nothing_moved_and_cka_ignores_rotation_and_scale():
    rng = np.random.default_rng(0)
    features = rng.normal(size=(40, 6))
    turn, _ = np.linalg.qr(rng.normal(size=(6, 6)))
    assert cosine_distance(features, features) == pytest.approx(0)
    assert cosine_distance(features, -features) == pytest.approx(2)
    assert linear_cka(features, 3 * features @ turn) == pytest.approx(1)
    assert linear_cka(features, rng.normal(size=(40, 6))) < 0.5


def probe_file(path, after_right, classes=2, count=20):
    """A probe that was right of all tiles before, and of some after."""
    truth = [i % classes for i in range(count)]
    right = np.eye(classes)[truth] * 0.8 + 0.1
    after = [row if i < after_right else row[::-1] for i, row in enumerate(right.tolist())]
    found = {"classes": ["a", "b"], "train": 9, "test": [], "truth": truth, "before": right.tolist(), "after": after}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(found | {"cosine_distance": 0.25, "linear_cka": 0.75}))


def test_forgetting_is_measured_and_compared(tmp_path):
    study = a_study(report="forgetting", probe={"tiles": "t"}, seeds=[0])
    results = results_of(study, (0.5, 1.0), folder=tmp_path)
    finetune, tapfm = (PlannedRun(method, 0, None) for method in methods_of(study))
    probe_file(StudyFolder(tmp_path).probe(finetune), after_right=8)
    probe_file(StudyFolder(tmp_path).probe(tapfm), after_right=20)
    found = summarise_probes(results)
    assert found[0].found["accuracy", "change"].value == pytest.approx(-0.6)
    assert found[1].found["accuracy", "change"].value == 0
    text = forgetting_markdown(found)
    assert "tapfm-pocket + ABMIL (FT): forgot, -0.600" in text
    assert "tapfm-pocket (TAPFM): no change that could be told" in text
    assert "tapfm-pocket (TAPFM) against tapfm-pocket + ABMIL (FT): keeps more (+0.600" in text
    rows = rows_of(forgetting_csv(found))
    assert float(rows[0]["linear_cka"]) == 0.75
    assert float(rows[0]["auc_before"]) == 1


def test_resampled_tiles_keep_the_size_of_each_class():
    truth = np.array([0, 0, 0, 1, 1, 2])
    counts = drawn(truth, 50)
    for label, size in ((0, 3), (1, 2), (2, 1)):
        assert (counts[:, truth == label].sum(1) == size).all()
    assert len(np.unique(counts, axis=0)) > 5


def test_pictures_are_found_in_both_layouts_and_what_is_missing_is_told(tmp_path):
    for name in ("a", "b"):
        for number in range(6):
            path = tmp_path / "plain" / name / f"{number}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(b"")
    found = find_pictures(tmp_path / "plain", seed=1)
    assert found.classes == ("a", "b")
    assert (len(found.train), len(found.test)) == (6, 6)
    assert not {each.path for each in found.train} & {each.path for each in found.test}
    assert find_pictures(tmp_path / "plain", seed=1) == found
    assert find_pictures(tmp_path / "plain", seed=2) != found
    shutil.copytree(tmp_path / "plain", tmp_path / "split" / "train")
    shutil.copytree(tmp_path / "plain", tmp_path / "split" / "test")
    assert len(find_pictures(tmp_path / "split").test) == 12
    shutil.rmtree(tmp_path / "plain" / "b")
    with pytest.raises(InputError, match="pictures of 1 classes"):
        find_pictures(tmp_path / "plain")
    with pytest.raises(InputError, match="no folder"):
        find_pictures(tmp_path / "absent")
