"""Change the number of partitions of `interactions`; a user's records stay in one partition, in their order.

The job copies the log to a topic with the new number of partitions and back. It deletes topics that store positions of
the old log (decision 035). Another run continues an interrupted one: a record in the topic WHOLE marks a complete copy.
"""

import json
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

import redis
from kafka import KafkaConsumer
from kafka.admin import ConfigResource, ConfigResourceType, KafkaAdminClient
from kafka.errors import KafkaError

from services.contracts.topics import TOPICS, ensure_topics, exposures, interactions, items
from services.contracts.topics.dead_letters import SUFFIX
from services.contracts.topics.forgets import FORGETS, decode_forget
from services.platform.errors import DependencyUnavailable, FreshetError, InvalidRequest, PreconditionFailed
from services.platform.stream.kafka import Brokers, BulkProducer, Record, build_consumer, kafka_options, partition_for
from services.platform.stream.records import furthest, is_covered
from services.platform.stream.topic import NUM_PARTITIONS, Replicas, Topic

NEXT = f"{interactions.INTERACTIONS}.next"
WHOLE = f"{NEXT}.whole"
# Topics that store positions of `interactions`, or that are computed from such topics.
DERIVED = tuple(
    topic
    for topic in TOPICS
    if topic.name not in (interactions.INTERACTIONS, items.ITEMS, exposures.TOPIC.name)
    and not topic.name.endswith(SUFFIX)
)
MAX_PARTITIONS = 1_024
_TIME_TYPE = "message.timestamp.type"
_GROUP = "freshet-repartition"
_BATCH, _READ_AHEAD = 5_000, 5_000
_SILENCE_S = 20.0

