"""`freshet bench ...` commands that measure what models learn from a stream, from words and from phrases."""

from typing import TYPE_CHECKING, Annotated, Any

import typer

from services.cli.commands.bench.group import app
from services.cli.measuring import benchmark

if TYPE_CHECKING:
    from services.offline.evaluation.common.report import Report, Request


def _not_in_the_catalogue(report: dict[str, Any]) -> str:
    return "" if report["proof"]["holds"] else f"not in the catalogue: {report['proof']}"


@benchmark(app, "generation", less_memory="--phrases 1000000", wrong=_not_in_the_catalogue)
def generation(
    request: "Request",
    *,
    phrases: Annotated[
        list[int] | None,
        typer.Option(min=10_000, help="Vocabulary sizes; may be repeated. Default: 128,000 to 5 million."),
    ] = None,
    queries: Annotated[
        int | None, typer.Option(min=100, help="Queries whose answers must be in the catalogue. Default: 100,000.")
    ] = None,
) -> "Report":
    """Generate identifiers from phrases: compare the shortlist with full softmax and its other approximations.

    First random and adversarial queries are sent. The exit status is 1 if an answer is not in the catalogue. Five
    million phrases take minutes and 3 GB.

    Example:  freshet bench generation --phrases 2000000 --quick
    """
    from services.offline.evaluation.generation import rows

    return rows.run(request, sizes=tuple(dict.fromkeys(phrases)) if phrases else (), num_queries=queries)


@benchmark(app, "pefa", less_memory="--data scifact")
def pefa(
    request: "Request",
    *,
    data: Annotated[list[str] | None, typer.Option(help="scifact or medquad; may be repeated. Default: both.")] = None,
) -> "Report":
    """PEFA on text, as in its paper: real queries and documents, and a real sentence encoder.

    Compares the encoder alone with PEFA-XS and PEFA-XL: recall, build time, index size, latency, and the effect of
    little feedback. Lambda and k are chosen on held-out training queries.

    Example:  freshet bench pefa --data scifact --quick --json
    """
    from services.offline.evaluation.pefa import report
    from services.offline.evaluation.pefa.data import NAMES, known

    chosen = [known(name) for name in data or NAMES]
    return report.run(request, names=list(dict.fromkeys(chosen)))


@benchmark(app, "stream", less_memory="--data ml-latest-small")
def stream(
    request: "Request",
    *,
    data: Annotated[
        list[str] | None,
        typer.Option(help="A MovieLens name or a table's path; may be repeated. Default: ml-1m and ml-latest-small."),
    ] = None,
    seeds: Annotated[
        int, typer.Option(min=1, help="Number of runs, each with its own training and withheld items.")
    ] = 3,
    retrainings: Annotated[int, typer.Option(min=0, help="How often the retrained model is trained again.")] = 2,
    predict_every: Annotated[
        int, typer.Option(min=1, help="Predict every n-th event, learn from all. With --quick at least 8.")
    ] = 1,
    epochs: Annotated[int, typer.Option(min=1, help="Epochs of each training, preset quick.")] = 4,
) -> "Report":
    """Replay a stream event by event: the gain by feedback without training, and how soon a new item is found.

    Trains on the first four fifths of the time without a tenth of the catalogue, then predicts every later event before
    learning from it. Compares frozen items, PEFA-XS, XL and both, a model retrained at intervals, popularity, and
    item-kNN.

    Example:  freshet bench stream --data ml-latest-small --seeds 1 --retrainings 0 --quick
    """
    from services.offline.evaluation.stream import report
    from services.offline.evaluation.stream.models import quick_fit

    quick = request.quick
    return report.run(
        request,
        fit=quick_fit(epochs),
        datasets=list(dict.fromkeys(data or report.DATASETS)),
        seeds=list(range(request.seed, request.seed + (1 if quick else seeds))),
        retrainings=0 if quick else retrainings,
        predict_every=max(predict_every, 8) if quick else predict_every,
    )
