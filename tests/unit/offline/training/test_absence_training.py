"""Rows of absence in training and evaluation: the events' own times, a row 0 of zeros, nothing below the floor."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from training_scene import CONFIG, WITH_USERS, cyclic_interactions

from services.algorithms.bundles.model_bundle import load_bundle
from services.algorithms.bundles.model_manifest import AbsenceShape
from services.algorithms.encoding.absence import buckets_of
from services.algorithms.encoding.history import window_start
from services.algorithms.ops.mol_scores import MolScorer
from services.algorithms.scoring.states import QueryStates
from services.offline.datasets import Interactions
from services.offline.evaluation.engine.ranked_events import rank_events
from services.offline.training import TrainConfig, preset, train
from services.offline.training.bundling import load_model, save_bundle
from services.offline.training.evaluation import ModelScorer
from services.offline.training.models.sequential import SequentialModel
from services.offline.training.presets import with_dot_head, with_sasrec, with_wide_dot_head
from services.offline.training.sequences import EpochBatches, Histories

SHAPE = AbsenceShape()
DAY = 86_400
HEADS = pytest.mark.parametrize(
    "config",
    [replace(one, absence=SHAPE) for one in (CONFIG, WITH_USERS, with_dot_head(CONFIG))],
    ids=["mol", "with user component", "dot"],
)
# Of ann and bob in turn; ann's events and, of her targets, the seconds since the one before and their buckets.
TIMES = {"ann": [0, 0, 1023, 2047, 2047 + DAY, 2047 + 400 * DAY], "bob": [500, 500 + 3 * DAY]}
GAPS = {"ann": [0, 1023, 1024, DAY, 399 * DAY], "bob": [3 * DAY]}
BUCKETS = {"ann": [0, 0, 1, 7, 16], "bob": [8]}


def two_people() -> Interactions:
    events = sorted((time, name, place) for name, times in TIMES.items() for place, time in enumerate(times))
    return replace(
        cyclic_interactions(num_users=2, num_items=30, events=len(events)),
        users=np.array([0 if name == "ann" else 1 for _, name, _ in events], np.int32),
        items=np.array([place + 10 * (name == "bob") for _, name, place in events], np.int32),
        timestamps=np.array([10**9 + time for time, _, _ in events]),
        user_ids=["ann", "bob"],
    )


def after_absences(num_users: int = 60, *, has_times: bool = True) -> Interactions:
    """Walks through items 0 to 19 in order within a sitting; after two days away, first one of 20 to 29."""
    rng = np.random.default_rng(0)
    users, items, times = [], [], []
    for user in range(num_users):
        item, time, others = int(rng.integers(20)), 10**9 + user, rng.permutation(np.arange(20, 30)).tolist()
        for _ in range(8):
            away = rng.random() < 0.3
            item, time = (item + 1) % 20, time + (2 * DAY if away else 60)
            users.append(user)
            items.append(others.pop() if away else item)
            times.append(time)
    order = np.argsort(times, kind="stable")
    return replace(
        cyclic_interactions(num_users, events=len(users)),
        users=np.array(users, np.int32)[order],
        items=np.array(items, np.int32)[order],
        timestamps=np.array(times)[order],
        has_times=has_times,
    )


def with_random_rows(config: TrainConfig, num_items: int, num_users: int = 0) -> SequentialModel:
    torch.manual_seed(0)
    model = SequentialModel(
        config.encoder, config.head, num_items=num_items, num_users=num_users, absence=config.absence
    ).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.startswith("absence_"):
                parameter[1:] = torch.randn_like(parameter[1:]) / 4
    return model


def test_a_position_is_trained_as_of_its_target_and_in_its_bucket() -> None:
    histories = Histories.of(two_people())
    batches = EpochBatches(histories, max_history=16, batch_sequences=2, seed=0, epoch=0)
    (batch,) = [batches[number] for number in range(len(batches))]
    found: dict[int, int] = dict(zip(batch.targets.tolist(), batch.gaps.tolist(), strict=True))
    wanted = dict(zip([1, 2, 3, 4, 5, 11], GAPS["ann"] + GAPS["bob"], strict=True))
    assert found == wanted
    assert buckets_of(np.array(GAPS["ann"] + GAPS["bob"]), SHAPE).tolist() == BUCKETS["ann"] + BUCKETS["bob"]


@pytest.mark.parametrize("config", [CONFIG, with_dot_head(CONFIG)], ids=["mol", "dot"])
def test_evaluation_asks_in_the_bucket_of_the_events_own_time(config: TrainConfig) -> None:
    data = two_people()
    model, histories = with_random_rows(replace(config, absence=SHAPE), data.num_items), Histories.of(data)
    absence = model.absence_rows()
    assert absence is not None
    scorer = MolScorer(model.all_item_states(), model.pair_gate())
    events, users = np.array([1, 2, 3, 4, 5, 7]), np.array([0, 0, 0, 0, 0, 1])
    found = ModelScorer(model).scores(histories, events, users)
    for row, (event, user, bucket) in enumerate(zip(events, users, BUCKETS["ann"] + BUCKETS["bob"], strict=True)):
        past = slice(histories.offsets[user], event)
        assert not window_start(event - past.start, 16)
        with torch.no_grad():
            components, gate = model.states_at(
                torch.from_numpy(histories.items[past])[None],
                torch.from_numpy(histories.times[past])[None],
                None,
                torch.tensor([[event - past.start - 1]]),
            )
        plain = QueryStates(components=components[0].numpy(), gate=None if gate is None else gate[0].numpy())
        np.testing.assert_allclose(found[row], scorer.scores(absence.apply(plain, bucket))[0], atol=2e-3)
        if bucket:
            assert np.abs(found[row] - scorer.scores(plain)[0]).max() > 0.02


@HEADS
def test_training_moves_a_state_as_serving_does(config: TrainConfig) -> None:
    num_users = 5 if config.encoder.uses_user_index else 0
    model = with_random_rows(config, 30, num_users)
    encoded, buckets = torch.randn(36, config.encoder.width), torch.arange(36) % 18
    users = torch.arange(36) % 6 - 1 if num_users else None
    with torch.no_grad():
        plain, moved = model.query_states(encoded, users), model.query_states(encoded, users, buckets)
    absence = model.absence_rows()
    assert absence is not None
    gate = None if plain[1] is None else plain[1].numpy()
    served = absence.apply(QueryStates(components=plain[0].numpy(), gate=gate), buckets.numpy())
    np.testing.assert_allclose(moved[0].numpy(), served.components, atol=1e-3)
    below = buckets.numpy() == 0
    np.testing.assert_array_equal(moved[0].numpy()[below], plain[0].numpy()[below])
    np.testing.assert_array_equal(served.components[below], plain[0].numpy()[below])
    if moved[1] is not None:
        assert served.gate is not None
        assert gate is not None
        np.testing.assert_allclose(moved[1].numpy(), served.gate, atol=1e-2)
        np.testing.assert_array_equal(moved[1].numpy()[below], gate[below])


@HEADS
def test_rows_are_learnt_where_absences_occur_and_hold_for_longer_ones(config: TrainConfig) -> None:
    rows = train(config, after_absences()).model.absence_rows()
    assert rows is not None
    for array in (rows.components, *(() if rows.gate is None else (rows.gate,))):
        assert not array[:8].any()
        assert array[8].any()
        np.testing.assert_array_equal(array[9:], np.broadcast_to(array[8], array[9:].shape))


@HEADS
def test_below_the_floor_training_is_that_of_a_model_without_rows(config: TrainConfig) -> None:
    data = cyclic_interactions()
    within = replace(data, timestamps=10**9 + np.arange(len(data)))
    told, untold = (train(one, within).model.state_dict() for one in (config, replace(config, absence=None)))
    assert told.keys() - untold.keys() == {name for name in told if name.startswith("absence_")}
    assert [name for name in untold if not torch.equal(told[name], untold[name])] == []
    assert not any(told[name].any() for name in told.keys() - untold.keys())


@pytest.mark.parametrize("config", [CONFIG, with_dot_head(CONFIG)], ids=["mol", "dot"])
def test_what_follows_an_absence_is_learnt(config: TrainConfig) -> None:
    data = after_absences(400)
    rows, cut = np.arange(2400, 3200), data.select(np.arange(2400))
    hits = {}
    for absence in (SHAPE, None):
        report = train(replace(config, absence=absence, epochs=12), cut)
        ranked = rank_events(ModelScorer(report.model), data, rows)
        away = Histories.of(data).gaps(ranked.events) > DAY
        hits[absence] = (ranked.ranks[away] < 10).mean()
    assert hits[SHAPE] > 0.8
    assert hits[SHAPE] > hits[None] + 0.2, hits


def test_where_times_are_not_known_there_are_no_rows() -> None:
    model = train(replace(CONFIG, absence=SHAPE), after_absences(has_times=False)).model
    assert model.absence_rows() is None


@HEADS
def test_rows_go_into_the_bundle_and_come_back(config: TrainConfig, tmp_path: Path) -> None:
    report = train(config, after_absences())
    rows = report.model.absence_rows()
    save_bundle(tmp_path / "bundle", report, after_absences(), data={}, metrics={})
    bundle = load_bundle(tmp_path / "bundle")
    for found in (bundle.absence, load_model(bundle).absence_rows()):
        assert rows is not None
        assert found is not None
        assert found.shape == SHAPE
        np.testing.assert_array_equal(found.components, rows.components)
        assert (found.gate is None) == (rows.gate is None)
        if rows.gate is not None and found.gate is not None:
            np.testing.assert_array_equal(found.gate, rows.gate)


def test_quick_reads_absences_and_the_authors_models_do_not() -> None:
    quick = preset("quick")
    for config in (quick, *(make(quick) for make in (with_dot_head, with_wide_dot_head, with_sasrec))):
        assert config.absence == SHAPE
    assert [preset(name).absence for name in ("ml-1m", "ml-20m", "books")] == [None] * 3
