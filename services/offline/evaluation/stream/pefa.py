"""PEFA in a stream by the serving code (algorithms/pefa). Each event is predicted from exactly the events before it.

`RefreshedItems` is XS: every event updates sums and item states. `WithVotes` adds XL to other rankers.

Letters: B events of a batch, C predicted ones, X items of the whole vocabulary, P_q, P_x components, d their width, k
neighbours.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from services.algorithms.ops.mol_scores import MolScorer
from services.algorithms.pefa.contribution import Contributions, cold_start_items, mean_gate
from services.algorithms.pefa.memory import MemoryEntry, QueryMemory
from services.algorithms.pefa.policy import NEW_ITEM_SHARE, FeedbackPolicy, SharePolicy
from services.algorithms.pefa.refresh import refreshed, unit
from services.algorithms.pefa.sums import ItemSums, SumsOf
from services.algorithms.pefa.votes import VotingIndex
from services.algorithms.scoring.states import ItemStates, PairGate, QueryStates
from services.offline.evaluation.stream.models import StreamModel
from services.offline.evaluation.stream.walk import BoolArray, EventBatch, IntArray, Ranker, Scores, StreamSetting

_ENOUGH_INTERACTIONS = 10


@dataclass(frozen=True, kw_only=True, slots=True)
class VoteSettings:
    """XL: number of voting neighbours, and the model's share lambda (equation 6)."""

    k: int
    share: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Feedback:
    """Weights of interactions by type and value; those before the stream have none."""

    policy: FeedbackPolicy

    def weights(self, setting: StreamSetting, rows: IntArray) -> npt.NDArray[np.float64]:
        """Return the interactions' weights (n,)."""
        events = setting.interactions
        types = [events.type_names[code] for code in events.types[rows].tolist()]
        return self.policy.weights(types, events.values[rows])


@dataclass(frozen=True, kw_only=True, slots=True)
class Refreshing:
    """Settings of XS.

    share: lambda of the model's items; new_share: of new items, whose state has length 1 - lambda. min_users: a new
    item is
    scored once it has so many users.
    """

    share: SharePolicy
    min_users: int
    new_share: SharePolicy = NEW_ITEM_SHARE


