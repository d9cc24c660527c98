"""How soon lost users are right again: Redis emptied, and users evicted under load, beside a replay of the log.

The question: does a store that lost everything come back from `histories` sooner than from the log, and is each answer
meanwhile right or marked? The encoder's whole loop runs here; contents are compared with those of the replay.

`python tests/integration/lost_histories.py --users 200000` starts a Kafka and a Redis of its own and prints one JSON
object; `--bundle` takes the place of a stand-in for the model. The exit status is 1 if anything was wrong and not
marked.
"""

import argparse
import asyncio
import json
import os
import random
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

# This checkout, whatever is installed.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import redis
import structlog
from fakes.encoder import HashEncoder
from killed_encoder import VOCABULARY
from prometheus_client import CollectorRegistry

from services.algorithms.bundles.model_bundle import load_bundle
from services.contracts import stored_history
from services.contracts.topics import ensure_topics
from services.contracts.topics.interactions import INTERACTIONS, Interaction, encode_interaction
from services.encoder.bootstrap import in_process_encoder, kafka_stream, make_stream, vocabulary_of
from services.encoder.config import EncoderSettings
from services.encoder.encoding import Vocabulary
from services.encoder.metrics import EncoderMetrics
from services.encoder.models import Model
from services.encoder.ports import SequenceEncoder
from services.platform.errors import FreshetError
from services.platform.stream.kafka import BulkProducer, Record
from services.stack import Ports, Stack
from services.user_state import layout
from services.user_state.reader import StateReader
from services.user_state.values import now_ms
from services.user_state.writer import StateWriter

_PAGE = 1_000
_APART_MS = 60_000
_TICK_MS = 50

# Events, ids, positions and seen items of a user.
Content = tuple[bytes, bytes, Mapping[int, int], Mapping[str, int]]


@dataclass(frozen=True, kw_only=True, slots=True)
class RecoveryTimes:
    """Seconds until what the name says. *_wrong: users (answers) that are not as the replay has them and are not
    marked. load_average: of the machine, at the end."""

    users: int
    events: int
    replay_s: float
    kept_s: float
    emptied_marked_s: float
    emptied_histories_s: float
    emptied_states_s: float
    emptied_wrong: int
    evicted: int
    load_per_s: float
    evicted_histories_s: float
    evicted_states_s: float
    evicted_wrong: int
    answers: int
    answers_marked: int
    answers_wrong: int
    load_average: float


class _Loop:
    """The encoder process's loop, turned by hand; no round of writing begins by itself."""

    def __init__(self, settings: EncoderSettings, encoder: SequenceEncoder, vocabulary: Vocabulary) -> None:
        self.store, self._registry = StateWriter(settings.redis_url, timeout_s=10.0), CollectorRegistry()
        metrics = EncoderMetrics(self._registry)
        stream = make_stream(settings, self.store, Model(vocabulary, encoder), metrics)
        self.consumer, self.handler = stream.consumer, stream.records

    def until(self, done: Callable[[], bool], began: float | None = None) -> float:
        """Turn until it is so; the seconds."""
        began = time.monotonic() if began is None else began
        while not done():
            try:
                self.consumer.step()
            except FreshetError as exc:
                self.consumer.fail(exc)
        return time.monotonic() - began

    def restored(self) -> float:
        """Users that came back so far."""
        return self._registry.get_sample_value("freshet_encoder_restored_users_total") or 0.0

    def contents(self, user_ids: Sequence[str]) -> dict[str, Content]:
        """What is stored of each user but states."""
        found: dict[str, Content] = {}
        for start in range(0, len(user_ids), _PAGE):
            dump = self.store.dump(user_ids[start : start + _PAGE], (), self.handler.progress.epoch)
            for user, one in dump.histories.items():
                seen = stored_history.seen_of(one.seen_item_ids, one.seen_times_ms)
                found[user] = (one.events, one.recent, one.positions, seen)
        return found


