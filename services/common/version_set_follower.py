"""Follows `version-sets` for a process that holds several: hands over the sets whenever an operator changed them."""

from collections.abc import Callable

import structlog

from services.common.kafka import Brokers
from services.common.stream.follower import Follower
from services.common.stream.ports import Reader
from services.common.stream.reader import TopicReader
from services.common.stream.topic import Replicas
from services.common.stream.topics.version_sets import VERSION_SETS, Counted
from services.common.version_sets import VersionSets

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


class VersionSetFollower(Follower):
    """Calls `changed` with the newest sets, in this thread: once when the topic's end was first reached, if there was
    an operation, and after each one that counts. While Kafka is away, what was last known holds."""

    def __init__(
        self,
        topic: Reader,
        changed: Callable[[VersionSets], None],
        *,
        on_ready: Callable[[], None] = lambda: None,
        backoff_s: float = 0.5,
    ) -> None:
        super().__init__("version-set-follower", on_ready=on_ready, backoff_s=backoff_s)
        self._topic, self._changed = topic, changed
        self._counted = Counted()
        self._next: int | None = None  # None: not connected
        self._read = 0

    def turn(self) -> int:
        """Read what came. Raises: DependencyUnavailable; what `changed` raises, and hands it over again then."""
        if self._next is None:
            if self._topic.end_offsets()[0] < self._read:
                log.warning("version_sets_new", read=self._read)
                self._counted, self._read = Counted(), 0
            self._topic.seek({0: self._read})
            self._next = self._read
            records = self._topic.read_to_end()
        else:
            records = list(self._topic.poll(_POLL_MS))
        before, void = list(self._counted.operations), self._counted.void
        if self._counted.take(records) and self._counted.last is not None:
            made = self._counted.last
            log.info("version_sets", revision=made.after.revision, operation=made.operation, serving=made.after.serving)
            try:
                self._changed(made.after)
            except Exception:
                self._counted = Counted(before, void)
                raise
        if self._counted.void > void:
            log.warning("version_sets_void", records=self._counted.void - void)
        if records:
            self._read = records[-1].offset + 1
        self.ready()
        return len(records)

    def lost(self, exc: Exception) -> None:
        """Connect again, and read on."""
        self._topic.close()
        self._next = None

    def finish(self) -> None:
        """The next start reads everything again."""
        self._topic.close()
