"""The report of a forget: every place that still holds something of the user has to be named, and no end promised that
never comes."""

import numpy as np
import pytest
from fakes.encoder import MemoryForgetLog, MemoryStream
from gateway.gateway_scene import Scene
from refresher.refresher_scene import World, make_rules
from refresher.refresher_scene import interaction as attributed
from state_scene import ANN, NOW_MS, EncoderProcess, FragileStore, append, append_all, interaction

from services.contracts.pseudonyms import pseudonym_of
from services.contracts.topics import TOPICS
from services.contracts.topics.dead_letters import SUFFIX
from services.contracts.topics.forgets import Forget
from services.contracts.topics.index_deltas import INDEX_DELTAS, MemoryDelta
from services.contracts.topics.interactions import INTERACTIONS
from services.contracts.topics.search_clicks import SEARCH_CLICKS, SearchClick
from services.gateway.ports import StoredUser
from services.platform.stream.records import pack_position
from services.refresher.domain.partition import entry_id_of
from services.refresher.domain.records import Forgetting

PSEUDONYM = pseudonym_of(ANN, b"key")


async def remains() -> list[str]:
    """The sentences of the report. A preview's are those of the forget itself."""
    scene = Scene()
    scene.encoder.users[ANN] = StoredUser(pseudonym=PSEUDONYM, forgotten_up_to={})
    return list((await scene.forget_user(ANN, preview=True)).remains)


def left_by_the_encoder() -> dict[str, object]:
    """By topic: what lies there of a user after the encoder process has forgotten her."""
    stream, store, forgets = MemoryStream(1), FragileStore(), MemoryForgetLog()
    append_all(stream, "a")
    append(stream, interaction("b", event_id="click", second=1, type="search_click", query="my illness"))
    stream.append(0, ANN.encode(), b"\x0a\xff", NOW_MS)
    process = EncoderProcess(stream, store, forget_log=forgets).settle()
    forgets.append(Forget(forget_id="f", user_id=ANN, up_to={0: 2}, requested_ms=NOW_MS))
    after = EncoderProcess(stream, store, forget_log=forgets).settle()
    assert store.history() == ""
    clicks = [*process.outbox.clicks, *after.outbox.clicks]
    return {
        SEARCH_CLICKS: [(one.query, one.user_pseudonym) for one in clicks if isinstance(one, SearchClick)],
        INTERACTIONS + SUFFIX: [letter.record.key for letter in process.outbox.dead_letters],
    }


def left_by_the_refresher() -> list[str]:
    """Remembered interactions of the user among the deltas, written before the forget; the topic is compacted, so they
    lie there until the broker comes to it."""
    world = World(make_rules())
    query = attributed(np.random.default_rng(1), place=(0, 0), item="item-1", user=PSEUDONYM)
    world.log.append(0, query)
    running = world.settled()
    world.log.append(0, Forgetting(0, PSEUDONYM, {0: 0}))
    running.settle()
    changes = [delta.change for delta in world.outbox.deltas]
    return [one.entry_id for one in changes if isinstance(one, MemoryDelta) and not one.dropped]


def test_what_a_forget_leaves_in_the_topics() -> None:
    """The premise of the cases below."""
    assert left_by_the_encoder() == {
        SEARCH_CLICKS: [("my illness", PSEUDONYM)],
        INTERACTIONS + SUFFIX: [ANN.encode()],
    }
    assert left_by_the_refresher() == [entry_id_of(pack_position(0, 0))]


@pytest.mark.parametrize("topic", [SEARCH_CLICKS, INTERACTIONS + SUFFIX, INDEX_DELTAS])
async def test_the_report_names_every_topic_that_still_holds_something(topic: str) -> None:
    assert [sentence for sentence in await remains() if f"`{topic}`" in sentence] != []


async def test_the_report_promises_no_end_by_retention_where_retention_is_endless() -> None:
    endless = [topic.name for topic in TOPICS if topic.settings.get("retention.ms") == "-1"]
    promised = [
        name
        for sentence in await remains()
        if "until their retention ends" in sentence
        for name in endless
        if f"`{name}`" in sentence
    ]
    assert promised == []
