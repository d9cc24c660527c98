"""The walk predicts before it learns: what each contender may know of an event is what came before it."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from stream_scene import WINDOW, ordered_events, untrained

from services.algorithms.bundles.model_manifest import AbsenceShape
from services.algorithms.encoding.history import window_start
from services.algorithms.pefa.policy import FeedbackPolicy, SharePolicy, TypeWeight
from services.algorithms.scoring.states import QueryStates
from services.offline.evaluation.stream.baselines import (
    NeighbourSettings,
    StreamingItemNeighbours,
    StreamingPopularity,
)
from services.offline.evaluation.stream.models import StreamModel, TrainedModels, stream_model
from services.offline.evaluation.stream.pefa import RefreshedItems, VoteSettings, WithVotes
from services.offline.evaluation.stream.walk import (
    Ranker,
    StreamSetting,
    stream_setting,
    training_part,
    walk,
)


@pytest.fixture(scope="module")
def setting() -> StreamSetting:
    return stream_setting(ordered_events(), seed=1, withheld_share=0.2, stream_share=0.5)


@pytest.fixture(scope="module")
def model(setting: StreamSetting) -> StreamModel:
    return stream_model(setting, untrained, seed=0)


def _pefa(setting: StreamSetting, model: StreamModel, *, capacity: int = 10_000) -> Ranker:
    feedback = FeedbackPolicy({"rating": TypeWeight(slope=0.5, centre=2)})
    share = SharePolicy.parse("evidence(prior=3)")
    items = RefreshedItems(setting, model, feedback, {"XS": 3, "XS alone": 1}, share=share)
    frozen = TrainedModels(setting, [model], name="frozen")
    votes = {"+XL": VoteSettings(k=5, share=0.5)}
    return WithVotes(setting, model, feedback, votes, [frozen, items], capacity=capacity, min_users=3)


def _everyone(setting: StreamSetting, model: StreamModel) -> Sequence[Ranker]:
    neighbours = NeighbourSettings(window=4, recency=0.8, damping=0.5, shrink=1.0)
    return [
        _pefa(setting, model),
        StreamingPopularity(setting, half_life_events=50),
        StreamingItemNeighbours(setting, neighbours),
    ]


def test_withheld_items_never_happened_before_the_split_and_all_happen_after_it() -> None:
    data = ordered_events()
    setting = stream_setting(data, seed=1, withheld_share=0.2, stream_share=0.5)
    events = setting.interactions
    assert setting.withheld.sum() == 5
    assert not setting.withheld[events.items[: setting.split]].any()
    assert events.items[setting.split :].tolist() == data.items[len(data) - setting.num_streamed :].tolist()
    assert setting.new_items.sum() > 0
    assert not (setting.new_items & setting.known).any()


@pytest.mark.parametrize("share", [-0.1, 1.0])
def test_a_share_outside_its_range_is_refused(share: float) -> None:
    with pytest.raises(ValueError, match="withheld_share"):
        stream_setting(ordered_events(), seed=0, withheld_share=share)


@pytest.mark.parametrize("absence", [None, AbsenceShape()])
def test_a_state_is_what_encoding_that_history_alone_gives(
    setting: StreamSetting, absence: AbsenceShape | None
) -> None:
    part = training_part(setting.interactions, setting.split)
    model = untrained(part.interactions, seed=0, absence=absence)
    learnt, moved = model.absence_rows(), 0
    before = stream_model(setting, lambda interactions, *, seed: model, seed=0)
    events = setting.interactions
    slid = 0
    for place in range(setting.num_streamed):
        row = setting.split + place
        history = np.flatnonzero(events.users[:row] == events.users[row])
        items = part.item_rows[events.items[history]]
        history, items = history[items >= 0], items[items >= 0]
        start = window_start(len(history), WINDOW)
        slid += start > 0
        found = before.query(place)
        if not len(history):
            assert found is None
            continue
        times = torch.from_numpy(events.timestamps[history[start:]])[None]
        last = torch.tensor([[len(history) - start - 1]])
        components, gate = model.states_at(torch.from_numpy(items[start:].astype(np.int64))[None], times, None, last)
        assert gate is not None
        assert found is not None
        assert found.gate is not None
        wanted = QueryStates(components=components[0].detach().numpy(), gate=gate[0].detach().numpy())
        if learnt is not None:
            bucket = learnt.bucket_of(int(events.timestamps[row] - events.timestamps[history[-1]]))
            wanted, moved = learnt.apply(wanted, bucket), moved + (bucket > 0)
        assert wanted.gate is not None
        assert np.allclose(found.components, wanted.components, atol=1e-3 if moved else 1e-5)
        assert np.allclose(found.gate, wanted.gate, atol=1e-3 if moved else 1e-5)
    assert slid > 10
    assert (moved > 10) == (learnt is not None)


def test_what_happens_later_changes_no_earlier_rank(setting: StreamSetting, model: StreamModel) -> None:
    events = setting.interactions
    shortened = StreamSetting(
        interactions=events.select(slice(0, len(events) - 40)),
        split=setting.split,
        withheld=setting.withheld,
        known=setting.known,
    )
    whole = walk(setting, _everyone(setting, model))
    part = walk(shortened, _everyone(shortened, model))
    for name, ranks in part.ranks.items():
        assert ranks.tolist() == whole.ranks[name][: len(ranks)].tolist(), name


def test_an_item_the_model_never_saw_is_found_from_its_users_alone(setting: StreamSetting, model: StreamModel) -> None:
    walked = walk(setting, [_pefa(setting, model)])
    items = setting.interactions.items[setting.split :]
    missed = setting.interactions.num_items
    answered = {"XS": 0, "XS alone": 0}
    for place in np.flatnonzero(~setting.known[items]):
        # The policy ignores two stars, and a user's first event has no state: neither stands behind an item.
        earlier = np.flatnonzero(items[:place] == items[place])
        rows = setting.split + earlier
        stars = setting.interactions.values[rows] != 2
        able, _ = model.queries(earlier)
        behind = len(set(setting.interactions.users[rows[[at for at in able if stars[at]]]].tolist()))
        assert walked.ranks["frozen"][place] == missed
        for name, least in (("XS", 3), ("XS alone", 1)):
            if behind < least or place not in place + model.queries(np.array([place]))[0]:
                assert walked.ranks[name][place] == missed
            else:
                answered[name] += 1
                assert walked.ranks[name][place] < missed
    assert answered["XS alone"] > answered["XS"] > 0


def test_a_retrained_model_knows_what_came_before_its_training(setting: StreamSetting, model: StreamModel) -> None:
    half = setting.num_streamed // 2
    retrained = stream_model(setting, untrained, seed=0, first=half)
    both = TrainedModels(setting, [model, retrained], name="retrained")
    walked = walk(setting, [both, TrainedModels(setting, [model], name="frozen")])
    assert walked.ranks["retrained"][:half].tolist() == walked.ranks["frozen"][:half].tolist()
    items = setting.interactions.items[setting.split :]
    arrived = np.isin(items, items[:half]) & ~setting.known[items] & (np.arange(len(items)) >= half)
    missed = setting.interactions.num_items
    assert arrived.any()
    assert (walked.ranks["frozen"][arrived] == missed).all()
    assert (walked.ranks["retrained"][arrived] < missed).any()


def test_popularity_ranks_by_faded_counts(setting: StreamSetting) -> None:
    walked = walk(setting, [StreamingPopularity(setting, half_life_events=10)])
    items, users = setting.interactions.items, setting.interactions.users
    for place in range(0, setting.num_streamed, 7):
        row = setting.split + place
        counts = np.zeros(setting.interactions.num_items)
        np.add.at(counts, items[:row], 0.5 ** ((row - np.arange(row)) / 10))
        others = np.setdiff1d(np.arange(len(counts)), items[:row][users[:row] == users[row]])
        expected = (counts[others] > counts[items[row]] * (1 + 1e-9)).sum()
        assert walked.ranks["popularity"][place] == (expected if counts[items[row]] else len(counts))


def test_neighbours_score_by_their_formula(setting: StreamSetting) -> None:
    settings = NeighbourSettings(window=3, recency=0.5, damping=0.7, shrink=2.0)
    walked = walk(setting, [StreamingItemNeighbours(setting, settings)])
    items, users = setting.interactions.items, setting.interactions.users
    num_items = setting.interactions.num_items
    for place in range(0, setting.num_streamed, 11):
        row = setting.split + place
        together, recent = np.zeros((num_items, num_items)), []
        for user in range(setting.interactions.num_users):
            own = items[:row][users[:row] == user]
            for at, item in enumerate(own):
                for other in own[max(0, at - 3) : at]:
                    together[item, other] += 1
                    together[other, item] += 1
            if user == users[row]:
                recent = own[::-1][:3].tolist()
        counts = np.bincount(items[:row], minlength=num_items)
        scores = 1e-9 * counts
        for ago, item in enumerate(recent):
            scores = scores + 0.5**ago * together[item] / np.sqrt(counts[item])
        scores = scores / (counts + 2.0) ** 0.7 if recent else scores
        others = np.setdiff1d(np.arange(num_items), items[:row][users[:row] == users[row]])
        target = items[row]
        above = (scores[others] > scores[target] * (1 + 1e-5) + 1e-12).sum()
        level = (scores[others] >= scores[target] * (1 - 1e-5) - 1e-12).sum()
        found = walked.ranks["item-kNN"][place]
        assert found == num_items if not counts[target] else above <= found <= level


def test_predicting_fewer_events_learns_from_all(setting: StreamSetting, model: StreamModel) -> None:
    every = walk(setting, _everyone(setting, model))
    some = walk(setting, _everyone(setting, model), predicted=np.arange(setting.num_streamed) % 3 == 0)
    assert some.places.tolist() == every.places[::3].tolist()
    for name, ranks in every.ranks.items():
        assert ranks[::3].tolist() == some.ranks[name].tolist(), name


def test_two_contenders_of_one_name_are_refused(setting: StreamSetting, model: StreamModel) -> None:
    frozen = TrainedModels(setting, [model], name="frozen")
    with pytest.raises(ValueError, match="'frozen' appears twice"):
        walk(setting, [frozen, frozen])


def test_a_model_share_of_one_leaves_frozen_items_as_they_are(setting: StreamSetting, model: StreamModel) -> None:
    feedback = FeedbackPolicy()
    still = RefreshedItems(setting, model, feedback, {"XS": 10_000}, share=SharePolicy.parse("frozen"))
    frozen = TrainedModels(setting, [model], name="frozen")
    walked = walk(setting, [still, frozen])
    assert walked.ranks["XS"].tolist() == walked.ranks["frozen"].tolist()
