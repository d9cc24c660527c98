"""Says in the log when a background merge fails, once until it succeeds again, and when it does."""

from collections.abc import Sequence
from typing import Protocol

import structlog

log = structlog.get_logger()


class Merging(Protocol):
    """Merges in the background; `error` is what the last one raised, None once one succeeded."""

    @property
    def error(self) -> Exception | None: ...


class MergeReports:
    """For threads that apply changes, which look after each of them."""

    def __init__(self, merges: Sequence[Merging]) -> None:
        self._merges = tuple(merges)
        self._failing: set[Merging] = set()

    @property
    def is_failing(self) -> bool:
        """Whether the last merge of any failed. From any thread: merges fail and recover while no change comes."""
        return any(merge.error is not None for merge in self._merges)

    def look(self) -> None:
        """Report what failed or recovered since the last look."""
        for merge in self._merges:
            error = merge.error
            if error is not None and merge not in self._failing:
                self._failing.add(merge)
                log.error("merge_failed", reason=str(error), exc_info=error)
            elif error is None and merge in self._failing:
                self._failing.discard(merge)
                log.info("merge_recovered")
