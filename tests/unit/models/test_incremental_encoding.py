"""Encoding from kept keys and values equals encoding whole windows, whatever happens to a history."""

from dataclasses import replace

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from step_session import StepSession

from services.algorithms.bundles.model_manifest import EncoderShape, HeadShape
from services.algorithms.encoding.actions import STRIDE
from services.algorithms.encoding.history import trim
from services.algorithms.encoding.incremental_encoding import IncrementalEncoder
from services.offline.training.models.sequential import SequentialModel

L = 16
SHAPE = EncoderShape(
    kind="hstu", num_blocks=3, num_heads=2, width=12, d_qk=5, d_v=7, max_history=L, num_time_buckets=64
)
HEAD = HeadShape(kind="mol", num_query_components=3, num_item_components=2, component_width=4, tau=0.05, gate_hidden=5)
NUM_ITEMS = 8
ACTIONS = ("like", "dislike")
MEGABYTE = 1 << 20


def model_of(shape: EncoderShape = SHAPE, num_users: int = 0) -> SequentialModel:
    torch.manual_seed(0)
    model = SequentialModel(replace(shape, actions=ACTIONS), HEAD, num_items=NUM_ITEMS, num_users=num_users).eval()
    # Weights as large as training makes them, so that a wrong key or value would show.
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return model


MODEL = model_of()

Event = tuple[int, int]
ITEM = st.builds(lambda row, action: row + action * STRIDE, st.integers(0, NUM_ITEMS - 1), st.integers(0, len(ACTIONS)))
USER = st.integers(0, 2)
# Few items and gaps of 0 make windows that begin alike, which is where a cache could take one for another.
GAP = st.sampled_from([0, 0, 1, 60, 86_400, 10_000_000])
CHANGE = st.one_of(
    st.tuples(st.just("append"), USER, st.lists(st.tuples(ITEM, GAP), min_size=1, max_size=6)),
    st.tuples(st.just("append"), USER, st.lists(st.tuples(ITEM, GAP), min_size=1, max_size=2)),
    st.tuples(st.just("insert"), USER, st.tuples(ITEM, st.integers(0, L))),
    st.tuples(st.just("undo"), USER, st.integers(0, L)),
    st.tuples(st.just("forget"), USER, st.none()),
)


def changed(events: list[Event], what: str, how: object) -> list[Event]:
    """A user's window after something happened, as the encoder process keeps it."""
    if what == "append":
        for item, gap in how:  # type: ignore[attr-defined]
            events = [*events, (item, (events[-1][1] if events else 10**9) + gap)]
            if len(events) == L:
                events = list(trim(events, L))
    elif what == "insert" and events:
        item, at = how  # type: ignore[misc]
        place = min(at, len(events) - 1)
        events = list(trim([*events[:place], (item, events[place][1]), *events[place:]], L))
    elif what == "undo" and events:
        place = min(how, len(events) - 1)  # type: ignore[type-var, assignment]
        events = [*events[:place], *events[place + 1 :]]
    elif what == "forget":
        events = []
    return events


@torch.no_grad()
def whole(window: list[Event], positions: list[int]) -> tuple[np.ndarray, np.ndarray]:
    items, times = torch.tensor([event[0] for event in window]), torch.tensor([event[1] for event in window])
    components, gate = MODEL.states_at(items[None], times[None], None, torch.tensor([positions]))
    assert gate is not None
    return components[0].numpy(), gate[0].numpy()


def incremental(encoder: IncrementalEncoder, key: int, window: list[Event], positions: list[int]) -> dict:
    items, times = (np.array(column, dtype=np.int64) for column in zip(*window, strict=True))
    return encoder.encode(key, items, times, -1, np.array(positions))[0]


@settings(deadline=None, max_examples=150)
@given(
    changes=st.lists(CHANGE, min_size=1, max_size=30),
    back=st.lists(st.integers(1, L), min_size=1, max_size=3),
    max_bytes=st.sampled_from([0, 10_000, MEGABYTE]),
)
def test_any_sequence_of_events_gives_the_states_of_whole_windows(
    changes: list[tuple[str, int, object]], back: list[int], max_bytes: int
) -> None:
    encoder = IncrementalEncoder(StepSession(MODEL), max_bytes=max_bytes)
    windows: dict[int, list[Event]] = {}
    for what, user, how in changes:
        window = windows[user] = changed(windows.get(user, []), what, how)
        if what == "forget":
            encoder.drop(user)
        if window:
            positions = sorted({max(0, len(window) - before) for before in back})
            found = incremental(encoder, user, window, positions)
            components, gate = whole(window, positions)
            np.testing.assert_allclose(found["components"], components, rtol=0, atol=1e-4)
            np.testing.assert_allclose(found["gate"], gate, rtol=0, atol=1e-4)
        assert encoder.counts().bytes <= max_bytes


def history(length: int) -> list[Event]:
    return [(number % NUM_ITEMS, 10**9 + 3_600 * number) for number in range(length)]


