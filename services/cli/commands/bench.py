"""`freshet bench`: measure retrieval, quantization and the changing index, and write tables and plots.

It gathers options and shows progress; what is measured, and how, is in services/offline/evaluation.
"""

from pathlib import Path
from typing import Annotated

import typer

from services.cli.measuring import AsJson, Out, Quick, Seed, in_sentences, measured
from services.cli.output import CommandError, ExitStatus, reports_errors
from services.cli.threads import wait_without_spinning

app = typer.Typer(
    name="bench", help="Measure algorithms beside their baselines; tables and plots.", no_args_is_help=True
)


paper = typer.Typer(name="paper", help="A table of the papers, measured on this machine.", no_args_is_help=True)
app.add_typer(paper)


@paper.callback()
def papers() -> None:
    """A table of the papers, measured on this machine."""


@paper.command("table-3")
@reports_errors
def table_3(
    *,
    data: Annotated[list[str] | None, typer.Option(help="A set of the table; may be repeated. Default: all.")] = None,
    seeds: Annotated[int | None, typer.Option(min=1, help="Final runs per arm. Default: 5 on ml-1m, else 3.")] = None,
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

    Every arm has the same number of trials on validation; the test is read once. Takes about a day on two cores for
    all sets, and ml-1m-full (the paper's size) another. Interrupt it at any time: finished runs are kept, a training
    goes on from its checkpoint.

    Example:  freshet bench paper table-3 --data ml-latest-small

    Example:  freshet bench paper table-3 --hours 8
    """
    wait_without_spinning()
    import torch

    from services.offline.datasets.locate import Locator
    from services.offline.evaluation import benchmarks
    from services.offline.evaluation.quality.table import DATA

    known = {one.key: one for one in DATA}
    for name in data or []:
        if name not in known:
            raise CommandError(f"data={name!r}; allowed: {', '.join(known)}", status=ExitStatus.USAGE)
    if threads is not None:
        torch.set_num_threads(threads)
    with in_sentences(when_memory_ends="--data ml-latest-small"):
        measured(
            lambda request: benchmarks.quality(
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


@app.callback()
def bench() -> None:
    """Measure algorithms beside their baselines; tables and plots."""


@app.command("retrieval")
@reports_errors
def retrieval(
    *,
    shape: Annotated[
        list[str] | None, typer.Option(help="ml-1m, ml-20m, books or nq320k; may be repeated. Default: all.")
    ] = None,
    batch: Annotated[list[int] | None, typer.Option(min=1, help="Queries per call; may be repeated.")] = None,
    bundle: Annotated[Path | None, typer.Option(help="A trained model in place of the generated ml-1m.")] = None,
    prove: Annotated[
        bool, typer.Option("--prove", help="First compare answers and certificates with float64 on 100,000 queries.")
    ] = False,
    device: Annotated[str, typer.Option(help="cpu, or cuda for the table of the GPU's algorithms.")] = "cpu",
    quick: Quick = False,
    out: Out = None,
    seed: Seed = 0,
    as_json: AsJson = False,
) -> None:
    """Top-K over a Mixture of Logits: every algorithm beside its PyTorch transcription and the machine's floor.

    Every row has milliseconds, speedup, recall, the share proven exact, items touched and bytes per item. The exit
    status is 1 if an answer called proven exact was not the exact one.

    Example:  freshet bench retrieval --quick

    Example:  freshet bench retrieval --shape books --batch 32 --json
    """
    wait_without_spinning()
    from services.offline.evaluation import benchmarks
    from services.offline.evaluation.catalogues.shapes import SHAPES, shape_named

    if device not in ("cpu", "cuda"):
        raise CommandError(f"device={device!r}; allowed: cpu, cuda", status=ExitStatus.USAGE)
    if device == "cuda":
        _on_gpu(shape or [], batch or [], quick=quick, seed=seed, as_json=as_json)
        return
    chosen = shape or list(SHAPES)
    with in_sentences(when_memory_ends="--shape ml-20m"):
        for name in chosen:
            shape_named(name)
        if bundle is not None and "ml-1m" not in chosen:
            raise ValueError(
                f"bundle={str(bundle)!r} takes the place of ml-1m; shape={', '.join(chosen)} leaves it out"
            )
        batches = tuple(dict.fromkeys(batch)) if batch else None
        report = measured(
            lambda request: benchmarks.retrieval(request, shapes=chosen, batches=batches, bundle=bundle, prove=prove),
            out=out,
            quick=quick,
            seed=seed,
            as_json=as_json,
        )
    wrong = benchmarks.wrong_proofs(report["rows"])
    if report["proof"] is not None and not report["proof"]["holds"]:
        wrong.append(f"against float64: {report['proof']}")
    if wrong:
        raise CommandError(f"proven exact, and wrong: {'; '.join(wrong)}", advice="please report this with the seed")


@app.command("quantization")
@reports_errors
def quantization(*, quick: Quick = False, out: Out = None, seed: Seed = 0, as_json: AsJson = False) -> None:
    """Anisotropic codes beside FAISS's at equal bits, on real embeddings.

    Example:  freshet bench quantization --quick
    """
    wait_without_spinning()
    from services.offline.evaluation import benchmarks

    with in_sentences(when_memory_ends="--shape ml-20m"):
        measured(benchmarks.quantization, out=out, quick=quick, seed=seed, as_json=as_json)


@app.command("mutation")
@reports_errors
def mutation(
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
    quick: Quick = False,
    out: Out = None,
    seed: Seed = 0,
    as_json: AsJson = False,
) -> None:
    """Search latency and recall while items are inserted, updated and deleted, beside FAISS and hnswlib.

    Example:  freshet bench mutation --quick --json

    Example:  freshet bench mutation --shape ml-20m --rate 1000 --seconds 600 --out .freshet/bench
    """
    wait_without_spinning()
    from services.offline.evaluation import benchmarks

    with in_sentences(when_memory_ends="--shape ml-20m"):
        measured(
            lambda request: benchmarks.mutation(
                request, shapes=shape or (), seconds=seconds, rates=tuple(dict.fromkeys(rate)) if rate else None
            ),
            out=out,
            quick=quick,
            seed=seed,
            as_json=as_json,
        )


@app.command("encoding")
@reports_errors
def encoding(
    *,
    bundle: Annotated[Path, typer.Option(envvar="FRESHET_BUNDLE", help="A trained model, exported.")] = Path(
        ".freshet/bundle"
    ),
    inference_server: Annotated[
        str, typer.Option(help="host:port of an inference server with the same bundle, for its rows.")
    ] = "",
    quick: Quick = False,
    out: Out = None,
    seed: Seed = 0,
    as_json: AsJson = False,
) -> None:
    """Encoding one more event: a step from kept keys and values, beside the whole window encoded anew.

    Example:  freshet bench encoding --quick --bundle .freshet/bundle

    Example:  freshet bench encoding --inference-server 127.0.0.1:18001
    """
    wait_without_spinning()
    from services.offline.evaluation import benchmarks

    with in_sentences(when_memory_ends="--quick"):
        measured(
            lambda request: benchmarks.encoding(request, bundle=bundle, inference_server=inference_server),
            out=out,
            quick=quick,
            seed=seed,
            as_json=as_json,
        )


@app.command("generation")
@reports_errors
def generation(
    *,
    phrases: Annotated[
        list[int] | None,
        typer.Option(min=10_000, help="Vocabulary sizes; may be repeated. Default: 128,000 to 5 million."),
    ] = None,
    queries: Annotated[
        int | None, typer.Option(min=100, help="Queries whose answers must be in the catalogue. Default: 100,000.")
    ] = None,
    quick: Quick = False,
    out: Out = None,
    seed: Seed = 0,
    as_json: AsJson = False,
) -> None:
    """Generating identifiers from phrases: the shortlist beside full softmax and its other approximations.

    First random and adversarial queries are asked, and every answer must be in the catalogue: else the exit status
    is 1. Five million phrases take 3 GB and minutes to make.

    Example:  freshet bench generation --quick

    Example:  freshet bench generation --phrases 2000000 --json
    """
    wait_without_spinning()
    from services.offline.evaluation import benchmarks

    with in_sentences(when_memory_ends="--phrases 1000000"):
        report = measured(
            lambda request: benchmarks.generation(
                request, sizes=tuple(dict.fromkeys(phrases)) if phrases else (), num_queries=queries
            ),
            out=out,
            quick=quick,
            seed=seed,
            as_json=as_json,
        )
    if not report["proof"]["holds"]:
        raise CommandError(f"not in the catalogue: {report['proof']}", advice="please report this with the seed")


def _on_gpu(shapes: list[str], batches: list[int], *, quick: bool, seed: int, as_json: bool) -> None:
    """Hand over to the GPU's table, whose exit status says whether there was a card and whether proofs held."""
    import torch

    from services.offline.evaluation.gpu import table as gpu

    if not torch.cuda.is_available():
        raise CommandError(gpu.NO_CARD, advice="--device cpu", status=ExitStatus.UNAVAILABLE)
    chosen = [word for name in shapes for word in ("--shape", name)]
    chosen += [word for size in batches for word in ("--batch", str(size))]
    chosen += ["--seed", str(seed), *(["--quick"] if quick else []), *(["--json"] if as_json else [])]
    raise typer.Exit(gpu.main(chosen))
