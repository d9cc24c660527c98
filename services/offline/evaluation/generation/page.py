"""The page of `freshet bench generation`, from its report. It measures nothing."""

from pathlib import Path
from typing import Any

from services.offline.evaluation.common.tables import filled
from services.offline.evaluation.generation.world import MAKING

FULL, SHORTLIST = "full softmax", "shortlist"
_FOLDER = Path(__file__).parent


def page(report: dict[str, Any]) -> str:
    """generation.md; a `remark` is what a person adds to the stored report."""
    sizes = []
    for size in dict.fromkeys(row["phrases"] for row in report["rows"]):
        rows = [row for row in report["rows"] if row["phrases"] == size]
        full, short = (next((row for row in rows if row["method"] == name), None) for name in (FULL, SHORTLIST))
        compared = full is not None and short is not None
        values = rows[0] | {"rows": rows, "full": full, "short": short, "compared": compared}
        sizes.append(filled(_FOLDER / "size.template.md", **values))
    return filled(_FOLDER / "page.template.md", **{"remark": ""} | report | {"making": MAKING, "sizes": sizes})