class RefreshedItems:
    """PEFA-XS: moves trained items toward their users' query states, and makes new items of such states alone."""

    def __init__(
        self, setting: StreamSetting, model: StreamModel, feedback: Feedback, variants: Mapping[str, Refreshing]
    ) -> None:
        """All variants read the same sums."""
        self._setting, self._model, self._feedback = setting, model, feedback
        self._variants = dict(variants)
        self._known_shares = _by_share({name: variant.share for name, variant in variants.items()})
        self._new_shares = _by_share({name: variant.new_share for name, variant in variants.items()})
        num_items = setting.interactions.num_items
        _, num_components, width = model.items.components.shape
        states = cold_start_items(
            num_items, num_components=num_components, width=width, mean_gate=mean_gate(model.items)
        )
        states.components[model.codes] = model.items.components
        if states.gate is not None and model.items.gate is not None:
            states.gate[model.codes] = model.items.gate
        self._base = states
        self._known = np.zeros(num_items, dtype=bool)
        self._known[model.codes] = True
        self._new = np.flatnonzero(~self._known)
        self._ids = [str(code) for code in range(num_items)]
        self._sums = ItemSums(num_components=num_components, width=width)
        self._contributions = Contributions(model.pair_gate, leave_out=model.user_component)
        self._users: dict[int, set[int]] = {}

    def step(self, batch: EventBatch) -> Mapping[str, Scores]:
        able, queries = self._model.queries(batch.places[batch.chosen])
        asked = _Asked(rows=able, queries=queries, num_rows=len(batch.chosen))
        users = np.array([len(self._users.get(code, ())) for code in range(len(self._ids))])
        found = {name: np.full((asked.num_rows, len(users)), -np.inf, np.float32) for name in self._variants}
        for codes, by_share in ((np.flatnonzero(self._known), self._known_shares), (self._new, self._new_shares)):
            sums = self._sums.of([self._ids[code] for code in codes])
            for share, names in by_share.items():
                scores = self._scores(asked, codes, sums, share)
                for name in names:
                    enough = self._known[codes] | (users[codes] >= self._variants[name].min_users)
                    found[name][:, codes[enough]] = scores[:, enough]
        self._learn_within(batch, asked, found)
        return found

    def _learn_within(self, batch: EventBatch, asked: "_Asked", found: Mapping[str, Scores]) -> None:
        """Learn event by event, adding each one's effect to the scores of later events."""
        learnt = self._to_learn(self._setting.split + batch.places)
        if not len(learnt):
            return
        sums, users = [], np.zeros(len(learnt), dtype=np.int64)
        for row in range(len(learnt)):
            one = slice(row, row + 1)
            self._sums.add(learnt.ids[one], learnt.contributions[one], learnt.weights[one])
            self._count_users(learnt.codes[one], learnt.users[one])
            sums.append(self._sums.of(learnt.ids[one]))
            users[row] = len(self._users.get(int(learnt.codes[row]), ()))
        firsts = np.searchsorted(batch.chosen, learnt.rows, side="right")
        is_known = self._known[learnt.codes]
        for rows, by_share in (
            (np.flatnonzero(is_known), self._known_shares),
            (np.flatnonzero(~is_known), self._new_shares),
        ):
            if not len(rows):
                continue
            after = _joined([sums[row] for row in rows])
            for share, names in by_share.items():
                effects = self._scores(asked, learnt.codes[rows], after, share)
                for name in names:
                    least = self._variants[name].min_users
                    for column, row in enumerate(rows.tolist()):
                        if is_known[row] or users[row] >= least:
                            found[name][firsts[row] :, learnt.codes[row]] = effects[firsts[row] :, column]

    def _scores(self, asked: "_Asked", codes: IntArray, sums: SumsOf, share: SharePolicy) -> Scores:
        """Scores (C, n); -inf without a query state."""
        scores = np.full((asked.num_rows, len(codes)), -np.inf, dtype=np.float32)
        if len(asked.rows) and len(codes):
            shares = share.model_share(sums.evidence, sums.coherence)
            states = refreshed(self._base_of(codes), sums.sums, shares)
            scores[asked.rows] = MolScorer(states, self._model.pair_gate).scores(asked.queries)
        return scores

    def behind(self, queries: QueryStates) -> dict[str, float]:
        """Return facts that explain XS's changes, as means over items with enough interactions; empty without such
        items.

        An average of queries is nearer to any query than a trained item is, so a new item's state must be shorter.
        """
        sums = self._sums.of(self._ids)
        enough = sums.counts >= _ENOUGH_INTERACTIONS
        known, new = np.flatnonzero(enough & self._known), np.flatnonzero(enough & ~self._known)
        if not len(known) or not len(new) or not len(queries):
            return {}
        directions = refreshed(self._base_of(known), sums.sums[known], np.zeros(len(known)))
        cosines = np.einsum("npd,npd->np", directions.components, self._base.components[known])
        arrived = refreshed(self._base_of(new), sums.sums[new], np.zeros(len(new)))
        gate = self._model.pair_gate
        return {
            "cosine of a known item's model state and what its interactions say": float(cosines.mean()),
            "coherence of a known item's interactions": float(sums.coherence[known].mean()),
            "similarity of a query and a known item, model alone": _mean_score(self._base_of(known), gate, queries),
            "the same items, interactions alone": _mean_score(directions, gate, queries),
            "a new item, interactions alone": _mean_score(arrived, gate, queries),
        }

    def _base_of(self, codes: IntArray) -> ItemStates:
        gate = None if self._base.gate is None else self._base.gate[codes]
        return ItemStates(components=self._base.components[codes], gate=gate)

    def _to_learn(self, rows: IntArray) -> "_Learnt":
        events, weights = self._setting.interactions, self._feedback.weights(self._setting, rows)
        able, queries = self._model.queries(rows - self._setting.split)
        able_rows, able_weights = rows[able], weights[able]
        codes = events.items[able_rows].astype(np.int64)
        added = self._contributions(queries, able_weights, self._base_of(codes))
        says = np.flatnonzero(able_weights != 0)
        return _Learnt(
            rows=able[says],
            codes=codes[says],
            ids=[self._ids[code] for code in codes[says].tolist()],
            users=events.users[able_rows[says]].astype(np.int64),
            contributions=added[says],
            weights=able_weights[says],
        )

    def _count_users(self, codes: IntArray, users: IntArray) -> None:
        for code, user in zip(codes.tolist(), users.tolist(), strict=True):
            if not self._known[code]:
                self._users.setdefault(code, set()).add(user)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Learnt:
    """`rows`: the interactions' positions in the requested rows."""

    rows: IntArray
    codes: IntArray
    ids: list[str]
    users: IntArray
    contributions: npt.NDArray[np.int64]
    weights: npt.NDArray[np.float64]

    def __len__(self) -> int:
        return len(self.rows)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Asked:
    """A batch's query states, and their rows among its `num_rows`."""

    rows: IntArray
    queries: QueryStates
    num_rows: int


