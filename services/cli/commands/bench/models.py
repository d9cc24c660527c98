"""`freshet bench ...` of what models learn: from interactions, absence, words, exposures, and what it costs."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from services.cli.commands.bench.group import DEFAULT_BUNDLE, Bundle, app
from services.cli.measuring import benchmark

if TYPE_CHECKING:
    from services.offline.evaluation.common.report import Report, Request


@benchmark(app, "actions")
def actions(
    request: "Request",
    *,
    bundle: Annotated[
        list[Path] | None,
        typer.Option(help="Trained with --split time; may be repeated, a seed each. Default: .freshet/bundle."),
    ] = None,
) -> "Report":
    """What a like, a dislike and an impression change for their person; whether knowing them finds the next liked item.

    Example:  freshet bench actions --quick --bundle .freshet/bundle
    """
    from services.offline.evaluation.actions import rows

    return rows.run(request, bundles=bundle or [DEFAULT_BUNDLE])


@benchmark(app, "shown")
def shown(request: "Request") -> "Report":
    """What knowing what was shown is worth, in a simulated world: hides, impressions, positions for new items.

    Example:  freshet bench shown --quick
    """
    from services.offline.evaluation.shown import rows

    return rows.measure(request)


@benchmark(app, "training-step")
def training_step(
    request: "Request",
    *,
    data: Annotated[list[str] | None, typer.Option(help="A data set; may be repeated.")] = None,
) -> "Report":
    """Processor time per position: the mixture's loss beside PyTorch's autograd and its floor, and each head's steps.

    Example:  freshet bench training-step --quick --data ml-latest-small
    """
    from services.offline.evaluation.training_step import rows

    return rows.run(request, data=data or ["ml-1m", "amazon-beauty-2014"])


@benchmark(app, "new-items")
def new_items(
    request: "Request",
    *,
    bundle: Annotated[
        list[Path] | None, typer.Option(help="A trained model; may be repeated, a seed each. Default: .freshet/bundle.")
    ] = None,
) -> "Report":
    """What a new item's title and categories are worth before anybody touched it.

    Example:  freshet bench new-items --quick --bundle .freshet/bundle
    """
    from services.algorithms.models.sentence_encoder import MiniLM, model_folder
    from services.offline.evaluation.new_items import rows

    return rows.run(request, bundles=bundle or [DEFAULT_BUNDLE], encoder=MiniLM(model_folder()))


@benchmark(app, "encoding")
def encoding(
    request: "Request",
    *,
    bundle: Bundle = DEFAULT_BUNDLE,
    inference_server: Annotated[
        str, typer.Option(help="host:port of an inference server with the same bundle, for its rows.")
    ] = "",
) -> "Report":
    """Encoding one more event: a step from kept keys and values, beside the whole window encoded anew.

    Example:  freshet bench encoding --quick --bundle .freshet/bundle

    Example:  freshet bench encoding --inference-server 127.0.0.1:18001
    """
    from services.offline.evaluation.encoding import incremental

    return incremental.run(request, bundle=bundle, inference_server=inference_server)


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
    """Generating identifiers from phrases: the shortlist beside full softmax and its other approximations.

    First random and adversarial queries are asked, and every answer must be in the catalogue: else the exit status
    is 1. Five million phrases take 3 GB and minutes to make.

    Example:  freshet bench generation --quick

    Example:  freshet bench generation --phrases 2000000 --json
    """
    from services.offline.evaluation.generation import rows

    return rows.run(request, sizes=tuple(dict.fromkeys(phrases)) if phrases else (), num_queries=queries)


@benchmark(app, "pefa", less_memory="--data scifact")
def pefa(
    request: "Request",
    *,
    data: Annotated[list[str] | None, typer.Option(help="scifact or medquad; may be repeated. Default: both.")] = None,
) -> "Report":
    """PEFA on text, its paper's own ground: real queries and documents, a real sentence encoder.

    The encoder alone beside PEFA-XS and PEFA-XL: recall, lambda and k swept and chosen on held-out training queries,
    build time, index size, latency, and how little feedback is enough.

    Example:  freshet bench pefa

    Example:  freshet bench pefa --data scifact --quick --json
    """
    from services.offline.evaluation.pefa import report
    from services.offline.evaluation.pefa.data import NAMES, known

    chosen = [known(name) for name in data or NAMES]
    return report.run(request, names=list(dict.fromkeys(chosen)))


@benchmark(app, "pefa-cost")
def pefa_cost(
    request: "Request",
    *,
    bundle: Bundle = DEFAULT_BUNDLE,
    algorithm: Annotated[
        list[str] | None, typer.Option(help="May be repeated; with sizes. Default: exact and top_k_avg(1000).")
    ] = None,
    neighbours: Annotated[int, typer.Option(min=1)] = 32,
    remembered: Annotated[int, typer.Option(min=1, help="Interactions in XL's memory.")] = 65_536,
    turns: Annotated[int, typer.Option(min=3, help="With --quick 3.")] = 15,
    queries: Annotated[int, typer.Option(min=10, help="With --quick at most 50.")] = 200,
) -> "Report":
    """What PEFA costs at query time: searches without it, with refreshed states (XS), and with a memory (XL).

    The bundle's data set must be at hand.

    Example:  freshet bench pefa-cost --bundle .freshet/bundle --algorithm exact --json
    """
    from services.offline.evaluation.pefa import cost

    sizes = cost.Sizes(
        neighbours=neighbours,
        remembered=remembered,
        turns=3 if request.quick else turns,
        num_queries=min(queries, 50) if request.quick else queries,
        seed=request.seed,
    )
    return cost.run(request, bundle, algorithm or ["exact", "top_k_avg(1000)"], sizes)


@benchmark(app, "stream", less_memory="--data ml-latest-small")
def stream(
    request: "Request",
    *,
    data: Annotated[
        list[str] | None,
        typer.Option(help="A MovieLens name or a table's path; may be repeated. Default: ml-1m and ml-latest-small."),
    ] = None,
    seeds: Annotated[int, typer.Option(min=1, help="How many: each trains and walks anew, other items withheld.")] = 3,
    retrainings: Annotated[int, typer.Option(min=0, help="How often the retrained model is trained again.")] = 2,
    predict_every: Annotated[
        int, typer.Option(min=1, help="Predict every n-th event, learn from all. With --quick at least 8.")
    ] = 1,
    epochs: Annotated[int, typer.Option(min=1, help="Epochs of each training, preset quick.")] = 4,
) -> "Report":
    """A stream walked event by event: what feedback is worth without training, and how soon a new item is found.

    Trains on the first four fifths of time with a tenth of the catalogue withheld, then predicts every later event
    before learning from it: frozen items, PEFA-XS, XL and both, retrained at intervals, popularity, item-kNN.

    Example:  freshet bench stream

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


