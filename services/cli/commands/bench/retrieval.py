"""`freshet bench ...` commands for retrieval: speed, exactness and size, in the library and as a service."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from services.cli.commands.bench.group import DEFAULT_BUNDLE, Bundle, app
from services.cli.measuring import Quick, Seed, benchmark
from services.cli.output import CommandError, ExitStatus, group_command, is_json, usage_error

if TYPE_CHECKING:
    from services.offline.evaluation.common.report import Report, Request

Shapes = Annotated[
    list[str] | None, typer.Option("--shape", help="ml-1m, ml-20m, books or nq320k; may be repeated. Default: all.")
]
Batches = Annotated[list[int] | None, typer.Option("--batch", min=1, help="Queries per call; may be repeated.")]


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
    bundle: Annotated[Path | None, typer.Option(help="A trained model instead of the generated ml-1m.")] = None,
    prove: Annotated[
        bool, typer.Option("--prove", help="First compare answers and certificates with float64 on 100,000 queries.")
    ] = False,
) -> "Report":
    """Top-K over a Mixture of Logits: compare every algorithm with its PyTorch transcription and the roofline.

    A row has milliseconds, speedup, recall, the share of answers proven exact, items touched and bytes per item. The
    exit status is 1 if an answer marked as proven exact was wrong. On a GPU use `freshet bench gpu`.

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
    device: Annotated[str, typer.Option(hidden=True)] = "cuda",
) -> None:
    """The papers' Table 5 on a GPU: compare every algorithm with its roofline and the paper's times, line by line.

    Needs only NumPy, PyTorch, Triton, typer and rich. The exit status is 1 if a row failed or a proof was wrong.

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
            shape or (), batches=batch or (32, 1), seed=seed, quick=quick, as_json=is_json(), device=device
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
    bundle: Annotated[list[Path] | None, typer.Option(help="Use a trained bundle's items; may be repeated.")] = None,
) -> "Report":
    """Compare anisotropic codes with FAISS's at equal bits, on real embeddings, or on trained items.

    Example:  freshet bench quantization --bundle .freshet/bundle --quick
    """
    from services.offline.evaluation.quantization import codes, trained

    return trained.run(request, bundle) if bundle else codes.run(request)


@benchmark(app, "large", less_memory="--size 1000000")
def large(
    request: "Request",
    *,
    bundle: Bundle = DEFAULT_BUNDLE,
    size: Annotated[list[int] | None, typer.Option(min=1000, help="Items; may be repeated. Default: 1M, 10M.")] = None,
    algorithm: Annotated[list[str] | None, typer.Option(help="An algorithm; may be repeated. Default: five.")] = None,
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port of the service that is started.")] = 51952,
    shard: Annotated[
        str, typer.Option(help="i/n: instead measure start and memory of this shard and of the other processes.")
    ] = "",
    width: Annotated[
        int | None, typer.Option(min=2, help="With --shard: number of coordinates of a component.")
    ] = None,
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
    size: Annotated[list[int] | None, typer.Option(min=1000, help="Items; may be repeated. Default: 1M.")] = None,
    requests: Annotated[int, typer.Option(min=1, help="Requests of each kind.")] = 1000,
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
