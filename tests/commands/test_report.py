"""`tapfm report`: which folders it finds, what the page shows, and which inputs are errors."""

import csv
import json
import re
import shutil
from dataclasses import replace

import numpy as np
import pytest
from cohort_files import read_rows
from command_line import tapfm
from PIL import Image
from predicted_slides import make_tile_table, write_prediction
from report_folders import (
    create_test_report,
    make_predictions,
    weights_digest,
    write_evaluation,
    write_prediction_folder,
    write_run,
    write_study,
    write_tissue_slide,
)
from slide_files import section, write_slide

import tapfm as tapfm_package
from tapfm.encoders.catalog import find_encoder_card
from tapfm.errors import InputError, RunError
from tapfm.evaluation.metric_values import choose_thresholds, compute_metrics
from tapfm.evaluation.predictions import Prediction, write_predictions
from tapfm.prediction.folder import PredictionFolder
from tapfm.prediction.layers import palette
from tapfm.report.heatmap_blocks import ImageBudget, ImageSelection
from tapfm.report.heatmap_blocks import _choose_slides as choose_slides
from tapfm.runtime.csv_files import write_csv
from tapfm.tasks.binary_metrics import METRIC_NAMES
from tapfm.tasks.binary_target import _sigmoid as sigmoid
from tapfm.tasks.catalog import target_kinds


def section_titles(html):
    return re.findall(r'<h2 id="[^"]*">([^<]*)</h2>', html)


def page_text(html):
    """Return the visible text, with single spaces."""
    without_code = re.sub(r"<(script|style)>.*?</\1>", "", html, flags=re.DOTALL)
    return " ".join(re.sub(r"<[^>]*>", " ", without_code).split())


def headline(html):
    """Return the rows of the table at the top of the page as texts, with the header first."""
    header = html[html.index('class="headline"') : html.index('class="created"')]
    rows = re.findall(r"<tr[^>]*>(.*?)</tr>", header, re.DOTALL)
    return [[page_text(cell) for cell in re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row, re.DOTALL)] for row in rows]


def test_report_of_finished_run_has_all_sections(tmp_path):
    run = write_run(tmp_path / "runs" / "first")
    written, html = create_test_report(run, tmp_path / "report.html")
    assert section_titles(html) == [
        "Slides and labels",
        "Training",
        "Results",
        "Predictions by slide",
        "Licence of the encoder",
        "Configuration and sources",
    ]
    text = page_text(html)
    assert "Report of the run first FGFR3 The model predicts FGFR3. It was trained on 12 slides of 12 patients." in text
    assert "Epoch 2 of 3 was selected by its validation AUC." in text
    assert "Created on 9 March 2026 with tapfm" in text
    assert "training 12 12 546 6 of 12 50%" in text
    assert "Apache-2.0" in text
    assert "method = &#34;tapfm&#34;" in html
    assert written.notes == []


def test_metrics_are_those_of_an_evaluation(tmp_path):
    run = write_run(tmp_path / "runs" / "first")
    _, html = create_test_report(run, tmp_path / "report.html")
    text = page_text(html)
    test, validation = make_predictions(10, start=0), make_predictions(8, split="val", start=200)
    chosen = choose_thresholds(validation, target_kinds(["FGFR3"]), "patient")
    for each in compute_metrics(test, target_kinds(["FGFR3"]), "patient", chosen, resamples=50):
        name, estimate = METRIC_NAMES[each.metric.removesuffix("_at_chosen")], each.estimate
        note = r"( \d)?" if estimate.reason else ""
        within = f" {estimate.low:.3f} to {estimate.high:.3f}" if estimate.low is not None else ""
        assert re.search(rf"{re.escape(name)} {estimate.value:.3f}{note}{within}", text), each
    assert "The epoch and the thresholds were chosen on these slides, so these metrics are optimistic." in text
    assert f"{chosen.youden['FGFR3']:.3f}" in text


def test_predictions_of_all_slides_are_listed(tmp_path):
    run = write_run(tmp_path / "runs" / "first")
    _, html = create_test_report(run, tmp_path / "report.html")
    rows = re.findall(r'<tr data-set="(\w+)" data-target="FGFR3"( data-wrong)?><th scope="row">(S\d+)</th>', html)
    assert len(rows) == 18
    validation = make_predictions(8, split="val", start=200)
    threshold = choose_thresholds(validation, target_kinds(["FGFR3"]), "patient").youden["FGFR3"]
    slides = [*make_predictions(10), *validation]
    wrong = {
        each.slide_id for each in slides if (sigmoid(each.logits["FGFR3"]) >= threshold) != bool(each.labels["FGFR3"])
    }
    assert {slide_id for _, mark, slide_id in rows if mark} == wrong
    assert wrong


