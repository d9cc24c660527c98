"""`freshet bench version-sets`: one walk of an operator through stage, warm, shadow, canary, promote, rollback, retire.

Two models of the same data that differ by their seed, a whole stack, recommendations and events at fixed rates. Every
answer is held against both models.
"""

import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from services.algorithms.bundles.model_bundle import load_bundle
from services.offline.backfill.jobs import import_interactions
from services.offline.datasets import global_time_split, load_dataset
from services.offline.evaluation.common.plots import panels
from services.offline.evaluation.common.report import Report, Request, filled, report_of, written
from services.offline.evaluation.version_sets.traffic import Answer, Load
from services.offline.evaluation.version_sets.walk import Judged, Phase, canary_of, judge, walk
from services.offline.training.fit import NONE
from services.offline.training.run import run_training
from services.stack import Ports, Stack
from services.stack.version_set_record import Control
from services.stack.version_sets import remove_set, set_names

RECOMMENDS_PER_S, EVENTS_PER_S, SHARE = 20.0, 50.0, 0.05
# The first part by time is everybody's past; of the models and of the stack.
PAST = 0.8
_MAX_S = 3_600.0


def run(request: Request, *, data: str = "ml-1m", epochs: int = 1, quiet_s: float = 30.0, share: float = 0.1) -> Report:
    """Measure; writes version-sets.{md,json,png}. share: of one core, for warming."""
    began = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="freshet-version-sets-") as name:
        folder = Path(name)
        past = global_time_split(load_dataset(data), PAST).train
        first, new = (_trained(request, folder / f"seed-{seed}", past, seed, epochs) for seed in (0, 1))
        stack = Stack(folder / "state", bundle=first, ports=Ports.free())
        try:
            request.say("starting the stack")
            stack.up()
            request.say("importing the past")
            import_interactions(
                past,
                bundle=first,
                kafka=stack.kafka_bootstrap,
                redis_url=stack.redis_url,
                inference_server=stack.address("inference-server"),
                attributes=False,
            )
            load = Load(
                gateway=stack.address("gateway"),
                redis=stack.redis_url,
                users=[past.user_ids[user] for user in np.flatnonzero(past.user_counts())],
                items=list(load_bundle(first, verify=False).item_ids),
                models=[load_bundle(path, verify=False).model_version for path in (first, new)],
                recommends_per_s=RECOMMENDS_PER_S,
                events_per_s=EVENTS_PER_S,
                seconds=_MAX_S,
                seed=request.seed,
            )
            phases, answers, sent = walk(
                stack, new, load, folder / "traffic", quiet_s=quiet_s, warm_share=share, say=request.say
            )
            salt = next(one.after.salt for one in Control(stack.kafka_bootstrap).read().operations if one.after.canary)
        finally:
            for one in set_names(stack):
                remove_set(stack, one)
            stack.down()
        bundles = load_bundle(first, verify=False), load_bundle(new, verify=False)
        sets = canary_of(load.models[0], load.models[1], salt, SHARE)
        judged = judge(phases, answers, *bundles, sets)
        rows = [_row(phase, answers, judged) for phase in phases]
        report = report_of("version-sets", request, rows, began)
        ok = [answer for answer in answers if answer.status == "OK"]
        report |= {
            "data": data,
            "users": len(past.user_ids),
            "past_events": len(past),
            "recommends_per_s": RECOMMENDS_PER_S,
            "events_per_s": EVENTS_PER_S,
            "warm_share": share,
            "answers": len(answers),
            "failed": len(answers) - len(ok),
            "degraded": sum(bool(answer.marks) for answer in ok),
            **sent,
            "judged": asdict(judged),
            "moved": float(np.mean([sets.set_for(user) == "next" for user in past.user_ids])),
            "rollback_s": _rollback_s(phases, answers, load.models[1]),
            "warmed": dict(_of(phases, "warm").said),
            "shadow": _shadow(_of(phases, "shadow")),
            "series": [
                [round(one.at, 3), round(one.ms, 2), one.model == load.models[1], one.status] for one in answers
            ],
            "phases": [asdict(phase) | {"said": None} for phase in phases],
        }
    return written(request, report, page, plot=draw)


def page(report: Report) -> str:
    """version-sets.md of a report; a `remark` is what a person adds to it."""
    return filled(Path(__file__).parent / "page.template.md", **{"remark": "", **report})


def draw(report: Report, folder: Path) -> None:
    """version-sets.png: latency of every answer, and who gave it, over time."""
    began = report["phases"][0]["began"]
    series = np.array([[at - began, ms, new] for at, ms, new, status in report["series"] if status == "OK"])
    with panels(folder / "version-sets.png", 2, 1, size=(11, 2.6)) as drawn:
        top = drawn[0, 0]
        top.set(yscale="log", ylabel="Recommend, ms", ylim=(max(1.0, series[:, 1].min()), series[:, 1].max()))
        for is_new, name in ((0, "first"), (1, "next")):
            mine = series[series[:, 2] == is_new]
            top.plot(mine[:, 0], mine[:, 1], ".", markersize=2, alpha=0.5, label=f"answered by {name}")
        bins = np.arange(0, series[-1, 0] + 5, 5)
        place = np.digitize(series[:, 0], bins)
        shares = [float(series[place == at, 2].mean()) if (place == at).any() else np.nan for at in range(1, len(bins))]
        below = drawn[1, 0]
        below.set(xlabel="seconds", ylabel="share by next, of 5 s", ylim=(-0.05, 1.05))
        below.step(bins[:-1], shares, where="post")
        for panel in drawn[:, 0]:
            for phase in report["phases"]:
                panel.axvline(phase["began"] - began, color="grey", linewidth=0.6)
        for phase in report["phases"]:
            place = (phase["began"] - began, 1.02)
            top.annotate(phase["name"], place, xycoords=("data", "axes fraction"), rotation=20, fontsize=7)


def _row(phase: Phase, answers: Sequence[Answer], judged: Judged) -> dict[str, Any]:
    mine = [one for one in answers if phase.began <= one.at < phase.ended]
    times = np.array([one.ms for one in mine if one.status == "OK"] or [0.0])
    return {
        "phase": phase.name,
        "seconds": round(phase.ended - phase.began, 1),
        "command_s": round(phase.command_s, 1),
        "answers": len(mine),
        "failed": sum(one.status != "OK" for one in mine),
        "degraded": sum(bool(one.marks) for one in mine),
        "p50_ms": float(np.median(times)),
        "p99_ms": float(np.percentile(times, 99)),
        "by_new": judged.by_new[phase.name],
    }


def _of(phases: Sequence[Phase], name: str) -> Phase:
    return next(phase for phase in phases if phase.name == name)


def _rollback_s(phases: Sequence[Phase], answers: Sequence[Answer], new: str) -> float:
    """From the command's start to the last answer of the set that was rolled back."""
    phase = _of(phases, "rollback")
    late = [one.at - phase.began for one in answers if phase.began <= one.at < phase.ended and one.model == new]
    return max(late, default=0.0)


def _shadow(phase: Phase) -> dict[str, Any]:
    (gateway,) = phase.said["gateways"].values()
    found: dict[str, Any] = next(one["shadow"] for one in gateway["sets"] if "shadow" in one)
    return found


def _trained(request: Request, out: Path, past: Any, seed: int, epochs: int) -> Path:
    request.say(f"training seed {seed} on {len(past):,} events")
    # Without neighbours a score is the model's alone, so that it can be told from the other's.
    run_training(out=out, preset_name="quick", interactions=past, epochs=epochs, seed=seed, split=NONE, head="mol")
    return out
