"""`tapfm report`: what it finds, what it shows, what it refuses."""

import json
import re
import shutil
from dataclasses import replace

import numpy as np
import pytest
from command_line import tapfm
from PIL import Image
from predicted_slides import table_of, write_prediction
from report_lab import (
    digest_of,
    make_evaluation,
    make_prediction,
    make_run,
    make_study,
    page_of,
    predictions,
    write_section,
)
from slide_files import section, write_slide

import tapfm as tapfm_package
from tapfm.errors import InputError, RunError
from tapfm.evaluation.metric_values import choose_thresholds, compute_metrics
from tapfm.evaluation.predictions import Prediction
from tapfm.prediction.folder import PredictionFolder
from tapfm.prediction.layers import palette
from tapfm.report.slide_pictures import PictureBudget, PictureSettings
from tapfm.report.slide_pictures import _choose_slides as choose_slides
from tapfm.tasks.binary_metrics import METRIC_NAMES
from tapfm.tasks.binary_target import _sigmoid as sigmoid
from tapfm.tasks.catalog import target_kinds


def titles(html):
    return re.findall(r'<h2 id="[^"]*">([^<]*)</h2>', html)


def text_of(html):
    """What people read, with single blanks."""
    without = re.sub(r"<(script|style)>.*?</\1>", "", html, flags=re.DOTALL)
    return " ".join(re.sub(r"<[^>]*>", " ", without).split())


def test_a_finished_run_is_told_whole(tmp_path):
    run = make_run(tmp_path / "runs" / "first")
    made, html = page_of(run, tmp_path / "report.html")
    assert titles(html) == [
        "Slides and labels",
        "Training",
        "Results",
        "Slides",
        "Licence of the encoder",
        "How it was made",
    ]
    said = text_of(html)
    assert "Report of the run first FGFR3 FGFR3 from 12 slides of 12 patients" in said
    assert "Epoch 2 of 3 was kept, with an AUC of 0.800 on validation." in said
    assert "Made on 9 March 2026 by tapfm" in said
    assert "training 12 12 546 6 of 12 50%" in said
    assert "Apache-2.0" in said
    assert "method = &#34;tapfm&#34;" in html
    assert made.notes == []


def test_figures_are_those_of_the_evaluation_package(tmp_path):
    run = make_run(tmp_path / "runs" / "first")
    _, html = page_of(run, tmp_path / "report.html")
    test, validation = predictions(10, start=0), predictions(8, split="val", start=200)
    chosen = choose_thresholds(validation, target_kinds(["FGFR3"]), "patient")
    for each in compute_metrics(test, target_kinds(["FGFR3"]), "patient", chosen, resamples=50):
        name, estimate = METRIC_NAMES[each.metric.removesuffix("_at_chosen")], each.estimate
        note = r"( \d)?" if estimate.reason else ""
        within = f" {estimate.low:.3f} to {estimate.high:.3f}" if estimate.low is not None else ""
        assert re.search(rf"{re.escape(name)} {estimate.value:.3f}{note}{within}", text_of(html)), each
    assert "The epoch and the thresholds were chosen on these slides, so these metrics are optimistic." in text_of(html)
    assert f"{chosen.youden['FGFR3']:.3f}" in text_of(html)


def test_every_slide_is_listed_with_its_call(tmp_path):
    run = make_run(tmp_path / "runs" / "first")
    _, html = page_of(run, tmp_path / "report.html")
    rows = re.findall(r'<tr data-where="(\w+)" data-target="FGFR3"( data-wrong)?><th scope="row">(S\d+)</th>', html)
    assert len(rows) == 18
    threshold = choose_thresholds(predictions(8, split="val", start=200), target_kinds(["FGFR3"]), "patient").youden[
        "FGFR3"
    ]
    slides = [*predictions(10), *predictions(8, split="val", start=200)]
    wrong = {
        each.slide_id for each in slides if (sigmoid(each.logits["FGFR3"]) >= threshold) != bool(each.labels["FGFR3"])
    }
    assert {slide_id for _, mark, slide_id in rows if mark} == wrong
    assert wrong


