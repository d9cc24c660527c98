"""`freshet evaluate`: how good answers become when feedback flows back without training; tables and plots.

It gathers options and shows progress; what is measured, and how, is in services/offline/evaluation.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from services.cli.measuring import AsJson, Out, Quick, Seed, in_sentences, measured
from services.cli.output import reports_errors
from services.cli.threads import wait_without_spinning

if TYPE_CHECKING:
    from services.offline.evaluation.stream.models import Fit

app = typer.Typer(
    name="evaluate", help="What feedback without training is worth; tables and plots.", no_args_is_help=True
)


@app.callback()
def evaluate() -> None:
    """What feedback without training is worth; tables and plots."""


@app.command("pefa")
@reports_errors
def pefa(
    *,
    data: Annotated[list[str] | None, typer.Option(help="scifact or medquad; may be repeated. Default: both.")] = None,
    bundle: Annotated[
        Path | None, typer.Option(help="Also try titles as the states of this trained model's items.")
    ] = None,
    quick: Quick = False,
    out: Out = None,
    seed: Seed = 0,
    as_json: AsJson = False,
) -> None:
    """PEFA on text, its paper's own ground: real queries and documents, a real sentence encoder.

    The encoder alone beside PEFA-XS and PEFA-XL: recall, lambda and k swept and chosen on held-out training queries,
    build time, index size, latency, and how little feedback is enough.

    Example:  freshet evaluate pefa

    Example:  freshet evaluate pefa --data scifact --quick --json
    """
    wait_without_spinning()
    from services.offline.evaluation.pefa import data as pefa_text_data
    from services.offline.evaluation.pefa import report as pefa_text

    with in_sentences(when_memory_ends="--data scifact"):
        chosen = [pefa_text_data.known(name) for name in data or pefa_text_data.NAMES]
        measured(
            lambda request: pefa_text.run(request, names=list(dict.fromkeys(chosen)), bundle=bundle),
            out=out,
            quick=quick,
            seed=seed,
            as_json=as_json,
        )


@app.command("stream")
@reports_errors
def stream(
    *,
    data: Annotated[
        list[str] | None,
        typer.Option(help="A MovieLens name or a table's path; may be repeated. Default: ml-1m and ml-latest-small."),
    ] = None,
    seeds: Annotated[int, typer.Option(min=1, help="How many: each trains and walks anew, other items withheld.")] = 3,
    retrainings: Annotated[int, typer.Option(min=0, help="How often the retrained contender is trained again.")] = 2,
    predict_every: Annotated[
        int, typer.Option(min=1, help="Predict every n-th event, learn from all. With --quick at least 8.")
    ] = 1,
    epochs: Annotated[int, typer.Option(min=1, help="Epochs of each training, preset quick.")] = 4,
    quick: Quick = False,
    out: Out = None,
    seed: Seed = 0,
    as_json: AsJson = False,
) -> None:
    """A stream walked event by event: what feedback is worth without training, and how soon a new item is found.

    Trains on the first four fifths of time with a tenth of the catalogue withheld, then predicts every later event
    before learning from it: frozen items, PEFA-XS, XL and both, retrained at intervals, popularity, item-kNN.

    Example:  freshet evaluate stream

    Example:  freshet evaluate stream --data ml-latest-small --seeds 1 --retrainings 0 --quick
    """
    wait_without_spinning()
    from services.offline.evaluation.stream import report as stream_report

    with in_sentences(when_memory_ends="--data ml-latest-small"):
        measured(
            lambda request: stream_report.run(
                request,
                fit=_fit(epochs),
                datasets=list(dict.fromkeys(data or stream_report.DATASETS)),
                seeds=list(range(seed, seed + (1 if quick else seeds))),
                retrainings=0 if quick else retrainings,
                predict_every=max(predict_every, 8) if quick else predict_every,
            ),
            out=out,
            quick=quick,
            seed=seed,
            as_json=as_json,
        )


@app.command("text")
@reports_errors
def text(
    *,
    data: Annotated[
        list[str] | None, typer.Option(help="medquad, medquad-masked or scifact; may be repeated. Default: all.")
    ] = None,
    seeds: Annotated[int, typer.Option(min=1, help="How many: each trains what is trained anew.")] = 3,
    epochs: Annotated[
        int | None, typer.Option(min=1, help="Training of each phrase model. Default: 4; with --quick 1.")
    ] = None,
    train: Annotated[bool, typer.Option(help="Whether to train and ask the models that have to be trained.")] = True,
    resume: Annotated[
        bool, typer.Option("--resume", help="Keep the rows that --out has of an earlier run, and measure the others.")
    ] = False,
    quick: Quick = False,
    out: Out = None,
    seed: Seed = 0,
    as_json: AsJson = False,
) -> None:
    """Text: who answers real questions best, over documents that have training questions of their own.

    BM25, MiniLM, both with PEFA, MiniLM fine-tuned, text MoL, and PIXAR by vocabulary size and tokenizer: recall, hits
    and MRR over seeds, latency one question at a time, memory, and how long identifiers are in tokens.

    Example:  freshet evaluate text

    Example:  freshet evaluate text --data scifact --seeds 1 --no-train
    """
    wait_without_spinning()
    from services.cli.text_training import as_users_have_it
    from services.offline.datasets.texts import COLLECTIONS
    from services.offline.evaluation.text import report as text_report

    with in_sentences(when_memory_ends="--data scifact"):
        measured(
            lambda request: text_report.run(
                request,
                names=list(dict.fromkeys(data or COLLECTIONS)),
                seeds=list(range(seed, seed + (1 if quick else seeds))),
                epochs=epochs,
                training=as_users_have_it() if train else None,
                resume=resume,
            ),
            out=out,
            quick=quick,
            seed=seed,
            as_json=as_json,
        )


def _fit(epochs: int) -> "Fit":
    """Preset quick; small data is trained for more epochs, as `freshet train` does."""
    from dataclasses import replace

    from services.algorithms.models.sequential import SequentialModel
    from services.offline.datasets import Interactions
    from services.offline.training import preset, train
    from services.offline.training.presets import default_epochs
    from services.offline.training.sequences import Histories

    def fit(interactions: Interactions, *, seed: int) -> SequentialModel:
        config = preset("quick", epochs=epochs, seed=seed)
        enough = default_epochs(config, Histories.of(interactions).num_positions)
        return train(replace(config, epochs=enough), interactions).model

    return fit
