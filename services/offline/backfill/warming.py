"""Compute another model's states for all users with a history, before that model serves.

A state is written only if the stored history has not changed since. The job skips users whose state is
current, so it can be repeated.
"""

from collections.abc import Callable

from services.encoder.handlers.encode import states_of
from services.encoder.models import Model
from services.user_state.values import ModelState
from services.user_state.warmth import Warmth, current_epoch, measure, stored_users
from services.user_state.writer import StateWriter

# Users per call of the model.
_USERS = 32


def warm(store: StateWriter, model: Model, progress: Callable[[int, int], None]) -> Warmth:
    """Compute missing states. progress: called with (users checked, all users). Raises: the errors of `measure`."""
    epoch, version = current_epoch(store), model.vocabulary.model_version
    store.add_model(version)
    pages = list(stored_users(store, epoch))
    total, looked_at, made = sum(map(len, pages)), 0, 0
    for users in pages:
        cold = [user for user, is_whole in store.are_whole(users, version, epoch).items() if not is_whole]
        looked_at += len(users) - len(cold)
        for start in range(0, len(cold), _USERS):
            made += _compute_states(store, model, cold[start : start + _USERS], epoch)
            looked_at += len(cold[start : start + _USERS])
            progress(looked_at, total)
        progress(looked_at, total)
    found = measure(store, version)
    return Warmth(active=found.active, warm=found.warm, made=made)


def _compute_states(store: StateWriter, model: Model, users: list[str], epoch: str) -> int:
    histories = store.load_users(users, epoch)
    made = states_of(model, histories, epoch, cached=False)
    states = [
        ModelState(
            user_id=user_id,
            model_version=model.vocabulary.model_version,
            positions=history.positions,
            forgotten=history.forgotten,
            state=made.get(user_id),
        )
        for user_id, history in histories.items()
    ]
    return store.store_states(states, epoch)
