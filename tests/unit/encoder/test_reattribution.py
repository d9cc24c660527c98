"""A new model's attributions are those that it would have sent had it been live from the beginning."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from fakes.encoder import HashEncoder, MemoryForgetLog, MemoryOutbox, MemoryStream
from streams import NOW_MS, VOCABULARY, append, drain, forget, handler_on, interaction

from services.contracts.topics.attributions import Attribution, Undo
from services.contracts.topics.interactions import INTERACTIONS
from services.encoder.handlers.apply_records import ApplyRecords
from services.offline.archive.files import Archive, open_whole
from services.offline.archive.writing import ArchiveInteractions
from services.offline.backfill.memory_store import MemoryStore
from services.offline.backfill.reattribution import Reattribution, ReattributionReport
from services.platform.errors import DependencyUnavailable
from services.user_state.forgetting import Forgotten

PARTITIONS = 3
NEXT = replace(VOCABULARY, model_version="model-2", item_index={f"item-{n}": n for n in range(10, 60)}, max_history=12)


def one_partition(topic: MemoryStream, partition: int, commits: dict[int, int]) -> MemoryStream:
    """A reader of one partition, with commits of its own group."""
    reader = topic.reader(partitions=[partition])
    reader.committed_to, reader.per_poll = {INTERACTIONS: commits}, 40
    return reader


def topic() -> MemoryStream:
    stream = MemoryStream(PARTITIONS)
    random = np.random.default_rng(11)
    for number in range(600):
        user = int(random.integers(0, 9))
        if number % 17 == 16:
            undone = f"e{number - int(random.integers(1, 40))}"
            event = interaction(user, item_id="", event_id=f"e{number}", undoes_event_id=undone)
        else:
            time = NOW_MS + number * 1_000 - int(random.integers(0, 9_000))
            event = interaction(user, int(random.integers(0, 60)), event_id=f"e{number}", event_time_ms=time)
        append(stream, event, user % PARTITIONS)
    stream.append(0, b"user-0", b"\xff", NOW_MS)
    return stream


def run(
    stream: MemoryStream,
    outbox: MemoryOutbox,
    commits: dict[int, int],
    forgets: MemoryForgetLog | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
    encoder: HashEncoder | None = None,
    archive: Archive | None = None,
) -> ReattributionReport:
    return Reattribution(
        open_stream=lambda partition: one_partition(stream, partition, commits),
        partitions=range(PARTITIONS),
        outbox=outbox,
        forgets=forgets or MemoryForgetLog(),
        encoder=encoder or HashEncoder(),
        vocabulary=NEXT,
        pseudonym_key=b"key",
        new_store=lambda: MemoryStore(max_seen=0),
        progress=progress,
        archive=archive,
    ).run()


def live(stream: MemoryStream, forgotten: Forgotten | None = None) -> dict[tuple[int, int], Attribution | Undo]:
    """What the new model sends when it is live from the beginning."""
    outbox, copy = MemoryOutbox(), MemoryStream(PARTITIONS)
    copy.log = stream.log
    drain(handler_on(MemoryStore(), outbox, NEXT, forgotten=forgotten), copy, (7,))
    return by_place(outbox)


def by_place(outbox: MemoryOutbox) -> dict[tuple[int, int], Attribution | Undo]:
    return {(a.partition, a.offset): a for a in outbox.attributions if isinstance(a, Attribution | Undo)}


def test_every_interaction_is_attributed_as_if_the_model_had_been_live() -> None:
    stream, outbox, seen = topic(), MemoryOutbox(), []
    report = run(stream, outbox, {}, progress=lambda done, total: seen.append((done, total)))
    assert by_place(outbox) == live(stream)
    assert {a.state.model_version for a in outbox.attributions if isinstance(a, Attribution)} == {"model-2"}
    assert (report.records, report.attributions, report.skipped) == (601, len(outbox.attributions), 0)
    assert outbox.dead_letters == []
    assert seen == sorted(seen)
    assert seen[-1] == (601, 601)


def test_a_run_that_broke_off_is_continued() -> None:
    class Tired(HashEncoder):
        def encode(self, jobs):  # type: ignore[no-untyped-def]
            if len(self.calls) > 4:
                raise DependencyUnavailable("tired")
            return super().encode(jobs)

    stream, outbox, commits = topic(), MemoryOutbox(), dict[int, int]()
    with pytest.raises(DependencyUnavailable):
        run(stream, outbox, commits, encoder=Tired())
    broken_off = len(outbox.attributions)
    run(stream, outbox, commits)
    assert by_place(outbox) == live(stream)
    assert 0 < broken_off < len(outbox.attributions)


def test_what_retention_took_is_read_from_the_archive(tmp_path: Path) -> None:
    stream, forgets, forgotten = topic(), MemoryForgetLog(), Forgotten()
    forgets.append(forget(4, p1=40))
    forgotten.add(forget(4, p1=40))
    expected = live(stream, forgotten)
    earlier = MemoryStream(PARTITIONS)
    earlier.log = [log[:120] for log in stream.log]
    archiving = ArchiveInteractions(tmp_path, log=earlier, forgets=forgets.reader(), file_bytes=20_000)
    assert archiving.run().forgotten > 0
    archive, outbox, commits = open_whole(tmp_path), MemoryOutbox(), dict[int, int]()
    for partition, part in archive.partitions.items():
        stream.expire(INTERACTIONS, partition, part.end - partition)
    run(stream, outbox, commits, forgets.reader(), archive=archive)
    assert by_place(outbox) == expected
    assert len(outbox.attributions) == len(expected)
    assert run(stream, outbox, commits, forgets.reader(), archive=archive).attributions == 0


def test_a_fold_that_attributes_nothing_makes_the_same_histories_and_asks_no_model() -> None:
    stream, outbox, store, encoder = topic(), MemoryOutbox(), MemoryStore(), HashEncoder()
    fold = ApplyRecords(
        store=store,
        outbox=outbox,
        encoder=encoder,
        vocabulary=NEXT,
        pseudonym_key=b"key",
        stores_states=False,
        attributes=False,
    )
    drain(fold, stream, (7,))
    beside, copy = MemoryStore(), MemoryStream(PARTITIONS)
    copy.log = stream.log
    drain(handler_on(beside, MemoryOutbox(), NEXT), copy, (40,))
    users = [f"user-{number}" for number in range(9)]
    mine, theirs = (one.load_users(users, one.epoch() or "") for one in (store, beside))
    assert [mine[user].events for user in users] == [theirs[user].events for user in users]
    assert any(mine[user].events for user in users)
    assert store.seen == beside.seen
    assert (outbox.attributions, encoder.calls, store.states) == ([], [], {})
