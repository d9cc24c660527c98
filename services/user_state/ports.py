"""Ports of the state store and of `histories`, as the encoder's thread uses them.

Each has a real and an in-memory adapter. All raise the errors of `services.platform.errors`. Not thread-safe.
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
    """Writes the topic `histories`. `services.platform.stream.ports.Reader` reads it."""

    def keep(self, records: Sequence[EncodedHistory]) -> Sequence[int]:
        """Write records, in the order given within a partition, and return their offsets (-1: unknown).

        Returns after all are acknowledged. A failure may leave some of them written.
        """


class Store(Protocol):
    """User states and progress. `services.user_state.writer` is the implementation over Redis."""

    def epoch(self) -> str | None:
        """Return the current epoch; None if the store is new or was emptied."""

    def ensure_epoch(self, num_partitions: int) -> tuple[str, bool]:
        """Return the current epoch, and whether this call created it. num_partitions: that of `interactions`.

        Raises: PreconditionFailed if another version, or another number of partitions, filled the store.
        """

    def start_new_epoch(self, epoch: str) -> None:
        """Erase all users and progress, then replace `epoch` by a new epoch. Do nothing if `epoch` is not current."""

    def add_model(self, model_version: str) -> None:
        """Add a model version before its first state is stored, so that a forget finds its states."""

    def pause_consumer(self, seconds: int) -> None:
        """Ask the stream's consumer to wait for this long. A new call restarts the wait."""

    def release(self) -> None:
        """End `pause_consumer`."""

    def is_paused(self) -> bool:
        """Return whether the stream's consumer has to wait."""

    def progress(self, partitions: Collection[int], epoch: str) -> Mapping[int, Progress]:
        """Return each partition's progress in this epoch."""

    def begin(self, partitions: Sequence[int], epoch: str) -> Mapping[int, Progress]:
        """Return each partition's progress. Store an empty one for a partition without progress in this epoch.

        Raises: Conflict if `epoch` is not current.
        """

    def load_users(self, user_ids: Collection[str], epoch: str) -> Mapping[str, UserHistory]:
        """Return the users' histories: empty for an unknown user, marked `is_lost` for a lost one."""

    def find_lost(self, partitions: Collection[int], epoch: str) -> Iterator[Collection[str]]:
        """Scan the users of these home partitions and yield the lost ones. A user may be yielded more than once.

        Each item covers about a thousand users. Other processes may write between two items.
        """

    def usage(self) -> StoreUsage:
        """Return the memory share and the number of removed keys. If the latter grows, users may be lost."""

    def apply(
        self,
        updates: Sequence[UserUpdate],
        epoch: str,
        watermarks: Mapping[int, int],
        beside: Sequence[ModelState] = (),
    ) -> None:
        """Write every update whose `expected` position is the stored one. Then write `beside` as `store_states` does.

        watermarks: of this writer's partitions. A user whose home is one of them is written only if the stored
        watermark is the same. Raises: Conflict if some updates were not written.
        """

    def store_states(self, states: Sequence[ModelState], epoch: str) -> int:
        """Write states of other models; skip a state if its history changed. Return the number written."""

    def rewrite(self, updates: Sequence[UserUpdate], epoch: str, forgets: ForgetsApplied | None = None) -> None:
        """Replace everything stored of each user, including states of every model version, atomically per user.

        A user is only erased if neither the store nor the update has positions. forgets: the progress in the topic
        `forgets`; it advances with each user.
        Raises: Conflict if some users changed meanwhile, or the stored progress is not `forgets`.
        """

    def dump(self, user_ids: Collection[str], partitions: Collection[int], epoch: str) -> Dump:
        """Return these users without states, and these partitions' progress. Read the progress after the users."""

    def user_ids(self, partition: int, epoch: str) -> Sequence[str]:
        """Return all users whose home is this partition."""

    def seed(self, partition: int, user_ids: Collection[str], epoch: str) -> None:
        """Add users to the table of their home partition. An added user without other keys counts as lost.

        The entries of users already in the table do not change.
        """

    def forgets_applied(self, reader: str, epoch: str) -> ForgetsApplied:
        """Return `reader`'s progress in `forgets` per home partition in this epoch."""

    def note_forgets(self, forgets: ForgetsApplied, offset: int, epoch: str) -> None:
        """Store that the topic `forgets` is applied up to this offset in the home partitions listed by the argument.

        Raises: Conflict if the stored progress is not that of the argument.
        """

    def advance(self, steps: Sequence[AdvanceStep], epoch: str) -> None:
        """Move watermarks and add counts. A repeated step is not applied.

        Raises: Conflict if a stored watermark is not `from_watermark`, or users written since the last step are
        missing.
        """
