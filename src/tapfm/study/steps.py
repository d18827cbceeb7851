"""The commands of a study, each with what it needs before and how to tell that it is done."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from tapfm.cohort.manifest import read_cohort
from tapfm.config.settings import RunConfig
from tapfm.config.study import SlidesSection, StudyConfig
from tapfm.encoders.features import feature_file
from tapfm.runs.ensemble import write_ensemble
from tapfm.runtime.files import sha256_of
from tapfm.runtime.steps import Step
from tapfm.study.folder import StudyFolder
from tapfm.study.plan import StudyPlan
from tapfm.study.runs import PlannedRun, methods_of

EVALUATED = "metrics.json"  # the last file that `tapfm evaluate` writes


def study_steps(study: StudyConfig, folder: StudyFolder, plan: StudyPlan) -> list[Step]:
    """List the steps of the planned runs, in an order in which they can run."""
    steps: list[Step] = []
    cohorts = {"test": study.cohort} | ({"external": study.external} if study.external is not None else {})
    for run in plan.runs:
        if run.name in plan.problems:
            steps.append(_impossible(folder, run, plan.problems[run.name]))
            continue
        config = plan.configs[run.name]
        features: dict[str, tuple[str, ...]] = {}
        if run.method.regime == "fixed":
            for cohort, slides in cohorts.items():
                embedding = _embed(folder, run, config, cohort, slides)
                features[cohort] = (embedding.key,)
                if embedding.key not in [step.key for step in steps]:
                    steps.append(embedding)
        training = _train(folder, run, config, features.get("test", ()))
        steps.append(training)
        for cohort, slides in cohorts.items():
            if cohort == "test" or run.fold is None:  # the ensemble of all folds is evaluated on external slides
                needs = (training.key, *features.get(cohort, ()))
                steps.append(_evaluate(study, folder, run, config, cohort, slides, needs))
        if study.report == "forgetting" and study.probe is not None and run.method.regime != "fixed":
            steps.append(_probe(study, folder, run, config, training.key))
    if study.folds and study.external is not None:
        steps += _evaluate_ensembles(study, folder, plan.runs, plan.configs, study.external)
    return steps


def finished_steps(steps: Sequence[Step]) -> set[str]:
    """Return the keys of finished steps; features count as stored where no step will read them again."""
    done = {step.key for step in steps if step.done()}
    return done | {
        step.key
        for step in steps
        if step.name == "embed" and all(each.key in done for each in steps if step.key in each.needs)
    }


def _impossible(folder: StudyFolder, run: PlannedRun, problem: str) -> Step:
    words = ("config", str(folder.config(run)))
    return Step("train", words, folder.log(run.name), run.name, is_done=lambda: False, problem=problem)


def _train(folder: StudyFolder, run: PlannedRun, config: RunConfig, needs: tuple[str, ...]) -> Step:
    out = folder.run(run)
    return Step(
        "train",
        ("train", str(folder.config(run)), "--out", str(out), "--resume"),
        folder.log(run.name),
        run.name,
        is_done=lambda: folder.finished(run, config.machine.allow_failures),
        needs=needs,
        history=out / "history.jsonl",
        epochs=config.schedule.epochs,
    )


def _embed(folder: StudyFolder, run: PlannedRun, config: RunConfig, cohort: str, slides: SlidesSection) -> Step:
    """Store the features of an encoder once for all runs."""
    out = folder.features(run.method.encoder, cohort)
    words = ["embed", str(slides.table), "--encoder", run.method.encoder, "--tiles", str(slides.tiles)]
    words += ["--out", str(out), "--precision", config.adaptation.precision]
    words += ["--weights", str(config.encoder.weights)] if config.encoder.weights is not None else []
    words += _slides_option(slides)
    words += _machine_options(config)
    return Step(
        "embed",
        tuple(words),
        folder.log(f"features/{out.name}"),
        _features_group(run.method.encoder, cohort),
        is_done=lambda: _all_stored(slides, out, config.machine.allow_failures),
    )


def _features_group(encoder: str, cohort: str) -> str:
    return f"features of {encoder}{', external' if cohort == 'external' else ''}"


def _all_stored(slides: SlidesSection, folder: Path, allowed: int) -> bool:
    """Return whether at most `allowed` slides are without features."""
    rows = read_cohort(slides.table, slides.slides, must_exist=False).rows
    return sum(feature_file(folder, row.slide_id) is None for row in rows) <= allowed and folder.is_dir()


def _evaluate(
    study: StudyConfig,
    folder: StudyFolder,
    run: PlannedRun,
    config: RunConfig,
    cohort: str,
    slides: SlidesSection,
    needs: tuple[str, ...],
) -> Step:
    out = folder.evaluation(run, cohort)
    words = ["evaluate", str(folder.run(run)), "--out", str(out)]
    if cohort == "external":
        words += _external_options(slides)
        if run.method.regime == "fixed":
            words += ["--features", str(folder.features(run.method.encoder, cohort))]
    words += _evaluation_options(study, folder, config)
    return Step(
        f"evaluate {cohort}",
        tuple(words),
        folder.log(f"{run.name}-{cohort}"),
        run.name,
        is_done=lambda: is_evaluated(out, study, slides),
        needs=needs,
    )


def is_evaluated(folder: Path, study: StudyConfig, slides: SlidesSection) -> bool:
    """Return whether an evaluation exists, of the present table and with the study's present settings."""
    try:
        found = json.loads((folder / EVALUATED).read_text("utf-8"))
        about, failed = found["evaluation"], len(found["failed"])
    except (OSError, ValueError, KeyError, TypeError):
        return False
    expected = {"unit": study.unit, "resamples": study.resamples, "table_sha256": sha256_of(slides.table)}
    return failed <= study.allow_failures and all(about.get(name) == value for name, value in expected.items())


