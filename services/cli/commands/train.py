"""The commands `freshet train`, `train-text`, `retrain` and `export` train models and export the encoder as ONNX."""

import math
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from typer import Argument, Option

from services.cli import options, output
from services.cli.options import reads_a_table
from services.offline.openmp import wait_without_spinning

if TYPE_CHECKING:
    from services.offline.datasets import TableOptions

Epochs = Annotated[
    int | None,
    Option(min=1, help="Default: the preset's. With --head auto: the mixture's; another head trains as long."),
]
Head = Annotated[
    str,
    Option(help="mol, dot, wide-dot (a dot product at the mixture's bytes), or auto: the head that validates best."),
]
Loss = Annotated[str | None, Option(help="sampled-softmax, corrected-softmax, full-softmax (dot) [the preset's].")]
Events = Annotated[Path | None, Option(help="YAML file of event types' meanings. Default: ratings, commerce, media.")]


@output.json_command
@reads_a_table
def train(
    *,
    table: "TableOptions",
    preset: Annotated[str, Option(help="quick, ml-1m, ml-20m or books.")] = "quick",
    data: options.Data = "auto",
    out: Annotated[Path, Option(help="The bundle's folder.")] = options.DEFAULT_BUNDLE,
    epochs: Epochs = None,
    seed: options.Seed = 0,
    split: Annotated[str, Option(help="leave-one-out, time (first four fifths) or none (all).")] = "leave-one-out",
    encoder: Annotated[str, Option(help="hstu or sasrec.")] = "hstu",
    head: Head = "auto",
    loss: Loss = None,
    negatives: Annotated[int | None, Option(min=1, help="Sampled negatives per position [the preset's].")] = None,
    alpha: Annotated[
        float | None, Option(min=0, help="Weight of the mixture's mutual information. Default: the preset's.")
    ] = None,
    events: Events = None,
    actions: Annotated[bool, Option("--actions", help="The encoder also reads each event's type.")] = False,
    device: Annotated[str, Option(help="cpu or cuda.")] = "cpu",
    threads: Annotated[int | None, Option(min=1, help="PyTorch's threads; default: its own choice.")] = None,
    resume: Annotated[bool, Option("--resume", help="Continue from the newest checkpoint next to the bundle.")] = False,
    no_export: Annotated[bool, Option("--no-export", help="Do not write ONNX; `freshet export` does.")] = False,
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

    with output.sentences(ExportError, no_memory="--preset quick"):
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
            console=output.console(stderr=output.is_json()),
        )
    output.answer(report, f"bundle {report['bundle']}  model {report['model_version']}")


@output.json_command
def export(
    *,
    bundle: options.BundlePath = options.DEFAULT_BUNDLE,
    data: Annotated[str, Option(help="Compare with PyTorch on this data's histories [random ones].")] = "",
) -> None:
    """Write a bundle's encoder as ONNX, compare it with PyTorch, and write the inference server's model folder.

    Example:  freshet export --bundle .freshet/bundle --data ml-1m
    """
    from services.offline.datasets import load_dataset
    from services.offline.training.export import export_bundle
    from services.offline.training.onnx_graphs import ExportError

    with output.sentences(ExportError):
        report = export_bundle(bundle, interactions=load_dataset(data) if data else None)
    facts = {"bundle": str(bundle), "model_version": report.bundle.model_version, "max_error": report.max_error}
    output.answer(
        facts | {"histories_checked": report.histories_checked, "onnx_bytes": report.onnx_bytes},
        f"exported {bundle}  model {report.bundle.model_version}  {report.onnx_bytes / 1e6:.1f} MB\n"
        f"largest difference to PyTorch {report.max_error:.1e} over {report.histories_checked} histories",
    )


_OF_THE_OTHER = {"phrases": ("steps",), "text-mol": ("vocabulary", "minutes", "device")}