def test_evaluations_of_the_same_weights_are_found_beside_runs_and_inside(tmp_path):
    run = make_run(tmp_path / "runs" / "deep" / "first")
    make_evaluation(tmp_path / "evaluations" / "a" / "external", run, subgroup="scanner = <alpha>")
    make_evaluation(run / "again", run, cohort="own", slides=predictions(10))
    other = make_run(tmp_path / "runs" / "second")
    make_evaluation(tmp_path / "evaluations" / "of-another", other)
    make_prediction(tmp_path / "predicted", run, [])
    (tmp_path / "torn").mkdir()
    (tmp_path / "torn" / "prediction.json").write_text("{")
    made, html = page_of(run, tmp_path / "report.html")
    assert [line.split()[0] for line in made.found] == ["run", "evaluation", "evaluation", "predictions"]
    assert not any("of-another" in line for line in made.found)
    said = text_of(html)
    assert "Test slides AUC" in said
    assert "external.csv AUC" in said
    assert "by tapfm evaluate (again)" in said
    assert "measured for this page from predictions-test.csv" not in said  # it was evaluated already
    assert "scanner = &lt;alpha&gt;" in html
    assert "Colour baseline" in said
    assert "X9 external failed it is torn" in said
    assert said.index("Test slides AUC") < said.index("external.csv AUC") < said.index("Validation slides AUC")


def test_an_evaluation_that_is_named_is_shown_and_one_by_another_model_is_marked(tmp_path):
    run, other = (make_run(tmp_path / "runs" / name) for name in ("first", "second"))
    of_other = make_evaluation(tmp_path / "elsewhere", other)
    made, html = page_of(run, tmp_path / "report.html", evaluations=(of_other,))
    assert f"{of_other} was made by another model ({other})." in made.notes
    assert "external.csv" in html


def test_slides_that_were_learnt_from_are_not_held_out(tmp_path):
    run = make_run(tmp_path / "runs" / "first")
    learnt = predictions(12, split="train", start=100)
    for split in ("train", "all"):
        make_evaluation(tmp_path / "evaluations" / split, run, cohort="own", split=split, slides=learnt)
    _, html = page_of(run, tmp_path / "report.html")
    header = html[html.index('class="headline"') : html.index('class="made"')]
    assert re.findall(r'<th scope="row">([^<]*)', header) == ["test"]
    assert "The model was trained on these slides, so these metrics are optimistic." in text_of(html)
    assert "The model was trained on some of these slides" in text_of(html)


def test_an_ensemble_is_not_its_member(tmp_path):
    run, other = (make_run(tmp_path / "runs" / name) for name in ("first", "second"))
    both = make_evaluation(tmp_path / "both", run, cohort="own", slides=predictions(10), with_run=other)
    predicted = make_prediction(tmp_path / "predicted", run, [("new", None, 0.7, 1)], with_run=other)
    alone, _ = page_of(run, tmp_path / "report.html")
    assert alone.found == [f"run {run}"]
    about = json.loads((both / "metrics.json").read_text())
    about["evaluation"]["model"] = "studies/folds"
    (both / "metrics.json").write_text(json.dumps(about))
    (both / "evaluation.json").write_text(json.dumps(about["evaluation"]))
    made, html = page_of(run, tmp_path / "report.html", evaluations=(both,), predictions=(predicted,))
    assert f"{both} was made by an ensemble of 2 models (studies/folds)." in made.notes
    assert f"{predicted} was made by an ensemble of 2 models ({run})." in made.notes
    said = text_of(html)
    assert "measured for this page from predictions-test.csv" in said  # the run itself is not left out for it
    assert "test, by folds AUC" in said
    assert "By an ensemble of 2 models (studies/folds), not by the run first." in said
    assert 'data-where="test, by folds" data-target="FGFR3" data-model="folds"' in html