def _evaluate_ensembles(
    study: StudyConfig,
    folder: StudyFolder,
    runs: Sequence[PlannedRun],
    configs: Mapping[str, RunConfig],
    external: SlidesSection,
) -> list[Step]:
    """Evaluate the folds of each method together on external slides."""
    steps = []
    for method, seed in dict.fromkeys((run.method, run.seed) for run in runs if run.name in configs):
        members = [PlannedRun(method, seed, fold) for fold in study.folds]
        if any(member.name not in configs for member in members):
            continue  # listed as a failed run
        out, ensemble = folder.ensemble_evaluation(method, seed), folder.ensemble(method, seed)
        words = ["evaluate", str(ensemble), "--out", str(out), *_external_options(external)]
        needs = [f"{member.name}: train" for member in members]
        if method.regime == "fixed":
            words += ["--features", str(folder.features(method.encoder, "external"))]
            needs.append(f"{_features_group(method.encoder, 'external')}: embed")
        words += _evaluation_options(study, folder, configs[members[0].name])
        steps.append(
            Step(
                "evaluate external",
                tuple(words),
                folder.log(f"{method.name}/ensemble-seed{seed}"),
                f"{method.name}/ensemble-seed{seed}",
                is_done=partial(is_evaluated, out, study, external),
                needs=tuple(needs),
                before=partial(_write_folds, folder, ensemble, members),
            )
        )
    return steps


def _write_folds(folder: StudyFolder, ensemble: Path, members: Sequence[PlannedRun]) -> None:
    write_ensemble(ensemble, [folder.run(member) for member in members], "folds")


def write_ensembles(study: StudyConfig, folder: StudyFolder) -> None:
    """Write the ensembles of all methods whose folds are finished."""
    for method in methods_of(study) if study.folds else []:
        for seed in study.seeds:
            members = [PlannedRun(method, seed, fold) for fold in study.folds]
            if all(folder.finished(member, study.allow_failures) for member in members):
                _write_folds(folder, folder.ensemble(method, seed), members)


def _probe(study: StudyConfig, folder: StudyFolder, run: PlannedRun, config: RunConfig, needs: str) -> Step:
    assert study.probe is not None
    out = folder.probe(run)
    words = ["probe", str(folder.run(run)), "--tiles", str(study.probe.tiles), "--out", str(out)]
    words += ["--seed", str(study.probe.seed), "--device", config.machine.device]
    return Step("probe", tuple(words), folder.log(f"{run.name}-probe"), run.name, files=(out,), needs=(needs,))


def _external_options(slides: SlidesSection) -> list[str]:
    return ["--cohort", str(slides.table), "--tiles", str(slides.tiles), *_slides_option(slides)]


def _evaluation_options(study: StudyConfig, folder: StudyFolder, config: RunConfig) -> list[str]:
    words = ["--unit", study.unit, "--resamples", str(study.resamples), "--colours", str(folder.colours), "--resume"]
    return words + _machine_options(config)


def _machine_options(config: RunConfig) -> list[str]:
    machine = config.machine
    words = ["--device", machine.device, "--allow-failures", str(machine.allow_failures)]
    return words + ([] if machine.workers == "auto" else ["--workers", str(machine.workers)])


def _slides_option(slides: SlidesSection) -> list[str]:
    return [] if slides.slides is None else ["--slides", str(slides.slides)]
