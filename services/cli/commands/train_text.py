"""`freshet train-text`: train a text bundle for a catalogue; with it the generator answers queries."""

import math
from pathlib import Path
from typing import Annotated, Any

import typer

from services.cli import options
from services.cli.output import answer, json_command, progress, sentences
from services.offline.openmp import wait_without_spinning

app = typer.Typer(name="train-text", help="Train what answers queries in words.", no_args_is_help=True)

OutOption = Annotated[Path, typer.Option("--out", help="The text bundle; a part that is there already is kept.")]
VocabularyOption = Annotated[int, typer.Option("--vocabulary", min=2, help="Phrases at most.")]
MinutesOption = Annotated[float, typer.Option("--minutes", min=0.05, help="Training of the phrase model ends there.")]
StepsOption = Annotated[int, typer.Option("--steps", min=1, help="Steps of the text MoL.")]
DeviceOption = Annotated[str, typer.Option("--device", help="cpu (the last two layers), or cuda (all of them).")]
_OUT = options.DEFAULT_STATE / "text"


@app.command()
@json_command
def phrases(
    *,
    bundle: options.BundlePath = options.DEFAULT_BUNDLE,
    out: OutOption = _OUT,
    vocabulary: VocabularyOption = 8192,
    minutes: MinutesOption = 5.0,
    seed: options.Seed = 0,
    device: DeviceOption = "cpu",
) -> None:
    """Train the phrase model (PIXAR) on titles, categories and pseudo queries made of them.

    Example:  freshet train-text phrases --bundle .freshet/bundle --out .freshet/text
    """
    _train(bundle, out, seed, phrases=(vocabulary, minutes, device))


@app.command("text-mol")
@json_command
def text_mol(
    *,
    bundle: options.BundlePath = options.DEFAULT_BUNDLE,
    out: OutOption = _OUT,
    steps: StepsOption = 300,
    seed: options.Seed = 0,
) -> None:
    """Fine-tune the text MoL on titles, categories and pseudo queries made of them.

    Example:  freshet train-text text-mol --bundle .freshet/bundle --out .freshet/text
    """
    _train(bundle, out, seed, steps=steps)


@app.command("all")
@json_command
def everything(
    *,
    bundle: options.BundlePath = options.DEFAULT_BUNDLE,
    out: OutOption = _OUT,
    vocabulary: VocabularyOption = 8192,
    minutes: MinutesOption = 5.0,
    steps: StepsOption = 300,
    seed: options.Seed = 0,
    device: DeviceOption = "cpu",
) -> None:
    """Train both models of a text bundle, one after the other.

    Example:  freshet train-text all --bundle .freshet/bundle --out .freshet/text
    """
    _train(bundle, out, seed, phrases=(vocabulary, minutes, device), steps=steps)


def _train(
    bundle: Path,
    out: Path,
    seed: int,
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
    with sentences(ExportError), progress() as update:

        def follow(stage: str, done: int, total: int, loss: float) -> None:
            update(stage, done, total, "" if math.isnan(loss) else f"  loss {loss:.3f}")

        if phrases is not None:
            vocabulary, minutes, device = phrases
            settings = PhraseSettings(seconds=60 * minutes, device=device)
            made["phrases"] = train_phrases_part(
                bundle, out, vocabulary=vocabulary, settings=settings, seed=seed, progress=follow
            )
        if steps is not None:
            mol = TextMolSettings(steps=steps)
            made["text_mol"] = train_text_mol_part(bundle, out, settings=mol, seed=seed, progress=follow)
    *_, report = made.values()
    answer(
        report | made if len(made) > 1 else report,
        f"text bundle {report['text_bundle']}  version {report['text_version']}\n"
        "queries: pseudo, made of titles and categories",
    )
