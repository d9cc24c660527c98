"""`freshet loadtest knee`: the system's highest rate, and its behaviour under overload.

The knee is the highest rate of Recommend, next to 2.5 times as many events, at which its p99 is at most 50 ms or four
times the p99 at 5/s, whichever is more. Arrivals are independent of answers; failed calls and degraded answers count as
unanswered. Then one run has 1, 2, 0.5, 4 and 0.5 times the knee's rate in turn. *Goodput* is answers within 100 ms
without degradations. Afterwards, each acknowledged event is looked up in the log by its id, and each user's last token
must be honoured. All users have a state before the first call that counts. The compiled sender makes the calls; every
result states its processor time.
"""

import argparse
import json
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from freshet.v1 import common_pb2, events_pb2, gateway_pb2

from . import requests
from .compiled import OK, Answers, PlannedCall, SenderError, build, send
from .open_loop import FloatArray, arrivals
from .options import Option, add_items, add_options, check_options
from .population import Draws, Population
from .report import figure
from .requests import RECOMMEND, RECORD

_GOOD_S, _TIMEOUT_S = 0.1, 1.0
_ALONE_PER_S, _ALONE_CALLS, _BOUND_S, _BOUND_TIMES = 5.0, 300, 0.05, 4.0
_GROWS, _WITHIN = 1.5, 1.1
# Phases of the run over time: (name, rate as a multiple of the knee, seconds).
PHASES = (("knee", 1.0, 15.0), ("2x", 2.0, 20.0), ("after 2x", 0.5, 10.0), ("4x", 4.0, 20.0), ("after 4x", 0.5, 10.0))
_USUAL_AGAIN_SHARE = 0.95

