"""Batches of an epoch: every event but a user's first predicted once, from the events before it, and repeatable."""

from dataclasses import replace

import numpy as np
import pytest
from training_scene import cyclic_interactions

from services.algorithms.bundles.event_schema import default_schema
from services.algorithms.encoding.actions import STRIDE
from services.offline.training.sequences import EpochBatches, Histories


def epoch(histories: Histories, *, number: int = 0, seed: int = 0) -> EpochBatches:
    return EpochBatches(histories, max_history=8, batch_sequences=5, seed=seed, epoch=number)


@pytest.mark.parametrize("number", [0, 1, 2])
def test_every_event_but_a_users_first_is_predicted_exactly_once(number: int) -> None:
    interactions = cyclic_interactions()
    histories = Histories.of(interactions)
    predicted = []
    for batch in epoch(histories, number=number):
        length = batch.items.shape[1]
        assert length <= 8
        for position, target in zip(batch.positions, batch.targets, strict=True):
            row, step = divmod(int(position), length)
            predicted.append(
                (int(batch.users[row]), int(batch.times[row, step]), int(batch.items[row, step]), int(target))
            )
    expected = []
    for user in range(interactions.num_users):
        begin, end = histories.offsets[user], histories.offsets[user + 1]
        for place in range(begin, end - 1):
            expected.append(
                (user, int(histories.times[place]), int(histories.items[place]), int(histories.items[place + 1]))
            )
    assert sorted(predicted) == sorted(expected)
    assert len(predicted) == histories.num_positions


def test_what_an_event_was_is_read_with_its_item_and_said_of_targets_that_nobody_liked() -> None:
    data = cyclic_interactions()
    kinds = np.random.default_rng(5).integers(0, 4, len(data)).astype(np.int16)
    data = replace(data, types=kinds, type_names=["click", "hide", "rating", "share"])
    data = replace(data, values=np.where(np.arange(len(data)) % 2, 1, 5).astype(np.float32))
    data, _ = data.with_actions(default_schema(), ["hide", "rating -2", "rating +2", "click"])
    histories = Histories.of(data)
    unsaid = read = 0
    for batch in epoch(histories):
        assert batch.outcomes is not None
        for position, target, outcome in zip(batch.positions, batch.targets, batch.outcomes, strict=True):
            row, step = divmod(int(position), batch.items.shape[1])
            user, time = int(batch.users[row]), int(batch.times[row, step])
            place = int(histories.offsets[user] + np.searchsorted(mine(histories.times, histories, user), time))
            while histories.items[place] != batch.items[row, step] % STRIDE:  # of one second
                place += 1
            said = int(histories.actions[place])
            assert batch.items[row, step] // STRIDE in {0, said}
            read, unsaid = read + (said > 0), unsaid + (batch.items[row, step] // STRIDE != said)
            following = int(histories.actions[place + 1])
            assert target == histories.items[place + 1]
            assert outcome == (following if following in {1, 2} else 0)
    # Row 0 is trained, too.
    assert 0.05 < unsaid / read < 0.2


def mine(values: np.ndarray, histories: Histories, user: int) -> np.ndarray:
    return values[histories.offsets[user] : histories.offsets[user + 1]]


def test_windows_of_long_histories_start_on_the_quarter_grid() -> None:
    histories = Histories.of(cyclic_interactions(num_users=3, events=300))
    starts = set()
    for number in range(6):
        batches = epoch(histories, number=number)
        for start, user in zip(batches._starts, batches._users, strict=True):
            starts.add(int(start - histories.offsets[user]) % 8)
    assert starts == {0, 2, 4, 6}


def test_padding_lies_at_the_end_and_repeats_the_last_time() -> None:
    for batch in epoch(Histories.of(cyclic_interactions())):
        padded = batch.items < 0
        assert (np.diff(padded.astype(int), axis=1) >= 0).all()
        for times, row in zip(batch.times, padded, strict=True):
            assert (times[row] == times[~row][-1]).all()
        assert not padded.ravel()[batch.positions].any()


def test_an_epoch_follows_from_its_seed_and_number_alone() -> None:
    histories = Histories.of(cyclic_interactions())
    one, same, other = epoch(histories), epoch(histories), epoch(histories, number=1)
    for number in (3, 0):
        np.testing.assert_array_equal(one[number].positions, same[number].positions)
        np.testing.assert_array_equal(one[number].items, same[number].items)
    assert not np.array_equal(one[0].targets, other[0].targets)


def test_users_with_one_event_or_none_are_left_out() -> None:
    interactions = cyclic_interactions(num_users=40, events=45)
    histories = Histories.of(interactions)
    sizes = np.diff(histories.offsets)
    assert (sizes == 1).any()
    found = np.concatenate([batch.users for batch in epoch(histories)])
    assert sorted(set(found.tolist())) == np.flatnonzero(sizes > 1).tolist()
