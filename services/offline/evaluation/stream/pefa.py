"""PEFA in a stream by the serving code (algorithms/pefa). Each event is predicted from exactly the events before it.

`RefreshedItems` is XS: every event updates sums and item states. `WithVotes` adds XL to other rankers.

Letters: X items of the whole vocabulary, k neighbours, n events.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from services.algorithms.ops.mol_scores import MolScorer
from services.algorithms.pefa.contribution import Contributions, cold_start_items, mean_gate
from services.algorithms.pefa.memory import MemoryEntry, QueryMemory
from services.algorithms.pefa.policy import NEW_ITEM_SHARE, FeedbackPolicy, SharePolicy
from services.algorithms.pefa.refresh import refreshed
from services.algorithms.pefa.sums import ItemSums
from services.algorithms.pefa.votes import VotingIndex
from services.offline.evaluation.stream.models import StreamModel
from services.offline.evaluation.stream.walk import Event, Ranker, Scores, StreamSetting


@dataclass(frozen=True, kw_only=True, slots=True)
class VoteSettings:
    """Settings of XL. k: number of neighbours that vote; share: the model's weight lambda (equation 6)."""

    k: int
    share: float


def _weights(policy: FeedbackPolicy, setting: StreamSetting) -> npt.NDArray[np.float64]:
    """Return the streamed interactions' weights (n,) by type and value; earlier events have none."""
    events = setting.interactions.select(slice(setting.split, len(setting.interactions)))
    return policy.weights([events.type_names[code] for code in events.types.tolist()], events.values)


class RefreshedItems:
    """PEFA-XS: move trained items toward their users' query states, and make new items from query states alone.

    share: lambda of the model's items; new_share: lambda of new items, whose state has length 1 - lambda.
    min_users: name of a variant -> the least number of users that a new item needs before the variant scores it.
    """

    def __init__(
        self,
        setting: StreamSetting,
        model: StreamModel,
        feedback: FeedbackPolicy,
        min_users: Mapping[str, int],
        *,
        share: SharePolicy,
        new_share: SharePolicy = NEW_ITEM_SHARE,
    ) -> None:
        self._model, self._min_users = model, dict(min_users)
        self._share, self._new_share = share, new_share
        self._weights = _weights(feedback, setting)
        num_items = setting.interactions.num_items
        _, num_components, width = model.items.components.shape
        gate = mean_gate(model.items)
        states = cold_start_items(num_items, num_components=num_components, width=width, mean_gate=gate)
        states.components[model.codes] = model.items.components
        if states.gate is not None and model.items.gate is not None:
            states.gate[model.codes] = model.items.gate
        self._base = states
        self._now = replace(states, components=states.components.copy())
        self._scorer: MolScorer | None = None
        self._known = np.zeros(num_items, dtype=bool)
        self._known[model.codes] = True
        self._sums = ItemSums(num_components=num_components, width=width)
        self._contributions = Contributions(model.pair_gate, leave_out=model.user_component)
        self._users: dict[int, set[int]] = {}
        self._num_users = np.zeros(num_items, dtype=np.int64)

    def scores(self, event: Event) -> Mapping[str, Scores]:
        found = {name: np.full(len(self._known), -np.inf, np.float32) for name in self._min_users}
        query = self._model.query(event.place)
        if query is not None:
            self._scorer = self._scorer or MolScorer(self._now, self._model.pair_gate)
            scores = self._scorer.scores(query)[0]
            for name, least in self._min_users.items():
                scored = self._known | (self._num_users >= least)
                found[name][scored] = scores[scored]
        return found

    def learn(self, event: Event) -> None:
        query, weight, code = self._model.query(event.place), self._weights[event.place : event.place + 1], event.item
        if query is None or not weight.any():
            return
        self._sums.add([str(code)], self._contributions(query, weight, self._base.take([code])), weight)
        sums, share = self._sums.of([str(code)]), self._share
        if not self._known[code]:
            share = self._new_share
            users = self._users.setdefault(code, set())
            users.add(event.user)
            self._num_users[code] = len(users)
        moved = refreshed(self._base.take([code]), sums.sums, share.model_share(sums.evidence, sums.coherence))
        self._now.components[code] = moved.components[0]
        self._scorer = None


class WithVotes:
    """Scores of other rankers, each also with the votes of remembered interactions (PEFA-XL, equation 6).

    An item that a ranker does not score gets s = 0 once it has `min_users` contributors.
    """

    def __init__(
        self,
        setting: StreamSetting,
        model: StreamModel,
        feedback: FeedbackPolicy,
        votes: Mapping[str, VoteSettings],
        inner: Sequence[Ranker],
        *,
        capacity: int,
        min_users: int,
    ) -> None:
        """Take the settings of each variant. A result's name is the inner ranker's name plus a key of `votes`."""
        self._setting, self._model, self._votes = setting, model, dict(votes)
        self._inner, self._min_users = list(inner), min_users
        self._weights = _weights(feedback, setting)
        _, num_components, width = model.states.components.shape
        self._memory = QueryMemory(capacity=capacity, num_components=num_components, width=width)
        self._index = VotingIndex(
            num_components=num_components, width=width, model_version="stream", leave_out=model.user_component
        )
        self._nearest = max(one.k for one in votes.values())
        self._users: dict[int, set[int]] = {}
        self._num_users = np.zeros(setting.interactions.num_items, dtype=np.int64)

    def scores(self, event: Event) -> Mapping[str, Scores]:
        found = {name: scores for ranker in self._inner for name, scores in ranker.scores(event).items()}
        cast = self._cast(event)
        answerable = self._num_users >= self._min_users
        for inner, scores in list(found.items()):
            similarity = np.where(np.isneginf(scores) & answerable, np.float32(0), scores)
            for name, settings in self._votes.items():
                found[f"{inner}{name}"] = settings.share * similarity + (1 - settings.share) * cast[name]
        return found

    def learn(self, event: Event) -> None:
        for ranker in self._inner:
            ranker.learn(event)
        users = self._users.setdefault(event.item, set())
        users.add(event.user)
        self._num_users[event.item] = len(users)
        query, weight, row = (
            self._model.query(event.place),
            self._weights[event.place],
            self._setting.split + event.place,
        )
        if query is None or not weight:
            return
        events = self._setting.interactions
        entry = MemoryEntry(
            entry_id=f"{row:010d}",
            item_id=str(event.item),
            components=query.components[0].astype(np.float16),
            weight=float(weight),
            interaction_type=events.type_names[events.types[row]],
            event_seconds=int(events.timestamps[row]),
        )
        self._memory.add([entry])
        changes = self._memory.take_changes()
        if changes.entered or changes.left:
            self._index.apply(upserts=changes.entered, removals=changes.left)
            if (index := self._index.index).merge_wanted.is_set():
                index.merge_wanted.clear()
                index.tidy()

    def _cast(self, event: Event) -> dict[str, npt.NDArray[np.float32]]:
        """Return each variant's votes (X,) of the k nearest remembered interactions."""
        query = self._model.query(event.place)
        voters = [] if query is None else self._index.neighbours(query, self._nearest)[0]
        codes = np.array([int(voter.item_id) for voter in voters], dtype=np.int64)
        given = np.array([voter.weight * voter.similarity for voter in voters])
        return {
            name: np.bincount(codes[: one.k], given[: one.k] / one.k, minlength=len(self._num_users)).astype(np.float32)
            for name, one in self._votes.items()
        }
