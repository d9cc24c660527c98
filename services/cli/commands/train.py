"""`freshet train` and `freshet export`: train a model bundle on interactions, and write its encoder as ONNX."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from services.cli import options
from services.cli.option_groups import reads_a_table
from services.cli.output import answer, console, is_json, json_command, sentences
from services.offline.openmp import wait_without_spinning

if TYPE_CHECKING:
    from services.offline.datasets import TableOptions

Epochs = Annotated[
    int | None,
    typer.Option(min=1, help="Default: the preset's. With --head auto: the mixture's; another head trains as long."),
]
Head = Annotated[
    str,
    typer.Option(
        help="mol, dot, wide-dot (a dot product at the mixture's bytes), or auto: the head that validates best."
    ),
]
Loss = Annotated[
    str | None, typer.Option(help="sampled-softmax, corrected-softmax, or full-softmax (dot). Default: the preset's.")
]
Events = Annotated[
    Path | None, typer.Option(help="A YAML file with the meaning of event types. Default: ratings, commerce and media.")
]


@json_command
@reads_a_table
def train(
    *,
    table: "TableOptions",
    preset: Annotated[str, typer.Option(help="quick, ml-1m, ml-20m or books.")] = "quick",
    data: options.Data = "auto",
    out: Annotated[Path, typer.Option(help="The bundle's folder.")] = options.DEFAULT_BUNDLE,
    epochs: Epochs = None,
    seed: options.Seed = 0,
    split: Annotated[
        str, typer.Option(help="leave-one-out, time (first four fifths) or none (train on everything).")
    ] = "leave-one-out",
    encoder: Annotated[str, typer.Option(help="hstu or sasrec.")] = "hstu",
    head: Head = "auto",
    loss: Loss = None,
    negatives: Annotated[
        int | None, typer.Option(min=1, help="Sampled negatives per position. Default: the preset's.")
    ] = None,
    alpha: Annotated[
        float | None, typer.Option(min=0, help="Weight of the mixture's mutual information. Default: the preset's.")
    ] = None,
    events: Events = None,
    actions: Annotated[bool, typer.Option("--actions", help="The encoder also reads each event's type.")] = False,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    threads: Annotated[int | None, typer.Option(min=1, help="PyTorch's threads; default: its own choice.")] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue from the newest checkpoint next to the bundle.")
    ] = False,
    no_export: Annotated[bool, typer.Option("--no-export", help="Do not write ONNX; `freshet export` does.")] = False,
) -> None:
    """Train a model and write its bundle; print positions/s, time by part, memory, and hit rates.

    Head `auto` first trains the mixture for a third of the epochs, and every other head for the same processor time. It
    chooses the head that validates best as served, or the cheapest one to serve if no difference is significant. Then
    it trains that head for as long as the mixture would take.

    Example:  freshet train --preset quick

    Example:  freshet train --preset ml-1m --epochs 1 --data ml-1m

    Example:  freshet train --data shop.csv --user customer --time when --items products.csv
    """
    wait_without_spinning()
    from services.offline.training.onnx_graphs import ExportError
    from services.offline.training.run import run_training

    with sentences(ExportError, no_memory="--preset quick"):
        report = run_training(
            out=out,
            preset_name=preset,
            dataset=data,
            epochs=epochs,
            seed=seed,
            split=split,
            resume=resume,
            encoder=encoder,
            head=head,
            loss=loss,
            num_negatives=negatives,
            alpha=alpha,
            device=device,
            threads=threads,
            export=not no_export,
            events=events,
            table=table,
            actions=actions,
            console=console(stderr=is_json()),
        )
    answer(report, f"bundle {report['bundle']}  model {report['model_version']}")


@json_command
def export(
    *,
    bundle: options.BundlePath = options.DEFAULT_BUNDLE,
    data: Annotated[str, typer.Option(help="Compare with PyTorch on this data's histories [random ones].")] = "",
) -> None:
    """Write a bundle's encoder as ONNX, with the inference server's model folder, after comparing it with PyTorch.

    Example:  freshet export --bundle .freshet/bundle --data ml-1m
    """
    from services.offline.datasets import load_dataset
    from services.offline.training.export import export_bundle
    from services.offline.training.onnx_graphs import ExportError

    with sentences(ExportError):
        report = export_bundle(bundle, interactions=load_dataset(data) if data else None)
    facts = {"bundle": str(bundle), "model_version": report.bundle.model_version, "max_error": report.max_error}
    answer(
        facts | {"histories_checked": report.histories_checked, "onnx_bytes": report.onnx_bytes},
        f"exported {bundle}  model {report.bundle.model_version}  {report.onnx_bytes / 1e6:.1f} MB\n"
        f"largest difference to PyTorch {report.max_error:.1e} over {report.histories_checked} histories",
    )
