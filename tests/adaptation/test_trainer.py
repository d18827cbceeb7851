"""The training loop: learning, sampling, selection of the best epoch, failures and resume."""

import json
import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from slide_files import damage
from training_slides import (
    NO_AUGMENTATION,
    TIMING_COLUMNS,
    TrainingRecorder,
    label_slides,
    make_bags,
    make_learner,
    run_fit,
    write_slides,
)

from tapfm.adaptation.learner import Learner, OptimiserSettings
from tapfm.adaptation.optimisers import LearningRateSchedule
from tapfm.adaptation.trainer import TrainingSettings, fit
from tapfm.adaptation.two_graph import AdaptationSettings
from tapfm.aggregators.abmil import Abmil
from tapfm.encoders.features import SlideFeatures, write_features
from tapfm.encoders.inference import InferenceEncoder
from tapfm.errors import Interrupted, NonFiniteError, SlidesFailedError
from tapfm.inference.bags import BagRequest, FeatureBags
from tapfm.runs.model import SlideModel
from tapfm.runs.run_progress import RunProgress
from tapfm.tasks.binary import BinaryTask
from tapfm.tasks.cross_entropy import encode_labels
from tapfm.tiles.augment import Augmentation, augment


@pytest.fixture(scope="module")
def slides(tmp_path_factory):
    return write_slides(tmp_path_factory.mktemp("slides"), 6)


@pytest.fixture(scope="module")
def many_slides(tmp_path_factory):
    return write_slides(tmp_path_factory.mktemp("many"), 36)


def without_timings(history):
    return [{name: value for name, value in row.items() if name not in TIMING_COLUMNS} for row in history]


def split_slides(slides, *sizes):
    names, parts = list(slides), []
    for size in sizes:
        parts.append({name: slides[name] for name in names[:size]})
        names = names[size:]
    return parts


