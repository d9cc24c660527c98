"""Freshness: do all users' answers reflect recent events, and what does that cost?

Three parts follow each other, under the same stream of interactions:

1. lag and new items: interactions with the probes' own items are observed in other users' answers; new items, from
   their third interaction to the top 50 of users who like similar items;
2. tokens: a Recommend with its token follows every write at once, and the answer's claim is checked;
3. windows: Recommend with a running and with a stopped refresher (SIGSTOP), in turns.

The claims rest on answers alone; the system's own lag figure is listed with them.
"""

import argparse
import contextlib
import os
import signal
import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from freshet.v1 import common_pb2, events_pb2, gateway_pb2

from loadtest import contract
from loadtest.contract import ProbeBoard
from loadtest.engine import LoadPlan
from loadtest.machine import processes
from loadtest.open_loop import FloatArray, arrivals
from loadtest.options import Option, add_items, add_options, add_state, check_options
from loadtest.population import Draws, Population, neighbourhoods, read_items, read_vectors
from loadtest.requests import gateway, interaction, recommended, streams
from loadtest.results import Conclusion, Outcome, RunResults, SetUpError
from loadtest.windows import Window, interleaved, percentile_per_window

SUMMARY = "event to index, new items, tokens, and what refreshing costs; checked in answers"
_TOP = 50
_NEAR = 8
_WRITERS = 3
_PROBERS = 50
_SET_UP_S = 60.0
# Longer than the refresher collects changes. If no evidence grew in this time, all earlier writes are included.
_REST_S = 2.0
_QUICK = {
    "lag_seconds": 20.0, "new_items": 4, "tokens": 400, "windows": 4, "window_seconds": 8.0, "settle_seconds": 2.0,
}  # fmt: skip