def test_a_split_that_was_evaluated_twice_is_told_apart(tmp_path):
    runs = [make_run(tmp_path / "runs" / name) for name in ("first", "second")]
    for folder, run in (("a", runs[0]), ("b", runs[0]), ("c", runs[1])):
        make_evaluation(tmp_path / "evaluations" / folder, run, cohort="own", slides=predictions(10))
    _, html = page_of(runs, tmp_path / "report.html")
    assert html.count('data-where="test (a)"') == html.count('data-where="test (b)"') == 10
    assert "first - second FGFR3" in text_of(html)
    assert "A run has several evaluations of test: the first one is compared." in text_of(html)


def test_slides_of_another_cohort_may_have_the_same_names(tmp_path):
    run = make_run(tmp_path / "runs" / "first")
    make_evaluation(tmp_path / "evaluations" / "other", run, slides=predictions(10, seed=9))
    make_prediction(tmp_path / "predictions" / "new", run, [("S000", None, 0.777, None)])
    _, html = page_of(run, tmp_path / "report.html")
    assert "external.csv 10 10 445 5 of 10 50%" in text_of(html)
    assert html.count('data-where="new"') == 1


def test_the_weights_of_a_study_are_read_of_the_runs_that_are_shown(tmp_path, monkeypatch):
    study, read = make_study(tmp_path / "study"), []
    monkeypatch.setattr("tapfm.report.runs.file_sha256", lambda path: read.append(path) or "0" * 64)
    page_of(study, tmp_path / "report.html")
    assert [path.parts[-5:-3] for path in read] == [("finetune", "abmil")]


def test_a_run_without_an_epoch_shows_what_there_is(tmp_path):
    run = make_run(tmp_path / "runs" / "first", finished=False)
    (run / "history.jsonl").unlink()
    shutil.rmtree(run / "checkpoints")
    made, html = page_of(run, tmp_path / "report.html")
    assert titles(html) == ["Slides and labels", "Licence of the encoder", "How it was made"]
    assert made.notes[0].startswith("The run first is not finished: 0 epochs of 3 done.")
    assert "tapfm train" in made.notes[0]
    assert "not finished" in text_of(html)


def test_a_run_on_its_way_has_curves(tmp_path):
    run = make_run(tmp_path / "runs" / "first", finished=False)
    made, html = page_of(run, tmp_path / "report.html")
    assert "Training" in titles(html)
    assert "Results" not in titles(html)
    assert "1 epoch of 3 done" in made.notes[0]


def test_slides_of_one_class_say_so(tmp_path):
    run = make_run(tmp_path / "runs" / "first")
    lines = (run / "predictions-test.csv").read_text().splitlines()
    (run / "predictions-test.csv").write_text("\n".join(line.replace("FGFR3,1,", "FGFR3,0,") for line in lines) + "\n")
    _, html = page_of(run, tmp_path / "report.html")
    assert "no positive patient among 10" in text_of(html)


def test_ids_that_are_html_are_text(tmp_path):
    run = make_run(tmp_path / "runs" / "first")
    evil = "<script>alert(1)</script>"
    slides = [
        Prediction(f'{evil}"{i}', f"'{evil}", "test", "<c>", {"FGFR3": i % 2}, {"FGFR3": float(i)}, tiles=1)
        for i in range(6)
    ]
    make_evaluation(run / "evaluation", run, slides=slides)
    (run / "failures.csv").write_text(f"slide_id,problem,tiles_skipped,reason\n{evil},failed,,{evil}\ncut,failed\n")
    _, html = page_of(run, tmp_path / "report.html", title=evil)
    assert html.count("<script>") == 1  # ours
    assert html.count("&lt;script&gt;alert(1)") > 12
    assert "cut training, first failed X9 evaluation" in text_of(html)


def test_scanners_and_sites_are_counted_where_the_table_tells(tmp_path):
    run = make_run(tmp_path / "runs" / "first")
    rows = [f"S{i:03},S{i}.svs,P{i},{'alpha' if i % 2 else 'bravo'}" for i in range(100, 112)]
    (tmp_path / "runs" / "cohort.csv").write_text("\n".join(["slide_id,path,patient_id,scanner", *rows]) + "\n")
    _, html = page_of(run, tmp_path / "report.html")
    assert "training ours 12 alpha 6, bravo 6" in text_of(html)


