"""The Kafka topics and their creation. `_OWN` lists the topics; each has a module.

The module has the topic's name and limits. It encodes, decodes and validates record values; an invalid record raises
InvalidRequest with the field.
"""

from collections.abc import Collection
from dataclasses import replace

import structlog
from kafka.admin import KafkaAdminClient, NewTopic
from kafka.errors import KafkaError, NoError, TopicAlreadyExistsError, for_code

from services.contracts.topics import (
    attributions,
    dead_letters,
    experiments,
    exposures,
    forgets,
    histories,
    index_deltas,
    interactions,
    items,
    refresher_checkpoints,
    rules,
    search_clicks,
    version_sets,
)
from services.platform.errors import DependencyUnavailable
from services.platform.stream.kafka import Brokers, kafka_options
from services.platform.stream.topic import Replicas, Topic

log = structlog.get_logger()

DEFAULT_REPLICAS = Replicas()
_OWN = tuple(
    module.TOPIC
    for module in (
        interactions,
        attributions,
        items,
        index_deltas,
        forgets,
        histories,
        search_clicks,
        exposures,
        refresher_checkpoints,
        version_sets,
        experiments,
        rules,
    )
)
TOPICS: tuple[Topic, ...] = (
    *_OWN,
    *(dead_letters.dead_letter_topic(topic) for topic in _OWN if topic.has_dead_letters),
)


def ensure_topics(
    bootstrap: Brokers,
    *,
    topics: tuple[Topic, ...] = TOPICS,
    replicas: Replicas = DEFAULT_REPLICAS,
    timeout_ms: int = 10_000,
) -> list[str]:
    """Create missing topics; return their names. Blocks: call it from a thread.

    Raises: DependencyUnavailable if Kafka fails or has fewer brokers than replicas; PreconditionFailed if the in-sync
    minimum exceeds the number of replicas.
    """
    try:
        admin = KafkaAdminClient(
            **kafka_options(bootstrap),
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
            num_brokers = len(admin.describe_cluster()["brokers"])
            # Bootstrap brokers that still start are counted, because the number of replicas is permanent.
            factor, in_sync = replicas.on(max(num_brokers, len(set(str(bootstrap).split(",")))))
            if num_brokers < factor:
                raise DependencyUnavailable(
                    f"Kafka has {num_brokers} of the {factor} brokers that topics are made on: start the others, or "
                    "set FRESHET_KAFKA_REPLICATION"
                )
            missing = [_sized(admin, topic, existing) for topic in missing]
            _create(admin, missing, factor, in_sync, timeout_ms)
            log.info("topics_made", topics=len(missing), brokers=num_brokers, replicas=factor, min_in_sync=in_sync)
        return [topic.name for topic in missing]
    except (KafkaError, OSError) as exc:
        raise DependencyUnavailable(f"Kafka at {bootstrap} did not make the topics: {exc}") from exc
    finally:
        admin.close()


def _sized(admin: KafkaAdminClient, topic: Topic, existing: Collection[str]) -> Topic:
    if topic.as_many_as not in existing:
        return topic
    (found,) = admin.describe_topics([topic.as_many_as])
    return replace(topic, num_partitions=len(found["partitions"]) or topic.num_partitions)


def _create(
    admin: KafkaAdminClient, topics: list[Topic], replication_factor: int, min_in_sync: int, timeout_ms: int
) -> None:
    wanted = [
        NewTopic(
            name=topic.name,
            num_partitions=topic.num_partitions,
            replication_factor=replication_factor,
            topic_configs={"min.insync.replicas": str(min_in_sync), **topic.settings},
        )
        for topic in topics
    ]
    try:
        response = admin.create_topics(wanted, timeout_ms=timeout_ms)
    except TopicAlreadyExistsError:
        return  # another process was first
    for name, code, *rest in response.topic_errors:
        error = for_code(code)
        if error not in (NoError, TopicAlreadyExistsError):
            raise error(f"topic {name}: {rest}")
