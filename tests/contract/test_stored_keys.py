"""The state store's keys as 0.1.0 has them: read, and written the same way (`tests/golden/formats.py` made them)."""

import json

import pytest
from golden import formats

from services.user_state.reader import StateReader
from services.user_state.values import Progress, UserHistory
from services.user_state.writer import StateWriter

KEYS = json.loads((formats.HERE / "store.json").read_text())
HOME = formats.HOME.partition

pytestmark = pytest.mark.integration


async def test_stored_keys_say_what_was_written(redis_url: str) -> None:
    formats.put_store(redis_url, KEYS)
    writer, reader = StateWriter(redis_url), StateReader(redis_url, with_traces=True)
    wanted = formats.UPDATE
    assert writer.ensure_epoch(8) == (formats.EPOCH, False)
    progress = writer.progress([HOME], formats.EPOCH)[HOME]
    assert progress == Progress(watermark=41, counts=progress.counts, anchors=formats.STEP.anchors)
    assert {name: count for name, count in progress.counts.items() if count} == formats.STEP.counts
    history = writer.load_users([formats.USER], formats.EPOCH)[formats.USER]
    assert history == UserHistory(
        events=list(wanted.events),
        recent=list(wanted.recent),
        positions=dict(wanted.positions),
        forgotten=dict(wanted.forgotten),
        expected=history.expected,
        known=41,
    )
    assert writer.forgets_applied(formats.FORGETS_READER, formats.EPOCH).offsets[HOME] == 5
    assert writer.user_ids(HOME, formats.EPOCH) == [formats.USER]
    view = await reader.read_user(formats.USER, "model-1")
    assert (view.state, view.epoch, view.watermark, view.is_lost) == (formats.STATE, formats.EPOCH, 41, False)
    assert (view.seen, view.turned_down, view.reaches_history) == (["größer", "film-0"], ["film-0"], True)
    assert await reader.read_events(formats.USER) == formats.EVENTS
    (popular,) = [found for found in await reader.read_popular() if found.levels]
    assert (popular.half_life_s, dict(popular.levels)) == (3600.0, formats.STEP.popular.joins)
    assert (await reader.read_keys(formats.USER)).state_model_versions == ("model-1",)
    writer.close()
    await reader.close()


def test_the_same_is_written_under_the_same_keys(redis_url: str) -> None:
    written, stored = formats.write_store(redis_url), json.loads(json.dumps(KEYS))
    for keys in (written, stored):
        # Until when the user's keys live is the clock's.
        keys[formats.state_layout.users_key(HOME)]["content"][formats.USER.encode().hex()] = ""
    assert written == stored
