"""The forget log over the one partition of `forgets`: read from the beginning, then followed."""

from services.contracts.topics.forgets import FORGETS, decode_forget
from services.platform.errors import InvalidRequest, PreconditionFailed
from services.platform.stream.ports import Reader
from services.platform.stream.record import SourceRecord
from services.user_state.forgetting import ForgetRecord

_PARTITION = 0


class ForgetTopic:
    """Implements `ports.ForgetLog`; for one thread. Progress is kept by whoever applies what is read."""

    def __init__(self, reader: Reader) -> None:
        """reader: of `forgets` alone."""
        self._reader = reader
        self._is_whole = False

    def read(self) -> list[ForgetRecord]:
        """Raises: DependencyUnavailable; what was read before it is read again."""
        found = self._reader.poll(0) if self._is_whole else self._read_whole()
        return [_decoded(record) for record in found]

    def close(self) -> None:
        """Give the connection up; the next read goes on where this one ended."""
        self._reader.close()

    def _read_whole(self) -> list[SourceRecord]:
        partitions = list(self._reader.partitions())
        if partitions != [_PARTITION]:
            raise PreconditionFailed(
                f"topic {FORGETS!r} has partitions {partitions}; allowed: one, so that it has an order"
            )
        self._reader.seek({_PARTITION: 0})
        found = self._reader.read_to_end()
        self._is_whole = True
        return found


def _decoded(record: SourceRecord) -> ForgetRecord:
    try:
        return ForgetRecord(record, decode_forget(record.key, record.value))
    except InvalidRequest as exc:
        return ForgetRecord(record, None, exc.message)
