"""Run and time the demo's steps, and stop the processes that they started."""

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from services.algorithms.bundles.model_bundle import Bundle
from services.algorithms.scoring.states import QueryStates
from services.contracts.processes import HTTP_STEP
from services.contracts.topics.interactions import INTERACTIONS
from services.offline.datasets import GlobalTimeSplit, Interactions, global_time_split, load_dataset
from services.offline.demo import plots, sittings, steps
from services.offline.demo.baselines import baseline_ranks
from services.offline.demo.display import Display, Stopwatch, figures
from services.offline.demo.plan import HELD_OUT_SHARE, ReplayPlan, ReplayResult, answered_ranks
from services.offline.demo.schedule import NUM_ACTIVE_USERS, planned_events, scheduled_rows
from services.offline.demo.steps import DEFAULT_STATE_DIR, DemoOptions
from services.offline.demo.stream import (
    run_replay,
    stored_query_states,
    stream_progress,
    total_counts,
    wait_until_applied,
)
from services.offline.demo.summary import NOTES, event_counts, hit_rates, in_order, over_best_baseline, stream_figures
from services.stack.lag import Buckets, quantile_ms, read_histogram

if TYPE_CHECKING:
    from services.stack import Stack

_APPLY_TIMEOUT_S = 60.0


@dataclass(frozen=True, kw_only=True)
class Streamed:
    """The results of the stream step."""

    plan: ReplayPlan
    result: ReplayResult
    counts: dict[str, Any]
    frozen: dict[str, QueryStates]
    stream_encode_ms: dict[str, float | None]


def run_demo(options: DemoOptions, display: Display) -> dict[str, Any]:
    """Run every step and return the summary, also written to `<state dir>/demo/summary.json`.

    The stack stops before the evaluation, and after an error or Ctrl-C. With `keep` it continues to run after success.
    """
    stack = steps.make_stack(options, display)
    steps.require_free(stack, options)
    options.folder.mkdir(parents=True, exist_ok=True)
    clock = Stopwatch()
    display.expect({"stream": options.events / options.rate_per_s})
    display.step("components", "fetch and build what is not on this machine yet")
    with clock.part("prepare"):
        steps.prepare(stack)
    display.step("interactions", "real people's, by time: four fifths to learn from, the last fifth to stream")
    with clock.part("data"):
        data, split = _load(options, display)
    display.expect(steps.expected_seconds(options, split.train))
    finished = False
    try:
        display.step("training", "HSTU encoder and dot product, preset quick")
        bundle = steps.train_and_export(data, split.train, options, display, clock)
        display.step("stack", "Apache Kafka, Redis, Triton Inference Server, and the services")
        with clock.part("start"):
            steps.start(stack, display)
            if stack.console_address:
                display.fact(f"watch it live: {stack.console_address}")
        display.step("past", "import what happened before the split: histories, seen items, states")
        with clock.part("import"):
            components = steps.import_past(split.train, stack, display)
        display.step("stream", f"{options.rate_per_s:.0f} events a second, one in five predicted before it is sent")
        display.fact(
            "each prediction is asked for as of its event's own time (`as_of`), as the person would have asked"
        )
        with clock.part("stream"):
            streamed = _stream(options, split, bundle, stack, display)
        finished = True
    finally:
        if not (options.keep and finished):
            with clock.part("stop"):
                steps.stop(stack, display)
    display.step("evaluation", "the same moments, answered by item-kNN, by popularity and by frozen states")
    with clock.part("evaluation"):
        summary = _evaluate(options, split, bundle, streamed, components)
    summary |= {"seconds": clock.total, "seconds_by_part": clock.parts}
    path = options.folder / "summary.json"
    path.write_text(json.dumps(summary, indent=2, ensure_ascii=False, allow_nan=False) + "\n", encoding="utf-8")
    _show(options, bundle, streamed, summary, display)
    return summary


def _load(options: DemoOptions, display: Display) -> tuple[Interactions, GlobalTimeSplit]:
    data = load_dataset(options.dataset)
    display.fact(data.source)
    split = global_time_split(data, 1 - HELD_OUT_SHARE)
    display.fact(
        f"{len(data):,} events of {data.num_users:,} users on {data.num_items:,} items; "
        f"{len(split.held_out):,} held out, from {time.strftime('%Y-%m-%d %H:%M', time.gmtime(split.split_time))} UTC"
    )
    return data, split


def _stream(options: DemoOptions, split: GlobalTimeSplit, bundle: Bundle, stack: "Stack", display: Display) -> Streamed:
    rows = scheduled_rows(split.held_out.users, num_events=options.events)
    run_id = f"demo-{time.strftime('%Y%m%dT%H%M%S', time.gmtime())}"
    events = planned_events(split.held_out, rows, known=set(bundle.item_ids), run_id=run_id)
    users = {event.user_id for event in events}
    gateway = stack.address("gateway")
    epoch, before = stream_progress(stack.redis_url)
    states = stored_query_states(stack.redis_url, sorted(users), bundle.model_version)
    plan = ReplayPlan(
        gateway=gateway,
        bootstrap=stack.kafka_bootstrap,
        topic=INTERACTIONS,
        epoch=epoch,
        events=events,
        rate_per_s=options.rate_per_s,
        malformed_prefix=f"{run_id}-malformed",
    )
    display.fact(f"{len(users)} users take part, at most {NUM_ACTIVE_USERS} at once")
    with display.progress() as bar:
        task = bar.add_task("connecting", total=len(events))

        def on_progress(progress: Mapping[str, Any]) -> None:
            if "sent" in progress:
                bar.update(task, completed=progress["sent"], description=_progress_text(progress))
            else:
                display.fact(f"the replay says: {progress}")

        encodes = _stream_encodes(stack)
        result = run_replay(plan, options.folder, on_progress)
    after = wait_until_applied(stack.redis_url, result.last_offsets, timeout_s=_APPLY_TIMEOUT_S)
    encodes_after = _stream_encodes(stack)
    return Streamed(
        plan=plan,
        result=result,
        counts=event_counts(result, total_counts(before), total_counts(after)),
        frozen=states,
        stream_encode_ms={
            name: quantile_ms(encodes, encodes_after, share) for name, share in (("p50", 0.5), ("p99", 0.99))
        },
    )