@output.json_command
def train_text(
    part: Annotated[Literal["all", "phrases", "text-mol"], Argument(help="The model, or all of them.")],
    *,
    bundle: options.BundlePath = options.DEFAULT_BUNDLE,
    out: Annotated[Path, Option(help="The text bundle; its other part is preserved.")] = options.DEFAULT_STATE / "text",
    vocabulary: Annotated[int | None, Option(min=2, help="Largest number of phrases. Default: 8192.")] = None,
    minutes: Annotated[float | None, Option(min=0.05, help="Longest training of the phrase model. Default: 5.")] = None,
    steps: Annotated[int | None, Option(min=1, help="Steps of the text MoL. Default: 300.")] = None,
    seed: options.Seed = 0,
    device: Annotated[
        str | None, Option(help="For phrases: cpu (the default: trains the last two layers), or cuda (all of them).")
    ] = None,
) -> None:
    """Train the models that answer queries in words: the phrase model (PIXAR) and the text MoL.

    The training data are titles, categories, and pseudo queries made of both.

    Example:  freshet train-text all --bundle .freshet/bundle --out .freshet/text
    """
    given = {"vocabulary": vocabulary, "minutes": minutes, "device": device, "steps": steps}
    for name in _OF_THE_OTHER.get(part, ()):
        if given[name] is not None:
            raise output.usage_error(f"--{name} has no effect on {part}", "leave it out")
    wait_without_spinning()
    from services.offline.training.onnx_graphs import ExportError
    from services.offline.training.phrases.fit import PhraseSettings
    from services.offline.training.text_catalogue import train_phrases_part, train_text_mol_part
    from services.offline.training.text_mol.fit import TextMolSettings

    made: dict[str, dict[str, Any]] = {}
    with output.sentences(ExportError), output.progress() as update:

        def follow(stage: str, done: int, total: int, loss: float) -> None:
            update(stage, done, total, "" if math.isnan(loss) else f"  loss {loss:.3f}")

        if part != "text-mol":
            settings = PhraseSettings(seconds=60 * (minutes or 5.0), device=device or "cpu")
            made["phrases"] = train_phrases_part(
                bundle, out, vocabulary=vocabulary or 8192, settings=settings, seed=seed, progress=follow
            )
        if part != "phrases":
            mol = TextMolSettings(steps=steps or 300)
            made["text_mol"] = train_text_mol_part(bundle, out, settings=mol, seed=seed, progress=follow)
    *_, report = made.values()
    output.answer(
        report | made if len(made) > 1 else report,
        f"text bundle {report['text_bundle']}  version {report['text_version']}\n"
        "queries: pseudo, made of titles and categories",
    )


@output.json_command
def retrain(
    *,
    serving: Annotated[Path, Option(envvar="FRESHET_BUNDLE", help="The serving bundle.")] = (options.DEFAULT_BUNDLE),
    data: options.Data = "auto",
    out: Annotated[Path, Option(help="The new bundle's folder if it passes.")] = options.DEFAULT_STATE / "next",
    hours: Annotated[float, Option(min=0.1, help="Newest hours, for the comparison; the rest is for training.")] = 24,
    preset: Annotated[str, Option(help="quick, ml-1m, ml-20m or books.")] = "quick",
    head: Annotated[str, Option(help="mol, dot, wide-dot, or auto: the head that validates best.")] = "auto",
    epochs: Annotated[int | None, Option(min=1, help="Default: the preset's.")] = None,
    seed: options.Seed = 0,
    threads: Annotated[int | None, Option(min=1, help="PyTorch's threads; default: its own choice.")] = None,
    stage: Annotated[bool, Option("--stage", help="Stage a model that passes, as a set named by its version.")] = False,
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
    with output.sentences(ExportError, no_memory="--preset quick"):
        where = output.console(stderr=output.is_json())
        report = run(serving=serving, data=data, out=out, hours=hours, settings=settings, console=where)
    if stage and report["gate"]["passes"]:
        report["staged"] = _staged(report, serving, state)
    output.answer(report, lambda: _print(report))
    if not report["gate"]["passes"]:
        raise output.CommandError(
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
    shown = output.table(
        *columns, right=columns[2:], title="hit rate at 10 of the items that users chose next, as served"
    )
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
    output.echo(shown)
    output.echo(
        f"an event takes {gate['time_ratio']:.2f} of the serving model's time, the bundle {gate['bytes_ratio']:.2f}"
    )
    if gate["passes"]:
        typer.echo(f"bundle {report['bundle']}  model {report['model_version']}")
    if "staged" in report:
        typer.echo(f"staged as set {report['staged']}; freshet model warm {report['staged']} is next")
