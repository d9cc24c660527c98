"""The state store as its writer sees it, and what writes `histories`.

Each port has a real adapter and an in-memory one. All raise the error tree of `services.platform.errors`. For one
thread.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Protocol

from services.contracts.topics.histories import KeptRecord
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
    """Writes `histories`; it is read back as any topic."""

    def keep(self, records: Sequence[KeptRecord]) -> Sequence[int]:
        """Write records, in the order given within a partition; their offsets (-1: it is not known). Returns once all
        are acknowledged; a failure may leave some of them written."""


class Store(Protocol):
    """User states and progress; see `services.user_state.writer`, which is the real one."""

    def epoch(self) -> str | None:
        """The current epoch; None when the store has none (it is new or was emptied)."""

    def ensure_epoch(self, num_partitions: int) -> tuple[str, bool]:
        """The current epoch, made when missing, and whether it was made now. num_partitions: of the whole stream.

        Raises: PreconditionFailed when the store was filled by another version or with other partitions.
        """

    def begin_anew(self, epoch: str) -> None:
        """Erase every user and put a new epoch in the place of `epoch`; nothing where that is not the current one."""

    def add_model(self, model_version: str) -> None:
        """Name a model version before its first state is stored, so that a forget finds the states of all."""

    def hold(self, seconds: int) -> None:
        """Ask whoever applies the stream to wait, for so long unless asked again."""

    def release(self) -> None:
        """Take `hold` back."""

    def is_held(self) -> bool:
        """Whether the stream is to wait."""

    def progress(self, partitions: Collection[int], epoch: str) -> Mapping[int, Progress]:
        """How far each partition is applied in this epoch."""

    def begin(self, partitions: Sequence[int], epoch: str) -> Mapping[int, Progress]:
        """The same, begun where there is none of this epoch. Raises: Conflict when it is not the current one."""

    def load_users(self, user_ids: Collection[str], epoch: str) -> Mapping[str, UserHistory]:
        """The users' histories; an unknown user's is empty, and that of who was lost says so."""

    def find_lost(self, partitions: Collection[int], epoch: str) -> Iterator[Collection[str]]:
        """Users at home in these partitions of whom something was lost, perhaps repeatedly. It looks at everybody, at a
        thousand or so for each item; others may write in between."""

    def usage(self) -> StoreUsage:
        """How full the store is, and what it has taken away; when that changes, `find_lost` may find somebody."""

    def apply(
        self,
        updates: Sequence[UserUpdate],
        epoch: str,
        watermarks: Mapping[int, int],
        beside: Sequence[ModelState] = (),
    ) -> None:
        """Write every update whose `expected` position still holds, then `beside` as `store_states` does.

        watermarks: of the partitions that this writer moves; a user at home in one of them is written only if it stands
        where the writer thinks. Raises: Conflict when some were not written.
        """

    def store_states(self, states: Sequence[ModelState], epoch: str) -> int:
        """Write states of models beside the writer's own, each if its history is still at its position; how many."""

    def rewrite(self, updates: Sequence[UserUpdate], epoch: str, forgets: ForgetsApplied | None = None) -> None:
        """Erase all that is stored of each user, states of every model version included, and write the update in its
        place (nothing, where neither it nor what was stored has positions), atomically. forgets: the progress of
        whoever applies `forgets`, moved on with each user. Raises: Conflict when some were written in between, or the
        store is not where `forgets` says."""

    def dump(self, user_ids: Collection[str], partitions: Collection[int], epoch: str) -> Dump:
        """All of these users but their states; then the progress of these partitions, no older than they are."""

    def user_ids(self, partition: int, epoch: str) -> Sequence[str]:
        """Everybody who is at home in a partition."""

    def seed(self, partition: int, user_ids: Collection[str], epoch: str) -> None:
        """Note that these users are at home in this partition: who is there already stays, the others are lost."""

    def forgets_applied(self, reader: str, epoch: str) -> ForgetsApplied:
        """How far `reader` applied `forgets` to each partition's users in this epoch."""

    def note_forgets(self, forgets: ForgetsApplied, offset: int, epoch: str) -> None:
        """Note that `forgets` is applied up to this offset, in the partitions that it names. Raises: Conflict when the
        store is not where it says."""

    def advance(self, steps: Sequence[AdvanceStep], epoch: str) -> None:
        """Move watermarks and add counts, once. Raises: Conflict when some had moved, or users written since the last
        move are missing."""
