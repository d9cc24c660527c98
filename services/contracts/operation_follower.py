"""Follow a topic of operations."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, TypeVar

import structlog

from services.contracts.operations import Counted, Operation, OperationTopic, Revised
from services.contracts.topic_reader import TopicReader
from services.platform.stream.kafka import Brokers
from services.platform.stream.ports import Reader
from services.platform.stream.records import SourceRecord
from services.platform.stream.topic import Replicas
from services.platform.stream.topic_follower import TopicFollower

log = structlog.get_logger()

_POLL_MS = 1_000

S = TypeVar("S", bound=Revised)


def operation_reader(
    bootstrap: Brokers, topic: OperationTopic[Any], client_id: str, *, makes_topics: Replicas | None = None
) -> TopicReader:
    """Return a reader of a topic of operations from its start."""
    return TopicReader(
        bootstrap,
        topic.name,
        group_id=client_id,
        client_id=client_id,
        partitions=[0],
        makes_topics=makes_topics,
        rest_ms=_POLL_MS,
    )


class OperationFollower(TopicFollower, Generic[S]):
    """Calls `changed` with the newest state in this thread: at the topic's end, if there is an operation, and after
    each valid one. While Kafka is unavailable, the last state stays in force.
    """

    def __init__(
        self,
        of: OperationTopic[S],
        topic: Reader,
        changed: Callable[[S], None],
        *,
        on_ready: Callable[[], None] = lambda: None,
        backoff_s: float = 0.5,
    ) -> None:
        super().__init__(
            f"{of.name}-follower",
            topic,
            (of.name,),
            poll_s=_POLL_MS / 1000,
            on_ready=on_ready,
            backoff_s=backoff_s,
        )
        self._of, self._changed = of, changed
        self._counted = Counted(of.decode)
        self._handed_over: Operation[S] | None = None

    def take(self, records: Sequence[SourceRecord], ends: Mapping[str, int]) -> None:
        """Once the topic's end is reached, pass on the newest state.

        Raises: errors of `changed`; the state is passed on again.
        """
        void = self._counted.void
        self._counted.take(records)
        if self._counted.void > void:
            log.warning("operations_void", topic=self._of.name, records=self._counted.void - void)
        if records:
            self._next[self._of.name] = records[-1].offset + 1
        if not self.is_behind:
            self.caught_up()

    def drop(self, topic: str) -> None:
        """Start again; the state in force stays until the first operation."""
        self._counted = Counted(self._of.decode)

    def caught_up(self) -> None:
        """Pass on the newest state if it is new."""
        made = self._counted.last
        if made is not None and made is not self._handed_over:
            log.info("operation", topic=self._of.name, revision=made.after.revision, operation=made.operation)
            self._changed(made.after)
            self._handed_over = made