def test_licences_that_forbid_derivatives_are_told(tmp_path):
    adapted = make_run(tmp_path / "runs" / "first", encoder="uni")
    fixed = make_run(tmp_path / "runs" / "fixed", encoder="uni", method="fixed")
    said = [text_of(page_of(run, tmp_path / "report.html")[1]) for run in (adapted, fixed)]
    assert "The licence of UNI forbids sharing derivatives, and the adapted encoder is one." in said[0]
    assert "The licence of UNI forbids sharing derivatives." in said[1]
    assert "MahmoodLab/UNI on the Hugging Face hub" in said[0]
    assert "on features of uni as published" in said[1]


def test_two_runs_are_compared_on_the_same_slides(tmp_path):
    first = make_run(tmp_path / "runs" / "first")
    second = make_run(tmp_path / "runs" / "second", strength=3.0)
    _, html = page_of([first, second], tmp_path / "report.html")
    said = text_of(html)
    assert titles(html)[0] == "Comparison"
    assert "first - second FGFR3" in said
    assert "Paired: all methods on the same patients" in said
    assert 'data-model="second"' in html


def test_runs_on_other_slides_are_not_compared_one_by_one(tmp_path):
    first, second = (make_run(tmp_path / "runs" / name) for name in ("first", "second"))
    text = (second / "predictions-test.csv").read_text().replace("S000", "S999")
    (second / "predictions-test.csv").write_text(text)
    _, html = page_of([first, second], tmp_path / "report.html")
    assert "first - second" not in text_of(html)
    assert "tapfm compare" in text_of(html)


def test_a_study_shows_its_table_and_the_best_run_on_validation(tmp_path):
    study = make_study(tmp_path / "study")
    made, html = page_of(study, tmp_path / "report.html")
    said = text_of(html)
    assert titles(html)[:3] == ["Overview", "AUC", "Convergence, time and memory"]
    assert "Report of the study A small study FGFR3" in said
    assert "Painted slides, not &lt;real&gt; ones." in html
    assert "2 of 2 runs finished. In full below: tapfm-pocket/finetune/abmil/seed0, the best on validation." in said
    assert "tapfm-pocket (TAPFM)" in said
    assert "Fine-tuned (FT) encoder with MIL aggregators" in said
    assert "peak memory, GiB" in said
    assert "Validation AUC" in said
    assert "some/run train failed no &lt;memory&gt; tapfm train x.toml" in said
    assert "cut/run train failed Licence" in said
    assert made.notes == []


def test_a_study_without_its_sections_says_what_to_type(tmp_path):
    study = make_study(tmp_path / "study")
    (study / "study.json").write_text("[{")
    again = f"tapfm study --tables --out {study}"
    with pytest.raises(InputError, match="is damaged") as refused:
        page_of(study, tmp_path / "report.html")
    assert again in refused.value.hint
    (study / "study.json").unlink()  # as studies of earlier versions are
    made, html = page_of(study, tmp_path / "report.html")
    assert any(again in note for note in made.notes)
    assert again in text_of(html)
    assert "AUC" not in titles(html)


def test_an_evaluation_that_lacks_a_metric_is_shown_without_it(tmp_path):
    run = make_run(tmp_path / "runs" / "first")
    path = make_evaluation(tmp_path / "evaluations" / "external", run) / "metrics.json"
    written = json.loads(path.read_text())
    for metric in ("npv", "ece"):
        del written["models"]["model"]["all"]["FGFR3"][metric]
    path.write_text(json.dumps(written))
    _, html = page_of(run, tmp_path / "report.html")
    assert "external.csv AUC" in text_of(html)
    del written["evaluation"]["seed"]
    path.write_text(json.dumps(written))
    with pytest.raises(InputError, match="seed"):
        page_of(run, tmp_path / "report.html")


