"""`freshet bench <subject>`: measure one subject, and write tables and plots.

It gathers options and shows progress; what is measured, and how, is in services/offline/evaluation.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from services.cli.measuring import AsJson, Out, Quick, Seed, benchmark, measured
from services.cli.output import CommandError, ExitStatus, reports_errors, sentences, usage_error
from services.offline.openmp import wait_without_spinning

if TYPE_CHECKING:
    from services.offline.evaluation.common.report import Report, Request

app = typer.Typer(
    name="bench", help="Measure algorithms beside their baselines; tables and plots.", no_args_is_help=True
)
paper = typer.Typer(name="paper", help="A table of the papers, measured on this machine.", no_args_is_help=True)
app.add_typer(paper)

Shapes = Annotated[
    list[str] | None, typer.Option("--shape", help="ml-1m, ml-20m, books or nq320k; may be repeated. Default: all.")
]
Batches = Annotated[list[int] | None, typer.Option("--batch", min=1, help="Queries per call; may be repeated.")]
Bundle = Annotated[Path, typer.Option(envvar="FRESHET_BUNDLE", help="A trained model, exported.")]
_BUNDLE = Path(".freshet/bundle")


@paper.callback()
def papers() -> None:
    """A table of the papers, measured on this machine."""


@paper.command("table-3")
@reports_errors
def table_3(
    *,
    data: Annotated[list[str] | None, typer.Option(help="A set of the table; may be repeated. Default: all.")] = None,
    seeds: Annotated[int | None, typer.Option(min=1, help="Final runs per arm. Default: ml-1m-full 1, else 3.")] = None,
    hours: Annotated[
        float | None, typer.Option(min=0, help="Stop after so long; the next call goes on. 0: only the page.")
    ] = None,
    store: Annotated[
        Path | None, typer.Option(help="Finished runs and checkpoints. Default: quality in the local cache.")
    ] = None,
    threads: Annotated[int | None, typer.Option(min=1, help="PyTorch's threads; default: its own choice.")] = None,
    out: Out = None,
    as_json: AsJson = False,
) -> None:
    """SASRec and HSTU, each with a dot product and a mixture, beside tuned baselines: quality, intervals, hours.

    Every arm's trials on validation have the same processor time, ten minutes a split; the test is read once. Processor
    hours, estimated from finished runs: ml-1m-long (30 epochs) 16, ml-1m-full (the paper's size) 30, all other sets 20.
    Interrupt it at any time: finished runs are kept, and a training resumes from its checkpoint.

    Example:  freshet bench paper table-3 --data ml-latest-small

    Example:  freshet bench paper table-3 --hours 8
    """
    wait_without_spinning()
    from services.offline.datasets.locate import Locator
    from services.offline.evaluation.common.timing import use_threads
    from services.offline.evaluation.quality import page
    from services.offline.evaluation.quality.table import DATA

    known = {one.key: one for one in DATA}
    for name in data or []:
        if name not in known:
            raise CommandError(f"data={name!r}; allowed: {', '.join(known)}", status=ExitStatus.USAGE)
    if threads is not None:
        use_threads(threads)
    with sentences(no_memory="--data ml-latest-small"):
        measured(
            lambda request: page.quality(
                request,
                data=[one for one in DATA if not data or one.key in data],
                store=store or Locator().cache_dir().with_name("quality"),
                seeds=seeds,
                hours=hours,
            ),
            out=out,
            quick=False,
            seed=0,
            as_json=as_json,
        )


@benchmark(paper, "published")
def published(request: "Request") -> "Report":
    """What each difference of the authors' protocol adds to our leave-one-out on ml-1m, at preset quick.

    Some two hours of a core; interrupt it at any time: trainings that the page's JSON has are not done again.

    Example:  freshet bench paper published --quick
    """
    from services.offline.evaluation.quality import published

    return published.run(request)


@app.callback()
def bench() -> None:
    """Measure algorithms beside their baselines; tables and plots."""


def _wrong_answers(report: dict[str, Any]) -> str:
    from services.offline.evaluation.retrieval.rows import wrong_proofs

    wrong = wrong_proofs(report["rows"])
    if report["proof"] is not None and not report["proof"]["holds"]:
        wrong.append(f"against float64: {report['proof']}")
    return f"proven exact, and wrong: {'; '.join(wrong)}" if wrong else ""


@benchmark(app, "retrieval", less_memory="--shape ml-20m", wrong=_wrong_answers)
def retrieval(
    request: "Request",
    *,
    shape: Shapes = None,
    batch: Batches = None,
    bundle: Annotated[Path | None, typer.Option(help="A trained model in place of the generated ml-1m.")] = None,
    prove: Annotated[
        bool, typer.Option("--prove", help="First compare answers and certificates with float64 on 100,000 queries.")
    ] = False,
    device: Annotated[str, typer.Option(hidden=True)] = "cpu",
) -> "Report":
    """Top-K over a Mixture of Logits: every algorithm beside its PyTorch transcription and the roofline.

    Every row has milliseconds, speedup, recall, the share proven exact, items touched and bytes per item. The exit
    status is 1 if an answer called proven exact was not the exact one. On a card: `freshet bench gpu`.

    Example:  freshet bench retrieval --quick

    Example:  freshet bench retrieval --shape books --batch 32 --json
    """
    from services.offline.evaluation.catalogues.scene import SHAPES, shape_named
    from services.offline.evaluation.retrieval import rows

    if device != "cpu":
        raise ValueError(f"device={device!r}; allowed: cpu; on a card it is `freshet bench gpu`")
    chosen = shape or list(SHAPES)
    for name in chosen:
        shape_named(name)
    if bundle is not None and "ml-1m" not in chosen:
        raise ValueError(f"bundle={str(bundle)!r} takes the place of ml-1m; shape={', '.join(chosen)} leaves it out")
    batches = tuple(dict.fromkeys(batch)) if batch else None
    return rows.run(request, shapes=chosen, batches=batches, bundle=bundle, with_proof=prove)


@app.command("gpu")
@reports_errors
def gpu(
    *,
    shape: Shapes = None,
    batch: Batches = None,
    quick: Quick = False,
    seed: Seed = 0,
    as_json: AsJson = False,
    device: Annotated[str, typer.Option(hidden=True)] = "cuda",
) -> None:
    """The papers' Table 5 on a card: every algorithm beside its roofline and the paper's times, line by line.

    Needs NumPy, PyTorch, Triton, typer and rich alone. The exit status is 1 if a row failed or a proof was wrong.

    Example:  freshet bench gpu --shape books --quick
    """
    import torch

    from services.offline.evaluation.gpu import table

    if device not in ("cuda", "cpu"):
        raise usage_error(f"device={device!r}; allowed: cuda, or cpu to try the command at 900 items")
    if device == "cuda" and not torch.cuda.is_available():
        raise CommandError(table.NO_CARD, advice="freshet bench retrieval", status=ExitStatus.UNAVAILABLE)
    try:  # not `sentences`: its errors need gRPC
        status = table.measure(
            shape or (), batches=batch or (32, 1), seed=seed, quick=quick, as_json=as_json, device=device
        )
    except ValueError as error:
        raise usage_error(str(error), "see --help for an example") from error
    except MemoryError as error:
        raise CommandError("there is not enough memory", advice="--shape ml-20m") from error
    raise typer.Exit(status)


@benchmark(app, "quantization")
def quantization(
    request: "Request",
    *,
    bundle: Annotated[
        list[Path] | None, typer.Option(help="Codes of a trained bundle's items instead; may be repeated.")
    ] = None,
) -> "Report":
    """Anisotropic codes beside FAISS's at equal bits, on real embeddings, or on trained items.

    Example:  freshet bench quantization --quick

    Example:  freshet bench quantization --bundle .freshet/bundle
    """
    from services.offline.evaluation.quantization import codes, trained

    return trained.run(request, bundle) if bundle else codes.run(request)


@benchmark(app, "mutation", less_memory="--shape ml-20m")
def mutation(
    request: "Request",
    *,
    shape: Annotated[
        list[str] | None, typer.Option(help="dot-32 or ml-20m (with --quick ml-1m); may be repeated. Default: both.")
    ] = None,
    rate: Annotated[
        list[int] | None, typer.Option(min=0, help="Changes per second; may be repeated. Default: 0 to 10,000.")
    ] = None,
    seconds: Annotated[
        float | None, typer.Option(min=1.0, help="Seconds per row. Default: 60; with --quick 4.")
    ] = None,
) -> "Report":
    """Search latency and recall while items are inserted, updated and deleted, beside FAISS and hnswlib.

    Example:  freshet bench mutation --quick --json

    Example:  freshet bench mutation --shape ml-20m --rate 1000 --seconds 600 --out .freshet/bench
    """
    from services.offline.evaluation.mutation import rows

    rates = tuple(dict.fromkeys(rate)) if rate else None
    return rows.run(request, shapes=shape or (), seconds=seconds, rates=rates)


@benchmark(app, "large", less_memory="--size 1000000")
def large(
    request: "Request",
    *,
    bundle: Bundle = _BUNDLE,
    size: Annotated[list[int] | None, typer.Option(min=1000, help="Items; may be repeated. Default: 1M, 10M.")] = None,
    algorithm: Annotated[list[str] | None, typer.Option(help="May be repeated. Default: a choice of five.")] = None,
    port: Annotated[int, typer.Option(min=1, max=65535, help="Of the service that is started.")] = 51952,
) -> "Report":
    """A search among millions of synthetic items, in the library and through the service's RPC.

    Ten million take some 10 GB of memory and half an hour.

    Example:  freshet bench large --size 1000000
    """
    from functools import partial

    from services.cli.candidates_process import serving
    from services.offline.evaluation.large import rows

    sizes = size or ([20_000] if request.quick else [1_000_000, 10_000_000])
    serve = partial(serving, port=port)
    return rows.run(request, bundle=bundle, sizes=sizes, algorithms=algorithm or rows.ALGORITHMS, serve=serve)


@benchmark(app, "scale")
def scale(
    request: "Request",
    *,
    bundle: Bundle = _BUNDLE,
    check: Annotated[bool, typer.Option("--check", help="Measure what the stored report predicts.")] = False,
    port: Annotated[int, typer.Option(min=1, max=65535, help="Of the service that is started.")] = 51953,
) -> "Report":
    """The unit costs of `freshet plan`: fitted at 3,706 and a million items, predicting 300,000 and ten million.

    With --check those two are measured (some 15 GB of memory), and stand beside their predictions.

    Example:  freshet bench scale

    Example:  freshet bench scale --check
    """
    from functools import partial

    from services.cli.candidates_process import serving
    from services.offline.evaluation.scale import rows

    return rows.run(request, bundle=bundle, check=check, serve=partial(serving, port=port))


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

    return rows.run(request, bundles=bundle or [_BUNDLE])


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

    return rows.run(request, bundles=bundle or [_BUNDLE], encoder=MiniLM(model_folder()))


@benchmark(app, "encoding")
def encoding(
    request: "Request",
    *,
    bundle: Bundle = _BUNDLE,
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
    bundle: Bundle = _BUNDLE,
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


@benchmark(app, "catalogues")
def catalogues(
    request: "Request",
    *,
    bundle: Bundle = _BUNDLE,
    queries: Annotated[int, typer.Option(min=40, help="Users whose states are measured.")] = 300,
) -> "Report":
    """How near generated catalogues come to a trained model: the generator's constants, fitted to a bundle.

    Example:  freshet bench catalogues --bundle .freshet/bundle
    """
    from services.offline.evaluation.catalogues import fit

    return fit.run(request, bundle, num_queries=queries)


@benchmark(app, "universality")
def universality(request: "Request") -> "Report":
    """Theorem 1: any score matrix is a mixture of two rank-1 logits; the paper's construction beside ours.

    Example:  freshet bench universality --out .freshet/bench
    """
    from services.offline.evaluation.retrieval import universality

    return universality.run(request)


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


@benchmark(app, "shards")
def shards(
    request: "Request",
    *,
    bundle: Annotated[Path, typer.Option(help="A model bundle.")] = Path(".freshet/bundle"),
    shards: Annotated[int, typer.Option(min=2, max=16, help="Of the catalogue.")] = 4,
    replicas: Annotated[int, typer.Option(min=2, max=4, help="Processes for each shard.")] = 2,
    searches: Annotated[int, typer.Option(min=200, help="Compared with one process.")] = 100_000,
) -> "Report":
    """Candidates in shards beside one process of all items: every answer compared while items change, bounds, outages.

    Starts a stack of its own and takes some fifteen minutes.

    Example:  freshet bench shards --bundle .freshet/bundle --quick
    """
    from services.offline.evaluation.shards import rows

    searches = min(searches, 2_000) if request.quick else searches
    return rows.run(request, bundle=bundle, shards=shards, replicas=replicas, searches=searches)


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
