"""The window rule: which events the encoder reads, in training and in serving.

When a window reaches L events, its oldest L/4 are dropped and the rest is encoded again. Between drops events are only
appended, so a causal encoder that encodes only the new events is exact.

Letters: L = max_history.
"""

from collections.abc import Sequence
from typing import TypeVar

Event = TypeVar("Event")


def check_max_history(max_history: int) -> None:
    """Raise ValueError unless max_history is a positive multiple of 4."""
    if max_history < 4 or max_history % 4:
        raise ValueError(f"max_history={max_history}; allowed: a multiple of 4, at least 4")


def window_start(num_events: int, max_history: int) -> int:
    """The first event of the window after `num_events` events: 0 below L, then a multiple of L/4.

    The window then has 3L/4 to L - 1 events.
    """
    check_max_history(max_history)
    if num_events < 0:
        raise ValueError(f"num_events={num_events}; allowed: 0 or more")
    if num_events < max_history:
        return 0
    step = max_history // 4
    return ((num_events - max_history) // step + 1) * step


def trim(events: Sequence[Event], max_history: int) -> Sequence[Event]:
    """The window's events, oldest first. A history that was trimmed before gives the same window."""
    return events[window_start(len(events), max_history) :]