def test_a_study_shows_the_run_that_is_asked_for_or_that_made_the_predictions(tmp_path):
    study = make_study(tmp_path / "study")
    name = "tapfm-pocket/tapfm/cls-attention/seed0"
    asked, _ = page_of(study, tmp_path / "report.html", runs=(name,))
    predicted = make_prediction(tmp_path / "predictions", study / "runs" / name, [("S1", None, 0.7, 1)])
    found, _ = page_of(study, tmp_path / "report.html", predictions=(predicted,))
    assert asked.found[1] == found.found[1] == f"run {study / 'runs' / name}"
    with pytest.raises(InputError, match="has no run absent") as refused:
        page_of(study, tmp_path / "report.html", runs=("absent",))
    assert name in refused.value.hint


def test_a_study_that_is_not_finished_says_so(tmp_path):
    study = make_study(tmp_path / "study", finished=("tapfm",))
    made, html = page_of(study, tmp_path / "report.html")
    assert "1 run of the study is not finished." in made.notes
    assert "1 of 2 runs finished." in text_of(html)


@pytest.fixture
def predicted(tmp_path):
    """A run, and predictions of five slides: two right, two wrong, one whose file is gone."""
    run = make_run(tmp_path / "runs" / "first")
    paths = [write_section(tmp_path / f"{i}.svs", seed=i) for i in range(4)]
    said = [("a<b", 0.9, 1), ("c", 0.2, 0), ("d", 0.8, 0), ("e", 0.1, 1)]
    slides = [(slide_id, path, p, label) for (slide_id, p, label), path in zip(said, paths, strict=True)]
    folder = make_prediction(tmp_path / "predictions" / "new", run, [*slides, ("gone", None, 0.95, 1)])
    return run, folder


def pictures_in(html, what):
    return re.findall(rf'<img src="data:image/webp;base64,([^"]+)" width="(\d+)" height="(\d+)" alt="{what}', html)


def test_maps_and_tiles_of_predictions_by_the_same_weights_are_shown(tmp_path, predicted):
    run, _ = predicted
    made, html = page_of(run, tmp_path / "report.html")
    assert made.found[-1] == f"predictions {tmp_path / 'predictions' / 'new'}"
    assert {"Maps of slides", "Most influential tiles"} <= set(titles(html))
    assert len(pictures_in(html, "Slide ")) == 8  # four slides, as they are and with their map
    said = text_of(html)
    assert "No picture: gone.svs is gone; --slides says where to look for slides that moved." in said
    for outcome in ("false positive", "false negative", "right, positive", "right, negative"):
        assert outcome in said
    assert "a&lt;b" in html
    assert "speaks against" in said
    assert "Z1 new failed it is empty Scan it again." in said


def test_the_tiles_are_the_loudest_ones_in_order(tmp_path, predicted):
    run, _ = predicted
    _, html = page_of(run, tmp_path / "report.html", pictures=PictureSettings(heatmaps=0, tiles=3))
    shown = re.findall(r"<figcaption>([^<]*)<span>([^<]*)</span>", html)
    # contributions are (-1, 0.5, 2, 0.1) times 1 to 4; slides a<b and d are called positive
    assert shown[:3] == [("+6.00", "d"), ("+2.00", "a&lt;b"), ("+1.50", "d")]
    assert shown[3:] == [("−4.00", "e"), ("−2.00", "c"), ("+0.200", "c")]
    assert "Without 1 slide whose file or table of tiles is gone." in text_of(html)
    assert "Maps of slides" not in titles(html)


@pytest.mark.parametrize("now", ["torn", "another slide"])
def test_tiles_of_a_slide_that_is_damaged_or_was_replaced_are_left_out(tmp_path, predicted, now):
    run, folder = predicted
    file = next(slide.path for slide in PredictionFolder(folder).slides() if slide.slide_id == "d")
    file.unlink()
    if now == "torn":
        file.write_bytes(b"torn")
    else:
        write_slide(file, section(500, 448))
    _, html = page_of(run, tmp_path / "report.html", pictures=PictureSettings(heatmaps=0, tiles=3))
    assert re.findall(r"<figcaption>([^<]*)<span>([^<]*)</span>", html)[0] == ("+2.00", "a&lt;b")
    assert "2 tiles left out: a slide is damaged, or another one than was predicted." in text_of(html)


