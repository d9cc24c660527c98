"""Write README.md from what `make bench` measured: demo.json, steady.json and training-<seed>.json beside it.

It measures one thing itself, the machine's rate of float32 matrix products, because a speed without its floor says
little, and keeps it in machine.json. `python docs/benchmarks/render.py --redraw` measures nothing and takes that file.
"""

import json
import os
import platform
import statistics
import sys
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
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


def machine() -> str:
    model = next(
        (line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line),
        platform.processor(),
    )
    return f"{os.cpu_count()} cores ({model}), no GPU"


def training_table(rate: float) -> list[str]:
    """`rate`: float32 multiply-adds a second."""
    runs = [read(path.name) for path in sorted(HERE.glob("training-*.json"))]
    floor = rate / training_operations()
    rows = [
        "| seed | positions/s | of the floor | HR@10 | HR@50 | MRR | popularity's HR@10 |",
        "|---|---|---|---|---|---|---|",
    ]
    for run in runs:
        model, popularity = run["metrics"]["model"], run["metrics"]["popularity"]
        speed = run["positions_per_s"]
        rows.append(
            f"| {run['seed']} | {speed:,.0f} | {speed / floor:.0%} | {model['hr@10']:.4f} | {model['hr@50']:.4f} | "
            f"{model['mrr']:.4f} | {popularity['hr@10']:.4f} |"
        )
    found = [run["metrics"]["model"]["hr@10"] for run in runs]
    rows.append("")
    rows.append(
        f"HR@10 over seeds: mean {statistics.mean(found):.4f}, standard deviation {statistics.stdev(found):.4f}. The "
        f"floor is {floor:,.0f} positions/s: {training_operations() / 1e6:.2f} million multiply-adds a position at this "
        f"machine's {rate / 1e9:.0f} billion a second in float32 products; SiLU, softmax and memory traffic "
        "are not in it."
    )
    return rows


def demo_table() -> list[str]:
    demo = read("demo.json")
    recommend, fresh = demo["recommend_ms"], demo["freshness_ms"]
    stages, tails, events = demo["stages_ms"], demo["stages_p99_ms"], demo["events"]
    return [
        "| | p50 | p95 | p99 |",
        "|---|---|---|---|",
        f"| Recommend, ms ({recommend['calls']:,} calls) | {recommend['p50']:.1f} | {recommend['p95']:.1f} | "
        f"{recommend['p99']:.1f} |",
        f"| event acknowledged → recommendations reflect it, ms ({fresh['samples']} samples) | {fresh['p50']:.0f} | "
        f"{fresh['p95']:.0f} | {fresh['p99']:.0f} |",
        *(
            f"| stage: {name.replace('_', ' ')}, ms | {stages[name]:.2f} | | {tails[name]:.2f} |"
            for name in ("queue", "encode", "first_stage", "rerank", "transport")
        ),
        "",
        *hit_rate_table(demo),
        "",
        f"{events['sent']:,} distinct acknowledged events = {events['applied']:,} applied + {events['dead_lettered']} "
        f"dead-lettered (sent broken on purpose); {events['duplicates']} repeats recognised. {demo['seconds']:.0f} s in "
        f"all, training included. {demo['dataset_detail']['source']}.",
        "",
        "![hit rate over the stream](hit_rate.png)",
        "",
        "![latency](latency.png)",
    ]


def hit_rate_table(demo: dict[str, Any]) -> list[str]:
    """Every contender over all predictions and by the time since the user's previous event."""
    hits, by_sitting, best = demo["hit_rate_at_10"], demo["hit_rate_at_10_by_sitting"], demo["over_best_baseline"]
    kinds = ("same_sitting", "later_day")
    counts = {kind: by_sitting[kind]["events"] for kind in by_sitting}
    header = ["HR@10 on the streamed events", "all", *(kind.replace("_", " ") for kind in kinds), "× item-kNN"]
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    for name, says in (
        ("model", "the model, states kept fresh by the stream"),
        ("model_with_token", "the same, asked with the freshness token"),
        ("frozen_state", "the same model, states frozen at the split"),
        ("item_knn", "item-kNN, learning from every event"),
        ("recent_popularity", "recently popular items not yet seen"),
        ("popularity", "most popular items not yet seen"),
    ):
        split = [by_sitting[kind].get(name) for kind in kinds]
        cells = ["–" if value is None else f"{value:.4f}" for value in split]
        lines.append(f"| {says} | {hits[name]:.4f} | {' | '.join(cells)} | {hits[name] / hits['item_knn']:.2f} |")
    shown = [f"{counts[kind]:,}" for kind in kinds]
    lines.append(f"| predicted events | {sum(counts.values()):,} | {' | '.join(shown)} | |")
    notes = demo["notes"]
    lines += ["", f"Best baseline: {best['baseline']}. {notes['hit_rate_at_10_by_sitting']}."]
    if "added_afterwards" in notes:
        lines.append(f"Here {notes['added_afterwards']}.")
    return lines


def steady_table() -> list[str]:
    steady = read("steady.json")
    rows = ["| call | offered /s | p50 ms | p95 ms | p99 ms | errors |", "|---|---|---|---|---|---|"]
    for name, call in steady["calls"].items():
        latency = call["latency_ms"]
        rows.append(
            f"| {name} | {call['offered_per_s']:.0f} | {latency['p50']:.1f} | {latency['p95']:.1f} | "
            f"{latency['p99']:.1f} | {sum(call['errors'].values())} |"
        )
    return rows


def page(measured: dict[str, Any]) -> str:
    """README.md; `measured` is machine.json: `machine` in words, `multiply_adds_per_s` in float32."""
    text = [
        "# Benchmarks",
        "",
        f"Measured on {measured['machine']}, everything on that one machine, load generator included; "
        "`make bench` measures again and rewrites this page. Latencies count from the scheduled moment, arrivals on a "
        "clock. The machine is shared, so speeds are lower bounds.",
        "",
        "The retrieval library has pages of its own, written by `freshet bench`: [retrieval](retrieval.md) (every "
        "algorithm beside its PyTorch transcription and the machine's floor, on synthetic catalogues so far), "
        "[quantization](quantization.md) (search with integer codes beside `scann`, FAISS and hnswlib), "
        "[mutation](mutation.md) (searches while items change, on synthetic catalogues). It also "
        "writes [PEFA on text](pefa.md) (what remembered queries are worth, beside libpecos and HNSW), "
        "[the stream](freshness.md) (withheld items, refreshed, beside a retrained model) and [text](text.md) (BM25, "
        "MiniLM, text MoL and phrases on the same questions); [generation](generation.md) has the cost of phrases. "
        "[Papers](../papers.md) has every table of the five papers beside ours. The GPU kernels were never run on a card "
        "([decision 010](../decisions/010-gpu.md)).",
        "",
        "## The demo: 40 recommendations a second beside 200 events a second",
        "",
        *demo_table(),
        "",
        "## Training, preset quick on MovieLens-1M's first four fifths by time, 4 epochs",
        "",
        *training_table(measured["multiply_adds_per_s"]),
        "",
        "## Load: `freshet loadtest steady`",
        "",
        *steady_table(),
        "",
    ]
    return "\n".join(text)


def main(arguments: list[str]) -> None:
    if arguments == ["--redraw"]:
        measured = read("machine.json")
    else:
        measured = {"machine": machine(), "multiply_adds_per_s": matrix_rate()}
        (HERE / "machine.json").write_text(json.dumps(measured, indent=1) + "\n", encoding="utf-8")
    (HERE / "README.md").write_text(page(measured), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
