"""A trial: a seed draws steps, each is taken in a `World` and judged by the `Oracle`; what fails is made smaller.

A step is a list: its kind, then plain values, so that a trial is kept as JSON. Everything random is in the steps; a
step that finds nothing to do (an undo of what was dropped from the trial) does nothing.
"""

import asyncio
import contextlib
import json
import random
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from oracle import Oracle, changed_items, forgets_of, hidden_items, seen_by_all
from world import (
    BUNDLE,
    ITEM_IDS,
    KEY,
    MODELS,
    POISON,
    SETTLERS,
    START_S,
    USERS,
    Candidates,
    Clock,
    Gateway,
    Killed,
    World,
    quiet,
)

from services.algorithms.rules.filters import ItemFilter
from services.contracts.pseudonyms import pseudonym_of
from services.contracts.topics.attributions import ATTRIBUTIONS
from services.contracts.topics.forgets import FORGETS
from services.contracts.topics.interactions import INTERACTIONS, Interaction
from services.contracts.topics.items import CatalogueItem
from services.contracts.topics.search_clicks import SEARCH_CLICKS
from services.gateway.domain import (
    Degradation,
    FreshnessToken,
    Recommendation,
    RecommendQuery,
    SearchAnswer,
    SearchQuery,
)
from services.platform.errors import FreshetError
from services.refresher.checkpoint import CheckpointError, from_file
from services.user_state.layout import unpack_forgets

Step = list[Any]
KEPT = Path(__file__).parent / "kept"
# How an answer says that it may be made of less than everything.
HONEST = {
    Degradation.STALE_STATE,
    Degradation.STATE_STORE_DOWN,
    Degradation.NOT_FRESH,
    Degradation.TOKEN_NOT_HONOURED,
    Degradation.HISTORY_INCOMPLETE,
}
# Faults by kind: what a trial may draw of it. A kind's steps are drawn one or two times.
FAULTS: dict[str, Callable[[random.Random], list[Step]]] = {
    "kill": lambda r: [["kill", r.choice(["encoder", "refresher-0", "candidates", "gateway"])]],
    "pause": lambda r: [
        ["turn", "encoder", r.randrange(30), [["turn", "encoder-2"]] * r.randint(1, 3)],
        ["kill", "encoder-2"],
    ],
    "eviction": lambda r: [["evict", r.randrange(1 << 30), r.choice([0.2, 0.5, 1.0])]],
    "redis away": lambda r: [["redis", "down"], ["wait", r.choice([0.1, 1.0])], ["redis", "up"]],
    "redis full": lambda r: [["redis", "full"], *[["turn", "encoder"]] * r.randint(1, 3), ["redis", "up"]],
    "lagging replica": lambda r: [["promote", r.choice([[], [0], [1]])]],
    "older store": lambda r: [["older store", r.randrange(8)]],
    "emptied store": lambda r: [["wipe"]],
    "lost tail": lambda r: [["lost tail", r.randrange(2), r.randint(1, 4)]],
    "topic made anew": lambda r: [["anew"]],
    "kafka away": lambda r: [
        *(["kafka", "down"], ["kill", "candidates"], ["wait", 0.5], ["kill", "gateway"], ["wait", 2.5]),
        ["kafka", "up"],
    ],
    "poison": lambda r: [["poison", r.choice(USERS), r.randrange(1000)] for _ in range(r.randint(1, 5))],
    "unreadable": lambda r: [["unreadable", r.choice(USERS)] for _ in range(r.randint(1, 5))],
    "memory": lambda r: [["memory", "short"], *[["turn", "encoder"]] * r.randint(1, 8), ["memory", "enough"]],
    "disk full": lambda r: [
        *(["disk", "full"], *[["turn", "refresher-0"]] * r.randint(1, 3), ["kill", "refresher-0"]),
        ["disk", "free"],
    ],
    "torn checkpoint": lambda r: [["kill", "refresher-0"], ["torn checkpoint", r.randrange(2)]],
    "second refresher": lambda r: [
        *(["turn", "refresher-1"], ["wait", 0.5]),
        ["kill", r.choice(["refresher-0", "refresher-1"])],
    ],
    "clock": lambda r: [["clock", r.choice([-7200, -1, 3600])]],
    "deploy": lambda r: [["deploy", 1], *[["turn", "encoder"]] * r.randint(0, 2), ["deploy", 0]],
    "rolling deploy": lambda r: [["rolling"], *[["recommend", r.choice(USERS), "", []]] * 4, ["deploy", 0]],
    "retention": lambda r: [["kill", "refresher-0"], ["retention"]],
    "partitions added": lambda r: [["add partition", INTERACTIONS]],
}  # fmt: skip
# After these the contents of other topics speak of records that are gone.
LOSES_LOG = {"lost tail", "anew"}


