"""`freshet bench <subject>`: measure one subject, and write tables and plots.

Commands only read options; services/offline/evaluation measures.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Option

from services.cli.measuring import Quick, Seed, benchmark
from services.cli.output import CommandError, ExitStatus, group_command, is_json, usage_error

if TYPE_CHECKING:
    from services.offline.evaluation.common.report import Report, Request

app = typer.Typer(
    name="bench", help="Compare algorithms with their baselines; write tables and plots.", no_args_is_help=True
)
paper = typer.Typer(name="paper", help="A table of the papers, measured on this machine.", no_args_is_help=True)
app.add_typer(paper)

Bundle = Annotated[Path, Option(envvar="FRESHET_BUNDLE", help="A trained model, exported.")]
DEFAULT_BUNDLE = Path(".freshet/bundle")
Shapes = Annotated[list[str] | None, Option("--shape", help="ml-1m, ml-20m, books, nq320k; may be repeated [all].")]
Batches = Annotated[list[int] | None, Option("--batch", min=1, help="Queries per call; may be repeated.")]


@benchmark(
    app,
    "generation",
    less_memory="--phrases 1000000",
    wrong=lambda report: "" if report["proof"]["holds"] else f"not in the catalogue: {report['proof']}",
)
def generation(
    request: "Request",
    *,
    phrases: Annotated[
        list[int] | None, Option(min=10_000, help="Vocabulary sizes; may be repeated. Default: 128,000 to 5 million.")
    ] = None,
    queries: Annotated[
        int | None, Option(min=100, help="Queries whose answers must be in the catalogue. Default: 100,000.")
    ] = None,
) -> "Report":
    """Generate identifiers from phrases: compare the shortlist with full softmax and SVD-softmax.

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
    data: Annotated[list[str] | None, Option(help="scifact or medquad; may be repeated. Default: both.")] = None,
) -> "Report":
    """Measure PEFA on text, as its paper does, with real queries, documents and a sentence encoder.

    The command compares recall, build time, index size and latency of the encoder alone, PEFA-XS and PEFA-XL, and the
    effect of little feedback. Lambda and k are chosen on held-out training queries.

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
        Option(help="A MovieLens name or a table's path; may be repeated. Default: ml-1m and ml-latest-small."),
    ] = None,
    seeds: Annotated[int, Option(min=1, help="Number of runs, each with its own training and withheld items.")] = 3,
    retrainings: Annotated[int, Option(min=0, help="How often the retrained model is trained again.")] = 2,
    predict_every: Annotated[
        int, Option(min=1, help="Predict every n-th event, learn from all. With --quick at least 8.")
    ] = 1,
    epochs: Annotated[int, Option(min=1, help="Epochs of each training, preset quick.")] = 4,
) -> "Report":
    """Replay a stream; measure the gain from feedback without training, and how soon new items are found.

    The command trains on the first four fifths of the time, without a tenth of the catalogue. Then it predicts each
    later event before it learns from the event. It compares frozen items, PEFA-XS, XL and both, a model retrained at
    intervals, popularity, and item-kNN.

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


@benchmark(paper, "table-3", less_memory="--data ml-latest-small", shared=("out",))
def table_3(
    request: "Request",
    *,
    data: Annotated[list[str] | None, Option(help="A set of the table; may be repeated. Default: all.")] = None,
    seeds: Annotated[int | None, Option(min=1, help="Final runs per arm. Default: 3.")] = None,
    hours: Annotated[
        float | None, Option(min=0, help="Stop after this many hours; the next call continues. 0: only write the page.")
    ] = None,
    store: Annotated[Path | None, Option(help="Finished runs and checkpoints [quality in the local cache].")] = None,
    threads: Annotated[int | None, Option(min=1, help="PyTorch's threads; default: its own choice.")] = None,
) -> "Report":
    """Compare SASRec and HSTU, each with a dot product and a mixture, with tuned baselines.

    Every arm's validation trials get the same processor time, ten minutes for each split. The test split is used once.
    The estimate is 16 processor hours for ml-1m-long (30 epochs) and 20 for all other sets. You may interrupt the
    command: finished runs are kept, and training resumes from its checkpoint.

    Example:  freshet bench paper table-3 --data ml-latest-small --hours 8
    """
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
    return page.quality(
        request,
        data=[one for one in DATA if not data or one.key in data],
        store=store or Locator().cache_dir().with_name("quality"),
        seeds=seeds,
        hours=hours,
    )


@benchmark(paper, "published")
def published(request: "Request") -> "Report":
    """Measure how each difference of the authors' protocol changes our leave-one-out result on ml-1m, at preset quick.

    Takes about two hours on one core. You may interrupt it: trainings in the page's JSON are not repeated.

    Example:  freshet bench paper published --quick
    """
    from services.offline.evaluation.quality import published

    return published.run(request)


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
    bundle: Annotated[Path | None, Option(help="A trained model instead of the generated ml-1m.")] = None,
    prove: Annotated[
        bool, Option("--prove", help="First compare answers and certificates with float64 on 100,000 queries.")
    ] = False,
) -> "Report":
    """Compare every Top-K algorithm for a Mixture of Logits with its PyTorch transcription and the roofline.

    A row has milliseconds, speedup, recall, the share of answers proven exact, items touched and bytes per item. The
    exit status is 1 if an answer marked as proven exact was wrong. On a GPU, use `freshet bench gpu`.

    Example:  freshet bench retrieval --quick

    Example:  freshet bench retrieval --shape books --batch 32 --json
    """
    from services.offline.evaluation.catalogues.scene import SHAPES, shape_named
    from services.offline.evaluation.retrieval import rows

    chosen = shape or list(SHAPES)
    for name in chosen:
        shape_named(name)
    if bundle is not None and "ml-1m" not in chosen:
        raise ValueError(f"bundle={str(bundle)!r} takes the place of ml-1m; shape={', '.join(chosen)} leaves it out")
    batches = tuple(dict.fromkeys(batch)) if batch else None
    return rows.run(request, shapes=chosen, batches=batches, bundle=bundle, with_proof=prove)


