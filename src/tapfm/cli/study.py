"""The commands `study` and `probe`. What they need is imported when they run, so that help comes at once."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from tapfm.cli.options import Device
from tapfm.errors import InputError

if TYPE_CHECKING:
    from tapfm.config.study import StudyConfig
    from tapfm.study.from_preset import Given
    from tapfm.study.runner import Outcome


def study(
    file: Annotated[
        Path | None, typer.Argument(metavar="STUDY.toml", help="What is compared; or give a --preset.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="DIR", help="Folder of the study: runs, tables, figures.")
    ] = None,
    preset: Annotated[
        str | None,
        typer.Option(
            "--preset",
            metavar="NAME",
            help="paper-table1, paper-table2, ablation-lambda, ablation-tiles, ablation-cosine, stability, layers, "
            "forgetting; all (mini).",
        ),
    ] = None,
    scale: Annotated[
        str, typer.Option("--scale", help="full; or mini: painted slides, a tiny encoder, on any computer.")
    ] = "full",
    cohort: Annotated[
        Path | None, typer.Option("--cohort", metavar="CSV", help="With --preset: the table of slides, split.")
    ] = None,
    slides: Annotated[Path | None, typer.Option("--slides", metavar="DIR", help="Where its slides are.")] = None,
    tiles: Annotated[
        Path | None,
        typer.Option("--tiles", metavar="DIR", help="What `tapfm tile` wrote for it.", show_default="tiles"),
    ] = None,
    external: Annotated[
        Path | None, typer.Option("--external", metavar="CSV", help="An external cohort, never trained on.")
    ] = None,
    external_slides: Annotated[
        Path | None, typer.Option("--external-slides", metavar="DIR", help="Where its slides are.")
    ] = None,
    external_tiles: Annotated[
        Path | None,
        typer.Option("--external-tiles", metavar="DIR", help="Its tiles.", show_default="tiles-external"),
    ] = None,
    targets: Annotated[
        list[str] | None,
        typer.Option("--target", metavar="NAME", help="Label column; repeatable.", show_default="the paper's"),
    ] = None,
    encoders: Annotated[
        list[str] | None,
        typer.Option("--encoder", metavar="NAME", help="Repeatable: tapfm encoders.", show_default="the paper's"),
    ] = None,
    seeds: Annotated[
        list[int] | None, typer.Option("--seed", metavar="N", min=0, help="Repeatable: runs of each method.")
    ] = None,
    folds: Annotated[
        list[int] | None, typer.Option("--fold", metavar="N", min=0, help="Repeatable: columns fold_N of the table.")
    ] = None,
    probe_tiles: Annotated[
        Path | None,
        typer.Option("--probe-tiles", metavar="DIR", help="For forgetting: a folder of tiles for each class."),
    ] = None,
    write: Annotated[
        Path | None, typer.Option("--write", metavar="FILE", help="Write the preset as STUDY.toml, to edit; no run.")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the study in the folder.")] = False,
    only: Annotated[
        list[str] | None,
        typer.Option("--only", metavar="GLOB", help="Only these runs, such as 'uni/tapfm/*'; repeatable."),
    ] = None,
    listed: Annotated[bool, typer.Option("--list", help="List the runs and how far each is; nothing is done.")] = False,
    tables: Annotated[
        bool, typer.Option("--tables", help="Only make the tables again, from the runs that are finished.")
    ] = False,
    device: Annotated[
        str | None, typer.Option("--device", help="auto, cpu, cuda, cuda:1, ...", show_default="as in STUDY.toml")
    ] = None,
    workers: Annotated[
        int | None,
        typer.Option("--workers", min=0, help="Processes that read tiles.", show_default="as in STUDY.toml"),
    ] = None,
    allow_failures: Annotated[
        int | None,
        typer.Option("--allow-failures", metavar="N", min=0, help="Slides that may fail in a run or evaluation."),
    ] = None,
    jobs: Annotated[
        int,
        typer.Option("--jobs", metavar="N", min=1, help="Runs side by side: for small encoders without a GPU."),
    ] = 1,
) -> None:
    """Compare encoders, regimes and aggregators: every run, every evaluation, and the paper's tables.

    \b
    tapfm study --preset paper-table1 --write study.toml     a file to edit
    tapfm study study.toml --list                            what would be run
    tapfm study study.toml --out studies/first               hours to weeks
    tapfm study study.toml --out studies/first --resume      after Ctrl-C, ...
    tapfm study --preset layers --scale mini --out mini      on painted slides

    Each run is a process of its own. One that is finished is kept, one that was
    stopped goes on, one that fails is told and the others go on. The tables are
    made of what is finished.

    \b
    study.md                            all tables on a page, and what failed
    table_binary.*, table_multilabel.*  AUC, intervals, p; md, csv, tex
    costs.*, curves.png                 best epoch, seconds, memory; curves
    ablation.*, stability.*, forgetting.*   where the study asks for it
    status.csv, logs/                   each step, and what to type again
    runs/, evaluations/, ensembles/     each can be used on its own

    Exit code 3 when something failed, 130 after Ctrl-C, 143 after SIGTERM.
    """
    from tapfm.study.from_preset import Given, preset_text, presets_named

    given = Given(
        cohort,
        slides,
        tiles,
        external,
        external_slides,
        external_tiles,
        probe_tiles,
        tuple(targets or ()),
        tuple(encoders or ()),
        tuple(seeds or ()),
        tuple(folds or ()),
    )
    if scale not in ("full", "mini"):
        raise InputError(f"--scale is {scale}.", hint="It is full or mini.")
    mini = scale == "mini"
    if file is None and preset is None and not (tables and out is not None):
        raise InputError("There is nothing to study.", hint="Give STUDY.toml, or --preset NAME: tapfm study --help")
    if file is not None and (preset is not None or mini or given != Given()):
        raise InputError(
            f"{file} says what is studied; --preset, --scale and options about slides make another study.",
            hint="Change the file instead.",
        )
    if mini and (extra := given.slides_named() + ["--target"] * bool(targets) + ["--encoder"] * bool(encoders)):
        raise InputError(f"--scale mini has slides and an encoder of its own: no {', '.join(extra)}.")
    messages = Console(stderr=True, highlight=False)
    if write is not None:
        if preset is None or mini:
            raise InputError("--write writes a preset.", hint="For example: --preset paper-table1 --write study.toml")
        write_preset(write, preset_text(presets_named(preset, mini=False)[0], given, write), messages)
        return
    if out is None and not listed:
        raise InputError("Where should the study go?", hint="Give a folder: --out studies/first")
    if out is not None and out.is_file():
        raise InputError(f"{out} is a file.", hint="Give a folder to --out.")
    studies = studies_of(file, preset, given, mini=mini, out=out)
    machine = {"device": device, "workers": workers, "allow_failures": allow_failures}
    if any(value is not None for value in machine.values()):
        from tapfm.study.runner import with_machine

        studies = {place: with_machine(each, **machine) for place, each in studies.items()}
    if listed:
        for place, each in studies.items():
            if len(studies) > 1:
                typer.echo(f"{each.name}:")
            list_runs(each, place, only or [], known=out is not None)
        return
    if tables:
        for place, each in studies.items():
            make_tables(each, place, messages)
        return
    assert out is not None
    if mini:
        prepare_mini(preset or "", studies, out, resume=resume, messages=messages)
    go_on = None
    if preset == "all":
        from tapfm.runtime.messages import command

        go_on = command("study", "--preset", "all", "--scale", "mini", "--out", out, "--resume")
    codes = [
        run_study(each, place, resume=resume, only=only or [], go_on=go_on, messages=messages, jobs=jobs)
        for place, each in studies.items()
    ]
    if any(codes):
        raise typer.Exit(max(codes))


def write_preset(path: Path, text: str, messages: Console) -> None:
    """Write STUDY.toml where there is none."""
    from tapfm.runtime.files import write_atomically
    from tapfm.runtime.messages import command

    if path.exists():
        raise InputError(f"{path} is there already.", hint="Give another name to --write, or remove it first.")
    try:
        write_atomically(path, text.encode())
    except OSError as error:
        raise InputError(f"{path} cannot be written ({error.strerror}).", hint="Give another file.") from error
    following = command("study", path, "--list")
    messages.print(f"Written: {path}. Next: {following}", markup=False, soft_wrap=True)


def studies_of(
    file: Path | None, preset: str | None, given: Given, *, mini: bool, out: Path | None
) -> dict[Path, StudyConfig]:
    """Find the studies that are meant, by their folders."""
    from tapfm.config.study import load_study
    from tapfm.study.folder import StudyFolder
    from tapfm.study.from_preset import mini_study, preset_study, presets_named

    folder = out or Path("STUDY")
    if preset is None:
        source = file or StudyFolder(folder).study
        return {folder: load_study(source)}
    names = presets_named(preset, mini=mini)
    if not mini:
        return {folder: preset_study(names[0], given)}
    places = {name: folder / name if preset == "all" else folder for name in names}
    return {place: mini_study(name, folder, given.seeds) for name, place in places.items()}


def prepare_mini(preset: str, studies: dict[Path, StudyConfig], out: Path, *, resume: bool, messages: Console) -> None:
    """Paint slides for a small study, and say what it is."""
    from tapfm.errors import RunError
    from tapfm.study import mini as study_mini
    from tapfm.study.from_preset import presets_named
    from tapfm.study.presets import PRESETS

    if not resume and any((place / "study.toml").exists() for place in studies):
        raise RunError(f"{out} holds a study.", hint="Go on with it: the same command with --resume")
    names = presets_named(preset, mini=True)
    for name, each in zip(names, studies.values(), strict=True):
        messages.print(f"{name}: {each.notes[1]}", markup=False, soft_wrap=True)
    messages.print("It shows that the machinery works, not which method is better.", markup=False)
    tasks = list(dict.fromkeys(PRESETS[name].painted for name in names))
    outcome = study_mini.prepare(out, tasks, console=messages)
    if outcome.stopped_by is not None:
        messages.print("Stopped. To go on: the same command with --resume")
        raise typer.Exit(128 + outcome.stopped_by)
    if outcome.failed:
        step, reason = next(iter(outcome.failed.items()))
        raise RunError(f"{step} failed: {reason}", hint=f"What it said: {out / 'logs'}")
    for name in names:
        if PRESETS[name].study.get("report") == "forgetting":
            study_mini.cut_probe_tiles(out, PRESETS[name].painted)


def run_study(
    config: StudyConfig,
    out: Path,
    *,
    resume: bool,
    only: Sequence[str],
    go_on: str | None,
    messages: Console,
    jobs: int = 1,
) -> int:
    """Do all that is left of one study, and make its tables; gives the exit code."""
    # what makes the tables is imported first: in the days between, another version may be installed
    import tapfm.study.figures
    import tapfm.study.report
    import tapfm.study.table_text  # noqa: F401
    from tapfm.runtime.messages import counted
    from tapfm.study.runner import conduct, resume_command
    from tapfm.study.runs import chosen, runs_of

    runs = chosen(runs_of(config), only)
    go_on = go_on or resume_command(out)
    messages.print(f"{config.name}: {counted(len(runs), 'run')}, into {out}", markup=False, soft_wrap=True)
    outcome = conduct(config, out, resume=resume, only=only, console=messages, go_on=go_on, jobs=jobs)
    if outcome.stopped_by is not None:
        messages.print(f"Stopped. To go on: {go_on}", markup=False, soft_wrap=True)
        raise typer.Exit(128 + outcome.stopped_by)
    make_tables(config, out, messages)
    return tell_failures(outcome, go_on, messages)


def tell_failures(outcome: Outcome, go_on: str, messages: Console) -> int:
    """Say what failed and what to do; gives the exit code."""
    from tapfm.runtime.messages import counted

    if not outcome.failed:
        return 0
    messages.print(f"{counted(len(outcome.failed), 'step')} failed:", style="bold red")
    for step, reason in outcome.failed.items():
        messages.print(f"  {step}: {reason}", markup=False, soft_wrap=True)
    messages.print(
        f"What to type for each is in {outcome.folder / 'status.csv'}. To try them again: {go_on}",
        markup=False,
        soft_wrap=True,
    )
    return 3


def make_tables(config: StudyConfig, out: Path, messages: Console) -> None:
    """Make the tables of finished runs, and print the one of AUCs."""
    from tapfm.cli.console import terminal
    from tapfm.study.folder import StudyFolder
    from tapfm.study.report import write_report
    from tapfm.study.runner import read_status
    from tapfm.study.table_text import show

    folder = StudyFolder(out)
    if not folder.study.exists():
        raise InputError(f"{out} holds no study.", hint="Begin one: tapfm study STUDY.toml --out DIR")
    table = write_report(config, folder, list(read_status(folder).values()))
    show(table, terminal())
    messages.print(f"Look at it: {out / 'study.md'} and {out / 'curves.png'}", markup=False, soft_wrap=True)


def list_runs(config: StudyConfig, out: Path, only: Sequence[str], *, known: bool) -> None:
    """Print each run, and how far it is where its folder is known."""
    from tapfm.cli.console import terminal
    from tapfm.study.folder import StudyFolder
    from tapfm.study.runner import plan

    console, folder = terminal(), StudyFolder(out)
    planned = plan(config, folder, only)
    for run in planned.runs:
        state = ""
        if problem := planned.problems.get(run.name):
            state = f"  impossible: {' '.join(problem.split())}"
        elif known:
            settings = planned.configs[run.name]
            begun = (folder.run(run) / "config.toml").exists()
            finished = folder.finished(run, settings.machine.allow_failures)
            state = "  finished" if finished else "  begun" if begun else "  to do"
        console.print(f"{run.name}{state}", markup=False, soft_wrap=True)


def probe(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a run of `tapfm train`, not of method fixed.")],
    tiles: Annotated[
        Path, typer.Option("--tiles", metavar="DIR", help="A folder of pictures for each class; or train/ and test/.")
    ],
    out: Annotated[Path, typer.Option("--out", metavar="FILE", help="What was found, as JSON.")],
    seed: Annotated[int, typer.Option("--seed", min=0, help="Which tiles are tested on, without test/.")] = 0,
    device: Device = "auto",
) -> None:
    """Ask a run's encoder about tiles of another task, before and after it was adapted.

    \b
    tapfm probe runs/first --tiles tissue-types --out probe.json

    A linear probe is fitted on frozen features. `tapfm study` sums up the probes
    of a forgetting study.
    """
    from tapfm.runtime.devices import choose_device
    from tapfm.study.probe_pictures import find_pictures

    pictures = find_pictures(tiles, seed)
    place = choose_device(device)
    from tapfm.study.probe import probe_run, write_probe

    found = probe_run(run, pictures, place)
    write_probe(out, found)
    Console(stderr=True, highlight=False).print(
        f"{len(pictures.test):,} tiles of {len(pictures.classes)} classes: features turned by "
        f"{found['cosine_distance']:.4f} (1 - cos), linear CKA {found['linear_cka']:.4f}. Written: {out}",
        markup=False,
        soft_wrap=True,
    )
