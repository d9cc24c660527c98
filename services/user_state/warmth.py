"""Measure the share of users with current states of a model."""

from collections.abc import Iterator
from dataclasses import dataclass

from services.platform.errors import PreconditionFailed
from services.user_state.layout import num_partitions_of
from services.user_state.writer import StateWriter

# The share of users with a history that a promotion requires.
WARM = 0.99
# Users per request to the store.
_ASKED = 512


@dataclass(frozen=True, kw_only=True, slots=True)
class Warmth:
    """How many users' states are current. active: users with a history. warm: users whose state reflects the whole
    history. made: states that `freshet model warm` wrote.
    """

    active: int
    warm: int
    made: int = 0

    @property
    def share(self) -> float:
        return self.warm / self.active if self.active else 1.0


def measure(store: StateWriter, model_version: str) -> Warmth:
    """Count the users with current states of a model.

    Raises: PreconditionFailed if no record was applied to the store yet; DependencyUnavailable.
    """
    epoch = current_epoch(store)
    pages = (store.are_whole(users, model_version, epoch) for users in stored_users(store, epoch))
    whole = [is_whole for page in pages for is_whole in page.values()]
    return Warmth(active=len(whole), warm=sum(whole))


def current_epoch(store: StateWriter) -> str:
    """The epoch. Raises: PreconditionFailed if nothing was applied to the store yet."""
    epoch = store.epoch()
    if epoch is None:
        raise PreconditionFailed("nothing was applied to the state store yet")
    return epoch


def stored_users(store: StateWriter, epoch: str) -> Iterator[list[str]]:
    """Users with a history, at most `_ASKED` at a time."""
    for partition in range(num_partitions_of(epoch)):
        users = store.user_ids(partition, epoch)
        for start in range(0, len(users), _ASKED):
            yield users[start : start + _ASKED]