class Violation(Exception):
    """Something was not as it must be."""


@dataclass
class Trial:
    """Steps and how the world is set. `run` returns what went wrong, "" where nothing did."""

    seed: int
    steps: list[Step]
    max_history: int = 64
    is_quick: bool = True
    faults: list[str] = field(default_factory=list)

    def run(self) -> str:
        """Take every step, let things settle, compare. Costs some ten milliseconds."""
        clock = Clock()
        with quiet(), clock.rules():
            world = World(clock, self.seed, max_history=self.max_history, is_quick=self.is_quick)
            play = Play(world)
            try:
                for step in self.steps:
                    play.do(step)
                play.settle()
            except Violation as exc:
                return str(exc)
            finally:
                for task in asyncio.all_tasks(world.loop):
                    task.cancel()
                world.loop.run_until_complete(asyncio.sleep(0))
                world.loop.close()
        return ""

    def shrunk(self, most: int = 400) -> "Trial":
        """The same kind of failure with fewer steps: drop runs of steps while it is still seen."""
        best, size, tries, kind = self, max(1, len(self.steps) // 2), 0, self.run()[:10]
        while size and tries < most:
            at = 0
            while at < len(best.steps) and tries < most:
                tries += 1
                smaller = Trial(
                    self.seed, best.steps[:at] + best.steps[at + size :], self.max_history, self.is_quick, self.faults
                )
                if smaller.run()[:10] == kind:
                    best = smaller
                else:
                    at += size
            size //= 2
        return best

    def keep(self, name: str, violation: str) -> Path:
        """As a file that is run again from now on."""
        path = KEPT / f"{name}.json"
        path.write_text(json.dumps({"violation": violation, **vars(self)}, indent=1) + "\n")
        return path

    @classmethod
    def read(cls, path: Path) -> "Trial":
        kept = json.loads(path.read_text())
        return cls(**{name: kept[name] for name in cls.__dataclass_fields__})


# Of events: what somebody took, turned down, was shown, and what no schema names; and their shares, summed up.
KINDS = ("search_click", "dislike", "impression", "glimpse", "click")
KINDS_UP_TO = (0.1, 0.2, 0.28, 0.34)


def draw(seed: int, kinds: Sequence[str] = tuple(FAULTS)) -> Trial:
    """Operations of four users, with up to three kinds of faults at random moments among them."""
    r = random.Random(seed)
    # A small window forgets old ids and places: its trials undo and forget nothing, so that one rule tells the rest.
    is_small = r.random() < 0.15
    chosen = r.sample(list(kinds), min(len(kinds), r.choice([1, 2, 2, 3, 4])))
    steps: list[Step] = []
    made: list[str] = []
    of_user: dict[str, list[str]] = {user: [""] for user in USERS}
    for number in range(r.randint(25, 60)):
        user, dice = r.choice(USERS), r.random()
        if dice < 0.40 or not made:
            made.append(f"e{number}")
            of_user[user].append(made[-1])
            kind = KINDS[bisect_right(KINDS_UP_TO, r.random())]
            steps.append(["event", user, r.choice(ITEM_IDS), made[-1], r.randint(-40, 0) + number, kind])
        elif dice < 0.46:
            steps.append(["again", r.choice(made)])
        elif dice < 0.50:
            steps.append(["item", r.choice(ITEM_IDS), r.choice(["put", "withdrawn", "unavailable"])])
        elif dice < 0.53:
            steps.append(["snapshot"])
        elif dice < 0.66:
            denied = r.sample(ITEM_IDS, r.choice([0, 0, 3]))
            steps.append(
                ["recommend", user, r.choice([of_user[user][-1], r.choice(of_user[user]), r.choice(made)]), denied]
            )
        elif dice < 0.69:
            steps.append(["search", user, r.sample(ITEM_IDS, 2)])
        elif dice < 0.73 and not is_small:
            steps.append(["undo", r.choice(made)])
        elif dice < 0.75 and not is_small:
            steps.append(["forget", user])
        else:
            steps.append(["turn", r.choice(["encoder", "encoder", "refresher-0", "catalogue"])])
    if "retention" in chosen:
        # What retention took cannot be taken back, or folded once its item is listed.
        steps = [
            [*step[:2], "item-1", *step[3:]] if step[0] == "event" and step[2] not in BUNDLE else step for step in steps
        ]
        steps = [step for step in steps if step[0] not in ("undo", "forget")]
    for kind in chosen:
        for _ in range(r.choice([1, 1, 2])):
            drawn, at = FAULTS[kind](r), r.randint(0, len(steps))
            if r.random() < 0.5 and len(drawn) == 1:
                name = r.choice(["encoder", "encoder", "refresher-0"])
                drawn = [["turn", name, r.randrange(70), [["kill it"] if drawn[0] == ["kill", name] else drawn[0]]]]
            steps[at:at] = drawn
    return Trial(seed, steps, 8 if is_small else 64, r.random() < 0.6, sorted(chosen))


class Play:
    """Takes steps. Each method named `do_<kind>` is one."""

    def __init__(self, world: World) -> None:
        self.world, self.oracle = world, Oracle(world)
        self.events: dict[str, Interaction] = {}
        self.tokens: dict[str, FreshnessToken] = {}
        self.snapshots = [world.redis.snapshot()]
        self.log_was_lost = self.is_anew = False
        self.grown_from: dict[str, Any] | None = None

    def do(self, step: Step) -> None:
        self.world.clock.advance(0.05)
        getattr(self, "do_" + step[0].replace(" ", "_"))(*step[1:])

    # What clients do.

    def do_event(self, user: str, item: str, event_id: str, second: int, kind: str, value: float = 1.0) -> None:
        # No moment of a good event is a poisonous one.
        seconds = int(START_S) + 10 * second + (1 if (int(START_S) + 10 * second) % 100 == 66 else 0)
        self.events[event_id] = Interaction(
            user_id=user, item_id=item, event_id=event_id, event_time_ms=1000 * seconds, type=kind, value=value,
            exposure_id=f"shown-{event_id}" if second % 3 else "",
            query="some words" if kind == "search_click" else "",
        )  # fmt: skip
        self.do_again(event_id)

    def do_again(self, event_id: str) -> None:
        if event_id in self.events:
            said = self.world.call(self._gateway.handlers.record([self.events[event_id]]))
            if isinstance(said, list):
                self.tokens.setdefault(event_id, said[0].token)

    def do_undo(self, event_id: str) -> None:
        if event_id in self.events:
            self.world.call(self._gateway.handlers.record.undo(self.events[event_id].user_id, event_id))

    def do_item(self, item: str, how: str) -> None:
        changed = CatalogueItem(item_id=item, withdrawn=how == "withdrawn", available=how != "unavailable")
        self.world.call(self._gateway.handlers.put_items([changed]))

    def do_unreadable(self, user: str) -> None:
        self._write(user, b"\x0a\xff")

    def do_poison(self, user: str, number: int) -> None:
        name, seconds = f"p{number}", int(START_S) // 100 * 100 + 66
        self.events[name] = Interaction(
            user_id=user, item_id="item-0", event_id=name, event_time_ms=1000 * seconds, type="click", value=POISON
        )
        self.do_again(name)

    def do_forget(self, user: str) -> None:
        report = self.world.call(self._gateway.handlers.forget_user(user, preview=False), within_s=1.0)
        if isinstance(report, FreshetError):
            return
        # What items learnt from records that a log lost stays in `attributions`.
        if report.is_applied and not self.log_was_lost:
            forgets = forgets_of(self.world, user)
            after = {one.place for one in self.oracle.of(user) if one.place[1] > forgets[-1][1].get(one.place[0], -1)}
            left = report.left.get("summed_interactions", 0)
            self._check(
                left <= len(after), f"a forget of {user} is said to be applied; sums of {left} interactions stay"
            )
        for topic in self._places_of(user):
            self._check(
                any(f"`{topic}`" in one for one in report.remains), f"the report of a forget leaves {topic} out"
            )

    def do_recommend(self, user: str, event_id: str, denied: Sequence[str]) -> None:
        for gateway in list(self.world.gateways.values()):
            self._ask(gateway, user, self.tokens.get(event_id), denied)

    def do_search(self, user: str, denied: Sequence[str]) -> None:
        gateway, floor = self._gateway, self._floor(user)
        wanted = ItemFilter(exclude_seen=True, deny_item_ids=tuple(denied))
        answer = self.world.call(gateway.handlers.search(SearchQuery(query="words", user_id=user, filter=wanted)))
        if not isinstance(answer, SearchAnswer):
            return
        shown = {one.item_id for one in answer.results}
        self._check(not shown & {*denied}, "a search shows a denied item")
        if not HONEST & {*answer.degradations} and self.grown_from is None:
            seen = seen_by_all(self.oracle.explanations(user, gateway.model_version, *floor))
            self._check(not shown & seen, f"a search of {user} shows seen items {sorted(shown & seen)} without a mark")

    # What processes do, and what happens to them.

    def do_turn(self, name: str, after: int = 0, meanwhile: Sequence[Step] = ()) -> None:
        def snap() -> None:
            for step in meanwhile:
                if step == ["kill it"]:
                    raise Killed
                self.do(step)

        if meanwhile:
            self.world.trap = (after, snap)
        self.world.turn(name)
        if self.world.trap is not None:
            self.world.trap = None
            if ["kill it"] not in meanwhile:
                snap()

    def do_wait(self, seconds: float) -> None:
        until = self.world.clock.now_s + seconds
        while self.world.clock.now_s < until:
            self.world.clock.advance(0.1)
            self.world._background()

    def do_kill(self, name: str) -> None:
        self.world.kill(name)

    def do_evict(self, seed: int, share: float) -> None:
        r = random.Random(seed)
        keys = sorted(
            key for key in self.world.redis.data if b":history:" in key or b":seen:" in key or b":state:" in key
        )
        self.world.redis.evict([key for key in keys if r.random() < share])

    def do_redis(self, how: str) -> None:
        self.world.redis.is_down, self.world.redis.is_full = how == "down", how == "full"

    def do_snapshot(self) -> None:
        self.snapshots.append(self.world.redis.snapshot())

    def do_promote(self, nodes: Sequence[int]) -> None:
        """A replica takes over that has what was last copied: the whole store, or the nodes of some partitions."""
        if nodes and self.snapshots[-1].get(b"stream:epoch") != self.world.redis.data.get(b"stream:epoch"):
            return
        self.world.redis.restore(self.snapshots[-1], tuple(b"{p%d}" % node for node in nodes) or (b"",))

    def do_older_store(self, number: int) -> None:
        """One of the copies that were made (the first one is empty) is put in the place of the store."""
        self.world.redis.restore(self.snapshots[number % len(self.snapshots)])

    def do_wipe(self) -> None:
        self.world.redis.restore({})

    def do_lost_tail(self, partition: int, count: int) -> None:
        self.oracle.lost_log()
        self.log_was_lost = True
        # An election takes longer than the pause between two looks at the log.
        self.world.clock.advance(6.0)
        log = self.world.topics.logs[INTERACTIONS][partition]
        # A log whose records are all gone is another topic.
        del log[max(1, len(log) - count) :]

    def do_anew(self) -> None:
        self.oracle.lost_log()
        self.log_was_lost = self.is_anew = True
        self.forgets_before = len(self.world.topics.logs[FORGETS][0])
        for log in self.world.topics.logs[INTERACTIONS]:
            log.clear()

    def do_kafka(self, how: str) -> None:
        self.world.is_kafka_down = how == "down"
        self.world.status.log_reachable = how != "down"

    def do_memory(self, how: str) -> None:
        self.world.is_short_of_memory = how == "short"

    def do_disk(self, how: str) -> None:
        self.world.is_disk_full = how == "full"

    def do_torn_checkpoint(self, partition: int) -> None:
        saved = self.world.checkpoints.saved.get(partition)
        if saved:
            saved[0] = saved[0][: len(saved[0]) // 2]

    def do_retention(self) -> None:
        """Attributions that both checkpoints hold are gone from the log."""
        for partition, saved in self.world.checkpoints.saved.items():
            if len(saved) == 2 and self.world.topics.logs[ATTRIBUTIONS][partition]:
                with contextlib.suppress(CheckpointError):
                    below = min(int(from_file(data)[0]["folded_offset"]) for data in saved) + 1
                    self.world.topics.expire(ATTRIBUTIONS, partition, below)

    def do_clock(self, seconds: float) -> None:
        self.world.clock.jump_s = seconds

    def do_deploy(self, number: int) -> None:
        """Every process of the model's version; the others are stopped."""
        model, world = MODELS[number], self.world
        world.encoder_model = model
        world.encoders.clear()
        if world.candidates[0].model_version != model or len(world.candidates) > 1:
            world.candidates = [Candidates(world, model)]
        if [*world.gateways] != [model]:
            world.gateways = {model: Gateway(world, model)}

    def do_rolling(self) -> None:
        """Half of a deploy: gateways and candidates of both versions."""
        world = self.world
        world.candidates = [world.candidates[0], Candidates(world, MODELS[1])]
        world.gateways = {**world.gateways, MODELS[1]: Gateway(world, MODELS[1])}

    def do_add_partition(self, topic: str) -> None:
        if self.grown_from is None:
            self.grown_from = {"users": self._users(), "ends": [len(log) for log in self.world.topics.logs[topic]]}
            self.world.topics.logs[topic].append([])

    # Judging.

    @property
    def _gateway(self) -> Gateway:
        return next(iter(self.world.gateways.values()))

    def _check(self, holds: bool, what: str) -> None:
        if not holds:
            raise Violation(what)

    def _write(self, user: str, value: bytes) -> None:
        try:
            self.world.write(INTERACTIONS, user.encode(), value)
        except FreshetError:
            return

    def _users(self) -> dict[bytes, Any]:
        return {key: value for key, value in self.world.redis.snapshot().items() if b":history:" in key}

    def _applied_to(self, partition: int) -> int:
        data = self.world.redis.data
        progress = data.get(b"{p%d}:progress" % partition, {})
        is_current = progress.get(b"epoch") == data.get(b"stream:epoch", b"none")
        return int(progress.get(b"watermark", -1)) if is_current else -1

    def _floor(self, user: str) -> tuple[int, int]:
        """Up to where the store says that this user is applied: one past the watermark, the last forget."""
        data = self.world.redis.data
        epoch = data.get(b"stream:epoch", b"none")
        home = self.world.partition_of(user)
        floor = self._applied_to(home) + 1
        forgets = data.get(b"{p%d}:forgets" % home, {}).get(b"test", b"")
        return floor, unpack_forgets(epoch.decode(), forgets.decode())[0]

    def _places_of(self, user: str) -> set[str]:
        """Topics that hold something of the user."""
        found = {letter.topic for letter in self.world.dead_letters if letter.key == user.encode()}
        name = pseudonym_of(user, KEY).encode()
        for topic in (SEARCH_CLICKS, ATTRIBUTIONS):
            logs = self.world.topics.logs[topic]
            if any(name in (record.value or b"") for log in logs for record in log):
                found.add(topic)
        return found

    def _ask(
        self,
        gateway: Gateway,
        user: str,
        token: FreshnessToken | None,
        denied: Sequence[str],
        *,
        all_well: bool = False,
    ) -> None:
        floor, forgotten = self._floor(user)
        wanted = ItemFilter(deny_item_ids=tuple(denied))
        gateway.asked.clear()
        answer = self.world.call(
            gateway.handlers.recommend(RecommendQuery(user_id=user, k=20, filter=wanted, token=token))
        )
        if not isinstance(answer, Recommendation):
            self._check(not all_well, f"no answer for {user}: {answer}")
            return
        shown, marks = {one.item_id for one in answer.items}, {*answer.degradations}
        is_popular = Degradation.POPULAR_FALLBACK in marks
        self._check(not shown & {*denied}, "an answer shows a denied item")
        self._check(
            token is None or answer.token_honoured or Degradation.TOKEN_NOT_HONOURED in marks, "a token failed, unsaid"
        )
        source = gateway if is_popular else gateway.searched[0]
        read = max(source.withdrawn_before, source.thread.follower.next_item)
        hidden = hidden_items(self.world, read) - changed_items(self.world, read)
        if not (is_popular and Degradation.PARTIAL_CATALOGUE in marks):
            self._check(not shown & hidden, f"an answer shows withdrawn items {sorted(shown & hidden)}")
        searched = None if is_popular else gateway.searched[1].components
        for other in USERS:
            if other != user and searched is not None:
                theirs = {state for state, _ in self.oracle.explanations(other, gateway.model_version, 0, -1)}
                self._check(searched not in theirs, f"an answer for {user} is made of {other}'s history")
        if self.grown_from is not None or self.log_was_lost:
            # A user's records lie in two partitions now, in no order; or between two looks at another log its records
            # came onto the histories of the first.
            return
        if token is not None and answer.token_honoured and token.partition == self.world.partition_of(user):
            floor = max(floor, token.offset + 1)
        if marks & HONEST:
            self._check(not all_well, f"marks on an answer for {user} while all is well: {[one.name for one in marks]}")
            return
        explained = self.oracle.explanations(user, gateway.model_version, floor, forgotten)
        shown_seen = shown & seen_by_all(explained)
        self._check(not shown_seen, f"an answer for {user} shows seen items {sorted(shown_seen)} without a mark")
        states = {state for state, _ in explained}
        if is_popular:
            has_reason = "refused" in gateway.asked or self.world.clock.now_s - gateway.failed_at_s < 0.6
            self._check(None in states or (has_reason and not all_well), f"popular items for {user}, who has a state")
        else:
            self._check(
                searched in states, f"an answer for {user} is made of a state older than what it promises, unsaid"
            )

    # The end.

    def settle(self) -> None:
        """Everything is well again: wait, then compare all contents with the logs."""
        world = self.world
        world.trap = None
        self.do_redis("up"), self.do_kafka("up"), self.do_memory("enough"), self.do_disk("free"), self.do_clock(0.0)
        if self.grown_from is not None:
            self._refuses_growth()
            return
        self.do_deploy(0)
        world.encoders.pop("encoder-2", None)
        self._quiesce()
        if self.is_anew:
            self._operator_empties()
        if self._is_behind():
            # A version without the bug: what poison stopped goes on.
            world.is_poison_deadly = False
            self.oracle.mended_from = {number: self._applied_to(number) for number in range(2)}
            self._quiesce()
        self._check(not self._is_behind(), f"the stream does not go on: {self._why()}")
        wrong = self.oracle.wrong_contents(log_was_lost=self.log_was_lost)
        self._check(not wrong, "; ".join(wrong))
        for user in USERS:
            events = [
                event for event in self.events.values() if event.user_id == user and event.event_id in self.tokens
            ]
            token = self.tokens[events[-1].event_id] if events and not self.log_was_lost else None
            self._token_holds(token)
            self._ask(self._gateway, user, token if self._token_holds(token) else None, [], all_well=True)

    def _token_holds(self, token: FreshnessToken | None) -> bool:
        return token is not None and token.epoch.encode() == self.world.redis.data.get(b"stream:epoch")

    def _quiesce(self, turns: int = 60) -> None:
        """A little more traffic (poison is told by its neighbours), then turns until nothing moves."""
        for number in range(3):
            for name in SETTLERS:
                self.do_event(name, f"item-{number}", f"s{len(self.events)}", 500 + len(self.events), "click")
        self.world.clock.advance(70.0)
        rest = 0
        for _ in range(turns):
            names = ["encoder", *({*self.world.refreshers} or {"refresher-0"}), "catalogue"]
            moved = sum(self.world.turn(name) for name in names)
            self.world.clock.advance(1.0)
            busy = any(
                s.outgoing.num_changes for r in self.world.refreshers.values() for s in r.held.partitions.values()
            )
            rest = 0 if moved or busy or self._is_behind() else rest + 1
            if rest == 2:
                return

    def _is_behind(self) -> bool:
        encoder = self.world.encoders.get("encoder")
        ends = {number: len(log) - 1 for number, log in enumerate(self.world.topics.logs[INTERACTIONS])}
        if (
            encoder is None
            or encoder.process.consumer._handler.progress.watermarks != ends
            or not encoder.process.consumer._in_step
        ):
            return True
        held = {n: s for one in self.world.refreshers.values() for n, s in one.held.partitions.items()}
        return any(
            n not in held or held[n].folded_offset < len(log) - 1
            for n, log in enumerate(self.world.topics.logs[ATTRIBUTIONS])
        )

    def _why(self) -> str:
        errors = [
            getattr(one.thread, "error", None)
            for one in (*self.world.encoders.values(), *self.world.refreshers.values())
        ]
        return "; ".join(repr(error) for error in errors if error is not None)

    def _operator_empties(self) -> None:
        """The topic was recreated: nothing of it was applied over the old histories; then the message is followed."""
        if self._is_behind():
            self._check(
                "recreated" in self._why() or "trips a bug" in self._why(),
                f"a recreated topic is not refused by name: {self._why()}",
            )
            self.world.redis.restore({})
            # What was forgotten of the earlier topic.
            self.world.topics.expire(FORGETS, 0, self.forgets_before)
            self.world.encoders.clear()
            self.do_kill("gateway")
            self._quiesce()

    def _refuses_growth(self) -> None:
        """Users would move: the process says so, and touches nothing."""
        self.world.encoders.clear()
        before = self._users()
        if not self.world.redis.data.get(b"stream:epoch", b"").endswith(b"-2"):
            return
        self.world.turn("encoder")
        self._check("partitions" in self._why(), f"added partitions are not refused by name: {self._why()}")
        self._check(self._users() == before, "users were written after partitions were added")
