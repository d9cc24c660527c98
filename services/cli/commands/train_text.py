"""`freshet train-text`: train a text bundle for a model bundle's catalogue; the generator answers queries with it."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from services.cli import options
from services.cli.output import console, emit_json, reports_errors, sentences
from services.offline.openmp import wait_without_spinning

if TYPE_CHECKING:
    from rich.console import Console

    from services.offline.training.text_catalogue import Progress

app = typer.Typer(name="train-text", help="Train what answers queries in words.", no_args_is_help=True)

OutOption = Annotated[Path, typer.Option("--out", help="The text bundle; a part that is there already is kept.")]
VocabularyOption = Annotated[int, typer.Option("--vocabulary", min=2, help="Phrases at most.")]
MinutesOption = Annotated[float, typer.Option("--minutes", min=0.05, help="Training of the phrase model ends there.")]
StepsOption = Annotated[int, typer.Option("--steps", min=1, help="Steps of the text MoL.")]
DeviceOption = Annotated[str, typer.Option("--device", help="cpu (the last two layers), or cuda (all of them).")]
_OUT = options.DEFAULT_STATE / "text"


@app.command()
@reports_errors
def phrases(
    *,
    bundle: options.BundlePath = options.DEFAULT_BUNDLE,
    out: OutOption = _OUT,
    vocabulary: VocabularyOption = 8192,
    minutes: MinutesOption = 5.0,
    seed: options.Seed = 0,
    device: DeviceOption = "cpu",
    as_json: options.AsJson = False,
) -> None:
    """Train the phrase model (PIXAR) on titles, categories and pseudo queries made of them.

    Example:  freshet train-text phrases --bundle .freshet/bundle --out .freshet/text
    """
    _train(bundle, out, seed, as_json, phrases=(vocabulary, minutes, device))


@app.command("text-mol")
@reports_errors
def text_mol(
    *,
    bundle: options.BundlePath = options.DEFAULT_BUNDLE,
    out: OutOption = _OUT,
    steps: StepsOption = 300,
    seed: options.Seed = 0,
    as_json: options.AsJson = False,
) -> None:
    """Fine-tune the text MoL on titles, categories and pseudo queries made of them.

    Example:  freshet train-text text-mol --bundle .freshet/bundle --out .freshet/text
    """
    _train(bundle, out, seed, as_json, steps=steps)


@app.command("all")
@reports_errors
def everything(
    *,
    bundle: options.BundlePath = options.DEFAULT_BUNDLE,
    out: OutOption = _OUT,
    vocabulary: VocabularyOption = 8192,
    minutes: MinutesOption = 5.0,
    steps: StepsOption = 300,
    seed: options.Seed = 0,
    device: DeviceOption = "cpu",
    as_json: options.AsJson = False,
) -> None:
    """Train both models of a text bundle, one after the other.

    Example:  freshet train-text all --bundle .freshet/bundle --out .freshet/text
    """
    _train(bundle, out, seed, as_json, phrases=(vocabulary, minutes, device), steps=steps)


def _train(
    bundle: Path,
    out: Path,
    seed: int,
    as_json: bool,
    *,
    phrases: tuple[int, float, str] | None = None,
    steps: int | None = None,
) -> None:
    """Train one part or both. phrases: vocabulary, minutes and device; steps: of the text MoL."""
    wait_without_spinning()
    from services.offline.training.onnx_graphs import ExportError
    from services.offline.training.phrases.fit import PhraseSettings
    from services.offline.training.text_catalogue import train_phrases_part, train_text_mol_part
    from services.offline.training.text_mol.fit import TextMolSettings

    made: dict[str, dict[str, Any]] = {}
    with sentences(ExportError), _bar(console(stderr=as_json)) as progress:
        if phrases is not None:
            vocabulary, minutes, device = phrases
            settings = PhraseSettings(seconds=60 * minutes, device=device)
            made["phrases"] = train_phrases_part(
                bundle, out, vocabulary=vocabulary, settings=settings, seed=seed, progress=progress
            )
        if steps is not None:
            text_mol_settings = TextMolSettings(steps=steps)
            made["text_mol"] = train_text_mol_part(
                bundle, out, settings=text_mol_settings, seed=seed, progress=progress
            )
    *_, report = made.values()
    if as_json:
        emit_json(report | made if len(made) > 1 else report)
        return
    typer.echo(f"text bundle {report['text_bundle']}  version {report['text_version']}")
    typer.echo("queries: pseudo, made of titles and categories")


@contextmanager
def _bar(screen: "Console") -> Iterator["Progress"]:
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    with Progress(*columns, console=screen) as bar:
        task, current = bar.add_task("reading", total=None), ""

        def follow(stage: str, done: int, total: int, loss: float) -> None:
            nonlocal current, task
            if stage != current:
                current, task = stage, bar.add_task(stage, total=total)
            described = stage if loss != loss else f"{stage}  loss {loss:.3f}"
            bar.update(task, completed=done, total=total, description=described)

        yield follow
