"""Measure the cost of a proven gap: searches request a gap of 0, .01 or .05, next to `exact` and an unproven pool.

The candidates process's handler answers; brute force checks its answers.
"""

import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from prometheus_client import CollectorRegistry

from services.algorithms.bundles.model_bundle import Bundle, load_bundle
from services.algorithms.native.threads import set_compute_threads
from services.algorithms.rules.filters import ItemFilter
from services.algorithms.scoring.states import QueryStates
from services.candidates.bootstrap import Live, algorithms_for, load_catalogue, make_live
from services.candidates.config import CandidatesSettings
from services.candidates.domain import SearchQuery, SearchResult, Stage
from services.candidates.metrics import TRUTH, CandidatesMetrics
from services.offline.evaluation.common.plots import panels, titled
from services.offline.evaluation.common.report import Report, Request, filled, report_of, written
from services.offline.evaluation.common.timing import Times
from services.offline.evaluation.large.catalogue import enlarged, queries

K = 100
GAPS = (0.0, 0.01, 0.05)
# During warm-up `exact` tries each strategy three times, and the automatic choice learns which algorithm proves a gap.
_WARM_UP, _TIMED, _AT_ONCE = 24, 1_000, 16


def run(request: Request, *, bundle: Path, sizes: Sequence[int], requests: int) -> Report:
    """Check `requests` searches for each gap, on one thread; write gaps.{md,json,png}.

    The first thousand searches of each kind run one at a time and are timed. The others run 16 at once, which takes
    three fifths of the time. Raises: BundleError; ValueError for a bundle without an encoder.
    """
    began = time.perf_counter()
    set_compute_threads(1)
    trained = load_bundle(bundle)
    asked = queries(trained, 40 if request.quick else requests, seed=request.seed)
    rows: list[dict[str, Any]] = []
    for size in sizes:
        with TemporaryDirectory() as folder:
            request.say(f"{size:,} items")
            rows += _of_size(request, enlarged(trained, size, Path(folder) / "bundle", seed=request.seed), asked)
    return written(request, report_of("gaps", request, rows, began), page, plot)


def broken(report: Report) -> str:
    """Return a sentence about answers whose proven gap does not hold; "" if all hold."""
    rows = [f"{row['broken']} of {row['asked']} at {row['num_items']:,}" for row in report["rows"] if row["broken"]]
    return f"proven gaps that do not hold: {'; '.join(rows)}" if rows else ""


def page(report: Report) -> str:
    """Return gaps.md of a report."""
    return filled(Path(__file__).with_name("gaps.md.j2"), **{"remark": ""} | report)


def plot(report: Report, out: Path) -> None:
    """Plot the processor time of each kind of search, by size."""
    sizes = list(dict.fromkeys(row["num_items"] for row in report["rows"]))
    with panels(out / "gaps.png", 1, len(sizes), size=(5, 3)) as drawn:
        for panel, size in zip(drawn[0], sizes, strict=True):
            rows = [row for row in report["rows"] if row["num_items"] == size]
            panel.barh([row["asked"] for row in rows], [row["cpu_ms"] for row in rows])
            titled(panel, f"{size:,} items", xlabel="processor time, ms (median)")
            panel.invert_yaxis()


def _of_size(request: Request, catalogue: Bundle, asked: QueryStates) -> list[dict[str, Any]]:
    pairs = 1 if catalogue.pair_gate is None else catalogue.pair_gate.num_pairs
    names = [one.text for one in algorithms_for("auto", num_items=max(catalogue.num_items, 100_000), num_pairs=pairs)]
    settings = CandidatesSettings(
        port=0, metrics_port=0, bundle=catalogue.path, audit_share=0, algorithms=" ".join(names), follows_topics=False
    )
    live = make_live(settings, load_catalogue(settings), CandidatesMetrics(CollectorRegistry()))
    each = [asked.take([number]) for number in range(len(asked))]
    truths = []
    for start in range(0, len(asked), _AT_ONCE):
        some = asked.take(slice(start, start + _AT_ONCE))
        best = live.catalogue.index.version.search(some, K + 1, algorithm=TRUTH)
        truths += list(zip(best.item_ids, best.scores, strict=True))
    pool = next(name for name in names if name != "exact")
    kinds: list[tuple[str, str, float | None]] = [(f"{pool}, no gap", pool, None), ("exact", "exact", None)]
    rows = []
    for says, algorithm, gap in [*kinds, *((f"gap {gap:g}", "", gap) for gap in GAPS)]:
        request.say(f"{catalogue.num_items:,} items, {says}")
        rows.append(
            {"num_items": catalogue.num_items, "asked": says, **_row(live, catalogue, each, truths, algorithm, gap)}
        )
    return rows


def _row(
    live: Live,
    catalogue: Bundle,
    each: Sequence[QueryStates],
    truths: Sequence[tuple[tuple[str, ...], Any]],
    algorithm: str,
    max_gap: float | None,
) -> dict[str, Any]:
    """`broken` counts answers that omit a better item than their certificate allows. Untimed
    requests are sent only for gaps.
    """

    def search(some: Sequence[QueryStates]) -> list[SearchResult]:
        wanted = [
            SearchQuery(
                query=query,
                model_version=catalogue.model_version,
                k=K,
                stage=Stage.FULL,
                filter=ItemFilter(),
                algorithm=algorithm,
                max_gap=max_gap,
            )
            for query in some
        ]
        return live.search.find_all(wanted)

    for query in each[:_WARM_UP]:
        search([query])
    times = Times()
    answers = [times.call(search, [query])[0] for query in each[:_TIMED]]
    touched = [sum(int(done.touched[0]) for done in found.passes) for found in answers]
    for start in range(_TIMED, len(each) if max_gap is not None else 0, _AT_ONCE):
        answers += search(each[start : start + _AT_ONCE])
    excesses, gaps, recalls, num_broken = [], [], [], 0
    for found, (best_ids, best_scores) in zip(answers, truths[: len(answers)], strict=True):
        there = set(found.item_ids)
        left_out = next(float(score) for one, score in zip(best_ids, best_scores, strict=True) if one not in there)
        recalls.append(len(there.intersection(best_ids[:K])) / K)
        excesses.append(max(0.0, left_out - found.scores[-1]))
        if found.certificate is not None and found.certificate.gap is not None:
            gaps.append(found.certificate.gap)
            num_broken += left_out > found.scores[-1] + gaps[-1]
    chosen = Counter(found.algorithm for found in answers)
    return {
        "requests": len(answers),
        "cpu_ms": round(times.cpu_ms, 2),
        "cpu_p99_ms": round(1e3 * float(np.quantile(times.cpu, 0.99)), 2),
        "items_touched": round(float(np.mean(touched))),
        "proven": round(sum(gap <= (max_gap or 0.0) for gap in gaps) / len(answers), 4),
        "broken": num_broken,
        "median_proven_gap": round(float(np.median(gaps)), 4) if gaps else None,
        "largest_true_gap": round(max(excesses), 4),
        "recall_100": round(float(np.mean(recalls)), 4),
        "answered_by": ", ".join(f"{name} {count / len(answers):.0%}" for name, count in chosen.most_common()),
    }
