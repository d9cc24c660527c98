"""Users of a batch, jobs for the model, and its answers.

Letters: n events of one sequence, M states wanted of it, P_q query components, P component pairs, d component width.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from services.user_state.merging import Arrival, Merge
from services.user_state.values import UserHistory


@dataclass(frozen=True, slots=True)
class EncodeJob:
    """One sequence for the model. Shapes: item_index (n,), event_time (n,) in seconds, oldest first.

    item_index: dense indices; with actions if the model reads them (`algorithms.encoding.actions`).

    positions: the M wanted ones (increasing, below n). user_index: -1 if unknown to training. cache_key: 0 or more if
    the user's next sequence will likely begin like this one; None: do not cache.
    """

    item_index: npt.NDArray[np.int64]
    event_time: npt.NDArray[np.int64]
    user_index: int
    positions: Sequence[int]
    cache_key: int | None = None


@dataclass(frozen=True, slots=True)
class EncodedStates:
    """One job's states. Shapes: components (M, P_q, d), gate (M, P) or None for a plain dot product."""

    components: npt.NDArray[np.float32]
    gate: npt.NDArray[np.float32] | None


@dataclass(slots=True)
class UserWork:
    """One user in a batch: arrivals, their merge, and wanted states (sequence number -> prefix lengths).

    attributed: numbers of arrivals to attribute. is_traced: an arrival has a trace.
    """

    arrivals: list[Arrival]
    merged: Merge
    history: UserHistory
    attributed: Collection[int] = ()
    wanted: dict[int, list[int]] = field(default_factory=dict)
    is_traced: bool = False
