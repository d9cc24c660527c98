"""The topics that a generator reads, in memory."""

from fakes.stream import MemoryTopics

from services.contracts.topics.search_clicks import SEARCH_CLICKS


class MemoryClicks(MemoryTopics):
    """`search-clicks`, written by a test."""

    def __init__(self) -> None:
        super().__init__({SEARCH_CLICKS: 1})
        (self.log,) = self.logs[SEARCH_CLICKS]

    def append(self, value: bytes | None, key: bytes | None = None) -> int:
        """Write one record; its offset."""
        return self.write(SEARCH_CLICKS, key, value)
