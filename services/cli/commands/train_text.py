"""`freshet train-text`."""

import math
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from services.cli import options
from services.cli.output import answer, json_command, progress, sentences, usage_error
from services.offline.openmp import wait_without_spinning

_OF_THE_OTHER = {"phrases": ("steps",), "text-mol": ("vocabulary", "minutes", "device")}


@json_command
def train_text(
    part: Annotated[Literal["all", "phrases", "text-mol"], typer.Argument(help="The model, or all of them.")],
    *,
    bundle: options.BundlePath = options.DEFAULT_BUNDLE,
    out: Annotated[Path, typer.Option(help="The text bundle; its other part is preserved.")] = options.DEFAULT_STATE
    / "text",
    vocabulary: Annotated[int | None, typer.Option(min=2, help="Largest number of phrases. Default: 8192.")] = None,
    minutes: Annotated[
        float | None, typer.Option(min=0.05, help="Longest training of the phrase model. Default: 5.")
    ] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Steps of the text MoL. Default: 300.")] = None,
    seed: options.Seed = 0,
    device: Annotated[
        str | None,
        typer.Option(help="For phrases: cpu (the default: trains the last two layers), or cuda (all of them)."),
    ] = None,
) -> None:
    """Train the models that answer queries in words: the phrase model (PIXAR) and the text MoL.

    They are trained on titles, categories and pseudo queries made of them.

    Example:  freshet train-text all --bundle .freshet/bundle --out .freshet/text
    """
    given = {"vocabulary": vocabulary, "minutes": minutes, "device": device, "steps": steps}
    for name in _OF_THE_OTHER.get(part, ()):
        if given[name] is not None:
            raise usage_error(f"--{name} has no effect on {part}", "leave it out")
    wait_without_spinning()
    from services.offline.training.onnx_graphs import ExportError
    from services.offline.training.phrases.fit import PhraseSettings
    from services.offline.training.text_catalogue import train_phrases_part, train_text_mol_part
    from services.offline.training.text_mol.fit import TextMolSettings

    made: dict[str, dict[str, Any]] = {}
    with sentences(ExportError), progress() as update:

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
    answer(
        report | made if len(made) > 1 else report,
        f"text bundle {report['text_bundle']}  version {report['text_version']}\n"
        "queries: pseudo, made of titles and categories",
    )
