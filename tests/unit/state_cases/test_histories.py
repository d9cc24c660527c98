"""The topic `histories`: whoever the store loses comes back from it, with or without the log, or it is not believed.

The oracle is a replay of the whole log into a store that lost nothing.
"""

import os
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from fakes.encoder import MemoryForgetLog, MemoryStream
from fakes.stream import MemoryTopics
from state_scene import ANN, NOW_MS, EncoderProcess, FragileStore, append, append_all, interaction, replay
from structlog.testing import capture_logs

from services.contracts.topics.dead_letters import SUFFIX, dead_letter
from services.contracts.topics.forgets import Forget
from services.contracts.topics.histories import HISTORIES, MARK_KEY, decode_history, decode_mark
from services.contracts.topics.interactions import INTERACTIONS
from services.platform.errors import DependencyUnavailable
from services.user_state.layout import home_of

BOB = "bob"
SEEDS = int(os.environ.get("FRESHET_HISTORY_SEEDS", "40"))


def kept(stream: MemoryStream, user_id: str = ANN) -> Any:
    """The user's newest record."""
    records = [one for log in stream.histories.logs[HISTORIES] for one in log if one.key == user_id.encode()]
    return decode_history(records[-1].key, records[-1].value)


def covered(stream: MemoryStream, partition: int = 0) -> int:
    marks = [one.value for one in stream.histories.logs[HISTORIES][partition] if one.key == MARK_KEY]
    return decode_mark(marks[-1]).covered


def from_log(logs: Sequence[Any]) -> list[int]:
    """How many users were read from the beginning of the log, by reading."""
    return [entry["from_log"] for entry in logs if entry["event"] == "lost_users_restored"]


def kept_scene(items: str = "abcde") -> tuple[MemoryStream, FragileStore]:
    """Ann's and Bob's events are applied and kept."""
    stream, store = MemoryStream(1), FragileStore()
    append_all(stream, items)
    append_all(stream, items[::-1], user=BOB)
    EncoderProcess(stream, store).settle()
    assert covered(stream) == 2 * len(items) - 1
    return stream, store


def test_while_an_emptied_store_is_filled_its_users_are_lost_and_not_new() -> None:
    stream, store = kept_scene()
    store.wipe()
    process = EncoderProcess(stream, store)
    process.consumer._handler.resync(stream)
    found = store.load_users([ANN, "new"], store.epoch() or "")
    assert (found[ANN].is_lost, found["new"].is_lost) == (True, False)


def test_what_came_after_the_mark_is_read_from_the_log_behind_it() -> None:
    stream, store = kept_scene()
    # The first round begins at once, before there is anything; the next one is far.
    process = EncoderProcess(stream, store, keep_every_s=1e9).settle()
    append_all(stream, "ff", first=5)
    append_all(stream, "abc", user="new")
    process.settle()
    assert covered(stream) == 9
    wanted = replay(stream, (ANN, BOB, "new"))
    stream.expire(INTERACTIONS, 0, 10)
    store.evict([ANN, BOB, "new"])
    with capture_logs() as logs:
        process.settle()
    assert store.contents((ANN, BOB, "new")) == wanted
    assert sum(from_log(logs)) == 0
    EncoderProcess(stream, store).settle()
    assert (covered(stream), kept(stream, "new").positions) == (14, {0: 14})


def test_a_process_that_ends_keeps_what_changed() -> None:
    stream, store = kept_scene()
    process = EncoderProcess(stream, store, keep_every_s=1e9).settle()
    append_all(stream, "f", first=5)
    process.settle()
    assert covered(stream) == 9
    process.consumer.finish()
    assert covered(stream) == 10


def test_a_volume_of_an_earlier_version_is_kept_from_what_the_store_holds() -> None:
    stream, store = kept_scene()
    stream.histories.logs[HISTORIES][0].clear()
    stream.expire(INTERACTIONS, 0, 9)
    EncoderProcess(stream, store).settle()
    assert (covered(stream), kept(stream).positions, kept(stream, BOB).positions) == (9, {0: 4}, {0: 9})


def test_an_altered_record_is_refused_by_name_and_the_log_is_read() -> None:
    stream, store = kept_scene()
    log = stream.histories.logs[HISTORIES][0]
    at = max(one.offset for one in log if one.key == ANN.encode())
    value = log[at].value or b""
    log[at] = replace(log[at], value=value[:40] + bytes([value[40] ^ 1]) + value[41:])
    store.evict([ANN, BOB])
    with capture_logs() as logs:
        EncoderProcess(stream, store).settle()
    refused = [entry for entry in logs if entry["event"] == "history_record_refused"]
    assert [(entry["partition"], entry["offset"]) for entry in refused][:1] == [(0, at)]
    assert "checksum" in refused[0]["reason"]
    assert sum(from_log(logs)) == 1
    assert store.contents((ANN, BOB)) == replay(stream, (ANN, BOB))
    assert kept(stream).positions == {0: 4}, "it was written again"