def are_equal(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_validation_auc_rises_above_09(many_slides):
    train, validation = split_slides(many_slides, 20, 16)
    progress = run_fit(
        make_learner(rate=3e-4, schedule=LearningRateSchedule(20, 1)),
        many_slides,
        training=label_slides(train),
        validation=label_slides(validation, "val"),
        epochs=12,
        tiles_per_slide=None,
        augmentation=NO_AUGMENTATION,
    )
    aucs = [row["val_macro_auc"] for row in progress.history]
    assert aucs[0] < 0.7
    assert max(aucs) > 0.9
    assert progress.best_epoch == aucs.index(max(aucs))
    assert progress.history[-1]["loss_agg"] < 0.7 * progress.history[0]["loss_agg"]


def test_validation_auc_stays_low_with_random_labels(many_slides):
    train, validation = split_slides(many_slides, 20, 16)
    labels = [0, 0, 1, 1] * 5  # half of them are right
    progress = run_fit(
        make_learner(rate=3e-4, schedule=LearningRateSchedule(20, 1)),
        many_slides,
        training=label_slides(train, labels=labels),
        validation=label_slides(validation, "val"),
        epochs=12,
        tiles_per_slide=None,
        augmentation=NO_AUGMENTATION,
    )
    assert progress.history[-1]["val_macro_auc"] < 0.75


@pytest.mark.parametrize("workers", [1, 3])
def test_number_of_workers_does_not_change_the_run(slides, workers):
    train, validation = split_slides(slides, 4, 2)
    runs = []
    for count in (0, workers):
        learner = make_learner()
        progress = run_fit(
            learner, slides, training=label_slides(train), validation=label_slides(validation, "val"), workers=count
        )
        runs.append((without_timings(progress.history), learner.state()))
    assert runs[0][0] == runs[1][0]
    assert are_equal(runs[0][1], runs[1][1])


def test_tiles_of_a_bag_depend_only_on_the_address(slides):
    for workers in (0, 1, 3):
        bags = make_bags(slides, workers=workers)
        requests = [BagRequest("train", name, 8, (7, epoch, name)) for epoch in (0, 1) for name in slides]
        bags.start(iter(requests))
        contents = [bags.read(request).content for request in requests]
        bags.close()
        if workers == 0:
            first = contents
        assert all(torch.equal(a, b) for a, b in zip(first, contents, strict=True))
    assert not torch.equal(first[0], first[len(slides)]), "every epoch samples other tiles"


def test_slides_with_fewer_tiles_use_all_tiles(slides):
    progress = run_fit(make_learner(), slides, training=label_slides(slides), epochs=1, tiles_per_slide=1000)
    assert progress.history[0]["tiles"] == 25 * len(slides)


def test_history_depends_on_the_seed(slides):
    train, validation = split_slides(slides, 4, 2)
    histories = [
        without_timings(
            run_fit(
                make_learner(),
                slides,
                training=label_slides(train),
                validation=label_slides(validation, "val"),
                seed=seed,
            ).history
        )
        for seed in (0, 0, 1)
    ]
    assert histories[0] == histories[1]
    assert histories[0] != histories[2]


@pytest.mark.parametrize("slides_per_step", [1, 3])
def test_resume_after_any_step_gives_the_same_weights(slides, slides_per_step):
    train, validation = split_slides(slides, 4, 2)
    arguments = {"training": label_slides(train), "validation": label_slides(validation, "val"), "epochs": 3}
    whole = make_learner(slides_per_step=slides_per_step)
    expected = run_fit(whole, slides, **arguments)
    rng = random.Random(slides_per_step)
    for _ in range(4):
        recorder, learner, progress = TrainingRecorder(), make_learner(slides_per_step=slides_per_step), None
        for _ in range(3):
            signals = [15] + [None] * rng.randrange(6)
            with pytest.raises(Interrupted) as stopped:
                run_fit(learner, slides, recorder=recorder, progress=progress, stop_signal=signals.pop, **arguments)
            assert stopped.value.signal_number == 15
            learner = make_learner(seed=9, slides_per_step=slides_per_step)  # its initial weights are replaced
            learner.restore(recorder.last[0])
            progress = RunProgress.from_json(json.loads(json.dumps(recorder.last[1])))
        progress = run_fit(learner, slides, recorder=recorder, progress=progress, **arguments)
        assert are_equal(whole.state(), learner.state())
        assert without_timings(progress.history) == without_timings(expected.history)


def test_resume_samples_the_same_backward_tiles(slides):
    def make(seed=0):
        learner = make_learner(seed=seed)
        learner.adaptation = replace(learner.adaptation, backward_tiles=3)
        return learner

    arguments = {"training": label_slides(slides), "epochs": 1}
    whole, recorder, signals = make(), TrainingRecorder(), [15, None, None]
    run_fit(whole, slides, **arguments)
    with pytest.raises(Interrupted):
        run_fit(make(), slides, recorder=recorder, stop_signal=signals.pop, **arguments)
    torch.manual_seed(99)
    again = make(seed=9)
    again.restore(recorder.last[0])
    run_fit(again, slides, progress=RunProgress.from_json(recorder.last[1]), **arguments)
    assert are_equal(whole.state(), again.state())


def test_checkpoints_are_saved_after_each_epoch_and_interval(slides):
    recorder = TrainingRecorder()
    run_fit(make_learner(), slides, training=label_slides(slides), recorder=recorder, checkpoint_every_s=0.0)
    assert recorder.saves == 2 * (len(slides) + 1)
    recorder = TrainingRecorder()
    run_fit(make_learner(), slides, training=label_slides(slides), recorder=recorder)
    assert recorder.saves == 2


def test_only_training_tiles_are_augmented(slides, monkeypatch):
    learner, (train, validation) = make_learner(), split_slides(slides, 2, 1)
    trained, encoded, train_step = {}, [], learner.train_step

    def record(bag, targets, *, update, slide_id):
        trained[slide_id] = bag.content[:].clone()
        return train_step(bag, targets, update=update, slide_id=slide_id)

    learner.train_step = record
    encode = InferenceEncoder.encode
    monkeypatch.setattr(
        InferenceEncoder,
        "encode",
        lambda self, tiles, batch: encoded.append(tiles.clone()) or encode(self, tiles, batch),
    )
    augmentation, seed = Augmentation(stain_jitter=0.1), 7
    arguments = {"augmentation": augmentation, "seed": seed, "epochs": 1, "validation_tiles": 5}
    run_fit(learner, slides, training=label_slides(train), validation=label_slides(validation, "val"), **arguments)
    for slide_id, tiles in trained.items():
        plain = read_bag(slides, BagRequest("train", slide_id, 8, (seed, 0, slide_id)))
        assert torch.equal(tiles, augment(plain, augmentation, seed, 0, slide_id))
        assert not torch.equal(tiles, plain)
    (slide_id,) = validation
    assert torch.equal(encoded[0], read_bag(slides, BagRequest("train", slide_id, 5, (seed, "validation", slide_id))))


def read_bag(slides, request):
    bags = make_bags(slides)
    bags.start(iter([request]))
    return bags.read(request).content


def test_step_uses_the_mean_gradient_of_its_slides(slides):
    train = split_slides(slides, 2)[0]
    batch = make_learner(slides_per_step=2)
    run_fit(batch, slides, training=label_slides(train), epochs=1, augmentation=NO_AUGMENTATION, tiles_per_slide=None)
    manual = make_learner()
    bags = make_bags(slides)
    requests = [BagRequest("train", name, None, ()) for name in train]
    bags.start(iter(requests))
    manual.start_epoch(0)
    for request, slide in zip(requests, label_slides(train), strict=True):
        manual.train_step(
            bags.read(request), encode_labels(list(slide.labels.values())), update=False, slide_id=request.slide_id
        )
    assert len(manual._pending) == 2
    manual.apply_pending()
    for name, weight in manual.weights().items():
        torch.testing.assert_close(weight, batch.weights()[name], rtol=0, atol=1e-5)


def test_learning_rates_follow_the_schedule(slides):
    learner = make_learner(rate=1e-3, schedule=LearningRateSchedule(2, 2), encoder_lr_min=1e-5)
    history = run_fit(learner, slides, training=label_slides(slides), epochs=4).history
    assert [row["encoder_lr"] for row in history] == pytest.approx([1e-3, 5.05e-4, 1e-3, 8.5502e-4], rel=1e-4)
    assert [row["aggregator_lr"] for row in history] == pytest.approx([1e-2, 5e-3, 1e-2, 8.5355e-3], rel=1e-4)


def test_gradient_clipping_limits_the_update(slides):
    unclipped, clipped = make_learner(), make_learner(clip_norm=1e-12)
    run_fit(unclipped, slides, training=label_slides(slides), epochs=1)
    start = make_learner().weights()
    run_fit(clipped, slides, training=label_slides(slides), epochs=1)
    changes = [sum(float((w[n] - start[n]).norm()) for n in start) for w in (clipped.weights(), unclipped.weights())]
    assert changes[0] < 0.2 * changes[1], "the clipped gradients are smaller than Adam's epsilon"


def test_patience_stops_the_run_and_ties_keep_the_earlier_epoch(slides):
    train, validation = split_slides(slides, 4, 2)
    recorder = TrainingRecorder()
    constant = make_learner(encoder_lr=0.0, aggregator_lr=0.0)
    progress = run_fit(
        constant,
        slides,
        training=label_slides(train),
        validation=label_slides(validation, "val"),
        recorder=recorder,
        epochs=9,
        patience=3,
    )
    assert progress.best_epoch == 0
    assert recorder.best[1] == 0
    assert progress.stopped_early
    assert [row["epoch"] for row in progress.history] == [1, 2, 3, 4]


def test_validation_uses_the_same_tiles_in_every_epoch(slides):
    train, validation = split_slides(slides, 4, 2)
    constant = make_learner(encoder_lr=0.0, aggregator_lr=0.0)
    history = run_fit(
        constant,
        slides,
        training=label_slides(train),
        validation=label_slides(validation, "val"),
        validation_tiles=5,
        epochs=3,
    ).history
    assert len({row["val_loss"] for row in history}) == 1
    assert len({row["loss_agg"] for row in history}) == 3, "training samples other tiles"


def test_loss_selects_the_epoch_without_a_validation_auc(slides):
    train, validation = split_slides(slides, 4, 2)
    history = run_fit(
        make_learner(),
        slides,
        training=label_slides(train),
        validation=label_slides(validation, "val", labels=[1, 1]),
    ).history
    assert history[0]["val_macro_auc"] is None
    assert history[0]["val_undefined"] == {"target": "no negative slide among 2"}
    assert history[0]["score"] == -history[0]["val_loss"]


def test_last_epoch_is_selected_without_validation_slides(slides):
    recorder = TrainingRecorder()
    progress = run_fit(make_learner(), slides, training=label_slides(slides), recorder=recorder, epochs=3)
    assert progress.best_epoch == recorder.best[1] == 2


def test_patient_unit_counts_each_patient_once(slides):
    train, validation = split_slides(slides, 2, 4)
    by_patient = label_slides(validation, "val", labels=[0, 1, 0, 1], patients=["a", "b", "a", "b"])
    history = run_fit(
        make_learner(), slides, training=label_slides(train), validation=by_patient, unit="patient"
    ).history
    assert history[0]["val_macro_auc"] in (0.0, 0.5, 1.0), "two patients"


def test_unreadable_slide_stops_the_run_unless_failures_are_allowed(tmp_path):
    slides = write_slides(tmp_path, 4)
    (tmp_path / "s02.svs").write_bytes(b"not a slide")
    recorder = TrainingRecorder()
    with pytest.raises(SlidesFailedError, match="s02") as stopped:
        run_fit(make_learner(), slides, training=label_slides(slides), recorder=recorder)
    assert "allow_failures to 1" in stopped.value.hint
    assert recorder.last is not None, "a checkpoint was saved"

    recorder = TrainingRecorder()
    progress = run_fit(make_learner(), slides, training=label_slides(slides), recorder=recorder, allow_failures=1)
    assert [name for name, _ in recorder.failures] == ["s02"]
    assert [row["slides"] for row in progress.history] == [3, 3]
    others = {name: slide for name, slide in slides.items() if name != "s02"}
    order = [slide.slide_id for slide in label_slides(others)]
    assert set(progress.failed) == set(slides) - set(order)


def test_gradients_of_other_slides_are_applied_after_a_failure(tmp_path):
    slides = write_slides(tmp_path, 4)
    for name in ("s02.svs", "s03.svs"):
        (tmp_path / name).write_bytes(b"not a slide")
    learner = make_learner(slides_per_step=4)
    before = {name: weight.clone() for name, weight in learner.weights().items()}
    run_fit(learner, slides, training=label_slides(slides), allow_failures=2, epochs=1)
    assert not are_equal(before, learner.weights())
    assert len(learner._pending) == 0


def test_slide_fails_if_more_than_5_percent_of_its_tiles_are_unreadable(tmp_path):
    slides = write_slides(tmp_path, 3)
    damage(tmp_path / "s01.svs", [15])  # the corner: one tile of 25 is 4%
    damage(tmp_path / "s02.svs", [0])  # two by two tiles: 16%
    recorder = TrainingRecorder()
    progress = run_fit(
        make_learner(), slides, training=label_slides(slides), tiles_per_slide=None, allow_failures=1, recorder=recorder
    )
    assert [name for name, _ in recorder.failures] == ["s02"]
    assert "4 of its 25 tiles cannot be read" in recorder.failures[0][1]
    assert progress.skipped["s01"].tiles == [24]
    assert progress.history[0]["tiles"] == 25 + 24
    assert progress.history[0]["tiles_failed"] == 1 + 4


def test_one_unreadable_tile_in_a_small_sample_does_not_fail_the_slide(tmp_path):
    slides = write_slides(tmp_path, 2)
    damage(tmp_path / "s01.svs", [15])
    progress = run_fit(make_learner(), slides, training=label_slides(slides), tiles_per_slide=5, epochs=8, seed=1)
    assert progress.skipped["s01"].tiles == [24]
    assert not progress.failed
    assert sum(row["tiles_failed"] for row in progress.history) >= 1


def test_unreadable_tiles_are_counted_over_all_epochs(tmp_path):
    slides = write_slides(tmp_path, 2)
    damage(tmp_path / "s01.svs", [15, 12])  # the lower corners: 3 tiles of 25
    settings = {"tiles_per_slide": 3, "epochs": 8, "allow_failures": 1, "seed": 1}
    progress = run_fit(make_learner(), slides, training=label_slides(slides), **settings)
    assert "2 of its 25 tiles cannot be read" in progress.failed["s01"]
    # with this seed, the first is sampled in the fifth epoch and the second in the sixth
    assert [row["slides"] for row in progress.history] == [2, 2, 2, 2, 2, 1, 1, 1]


def test_failed_slide_is_used_again_when_it_is_readable(tmp_path):
    slides = write_slides(tmp_path, 3)
    moved = (tmp_path / "s02.svs").rename(tmp_path / "moved.svs")

    class RestoreAfterEpoch1(TrainingRecorder):
        def on_epoch_end(self, row, *, best):
            super().on_epoch_end(row, best=best)
            if row["epoch"] == 1:
                moved.rename(tmp_path / "s02.svs")

    progress = run_fit(
        make_learner(), slides, training=label_slides(slides), recorder=RestoreAfterEpoch1(), epochs=3, allow_failures=1
    )
    assert [row["slides"] for row in progress.history] == [2, 3, 3]
    assert progress.failed == {}


def test_order_of_the_table_does_not_matter(slides):
    train, validation = (label_slides(part) for part in split_slides(slides, 4, 2))
    histories = [
        without_timings(run_fit(make_learner(), slides, training=each, validation=held_out).history)
        for each, held_out in ((train, validation), (train[::-1], validation[::-1]))
    ]
    assert histories[0] == histories[1]


def test_failures_are_kept_after_a_resume(tmp_path):
    slides = write_slides(tmp_path, 4)
    (tmp_path / "s01.svs").write_bytes(b"not a slide")
    arguments = {"training": label_slides(slides), "allow_failures": 1, "epochs": 1}
    whole = run_fit(make_learner(), slides, **arguments)
    for stop_after in range(3):
        recorder, signals = TrainingRecorder(), [15] + [None] * stop_after
        with pytest.raises(Interrupted):
            run_fit(make_learner(), slides, recorder=recorder, stop_signal=signals.pop, **arguments)
        learner = make_learner(seed=4)
        learner.restore(recorder.last[0])
        again = run_fit(learner, slides, progress=RunProgress.from_json(recorder.last[1]), **arguments)
        assert again.failed == whole.failed
        assert without_timings(again.history) == without_timings(whole.history)


def test_interrupted_validation_is_not_counted_twice(tmp_path):
    slides = write_slides(tmp_path, 4)
    damage(tmp_path / "s02.svs", [15])
    train, validation = split_slides(slides, 2, 2)
    arguments = {"training": label_slides(train), "validation": label_slides(validation, "val"), "epochs": 1}
    whole = run_fit(make_learner(), slides, **arguments)
    recorder, signals = TrainingRecorder(), [15, None, None]  # two steps and one validation slide
    with pytest.raises(Interrupted):
        run_fit(make_learner(), slides, recorder=recorder, stop_signal=signals.pop, **arguments)
    assert recorder.last[1]["position"] == 2
    learner = make_learner(seed=4)
    learner.restore(recorder.last[0])
    again = run_fit(learner, slides, progress=RunProgress.from_json(recorder.last[1]), **arguments)
    assert without_timings(again.history) == without_timings(whole.history)
    assert whole.history[0]["tiles_failed"] == 1


def test_selection_rule_does_not_change_during_a_run(tmp_path):
    slides = write_slides(tmp_path, 4)
    train, validation = split_slides(slides, 2, 2)

    class DeleteSlide(TrainingRecorder):
        def on_epoch_end(self, row, *, best):
            super().on_epoch_end(row, best=best)
            (tmp_path / "s03.svs").unlink(missing_ok=True)  # the only positive slide

    progress = run_fit(
        make_learner(),
        slides,
        training=label_slides(train),
        validation=label_slides(validation, "val"),
        recorder=DeleteSlide(),
        epochs=6,
        patience=2,
        allow_failures=1,
    )
    assert progress.selected_by == "auc"
    assert [row["score"] for row in progress.history[1:]] == [None, None]
    assert progress.best_epoch == 0
    assert progress.stopped_early


@pytest.mark.parametrize("slides_per_step", [1, 2])
def test_error_names_the_step_that_is_not_finite(slides, slides_per_step):
    recorder, learner = TrainingRecorder(), make_learner(slides_per_step=slides_per_step)
    trained, train_step = [], learner.train_step

    def fail_at_step_2(bag, targets, *, update, slide_id):
        trained.append(slide_id)
        report = train_step(bag, targets, update=update, slide_id=slide_id)
        finite = report.checks.finite.clone()
        finite[0] = len(trained) != 3
        return report._replace(checks=report.checks._replace(finite=finite))

    learner.train_step = fail_at_step_2
    with pytest.raises(NonFiniteError, match="step 2: the aggregator loss is not finite") as stopped:
        run_fit(learner, slides, training=label_slides(slides), recorder=recorder)
    assert len(trained) == 4, "reports are read one step later"
    assert f"'{trained[2]}'" in stopped.value.message
    assert recorder.saves == 0

    trained.clear()
    with pytest.raises(NonFiniteError, match="step 2"):
        run_fit(learner, slides, training=label_slides(slides), recorder=recorder, checkpoint_every_s=0.0)
    assert recorder.last[1]["position"] == 2, "a checkpoint contains only steps that were read"
    assert recorder.last[1]["sums"]["slides"] == 2


def test_error_names_the_slide_with_non_finite_logits(slides):
    _, validation = split_slides(slides, 4, 2)
    learner = make_learner(encoder_lr=0.0, aggregator_lr=0.0)
    with torch.no_grad():
        learner.model.aggregator.classifier.weight.fill_(3e38)
    arguments = {"training": label_slides({}), "validation": label_slides(validation, "val")}
    with pytest.raises(NonFiniteError, match="Slide 's04'"):
        run_fit(learner, slides, **arguments)


def test_training_with_stored_features_updates_only_the_aggregator(tmp_path, slides):
    rng = np.random.default_rng(0)
    files = {}
    for i, (name, slide) in enumerate(slides.items()):
        features = rng.normal(i % 2, 1.0, (25, 6)).astype(np.float32)
        files[name] = tmp_path / f"{name}.h5"
        write_features(files[name], SlideFeatures(name, features), slide.tiles, attributes={})
    torch.manual_seed(0)
    model = SlideModel(None, Abmil(6, hidden=8, attention=4), BinaryTask.from_training_labels("target", [0, 1]))
    learner = Learner(model, AdaptationSettings(), OptimiserSettings(aggregator_lr=1e-2))
    bags = FeatureBags(files, device=torch.device("cpu"), prefetch_bytes=2**30)
    recorder = TrainingRecorder()
    train, validation = split_slides(slides, 4, 2)
    progress = fit(
        learner,
        bags,
        label_slides(train),
        label_slides(validation, "val"),
        TrainingSettings(epochs=15),
        recorder,
        recorder,
    )
    assert progress.history[-1]["loss_agg"] < 0.7 * progress.history[0]["loss_agg"]
    assert progress.history[-1]["val_macro_auc"] == 1.0
    assert progress.history[0]["encoder_lr"] == 0.0
    assert all(name.startswith(("aggregator/", "moments/aggregator/", "random/")) for name in learner.state())