@group_command(app, "gpu")
def gpu(
    *,
    shape: Shapes = None,
    batch: Batches = None,
    quick: Quick = False,
    seed: Seed = 0,
    device: Annotated[str, Option(hidden=True)] = "cuda",
) -> None:
    """Measure the paper's Table 5 on a GPU: compare every algorithm with its roofline and the paper's times.

    The command needs only NumPy, PyTorch, Triton, typer and rich. The exit status is 1 if a row failed or a proof was
    wrong.

    Example:  freshet bench gpu --shape books --quick
    """
    import torch

    from services.offline.evaluation.gpu import table

    if device not in ("cuda", "cpu"):
        raise usage_error(f"device={device!r}; allowed: cuda, or cpu to try the command at 900 items")
    if device == "cuda" and not torch.cuda.is_available():
        raise CommandError(table.NO_CARD, advice="freshet bench retrieval", status=ExitStatus.UNAVAILABLE)
    try:  # `sentences` would import gRPC
        status = table.measure(
            shape or (), batches=batch or (32, 1), seed=seed, quick=quick, as_json=is_json(), device=device
        )
    except ValueError as error:
        raise usage_error(str(error), "see --help for an example") from error
    except MemoryError as error:
        raise CommandError("there is not enough memory", advice="--shape ml-20m") from error
    raise typer.Exit(status)


@benchmark(app, "quantization")
def quantization(request: "Request") -> "Report":
    """Compare anisotropic codes with FAISS's at equal bits, and quantized search with other libraries'.

    Example:  freshet bench quantization --quick
    """
    from services.offline.evaluation.quantization import codes

    return codes.run(request)


@benchmark(app, "large", less_memory="--size 1000000")
def large(
    request: "Request",
    *,
    bundle: Bundle = DEFAULT_BUNDLE,
    size: Annotated[list[int] | None, Option(min=1000, help="Items; may be repeated. Default: 1M, 10M.")] = None,
    algorithm: Annotated[list[str] | None, Option(help="An algorithm; may be repeated. Default: five.")] = None,
    port: Annotated[int, Option(min=1, max=65535, help="Port of the service that is started.")] = 51952,
    shard: Annotated[str, Option(help="i/n: instead measure start and memory of it and the other processes.")] = "",
    width: Annotated[int | None, Option(min=2, help="With --shard: number of coordinates of a component.")] = None,
) -> "Report":
    """Search among millions of synthetic items, in the library and through the service's RPC.

    Ten million items take about 10 GB of memory and half an hour.

    Example:  freshet bench large --size 1000000

    Example:  freshet bench large --size 100000000 --shard 0/8 --width 8
    """
    from functools import partial

    from services.cli.candidates_process import serving
    from services.contracts.shards import Shard
    from services.offline.evaluation.large import processes, rows

    sizes = size or ([20_000] if request.quick else [1_000_000, 10_000_000])
    if shard:
        return processes.run(request, bundle=bundle, sizes=sizes, shard=Shard.parse(shard), width=width)
    serve = partial(serving, port=port)
    return rows.run(request, bundle=bundle, sizes=sizes, algorithms=algorithm or rows.ALGORITHMS, serve=serve)


def _broken_gaps(report: dict[str, Any]) -> str:
    from services.offline.evaluation.large import gaps

    return gaps.broken(report)


@benchmark(app, "gaps", less_memory="--size 100000", wrong=_broken_gaps)
def gaps(
    request: "Request",
    *,
    bundle: Bundle = DEFAULT_BUNDLE,
    size: Annotated[list[int] | None, Option(min=1000, help="Items; may be repeated. Default: 1M.")] = None,
    requests: Annotated[int, Option(min=1, help="Requests of each kind; beyond 1,000 only those with a gap.")] = 1000,
) -> "Report":
    """Compare searches that must prove a gap of 0, .01 or .05 with `exact`, a pool without a guarantee and brute force.

    The exit status is 1 if a proven gap did not hold.

    Example:  freshet bench gaps --size 100000
    """
    from services.offline.evaluation.large import gaps

    return gaps.run(
        request, bundle=bundle, sizes=size or ([20_000] if request.quick else [1_000_000]), requests=requests
    )


@benchmark(app, "universality")
def universality(request: "Request") -> "Report":
    """Theorem 1: any score matrix is a mixture of two rank-1 logits; compare the paper's construction with ours.

    Example:  freshet bench universality --out .freshet/bench
    """
    from services.offline.evaluation.retrieval import universality

    return universality.run(request)