def test_an_altered_mark_is_refused_by_name_and_everybody_is_written_again() -> None:
    stream, store = kept_scene()
    log = stream.histories.logs[HISTORIES][0]
    assert log[-1].key == MARK_KEY
    at = len(log) - 1
    log[at] = replace(log[at], value=(log[at].value or b"")[:-1] + b"\x00")
    with capture_logs() as logs:
        EncoderProcess(stream, store).settle()
    assert [entry["offset"] for entry in logs if entry["event"] == "history_mark_refused"] == [at]
    store.evict([ANN])
    EncoderProcess(stream, store).settle()
    assert store.contents((ANN, BOB)) == replay(stream, (ANN, BOB))


def test_histories_of_another_log_are_not_believed() -> None:
    """The store was emptied because the topic was recreated: offsets cannot tell, the remembered records can."""
    stream, store = kept_scene()
    stream.log[0].clear()
    append_all(stream, "fedcbaf", first=50)
    append_all(stream, "aaaaa", user=BOB, first=60)
    store.wipe()
    EncoderProcess(stream, store).settle()
    store.evict([ANN])
    EncoderProcess(stream, store).settle()
    assert store.contents((ANN, BOB)) == replay(stream, (ANN, BOB))


def test_a_log_that_lost_its_end_voids_what_was_kept_of_it() -> None:
    stream, store = kept_scene()
    del stream.log[0][7:]
    process = EncoderProcess(stream, store).settle()
    append_all(stream, "f", first=5)
    process.settle()
    store.evict([ANN, BOB])
    process.settle()
    assert store.contents((ANN, BOB)) == replay(stream, (ANN, BOB))


def test_a_topic_that_is_made_anew_is_written_whole() -> None:
    stream, store = kept_scene()
    process = EncoderProcess(stream, store).settle()
    stream.histories.logs[HISTORIES][0].clear()
    append_all(stream, "f", first=5)
    process.settle()
    assert (covered(stream), kept(stream, BOB).positions) == (10, {0: 9})


def forget(stream: MemoryStream, user_id: str = ANN) -> Forget:
    ends = {partition: len(log) - 1 for partition, log in enumerate(stream.log)}
    return Forget(forget_id=f"f{sum(ends.values())}", user_id=user_id, up_to=ends, requested_ms=NOW_MS)


@pytest.mark.parametrize("state", ["stored", "lost", "expired"])
def test_a_forgotten_users_newest_record_holds_no_item(state: str) -> None:
    stream, store = kept_scene()
    forgets = MemoryForgetLog()
    forgets.append(forget(stream))
    if state != "stored":
        store.evict([ANN])
    if state == "expired":
        del store._users[ANN]
    EncoderProcess(stream, store, forget_log=forgets).settle()
    log = [one for one in stream.histories.logs[HISTORIES][0] if one.key == ANN.encode()]
    if state == "expired":
        assert log[-1].value is None
    else:
        assert (kept(stream).events, kept(stream).seen, kept(stream).forgotten) == ([], {}, {0: 9})
        assert {entry.item_id for entry in kept(stream).recent} == {""}
    store.wipe()
    EncoderProcess(stream, store, forget_log=forgets).settle()
    assert (store.history(), store.seen.get(ANN, {}), store.history(BOB)) == ("", {}, "edcba")


def test_a_topic_that_takes_nothing_holds_up_no_stream() -> None:
    stream, store = kept_scene()
    process = EncoderProcess(stream, store)
    process.settle()

    def keep(records: Any) -> Any:
        raise DependencyUnavailable("the topic is away")

    keeps, process.outbox.keep = process.outbox.keep, keep  # type: ignore[method-assign]
    append_all(stream, "f", first=5)
    process.settle()
    assert (store.history(), covered(stream)) == ("abcdef", 9)
    process.outbox.keep = keeps  # type: ignore[method-assign]
    process.keep._next_round = 0.0
    process.settle()
    assert covered(stream) == 10


