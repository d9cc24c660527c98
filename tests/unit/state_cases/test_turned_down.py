"""From a dislike in the stream to what candidates are asked: the item is left out, and does not vote."""

from encoder.streams import append, drain, handler_on, interaction
from fakes.encoder import MemoryOutbox, MemoryStream
from fakes.gateway import StoredUserStates
from gateway.gateway_scene import Scene

from services.gateway.domain import RecommendQuery
from services.offline.backfill.memory_store import MemoryStore


async def test_a_disliked_item_is_seen_and_does_not_vote_until_the_dislike_is_undone() -> None:
    stream, store = MemoryStream(1), MemoryStore()
    scene = Scene(states=StoredUserStates(store=store, model_version="model-1"))
    for event in (
        {"item": 1, "event_id": "took"},
        {"item": 2, "event_id": "disliked", "type": "dislike"},
        {"item_id": "", "event_id": "undid", "undoes_event_id": "disliked"},
    ):
        append(stream, interaction(0, **event))  # type: ignore[arg-type]
        drain(handler_on(store, MemoryOutbox()), stream)
        await scene.recommend(RecommendQuery(user_id="user-0", k=3))
    asked = zip(scene.candidates.seen, scene.candidates.turned_down, strict=True)
    assert [(sorted(seen), list(turned_down)) for seen, turned_down in asked] == [
        (["item-1"], []),
        (["item-1", "item-2"], ["item-2"]),
        (["item-1"], []),
    ]