def _mean_score(items: ItemStates, pair_gate: PairGate | None, queries: QueryStates) -> float:
    return float(MolScorer(items, pair_gate).scores(queries).mean())


def _by_share(shares: Mapping[str, SharePolicy]) -> dict[SharePolicy, list[str]]:
    """Names of one policy share their scores."""
    found: dict[SharePolicy, list[str]] = {}
    for name, share in shares.items():
        found.setdefault(share, []).append(name)
    return found


def _joined(parts: Sequence[SumsOf]) -> SumsOf:
    names = ("sums", "evidence", "coherence", "counts")
    return SumsOf(**{name: np.concatenate([getattr(part, name) for part in parts]) for name in names})


class WithVotes:
    """Scores of other rankers, each also with the votes of remembered interactions (PEFA-XL, equation 6).

    An item that a ranker does not score gets s = 0 once it has `min_users` contributors.
    """

    def __init__(
        self,
        setting: StreamSetting,
        model: StreamModel,
        feedback: Feedback,
        votes: Mapping[str, VoteSettings],
        inner: Sequence[Ranker],
        *,
        capacity: int,
        min_users: int,
    ) -> None:
        """The keys of `votes` name the variants: a result's name is the inner ranker's and the key."""
        self._setting, self._model, self._feedback, self._votes = setting, model, feedback, dict(votes)
        self._inner, self._min_users = list(inner), min_users
        _, num_components, width = model.before.states.components.shape
        self._kept = [component for component in range(num_components) if component != model.user_component]
        self._memory = QueryMemory(capacity=capacity, num_components=num_components, width=width)
        self._index = VotingIndex(
            num_components=num_components, width=width, model_version="stream", leave_out=model.user_component
        )
        self._nearest = max(one.k for one in votes.values())
        self._num_voters = self._num_on_seen = 0
        self._num_items = setting.interactions.num_items
        self._users: dict[int, set[int]] = {}

    def step(self, batch: EventBatch) -> Mapping[str, Scores]:
        found: dict[str, Scores] = {}
        for ranker in self._inner:
            found.update(ranker.step(batch))
        cast = self._cast(batch)
        answerable = self._answerable(batch)
        for inner, scores in list(found.items()):
            similarity = np.where(np.isneginf(scores) & answerable, np.float32(0), scores)
            for name, settings in self._votes.items():
                found[f"{inner}{name}"] = settings.share * similarity + (1 - settings.share) * cast[name]
        self._remember(self._setting.split + batch.places)
        return found

    @property
    def share_on_seen(self) -> float:
        """The share of voters whose item the user has seen: such votes change no answer."""
        return self._num_on_seen / max(1, self._num_voters)

    def _cast(self, batch: EventBatch) -> dict[str, npt.NDArray[np.float32]]:
        """Votes (C, X) of the k nearest interactions in the memory and earlier in the batch."""
        votes = {name: np.zeros((len(batch.chosen), self._num_items), dtype=np.float32) for name in self._votes}
        able, queries = self._model.queries(batch.places[batch.chosen])
        if not len(able):
            return votes
        new = self._to_remember(self._setting.split + batch.places)
        rows = np.array([int(entry.entry_id) for entry in new], dtype=np.int64) - self._setting.split - batch.places[0]
        recent = self._similarities(queries, new)
        for line, voters in enumerate(self._index.neighbours(queries, self._nearest)):
            row = int(able[line])
            earlier = np.flatnonzero(rows < batch.chosen[row])
            similarity = np.array([voter.similarity for voter in voters] + recent[line, earlier].tolist())
            codes = np.array([int(voter.item_id) for voter in voters] + [int(new[at].item_id) for at in earlier], int)
            weights = np.array([voter.weight for voter in voters] + [new[at].weight for at in earlier])
            ids = np.array([int(voter.entry_id) for voter in voters] + [int(new[at].entry_id) for at in earlier])
            # Equal states (one-event histories of one item) are common; ids break ties, as in the index.
            order = np.lexsort((ids, -np.round(similarity, 6)))
            self._num_voters += min(self._nearest, len(order))
            self._num_on_seen += int(batch.excluded[row, codes[order[: self._nearest]]].sum())
            for name, settings in self._votes.items():
                nearest = order[: settings.k]
                given = weights[nearest] * similarity[nearest] / settings.k
                votes[name][row] = np.bincount(codes[nearest], given, minlength=self._num_items)
        return votes

    def _similarities(self, queries: QueryStates, entries: Sequence[MemoryEntry]) -> npt.NDArray[np.float64]:
        """Mean cosine over the components (C, n), as in the index."""
        if not entries:
            return np.zeros((len(queries), 0))
        there = unit(np.stack([entry.components for entry in entries])[:, self._kept])
        cosines = np.einsum("cpd,npd->cn", unit(queries.components[:, self._kept]), there)
        return np.asarray(cosines / len(self._kept))

    def _answerable(self, batch: EventBatch) -> BoolArray:
        """Mask (C, X): items with enough contributors at each predicted event, the batch's included."""
        enough = np.array([len(self._users.get(code, ())) >= self._min_users for code in range(self._num_items)])
        answerable = np.repeat(enough[None], len(batch.chosen), axis=0)
        for place, (code, user) in enumerate(zip(batch.items.tolist(), batch.users.tolist(), strict=True)):
            users = self._users.setdefault(code, set())
            users.add(user)
            if len(users) == self._min_users:
                answerable[int(np.searchsorted(batch.chosen, place, side="right")) :, code] = True
        return answerable

    def _to_remember(self, rows: IntArray) -> list[MemoryEntry]:
        able, queries = self._model.queries(rows - self._setting.split)
        events, weights = self._setting.interactions, self._feedback.weights(self._setting, rows)
        return [
            MemoryEntry(
                entry_id=_entry_id(row),
                item_id=str(events.items[row]),
                components=queries.components[line].astype(np.float16),
                weight=float(weights[place]),
                interaction_type=events.type_names[events.types[row]],
                event_seconds=int(events.timestamps[row]),
            )
            for line, (place, row) in enumerate(zip(able.tolist(), rows[able].tolist(), strict=True))
            if weights[place] and self._memory.admits(_entry_id(row))
        ]

    def _remember(self, rows: IntArray) -> None:
        self._memory.add(self._to_remember(rows))
        changes = self._memory.take_changes()
        if changes.entered or changes.left:
            self._index.apply(upserts=changes.entered, removals=changes.left)


def _entry_id(row: int) -> str:
    return f"{row:010d}"
