"""Charts and tables of results: the numbers are those of the evaluation, reasons are told where there are none."""

from report_lab import history, predictions

from tapfm.evaluation.measures import choose_thresholds, compute_metrics
from tapfm.evaluation.predictions import Prediction
from tapfm.report.figures import methods_figures, result_figures, training_figures
from tapfm.report.numbers import duration, format_number, percent
from tapfm.report.result import SplitResult
from tapfm.report.tables import headline, metric_blocks
from tapfm.tasks.catalog import target_kinds


def a_result(slides, targets=("FGFR3",), validation=None, **more):
    chosen = choose_thresholds(validation, target_kinds(targets), "patient") if validation else None
    found = compute_metrics(slides, target_kinds(targets), "patient", chosen, resamples=50)
    thresholds = {"youden": chosen.youden, "at_sensitivity": chosen.chosen} if chosen else {}
    measured = {(each.target, each.metric): each for each in found}
    given = {"chosen_on": "8 slides", "resamples": 50} | thresholds | more
    return SplitResult("test", "ten slides", targets, "patient", slides, measured, **given)


def test_four_charts_with_the_numbers_of_the_evaluation():
    result = a_result(predictions(20), validation=predictions(8), baseline=predictions(20, seed=3))
    figures = result_figures(result, "FGFR3").figures
    assert [figure.title for figure in figures] == ["ROC", "Precision and recall", "Calibration", "Probabilities"]
    estimate = result.measured["FGFR3", "auc"].estimate
    assert (
        figures[0].keys[0].name
        == f"AUC {format_number(estimate.value)} ({format_number(estimate.low)} to {format_number(estimate.high)})"
    )
    assert figures[0].svg.count('class="line') == 3  # chance, baseline, model
    assert "band model" in figures[0].svg
    assert [key.name for key in figures[3].keys[:2]] == ["negative (10)", "positive (10)"]
    assert "threshold" in figures[3].keys[2].name


def test_one_class_has_no_charts_and_says_why():
    slides = [Prediction(f"s{i}", f"p{i}", "test", None, {"FGFR3": 0}, {"FGFR3": float(i)}, tiles=1) for i in range(4)]
    result = a_result(slides)
    assert {figure.why for figure in result_figures(result, "FGFR3").figures} == {"no positive patient among 4"}
    table = metric_blocks(result)[0]
    assert "no positive patient among 4" in table.reasons
    assert table.notes == ["No threshold: 8 slides."]
    assert "–" in [cell.text for cell in headline([("", result)]).rows[0].cells]


def test_several_targets_have_columns_and_their_mean():
    result = a_result(
        predictions(12, targets=("EGFR", "KRAS")), ("EGFR", "KRAS"), predictions(8, targets=("EGFR", "KRAS"))
    )
    table = metric_blocks(result)[0]
    assert [column.title for column in table.columns] == ["", "EGFR", "KRAS", "mean of targets"]
    names = [row.cells[0].text for row in table.rows if row.cells]
    assert names.count("sensitivity") == 2  # at Youden's threshold, and at that of a sensitivity
    assert names.count("threshold") == 2
    rows = headline([("", result)]).rows
    assert [row.heading or row.cells[0].text for row in rows] == ["test", "EGFR", "KRAS", "mean of targets"]


def test_subgroups_and_the_baseline_stand_beside_the_model():
    result = a_result(predictions(12), validation=predictions(8))
    result = a_result(
        predictions(12), baseline_measured=result.measured, subgroups={"scanner = alpha": result.measured}
    )
    titles = [block.title for block in metric_blocks(result)]
    assert titles == ["", "Beside colours and tile count", "Subgroups"]


def test_curves_mark_the_epoch_that_was_kept():
    figures = training_figures(history(3), 2).figures
    assert [figure.title for figure in figures] == ["Loss of the aggregator", "AUC", "Loss of the encoder"]
    assert all("epoch 2 kept" in figure.svg for figure in figures)


def test_a_fixed_encoder_has_no_loss_and_one_epoch_is_a_dot():
    rows = [{"epoch": 1, "loss_agg": 0.5, "loss_pfm": 0.0, "val_loss": None, "val_macro_auc": None}]
    (loss,) = training_figures(rows, None).figures
    assert "<circle" in loss.svg
    assert [key.name for key in loss.keys] == ["training"]


def test_numbers_that_are_none_are_not_drawn():
    rows = history(3)
    rows[1] |= {"loss_agg": float("nan"), "val_loss": float("inf")}
    assert "nan" not in "".join(figure.svg for figure in training_figures(rows, 2).figures)
    assert "nan" not in "".join(figure.svg for figure in methods_figures([("a", "tapfm", [rows])]).figures)


def test_a_few_of_many_are_neither_none_nor_all():
    assert [percent(part, 1000) for part in (0, 3, 996, 1000, 420)] == ["0%", "0.3%", "99.6%", "100%", "42%"]
    assert percent(0, 0) == "–"
    assert [duration(seconds) for seconds in (2, 600, 7200)] == ["2 s", "10.0 min", "2.0 h"]


def test_methods_are_drawn_by_regime_and_runs_are_averaged():
    loss = [{"epoch": 1, "loss_agg": 1.0, "val_macro_auc": 0.5}, {"epoch": 2, "loss_agg": 0.0, "val_macro_auc": 0.5}]
    more = [{**row, "loss_agg": row["loss_agg"] + 1} for row in loss]
    auc, losses = methods_figures([("a", "tapfm", [loss, more]), ("b", "fixed", [loss])]).figures
    assert (auc.title, losses.title) == ("Validation AUC", "Training loss")
    assert [key.name for key in losses.keys] == ["tapfm", "fixed"]
    assert losses.svg.count('class="line regime-') == 2
