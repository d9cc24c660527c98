"""Whole benchmarks, as `freshet bench` runs them: rows, then a Markdown page and plots in a folder.

Each returns one report of plain values: the page is for people, the report for machines. Which numbers there are and
how they are measured is the other modules' affair.
"""

import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from services.offline.evaluation.catalogues.scene import SYNTHETIC
from services.offline.evaluation.common.floors import measure_rates
from services.offline.evaluation.common.report import Report, Request, report_of, written
from services.offline.evaluation.common.tables import plain_page, retrieval_page

if TYPE_CHECKING:
    from services.offline.evaluation.quality.table import MeasuredData


def retrieval(
    request: Request,
    *,
    shapes: list[str],
    batches: tuple[int, ...] | None,
    bundle: Path | None = None,
    prove: bool = False,
) -> Report:
    """Table 5 at the shapes, and growth; writes retrieval.{md,json} and growth.png, with a bundle also retrieval.png.

    `bundle` takes the generator's place for ml-1m. `prove` first compares every answer and certificate with the float64
    formula, on 100,000 random queries (2,000 when quick) and, unless quick, 100 at the Books shape: added as `proof`.
    Raises: ValueError or BundleError for a bundle that does not fit.
    """
    from services.offline.evaluation.retrieval import growth, plots
    from services.offline.evaluation.retrieval.rows import plans, rows

    began = time.perf_counter()
    rates = measure_rates()
    proof = _proof(request, shapes) if prove else None
    found = []
    for plan in plans(shapes, batches=batches, quick=request.quick):
        trained = bundle if plan.shape.name == "ml-1m" else None
        found += rows(plan, seed=request.seed, quick=request.quick, bundle=trained, rates=rates, say=request.say)
    grown, left_out = growth.rows(quick=request.quick, seed=request.seed, rates=rates, say=request.say)
    report = report_of("retrieval", request, found, began) | {
        "growth": grown,
        "left_out": left_out,
        "rates": asdict(rates),
        "proof": proof,
    }
    request.out.mkdir(parents=True, exist_ok=True)
    trained_rows = [row for row in found if row["catalogue"] != SYNTHETIC]
    if trained_rows:
        plots.plot_retrieval(trained_rows, request.out / "retrieval.png")
    plots.plot_growth(grown, request.out / "growth.png")
    return written(request, report, retrieval_page(report))


def quantization(request: Request) -> Report:
    """Codes beside FAISS's at the same number of bits, and search end to end; writes quantization.{md,json,png}.

    Raises: ValueError naming a data set that is missing, with what to do.
    """
    from services.offline.evaluation.quantization import codes, search

    began = time.perf_counter()
    found = codes.rows(request.quick, request.seed, progress=request.say)
    request.say("search end to end")
    searched = search.rows(request.quick, request.seed)
    report = report_of("quantization", request, [*found, *searched], began)
    request.out.mkdir(parents=True, exist_ok=True)
    codes.plot(found, request.out / "quantization.png")
    question = (
        "Is the score-aware loss worth its name at the same number of bits, and how does search with its codes compare "
        "with scann? `books-average` is a synthetic catalogue, `minilm-queries` are vectors of real questions."
        "\n\n![recall and error](quantization.png)\n\n"
    )
    return written(
        request, report, plain_page("Quantization", question, [*codes.summary(found), *searched], request.how)
    )


def mutation(
    request: Request,
    *,
    shapes: Sequence[str] = (),
    seconds: float | None = None,
    rates: tuple[int, ...] | None = None,
) -> Report:
    """Searches while items change, beside FAISS and hnswlib; writes mutation.{md,json}.

    `shapes`, `seconds` per row and changes a second (`rates`): the plan's own where not given.
    Raises: ValueError for a shape that the plan does not have.
    """
    from services.offline.evaluation.mutation import rows as changes

    began = time.perf_counter()
    found = changes.rows(
        quick=request.quick,
        seed=request.seed,
        shapes=shapes,
        seconds=seconds,
        rates=rates or changes.RATES,
        progress=request.say,
    )
    report = report_of("mutation", request, found, began)
    question = (
        "What do searches cost, and what do they find, while items are inserted, updated and deleted? Catalogues are "
        "synthetic; recall is against an exact search of the same items."
    )
    return written(
        request, report, plain_page("Mutation, on synthetic catalogues", question, changes.summary(found), request.how)
    )