def _stream_encodes(stack: "Stack") -> Buckets:
    return read_histogram(stack.address("encoder-metrics"), "freshet_encoder_encode_seconds", {"source": "stream"})


def _progress_text(progress: Mapping[str, Any]) -> str:
    forms = {
        "recent_hit_rate": "hit rate {:.3f}",
        "recent_p50_ms": "Recommend {:.0f} ms",
        "recent_freshness_ms": "fresh in {:.0f} ms",
    }
    return ", ".join(form.format(progress[name]) for name, form in forms.items() if progress.get(name) is not None)


def _evaluate(
    options: DemoOptions, split: GlobalTimeSplit, bundle: Bundle, streamed: Streamed, components: dict[str, str]
) -> dict[str, Any]:
    plan, result = streamed.plan, streamed.result
    predicted = np.array([event.predicted for event in plan.events], dtype=np.bool_)
    items = [event.item_id for event in plan.events if event.predicted]
    answers = {"model": result.predictions, "model_with_token": result.predictions_with_token}
    ranks = {
        name: answered_ranks([answer.item_ids for answer in in_order(given)], items) for name, given in answers.items()
    }
    rates, hit = hit_rates(ranks | baseline_ranks(bundle, streamed.frozen, split.train, plan.events))
    kinds = sittings.kinds_of_predictions(plan.events, sittings.last_times(split.train))
    positions = np.flatnonzero(predicted).astype(np.int64)
    data = split.train
    plots.plot_hit_rate(options.folder / "hit_rate.png", hit, positions, title=f"{data.name}: hit rate over the stream")
    plots.plot_latency(
        options.folder / "latency.png",
        np.array([answer.latency_ms for answer in result.predictions], dtype=np.float64),
        np.array(result.freshness_ms, dtype=np.float64),
    )
    had_state = np.array([event.user_id in streamed.frozen for event in plan.events if event.predicted], dtype=np.bool_)
    return {
        "dataset": data.name,
        "dataset_detail": {
            "source": data.source,
            "events": len(split.train) + len(split.held_out),
            "users": data.num_users,
            "items": data.num_items,
            "held_out_events": len(split.held_out),
            "split_time": split.split_time,
            "replayed_users": len({event.user_id for event in plan.events}),
            "replayed_users_with_a_past": len(streamed.frozen),
        },
        "components": components,
        "model": {"version": bundle.model_version, "metrics": bundle.manifest.metrics},
        "events": streamed.counts,
        "hit_rate_at_10": rates,
        "hit_rate_at_10_of_users_with_a_past": {
            name: round(float(values[had_state].mean()), 5) if had_state.any() else None for name, values in hit.items()
        },
        "hit_rate_at_10_by_sitting": sittings.hit_rates_by_kind(kinds, hit),
        "over_best_baseline": over_best_baseline(rates),
        **stream_figures(plan, result, streamed.stream_encode_ms),
        "options": {name: getattr(options, name) for name in ("events", "rate_per_s", "epochs", "seed")},
        "notes": NOTES,
    }


def _show(
    options: DemoOptions, bundle: Bundle, streamed: Streamed, summary: Mapping[str, Any], display: Display
) -> None:
    display.console.print()
    display.console.print(figures(summary))
    display.console.print()
    parts = ", ".join(f"{name} {seconds:.0f} s" for name, seconds in summary["seconds_by_part"].items())
    display.fact(f"{summary['seconds']:.0f} s in all: {parts}")
    display.fact(f"{options.folder / 'summary.json'}, hit_rate.png and latency.png beside it")
    if options.keep:
        users = [event.user_id for event in streamed.plan.events]
        shown = next((user for user in users if user in streamed.frozen), users[0])
        state = "" if options.state_dir == DEFAULT_STATE_DIR else f" --state {options.state_dir}"
        where = f" --bundle {options.bundle} --gateway {streamed.plan.gateway}" if state or options.port_offset else ""
        display.fact("the stack keeps running:")
        for command in (f"status{state}", f"recommend --user {shown}{where}", f"down{state}"):
            display.fact(f"  freshet {command}")
        host, _, port = streamed.plan.gateway.rpartition(":")
        best = bundle.item_ids[int(np.argmax(bundle.counts))]
        bodies: list[tuple[str, dict[str, Any]]] = [
            ("Recommend", {"userId": shown, "k": 3, "pageDepth": 30}),
            ("RecordInteractions", {"interactions": [{"userId": shown, "itemId": best, "type": "dislike"}]}),
            ("Similar", {"itemId": best, "k": 3}),
            ("PutItems", {"items": [{"itemId": "mine", "title": "A film of mine"}]}),
        ]
        display.fact("the same by JSON; `nextPageToken`, sent back as `pageToken`, is page two:")
        for method, body in bodies:
            url = f"http://{host}:{int(port) + HTTP_STEP}/freshet.v1.GatewayService/{method}"
            display.fact(f"  curl --json '{json.dumps(body)}' {url}")
