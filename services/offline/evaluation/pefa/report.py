"""`freshet bench pefa`: PEFA on real texts with a real sentence encoder, as in its paper."""

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from services.offline.evaluation.common.embeddings import EmbeddingSource
from services.offline.evaluation.common.recall import PAIR_CUTS
from services.offline.evaluation.common.report import Report, Request, filled, report_of, written
from services.offline.evaluation.pefa import serving, sweep
from services.offline.evaluation.pefa.data import DECIDED_BY, TextSet, load, sampled
from services.offline.evaluation.pefa.indexes import bytes_per_entry
from services.offline.evaluation.pefa.sweep import ENCODER, Recalls, Setting

Row = dict[str, Any]

TITLES = {"scifact": "SciFact", "medquad": "MedQuAD"}
# What to know before comparing with published numbers.
_NOTES = {
    "scifact": "A document is its title and abstract. A document without feedback keeps its whole vector. "
    "With equation 8 as printed, and in libpecos, it keeps only λ of it, which lowers documents without feedback.",
    "medquad": "A document is its topic's name and the text of its answers. Every tested document has training "
    "questions, so both readings of equation 8 rank alike.",
}
_METHODS = {"encoder": "encoder alone", "xs": "+ PEFA-XS", "xl": "+ PEFA-XL"}
_CUT_NAMES = tuple(f"recall@{cut}" for cut in PAIR_CUTS)


def page(report: dict[str, Any]) -> str:
    """Return pefa.md; a person may add a `note` to the report."""
    rows = report["rows"]
    # The deciding recalls are first.
    sets = [(name, TITLES[name], dict.fromkeys([*DECIDED_BY[name], *_CUT_NAMES]), _NOTES[name]) for name in _sets(rows)]

    def of(data: str, table: str) -> list[Row]:
        return [row for row in rows if (row["data"], row["table"]) == (data, table)]

    template = Path(__file__).with_name("page.md.j2")
    return filled(template, **{"note": ""} | report, sets=sets, of=of, methods=_METHODS)


def _sets(rows: Sequence[Row]) -> list[str]:
    return list(dict.fromkeys(row["data"] for row in rows if row["table"] == "chosen"))


SAMPLED_SHARES = (0.05, 0.10, 0.25, 0.50, 0.75, 0.95)
_SAMPLES = 3  # seeds per share


def run(request: Request, *, names: Sequence[str], source: EmbeddingSource | None = None) -> Report:
    """Measure each named set; write pefa.{md,json}.

    Raises: ValueError for an unknown set, a missing file, or weights that are not installed.
    """
    began = time.perf_counter()
    source = source or EmbeddingSource(progress=lambda what, done, total: request.say(f"{what}, {done:,} of {total:,}"))
    rows: list[Row] = []
    for name in names:
        rows += _rows_of(load(name, source), request)
    return written(request, report_of("pefa", request, rows, began), page)


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
    served = serving.rows(data, settings, seed=seed, num_timed=50 if quick else 100, say=request.say)
    rows += [{"table": "serving", **row} for row in served]
    return rows + _share_rows(data, settings, seeds=range(seed, seed + (1 if quick else _SAMPLES)), request=request)


def _chosen_row(data: TextSet, setting: Setting, found: Mapping[Setting, Recalls]) -> Row:
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
    out = []
    wanted = {name: settings[name] for name in ("xs", "xl")}
    document_bytes, entry_bytes = int(data.documents.nbytes), bytes_per_entry(data.documents.shape[1])
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
            # XL remembers pairs besides the documents' vectors.
            row["index_bytes"] = document_bytes + (pairs * entry_bytes if method == "xl" else 0)
            out.append(row)
    return out


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
