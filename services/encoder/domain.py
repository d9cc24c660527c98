"""A batch's users, what the model is asked for them, and what it answers.

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
    """One sequence for the model. Shapes: item_index (n,) dense, with its action where the model reads them
    (`algorithms.encoding.actions`), event_time (n,) seconds, oldest first.

    positions: the M positions (increasing, below n) whose states are wanted. user_index: -1 = unknown to training.
    cache_key: of whom the next sequence will likely begin as this one does (0 or more), so that what was computed is
    worth keeping under it; None: keep nothing.
    """

    item_index: npt.NDArray[np.int64]
    event_time: npt.NDArray[np.int64]
    user_index: int
    positions: Sequence[int]
    cache_key: int | None = None


@dataclass(frozen=True, slots=True)
class EncodedStates:
    """The states of one job. Shapes: components (M, P_q, d), gate (M, P) or None for a plain dot product."""

    components: npt.NDArray[np.float32]
    gate: npt.NDArray[np.float32] | None


@dataclass(slots=True)
class UserWork:
    """One user within a batch: arrivals, their merge, and which states are wanted (sequence number -> prefix lengths).
    attributed: numbers of the arrivals whose attributions go out. is_traced: one of the arrivals came with a trace."""

    arrivals: list[Arrival]
    merged: Merge
    history: UserHistory
    attributed: Collection[int] = ()
    wanted: dict[int, list[int]] = field(default_factory=dict)
    is_traced: bool = False
