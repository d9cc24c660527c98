"""Follows `version-sets` for a process that holds several: hands over the sets whenever an operator changed them."""

from collections.abc import Callable, Mapping, Sequence

import structlog

from services.contracts.topic_reader import TopicReader
from services.contracts.topics.version_sets import VERSION_SETS, Counted, Operation
from services.contracts.version_sets import VersionSets
from services.platform.stream.kafka import Brokers
from services.platform.stream.ports import Reader
from services.platform.stream.record import SourceRecord
from services.platform.stream.topic import Replicas
from services.platform.stream.topic_follower import TopicFollower

log = structlog.get_logger()

_POLL_MS = 1_000


def version_set_reader(bootstrap: Brokers, client_id: str, *, makes_topics: Replicas | None = None) -> TopicReader:
    """Reads `version-sets`, from its start."""
    return TopicReader(
        bootstrap,
        VERSION_SETS,
        group_id=client_id,
        client_id=client_id,
        partitions=[0],
        makes_topics=makes_topics,
        rest_ms=_POLL_MS,
    )


class VersionSetFollower(TopicFollower):
    """Calls `changed` with the newest sets, in this thread: once when the topic's end was first reached, if there was
    an operation, and after each one that counts. While Kafka is unavailable, what was last known holds."""

    def __init__(
        self,
        topic: Reader,
        changed: Callable[[VersionSets], None],
        *,
        on_ready: Callable[[], None] = lambda: None,
        backoff_s: float = 0.5,
    ) -> None:
        super().__init__(
            "version-set-follower",
            topic,
            (VERSION_SETS,),
            poll_s=_POLL_MS / 1000,
            on_ready=on_ready,
            backoff_s=backoff_s,
        )
        self._changed = changed
        self._counted = Counted()
        self._handed_over: Operation | None = None

    def take(self, records: Sequence[SourceRecord], ends: Mapping[str, int]) -> None:
        """Count the operations, and hand the newest sets over where all was read. Raises: what `changed` raises; they
        are handed over again then."""
        void = self._counted.void
        self._counted.take(records)
        if self._counted.void > void:
            log.warning("version_sets_void", records=self._counted.void - void)
        if records:
            self._next[VERSION_SETS] = records[-1].offset + 1
        if not self.is_behind:
            self.caught_up()

    def drop(self, topic: str) -> None:
        """Count from the first operation on; until there is one, what was handed over holds."""
        self._counted = Counted()

    def caught_up(self) -> None:
        """Hand over what is new."""
        made = self._counted.last
        if made is not None and made is not self._handed_over:
            log.info("version_sets", revision=made.after.revision, operation=made.operation, serving=made.after.serving)
            self._changed(made.after)
            self._handed_over = made
