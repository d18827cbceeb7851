"""Steps of a study: the commands to run, their dependencies, and checks of their output."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from tapfm.cohort.cohort_table import read_cohort
from tapfm.config.settings import RunConfig
from tapfm.config.study import SlidesSection, StudyConfig
from tapfm.encoders.features import find_feature_file
from tapfm.runs.ensemble import write_ensemble
from tapfm.runtime.files import digest_files
from tapfm.runtime.steps import Step
from tapfm.study.folder import StudyFolder
from tapfm.study.runs import PlannedRun, StudyModel, list_fold_runs, list_models
from tapfm.study.study_plan import StudyPlan

METRICS_FILE = "metrics.json"  # the last file that `tapfm evaluate` writes


def list_study_steps(study: StudyConfig, folder: StudyFolder, plan: StudyPlan) -> list[Step]:
    """Return the steps of the planned runs. Each step comes after the steps that it needs."""
    builder = _StepBuilder(study, folder, plan)
    steps = [step for run in plan.runs for step in builder.list_run_steps(run)]
    if study.folds and study.external is not None:
        steps += builder.list_ensemble_steps(study.external)
    unique: dict[str, Step] = {}  # several runs need the features of the same encoder
    for step in steps:
        unique.setdefault(step.key, step)
    return list(unique.values())


def find_finished_steps(steps: Sequence[Step]) -> set[str]:
    """Return the keys of finished steps. `embed` also counts as finished if all steps that need it are finished."""
    done = {step.key for step in steps if step.is_done()}
    return done | {
        step.key
        for step in steps
        if step.name == "embed" and all(each.key in done for each in steps if step.key in each.needs)
    }


@dataclass(frozen=True)
class _StepBuilder:
    """Builds the steps of a study from its settings."""

    study: StudyConfig
    folder: StudyFolder
    plan: StudyPlan

    def list_run_steps(self, run: PlannedRun) -> Iterator[Step]:
        """Yield the steps of one run. If its encoder is frozen, they include storing its features."""
        study, folder = self.study, self.folder
        if problem := self.plan.problems.get(run.name):
            show_config = ("config", str(folder.config(run)))
            yield Step(
                "train", show_config, folder.log(run.name), run.name, check_done=lambda: False, config_error=problem
            )
            return
        config = self.plan.configs[run.name]
        cohorts = {"test": study.cohort} | ({"external": study.external} if study.external is not None else {})
        features: dict[str, tuple[str, ...]] = {}
        if run.model.method == "fixed":
            for cohort, slides in cohorts.items():
                embedding = self._embed_step(run.model.encoder, config, cohort, slides)
                features[cohort] = (embedding.key,)
                yield embedding
        training = self._train_step(run, config, features.get("test", ()))
        yield training
        for cohort, slides in cohorts.items():
            if cohort == "test" or run.fold is None:  # with folds, the ensemble is evaluated on external slides
                yield self._evaluate_step(run, config, cohort, slides, (training.key, *features.get(cohort, ())))
        if study.report == "forgetting" and study.probe is not None and run.model.method != "fixed":
            out = folder.probe(run)
            options = ["--tiles", str(study.probe.tiles), "--out", str(out), "--seed", str(study.probe.seed)]
            arguments = ("probe", str(folder.run(run)), *options, "--device", config.machine.device)
            log = folder.log(f"{run.name}-probe")
            yield Step("probe", arguments, log, run.name, expected_outputs=(out,), needs=(training.key,))

    def _train_step(self, run: PlannedRun, config: RunConfig, needs: tuple[str, ...]) -> Step:
        out = self.folder.run(run)
        return Step(
            "train",
            ("train", str(self.folder.config(run)), "--out", str(out), "--resume"),
            self.folder.log(run.name),
            run.name,
            check_done=lambda: self.folder.is_finished(run, config.machine.allow_failures),
            needs=needs,
            history_file=out / "history.jsonl",
            epochs=config.schedule.epochs,
        )

    def _embed_step(self, encoder: str, config: RunConfig, cohort: str, slides: SlidesSection) -> Step:
        """Return the step that stores the features of an encoder for all runs."""
        out = self.folder.features(encoder, cohort)
        arguments = ["embed", str(slides.table), "--encoder", encoder, "--tiles", str(slides.tiles), "--out", str(out)]
        arguments += ["--precision", config.adaptation.precision]
        arguments += ["--weights", str(config.encoder.weights)] if config.encoder.weights is not None else []
        arguments += _table_options(slides) + _machine_options(config)
        group, log = _embed_step_group(encoder, cohort), self.folder.log(f"features/{out.name}")
        check_done = partial(_has_all_features, slides, out, config.machine.allow_failures)
        return Step("embed", tuple(arguments), log, group, check_done=check_done)

    def _evaluate_step(
        self, run: PlannedRun, config: RunConfig, cohort: str, slides: SlidesSection, needs: tuple[str, ...]
    ) -> Step:
        out = self.folder.evaluation(run, cohort)
        arguments = ["evaluate", str(self.folder.run(run)), "--out", str(out)]
        arguments += self._external_options(run.model, slides) if cohort == "external" else []
        arguments += self._evaluation_options(config)
        log, check_done = self.folder.log(f"{run.name}-{cohort}"), partial(is_evaluated, out, self.study, slides)
        return Step(f"evaluate {cohort}", tuple(arguments), log, run.name, check_done=check_done, needs=needs)

    def list_ensemble_steps(self, external: SlidesSection) -> Iterator[Step]:
        """Yield the steps that evaluate the ensembles of folds on external slides."""
        folder, configs = self.folder, self.plan.configs
        for model, seed in dict.fromkeys((run.model, run.seed) for run in self.plan.runs):
            members = list_fold_runs(self.study, model, seed)
            if any(member.name not in configs for member in members):
                continue  # a fold has invalid settings and is reported as failed, or --only excludes it
            out, ensemble = folder.ensemble_evaluation(model, seed), folder.ensemble(model, seed)
            arguments = ["evaluate", str(ensemble), "--out", str(out), *self._external_options(model, external)]
            arguments += self._evaluation_options(configs[members[0].name])
            needs = [f"{member.name}: train" for member in members]
            needs += [f"{_embed_step_group(model.encoder, 'external')}: embed"] if model.method == "fixed" else []
            name = f"{model.name}/ensemble-seed{seed}"
            yield Step(
                "evaluate external",
                tuple(arguments),
                folder.log(name),
                name,
                check_done=partial(is_evaluated, out, self.study, external),
                needs=tuple(needs),
                prepare=partial(_write_fold_ensemble, folder, ensemble, members),
            )

    def _external_options(self, model: StudyModel, slides: SlidesSection) -> list[str]:
        arguments = ["--cohort", str(slides.table), "--tiles", str(slides.tiles), *_table_options(slides)]
        arguments += ["--patient-column", slides.patient_column] if slides.patient_column else []
        arguments += ["--slides-are-patients"] * slides.slides_are_patients
        arguments += [] if slides.clini is None else ["--clini", str(slides.clini)]
        features = str(self.folder.features(model.encoder, "external"))
        return [*arguments, "--features", features] if model.method == "fixed" else arguments

    def _evaluation_options(self, config: RunConfig) -> list[str]:
        arguments = ["--unit", self.study.unit, "--resamples", str(self.study.resamples)]
        return [*arguments, "--colours", str(self.folder.colours), "--resume", *_machine_options(config)]


def is_evaluated(evaluation_folder: Path, study: StudyConfig, slides: SlidesSection) -> bool:
    """Return whether an evaluation has results for the current cohort table and settings of the study."""
    try:
        metrics = json.loads((evaluation_folder / METRICS_FILE).read_text("utf-8"))
        evaluation, failed = metrics["evaluation"], len(metrics["failed"])
    except (OSError, ValueError, KeyError, TypeError):
        return False
    expected = {
        "unit": study.unit,
        "resamples": study.resamples,
        "table_sha256": digest_files(slides.table, slides.clini),
    }
    return failed <= study.allowed_failures and all(evaluation.get(name) == value for name, value in expected.items())


def write_fold_ensembles(study: StudyConfig, folder: StudyFolder) -> None:
    """Write the ensemble of each model whose folds are all finished."""
    for model in list_models(study) if study.folds else []:
        for seed in study.seeds:
            members = list_fold_runs(study, model, seed)
            if all(folder.is_finished(member, study.allowed_failures) for member in members):
                _write_fold_ensemble(folder, folder.ensemble(model, seed), members)


def _write_fold_ensemble(folder: StudyFolder, ensemble: Path, members: Sequence[PlannedRun]) -> None:
    write_ensemble(ensemble, [folder.run(member) for member in members], "folds")


def _embed_step_group(encoder: str, cohort: str) -> str:
    """Return the group of the step that stores the features of an encoder for a cohort."""
    return f"features of {encoder}{', external' if cohort == 'external' else ''}"


def _has_all_features(slides: SlidesSection, folder: Path, allowed_failures: int) -> bool:
    """Return whether the folder has features of all slides, except for at most `allowed_failures`."""
    rows = read_cohort(slides.table, slides.table_options).rows
    missing = sum(find_feature_file(folder, row.slide_id) is None for row in rows)
    return missing <= allowed_failures and folder.is_dir()


def _machine_options(config: RunConfig) -> list[str]:
    machine = config.machine
    arguments = ["--device", machine.device, "--allow-failures", str(machine.allow_failures)]
    return arguments + ([] if machine.workers == "auto" else ["--workers", str(machine.workers)])


def _table_options(slides: SlidesSection) -> list[str]:
    """Return the options with which `tapfm embed` and `tapfm evaluate` read the table."""
    arguments = [] if slides.slides is None else ["--slides", str(slides.slides)]
    arguments += [] if slides.encoding is None else ["--encoding", slides.encoding]
    return [*arguments, *(part for text in slides.extra_missing_values for part in ("--missing", text))]