def test_every_colour_bar_has_the_colours_of_its_maps(tmp_path, predicted):
    run, path = predicted
    folder = PredictionFolder(path)
    values = {"a<b": [-1, 0, 1, 2], "c": [1, 2, 3, 4], "d": [4, 3, 2, 1], "e": [-2, 0, 0, 1], "gone": [0, 1, 2, 3]}
    for slide in folder.slides():
        scored = replace(slide, columns=("score",))
        table = table_of(scored, [[0, 0], [224, 0], [0, 224], [224, 224]], values[slide.slide_id])
        write_prediction(folder.slide_folder(slide.slide_id), scored, table)
    _, html = page_of(run, tmp_path / "report.html")
    bars = [re.findall(r'fill="(#\w+)"', bar) for bar in re.findall(r'<div class="colour-bar">.*?</div>', html)]
    ends = [["#{:02x}{:02x}{:02x}".format(*palette(diverging=each)[end]) for end in (0, -1)] for each in (True, False)]
    assert sorted([bar[0], bar[-1]] for bar in bars) == sorted(ends)
    assert text_of(html).count("0 in the middle") == 1


def test_slides_that_moved_are_looked_for(tmp_path, predicted):
    run, folder = predicted
    moved = tmp_path / "moved" / "deeper"
    moved.mkdir(parents=True)
    for path in tmp_path.glob("*.svs"):
        path.rename(moved / path.name)
    _, without = page_of(run, tmp_path / "report.html")
    assert not pictures_in(without, "")
    assert "Most influential tiles" in titles(without)
    _, html = page_of(run, tmp_path / "report.html", pictures=PictureSettings(slides=tmp_path / "moved"))
    assert len(pictures_in(html, "Slide ")) == 8
    with pytest.raises(InputError, match="There is no folder"):
        page_of(run, tmp_path / "report.html", pictures=PictureSettings(slides=folder / "absent"))
    shutil.copy(moved / "1.svs", tmp_path / "moved" / "1.svs")  # which of the two was it?
    _, html = page_of(run, tmp_path / "report.html", pictures=PictureSettings(slides=tmp_path / "moved"))
    assert len(pictures_in(html, "Slide ")) == 6
    assert "No picture: There are several files for" in text_of(html)


def test_a_damaged_slide_costs_its_own_pictures(tmp_path, predicted):
    run, _ = predicted
    (tmp_path / "1.svs").write_bytes(b"torn")
    _, html = page_of(run, tmp_path / "report.html")
    assert len(pictures_in(html, "Slide ")) == 6
    assert "No picture: 1.svs is not a slide" in text_of(html)


def test_pictures_have_a_limit_and_what_is_left_out_is_told(tmp_path, predicted):
    run, _ = predicted
    made, html = page_of(run, tmp_path / "report.html", most_bytes=20_000)
    assert sum(len(data) for data, *_ in pictures_in(html, "")) <= 20_000
    assert any("left out: the page holds 20 kB at most" in note for note in made.notes)
    few, _ = page_of(run, tmp_path / "few.html", pictures=PictureSettings(heatmaps=2, tiles=0))
    assert "3 slides of this folder are not shown." in text_of((tmp_path / "few.html").read_text())
    assert few.notes == []


def test_predictions_by_another_model_are_not_mixed_with_the_run(tmp_path):
    run = make_run(tmp_path / "runs" / "first")
    folder = make_prediction(tmp_path / "new", "/models/other", [("S000", None, 0.7, 1)], digest="f" * 64)
    made, html = page_of(run, tmp_path / "report.html", predictions=(folder,))
    assert f"{folder} was made by another model (/models/other)." in made.notes
    assert 'data-where="new" data-target="FGFR3" data-model="other"' in html