_OPTIONS = (
    Option("event-rate", 300.0, 0, 5_000, "interactions per second", "PER_S"),
    Option("batch", 5, 1, 1_000, "interactions per RecordInteractions call"),
    Option("num-users", 500, 10, 100_000, "users that the interactions are of"),
    Option("lag-seconds", 120.0, 0, 3_000, "how long to probe for lag; 0: not at all"),
    Option("probe-rate", 5.0, 0.1, 100, "probes per second", "PER_S"),
    Option("probe-items", 60, 1, 1_000, "items that only the probes write"),
    Option("poll-ms", 50.0, 5, 5_000, "how often answers are looked at"),
    Option("new-items", 20, 0, 500, "new items to bring, spread over the lag part"),
    Option("audience", 5, 1, 50, "users per new item who like at least three near ones"),
    Option("wait-seconds", 15.0, 0, 300, "how long a probe or a new item is looked for"),
    Option("tokens", 10_000, 0, 1_000_000, "token-checked calls; 0: none"),
    Option("token-rate", 40.0, 1, 1_000, "of them per second", "PER_S"),
    Option("windows", 20, 0, 200, "windows, an even number; 0: none"),
    Option("window-seconds", 30.0, 1, 600, "length of a window"),
    Option("settle-seconds", 5.0, 0, 600, "of each window, not measured"),
    Option("recommend-rate", 40.0, 1, 1_000, "Recommend in the windows", "PER_S"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_options(parser, _OPTIONS)
    parser.add_argument("--quick", action="store_true",
                        help="in two minutes: 20 s of probes, 4 new items, 400 tokens, 4 windows of 8 s")  # fmt: skip
    add_items(parser, "bundle folder")
    parser.add_argument("--refresher-pid", type=int, action="append", metavar="PID",
                        help="whom to stop in the windows; default: the refresher of --state")  # fmt: skip
    add_state(parser)


def build(arguments: argparse.Namespace, channel: Any, rng: np.random.Generator) -> LoadPlan:
    """Return the plan. Raises: ValueError naming the option and what is allowed."""
    if arguments.quick:
        vars(arguments).update(_QUICK)
    check_options(arguments, _OPTIONS)
    return _Run(arguments, gateway(channel), rng).plan()


class _Trial:
    """One new item: its writers, and when the users who should find it did (seconds after its third event)."""

    def __init__(self, name: str, near: list[str], num_users: int) -> None:
        self.item_id, self.near = f"{name}-new", near
        self.writers = [f"{name}-writer-{row}" for row in range(_WRITERS)]
        self.audience = [f"{name}-audience-{row}" for row in range(num_users)]
        self.found_s: dict[str, float | None] = {}


class _Run:
    def __init__(self, arguments: argparse.Namespace, stub: Any, rng: np.random.Generator) -> None:
        self._options = arguments
        self._timeout_s = max(arguments.timeout_ms / 1e3, 0.5)
        self._gateway = stub
        self._rng = rng
        self._run = uuid.uuid4().hex[:8]
        item_ids, weights = read_items(arguments.items)
        vectors_of, vectors = read_vectors(arguments.items)
        if vectors_of != item_ids or len(item_ids) < arguments.probe_items + 4 * _NEAR:
            raise ValueError(f"--items={arguments.items} has {len(item_ids)} items; too few for the probes")
        by_count = np.argsort(-weights, kind="stable")
        # A few well-trained items are reserved for the probes: no other user writes to them.
        well_known = by_count[: max(len(by_count) // 2, arguments.probe_items + 2 * _NEAR)]
        probes = rng.choice(well_known, arguments.probe_items, replace=False)
        others = np.setdiff1d(np.arange(len(item_ids)), probes)
        weights = weights.copy()
        weights[probes] = 0.0
        population = Population(
            user_ids=[f"freshness-{self._run}-{row}" for row in range(arguments.num_users)],
            item_ids=item_ids,
            item_weights=weights / weights.sum(),
        )
        self._draws = Draws(population, rng)
        self._board = ProbeBoard([item_ids[row] for row in probes.tolist()])
        self._observer = f"freshness-{self._run}-observer"
        self._probers = [f"freshness-{self._run}-prober-{row}" for row in range(_PROBERS)]
        self._popular = [item_ids[row] for row in by_count.tolist() if row not in set(probes.tolist())][:50]
        anchors = rng.choice(np.intersect1d(well_known, others), arguments.new_items, replace=False)
        near = neighbourhoods(item_ids, vectors, anchors, size=_NEAR, among=others)
        self._trials = [
            _Trial(f"freshness-{self._run}-{number}", ids, arguments.audience) for number, ids in enumerate(near)
        ]
        self._untried = list(self._trials)
        self._told_s: list[float] = []
        self._told_offset = -1
        self._tokens: dict[str, int] = {}
        self._windows: list[Window] = []
        self._stopped: set[int] = set()
        self._refreshers: list[int] = []
        self._started = time.perf_counter()

    # Schedule

    def plan(self) -> LoadPlan:
        """Return the streams of the three parts, one part after the other."""
        options = self._options
        lag_ends = options.lag_seconds + (options.wait_seconds if options.lag_seconds else 0.0)
        tokens_s = options.tokens / options.token_rate
        begin_s = lag_ends + tokens_s
        if options.windows:
            self._refreshers = options.refresher_pid or _refreshers_of(options.state)
            self._windows = interleaved(
                begin_s=begin_s,
                num_windows=options.windows,
                seconds=options.window_seconds,
                settle_s=options.settle_seconds,
                rng=self._rng,
            )
        ends_s = begin_s + options.windows * options.window_seconds
        if ends_s <= 0:
            raise ValueError("--lag-seconds, --tokens and --windows are all 0; nothing would be measured")

        def evenly(rate_per_s: float, begin: float, end: float) -> FloatArray:
            return begin + arrivals("uniform", rate_per_s=rate_per_s, seconds=max(0.0, end - begin), rng=self._rng)

        gaps = options.lag_seconds / max(options.new_items, 1)
        rows: dict[str, tuple[FloatArray, Callable[[], Outcome]]] = {
            "record": (evenly(options.event_rate / options.batch, 0.0, ends_s), self._record),
            "probe": (evenly(options.probe_rate, 0.5, options.lag_seconds), self._probe),
            "poll": (evenly(1e3 / options.poll_ms, 0.0, lag_ends), self._poll),
            "new_item": (
                (np.arange(options.new_items if options.lag_seconds else 0) + 0.5) * gaps,
                self._bring_new_item,
            ),
            "token": (lag_ends + np.arange(options.tokens) / options.token_rate, self._check_token),
            "recommend": (evenly(options.recommend_rate, begin_s, ends_s), self._recommend),
            "switch": (np.array([window.start_s for window in self._windows]), self._switch),
        }
        return LoadPlan(
            streams=streams(rows),
            seconds=ends_s,
            set_up=self.set_up,
            tear_down=self.resume,
            conclude=self.conclude,
        )

    def set_up(self) -> None:
        """Give probing and trial users a past, and probe items enough evidence to be served; record their scores."""
        # An interaction updates an item by the user's state before it, which a user without a past lacks.
        warmers = [f"freshness-{self._run}-warmer-{row}" for row in range(_WRITERS)]
        for user in (self._observer, *self._probers, *warmers):
            self._write_past(user, self._rng.choice(self._popular, 6, replace=False).tolist())
        for trial in self._trials:
            for user in (*trial.writers, *trial.audience):
                liked = self._rng.choice(trial.near, int(self._rng.integers(3, _NEAR - 1)), replace=False)
                self._write_past(user, [*self._rng.choice(self._popular, 3, replace=False), *liked])
        token = None
        for user in warmers:
            for start in range(0, len(self._board.item_ids), 500):
                token = self._write(_like(user, item_id) for item_id in self._board.item_ids[start : start + 500])
        deadline = time.monotonic() + _SET_UP_S
        while token is not None:
            request = gateway_pb2.RecommendRequest(user_id=warmers[-1], k=1, freshness_token=token)
            if self._gateway.Recommend(request, timeout=5).token_honoured:
                break
            if time.monotonic() > deadline:
                raise SetUpError(f"a token was not honoured within {_SET_UP_S:g} s; `freshet watch` shows what waits")
        if self._options.lag_seconds:
            self._note_baselines(deadline)
        self._started = time.perf_counter()

    def _note_baselines(self, deadline: float) -> None:
        """Record score and evidence of every probe item, once all have evidence that has stopped growing."""
        evidence: dict[str, int] = {}
        while True:
            before, evidence = evidence, {item_id: self._evidence(item_id) for item_id in self._board.item_ids}
            if all(evidence.values()) and evidence == before:
                break
            if time.monotonic() > deadline:
                missing = sum(not count for count in evidence.values())
                raise SetUpError(
                    f"{missing} of {len(evidence)} items rest on no interaction in the served index after "
                    f"{_SET_UP_S:g} s, or it did not come to rest: does a refresher run?"
                )
            time.sleep(_REST_S)
        for item_id, score in self._scores(self._board.item_ids).items():
            self._board.baseline(item_id, score, evidence[item_id])

    # Calls

    def _record(self) -> Outcome:
        self._write(_like(*self._draws.draw()) for _ in range(self._options.batch))
        return Outcome()

    def _probe(self) -> Outcome:
        item_id = self._board.take()
        if item_id is None:
            return Outcome(counts=["probes_without_a_free_item"])
        self._write([_like(self._probers[int(self._rng.integers(len(self._probers)))], item_id)])
        self._board.written(item_id, self._now_s())
        return Outcome()

    def _poll(self) -> Outcome:
        watched = self._board.under_way
        if not watched:
            return Outcome()
        scores = self._scores(watched)
        seen_s = self._now_s()
        counts = []
        for item_id, score in scores.items():
            if self._board.moved(item_id, score):
                has_grown = self._board.confirm(item_id, score, self._evidence(item_id), seen_s)
                counts.append("probes_seen" if has_grown else "scores_that_moved_without_new_evidence")
        return Outcome(counts=counts)

    def _bring_new_item(self) -> Outcome:
        trial = self._untried.pop()
        item = events_pb2.Item(item_id=trial.item_id, title=f"New beside {trial.near[0]}")
        self._gateway.PutItems(gateway_pb2.PutItemsRequest(items=[item]), timeout=5)
        for writer in trial.writers:
            self._write([_like(writer, trial.item_id)])
        third_s = self._now_s()
        trial.found_s = dict.fromkeys(trial.audience)
        while self._now_s() - third_s < self._options.wait_seconds:
            for user in [user for user, found_s in trial.found_s.items() if found_s is None]:
                answer = self._gateway.Recommend(
                    gateway_pb2.RecommendRequest(user_id=user, k=_TOP), timeout=self._timeout_s
                )
                if any(scored.item_id == trial.item_id for scored in answer.items):
                    trial.found_s[user] = self._now_s() - third_s
            if None not in trial.found_s.values():
                break
            time.sleep(0.1)
        return Outcome(counts=["new_items_brought"])

    def _check_token(self) -> Outcome:
        user_id, item_id = self._draws.draw()
        token = self._write([_like(user_id, item_id)])
        request = gateway_pb2.RecommendRequest(user_id=user_id, k=10, freshness_token=token)
        answer = self._gateway.Recommend(request, timeout=max(self._timeout_s, 2.0))
        verdict = contract.judge_token(token, item_id, answer)
        self._tokens[verdict] = self._tokens.get(verdict, 0) + 1
        return Outcome(counts=[f"token_{verdict}"])

    def _recommend(self) -> Outcome:
        user_id, _ = self._draws.draw()
        answer = self._gateway.Recommend(gateway_pb2.RecommendRequest(user_id=user_id, k=10), timeout=self._timeout_s)
        self._listen(answer)
        return recommended(answer)

    def _switch(self) -> Outcome:
        now_s = self._now_s()
        window = max((w for w in self._windows if w.start_s <= now_s + 0.5), key=lambda w: w.start_s)
        if window.treated:
            self.resume()
        else:
            for pid in self._refreshers:
                os.kill(pid, signal.SIGSTOP)
                self._stopped.add(pid)
        return Outcome()

    def resume(self) -> None:
        """Let every stopped refresher continue."""
        for pid in sorted(self._stopped):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
        self._stopped.clear()

    def _write(self, liked: Iterable[events_pb2.Interaction]) -> common_pb2.FreshnessToken:
        """Record interactions; return the last one's token."""
        request = gateway_pb2.RecordInteractionsRequest(interactions=liked)
        token: common_pb2.FreshnessToken = self._gateway.RecordInteractions(request, timeout=5).receipts[-1].token
        return token

    def _write_past(self, user_id: str, item_ids: Sequence[str]) -> None:
        """Write a past: a minute between two events, the newest a minute ago."""
        oldest_ns = time.time_ns() - 60_000_000_000 * len(item_ids)
        self._write(
            _like(user_id, str(item_id), at_ns=oldest_ns + 60_000_000_000 * row) for row, item_id in enumerate(item_ids)
        )

    def _scores(self, item_ids: Sequence[str]) -> dict[str, float]:
        """Return the items' scores for the observer, whose own state does not change."""
        request = gateway_pb2.RecommendRequest(user_id=self._observer, k=len(item_ids))
        request.filter.exclude_seen = False
        request.filter.allow_item_ids.extend(item_ids)
        answer = self._gateway.Recommend(request, timeout=self._timeout_s)
        self._listen(answer)
        return {scored.item_id: scored.score for scored in answer.items if scored.source != "popular"}

    def _evidence(self, item_id: str) -> int:
        """Return the number of interactions in the item's served state."""
        request = gateway_pb2.ExplainRequest(user_id=self._observer, item_id=item_id, max_pairs=1)
        return int(self._gateway.Explain(request, timeout=max(self._timeout_s, 2.0)).similarity.num_interactions)

    def _listen(self, answer: gateway_pb2.RecommendResponse) -> None:
        """Record the system's own lag figure, once per change of the index."""
        freshness = answer.index_freshness
        if freshness.deltas_offset != self._told_offset and freshness.HasField("lag_seconds"):
            self._told_offset = freshness.deltas_offset
            self._told_s.append(freshness.lag_seconds)

    def _now_s(self) -> float:
        return time.perf_counter() - self._started

    # Conclusion

    def conclude(self, results: RunResults) -> Conclusion:
        """Return claims and findings of the parts that ran."""
        p99s_ms = percentile_per_window(results.calls.get("recommend", ()), self._windows, 99)
        found_s = [found_s for trial in self._trials for found_s in trial.found_s.values()]
        unanswered = sum(call.outcome is None for call in results.calls.get("token", ()))
        return contract.conclude(
            contract.lag(
                self._board.lags_s,
                unseen=len(self._board.under_way),
                told_s=self._told_s,
                poll_ms=self._options.poll_ms,
            ),
            contract.new_items(found_s, waited_s=self._options.wait_seconds, top=_TOP),
            contract.tokens(self._tokens, unanswered=unanswered),
            contract.cost(p99s_ms, self._windows),
        )


_like = partial(interaction, kind="rating", value=5.0)


def _refreshers_of(state: Path) -> list[int]:
    """Return process ids of the local stack's refreshers. Raises: ValueError if it has none."""
    pids = [pid for name, pid in processes(state).items() if name.startswith("refresher")]
    if not pids:
        raise ValueError(
            f"--state={state} names no refresher to compare without; name another, or --refresher-pid, or --windows 0"
        )
    return pids