def test_users_of_another_processs_partitions_hold_the_mark() -> None:
    """Another partitioner put Ann's records into a partition where she is not at home, and another process has that."""
    stream, store = MemoryStream(2), FragileStore()
    home = home_of(ANN, "e-2").partition
    append_all(stream, "abc", partition=1 - home)
    stream.assigned[INTERACTIONS] = [1 - home]
    stream.histories.assigned[HISTORIES] = [1 - home]
    EncoderProcess(stream, store).settle()
    assert store.history() == "abc"
    assert covered(stream, 1 - home) == -1


class _Dies(Exception):
    """The process died here."""


@pytest.mark.parametrize("seed", range(SEEDS))
def test_whatever_happens_every_user_is_what_the_log_says(seed: int) -> None:
    """Random events, undos, forgets, losses, restarts and crashes; in the end all is lost once more."""
    rng = random.Random(seed)
    partitions = rng.choice([1, 2])
    stream, store, forgets = MemoryStream(partitions), FragileStore(), MemoryForgetLog()
    users = [f"user-{number}" for number in range(5)]
    older = store.older_copy()
    clock = 0

    def start() -> EncoderProcess:
        made = EncoderProcess(stream, store, forget_log=forgets, keep_every_s=rng.choice([0.0, 0.0, 1e9]))
        if rng.random() < 0.4:
            keeps, left = made.outbox.keep, rng.randrange(6)

            def keep(records: Any) -> Any:
                nonlocal left
                left -= 1
                if left < 0:
                    keeps(records[: rng.randrange(len(records) + 1)])
                    raise _Dies
                return keeps(records)

            made.outbox.keep = keep  # type: ignore[method-assign]
        return made

    def settle(process: EncoderProcess) -> EncoderProcess:
        for _ in range(50):
            try:
                return process.settle()
            except _Dies:
                process = start()
        raise AssertionError("it never lived long enough")

    process = start()
    for _ in range(rng.randrange(5, 25)):
        action = rng.choice(
            ["events", "events", "events", "evict", "wipe", "older", "save", "restart", "compact", "forget"]
        )
        if action == "events":
            for _ in range(rng.randrange(1, 5)):
                user = rng.choice(users)
                clock += 1
                home = home_of(user, f"e-{partitions}").partition
                partition = home if rng.random() < 0.9 else rng.randrange(partitions)
                # Between partitions there is no order: what lies elsewhere is not undone from home.
                name = f"{user}-{clock}" if partition == home else f"elsewhere-{clock}"
                event = interaction(rng.choice("abcdef"), user=user, event_id=name, second=clock)
                if rng.random() < 0.15:
                    partition, undoes = home, f"{user}-{rng.randrange(clock)}"
                    event = interaction("", user=user, event_id=f"u{clock}", second=clock, undoes_event_id=undoes)
                append(stream, event, partition)
        elif action == "evict":
            store.evict(rng.sample(users, rng.randrange(1, 5)))
        elif action == "wipe":
            store.wipe()
            older = store.older_copy()
        elif action == "save":
            older = store.older_copy()
        elif action == "older" and older.epoch() == store.epoch() and older.epoch():
            store.fall_back_to(older)
        elif action == "restart":
            process = start()
        elif action == "compact":
            stream.histories.compact(HISTORIES)
        elif action == "forget" and rng.random() < 0.5:
            user = rng.choice(users)
            settle(process)
            forgets.append(forget(stream, user))
        if rng.random() < 0.7:
            process = settle(process)
    for loss in ("none", "evict", "wipe"):
        if loss == "evict":
            store.evict(users)
        elif loss == "wipe":
            store.wipe()
        process = settle(start())
        wanted, found = replay(stream, users, forget_log=forgets), store.contents(users)
        for user in users:
            # After a forget, or where a process ended before it had made it, a state comes with the next event. Until
            # then the gateway has it made of the history.
            if not found[user]["states"]:
                wanted[user]["states"] = {}
        assert found == wanted, (seed, loss)


def test_who_is_read_from_the_log_again_does_not_get_what_was_set_aside() -> None:
    stream, store = MemoryStream(1), FragileStore()
    stream.letters = letters = MemoryTopics({INTERACTIONS + SUFFIX: 1})
    append_all(stream, "abc")
    process = EncoderProcess(stream, store)
    handler = process.consumer._handler
    handler.resync(stream)
    first, tripping, last = stream.logs[INTERACTIONS][0]
    handler.apply([first])
    handler.reject(tripping, "it tripped a bug")
    handler.apply([last])
    for dead in process.outbox.dead_letters:
        record = dead_letter(dead)
        letters.write(record.topic, record.key, record.value, partition=0, headers=record.headers)
    wanted = store.contents([ANN])
    store.evict([ANN])
    EncoderProcess(stream, store).settle()
    assert store.contents([ANN]) == wanted
