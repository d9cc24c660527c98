"""Search clicks leave the encoder once they count, and are taken back with what took them back."""

import pytest
from fakes.encoder import HashEncoder, MemoryForgetLog, MemoryOutbox, MemoryStream
from hypothesis import given, settings
from hypothesis import strategies as st
from streams import NOW_MS, VOCABULARY, append, drain, forget, forgets_on, handler_on, interaction

from services.contracts.pseudonyms import pseudonym_of
from services.contracts.topics.attributions import ForgetUpTo, Undo
from services.contracts.topics.interactions import Interaction
from services.contracts.topics.search_clicks import ClickRecord, SearchClick, decode_click, encode_click, key_of
from services.offline.backfill.memory_store import MemoryStore
from services.offline.backfill.reattribution import Reattribution
from services.platform.errors import InvalidRequest
from services.user_state.forgetting import Forgotten

PSEUDONYM = pseudonym_of("user-0", b"key")


def click(item: int = 0, **changes: object) -> Interaction:
    return interaction(0, item, **({"type": "search_click", "query": "space movies", "event_id": "c1"} | changes))


def published(*interactions: Interaction) -> MemoryOutbox:
    stream, outbox = MemoryStream(1), MemoryOutbox()
    for event in interactions:
        append(stream, event)
    drain(handler_on(MemoryStore(), outbox), stream)
    return outbox


def test_a_search_click_goes_out_with_its_words_even_as_a_users_first_event() -> None:
    outbox = published(click(item=3))
    assert outbox.clicks == [
        SearchClick(
            event_id="c1",
            query="space movies",
            item_id="item-3",
            value=1.0,
            event_time_ms=NOW_MS,
            recorded_ms=NOW_MS,
            partition=0,
            offset=0,
            user_pseudonym=PSEUDONYM,
        )
    ]
    assert outbox.attributions == []  # nothing precedes it


def test_words_that_break_a_limit_make_a_dead_letter_and_no_click() -> None:
    stream, outbox = MemoryStream(1), MemoryOutbox()
    append(stream, click(query=""))
    append(stream, click(query="a\x00b", event_id="c2"))
    append(stream, interaction(0, 1, query="space", event_id="c3"))
    append(stream, click(event_id="c4"))
    drain(handler_on(MemoryStore(), outbox), stream)
    assert [letter.reason.split("=")[0] for letter in outbox.dead_letters] == ["query"] * 3
    assert [c.event_id for c in outbox.clicks if isinstance(c, SearchClick)] == ["c4"]


def test_an_undo_names_the_click_that_it_takes_back() -> None:
    undo = interaction(0, item_id="", event_id="u1", undoes_event_id="c1", type="interaction")
    outbox = published(interaction(0, 9, event_id="e1"), click(item=3), undo)
    assert [type(record) for record in outbox.clicks] == [SearchClick, Undo]
    taken_back = outbox.clicks[1]
    assert isinstance(taken_back, Undo)
    assert (taken_back.undoes, taken_back.offset, taken_back.item_id) == ((0, 1), 2, "item-3")
    assert any(isinstance(a, Undo) for a in outbox.attributions)


def test_a_forgotten_user_is_named_once_whatever_the_number_of_partitions_and_void_clicks_never_go_out() -> None:
    stream, store, outbox, log = MemoryStream(2), MemoryStore(), MemoryOutbox(), MemoryForgetLog()
    append(stream, click(item=1))
    append(stream, click(item=2, event_id="c2"))
    log.append(forget(p0=0, p1=-1))
    forgotten = Forgotten()
    handler = handler_on(store, outbox, forgotten=forgotten)
    handler.resync(stream)
    forgets_on(log, store, outbox, forgotten).resync(handler.progress.epoch, stream.end_offsets())
    handler.apply(stream.poll(0, 100))
    assert [type(record) for record in outbox.clicks] == [ForgetUpTo, SearchClick]
    void, later = outbox.clicks
    assert isinstance(void, ForgetUpTo)
    assert isinstance(later, SearchClick)
    assert (void.user_pseudonym, void.up_to, void.forget_id) == (PSEUDONYM, {0: 0, 1: -1}, "f1")
    assert later.event_id == "c2"


def test_a_click_that_came_while_its_user_was_being_forgotten_still_counts() -> None:
    stream, store, outbox, log = MemoryStream(1), MemoryStore(), MemoryOutbox(), MemoryForgetLog()
    append(stream, interaction(0, 5, event_id="e1"))
    append(stream, click(item=1))
    forgotten = Forgotten()
    handler = handler_on(store, outbox, forgotten=forgotten)
    drain(handler, stream)
    log.append(forget(p0=0))
    forgets_on(log, store, outbox, forgotten).resync(handler.progress.epoch, stream.end_offsets())
    assert [type(record) for record in outbox.clicks] == [SearchClick, ForgetUpTo]
    # Its query state was made of the void event, the words were not.
    assert [a.undoes for a in outbox.attributions if isinstance(a, Undo)] == [(0, 1)]


def test_another_models_attributions_repeat_no_clicks() -> None:
    stream, outbox = MemoryStream(1), MemoryOutbox()
    append(stream, interaction(0, 5, event_id="e1"))
    append(stream, click())
    report = Reattribution(
        open_stream=lambda _: stream,
        partitions=[0],
        outbox=outbox,
        forgets=MemoryForgetLog(),
        encoder=HashEncoder(),
        vocabulary=VOCABULARY,
        pseudonym_key=b"key",
        new_store=MemoryStore,
    ).run()
    assert (report.attributions, outbox.clicks) == (1, [])


ids = st.text(st.characters(exclude_categories=("Cc", "Cs")), min_size=1, max_size=30)
words = st.text(st.characters(exclude_categories=("Cc", "Cs")), min_size=1, max_size=200).filter(
    lambda t: not t.isspace()
)
places = st.tuples(st.integers(0, 99), st.integers(0, 2**40))
common = {"user_pseudonym": ids, "recorded_ms": st.integers(0, 2**42)}
lying = common | {
    "event_id": ids,
    "item_id": ids,
    "event_time_ms": st.integers(0, 2**42),
    "partition": st.integers(0, 99),
    "offset": st.integers(0, 2**40),
}
records = st.one_of(
    st.builds(SearchClick, query=words, value=st.floats(allow_nan=False), **lying),
    st.builds(Undo, undoes=places, **lying),
    st.builds(
        ForgetUpTo,
        forget_id=ids,
        up_to=st.dictionaries(st.integers(0, 99), st.integers(-1, 2**40), min_size=1),
        **common,
    ),
)


@settings(deadline=None)
@given(records)
def test_a_record_comes_back_as_it_was_written_and_its_key_is_its_id(record: ClickRecord) -> None:
    assert decode_click(encode_click(record)) == record
    assert key_of(record)


@settings(deadline=None)
@given(records, st.integers(0, 400), st.integers(1, 255))
def test_a_damaged_record_is_refused_or_read_as_a_valid_one(record: ClickRecord, at: int, change: int) -> None:
    data = bytearray(encode_click(record))
    data[at % len(data)] ^= change
    try:
        found = decode_click(bytes(data))
    except InvalidRequest:
        return
    assert key_of(found)


@pytest.mark.parametrize("value", [None, b"", b"\x0a\xff", b"\x0a\x01a"])
def test_what_is_no_record_is_refused(value: bytes | None) -> None:
    with pytest.raises(InvalidRequest):
        decode_click(value)