OPTIONS = (
    Option("k", 10, 1, 1_000, "recommendations per call"),
    Option("events", 2.5, 0, 100, "interactions written per Recommend call", "TIMES"),
    Option("num-users", 1_000, 1, 1_000_000, "how many users to make up"),
    Option("step-seconds", 10.0, 1, 600, "how long each rate is tried"),
    Option("most", 2_000.0, 10, 100_000, "highest rate that is tried", "PER_S"),
    Option("knee", 0.0, 0, 100_000, "take this as the knee instead of looking for it", "PER_S"),
    Option("seed", 0, 0, 2**63 - 1, "equal seeds schedule equal arrivals"),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """Result of one rate; p99 of Recommend in ms, in which failed and degraded answers count as infinite."""

    per_s: float
    p50_ms: float
    p99_ms: float
    marked: int
    failed: dict[str, int]
    sender_processor_share: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Phase:
    """A part of the run over time. Rates are per second; p99 is of all answered Recommend calls.

    usual_again_s: from its beginning until 95 % of a second's answers are good again; None: not until its end.
    """

    name: str
    offered_per_s: float
    goodput_per_s: float
    marked_per_s: float
    p99_ms: float
    failed: dict[str, int]
    events_acknowledged_per_s: float
    usual_again_s: float | None


@dataclass(kw_only=True, slots=True)
class Knee:
    """The result. seconds: rates for each second of the run over time."""

    alone_p99_ms: float
    bound_ms: float
    knee_per_s: float
    steps: list[Step] = field(default_factory=list)
    phases: list[Phase] = field(default_factory=list)
    seconds: dict[str, list[float]] = field(default_factory=dict)
    sender_processor_share: float = 0.0
    acknowledged: int = 0
    lost: int | None = None
    tokens_not_honoured: int = 0


class _Calls:
    def __init__(self, options: argparse.Namespace) -> None:
        self.rng = np.random.default_rng(options.seed)
        self._population = Population.made_up(options.num_users, options.items)
        self._draws = Draws(self._population, self.rng)
        self._k, self._events = options.k, options.events
        self._program, self._target = build(), options.target
        # Partition, offset and id of each acknowledged event. The newest token of each user.
        self.acknowledged: list[tuple[int, int, str]] = []
        self.tokens: dict[str, common_pb2.FreshnessToken] = {}

    def make_known(self) -> None:
        requests.make_known(self._program, self._target, self._population, self._draws)

    def plan(self, parts: Sequence[tuple[float, float]]) -> list[PlannedCall]:
        """Return calls for (rate per second, seconds), one part after the other."""
        calls, began = [], 0.0
        for rate, seconds in parts:
            kinds: Sequence[tuple[str, float, Callable[[], bytes]]] = (
                (RECOMMEND, rate, lambda: requests.recommend(self._draws.draw()[0], self._k)),
                (RECORD, rate * self._events, lambda: requests.record([self._draws.draw()])),
            )
            for method, per_s, request in kinds:
                due = arrivals("poisson", rate_per_s=per_s, seconds=seconds, rng=self.rng)
                calls += [PlannedCall(due_s=began + at, method=method, request=request()) for at in due.tolist()]
            began += seconds
        return sorted(calls, key=lambda call: call.due_s)

    def send(self, calls: Sequence[PlannedCall], timeout_s: float = _TIMEOUT_S) -> Answers:
        answers = send(self._program, self._target, calls, timeout_s=timeout_s)
        for call, status, raw in zip(calls, answers.status, answers.answer, strict=True):
            if call.method == RECORD and status == OK:
                user = gateway_pb2.RecordInteractionsRequest.FromString(call.request).interactions[0].user_id
                for receipt in gateway_pb2.RecordInteractionsResponse.FromString(raw).receipts:
                    token = receipt.token
                    self.acknowledged.append((token.partition, token.offset, receipt.event_id))
                    newest = self.tokens.get(user)
                    if newest is None or newest.offset < token.offset:
                        self.tokens[user] = token
        return answers

    def not_honoured(self) -> int:
        """Return how many users' newest tokens are not honoured within ten seconds each."""
        users = list(self.tokens)
        calls = [
            PlannedCall(
                due_s=place / 20,
                method=RECOMMEND,
                request=gateway_pb2.RecommendRequest(
                    user_id=user, k=1, freshness_token=self.tokens[user]
                ).SerializeToString(),
            )
            for place, user in enumerate(users)
        ]
        answers = send(self._program, self._target, calls, timeout_s=10.0)
        return sum(
            status != OK or not gateway_pb2.RecommendResponse.FromString(raw).token_honoured
            for status, raw in zip(answers.status, answers.answer, strict=True)
        )


def main(arguments: Sequence[str]) -> int:
    """Run the command. Exit status: 0 measured, 1 the target did not answer or events were lost, 2 wrong usage."""
    from .command import add_target, check_target

    parser = argparse.ArgumentParser(
        prog="freshet loadtest knee",
        description="The highest rate that is answered in time, and what becomes of twice and four times as much.",
        epilog="example: freshet loadtest knee --items .freshet/bundle",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add_options(parser, OPTIONS)
    add_target(parser, "knee")
    add_items(parser, "bundle folder, items.arrow or a text file with one item id per line")
    parser.add_argument("--kafka", default="127.0.0.1:19092", metavar="HOST:PORT",
                        help="where acknowledged events are looked for; empty: nowhere")  # fmt: skip
    parser.add_argument(
        "--before", type=Path, metavar="PATH", help="an earlier result's knee.json, drawn above this one"
    )
    options = parser.parse_args(arguments)
    try:
        check_options(options, OPTIONS)
        check_target(options)
        before = [("before", read_knee(options.before))] if options.before else []
        calls = _Calls(options)
    except (ValueError, SenderError) as exc:
        parser.error(str(exc))
    try:
        knee = _look_for(calls, options)
        _over_time(calls, knee)
    except SenderError as exc:
        sys.stderr.write(f"loadtest: {exc}\n")
        return 1
    knee.acknowledged = len(calls.acknowledged)
    knee.tokens_not_honoured = calls.not_honoured()
    if options.kafka:
        knee.lost = _lost(options.kafka, calls.acknowledged)
    options.output.mkdir(parents=True, exist_ok=True)
    Path(options.output, "knee.json").write_text(json.dumps(asdict(knee)) + "\n", encoding="utf-8")
    picture = plot([*before, ("now" if before else "", knee)], options.output / "knee.png")
    sys.stdout.write(table(knee) + f"\n{picture}\n")
    return 1 if knee.lost or knee.tokens_not_honoured else 0


def read_knee(path: Path) -> Knee:
    """Read an earlier result. Raises: ValueError naming the file."""
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
        parts = {"steps": [Step(**one) for one in raw["steps"]], "phases": [Phase(**one) for one in raw["phases"]]}
        return Knee(**(raw | parts))
    except (OSError, ValueError, KeyError, TypeError) as exc:
        raise ValueError(f"--before={path} is no knee.json: {exc}") from exc


def _look_for(calls: _Calls, options: argparse.Namespace) -> Knee:
    calls.make_known()
    # The first calls of a process are slow, whatever its load.
    _step(calls, _ALONE_PER_S, options.step_seconds / 2)
    # With few calls the p99 is the slowest call, so the machine's noise would set the bound.
    alone = _step(calls, _ALONE_PER_S, _ALONE_CALLS / _ALONE_PER_S)
    bound_ms = 1e3 * max(_BOUND_S, _BOUND_TIMES * alone.p99_ms / 1e3)
    knee = Knee(alone_p99_ms=alone.p99_ms, bound_ms=bound_ms, knee_per_s=options.knee or alone.per_s, steps=[alone])
    if options.knee:
        return knee

    def holds(rate: float) -> bool:
        # Twice: one stall of the machine is not the system's limit.
        for _ in range(2):
            step = _step(calls, rate, options.step_seconds)
            knee.steps.append(step)
            if step.p99_ms <= bound_ms:
                return True
        return False

    low, high = _ALONE_PER_S, 2 * _ALONE_PER_S
    while high <= options.most and holds(high):
        low, high = high, high * _GROWS
    while high > _WITHIN * low:
        middle = (low * high) ** 0.5
        low, high = (middle, high) if holds(middle) else (low, middle)
    knee.knee_per_s = low
    return knee


def _step(calls: _Calls, rate: float, seconds: float) -> Step:
    planned = calls.plan([(rate, seconds)])
    answers = calls.send(planned)
    asked = np.array([call.method == RECOMMEND for call in planned])
    marked = _marked(asked, answers)
    good = asked & (answers.status == OK) & ~marked
    latency = np.where(good, answers.latency_s, np.inf)[asked]
    step = Step(
        per_s=rate,
        p50_ms=_percentile_ms(latency, 50),
        p99_ms=_percentile_ms(latency, 99),
        marked=int(marked.sum()),
        failed=_failures(answers.status),
        sender_processor_share=answers.processor_s / seconds,
    )
    sys.stderr.write(f"{rate:8.1f}/s  p50 {step.p50_ms:7.1f} ms  p99 {step.p99_ms:7.1f} ms  {step.failed or ''}\n")
    return step


def _over_time(calls: _Calls, knee: Knee) -> None:
    planned = calls.plan([(times * knee.knee_per_s, seconds) for _, times, seconds in PHASES])
    answers = calls.send(planned)
    due = np.array([call.due_s for call in planned])
    asked = np.array([call.method == RECOMMEND for call in planned])
    answered = answers.status == OK
    marked = _marked(asked, answers)
    good = asked & answered & ~marked & (answers.latency_s <= _GOOD_S)
    total = sum(seconds for _, _, seconds in PHASES)

    def each_second(which: Any) -> list[float]:
        counts: list[float] = np.histogram(due[which], np.arange(0, total + 1))[0].astype(float).tolist()
        return counts

    knee.seconds = {
        "offered": each_second(asked),
        "goodput": each_second(good),
        "marked": each_second(asked & answered & marked),
        "failed": each_second(asked & ~answered),
        "events acknowledged": each_second(~asked & answered),
    }
    knee.sender_processor_share = answers.processor_s / total
    began = 0.0
    for name, _, seconds in PHASES:
        here = (due >= began) & (due < began + seconds)
        of_reads = here & asked
        knee.phases.append(
            Phase(
                name=name,
                offered_per_s=of_reads.sum() / seconds,
                goodput_per_s=(here & good).sum() / seconds,
                marked_per_s=(of_reads & answered & marked).sum() / seconds,
                p99_ms=_percentile_ms(answers.latency_s[of_reads & answered], 99),
                failed=_failures(answers.status[of_reads]),
                events_acknowledged_per_s=(here & ~asked & answered).sum() / seconds,
                usual_again_s=_usual_again(due[of_reads] - began, good[of_reads], seconds),
            )
        )
        began += seconds


def _usual_again(due_s: FloatArray, good: Any, seconds: float) -> float | None:
    """Return the time from which 95 % of a second's calls are good."""
    for begin in np.arange(0, seconds - 1 + 1e-9, 0.1):
        here = (due_s >= begin) & (due_s < begin + 1)
        if here.any() and good[here].mean() >= _USUAL_AGAIN_SHARE:
            return round(float(begin), 1)
    return None


def _lost(kafka: str, acknowledged: Sequence[tuple[int, int, str]]) -> int:
    """Return the number of acknowledged events whose id is not at their receipt's position."""
    import kafka as kafka_python

    wanted = {(partition, offset): event_id for partition, offset, event_id in acknowledged}
    if not wanted:
        return 0
    reader = kafka_python.KafkaConsumer(bootstrap_servers=kafka, enable_auto_commit=False, consumer_timeout_ms=10_000)
    try:
        for partition in {partition for partition, _ in wanted}:
            place = kafka_python.TopicPartition("interactions", partition)
            offsets = sorted(offset for one, offset in wanted if one == partition)
            reader.assign([place])
            reader.seek(place, offsets[0])
            for record in reader:
                if wanted.get((partition, record.offset)) == events_pb2.Interaction.FromString(record.value).event_id:
                    del wanted[partition, record.offset]
                if record.offset >= offsets[-1]:
                    break
    finally:
        reader.close()
    return len(wanted)


def _marked(asked: Any, answers: Answers) -> Any:
    return np.array(
        [
            bool(is_ask and raw and gateway_pb2.RecommendResponse.FromString(raw).degradations)
            for is_ask, raw in zip(asked, answers.answer, strict=True)
        ]
    )


def _percentile_ms(latency_s: FloatArray, percent: float) -> float:
    if not len(latency_s):
        return float("nan")
    return float(1e3 * np.percentile(latency_s, percent, method="higher"))


def _failures(status: Any) -> dict[str, int]:
    import grpc

    names = {code.value[0]: code.name for code in grpc.StatusCode}
    counts = Counter(int(one) for one in status if one != OK)
    return {names.get(code, "NOT_SENT"): number for code, number in counts.items()}


def table(knee: Knee) -> str:
    """Return the result for a terminal."""
    lines = [
        f"alone (5/s) p99 {knee.alone_p99_ms:.1f} ms, allowed {knee.bound_ms:.1f} ms; knee {knee.knee_per_s:.0f} "
        f"Recommend/s",
        f"{'':<10}{'offered/s':>10}{'goodput/s':>10}{'marked/s':>10}{'p99 ms':>9}{'events/s':>10}{'usual again s':>15}"
        "  failed",
    ]
    for one in knee.phases:
        again = "never" if one.usual_again_s is None else f"{one.usual_again_s:.1f}"
        lines.append(
            f"{one.name:<10}{one.offered_per_s:>10.1f}{one.goodput_per_s:>10.1f}{one.marked_per_s:>10.1f}"
            f"{one.p99_ms:>9.1f}{one.events_acknowledged_per_s:>10.1f}{again:>15}  {one.failed or ''}"
        )
    lost = "not looked for" if knee.lost is None else str(knee.lost)
    lines.append(
        f"acknowledged events {knee.acknowledged:,}, lost {lost}; tokens not honoured {knee.tokens_not_honoured}; "
        f"the sender took {knee.sender_processor_share:.2f} of a core"
    )
    return "\n".join(lines)


def plot(results: Sequence[tuple[str, Knee]], path: Path) -> Path:
    """Plot goodput, degraded and rejected answers for each second, a panel for each named result."""
    drawn = figure(3.2 * len(results))
    panels = drawn.subplots(len(results), 1, squeeze=False, sharex=True)
    for (name, knee), panel in zip(results, panels[:, 0], strict=True):
        for line, colour in (
            ("offered", "#999999"),
            ("goodput", "#1f6f8b"),
            ("marked", "#e07a3f"),
            ("failed", "#c0392b"),
        ):
            panel.step(range(len(knee.seconds[line])), knee.seconds[line], where="post", color=colour, label=line)
        panel.set_title(f"{name + ': ' if name else ''}knee {knee.knee_per_s:.0f} Recommend/s")
        panel.set_ylabel("calls a second")
    panels[0, 0].legend(loc="upper left", ncols=4)
    panels[-1, 0].set_xlabel("seconds")
    drawn.savefig(path, dpi=110)
    return path
