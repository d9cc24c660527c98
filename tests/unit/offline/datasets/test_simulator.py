"""The simulator gives people worth modelling: reproducible, orderly, and predictable from their last steps."""

import numpy as np
import pytest

from services.offline.datasets import SimulatorConfig, leave_one_out_split, simulate

SMALL = SimulatorConfig(num_users=400, num_items=400, num_topics=16, mean_events_per_user=60, max_events_per_user=150)


def test_equal_seeds_give_equal_data_and_others_do_not() -> None:
    assert simulate(SMALL).fingerprint() == simulate(SMALL).fingerprint()
    other = SimulatorConfig(
        num_users=400, num_items=400, num_topics=16, mean_events_per_user=60, max_events_per_user=150, seed=1
    )
    assert simulate(other).fingerprint() != simulate(SMALL).fingerprint()


def test_nobody_takes_an_item_twice() -> None:
    data = simulate(SMALL)
    pairs = data.users.astype(np.int64) * data.num_items + data.items
    assert len(np.unique(pairs)) == len(pairs)


def test_new_items_arrive_over_time() -> None:
    data = simulate(SMALL)
    first_seen = np.full(data.num_items, np.iinfo(np.int64).max)
    np.minimum.at(first_seen, data.items, data.timestamps)
    span = data.timestamps[-1] - data.timestamps[0]
    late = np.count_nonzero(first_seen > data.timestamps[0] + span // 2)
    assert late > 0.05 * data.num_items


def test_the_last_event_predicts_the_next_far_better_than_popularity() -> None:
    data = simulate(SMALL)
    split = leave_one_out_split(data)
    train = split.train
    rows, offsets = train.by_user()
    users, items = train.users[rows], train.items[rows]
    follows = np.zeros((data.num_items, data.num_items))
    same = users[1:] == users[:-1]
    np.add.at(follows, (items[:-1][same], items[1:][same]), 1.0)
    popularity = train.item_counts().astype(float)
    hits = {"popularity": 0, "follows": 0}
    for user, target in zip(data.users[split.valid_rows], data.items[split.valid_rows], strict=True):
        history = items[offsets[user] : offsets[user + 1]]
        scores = {"popularity": popularity.copy(), "follows": follows[history[-1]] + 1e-6 * popularity}
        for name, score in scores.items():
            score[history] = -1
            hits[name] += int(np.count_nonzero(score > score[target]) < 10)
    assert hits["follows"] > 2 * hits["popularity"]


@pytest.mark.parametrize(("field", "value"), [("num_users", 0), ("new_item_share", 1.5), ("num_topics", 1_000)])
def test_a_bad_setting_is_named(field: str, value: float) -> None:
    with pytest.raises(ValueError, match=rf"{field}={value}; allowed: "):
        SimulatorConfig(**{field: value})