def test_evaluations_of_the_same_weights_are_found_in_the_run_and_next_to_runs(tmp_path):
    run = write_run(tmp_path / "runs" / "deep" / "first")
    write_evaluation(tmp_path / "evaluations" / "a" / "external", run, subgroup="scanner = <alpha>")
    write_evaluation(run / "again", run, cohort="own", slides=make_predictions(10))
    other = write_run(tmp_path / "runs" / "second")
    write_evaluation(tmp_path / "evaluations" / "of-another", other)
    write_prediction_folder(tmp_path / "predicted", run, [])
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / "prediction.json").write_text("{")
    written, html = create_test_report(run, tmp_path / "report.html")
    assert [line.split()[0] for line in written.sources] == ["run", "evaluation", "evaluation", "predictions"]
    assert not any("of-another" in line for line in written.sources)
    text = page_text(html)
    assert "Test slides AUC" in text
    assert "external.csv AUC" in text
    assert "computed by tapfm evaluate (folder again)" in text
    assert "computed for this report from predictions-test.csv" not in text  # there is an evaluation
    assert "scanner = &lt;alpha&gt;" in html
    assert "Colour baseline" in text
    assert "X9 evaluation, external failed file truncated" in text
    results = text[text.index("Metrics on each set of slides") :]
    assert results.index("Test slides AUC") < results.index("external.csv AUC")
    assert results.index("external.csv AUC") < results.index("Validation slides AUC")


def test_evaluation_of_another_model_is_marked(tmp_path):
    run, other = (write_run(tmp_path / "runs" / name) for name in ("first", "second"))
    other_evaluation = write_evaluation(tmp_path / "elsewhere", other)
    written, html = create_test_report(run, tmp_path / "report.html", evaluations=(other_evaluation,))
    assert any(str(other_evaluation) in note and str(other) in note for note in written.notes)
    assert "external.csv" in html


def test_metrics_on_training_slides_are_not_in_the_headline(tmp_path):
    run = write_run(tmp_path / "runs" / "first")
    training_slides = make_predictions(12, split="train", start=100)
    for split in ("train", "all"):
        write_evaluation(tmp_path / "evaluations" / split, run, cohort="own", split=split, slides=training_slides)
    _, html = create_test_report(run, tmp_path / "report.html")
    assert headline(html)[0] == ["Model", "Validation AUC (95% CI)", "Test AUC (95% CI)"]
    assert "The model was trained on these slides, so these metrics are optimistic." in page_text(html)
    assert "The model was trained on some of these slides" in page_text(html)


def test_results_of_an_ensemble_are_not_attributed_to_its_members(tmp_path):
    run, other = (write_run(tmp_path / "runs" / name) for name in ("first", "second"))
    both = write_evaluation(tmp_path / "both", run, cohort="own", slides=make_predictions(10), with_run=other)
    predicted = write_prediction_folder(tmp_path / "predicted", run, [("new", None, 0.7, 1)], with_run=other)
    alone, _ = create_test_report(run, tmp_path / "report.html")
    assert alone.sources == [f"run {run}"]
    about = json.loads((both / "metrics.json").read_text())
    about["evaluation"]["model"] = "studies/folds"
    (both / "metrics.json").write_text(json.dumps(about))
    (both / "evaluation.json").write_text(json.dumps(about["evaluation"]))
    written, html = create_test_report(run, tmp_path / "report.html", evaluations=(both,), predictions=(predicted,))
    assert any(f"{both} " in note and "ensemble of 2 models" in note for note in written.notes)
    assert any(f"{predicted} " in note and "ensemble of 2 models" in note for note in written.notes)
    text = page_text(html)
    assert "computed for this report from predictions-test.csv" in text  # the run itself is still shown
    assert "test, by folds AUC" in text
    assert "These are results of an ensemble of 2 models (studies/folds), not of the run first." in text
    assert 'data-set="test, by folds" data-target="FGFR3" data-model="folds"' in html


def test_two_evaluations_of_a_split_have_different_titles(tmp_path):
    runs = [write_run(tmp_path / "runs" / name) for name in ("first", "second")]
    for folder, run in (("a", runs[0]), ("b", runs[0]), ("c", runs[1])):
        write_evaluation(tmp_path / "evaluations" / folder, run, cohort="own", slides=make_predictions(10))
    _, html = create_test_report(runs, tmp_path / "report.html")
    assert html.count('data-set="test (a)"') == html.count('data-set="test (b)"') == 10
    assert "first - second FGFR3" in page_text(html)
    assert "A run has several evaluations of the set test. Only the first one is compared." in page_text(html)


def test_slides_of_different_cohorts_may_have_the_same_ids(tmp_path):
    run = write_run(tmp_path / "runs" / "first")
    write_evaluation(tmp_path / "evaluations" / "other", run, slides=make_predictions(10, seed=9))
    write_prediction_folder(tmp_path / "predictions" / "new", run, [("S000", None, 0.777, None)])
    _, html = create_test_report(run, tmp_path / "report.html")
    assert "external.csv 10 10 445 5 of 10 50%" in page_text(html)
    assert html.count('data-set="new"') == 1


def test_only_weights_of_shown_runs_of_a_study_are_read(tmp_path, monkeypatch):
    study, read_paths = write_study(tmp_path / "study"), []
    monkeypatch.setattr("tapfm.report.reported_run.file_sha256", lambda path: read_paths.append(path) or "0" * 64)
    create_test_report(study, tmp_path / "report.html")
    assert [path.parts[-5:-3] for path in read_paths] == [("finetune", "abmil")]


def test_report_of_run_without_finished_epoch(tmp_path):
    run = write_run(tmp_path / "runs" / "first", finished=False)
    (run / "history.jsonl").unlink()
    shutil.rmtree(run / "checkpoints")
    written, html = create_test_report(run, tmp_path / "report.html")
    assert section_titles(html) == ["Slides and labels", "Licence of the encoder", "Configuration and sources"]
    assert written.notes[0].startswith("The run first is not finished (0 of 3 epochs).")
    assert "tapfm train" in written.notes[0]
    assert "not finished" in page_text(html)