def test_a_slide_that_was_evaluated_is_listed_once(tmp_path):
    run = make_run(tmp_path / "runs" / "first")
    probability = sigmoid(predictions(1)[0].logits["FGFR3"])
    make_prediction(run / "predicted", run, [("S000", None, probability, 1), ("new", None, 0.7, None)])
    _, html = page_of(run, tmp_path / "report.html")
    rows = re.findall(r'<tr data-where="(\w+)"[^>]*><th scope="row">(S000|new)</th>', html)
    assert rows == [("test", "S000"), ("predicted", "new")]


def test_the_most_certain_slides_of_each_outcome_are_chosen(tmp_path):
    run = make_run(tmp_path / "runs" / "first")
    said = [("a", 0.6, 1), ("b", 0.9, 1), ("c", 0.7, 0), ("d", 0.95, 0), ("e", 0.1, 0), ("f", 0.4, None)]
    folder = make_prediction(tmp_path / "p", run, [(slide_id, None, p, label) for slide_id, p, label in said])
    slides = PredictionFolder(folder).slides()
    chosen = [(each.predicted.slide_id, each.outcome) for each in choose_slides(slides, ["FGFR3"], 4)]
    assert chosen == [
        ("d", "false positive"),
        ("e", "right, negative"),
        ("b", "right, positive"),
        ("f", "called negative"),
    ]
    assert len(choose_slides(slides, ["FGFR3"], 99)) == 6


def test_few_maps_of_many_targets_are_of_every_target(tmp_path):
    run, targets = make_run(tmp_path / "runs" / "first"), ("A", "B", "C", "D")
    said = [("a", 0.6, 1), ("b", 0.9, 0), ("c", 0.1, 1), ("d", 0.2, 0)]
    folder = make_prediction(
        tmp_path / "p", run, [(slide_id, None, p, label) for slide_id, p, label in said], targets=targets
    )
    chosen = choose_slides(PredictionFolder(folder).slides(), targets, 12)
    assert [(each.target, each.outcome) for each in chosen] == [
        (target, outcome) for target in targets for outcome in ("false negative", "false positive", "right, negative")
    ]


def test_a_budget_counts_what_it_leaves_out():
    budget = PictureBudget(400)
    noise = Image.fromarray(np.random.default_rng(0).integers(0, 255, (64, 64, 3), dtype=np.uint8))
    assert budget.embed(Image.new("RGB", (8, 8)), "small") is not None
    assert budget.embed(noise, "large") is None
    assert budget.left_out == 1
    assert budget.used <= 400


def test_what_is_no_run_and_no_study_is_refused_with_advice(tmp_path):
    run = make_run(tmp_path / "runs" / "first")
    evaluation = make_evaluation(tmp_path / "e", run)
    predicted = make_prediction(tmp_path / "p", run, [])
    (tmp_path / "empty").mkdir()
    for folder, hint in (
        (tmp_path / "absent", "Give the folder of a run"),
        (tmp_path / "empty", "Give a folder that `tapfm train` or `tapfm study` wrote"),
        (evaluation, f"tapfm report runs/NAME --evaluation {evaluation} --out report.html"),
        (predicted, f"tapfm report runs/NAME --predictions {predicted} --out report.html"),
    ):
        with pytest.raises(InputError) as refused:
            page_of(folder, tmp_path / "report.html")
        assert hint in refused.value.hint
    assert not (tmp_path / "report.html").exists()


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"evaluations": "empty"}, "is no folder of an evaluation"),
        ({"predictions": "empty"}, "is no folder of predictions"),
        ({"evaluations": "unfinished"}, "is not finished"),
        ({"evaluations": "torn"}, "metrics.json cannot be read"),
    ],
)
def test_what_was_named_has_to_be_there(tmp_path, asked, message):
    run = make_run(tmp_path / "runs" / "first")
    (tmp_path / "empty").mkdir()
    (make_evaluation(tmp_path / "unfinished", run) / "metrics.json").unlink()
    (make_evaluation(tmp_path / "torn", run) / "metrics.json").write_text('{"evaluation": {}}')
    with pytest.raises(InputError, match=re.escape(message)):
        page_of(run, tmp_path / "report.html", **{name: (tmp_path / folder,) for name, folder in asked.items()})


