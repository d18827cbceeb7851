"""What a study has to do, as a list of commands: each knows when it is done, and what it needs before."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from tapfm.cohort.manifest import read_cohort
from tapfm.config.settings import RunConfig
from tapfm.config.study import SlidesSection, StudyConfig
from tapfm.encoders.features import feature_file
from tapfm.runs.ensemble import write_ensemble
from tapfm.runtime.files import sha256_of
from tapfm.study.folder import StudyFolder
from tapfm.study.runs import PlannedRun, methods_of

EVALUATED = "metrics.json"  # what `tapfm evaluate` writes once it is through


@dataclass(frozen=True)
class Step:
    """One command. `of` is the run it belongs to, or what it prepares."""

    of: str
    what: str
    words: tuple[str, ...]
    done: Callable[[], bool]
    log: Path
    needs: tuple[str, ...] = ()  # keys of steps
    before: Callable[[], None] | None = None
    history: Path | None = None
    epochs: int = 0
    problem: str = ""  # why it cannot be begun

    @property
    def key(self) -> str:
        """Tell it from other steps."""
        return f"{self.of}: {self.what}"


def steps_of(
    study: StudyConfig,
    folder: StudyFolder,
    runs: Sequence[PlannedRun],
    configs: Mapping[str, RunConfig],
    problems: Mapping[str, str],
) -> list[Step]:
    """List all that has to be done for some runs, in an order in which it can be."""
    steps: list[Step] = []
    cohorts = {"test": study.cohort} | ({"external": study.external} if study.external is not None else {})
    for run in runs:
        if run.name in problems:
            steps.append(impossible(folder, run, problems[run.name]))
            continue
        config = configs[run.name]
        stored: dict[str, tuple[str, ...]] = {}
        if run.method.regime == "fixed":
            for cohort, slides in cohorts.items():
                embedding = embed(folder, run, config, cohort, slides)
                stored[cohort] = (embedding.key,)
                if embedding.key not in [step.key for step in steps]:
                    steps.append(embedding)
        training = train(folder, run, config, stored.get("test", ()))
        steps.append(training)
        for cohort, slides in cohorts.items():
            if cohort == "test" or run.fold is None:  # of folds the ensemble is what external slides are shown to
                needs = (training.key, *stored.get(cohort, ()))
                steps.append(evaluate(study, folder, run, config, cohort, slides, needs))
        if study.report == "forgetting" and study.probe is not None and run.method.regime != "fixed":
            steps.append(probe(study, folder, run, config, training.key))
    if study.folds and study.external is not None:
        steps += ensembles(study, folder, runs, configs, study.external)
    return steps


def impossible(folder: StudyFolder, run: PlannedRun, problem: str) -> Step:
    """Stand for a run whose settings contradict each other."""
    words = ("config", str(folder.config(run)))
    return Step(run.name, "train", words, lambda: False, folder.log(run.name), problem=problem)


def train(folder: StudyFolder, run: PlannedRun, config: RunConfig, needs: tuple[str, ...]) -> Step:
    """Train one run; one that was stopped goes on."""
    out = folder.run(run)
    return Step(
        run.name,
        "train",
        ("train", str(folder.config(run)), "--out", str(out), "--resume"),
        lambda: folder.finished(run, config.machine.allow_failures),
        folder.log(run.name),
        needs,
        history=out / "history.jsonl",
        epochs=config.schedule.epochs,
    )


def embed(folder: StudyFolder, run: PlannedRun, config: RunConfig, cohort: str, slides: SlidesSection) -> Step:
    """Store the features of an encoder once for all runs."""
    out = folder.features(run.method.encoder, cohort)
    words = ["embed", str(slides.table), "--encoder", run.method.encoder, "--tiles", str(slides.tiles)]
    words += ["--out", str(out), "--precision", config.adaptation.precision]
    words += ["--weights", str(config.encoder.weights)] if config.encoder.weights is not None else []
    words += where_slides_are(slides)
    words += on_the_machine(config)
    return Step(
        f"features of {run.method.encoder}{', external' if cohort == 'external' else ''}",
        "embed",
        tuple(words),
        lambda: all_stored(slides, out, config.machine.allow_failures),
        folder.log(f"features/{out.name}"),
    )


def all_stored(slides: SlidesSection, folder: Path, allowed: int) -> bool:
    """Say whether every slide has its features, but for as many as may fail."""
    rows = read_cohort(slides.table, slides.slides, must_exist=False).rows
    return sum(feature_file(folder, row.slide_id) is None for row in rows) <= allowed and folder.is_dir()


def evaluate(
    study: StudyConfig,
    folder: StudyFolder,
    run: PlannedRun,
    config: RunConfig,
    cohort: str,
    slides: SlidesSection,
    needs: tuple[str, ...],
) -> Step:
    """Ask what a run is worth."""
    out = folder.evaluation(run, cohort)
    words = ["evaluate", str(folder.run(run)), "--out", str(out)]
    if cohort == "external":
        words += external_words(slides)
        if run.method.regime == "fixed":
            words += ["--features", str(folder.features(run.method.encoder, cohort))]
    words += evaluation_words(study, folder, config)
    return Step(
        run.name,
        f"evaluate {cohort}",
        tuple(words),
        lambda: is_evaluated(out, study, slides),
        folder.log(f"{run.name}-{cohort}"),
        needs,
    )


def is_evaluated(folder: Path, study: StudyConfig, slides: SlidesSection) -> bool:
    """Say whether an evaluation is there, of the table as it is and in the way that is asked for now."""
    try:
        found = json.loads((folder / EVALUATED).read_text("utf-8"))
        about, failed = found["evaluation"], len(found["failed"])
    except (OSError, ValueError, KeyError, TypeError):
        return False
    asked = {"unit": study.unit, "resamples": study.resamples, "table_sha256": sha256_of(slides.table)}
    return failed <= study.allow_failures and all(about.get(name) == value for name, value in asked.items())


def ensembles(
    study: StudyConfig,
    folder: StudyFolder,
    runs: Sequence[PlannedRun],
    configs: Mapping[str, RunConfig],
    external: SlidesSection,
) -> list[Step]:
    """Show external slides to the folds of a method together."""
    steps = []
    for method, seed in dict.fromkeys((run.method, run.seed) for run in runs if run.name in configs):
        members = [PlannedRun(method, seed, fold) for fold in study.folds]
        if any(member.name not in configs for member in members):
            continue  # its run is told as failed
        out, made = folder.ensemble_evaluation(method, seed), folder.ensemble(method, seed)
        words = ["evaluate", str(made), "--out", str(out), *external_words(external)]
        needs = [f"{member.name}: train" for member in members]
        if method.regime == "fixed":
            words += ["--features", str(folder.features(method.encoder, "external"))]
            needs.append(f"features of {method.encoder}, external: embed")
        words += evaluation_words(study, folder, configs[members[0].name])
        steps.append(
            Step(
                f"{method.name}/ensemble-seed{seed}",
                "evaluate external",
                tuple(words),
                partial(is_evaluated, out, study, external),
                folder.log(f"{method.name}/ensemble-seed{seed}"),
                tuple(needs),
                before=partial(write, folder, made, members),
            )
        )
    return steps


def write(folder: StudyFolder, made: Path, members: Sequence[PlannedRun]) -> None:
    """Write an ensemble of folds."""
    write_ensemble(made, [folder.run(member) for member in members], "folds")


def write_ensembles(study: StudyConfig, folder: StudyFolder) -> None:
    """Write the ensembles of all methods whose folds are finished."""
    for method in methods_of(study) if study.folds else []:
        for seed in study.seeds:
            members = [PlannedRun(method, seed, fold) for fold in study.folds]
            if all(folder.finished(member, study.allow_failures) for member in members):
                write(folder, folder.ensemble(method, seed), members)


def probe(study: StudyConfig, folder: StudyFolder, run: PlannedRun, config: RunConfig, needs: str) -> Step:
    """Ask what an adapted encoder still knows of another task."""
    assert study.probe is not None
    out = folder.probe(run)
    words = ["probe", str(folder.run(run)), "--tiles", str(study.probe.tiles), "--out", str(out)]
    words += ["--seed", str(study.probe.seed), "--device", config.machine.device]
    return Step(run.name, "probe", tuple(words), out.is_file, folder.log(f"{run.name}-probe"), (needs,))


def external_words(slides: SlidesSection) -> list[str]:
    """Say which other slides are meant."""
    return ["--cohort", str(slides.table), "--tiles", str(slides.tiles), *where_slides_are(slides)]


def evaluation_words(study: StudyConfig, folder: StudyFolder, config: RunConfig) -> list[str]:
    """Say how all evaluations are made."""
    words = ["--unit", study.unit, "--resamples", str(study.resamples), "--colours", str(folder.colours), "--resume"]
    return words + on_the_machine(config)


def on_the_machine(config: RunConfig) -> list[str]:
    """Say where work is done, as RUN.toml does."""
    machine = config.machine
    words = ["--device", machine.device, "--allow-failures", str(machine.allow_failures)]
    return words + ([] if machine.workers == "auto" else ["--workers", str(machine.workers)])


def where_slides_are(slides: SlidesSection) -> list[str]:
    """Say where to look for slides."""
    return [] if slides.slides is None else ["--slides", str(slides.slides)]
