"""Compute another model's states for all users with a history, before that model serves.

A state is written only if the stored history has not changed since. The job skips users with current states, so it can
be repeated.
"""

from collections.abc import Callable, Mapping

from services.contracts.query_state import PackedQueryState
from services.encoder.domain import Vocabulary, encode_job, user_state
from services.encoder.ports import SequenceEncoder
from services.user_state.values import ModelState, StoredState, UserHistory, now_ms
from services.user_state.warmth import Warmth, current_epoch, measure, stored_users
from services.user_state.writer import StateWriter

# Users per call of the model.
_USERS = 32


def warm(
    store: StateWriter, encoder: SequenceEncoder, vocabulary: Vocabulary, progress: Callable[[int, int], None]
) -> Warmth:
    """Compute missing states. progress: (users checked, all users). Raises: as `measure`."""
    epoch, version = current_epoch(store), vocabulary.model_version
    store.add_model(version)
    pages = list(stored_users(store, epoch))
    total, looked_at, made = sum(map(len, pages)), 0, 0
    for users in pages:
        cold = [user for user, is_whole in store.are_whole(users, version, epoch).items() if not is_whole]
        looked_at += len(users) - len(cold)
        for start in range(0, len(cold), _USERS):
            made += _compute_states(store, encoder, vocabulary, cold[start : start + _USERS], epoch)
            looked_at += len(cold[start : start + _USERS])
            progress(looked_at, total)
        progress(looked_at, total)
    found = measure(store, version)
    return Warmth(active=found.active, warm=found.warm, made=made)


def query_states(
    encoder: SequenceEncoder, vocabulary: Vocabulary, histories: Mapping[str, UserHistory]
) -> dict[str, PackedQueryState]:
    """Return the states after whole histories, in one call of the model; without users that it cannot encode."""
    jobs, of_jobs = [], []
    for user_id, history in histories.items():
        job, rows = encode_job(vocabulary, user_id, history.events, [len(history.events)])
        if job is not None:
            jobs.append(job)
            of_jobs.append((user_id, history, rows[len(history.events)]))
    answers = encoder.encode(jobs) if jobs else ()
    return {
        user_id: user_state(vocabulary, encoded, row, history.events)
        for (user_id, history, row), encoded in zip(of_jobs, answers, strict=True)
    }


def _compute_states(
    store: StateWriter, encoder: SequenceEncoder, vocabulary: Vocabulary, users: list[str], epoch: str
) -> int:
    histories = store.load_users(users, epoch)
    made, states = query_states(encoder, vocabulary, histories), []
    for user_id, history in histories.items():
        state = None
        if user_id in made:
            newest = max(history.positions, key=lambda partition: history.positions[partition])
            state = StoredState(
                query_state=made[user_id],
                partition=newest,
                offset=history.positions[newest],
                event_time_ms=history.events[-1].event_time_ms,
                applied_ms=now_ms(),
            )
        states.append(_state_of(user_id, vocabulary, history, state))
    return store.store_states(states, epoch)


def _state_of(user_id: str, vocabulary: Vocabulary, history: UserHistory, state: StoredState | None) -> ModelState:
    return ModelState(
        user_id=user_id,
        model_version=vocabulary.model_version,
        positions=history.positions,
        forgotten=history.forgotten,
        state=state,
    )
