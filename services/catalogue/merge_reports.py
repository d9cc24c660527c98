"""Log a background merge's failure once, and its recovery."""

from collections.abc import Sequence
from typing import Protocol

import structlog

log = structlog.get_logger()


class Merging(Protocol):
    """Merges in the background; `error` is the last exception, None after a success."""

    @property
    def error(self) -> Exception | None: ...


class MergeReports:
    """For threads that apply changes; called after each one."""

    def __init__(self, merges: Sequence[Merging]) -> None:
        self._merges = tuple(merges)
        self._failing: set[Merging] = set()

    @property
    def is_failing(self) -> bool:
        """Whether any merge failed last; thread-safe."""
        return any(merge.error is not None for merge in self._merges)

    def look(self) -> None:
        """Log failures and recoveries since the last call."""
        for merge in self._merges:
            error = merge.error
            if error is not None and merge not in self._failing:
                self._failing.add(merge)
                log.error("merge_failed", reason=str(error), exc_info=error)
            elif error is None and merge in self._failing:
                self._failing.discard(merge)
                log.info("merge_recovered")
