"""Read a partition backwards, within limits of bytes and time."""

import time
from collections.abc import Iterator

from services.platform.stream.ports import Reader
from services.platform.stream.record import SourceRecord

# Records of a block; a poll's longest wait in milliseconds.
_BLOCK, _POLL_MS = 500, 200


class Backwards:
    """A partition's newest records, in blocks; iterate once.

    max_bytes: of keys and values; the block that exceeds it is the last. max_s: total time. is_complete: whether all
    records were read.
    """

    def __init__(self, reader: Reader, partition: int, *, topic: str = "", max_bytes: int, max_s: float) -> None:
        self._reader, self._partition, self._topic = reader, partition, topic
        self._max_bytes, self._max_s = max_bytes, max_s
        self.is_complete = False

    def __iter__(self) -> Iterator[list[SourceRecord]]:
        """Yield blocks, the newest first, each in the partition's order.

        Raises: DependencyUnavailable.
        """
        deadline, size, partition = time.monotonic() + self._max_s, 0, self._partition
        first, end = self._reader.bounds([partition], self._topic)[partition]
        while first < end:
            if size > self._max_bytes:
                return
            start = max(first, end - _BLOCK)
            self._reader.assign({partition: start}, self._topic)
            block: list[SourceRecord] = []
            # Compaction and transactions leave gaps: the position, not a count, shows the block's end.
            while self._reader.positions(self._topic)[partition] < end:
                if time.monotonic() > deadline:
                    return
                block += [one for one in self._reader.poll(_POLL_MS) if one.offset < end]
            size += sum(len(one.key or b"") + len(one.value or b"") for one in block)
            end = start
            yield block
        self.is_complete = True
