"""`freshet evaluate`: how good answers become when feedback flows back without training; tables and plots.

It gathers options and shows progress; what is measured, and how, is in services/evaluation.
"""

from typing import Annotated

import typer

from services.cli.measuring import AsJson, Out, Quick, Seed, in_sentences, measured
from services.cli.output import reports_errors
from services.cli.threads import wait_without_spinning

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
    from services.evaluation import pefa_text, pefa_text_data

    with in_sentences(when_memory_ends="--data scifact"):
        chosen = [pefa_text_data.known(name) for name in data or pefa_text_data.NAMES]
        measured(
            lambda request: pefa_text.run(request, names=list(dict.fromkeys(chosen))),
            out=out,
            quick=quick,
            seed=seed,
            as_json=as_json,
        )