def test_unfinished_run_has_training_curves_and_no_results(tmp_path):
    run = write_run(tmp_path / "runs" / "first", finished=False)
    written, html = create_test_report(run, tmp_path / "report.html")
    assert "Training" in section_titles(html)
    assert "Results" not in section_titles(html)
    assert "1 of 3 epochs" in written.notes[0]


def test_missing_class_is_given_as_reason(tmp_path):
    run = write_run(tmp_path / "runs" / "first")
    lines = (run / "predictions-test.csv").read_text().splitlines()
    (run / "predictions-test.csv").write_text("\n".join(line.replace("FGFR3,1,", "FGFR3,0,") for line in lines) + "\n")
    _, html = create_test_report(run, tmp_path / "report.html")
    assert "no positive patient among 10" in page_text(html)


def test_ids_that_contain_html_are_escaped(tmp_path):
    run = write_run(tmp_path / "runs" / "first")
    evil = "<script>alert(1)</script>"
    slides = [
        Prediction(f'{evil}"{i}', f"'{evil}", "test", "<c>", {"FGFR3": i % 2}, {"FGFR3": float(i)}, tiles=1)
        for i in range(6)
    ]
    write_evaluation(run / "evaluation", run, slides=slides)
    (run / "failures.csv").write_text(
        f"slide_id,problem,tiles_skipped,reason\n{evil},failed,,{evil}\nincomplete,failed\n"
    )
    _, html = create_test_report(run, tmp_path / "report.html", title=evil)
    assert html.count("<script>") == 1  # the script of the page
    assert html.count("&lt;script&gt;alert(1)") > 12
    assert "incomplete training, first failed X9 evaluation, evaluation" in page_text(html)


def test_scanners_of_the_cohort_table_are_counted(tmp_path):
    run = write_run(tmp_path / "runs" / "first")
    rows = [f"S{i:03},S{i}.svs,P{i},{'alpha' if i % 2 else 'bravo'}" for i in range(100, 112)]
    (tmp_path / "runs" / "cohort.csv").write_text("\n".join(["slide_id,path,patient_id,scanner", *rows]) + "\n")
    _, html = create_test_report(run, tmp_path / "report.html")
    assert "training ours 12 alpha 6, bravo 6" in page_text(html)


def test_licence_that_forbids_derivatives_is_a_warning(tmp_path):
    adapted = write_run(tmp_path / "runs" / "first", encoder="uni")
    fixed = write_run(tmp_path / "runs" / "fixed", encoder="uni", method="fixed")
    texts = [page_text(create_test_report(run, tmp_path / "report.html")[1]) for run in (adapted, fixed)]
    assert "The licence of UNI forbids sharing derivatives. The adapted encoder is a derivative" in texts[0]
    assert "The licence of UNI forbids sharing derivatives." in texts[1]
    assert "is a derivative" not in texts[1]
    assert "MahmoodLab/UNI on the Hugging Face Hub" in texts[0]
    assert "The encoder uni was not adapted" in texts[1]


def test_two_runs_are_compared_on_their_common_slides(tmp_path):
    first = write_run(tmp_path / "runs" / "first")
    second = write_run(tmp_path / "runs" / "second", strength=3.0)
    _, html = create_test_report([first, second], tmp_path / "report.html")
    text = page_text(html)
    assert section_titles(html)[0] == "Comparison"
    assert "first - second FGFR3" in text
    assert "p (DeLong)" in text
    assert 'data-model="second"' in html


def test_runs_with_different_slides_have_no_paired_tests(tmp_path):
    first, second = (write_run(tmp_path / "runs" / name) for name in ("first", "second"))
    text = (second / "predictions-test.csv").read_text().replace("S000", "S999")
    (second / "predictions-test.csv").write_text(text)
    _, html = create_test_report([first, second], tmp_path / "report.html")
    assert "first - second" not in page_text(html)
    assert "tapfm compare" in page_text(html)


def test_study_report_has_its_tables_and_the_run_with_the_best_validation_auc(tmp_path):
    study = write_study(tmp_path / "study")
    written, html = create_test_report(study, tmp_path / "report.html")
    text = page_text(html)
    assert section_titles(html)[:3] == ["Overview", "AUC", "Convergence, time and memory"]
    assert "Report of the study A small study FGFR3" in text
    assert "Synthetic slides, not &lt;real&gt; ones." in html
    assert "2 of 2 runs finished. Chosen on validation: tapfm-pocket + ABMIL (FT)." in text
    assert "Shown in detail below: tapfm-pocket/finetune/abmil/seed0 (highest validation AUC)." in text
    assert "tapfm-pocket (TAPFM)" in text
    assert "Fine-tuned (FT) encoder with MIL aggregators" in text
    assert "peak memory, GiB" in text
    assert "Validation AUC" in text
    assert "some/run train failed no &lt;memory&gt; tapfm train x.toml" in text
    assert "incomplete/run train failed Licence" in text
    assert written.notes == []


