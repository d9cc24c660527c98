"""Write README.md and copy the plots from what `make bench` measured; `python docs/benchmarks/render.py` alone redraws.

Reads demo.json, steady.json and training-<seed>.json beside it. It measures one thing itself, the machine's rate of
float32 matrix products, because a speed without its floor says little.
"""

import json
import os
import platform
import statistics
import time
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).parent
# Preset quick: pairs scored per position, component pairs P, width d, gate hidden G, blocks, model width D, window L.
PAIRS, P, WIDTH, GATE, BLOCKS, MODEL, WINDOW = 65, 8, 32, 64, 2, 50, 100


def read(name: str) -> dict[str, Any]:
    return json.loads((HERE / name).read_text(encoding="utf-8"))


def matrix_rate() -> float:
    """Float32 multiply-adds a second of a 1024³ product on all cores: median of ten."""
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


def training_table() -> list[str]:
    runs = [read(path.name) for path in sorted(HERE.glob("training-*.json"))]
    floor = matrix_rate() / training_operations()
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
        f"machine's {matrix_rate() / 1e9:.0f} billion a second in float32 products; SiLU, softmax and memory traffic "
        "are not in it."
    )
    return rows


def demo_table() -> list[str]:
    demo = read("demo.json")
    hits, recommend, fresh = demo["hit_rate_at_10"], demo["recommend_ms"], demo["freshness_ms"]
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
        "| HR@10 on the streamed events | |",
        "|---|---|",
        f"| the model, states kept fresh by the stream | {hits['model']:.4f} |",
        f"| the same, asked with the freshness token | {hits['model_with_token']:.4f} |",
        f"| the same model, states frozen at the split | {hits['frozen_state']:.4f} |",
        f"| most popular items not yet seen | {hits['popularity']:.4f} |",
        "",
        f"{events['sent']:,} distinct acknowledged events = {events['applied']:,} applied + {events['dead_lettered']} "
        f"dead-lettered (sent broken on purpose); {events['duplicates']} repeats recognised. {demo['seconds']:.0f} s in "
        f"all, training included. {demo['dataset_detail']['source']}.",
        "",
        "![hit rate over the stream](hit_rate.png)",
        "",
        "![latency](latency.png)",
    ]


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


def main() -> None:
    text = [
        "# Benchmarks",
        "",
        f"Measured on {machine()}, everything on that one machine, load generator included; "
        "`make bench` measures again and rewrites this page. Latencies count from the scheduled moment, arrivals on a "
        "clock. The machine is shared, so speeds are lower bounds.",
        "",
        "The retrieval library has pages of its own, written by `freshet bench`: [retrieval](retrieval.md) (every "
        "algorithm beside its PyTorch transcription and the machine's floor), [quantization](quantization.md) (codes at "
        "equal bits, search beside `scann`), [mutation](mutation.md) (searches while items change). `freshet evaluate` "
        "writes [PEFA on text](pefa.md) (what remembered queries are worth, beside libpecos and HNSW), "
        "[the stream](freshness.md) (withheld items, refreshed, beside a retrained model) and [text](text.md) (BM25, "
        "MiniLM, text MoL and phrases on the same questions); [generation](generation.md) has the cost of phrases.",
        "",
        "## The demo: 40 recommendations a second beside 200 events a second",
        "",
        *demo_table(),
        "",
        "## Training, preset quick on MovieLens-1M's first four fifths by time, 4 epochs",
        "",
        *training_table(),
        "",
        "## Load: `freshet loadtest steady`",
        "",
        *steady_table(),
        "",
    ]
    (HERE / "README.md").write_text("\n".join(text), encoding="utf-8")


if __name__ == "__main__":
    main()