class _Load(threading.Thread):
    """Writes events at a rate and reads users, until stopped. seen: what each of the readers' users must have seen."""

    def __init__(
        self, settings: EncoderSettings, events: Callable[[], Interaction], rate: float, seen: Mapping[str, set[str]]
    ) -> None:
        super().__init__(daemon=True)
        self._settings, self._events, self._rate, self._seen = settings, events, rate, seen
        self._over = threading.Event()
        self.sent = self.answers = self.marked = self.wrong = 0
        self.seconds = 0.0

    def run(self) -> None:
        asyncio.run(self._run())

    def stop(self) -> None:
        self._over.set()
        self.join()

    async def _run(self) -> None:
        producer = BulkProducer(self._settings.kafka_bootstrap)
        reader = StateReader(self._settings.redis_url, timeout_s=10.0)
        users, began = list(self._seen), time.monotonic()
        while not self._over.is_set():
            self.seconds = time.monotonic() - began
            due = int(self.seconds * self._rate) - self.sent
            await asyncio.to_thread(producer.send_many, [record(self._events()) for _ in range(due)])
            self.sent += due
            for user in random.sample(users, min(10, len(users))):
                view = await reader.read_user(user, "")
                self.answers += 1
                self.marked += view.is_lost
                self.wrong += not view.is_lost and not self._seen[user] <= set(view.seen)
            await asyncio.sleep(_TICK_MS / 1000)
        producer.close()
        await reader.close()


def record(event: Interaction) -> Record:
    """The event as it goes onto its topic."""
    return Record(INTERACTIONS, event.user_id.encode(), encode_interaction(event))


def measure(
    settings: EncoderSettings,
    encoder: SequenceEncoder,
    vocabulary: Vocabulary,
    *,
    users: int,
    events_per_user: int = 20,
    evicted: int = 1_000,
    load_per_s: float = 100.0,
    seed: int = 0,
    say: Callable[[str], object] = lambda what: None,
) -> RecoveryTimes:
    """Fill an empty Kafka, then lose everything, then some. Redis and Kafka must hold nothing else."""
    rng, items, names = random.Random(seed), sorted(vocabulary.item_index), [f"user-{n}" for n in range(users)]
    begin_ms, number = now_ms() - events_per_user * 2 * _APART_MS, 0

    def event(user: str, at_ms: int) -> Interaction:
        nonlocal number
        number += 1
        return Interaction(
            user_id=user, item_id=rng.choice(items), event_id=f"e{number}", type="click", value=1.0, event_time_ms=at_ms
        )

    ensure_topics(settings.kafka_bootstrap)
    producer = BulkProducer(settings.kafka_bootstrap)
    for turn in range(events_per_user):
        say(f"writing events: {turn * users:,}")
        rng.shuffle(names)
        for start in range(0, users, 5_000):
            batch = names[start : start + 5_000]
            producer.send_many([record(event(user, begin_ms + turn * _APART_MS)) for user in batch], 60.0)
    producer.close()
    stream = kafka_stream(settings)
    # A replay sends no attributions: they went out when the records came.
    ends = dict(stream.end_offsets())
    while dict(stream.committed()) != ends:
        stream.commit(ends)
        stream.poll(_TICK_MS)
    stream.close()
    loop = _Loop(settings.model_copy(update={"history_every_s": 3600.0}), encoder, vocabulary)
    say("a replay of the log")
    applied = {partition: end - 1 for partition, end in ends.items()}
    replay_s = loop.until(lambda: loop.handler.progress.watermarks == applied)
    wanted = loop.contents(names)
    say("writing histories")
    began = time.monotonic()
    loop.handler.finish()
    kept_s = time.monotonic() - began

    say("Redis is emptied")
    epoch, began = loop.handler.progress.epoch, time.monotonic()
    with redis.Redis.from_url(settings.redis_url) as client:
        client.flushall()
    marked_s = loop.until(lambda: loop.handler.progress.epoch != epoch, began)
    histories_s = loop.until(lambda: loop.restored() >= users, began)
    states_s = loop.until(lambda: not loop.handler.lost.is_busy, began)
    found = loop.contents(names)
    emptied_wrong = sum(found.get(user) != wanted[user] for user in names)
    emptied_wrong += _without_state(settings, loop, names, vocabulary)

    gone = rng.sample(names, min(evicted, users))
    load = _Load(
        settings, lambda: event(rng.choice(names), now_ms()), load_per_s, {user: set(wanted[user][3]) for user in gone}
    )
    load.start()
    loop.until(lambda: load.seconds > 2 or not load.is_alive())
    say(f"{len(gone)} users are evicted under load")
    began, before = time.monotonic(), loop.restored()
    with redis.Redis.from_url(settings.redis_url) as client:
        pipeline = client.pipeline(transaction=False)
        for user in gone:
            home = layout.home_of(user, loop.handler.progress.epoch)
            # Redis counts what expires and what it evicts; a policy that evicts would choose by itself.
            for key in (
                layout.history_key(home),
                layout.seen_key(home),
                layout.state_key(home, vocabulary.model_version),
            ):
                pipeline.pexpire(key, 1)
        pipeline.execute()
    evicted_histories_s = loop.until(lambda: loop.restored() - before >= len(gone), began)
    evicted_states_s = loop.until(lambda: not loop.handler.lost.is_busy, began)
    loop.until(lambda: load.seconds > evicted_states_s + 4 or not load.is_alive())
    load.stop()
    found = loop.contents(gone)
    evicted_wrong = sum(not _continues(found.get(user), wanted[user]) for user in gone)
    evicted_wrong += _without_state(settings, loop, gone, vocabulary)
    loop.consumer.finish()
    return RecoveryTimes(
        users=users,
        events=users * events_per_user,
        replay_s=replay_s,
        kept_s=kept_s,
        emptied_marked_s=marked_s,
        emptied_histories_s=histories_s,
        emptied_states_s=states_s,
        emptied_wrong=emptied_wrong,
        evicted=len(gone),
        load_per_s=load.sent / load.seconds,
        evicted_histories_s=evicted_histories_s,
        evicted_states_s=evicted_states_s,
        evicted_wrong=evicted_wrong,
        answers=load.answers,
        answers_marked=load.marked,
        answers_wrong=load.wrong,
        load_average=os.getloadavg()[0],
    )