def test_headline_of_a_study_marks_the_model_chosen_on_validation_not_the_best_on_test(tmp_path):
    """One row for each model. The model that is not chosen has the higher test AUC."""
    study = write_study(tmp_path / "study")
    _, html = create_test_report(study, tmp_path / "report.html")
    titles, finetune, tapfm_row = headline(html)
    assert titles == ["Model", "Validation AUC (95% CI)", "Test AUC (95% CI)"]
    assert finetune[0] == "tapfm-pocket + ABMIL (FT) chosen on validation, fine-tuned encoder"
    assert tapfm_row[0] == "tapfm-pocket (TAPFM)"
    validation, test = ([float(row[column].split()[0]) for row in (finetune, tapfm_row)] for column in (1, 2))
    assert validation[0] > validation[1]
    assert test[0] < test[1]
    assert all(row[1].endswith("16 patients") and row[2].endswith("20 patients") for row in (finetune, tapfm_row))
    text = page_text(html)
    (chosen,) = re.findall(
        r"Chosen on validation: (.*?)\. AUC: validation (\S+) .*?; test (\S+) .*?, 20 patients\.", text
    )
    assert chosen == ("tapfm-pocket + ABMIL (FT)", finetune[1].split()[0], finetune[2].split()[0])
    assert "best of" not in text


def test_choice_follows_validation_if_it_prefers_the_other_model(tmp_path):
    study = write_study(tmp_path / "study", validation=(0.0, 3.0))
    written, html = create_test_report(study, tmp_path / "report.html")
    assert [row[0] for row in headline(html) if "chosen on validation" in row[0]] == [
        "tapfm-pocket (TAPFM) chosen on validation"
    ]
    assert written.sources[1].endswith("tapfm-pocket/tapfm/cls-attention/seed0")
    assert "not the model that is chosen" not in page_text(html)


def test_study_tables_of_an_older_version_have_no_choice_and_a_warning(tmp_path):
    study = write_study(tmp_path / "study")
    lines = list(csv.reader((study / "table_binary.csv").read_text().splitlines()))
    old = [line[: lines[0].index("validation_auc")] for line in lines]
    slides = old[0].index("slides")
    with (study / "table_binary.csv").open("w", newline="") as file:
        csv.writer(file).writerows([*line[:slides], *line[slides + 1 :]] for line in old)
    written, html = create_test_report(study, tmp_path / "report.html")
    assert headline(html)[0] == ["Model", "Test AUC (95% CI)"]
    assert all(row[1].endswith("20 patients") for row in headline(html)[1:])
    assert not any("chosen" in row[0] for row in headline(html))
    assert any(f"tapfm study --tables --out {study}" in note for note in written.notes)


def test_headline_of_runs_marks_the_run_chosen_on_validation(tmp_path):
    """The first run is better on validation slides, the second one on test slides."""
    first = write_run(tmp_path / "runs" / "first")
    second = write_run(tmp_path / "runs" / "second", method="finetune")
    for run, split, strength in (
        (first, "val", 4.0),
        (second, "val", 1.0),
        (first, "test", 0.0),
        (second, "test", 4.0),
    ):
        options = {"count": 8, "start": 200} if split == "val" else {"count": 10}
        predictions = make_predictions(split=split, strength=strength, **options)
        write_predictions(run / f"predictions-{split}.csv", predictions)
    _, html = create_test_report([second, first], tmp_path / "report.html")
    titles, *rows = headline(html)
    assert titles == ["Model", "Validation AUC (95% CI)", "Test AUC (95% CI)"]
    assert [row[0] for row in rows] == [
        "second fine-tuned encoder, tapfm-pocket, cls-attention",
        "first chosen on validation, TAPFM, tapfm-pocket, cls-attention",
    ]
    assert float(rows[0][2].split()[0]) > float(rows[1][2].split()[0])
    assert rows[1][1].endswith("8 patients")
    assert rows[1][2].endswith("10 patients")
    assert "How the run is chosen: highest validation AUC" in page_text(html)


def test_runs_with_different_validation_slides_have_no_choice(tmp_path):
    first, second = (write_run(tmp_path / "runs" / name) for name in ("first", "second"))
    text = (second / "predictions-val.csv").read_text().replace("S200", "S999")
    (second / "predictions-val.csv").write_text(text)
    _, html = create_test_report([first, second], tmp_path / "report.html")
    assert not any("chosen" in row[0] for row in headline(html))
    assert "No run is chosen, because the runs do not have the same validation slides" in page_text(html)


