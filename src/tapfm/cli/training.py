"""Commands about runs. What they need is imported when they run, so that help comes at once."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from tapfm.errors import InputError

RUN = Annotated[Path, typer.Argument(metavar="RUN.toml", help="The configuration; `tapfm config` writes one.")]
CHANGES = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Change a setting, such as adaptation.lambda=0.5; repeatable. A path starts where you are.",
    ),
]


def config(
    run: Annotated[
        Path | None, typer.Argument(metavar="RUN.toml", help="Print this one with everything filled in.")
    ] = None,
    recipe: Annotated[
        str | None, typer.Option("--recipe", help="paper, or reference (its authors' scripts).", show_default="paper")
    ] = None,
    encoder: Annotated[
        str | None, typer.Option("--encoder", help="One of `tapfm encoders`.", show_default="uni")
    ] = None,
    method: Annotated[
        str | None, typer.Option("--method", help="tapfm, finetune or fixed.", show_default="tapfm")
    ] = None,
    cohort: Annotated[
        Path | None, typer.Option("--cohort", metavar="CSV", help="The table of slides.", show_default="cohort.csv")
    ] = None,
    tiles: Annotated[
        Path | None, typer.Option("--tiles", metavar="DIR", help="What `tapfm tile` wrote.", show_default="tiles")
    ] = None,
    features: Annotated[
        Path | None, typer.Option("--features", metavar="DIR", help="What `tapfm embed` wrote, for method fixed.")
    ] = None,
    targets: Annotated[
        list[str] | None,
        typer.Option("--target", metavar="NAME", help="Label column; repeatable.", show_default="those of the table"),
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="FILE", help="Write it here, with paths that start there.")
    ] = None,
    changes: CHANGES = None,
) -> None:
    """Write a configuration to start from, with comments; or print one with everything filled in.

    \b
    tapfm config --cohort split.csv --encoder h-optimus-0 --out run.toml
    tapfm config --recipe reference            on the screen
    tapfm config run.toml                      with nothing left open

    Settings that are not given come from the recipe: the paper's protocol, or its authors' scripts.
    """
    from tapfm.config import text as config_text
    from tapfm.config.loading import load_config

    given = {
        "--recipe": recipe,
        "--encoder": encoder,
        "--method": method,
        "--cohort": cohort,
        "--tiles": tiles,
        "--features": features,
        "--target": targets or None,
        "--out": out,
    }
    if run is not None:
        if extra := [name for name, value in given.items() if value is not None]:
            raise InputError(
                f"{', '.join(extra)} begins a new file, and {run} is one already.",
                hint=f"Change it with --set, for example: tapfm config {run} --set schedule.epochs=5",
            )
        typer.echo(config_text.resolved(load_config(run, changes or [])), nl=False)
        return
    if changes:
        raise InputError("--set changes a file.", hint="For example: tapfm config run.toml --set schedule.epochs=5")
    if out is not None and out.exists():
        raise InputError(f"{out} is there already.", hint="Give another name to --out, or remove it first.")
    text = config_text.starting_file(
        recipe=recipe or "paper",
        encoder=encoder or "uni",
        method=method or "tapfm",
        cohort=cohort,
        tiles=tiles,
        features=features,
        targets=targets or [],
        folder=out.parent if out is not None else None,
    )
    if out is None:
        typer.echo(text, nl=False)
        return
    from tapfm.runtime.files import write_atomically
    from tapfm.runtime.messages import command

    try:
        write_atomically(out, text.encode())
    except OSError as error:
        raise InputError(f"{out} cannot be written ({error.strerror}).", hint="Give another file to --out.") from error
    following = command("train", out, "--out", "runs/first")
    Console(stderr=True, highlight=False).print(f"Written: {out}. Next: {following}", markup=False, soft_wrap=True)


def train(
    run: RUN,
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="Folder of the run, such as runs/first.")],
    changes: CHANGES = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with the run in the folder; begins it where there is none.")
    ] = False,
    device: Annotated[
        str | None, typer.Option("--device", help="auto, cpu, cuda, cuda:1, ...", show_default="auto")
    ] = None,
    workers: Annotated[
        int | None,
        typer.Option("--workers", min=0, help="Processes that read tiles.", show_default="one for each core"),
    ] = None,
    unit: Annotated[
        str | None,
        typer.Option("--unit", help="What an AUC counts: slide or patient.", show_default="as in RUN.toml: slide"),
    ] = None,
    allow_failures: Annotated[
        int | None,
        typer.Option("--allow-failures", metavar="N", min=0, help="Go on while no more than N slides fail."),
    ] = None,
) -> None:
    """Adapt an encoder to slide labels, keep the best epoch, and predict the held-out slides.

    \b
    tapfm train run.toml --out runs/first
    tapfm train run.toml --out runs/half --set adaptation.lambda=0.5 --set seed=1
    tapfm train run.toml --out runs/first --resume   after Ctrl-C, a crash, ...

    Ctrl-C and SIGTERM save first. A run that was stopped goes on in the middle
    of its epoch, with the same tiles; on a CPU with the same weights, bit by bit,
    as if it had not been stopped.

    \b
    config.toml, environment.json, split.csv   what it was made from
    history.jsonl, curves.png, tensorboard/    losses, AUC, speed, memory by epoch
    checkpoints/                               last (to go on) and best (weights)
    predictions-val.csv, predictions-test.csv  the best epoch, on all tiles
    failures.csv, summary.md                   what failed; the run on a page

    Exit code 3 when more slides failed than may, 130 after Ctrl-C, 143 after
    SIGTERM.
    """
    from tapfm.config.loading import load_config
    from tapfm.runs.data import read_data
    from tapfm.runtime.workers import available_cores

    options = {"device": device, "workers": workers, "allow_failures": allow_failures}
    added = [f"machine.{name}={value}" for name, value in options.items() if value is not None]
    added += [f"selection.unit={unit}"] if unit is not None else []
    settings = load_config(run, [*(changes or []), *added])
    if out.is_file():
        raise InputError(f"{out} is a file.", hint="Give a folder to --out.")
    data = read_data(settings)  # what is wrong with the data is told before torch is waited for
    from tapfm.errors import Interrupted
    from tapfm.workflows import train as train_model

    readers = available_cores() if settings.machine.workers == "auto" else settings.machine.workers
    messages = Console(stderr=True, highlight=False)
    try:
        result = train_model.train(settings, data, out, resume=resume, workers=readers, console=messages)
    except Interrupted as stopped:
        raise typer.Exit(128 + stopped.signal_number) from None
    train_model.show(result, messages)
    if result.failed:
        raise typer.Exit(3 if len(result.failed) > settings.machine.allow_failures else 0)


def export(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a run of `tapfm train`.")],
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="Folder for the model.")],
    push_to: Annotated[
        str | None, typer.Option("--push-to-hub", metavar="OWNER/NAME", help="Upload it to the Hugging Face hub.")
    ] = None,
    public: Annotated[bool, typer.Option("--public", help="With --push-to-hub: for everybody to see.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Write over the export of another run.")] = False,
    despite_no_derivatives: Annotated[
        bool,
        typer.Option(
            "--despite-no-derivatives",
            help="Push although the base model's licence forbids derivatives: you have its owners' permission.",
        ),
    ] = False,
) -> None:
    """Write the adapted encoder for timm, the aggregator, and a model card.

    \b
    tapfm export runs/first --out exported
    tapfm export runs/first --out exported --push-to-hub my-lab/uni-fgfr3

    \b
    model.safetensors, config.json       the encoder, as a local-dir of timm
    aggregator.safetensors, tapfm.json   from tiles to the slide
    README.md                            data, figures, licence of the base model

    The folder is loaded again and compared before the command ends. What is
    pushed is private unless --public is given.
    """
    if push_to is None and (public or despite_no_derivatives):
        raise InputError("There is nothing to push.", hint="Say where to: --push-to-hub OWNER/NAME")
    if not (run / "config.toml").is_file():
        raise InputError(f"{run} is no run: it has no config.toml.", hint="Runs are what tapfm train writes to --out.")
    from tapfm.runs.export import export_run

    export_run(
        run,
        out,
        push_to=push_to,
        despite_no_derivatives=despite_no_derivatives,
        private=not public,
        force=force,
        console=Console(stderr=True, highlight=False),
    )
