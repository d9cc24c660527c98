"""`freshet retrain`."""

import shutil
from pathlib import Path
from typing import Annotated, Any

import typer

from services.cli import options
from services.cli.output import CommandError, answer, console, is_json, json_command, sentences, table
from services.offline.openmp import wait_without_spinning


@json_command
def retrain(
    *,
    serving: Annotated[Path, typer.Option(envvar="FRESHET_BUNDLE", help="The serving bundle.")] = (
        options.DEFAULT_BUNDLE
    ),
    data: options.Data = "auto",
    out: Annotated[Path, typer.Option(help="The new bundle's folder if it passes.")] = options.DEFAULT_STATE / "next",
    hours: Annotated[
        float, typer.Option(min=0.1, help="Newest hours of the data, for the comparison; the rest is for training.")
    ] = 24,
    preset: Annotated[str, typer.Option(help="quick, ml-1m, ml-20m or books.")] = "quick",
    head: Annotated[str, typer.Option(help="mol, dot, wide-dot, or auto: the head that validates best.")] = "auto",
    epochs: Annotated[int | None, typer.Option(min=1, help="Default: the preset's.")] = None,
    seed: options.Seed = 0,
    threads: Annotated[int | None, typer.Option(min=1, help="PyTorch's threads; default: its own choice.")] = None,
    stage: Annotated[
        bool, typer.Option("--stage", help="Stage a model that passes, as a set named by its version.")
    ] = False,
    state: options.State = options.DEFAULT_STATE,
) -> None:
    """Train on events until a day ago, compare the old and the new model on the last day, and write the new one if it
    passes.

    The new model is rejected (exit status 1) if it may lose more than 5 % of the hits, is significantly worse in a
    stratum (new users, new items, short histories, ...), or costs half as much again. A rejected model is written to
    OUT.held-back. The data may be an archive of `freshet archive` or any other table. An interrupted run continues when
    repeated; a finished run does nothing.

    Example:  freshet archive .freshet/archive && freshet retrain --data .freshet/archive --stage
    """
    wait_without_spinning()
    from services.offline.retraining.run import retrain as run
    from services.offline.training.onnx_graphs import ExportError

    settings = {"preset_name": preset, "head": head, "epochs": epochs, "seed": seed, "threads": threads}
    with sentences(ExportError, no_memory="--preset quick"):
        where = console(stderr=is_json())
        report = run(serving=serving, data=data, out=out, hours=hours, settings=settings, console=where)
    if stage and report["gate"]["passes"]:
        report["staged"] = _staged(report, serving, state)
    answer(report, lambda: _print(report))
    if not report["gate"]["passes"]:
        raise CommandError(
            f"held back: {'; '.join(report['gate']['held_back'])}",
            advice=f"the serving model is unchanged; the new one is in {report['bundle']}",
        )


def _staged(report: dict[str, Any], serving: Path, state: Path) -> str:
    """Stage the new model, unless a set has it; return the set's name."""
    from services.cli.staging import set_of, stage_bundle

    version = report["model_version"]
    if found := set_of(version, state):
        return found
    # The set gets a copy, because the next model that passes replaces this bundle.
    folder = state / "models" / version
    if not folder.exists():
        shutil.copytree(report["bundle"], folder)
    name = f"model-{version[:8]}"
    stage_bundle(name, folder, state=state, serving=serving)
    return name


def _print(report: dict[str, Any]) -> None:
    gate = report["gate"]
    columns = ("", "", "events", "serving", "new", "difference [95 %]")
    shown = table(*columns, right=columns[2:], title="hit rate at 10 of the items that users chose next, as served")
    for one in gate["compared"]:
        mean, low, high = one["difference"]
        shown.add_row(
            one["question"],
            one["stratum"],
            f"{one['events']:,}",
            f"{one['serving']:.4f}",
            f"{one['new']:.4f}",
            f"{mean:+.4f} [{low:+.4f}, {high:+.4f}]",
        )
    out = console()
    out.print(shown)
    out.print(
        f"an event takes {gate['time_ratio']:.2f} of the serving model's time, the bundle {gate['bytes_ratio']:.2f}"
    )
    if gate["passes"]:
        typer.echo(f"bundle {report['bundle']}  model {report['model_version']}")
    if "staged" in report:
        typer.echo(f"staged as set {report['staged']}; freshet model warm {report['staged']} is next")