def test_headline_has_a_row_for_each_target_and_counts_labelled_patients_and_slides(tmp_path):
    targets = ("EGFR", "KRAS")
    run = write_run(tmp_path / "runs" / "first", targets=targets)
    slides = make_predictions(10, targets=targets)
    slides = [
        replace(each, patient_id=f"P{i // 2}", labels={"EGFR": i // 2 % 2, "KRAS": i // 2 % 2 if i < 8 else None})
        for i, each in enumerate(slides)
    ]
    write_evaluation(tmp_path / "evaluations" / "own", run, targets=targets, cohort="own", slides=slides)
    _, html = create_test_report(run, tmp_path / "report.html")
    _, *rows = headline(html)
    assert [row[0] for row in rows if len(row) == 1] == ["EGFR", "KRAS", "mean of targets"]
    tests = [row[2] for row in rows if len(row) > 1]
    assert [" ".join(text.split()[-4:]) for text in tests] == [
        *("5 patients, 10 slides", "4 patients, 8 slides", "5 patients, 10 slides"),
    ]


def test_results_of_an_ensemble_have_their_own_row_in_the_headline(tmp_path):
    run, other = (write_run(tmp_path / "runs" / name) for name in ("first", "second"))
    both = write_evaluation(tmp_path / "both", run, cohort="own", slides=make_predictions(10), with_run=other)
    about = json.loads((both / "metrics.json").read_text())
    about["evaluation"]["model"] = "studies/folds"
    (both / "metrics.json").write_text(json.dumps(about))
    (both / "evaluation.json").write_text(json.dumps(about["evaluation"]))
    _, html = create_test_report(run, tmp_path / "report.html", evaluations=(both,))
    titles, *rows = headline(html)
    assert titles == ["Model", "Validation AUC (95% CI)", "Test AUC (95% CI)"]
    assert [row[0] for row in rows] == ["first TAPFM, tapfm-pocket, cls-attention", "folds not the run first"]
    assert rows[1][1] == ""


def test_report_names_the_weights_that_the_runs_started_from(tmp_path):
    runs = [write_run(tmp_path / "runs" / name) for name in ("published", "own")]
    published = find_encoder_card("tapfm-pocket").sha256
    for run, digest, source in zip(runs, (published, "a" * 64), ("package", "local"), strict=True):
        (environment,) = json.loads((run / "environment.json").read_text())
        environment |= {"weights_sha256": digest, "weights": {"source": source, "file": f"{source}.safetensors"}}
        (run / "environment.json").write_text(json.dumps([environment]))
    text = page_text(create_test_report(runs, tmp_path / "report.html")[1])
    assert "weights of published: published weights of tapfm-pocket yes, the same SHA-256" in text
    assert "weights of own: file local.safetensors" in text
    assert f"weights of own: SHA-256 {'a' * 64}" in text
    assert f"weights of own: published weights of tapfm-pocket no, the published file has {published}" in text


def test_study_with_missing_or_damaged_json_offers_the_command(tmp_path):
    study = write_study(tmp_path / "study")
    (study / "study.json").write_text("[{")
    command = f"tapfm study --tables --out {study}"
    with pytest.raises(InputError, match="is damaged") as error:
        create_test_report(study, tmp_path / "report.html")
    assert command in error.value.hint
    (study / "study.json").unlink()  # as in studies of earlier versions
    written, html = create_test_report(study, tmp_path / "report.html")
    assert any(command in note for note in written.notes)
    assert command in page_text(html)
    assert "AUC" not in section_titles(html)


def test_missing_metric_is_omitted_and_missing_setting_is_an_error(tmp_path):
    run = write_run(tmp_path / "runs" / "first")
    path = write_evaluation(tmp_path / "evaluations" / "external", run) / "metrics.json"
    written = json.loads(path.read_text())
    for metric in ("npv", "ece"):
        del written["models"]["model"]["all"]["FGFR3"][metric]
    path.write_text(json.dumps(written))
    _, html = create_test_report(run, tmp_path / "report.html")
    assert "external.csv AUC" in page_text(html)
    del written["evaluation"]["seed"]
    path.write_text(json.dumps(written))
    with pytest.raises(InputError, match="seed"):
        create_test_report(run, tmp_path / "report.html")


def test_study_report_shows_the_named_run_or_the_run_of_the_predictions(tmp_path):
    study = write_study(tmp_path / "study")
    name = "tapfm-pocket/tapfm/cls-attention/seed0"
    by_name, _ = create_test_report(study, tmp_path / "report.html", runs=(name,))
    predicted = write_prediction_folder(tmp_path / "predictions", study / "runs" / name, [("S1", None, 0.7, 1)])
    by_predictions, _ = create_test_report(study, tmp_path / "report.html", predictions=(predicted,))
    assert by_name.sources[1] == by_predictions.sources[1] == f"run {study / 'runs' / name}"
    assert (
        f"Shown in detail below: {name} (its evaluations or predictions were passed, not the model that is chosen on "
        "validation)."
    ) in page_text((tmp_path / "report.html").read_text())
    with pytest.raises(InputError, match="has no run absent") as error:
        create_test_report(study, tmp_path / "report.html", runs=("absent",))
    assert name in error.value.hint


def test_unfinished_study_has_a_warning(tmp_path):
    study = write_study(tmp_path / "study", finished=("tapfm",))
    written, html = create_test_report(study, tmp_path / "report.html")
    assert "1 run of the study is not finished." in written.notes
    assert "1 of 2 runs finished." in page_text(html)


@pytest.fixture
def run_and_predictions(tmp_path):
    """A run, and predictions of five slides: two correct, two wrong, one without a file."""
    run = write_run(tmp_path / "runs" / "first")
    paths = [write_tissue_slide(tmp_path / f"{i}.svs", seed=i) for i in range(4)]
    values = [("a<b", 0.9, 1), ("c", 0.2, 0), ("d", 0.8, 0), ("e", 0.1, 1)]
    slides = [(slide_id, path, p, label) for (slide_id, p, label), path in zip(values, paths, strict=True)]
    folder = write_prediction_folder(tmp_path / "predictions" / "new", run, [*slides, ("gone", None, 0.95, 1)])
    return run, folder


def find_images(html, alt_text):
    return re.findall(rf'<img src="data:image/webp;base64,([^"]+)" width="(\d+)" height="(\d+)" alt="{alt_text}', html)


def test_heatmaps_and_tiles_of_predictions_are_shown(tmp_path, run_and_predictions):
    run, _ = run_and_predictions
    written, html = create_test_report(run, tmp_path / "report.html")
    assert written.sources[-1] == f"predictions {tmp_path / 'predictions' / 'new'}"
    assert {"Heatmaps", "Most influential tiles"} <= set(section_titles(html))
    assert len(find_images(html, "Slide ")) == 8  # four slides, each without and with its heatmap
    text = page_text(html)
    assert "No image: The slide file missing.svs is missing. If it was moved, pass its folder with --slides." in text
    for outcome in ("false positive", "false negative", "correct, positive", "correct, negative"):
        assert outcome in text
    assert "a&lt;b" in html
    assert "lowers the logit" in text
    assert "Z1 prediction, new failed no tissue Scan it again." in text


def test_tile_galleries_have_the_most_influential_tiles_in_order(tmp_path, run_and_predictions):
    run, _ = run_and_predictions
    _, html = create_test_report(
        run, tmp_path / "report.html", image_selection=ImageSelection(max_heatmaps=0, max_tiles=3)
    )
    shown = re.findall(r"<figcaption>([^<]*)<span>([^<]*)</span>", html)
    # contributions are (-1, 0.5, 2, 0.1) times 1 to 4; slides a<b and d are called positive
    assert shown[:3] == [("+6.00", "d"), ("+2.00", "a&lt;b"), ("+1.50", "d")]
    assert shown[3:] == [("−4.00", "e"), ("−2.00", "c"), ("+0.200", "c")]
    assert "1 slide not included" in page_text(html)
    assert "Heatmaps" not in section_titles(html)


@pytest.mark.parametrize("problem", ["damaged", "replaced"])
def test_tiles_of_damaged_and_replaced_slides_are_omitted(tmp_path, run_and_predictions, problem):
    run, folder = run_and_predictions
    file = next(slide.path for slide in PredictionFolder(folder).slides() if slide.slide_id == "d")
    file.unlink()
    if problem == "damaged":
        file.write_bytes(b"not a slide")
    else:
        write_slide(file, section(500, 448))
    _, html = create_test_report(
        run, tmp_path / "report.html", image_selection=ImageSelection(max_heatmaps=0, max_tiles=3)
    )
    assert re.findall(r"<figcaption>([^<]*)<span>([^<]*)</span>", html)[0] == ("+2.00", "a&lt;b")
    assert "2 tiles omitted: the slide is damaged or was replaced." in page_text(html)


def test_colour_bars_have_the_colours_of_the_heatmaps(tmp_path, run_and_predictions):
    run, path = run_and_predictions
    folder = PredictionFolder(path)
    values = {"a<b": [-1, 0, 1, 2], "c": [1, 2, 3, 4], "d": [4, 3, 2, 1], "e": [-2, 0, 0, 1], "gone": [0, 1, 2, 3]}
    for slide in folder.slides():
        scored = replace(slide, columns=("score",))
        table = make_tile_table(scored, [[0, 0], [224, 0], [0, 224], [224, 224]], values[slide.slide_id])
        write_prediction(folder.slide_folder(slide.slide_id), scored, table)
    _, html = create_test_report(run, tmp_path / "report.html")
    bars = [re.findall(r'fill="(#\w+)"', bar) for bar in re.findall(r'<div class="colour-bar">.*?</div>', html)]
    ends = [["#{:02x}{:02x}{:02x}".format(*palette(diverging=each)[end]) for end in (0, -1)] for each in (True, False)]
    assert sorted([bar[0], bar[-1]] for bar in bars) == sorted(ends)
    assert page_text(html).count("0 in the middle") == 1


def test_moved_slides_are_found_in_the_slides_folder(tmp_path, run_and_predictions):
    run, folder = run_and_predictions
    moved = tmp_path / "moved" / "deeper"
    moved.mkdir(parents=True)
    for path in tmp_path.glob("*.svs"):
        path.rename(moved / path.name)
    _, without = create_test_report(run, tmp_path / "report.html")
    assert not find_images(without, "")
    assert "Most influential tiles" in section_titles(without)
    _, html = create_test_report(
        run, tmp_path / "report.html", image_selection=ImageSelection(slides_folder=tmp_path / "moved")
    )
    assert len(find_images(html, "Slide ")) == 8
    with pytest.raises(InputError, match="does not exist"):
        create_test_report(
            run, tmp_path / "report.html", image_selection=ImageSelection(slides_folder=folder / "absent")
        )
    shutil.copy(moved / "1.svs", tmp_path / "moved" / "1.svs")  # two files with the same name
    _, html = create_test_report(
        run, tmp_path / "report.html", image_selection=ImageSelection(slides_folder=tmp_path / "moved")
    )
    assert len(find_images(html, "Slide ")) == 6
    assert "No image: Several files match the slide" in page_text(html)


def test_damaged_slide_does_not_affect_other_slides(tmp_path, run_and_predictions):
    run, _ = run_and_predictions
    (tmp_path / "1.svs").write_bytes(b"not a slide")
    _, html = create_test_report(run, tmp_path / "report.html")
    assert len(find_images(html, "Slide ")) == 6
    assert "No image: 1.svs" in page_text(html)


def test_omitted_images_are_reported(tmp_path, run_and_predictions):
    run, _ = run_and_predictions
    written, html = create_test_report(run, tmp_path / "report.html", max_image_bytes=20_000)
    assert sum(len(data) for data, *_ in find_images(html, "")) <= 20_000
    assert any("omitted: images are limited to 20 kB" in note for note in written.notes)
    few, _ = create_test_report(run, tmp_path / "few.html", image_selection=ImageSelection(max_heatmaps=2, max_tiles=0))
    assert "3 other slides of this folder are not shown." in page_text((tmp_path / "few.html").read_text())
    assert few.notes == []


def test_predictions_of_another_model_are_marked(tmp_path):
    run = write_run(tmp_path / "runs" / "first")
    folder = write_prediction_folder(tmp_path / "new", "/models/other", [("S000", None, 0.7, 1)], digest="f" * 64)
    written, html = create_test_report(run, tmp_path / "report.html", predictions=(folder,))
    assert any(str(folder) in note and "/models/other" in note for note in written.notes)
    assert 'data-set="new" data-target="FGFR3" data-model="other"' in html


def test_slide_that_is_evaluated_and_predicted_is_listed_once(tmp_path):
    run = write_run(tmp_path / "runs" / "first")
    probability = sigmoid(make_predictions(1)[0].logits["FGFR3"])
    write_prediction_folder(run / "predicted", run, [("S000", None, probability, 1), ("new", None, 0.7, None)])
    _, html = create_test_report(run, tmp_path / "report.html")
    rows = re.findall(r'<tr data-set="(\w+)"[^>]*><th scope="row">(S000|new)</th>', html)
    assert rows == [("test", "S000"), ("predicted", "new")]


def test_predictions_from_few_tiles_are_marked(tmp_path):
    run = write_run(tmp_path / "runs" / "first")  # its slides have 40 or more tiles
    slide = write_tissue_slide(tmp_path / "slide.svs")
    write_prediction_folder(run / "predicted", run, [("new", slide, 0.7, None)])
    _, html = create_test_report(run, tmp_path / "report.html")
    cells = re.findall(
        r'<th scope="row">(\w+)</th>.*?data-label="Call"><span>(?:positive|negative)(.*?)</span></td>', html
    )
    warned = [(slide_id, page_text(rest)) for slide_id, rest in cells if rest]
    assert warned == [("new", "only 4 tiles")]
    assert "1 slide has fewer than 20 tiles" in page_text(html)
    (caption,) = re.findall(r"<figcaption><strong>new.*?</figcaption>", html, re.DOTALL)
    assert "only 4 tiles" in page_text(caption)
    assert "0.5 µm per pixel" in page_text(caption)


def test_evaluated_predictions_from_few_tiles_are_marked(tmp_path):
    run = write_run(tmp_path / "runs" / "first")
    table = run / "predictions-test.csv"
    rows = read_rows(table)
    rows[0]["tiles"] = "7"
    write_csv(table, list(rows[0]), [list(row.values()) for row in rows])
    _, html = create_test_report(run, tmp_path / "report.html")
    assert html.count("only 7 tiles</span>") == 1
    assert "1 slide has fewer than 20 tiles" in page_text(html)


def test_heatmaps_show_slides_furthest_from_the_threshold(tmp_path):
    run = write_run(tmp_path / "runs" / "first")
    values = [("a", 0.6, 1), ("b", 0.9, 1), ("c", 0.7, 0), ("d", 0.95, 0), ("e", 0.1, 0), ("f", 0.4, None)]
    folder = write_prediction_folder(tmp_path / "p", run, [(slide_id, None, p, label) for slide_id, p, label in values])
    slides = PredictionFolder(folder).slides()
    chosen = [(each.predicted.slide_id, each.outcome) for each in choose_slides(slides, ["FGFR3"], 4)]
    assert chosen == [
        ("d", "false positive"),
        ("e", "correct, negative"),
        ("b", "correct, positive"),
        ("f", "called negative"),
    ]
    assert len(choose_slides(slides, ["FGFR3"], 99)) == 6


def test_few_heatmaps_are_distributed_over_all_targets(tmp_path):
    run, targets = write_run(tmp_path / "runs" / "first"), ("A", "B", "C", "D")
    values = [("a", 0.6, 1), ("b", 0.9, 0), ("c", 0.1, 1), ("d", 0.2, 0)]
    folder = write_prediction_folder(
        tmp_path / "p", run, [(slide_id, None, p, label) for slide_id, p, label in values], targets=targets
    )
    chosen = choose_slides(PredictionFolder(folder).slides(), targets, 12)
    assert [(each.target, each.outcome) for each in chosen] == [
        (target, outcome) for target in targets for outcome in ("false negative", "false positive", "correct, negative")
    ]


def test_image_budget_counts_omitted_images():
    budget = ImageBudget(400)
    noise = Image.fromarray(np.random.default_rng(0).integers(0, 255, (64, 64, 3), dtype=np.uint8))
    assert budget.embed(Image.new("RGB", (8, 8)), "small") is not None
    assert budget.embed(noise, "large") is None
    assert budget.omitted == 1
    assert budget.used_bytes <= 400


def test_folder_that_is_neither_run_nor_study_is_an_error(tmp_path):
    run = write_run(tmp_path / "runs" / "first")
    evaluation = write_evaluation(tmp_path / "e", run)
    predicted = write_prediction_folder(tmp_path / "p", run, [])
    (tmp_path / "empty").mkdir()
    for folder, hint in (
        (tmp_path / "absent", "Pass a run folder"),
        (tmp_path / "empty", "Pass an output folder of `tapfm train` or `tapfm study`"),
        (evaluation, f"tapfm report runs/NAME --evaluation {evaluation} --out report.html"),
        (predicted, f"tapfm report runs/NAME --predictions {predicted} --out report.html"),
    ):
        with pytest.raises(InputError) as error:
            create_test_report(folder, tmp_path / "report.html")
        assert hint in error.value.hint
    assert not (tmp_path / "report.html").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"evaluations": "empty"}, "is not an evaluation folder"),
        ({"predictions": "empty"}, "is not a prediction folder"),
        ({"evaluations": "unfinished"}, "is not finished"),
        ({"evaluations": "damaged"}, "metrics.json cannot be read"),
    ],
)
def test_unusable_evaluation_or_prediction_folder_is_an_error(tmp_path, options, message):
    run = write_run(tmp_path / "runs" / "first")
    (tmp_path / "empty").mkdir()
    (write_evaluation(tmp_path / "unfinished", run) / "metrics.json").unlink()
    (write_evaluation(tmp_path / "damaged", run) / "metrics.json").write_text('{"evaluation": {}}')
    folders = {name: (tmp_path / folder,) for name, folder in options.items()}
    with pytest.raises(InputError, match=re.escape(message)):
        create_test_report(run, tmp_path / "report.html", **folders)