def test_damaged_runs_and_impossible_wishes_are_refused(tmp_path):
    run, study = make_run(tmp_path / "runs" / "first"), make_study(tmp_path / "study")
    with pytest.raises(InputError, match="is a study"):
        page_of([study, run], tmp_path / "report.html")
    with pytest.raises(InputError, match="--run is for studies"):
        page_of(run, tmp_path / "report.html", runs=("first",))
    with pytest.raises(InputError, match="--heatmaps is -1"):
        page_of(run, tmp_path / "report.html", pictures=PictureSettings(heatmaps=-1))
    with pytest.raises(InputError, match="--most-mb is -1"):
        page_of(run, tmp_path / "report.html", most_bytes=-1_000_000)
    evaluation = make_evaluation(run / "evaluation", run)
    (evaluation / "failures.csv").write_bytes(b"slide_id,reason\nX\xff,torn\n")
    with pytest.raises(InputError, match=r"failures\.csv cannot be read"):
        page_of(run, tmp_path / "report.html")
    (run / "history.jsonl").write_text("{torn")
    with pytest.raises(RunError, match="cannot be read"):
        page_of(run, tmp_path / "report.html")
    (run / "config.toml").write_text("")
    with pytest.raises(RunError, match=r"config\.toml names no targets"):
        page_of(run, tmp_path / "report.html")


def test_only_a_report_is_written_over(tmp_path):
    run = make_run(tmp_path / "runs" / "first")
    theirs = tmp_path / "thesis.html"
    theirs.write_text("three years of work")
    with pytest.raises(InputError, match="is no report of tapfm"):
        page_of(run, theirs)
    assert theirs.read_text() == "three years of work"
    page_of(run, theirs, force=True)
    first = theirs.read_bytes()
    page_of(run, theirs)
    assert theirs.read_bytes() == first  # the same folders give the same page
    with pytest.raises(InputError, match="is a folder"):
        page_of(run, tmp_path)


def test_the_command_says_what_it_found(tmp_path):
    run = make_run(tmp_path / "runs" / "first")
    out = tmp_path / "report.html"
    result = tapfm("report", run, "--out", out, "--resamples", 20, "--title", "Bladder")
    assert result.returncode == 0, result.said
    assert re.search(rf"^Written: {out} \(\d+ kB\)\n  run {run}$", result.said, re.MULTILINE)
    assert "<h1>Bladder</h1>" in out.read_text()
    endless = tapfm("report", run, "--out", out, "--most-mb", "nan")
    assert (endless.returncode, "--most-mb is nan" in endless.said) == (2, True)
    refused = tapfm("report", tmp_path / "absent", "--out", out)
    assert refused.returncode == 2
    assert "There is no" in refused.said


def test_the_function_does_what_the_command_does(tmp_path):
    run = make_run(tmp_path / "runs" / "first")
    made = tapfm_package.make_report(run, out=tmp_path / "report.html", resamples=20)
    assert made.path.stat().st_size == made.bytes


def test_a_run_that_was_trained_evaluated_and_predicted_is_reported(train, lab, tmp_path):
    run = train("reported")
    evaluation, prediction = (lab / name / "reported" for name in ("evaluations", "predictions"))
    for command in (
        ("evaluate", run, "--out", evaluation, "--resamples", 20, "--workers", 0),
        ("predict", "--model", run, lab / "cohort.csv", "--tiles", lab / "tiles", "--out", prediction, "--workers", 0),
    ):
        result = tapfm(*command)
        assert result.returncode == 0, result.said
    made, html = page_of(run, tmp_path / "report.html")
    assert made.found == [f"run {run}", f"evaluation {evaluation}", f"predictions {prediction}"]
    assert made.notes == []
    assert html.count("<tr data-where=") == 10
    assert len(pictures_in(html, "Slide ")) == 20
    assert digest_of(run)[:16] in html
