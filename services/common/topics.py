"""The Kafka topics: names, partitions, retention; and making those that are missing.

Everything that reads or writes a topic takes its name from here. `interactions` carries the broker's own append
time, so that a second reading of a record judges it exactly as the first one did.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from kafka.admin import KafkaAdminClient, NewTopic
from kafka.errors import KafkaError, NoError, TopicAlreadyExistsError, for_code

from services.common.errors import DependencyUnavailable

INTERACTIONS = "interactions"
ATTRIBUTIONS = "attributions"
ITEMS = "items"
INDEX_DELTAS = "index-deltas"
FORGETS = "forgets"
SEARCH_CLICKS = "search-clicks"
EXPOSURES = "exposures"
DEAD_LETTER_SUFFIX = ".dead-letter"
INTERACTIONS_DEAD_LETTER = INTERACTIONS + DEAD_LETTER_SUFFIX
ATTRIBUTIONS_DEAD_LETTER = ATTRIBUTIONS + DEAD_LETTER_SUFFIX
ITEMS_DEAD_LETTER = ITEMS + DEAD_LETTER_SUFFIX
FORGETS_DEAD_LETTER = FORGETS + DEAD_LETTER_SUFFIX
SEARCH_CLICKS_DEAD_LETTER = SEARCH_CLICKS + DEAD_LETTER_SUFFIX

DAY_MS = 24 * 3600 * 1000
NUM_PARTITIONS = 8
# A dead letter is a whole record (Kafka's own limit: 1 MiB) with the reason beside it.
MAX_DEAD_LETTER_BYTES = 2 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class Topic:
    """One topic and how it is made when it is missing; an existing topic is left as it is."""

    name: str
    num_partitions: int = NUM_PARTITIONS
    settings: Mapping[str, str] = field(default_factory=dict)


_FOREVER = {"retention.ms": "-1"}
_COMPACTED = {"cleanup.policy": "compact"}

TOPICS: tuple[Topic, ...] = (
    # Producers may compress as they like (lz4, snappy, zstd, gzip): the broker unpacks, so that every reader can read.
    Topic(
        name=INTERACTIONS,
        settings=_FOREVER | {"message.timestamp.type": "LogAppendTime", "compression.type": "uncompressed"},
    ),
    # As long as a rebuild may need them: what is forgotten or undone is found here again, and a new memory is filled.
    Topic(name=ATTRIBUTIONS, settings=_FOREVER),
    Topic(name=ITEMS, num_partitions=1, settings=_COMPACTED),
    Topic(name=INDEX_DELTAS, num_partitions=1, settings=_COMPACTED),
    Topic(name=FORGETS, num_partitions=1, settings=_COMPACTED),
    # As long as somebody may search: a generator reads it from the beginning whenever it starts.
    Topic(name=SEARCH_CLICKS, num_partitions=1, settings=_FOREVER),
    Topic(name=EXPOSURES, settings={"retention.ms": str(90 * DAY_MS)}),
    *(
        Topic(name=name, num_partitions=1, settings=_FOREVER | {"max.message.bytes": str(MAX_DEAD_LETTER_BYTES)})
        for name in (
            INTERACTIONS_DEAD_LETTER,
            ATTRIBUTIONS_DEAD_LETTER,
            ITEMS_DEAD_LETTER,
            FORGETS_DEAD_LETTER,
            SEARCH_CLICKS_DEAD_LETTER,
        )
    ),
)


def ensure_topics(
    bootstrap: str,
    *,
    topics: tuple[Topic, ...] = TOPICS,
    replication_factor: int = 1,
    timeout_ms: int = 10_000,
) -> list[str]:
    """Make the topics that do not exist yet; return their names. Blocking: call it from a thread.

    Raises: DependencyUnavailable when the broker cannot be reached or refuses.
    """
    try:
        admin = KafkaAdminClient(
            bootstrap_servers=bootstrap.split(","),
            client_id="freshet-topics",
            request_timeout_ms=timeout_ms,
            api_version_auto_timeout_ms=min(timeout_ms, 5_000),
        )
    except (KafkaError, OSError) as exc:
        raise DependencyUnavailable(f"Kafka at {bootstrap} cannot be reached: {exc}") from exc
    try:
        existing = set(admin.list_topics())
        missing = [topic for topic in topics if topic.name not in existing]
        if missing:
            _create(admin, missing, replication_factor, timeout_ms)
        return [topic.name for topic in missing]
    except (KafkaError, OSError) as exc:
        raise DependencyUnavailable(f"Kafka at {bootstrap} did not make the topics: {exc}") from exc
    finally:
        admin.close()


def _create(admin: KafkaAdminClient, topics: list[Topic], replication_factor: int, timeout_ms: int) -> None:
    wanted = [
        NewTopic(
            name=topic.name,
            num_partitions=topic.num_partitions,
            replication_factor=replication_factor,
            topic_configs=dict(topic.settings),
        )
        for topic in topics
    ]
    try:
        response = admin.create_topics(wanted, timeout_ms=timeout_ms)
    except TopicAlreadyExistsError:
        return  # another process was quicker; whatever it did not make shows at the next call
    for name, code, *rest in response.topic_errors:
        error = for_code(code)
        if error not in (NoError, TopicAlreadyExistsError):
            raise error(f"topic {name}: {rest}")