def test_damaged_runs_and_invalid_options_are_errors(tmp_path):
    run, study = write_run(tmp_path / "runs" / "first"), write_study(tmp_path / "study")
    with pytest.raises(InputError, match="is a study"):
        create_test_report([study, run], tmp_path / "report.html")
    with pytest.raises(InputError, match="--run only applies to a study"):
        create_test_report(run, tmp_path / "report.html", runs=("first",))
    with pytest.raises(InputError, match="--heatmaps is -1"):
        create_test_report(run, tmp_path / "report.html", image_selection=ImageSelection(max_heatmaps=-1))
    with pytest.raises(InputError, match="--max-image-mb is -1"):
        create_test_report(run, tmp_path / "report.html", max_image_bytes=-1_000_000)
    evaluation = write_evaluation(run / "evaluation", run)
    (evaluation / "failures.csv").write_bytes(b"slide_id,reason\nX\xff,damaged\n")
    with pytest.raises(InputError, match=r"failures\.csv cannot be read"):
        create_test_report(run, tmp_path / "report.html")
    (run / "history.jsonl").write_text("{")
    with pytest.raises(RunError, match="cannot be read"):
        create_test_report(run, tmp_path / "report.html")
    (run / "config.toml").write_text("")
    with pytest.raises(RunError, match=r"config\.toml has no targets"):
        create_test_report(run, tmp_path / "report.html")


