"""Ports of the state store and of `histories`, for the encoder's thread.

Each has a real and an in-memory adapter. Not thread-safe.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Protocol

from services.contracts.topics.histories import EncodedHistory
from services.user_state.values import (
    AdvanceStep,
    Dump,
    ForgetsApplied,
    ModelState,
    Progress,
    StoreUsage,
    UserHistory,
    UserUpdate,
)


class HistoryOutbox(Protocol):
    """Writes the topic `histories`."""

    def keep(self, records: Sequence[EncodedHistory]) -> Sequence[int]:
        """Write records, in order within a partition. Return their offsets (-1 if unknown) once all are acknowledged. A
        failure may leave some records written.
        """


class Store(Protocol):
    """User states and progress."""

    def epoch(self) -> str | None:
        """The current epoch; None if the store is new or emptied."""

    def ensure_epoch(self, num_partitions: int) -> tuple[str, bool]:
        """The current epoch, and whether this call created it. num_partitions: of `interactions`.

        Raises: PreconditionFailed if another version, or number of partitions, filled the store.
        """

    def start_new_epoch(self, epoch: str) -> None:
        """If `epoch` is current, erase all users and progress, then replace the epoch."""

    def add_model(self, model_version: str) -> None:
        """Add a model version before its first state is stored, so that a forget finds its states."""

    def pause_consumer(self, seconds: int) -> None:
        """Ask the stream's consumer to wait; a new call restarts the wait."""

    def release(self) -> None:
        """End `pause_consumer`."""

    def is_paused(self) -> bool:
        """Whether the stream's consumer has to wait."""

    def progress(self, partitions: Collection[int], epoch: str) -> Mapping[int, Progress]:
        """Each partition's progress in this epoch."""

    def begin(self, partitions: Sequence[int], epoch: str) -> Mapping[int, Progress]:
        """Each partition's progress; a missing one is stored as empty.

        Raises: Conflict if `epoch` is not current.
        """

    def load_users(self, user_ids: Collection[str], epoch: str) -> Mapping[str, UserHistory]:
        """Return the users' histories. An unknown user's is empty; a lost user's has `is_lost` set."""

    def find_lost(self, partitions: Collection[int], epoch: str) -> Iterator[Collection[str]]:
        """Scan these home partitions and yield lost users, possibly repeatedly.

        Each item covers about a thousand users; other processes may write in between.
        """

    def usage(self) -> StoreUsage:
        """Memory share and number of removed keys. If this number grows, users may be lost."""

    def apply(
        self,
        updates: Sequence[UserUpdate],
        epoch: str,
        watermarks: Mapping[int, int],
        beside: Sequence[ModelState] = (),
    ) -> None:
        """Write every update whose `expected` position is the stored one, then `beside` as `store_states` does.

        watermarks: the watermarks of this writer's partitions. A user whose home is one of these partitions is written
        only if the stored watermark is equal. Raises: Conflict if some updates were not written.
        """

    def store_states(self, states: Sequence[ModelState], epoch: str) -> int:
        """Write states of other models whose history is unchanged; return their number."""

    def rewrite(self, updates: Sequence[UserUpdate], epoch: str, forgets: ForgetsApplied | None = None) -> None:
        """Replace everything stored of each user, including states of every model version, atomically per user.

        If neither the store nor the update has positions, the user is erased. forgets: the progress in `forgets`; it
        advances with each user. Raises: Conflict if some users changed meanwhile, or the stored progress is not
        `forgets`.
        """

    def dump(self, user_ids: Collection[str], partitions: Collection[int], epoch: str) -> Dump:
        """Read these users' data except states, then these partitions' progress."""

    def user_ids(self, partition: int, epoch: str) -> Sequence[str]:
        """All users whose home is this partition."""

    def seed(self, partition: int, user_ids: Collection[str], epoch: str) -> None:
        """Add users to their home partition's table; without other keys they count as lost.

        Existing entries do not change. Raises: Conflict if the partition's progress has another epoch.
        """

    def forgets_applied(self, reader: str, epoch: str) -> ForgetsApplied:
        """`reader`'s progress in `forgets` per home partition in this epoch."""

    def note_forgets(self, forgets: ForgetsApplied, offset: int, epoch: str) -> None:
        """Store that `forgets` is applied up to this offset in the argument's home partitions.

        Raises: Conflict if the stored progress is not the argument's.
        """

    def advance(self, steps: Sequence[AdvanceStep], epoch: str) -> None:
        """Move watermarks and add counts. A repeated step is not applied.

        Raises: Conflict if a stored watermark is not `from_watermark`, or users written since the last step are
        missing.
        """
