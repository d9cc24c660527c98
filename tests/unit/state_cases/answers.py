"""Answers of a gateway on the encoder's store: what it reads and searches with, and whether it says what it lacks."""

from collections.abc import Sequence

from fakes.encoder import HashEncoder
from fakes.gateway import MemoryCandidates, StoredUserStates
from gateway.gateway_scene import ITEMS, Scene
from state_scene import ANN, FragileStore, vocabulary

from services.contracts.stored_history import StoredEvent
from services.contracts.topics.interactions import DEFAULT_TYPE
from services.encoder.domain import Vocabulary
from services.encoder.handlers.encode import EncodeHistory
from services.gateway.domain import Degradation, Encoded, Event, FreshnessToken, Recommendation, RecommendQuery

# How an answer says that it may be made of less than the whole history.
HONEST_MARKS = {
    Degradation.STALE_STATE,
    Degradation.STATE_STORE_DOWN,
    Degradation.NOT_FRESH,
    Degradation.TOKEN_NOT_HONOURED,
    Degradation.HISTORY_INCOMPLETE,
}


class OnDemand:
    """The gateway's port `Encoder` on the encoder process's own handler."""

    def __init__(self, words: Vocabulary) -> None:
        self._words = words

    async def encode(self, user_id: str, history: Sequence[Event], timeout_s: float) -> Encoded:
        handler = EncodeHistory(encoder=HashEncoder(), vocabulary=self._words)
        try:
            events = [StoredEvent(event.event_time_ms or 0, 0, 0, 0, event.item_id, DEFAULT_TYPE) for event in history]
            found = await handler.encode(user_id, events)
        finally:
            await handler.close()
        return Encoded(query_state=found.state)


async def recommend(
    store: FragileStore, words: Vocabulary | None = None, *, offset: int
) -> tuple[Recommendation, list[bytes]]:
    """Ask a gateway of this model for Ann's items with a token of the given offset; and the states that it searched."""
    words = words or vocabulary()
    candidates = MemoryCandidates(item_ids=list(ITEMS))
    scene = Scene(
        states=StoredUserStates(store=store, model_version=words.model_version),
        encoder=OnDemand(words),  # type: ignore[arg-type]
        candidates=candidates,
    )
    token = FreshnessToken(store.epoch() or "", 0, offset)
    answer = await scene.recommend(RecommendQuery(user_id=ANN, k=6, token=token))
    return answer, [state.components for state in candidates.query_states]


def silently_shown(answer: Recommendation, seen: str) -> list[str]:
    """Seen items that an answer shows although nothing in it says that it may be incomplete."""
    if not answer.token_honoured or HONEST_MARKS & set(answer.degradations):
        return []
    return [item.item_id for item in answer.items if item.item_id in seen]