def _continues(found: Content | None, before: Content) -> bool:
    """Whether a history has all that it had, in order, and perhaps more."""
    if found is None:
        return False
    had, has = (stored_history.unpack_events(b"\x02" + one[0]) for one in (before, found))
    return has[: len(had)] == had and before[3].keys() <= found[3].keys()


def _without_state(settings: EncoderSettings, loop: _Loop, user_ids: Collection[str], vocabulary: Vocabulary) -> int:
    """How many users have no state that reaches their history."""
    homes = [layout.home_of(user, loop.handler.progress.epoch) for user in user_ids]
    with redis.Redis.from_url(settings.redis_url) as client:
        pipeline = client.pipeline(transaction=False)
        for home in homes:
            pipeline.hget(layout.history_key(home), "position")
            pipeline.hget(layout.state_key(home, vocabulary.model_version), layout.STATE_POSITION)
        found = pipeline.execute()
    return sum(one is None or one != other for one, other in zip(found[::2], found[1::2], strict=True))


def main() -> int:
    """Measure on a stack of its own."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--users", type=int, default=200_000)
    parser.add_argument("--events", type=int, default=20, help="of each user")
    parser.add_argument("--evicted", type=int, default=1_000)
    parser.add_argument("--rate", type=float, default=100.0, help="events a second while users are evicted")
    parser.add_argument("--bundle", type=Path)
    options = parser.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(40))
    with tempfile.TemporaryDirectory() as folder:
        stack = Stack(Path(folder), ports=Ports.free())
        try:
            stack.up(["kafka", "redis"])
            settings = EncoderSettings(kafka_bootstrap=stack.kafka_bootstrap, redis_url=stack.redis_url)
            encoder: SequenceEncoder = HashEncoder()
            words = replace(VOCABULARY, max_history=100)
            if options.bundle is not None:
                model = load_bundle(options.bundle)
                encoder, words = in_process_encoder(settings, model), vocabulary_of(model)
            times = measure(
                settings,
                encoder,
                words,
                users=options.users,
                events_per_user=options.events,
                evicted=options.evicted,
                load_per_s=options.rate,
                say=lambda what: sys.stderr.write(f"{what}\n"),
            )
        finally:
            stack.down()
    sys.stdout.write(json.dumps(asdict(times)) + "\n")
    return int(times.emptied_wrong + times.evicted_wrong + times.answers_wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