def test_existing_file_is_overwritten_only_if_it_is_a_report(tmp_path):
    run = write_run(tmp_path / "runs" / "first")
    other = tmp_path / "other.html"
    other.write_text("another page")
    with pytest.raises(InputError, match="is not a report"):
        create_test_report(run, other)
    assert other.read_text() == "another page"
    create_test_report(run, other, force=True)
    first = other.read_bytes()
    create_test_report(run, other)
    assert other.read_bytes() == first  # the page is reproducible
    with pytest.raises(InputError, match="is a folder"):
        create_test_report(run, tmp_path)


def test_command_prints_the_file_and_its_sources(tmp_path):
    run = write_run(tmp_path / "runs" / "first")
    out = tmp_path / "report.html"
    result = tapfm("report", run, "--out", out, "--resamples", 20, "--title", "Bladder")
    assert result.returncode == 0, result.output
    assert re.search(rf"{out} \(\d+ kB\).*  run {run}$", result.output, re.MULTILINE | re.DOTALL)
    assert "<h1>Bladder</h1>" in out.read_text()
    not_a_number = tapfm("report", run, "--out", out, "--max-image-mb", "nan")
    assert (not_a_number.returncode, "--max-image-mb" in not_a_number.output) == (2, True)
    absent = tapfm("report", tmp_path / "absent", "--out", out)
    assert absent.returncode == 2
    assert "does not exist" in absent.output


def test_python_function_writes_the_report(tmp_path):
    run = write_run(tmp_path / "runs" / "first")
    written = tapfm_package.make_report(run, out=tmp_path / "report.html", resamples=20)
    assert written.path.stat().st_size == written.bytes


def test_report_of_a_trained_evaluated_and_predicted_run(train, workspace, tmp_path):
    run = train("reported")
    evaluation, prediction = (workspace / name / "reported" for name in ("evaluations", "predictions"))
    slides = (workspace / "cohort.csv", "--tiles", workspace / "tiles")
    for command in (
        ("evaluate", run, "--out", evaluation, "--resamples", 20, "--workers", 0),
        ("predict", "--model", run, *slides, "--out", prediction, "--workers", 0),
    ):
        result = tapfm(*command)
        assert result.returncode == 0, result.output
    written, html = create_test_report(run, tmp_path / "report.html")
    assert written.sources == [f"run {run}", f"evaluation {evaluation}", f"predictions {prediction}"]
    assert written.notes == []
    assert html.count("<tr data-set=") == 10
    assert len(find_images(html, "Slide ")) == 20
    assert weights_digest(run)[:16] in html