def encoding(request: Request, *, bundle: Path, inference_server: str = "") -> Report:
    """An event's encode as one step beside whole windows; writes encoding.{md,json}.

    `inference_server`: host:port of one that serves the bundle, for its rows.
    Raises: BundleError for a bundle without a step graph.
    """
    from services.offline.evaluation.encoding import incremental

    began = time.perf_counter()
    found = incremental.rows(
        bundle, inference_server=inference_server, quick=request.quick, seed=request.seed, say=request.say
    )
    question = (
        f"What does an event cost a user's state when the history is not read again? A history of {incremental.EVENTS} "
        "events, slides of the window included; each event asks for the state before it and the one after it."
    )
    report = report_of("encoding", request, found, began) | {"model": incremental.described(bundle)}
    return written(request, report, plain_page("Encoding", question, found, request.how))


def generation(request: Request, *, sizes: tuple[int, ...] = (), num_queries: int | None = None) -> Report:
    """Generating identifiers from 128 thousand to 5 million phrases beside full softmax; writes generation.{md,json}.

    First `num_queries` (100,000; 5,000 when quick) random and adversarial queries: every answer must be in the
    catalogue (`proof`). Raises: ValueError if MiniLM's weights are not installed.
    """
    from services.offline.evaluation.generation import rows as phrases
    from services.offline.evaluation.generation.page import page
    from services.offline.evaluation.generation.proof import prove_catalogue

    began = time.perf_counter()
    rates = measure_rates()
    wanted = num_queries or (5_000 if request.quick else 100_000)
    proof = prove_catalogue(num_queries=wanted, seed=request.seed, say=request.say).plain()
    chosen = sizes or (phrases.QUICK_SIZES if request.quick else phrases.SIZES)
    found = phrases.rows(sizes=chosen, quick=request.quick, seed=request.seed, rates=rates, say=request.say)
    report = report_of("generation", request, found, began) | {
        "growth": phrases.growth(found),
        "proof": proof,
        "rates": asdict(rates),
    }
    return written(request, report, page(report))


def quality(
    request: Request, *, data: "Sequence[MeasuredData]", store: Path, seeds: int | None, hours: float | None
) -> Report:
    """Encoders and heads beside tuned baselines; writes quality.{md,json,png}. Finished runs in `store` are not done
    again; no run begins after `hours`. Raises: DatasetUnavailableError for a set that is not on this machine.
    """
    from services.offline.evaluation.quality import page as pages
    from services.offline.evaluation.quality import table

    began = time.perf_counter()
    work = table.Work(store=store, say=request.say, until=None if hours is None else time.monotonic() + 3600 * hours)
    table.measure(work, data, seeds=seeds)
    request.say("intervals")
    found = table.report(work, data, seeds=seeds)
    rows = [row for section in found["sections"] for row in section["rows"]]
    report = report_of("quality", request, rows, began) | found
    request.out.mkdir(parents=True, exist_ok=True)
    pages.plot_curves(report, request.out / "quality.png")
    return written(request, report, pages.page(report))


def wrong_proofs(rows: list[dict[str, Any]]) -> list[str]:
    """Algorithms whose answers were all called proven exact and yet missed something: there must be none."""
    return [
        f"{row['algorithm']} at {row['shape']}, batch {row['batch']}: recall {row['recall_100']:.4f}"
        for row in rows
        if row.get("exact") == 1.0 and row["recall_100"] < 1.0
    ]


def _proof(request: Request, shapes: list[str]) -> dict[str, Any]:
    from services.offline.evaluation.retrieval.proof import prove_books, prove_on_small_catalogues

    wanted = 2_000 if request.quick else 100_000
    small = prove_on_small_catalogues(
        num_queries=wanted,
        seed=request.seed,
        report=lambda done: request.say(f"answers against float64: {done:,} of {wanted:,} queries"),
    )
    found: dict[str, Any] = {"seed": request.seed, "small": asdict(small), "holds": small.holds}
    if not request.quick and "books" in shapes:
        request.say("answers against float64 at the Books shape")
        books = prove_books(num_queries=100, seed=request.seed)
        found |= {"books": asdict(books), "holds": small.holds and books.holds}
    return found