# Called with step, records so far, and total.
Progressed = Callable[[str, int, int], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Repartitioned:
    """records: number in `interactions` now; forgotten: number of forgotten records, which were not copied."""

    num_partitions: int
    records: int
    forgotten: int


@dataclass(kw_only=True)
class _Copied:
    digests: dict[int, Any] = field(default_factory=dict)
    records: int = 0

    def add(self, partition: int, found: Any) -> None:
        digest = self.digests.setdefault(partition, blake2b(digest_size=16))
        parts = [str(found.timestamp).encode(), found.key, found.value]
        for part in (*parts, *(side for name, value in found.headers for side in (name.encode(), value))):
            digest.update(b"-" if part is None else len(part).to_bytes(4, "little") + part)
        self.records += 1

    def texts(self) -> dict[str, str]:
        return {str(partition): digest.hexdigest() for partition, digest in sorted(self.digests.items())}


def repartition(
    bootstrap: Brokers,
    redis_url: str,
    num_partitions: int,
    *,
    replicas: Replicas,
    progress: Progressed = lambda what, done, total: None,
) -> Repartitioned:
    """Give `interactions` `num_partitions` partitions. Kafka and Redis must run; no process of Freshet may run.

    Raises: InvalidRequest for a number out of range; PreconditionFailed if `interactions` has this number already, was
    written since an interrupted attempt, or if an attempt with another number is unfinished; DependencyUnavailable,
    also if a copy differs from the records written to it. The other copy still exists then.
    """
    if not 1 <= num_partitions <= MAX_PARTITIONS:
        raise InvalidRequest.of("partitions", num_partitions, f"1 to {MAX_PARTITIONS}")
    try:
        return _Repartition(bootstrap, redis_url, num_partitions, replicas, progress).run()
    except (KafkaError, redis.RedisError, OSError) as exc:
        raise DependencyUnavailable(f"Kafka at {bootstrap} or Redis: {type(exc).__name__}: {exc}") from exc


class _Repartition:
    def __init__(
        self, bootstrap: Brokers, redis_url: str, num_partitions: int, replicas: Replicas, progress: Progressed
    ) -> None:
        self._bootstrap, self._redis_url, self._wanted, self._replicas = bootstrap, redis_url, num_partitions, replicas
        self._progress = progress
        self._admin = KafkaAdminClient(**kafka_options(bootstrap), client_id=_GROUP)
        self._producer = BulkProducer(bootstrap, client_id=_GROUP, linger_ms=50, delivery_timeout_ms=60_000)
        self._forgotten = 0

    def run(self) -> Repartitioned:
        try:
            whole = self._whole()
            if whole is None:
                whole = self._copy_aside()
            elif whole["num_partitions"] != self._wanted:
                raise PreconditionFailed(
                    f"a change to {whole['num_partitions']} partitions was begun and not finished: finish it first"
                )
            if self._exists(NEXT):
                self._copy_back(whole)
            self._delete(WHOLE)
            self._set_times("LogAppendTime")
            ensure_topics(self._bootstrap, replicas=self._replicas)
            return Repartitioned(num_partitions=self._wanted, records=whole["records"], forgotten=whole["forgotten"])
        finally:
            self._producer.close(timeout_s=1.0)
            self._admin.close()

    # -- the two copies ------------------------------------------------------------------------------------------------

    def _copy_aside(self) -> dict[str, Any]:
        """Copy `interactions` to NEXT without forgotten records, then record in WHOLE that the copy is complete."""
        ends = self._ends(interactions.INTERACTIONS)
        if len(ends) == self._wanted:
            self._set_times("LogAppendTime")
            raise PreconditionFailed(f"{interactions.INTERACTIONS!r} has {self._wanted} partitions already")
        forgotten = self._forgets()
        self._delete(NEXT)
        self._make(NEXT, self._wanted)
        copied, batch = _Copied(), list[Record]()
        for found in self._records(interactions.INTERACTIONS, "copying aside"):
            if found.key is not None and is_covered(forgotten.get(found.key, {}), found.partition, found.offset):
                self._forgotten += 1
                continue
            partition = self._partition(found)
            copied.add(partition, found)
            batch.append(_again(found, NEXT, partition))
            if len(batch) == _BATCH:
                self._write(batch)
        self._write(batch)
        self._compare(NEXT, copied.texts())
        whole = {
            "num_partitions": self._wanted,
            "source_ends": {str(partition): end for partition, end in ends.items()},
            "digests": copied.texts(),
            "records": copied.records,
            "forgotten": self._forgotten,
        }
        self._make(WHOLE, 1)
        self._producer.send_many([Record(WHOLE, b"", json.dumps(whole).encode())])
        return whole

    def _copy_back(self, whole: Mapping[str, Any]) -> None:
        """Copy NEXT to a recreated `interactions`; delete derived data, NEXT last."""
        name = interactions.INTERACTIONS
        if self._exists(name):
            self._check_may_go(whole)
        self._delete(name)
        self._make(name, self._wanted)
        batch = list[Record]()
        for found in self._records(NEXT, "copying back"):
            batch.append(_again(found, name, found.partition))
            if len(batch) == _BATCH:
                self._write(batch)
        self._write(batch)
        self._compare(name, whole["digests"])
        for topic in DERIVED:
            self._delete(topic.name)
            # Topics with the default number of partitions get the new number.
            wide = topic.num_partitions == NUM_PARTITIONS
            self._make(topic.name, self._wanted if wide else topic.num_partitions, topic)
        with redis.Redis.from_url(self._redis_url) as client:
            client.flushdb()
        self._delete(NEXT)

    def _check_may_go(self, whole: Mapping[str, Any]) -> None:
        """Raises: PreconditionFailed unless `interactions` is the copied log, was made by this job, or is empty."""
        ends = {str(partition): end for partition, end in self._ends(interactions.INTERACTIONS).items()}
        if ends != whole["source_ends"] and any(ends.values()) and self._times() != "CreateTime":
            raise PreconditionFailed(
                f"{interactions.INTERACTIONS!r} was written after it was copied to {NEXT!r}: copy the new records "
                f"elsewhere and delete the topic, or delete {NEXT!r} and {WHOLE!r} to begin again"
            )

    def _partition(self, found: Any) -> int:
        return found.partition % self._wanted if found.key is None else partition_for(found.key, self._wanted)

    def _write(self, batch: list[Record]) -> None:
        if batch:
            self._producer.send_many(batch, timeout_s=120.0)
            batch.clear()

    def _compare(self, topic: str, digests: Mapping[str, str]) -> None:
        found = _Copied()
        for record in self._records(topic, "comparing"):
            found.add(record.partition, record)
        if found.texts() != dict(digests):
            raise DependencyUnavailable(f"the copy in {topic!r} is not what was written to it: run it again")

    # -- reading -------------------------------------------------------------------------------------------------------

    def _records(self, topic: str, what: str) -> Iterator[Any]:
        """Yield records by write time; records of one partition keep their order."""
        consumer = self._consumer(topic)
        try:
            ends = consumer.end_offsets(list(consumer.assignment()))
            consumer.seek_to_beginning()
            total = sum(ends.values()) - sum(consumer.beginning_offsets(list(ends)).values())
            waiting = {tp: deque[Any]() for tp in ends}
            done, heard = 0, time.monotonic()
            while waiting:
                for tp, queue in list(waiting.items()):
                    if not queue and consumer.position(tp) >= ends[tp]:
                        del waiting[tp]
                while waiting and all(waiting.values()):
                    tp = min(waiting, key=lambda tp: (waiting[tp][0].timestamp, tp.partition))
                    yield waiting[tp].popleft()
                    done += 1
                    if not waiting[tp] and consumer.position(tp) >= ends[tp]:
                        del waiting[tp]
                self._progress(what, done, total)
                if not waiting:
                    return
                full = [tp for tp, queue in waiting.items() if len(queue) > _READ_AHEAD]
                consumer.pause(*full)
                consumer.resume(*(tp for tp in waiting if tp not in full))
                for tp, found in consumer.poll(timeout_ms=500).items():
                    heard = time.monotonic()
                    if tp in waiting:
                        waiting[tp].extend(record for record in found if record.offset < ends[tp])
                if time.monotonic() - heard > _SILENCE_S:
                    raise DependencyUnavailable(f"{topic!r} fell silent after {done} of {total} records")
        finally:
            consumer.close(autocommit=False)

    def _forgets(self) -> dict[bytes, dict[int, int]]:
        """Return, by user id and partition, the offset up to which records are forgotten."""
        forgotten: dict[bytes, dict[int, int]] = {}
        if not self._exists(FORGETS):
            return forgotten
        for found in self._records(FORGETS, "reading forgets"):
            try:
                forget = decode_forget(found.key, found.value)
            except FreshetError:
                continue  # a tombstone, or a record in the dead letters
            forgotten[found.key] = furthest(forgotten.get(found.key, {}), forget.up_to)
        return forgotten

    def _whole(self) -> dict[str, Any] | None:
        if not self._exists(WHOLE):
            return None
        records = [record.value for record in self._records(WHOLE, "looking")]
        return json.loads(records[-1]) if records else None

    def _ends(self, topic: str) -> dict[int, int]:
        consumer = self._consumer(topic)
        try:
            return {tp.partition: end for tp, end in consumer.end_offsets(list(consumer.assignment())).items()}
        finally:
            consumer.close(autocommit=False)

    def _consumer(self, topic: str) -> KafkaConsumer:
        return build_consumer(self._bootstrap, topic, group_id=_GROUP, client_id=_GROUP, max_poll_records=_BATCH)

    # -- topics --------------------------------------------------------------------------------------------------------

    def _exists(self, name: str) -> bool:
        return name in self._admin.list_topics()

    def _make(self, name: str, num_partitions: int, like: Topic = interactions.TOPIC) -> None:
        """Create a topic like `like`. If `like` sets a timestamp type, copied records keep their times."""
        settings = dict(like.settings)
        if _TIME_TYPE in settings:
            settings[_TIME_TYPE] = "CreateTime"
        topic = Topic(name=name, num_partitions=num_partitions, settings=settings)
        self._until(lambda: name in ensure_topics(self._bootstrap, topics=(topic,), replicas=self._replicas), name)
        self._until(lambda: self._is_whole_topic(name, num_partitions), name)

    def _is_whole_topic(self, name: str, num_partitions: int) -> bool:
        try:
            return len(self._ends(name)) == num_partitions
        except DependencyUnavailable:
            return False

    def _delete(self, name: str) -> None:
        if self._exists(name):
            self._admin.delete_topics([name])
            self._until(lambda: not self._exists(name), name)

    def _until(self, condition: Callable[[], bool], name: str) -> None:
        """Wait for the condition: brokers make and delete topics in the background."""
        deadline = time.monotonic() + _SILENCE_S
        while not condition():
            if time.monotonic() > deadline:
                raise DependencyUnavailable(f"Kafka did not delete or make {name!r} within {_SILENCE_S:.0f} s")
            time.sleep(0.1)

    def _times(self) -> str:
        resource = ConfigResource(ConfigResourceType.TOPIC, interactions.INTERACTIONS)
        (answer,) = self._admin.describe_configs([resource])
        (_, _, _, _, entries), *_ = answer.resources
        return next(str(entry[1]) for entry in entries if entry[0] == _TIME_TYPE)

    def _set_times(self, kind: str) -> None:
        """Set the timestamp type of new records. All settings are sent, because Kafka replaces them together."""
        _, in_sync = self._replicas.on(len(self._admin.describe_cluster()["brokers"]))
        settings = {"min.insync.replicas": str(in_sync), **interactions.TOPIC.settings, _TIME_TYPE: kind}
        self._admin.alter_configs(
            [ConfigResource(ConfigResourceType.TOPIC, interactions.INTERACTIONS, configs=settings)]
        )


def _again(found: Any, topic: str, partition: int) -> Record:
    headers: Sequence[tuple[str, bytes]] = found.headers
    return Record(topic, found.key, found.value, headers, partition, found.timestamp)
