"""Write README.md from what `make bench` measured: demo.json, steady.json and training-<seed>.json beside it.

What other pages say of the demo is between marks, `<!--{demo.freshness_ms.p99:.0f}-->85<!--/-->`, and written again. It
measures one thing itself, the machine's rate of float32 matrix products, because a speed without its roofline says
little, and keeps it in machine.json. `python docs/benchmarks/render.py --redraw` measures nothing and takes that file.
"""

import io
import json
import re
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from rich.console import Console

from services.offline.demo.display import figures
from services.offline.evaluation.common.report import cell, filled, machine

HERE = Path(__file__).parent
# Pages that say what the demo's run measured.
MARKED = [HERE.parents[1] / "README.md", HERE.parent / "guide" / "quick-start.md"]
_MARK = re.compile(r"<!--\{demo\.([\w.]+):([^}]*)\}-->[^<]*<!--/-->")
_TABLES = re.compile(r"(?<=<!--demo's tables-->\n```\n).*?(?=```\n)", re.DOTALL)
# Preset quick: pairs scored per position, component pairs P, width d, gate hidden G, blocks, model width D, window L.
PAIRS, P, WIDTH, GATE, BLOCKS, MODEL, WINDOW = 65, 8, 32, 64, 2, 50, 100


def read(name: str) -> dict[str, Any]:
    return json.loads((HERE / name).read_text(encoding="utf-8"))


def matrix_rate() -> float:
    """Float32 multiply-adds a second of a 1024³ product on all cores: median of ten."""
    import torch

    a, b = torch.rand(1024, 1024), torch.rand(1024, 1024)
    seconds = []
    for _ in range(12):
        start = time.perf_counter()
        a @ b
        seconds.append(time.perf_counter() - start)
    return 1024**3 / statistics.median(seconds[2:])


def training_operations() -> float:
    """Multiply-adds of one training position, forward and backward (three times forward)."""
    mixture = PAIRS * (P * WIDTH + 2 * GATE * P)
    encoder = BLOCKS * (5 * MODEL * MODEL + WINDOW * MODEL)
    return 3 * (mixture + encoder)


def hit_rates(demo: dict[str, Any]) -> list[dict[str, Any]]:
    """Every ranker over all predictions and by the time since the user's previous event."""
    hits, by_sitting = demo["hit_rate_at_10"], demo["hit_rate_at_10_by_sitting"]
    return [
        {
            "says": says,
            "all": hits[name],
            "over_item_knn": hits[name] / hits["item_knn"],
            **{kind: by_sitting[kind].get(name) for kind in ("same_sitting", "later_day")},
        }
        for name, says in (
            ("model", "the model, states kept fresh by the stream"),
            ("model_with_token", "the same, asked with the freshness token"),
            ("frozen_state", "the same model, states frozen at the split"),
            ("item_knn", "item-kNN, learning from every event"),
            ("recent_popularity", "recently popular items not yet seen"),
            ("popularity", "most popular items not yet seen"),
        )
    ]


def page(measured: dict[str, Any]) -> str:
    """README.md; `measured` is machine.json: `machine` in words, `multiply_adds_per_s` in float32."""
    demo, steady = read("demo.json"), read("steady.json")
    runs = [read(path.name) for path in sorted(HERE.glob("training-[0-9].json"))]
    most = measured["multiply_adds_per_s"] / training_operations()
    found = [run["metrics"]["model"]["hr@10"] for run in runs]
    return filled(
        HERE / "README.md.j2",
        **measured,
        demo=demo,
        stages=[
            {"name": name.replace("_", " "), "p50": demo["stages_ms"][name], "p99": demo["stages_p99_ms"][name]}
            for name in demo["stages_ms"]
        ],
        hit_rates=hit_rates(demo),
        predicted=sum(kind["events"] for kind in demo["hit_rate_at_10_by_sitting"].values()),
        added="added_afterwards" in demo["notes"],
        runs=[run | {"share": run["positions_per_s"] / most} for run in runs],
        mean=statistics.mean(found),
        deviation=statistics.stdev(found),
        most=most,
        operations=training_operations(),
        calls=[call | {"name": name, "failed": sum(call["errors"].values())} for name, call in steady["calls"].items()],
    )


def marked(text: str, demo: dict[str, Any]) -> str:
    """A page with what its marks name, and the tables that `freshet demo` prints."""

    def figure(found: re.Match[str]) -> str:
        value: Any = demo
        for name in found[1].split("."):
            value = value[name]
        return f"<!--{{demo.{found[1]}:{found[2]}}}-->{cell(value, found[2])}<!--/-->"

    out = io.StringIO()
    Console(file=out, width=80).print(figures(demo))
    lines = "\n".join(line.rstrip() for line in out.getvalue().splitlines())
    return _MARK.sub(figure, _TABLES.sub(lambda _: lines.partition("\n\nwhat ran")[0] + "\n", text))


def main(arguments: list[str]) -> None:
    if arguments == ["--redraw"]:
        measured = read("machine.json")
    else:
        measured = {"machine": f"{machine()}, no GPU", "multiply_adds_per_s": matrix_rate()}
        (HERE / "machine.json").write_text(json.dumps(measured, indent=1) + "\n", encoding="utf-8")
    (HERE / "README.md").write_text(page(measured), encoding="utf-8")
    for path in MARKED:
        path.write_text(marked(path.read_text(encoding="utf-8"), read("demo.json")), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