@benchmark(app, "cold")
def cold(
    request: "Request",
    *,
    data: Annotated[
        list[str] | None, typer.Option(help="Data with times by the clock; may be repeated. Default: MovieLens.")
    ] = None,
    seeds: Annotated[int, typer.Option(min=1, help="How many: each trains anew.")] = 3,
    predict_every: Annotated[
        int, typer.Option(min=1, help="Predict every n-th event, learn from all. With --quick at least 50.")
    ] = 1,
    epochs: Annotated[int, typer.Option(min=1, help="Epochs of each training, preset quick.")] = 4,
) -> "Report":
    """What is popular now for people of whom nothing or little is known, and until when it helps.

    Example:  freshet bench cold --data ml-latest-small --seeds 1 --quick
    """
    from services.offline.evaluation.cold import rows
    from services.offline.evaluation.stream.models import quick_fit

    return rows.run(
        request,
        fit=quick_fit(epochs),
        seeds=list(range(request.seed, request.seed + (1 if request.quick else seeds))),
        predict_every=max(predict_every, 50) if request.quick else predict_every,
        datasets=list(dict.fromkeys(data or rows.DATASETS)),
    )


@benchmark(app, "retraining")
def retraining(
    request: "Request", *, seeds: Annotated[int, typer.Option(min=1, help="How many worlds and trainings.")] = 3
) -> "Report":
    """What the gate of `freshet retrain` says of a better model and of two spoilt ones, in a simulated world.

    Example:  freshet bench retraining --seeds 1 --quick
    """
    from services.offline.evaluation.retraining import rows

    return rows.run(request, seeds=1 if request.quick else seeds, epochs=1 if request.quick else 3)


@benchmark(app, "version-sets")
def version_sets(
    request: "Request",
    *,
    data: Annotated[str, typer.Option(help="Data with times by the clock.")] = "ml-1m",
    quiet_s: Annotated[float, typer.Option(min=1, help="Seconds between two commands.")] = 30,
    share: Annotated[float, typer.Option(min=0.01, max=1, help="Of one core, for warming.")] = 0.1,
) -> "Report":
    """A new model goes live, and back, by the operator's commands, while people ask: who noticed.

    Starts a stack of its own and takes some twenty minutes.

    Example:  freshet bench version-sets --data ml-latest-small --quick
    """
    from services.offline.evaluation.version_sets import rows

    return rows.run(request, data=data, quiet_s=min(quiet_s, 6) if request.quick else quiet_s, share=share)


@benchmark(app, "text", less_memory="--data scifact")
def text(
    request: "Request",
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
) -> "Report":
    """Text: who answers real questions best, over documents that have training questions of their own.

    BM25, MiniLM, both with PEFA, MiniLM fine-tuned, text MoL, and PIXAR by vocabulary size and tokenizer: recall, hits
    and MRR over seeds, latency one question at a time, memory, and how long identifiers are in tokens.

    Example:  freshet bench text

    Example:  freshet bench text --data scifact --seeds 1 --no-train
    """
    from services.offline.datasets.texts import COLLECTIONS
    from services.offline.evaluation.text import report

    return report.run(
        request,
        names=list(dict.fromkeys(data or COLLECTIONS)),
        seeds=list(range(request.seed, request.seed + (1 if request.quick else seeds))),
        epochs=epochs,
        train=train,
        resume=resume,
    )
