"""`freshet bench pefa`: PEFA on its paper's own ground, real texts with a real sentence encoder.

The questions: how much better are answers when training queries and their documents are remembered, with lambda and k
chosen on held-out training queries alone; what does it cost to build, hold and ask; how little feedback is enough.
It gathers the rows of the other pefa_text modules into one report; it measures nothing itself but samples of pairs.
"""

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from services.algorithms.models.sentence_encoder import MiniLM, model_folder
from services.offline.evaluation.common.embeddings import EmbeddingSource
from services.offline.evaluation.common.recall import PAIR_CUTS
from services.offline.evaluation.common.report import Report, Request, report_of, written
from services.offline.evaluation.pefa import content, page, serving, sweep
from services.offline.evaluation.pefa.data import TextSet, load, sampled
from services.offline.evaluation.pefa.indexes import bytes_per_entry
from services.offline.evaluation.pefa.sweep import ENCODER, Recalls, Setting

Row = dict[str, Any]

SAMPLED_SHARES = (0.05, 0.10, 0.25, 0.50, 0.75, 0.95)
_SAMPLES = 3  # seeds per share
_CUT_NAMES = tuple(f"recall@{cut}" for cut in PAIR_CUTS)


def run(
    request: Request, *, names: Sequence[str], source: EmbeddingSource | None = None, bundle: Path | None = None
) -> Report:
    """Every table of each set; writes pefa.{md,json,png} and pefa_shares.png.

    `bundle`: a trained model whose items' titles are tried as their states, too.
    Raises: ValueError for an unknown set, a missing file, or weights that are not installed, with what to do;
    BundleError for a bundle that is none.
    """
    began = time.perf_counter()
    source = source or EmbeddingSource(progress=lambda what, done, total: request.say(f"{what}, {done:,} of {total:,}"))
    rows: list[Row] = []
    for name in names:
        rows += _rows_of(load(name, source), request)
    if bundle is not None:
        request.say("titles as states of items that nobody touched")
        queries = 500 if request.quick else 3_000
        rows += content.rows(bundle, MiniLM(model_folder()), num_queries=queries, seed=request.seed)
    return written(request, report_of("pefa", request, rows, began), page.page, page.plot)


def _rows_of(data: TextSet, request: Request) -> list[Row]:
    quick, seed = request.quick, request.seed
    tried = sweep.grid(sweep.PAPER_SHARES, (4, 32)) if quick else sweep.grid()
    best = sweep.chosen(data, tried, seed=seed, say=request.say)
    settings = {"xs": best["xs", False], "xs as printed": best["xs", True], "xl": best["xl", False]}
    request.say(f"{data.name}: test queries")
    asked = [ENCODER, *settings.values()]
    paper = sweep.grid(sweep.PAPER_SHARES, sweep.PAPER_NEIGHBOURS)
    found = sweep.measured(data.documents, data.train, data.test, dict.fromkeys([*asked, *paper]))
    rows = [_chosen_row(data, setting, found) for setting in asked]
    rows += [
        {"table": "sweep", "data": data.name, **_described(setting), **_means(found[setting])} for setting in paper
    ]
    rows += [
        {"table": "serving", **row}
        for row in serving.rows(
            data,
            settings,
            seed=seed,
            num_timed=50 if quick else 100,
            say=request.say,
        )
    ]
    return rows + _share_rows(data, settings, seeds=range(seed, seed + (1 if quick else _SAMPLES)), request=request)


def _chosen_row(data: TextSet, setting: Setting, found: Mapping[Setting, Recalls]) -> Row:
    """Recalls of all test queries and of those whose text is no training query's, with the gain and its interval."""
    own, alone = found[setting], found[ENCODER]
    row = {"table": "chosen", "data": data.name, "queries": len(data.test), **_described(setting), **_means(own)}
    row |= {"unseen_queries": int(data.unseen.sum())}
    for name in _CUT_NAMES:
        gains = own[name] - alone[name]
        row[f"{name}_gain"] = float(gains.mean())
        row[f"{name}_gain_95"] = float(1.96 * gains.std(ddof=1) / np.sqrt(len(gains)))
        row[f"{name}_unseen"] = float(own[name][data.unseen].mean())
    return row


def _share_rows(data: TextSet, settings: Mapping[str, Setting], *, seeds: Sequence[int], request: Request) -> list[Row]:
    """Recall by the share of training pairs (Figure 3), mean and deviation over samples; lambda and k as chosen."""
    out = []
    wanted = {"xs": settings["xs"], "xl": settings["xl"]}
    for share in SAMPLED_SHARES:
        request.say(f"{data.name}: {share:.0%} of the training pairs")
        recall: dict[tuple[str, str], list[float]] = {}
        for seed in seeds:
            train = sampled(data.train, share, seed=seed)
            found = sweep.measured(data.documents, train, data.test, wanted.values())
            for method, setting in wanted.items():
                for name in _CUT_NAMES:
                    recall.setdefault((method, name), []).append(float(found[setting][name].mean()))
        pairs = round(share * len(data.train.pairs))
        for method in wanted:
            row: Row = {"table": "share", "data": data.name, "share": share, "pairs": pairs, "method": method}
            for name in _CUT_NAMES:
                row[name] = float(np.mean(recall[method, name]))
                row[f"{name}_sd"] = float(np.std(recall[method, name], ddof=1)) if len(seeds) > 1 else None
            row["index_bytes"] = _index_bytes(data, method, pairs)
            out.append(row)
    return out


def _index_bytes(data: TextSet, method: str, pairs: int) -> int:
    """What exact search holds: the documents' vectors, and with XL the memory's entries."""
    width = data.documents.shape[1]
    remembered = pairs * bytes_per_entry(width) if method == "xl" else 0
    return int(data.documents.nbytes) + remembered


def _described(setting: Setting) -> Row:
    return {
        "method": setting.method,
        "setting": setting.text,
        "lambda": setting.share,
        "k": setting.k or None,
        "printed": setting.printed,
    }


def _means(found: Recalls) -> Row:
    return {name: float(values.mean()) for name, values in found.items()}