def test_an_appended_event_is_encoded_alone_and_a_slide_encodes_the_window_once() -> None:
    session = StepSession(MODEL)
    encoder = IncrementalEncoder(session, max_bytes=MEGABYTE)
    events: list[Event] = []
    for event in history(40):
        events = list(trim([*events, event], L))
        incremental(encoder, 1, events, [len(events) - 1])
    slides = [16, 20, 24, 28, 32, 36, 40]
    assert session.encoded == [12 if number in slides else 1 for number in range(1, 41)]
    counts = encoder.counts()
    assert (counts.hits, counts.misses) == (40 - len(slides) - 1, len(slides) + 1)
    assert counts.events - counts.reused_events == sum(session.encoded)


def test_a_changed_event_in_the_middle_leaves_what_lies_before_it() -> None:
    session = StepSession(MODEL)
    encoder = IncrementalEncoder(session, max_bytes=MEGABYTE)
    window = history(12)
    incremental(encoder, 1, window, [11])
    window[7] = (5, window[7][1])
    found = incremental(encoder, 1, window, [11])
    assert session.encoded == [12, 5]
    np.testing.assert_allclose(found["components"], whole(window, [11])[0], rtol=0, atol=1e-4)


def test_the_state_before_an_event_is_remembered_from_when_it_was_the_state_after_the_last() -> None:
    session = StepSession(MODEL)
    encoder = IncrementalEncoder(session, max_bytes=MEGABYTE)
    window = history(12)
    incremental(encoder, 1, window[:11], [10])
    found = incremental(encoder, 1, window, [10, 11])
    assert session.encoded == [11, 1]
    np.testing.assert_allclose(found["components"], whole(window, [10, 11])[0], rtol=0, atol=1e-4)
    # Asked for again, nothing is encoded; but a state further back is.
    again = incremental(encoder, 1, window, [11])
    np.testing.assert_array_equal(again["components"], found["components"][1:])
    back = incremental(encoder, 1, window, [9, 11])
    np.testing.assert_allclose(back["components"], whole(window, [9, 11])[0], rtol=0, atol=1e-4)
    assert session.encoded == [11, 1, 3]


def test_a_run_that_failed_leaves_no_state_of_events_that_were_cut_off() -> None:
    session = StepSession(MODEL)
    encoder = IncrementalEncoder(session, max_bytes=MEGABYTE)
    window = history(12)
    incremental(encoder, 1, window, [11])
    changed_window = [*window[:8], (5, window[8][1])]
    session.fails = True
    with pytest.raises(RuntimeError, match="as told"):
        incremental(encoder, 1, changed_window, [8])
    session.fails = False
    found = incremental(encoder, 1, window[:8], [7])
    np.testing.assert_allclose(found["components"], whole(window[:8], [7])[0], rtol=0, atol=1e-4)


def test_two_users_under_one_key_get_their_own_states() -> None:
    encoder = IncrementalEncoder(StepSession(MODEL), max_bytes=MEGABYTE)
    one, other = history(9), [(NUM_ITEMS - 1 - item, time + 7) for item, time in history(9)]
    for window in (one, other, one[:8], other):
        found = incremental(encoder, 1, window, [len(window) - 1])
        np.testing.assert_allclose(found["components"], whole(window, [len(window) - 1])[0], rtol=0, atol=1e-4)


def test_the_least_recently_used_go_first_and_a_dropped_user_leaves_nothing() -> None:
    session = StepSession(MODEL)
    one_users_bytes = IncrementalEncoder(session, max_bytes=MEGABYTE)
    incremental(one_users_bytes, 0, history(5), [4])
    size = one_users_bytes.counts().bytes
    # 25 places of item, time, place, and per block keys and values of two heads; then one state.
    assert size == 25 * (8 + 8 + 8 + 3 * 2 * (5 + 7) * 4) + (3 * 4 + 6) * 4
    encoder = IncrementalEncoder(session, max_bytes=2 * size)
    for user in (1, 2, 1, 3):
        incremental(encoder, user, history(5), [4])
    assert encoder.counts().bytes == 2 * size
    session.encoded.clear()
    for user in (1, 3, 2):
        incremental(encoder, user, history(6), [5])
    assert session.encoded == [1, 1, 6]
    encoder.drop(2)
    encoder.drop(3)
    assert encoder.counts().bytes == 0


def test_a_user_component_comes_from_the_index_asked_with_not_from_what_was_kept() -> None:
    model = model_of(replace(SHAPE, uses_user_index=True), num_users=3)
    encoder = IncrementalEncoder(StepSession(model), max_bytes=MEGABYTE)
    items, times = (np.array(column, dtype=np.int64) for column in zip(*history(6), strict=True))
    found = [encoder.encode(1, items, times, user, np.array([5]))[0]["components"][0] for user in (-1, 0, 2)]
    assert not found[0][-1].any()
    assert np.abs(found[1][-1] - found[2][-1]).max() > 0.1
    np.testing.assert_allclose(found[1][:-1], found[2][:-1], rtol=0, atol=1e-5)


def test_a_negative_bound_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="max_bytes=-1; allowed: 0 or more"):
        IncrementalEncoder(StepSession(MODEL), max_bytes=-1)
