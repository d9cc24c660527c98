"""The page of `freshet bench retrieval`: trained bundles first, then synthetic catalogues."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from services.offline.evaluation.catalogues.scene import SYNTHETIC
from services.offline.evaluation.common.report import filled
from services.offline.evaluation.retrieval.algorithms import TRANSCRIPTION

Row = dict[str, Any]
Report = dict[str, Any]

_FOLDER = Path(__file__).parent


def page(report: Report) -> str:
    """Return retrieval.md; optional `notes` precede the first synthetic table."""
    trained = _groups([row for row in report["rows"] if row["catalogue"] != SYNTHETIC])
    proof = report["proof"]
    return filled(
        _FOLDER / "page.template.md",
        **report
        | {
            "trained": trained,
            "untrained": not trained,
            "synthetic": _groups([row for row in report["rows"] if row["catalogue"] == SYNTHETIC]),
            "notes": "\n\n".join(report.get("notes", ())),
            "books": proof is not None and "books" in proof,
        },
    )


# Settings in the stored report only.
_LEFT_OUT = {
    *("top_k_per_embedding(5)", "top_k_per_embedding(10)", "top_k_per_embedding(50)"),
    *("top_k_avg(200)", "top_k_avg(1000)", "top_k_avg(2000)"),
    *("combined_top_k(5,200)", "combined_top_k(100,1000)"),
}


def _is_shown(algorithm: str) -> bool:
    """Only brute force's transcription is a row; a column has the others' times."""
    is_transcription = algorithm.startswith(TRANSCRIPTION) and not algorithm.endswith("brute_force")
    return not is_transcription and algorithm not in _LEFT_OUT


def _groups(rows: Sequence[Row]) -> list[str]:
    found = []
    groups = dict.fromkeys((row["num_items"], row["batch"], row["catalogue"], row["shape"]) for row in rows)
    for group in sorted(groups):
        items, batch, catalogue, shape = group
        part = [
            row
            | {"shown": row["algorithm"] if row["algorithm"].startswith(TRANSCRIPTION) else f"**{row['algorithm']}**"}
            for row in rows
            if (row["num_items"], row["batch"], row["catalogue"], row["shape"]) == group and _is_shown(row["algorithm"])
        ]
        is_synthetic = catalogue == SYNTHETIC
        found.append(
            filled(
                _FOLDER / "group.template.md",
                heading=f"Synthetic, {shape}" if is_synthetic else catalogue,
                items=items,
                batch=batch,
                trained=[] if is_synthetic else part,
                synthetic=part if is_synthetic else [],
            )
        )
    return found
