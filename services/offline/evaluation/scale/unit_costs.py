"""Unit costs: what one call, event, user, record and item take, each with the benchmark file that it comes from.

`docs/benchmarks/render.py` makes `unit_costs.json` beside this module of path.json and scale.json, so that an installed
package has it; a test compares them. What the costs are multiplied by is `services.cli.planning`'s.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

SHIPPED = Path(__file__).with_name("unit_costs.json")
# Callers at a time in path.json: some batching, no queue.
_CALLERS = 8
_SUBJECTS = {"recommend": "Recommend", "event": "event, alone"}
_PROCESSES = ("gateway", "encoder", "candidates", "reranker", "refresher", "kafka", "redis")


@dataclass(frozen=True, slots=True)
class Fit:
    """at_zero + slope * items ** power: a quantity as a function of the number of items in one process."""

    at_zero: float
    slope: float
    power: float

    def __call__(self, items: float) -> float:
        return float(self.at_zero + self.slope * items**self.power)


def fit(points: Mapping[int, float], power: float) -> Fit:
    """Through two points, items -> value."""
    (few, low), (many, high) = sorted(points.items())
    slope = (high - low) / (many**power - few**power)
    return Fit(at_zero=low - slope * few**power, slope=slope, power=power)


def unit_costs(path: Mapping[str, Any], scale: Mapping[str, Any]) -> dict[str, Any]:
    """What `unit_costs.json` holds, of path.json and scale.json. Times: processor milliseconds."""
    turns = path["turns"]
    mixes = {name: _processor_ms(turns, subject, "this") for name, subject in _SUBJECTS.items()}
    # The commit beside it asked the reranker as well: one more call out of the gateway.
    two_calls = _processor_ms(turns, _SUBJECTS["recommend"], "beside")["gateway"]
    return {
        "sources": {
            "milliseconds": f"docs/benchmarks/path.json, {_CALLERS} callers, medians",
            "further_shard_ms": "docs/benchmarks/path.json, the gateway's part with two calls less that with one",
            "fits": "docs/benchmarks/scale.json, fits",
            "item_bytes": "docs/benchmarks/scale.json, item_bytes",
            "user_bytes": "docs/benchmarks/scale.json, users",
            "record_bytes": "docs/benchmarks/scale.json, records",
        },
        "milliseconds": mixes,
        "further_shard_ms": round(two_calls - mixes["recommend"]["gateway"], 3),
        "path_items": scale["path_items"],
        "item_bytes": scale["item_bytes"],
        "fits": scale["fits"],
        "user_bytes": next(row for row in scale["users"] if row["plan"]),
        "record_bytes": {row["what"]: row["bytes"] for row in scale["records"]},
        "measured_items": sorted(row["num_items"] for row in scale["rows"]),
        "predictions": scale["predictions"],
    }


def shipped_costs() -> dict[str, Any]:
    """Those of this version."""
    costs: dict[str, Any] = json.loads(SHIPPED.read_text(encoding="utf-8"))
    return costs


def _processor_ms(turns: Sequence[Mapping[str, Any]], subject: str, stack: str) -> dict[str, float]:
    """Per process, the median over turns; what is below the noise of a process at rest is 0."""
    chosen = [
        turn["processor_ms"]
        for turn in turns
        if (turn["stack"], turn["subject"], turn["callers"]) == (stack, subject, _CALLERS)
    ]
    return {name: round(max(0.0, median(one[name] for one in chosen)), 3) for name in _PROCESSES}
