"""The evaluation step as a whole: a simulated stream's answers become one summary, two plots and a table."""

import io
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from rich.console import Console

from services.offline.datasets import global_time_split
from services.offline.datasets.simulator import SimulatorConfig, simulate
from services.offline.demo.demo import Streamed, _evaluate
from services.offline.demo.display import figures
from services.offline.demo.plan import Prediction, ReplayPlan, ReplayResult
from services.offline.demo.schedule import planned_events, scheduled_rows
from services.offline.demo.steps import DemoOptions

CONTENDERS = {"model", "model_with_token", "frozen_state", "popularity", "recent_popularity", "item_knn"}


def answered(position: int, item_ids: list[str]) -> Prediction:
    return Prediction(
        position=position,
        item_ids=item_ids,
        latency_ms=5.0,
        stages_ms=dict.fromkeys(("queue", "encode", "first_stage", "transport", "total"), 1.0),
        state_source="stored",
        degradations=[],
        certificate="KIND_EXACT",
        token_honoured=True,
    )


def test_every_contender_is_compared_on_the_same_events(tmp_path: Path) -> None:
    people = simulate(
        SimulatorConfig(
            num_users=60, num_items=80, num_topics=8, mean_events_per_user=30, max_events_per_user=60, seed=3
        )
    )
    split = global_time_split(people, 0.8)
    rows = scheduled_rows(split.held_out.users, num_events=200, num_active=20)
    events = planned_events(split.held_out, rows, known=set(people.item_ids), run_id="r")
    asked = [position for position, event in enumerate(events) if event.predicted]
    # A model that is always right, and one with a token that never is.
    result = ReplayResult(
        predictions=[answered(position, [events[position].item_id]) for position in asked],
        predictions_with_token=[answered(position, []) for position in asked],
        freshness_ms=[20.0],
        acknowledge_ms=[1.0],
        seconds=1.0,
    )
    streamed = Streamed(
        plan=ReplayPlan(gateway="g", bootstrap="b", topic="t", epoch="e", events=events, rate_per_s=100.0),
        result=result,
        counts={"sent": 200, "applied": 200, "dead_lettered": 0, "duplicates": 0, "adds_up": True},
        frozen={},
        stream_encode_ms={"p50": 1.0, "p99": 2.0},
    )
    bundle: Any = SimpleNamespace(
        item_ids=people.item_ids,
        counts=split.train.item_counts(),
        model_version="v",
        manifest=SimpleNamespace(metrics={}),
    )
    options = DemoOptions(state_dir=tmp_path)
    options.folder.mkdir()
    summary = _evaluate(options, split, bundle, streamed, {"Freshet": "0"})
    assert (options.folder / "hit_rate.png").read_bytes().startswith(b"\x89PNG")
    assert json.loads(json.dumps(summary, allow_nan=False)) == summary
    assert set(summary["hit_rate_at_10"]) == CONTENDERS
    assert summary["hit_rate_at_10"]["model"] == 1.0
    assert summary["hit_rate_at_10"]["model_with_token"] == 0.0
    by_sitting = summary["hit_rate_at_10_by_sitting"]
    assert sum(part["events"] for part in by_sitting.values()) == len(asked)
    best = summary["over_best_baseline"]
    assert best["factor"] == round(1.0 / summary["hit_rate_at_10"][best["baseline"]], 3)
    out = io.StringIO()
    Console(file=out, width=80).print(figures(summary))
    assert max(len(line) for line in out.getvalue().splitlines()) <= 80
