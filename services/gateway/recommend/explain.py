"""Explain: find the user's state as Recommend does, then explain one item's score.

If a part is unavailable, the call fails: the part must not count as zero. Without a state, the answer has no score, as
in Recommend.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from services.algorithms.rules.ranking_rules import Rule
from services.algorithms.scoring.packed_state import after_absence
from services.contracts.wire import ExplainedScore, ItemVotes
from services.gateway.domain import Event, ExplainQuery, Seen, last_event_ms, seen_in, turned_down_in
from services.gateway.recommend.popular import PopularItems
from services.gateway.recommend.standing_rules import LiveRules
from services.gateway.stages import FoundState, Stages
from services.gateway.validation import check_explain, with_times
from services.platform.threads import in_turn
from services.user_state.values import now_ms

MAX_PAST = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class PastInteraction:
    """One of the user's interactions; an unknown title is empty."""

    item_id: str
    title: str
    age_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """The answer. Without a state (state_source "none") score and parts are absent."""

    model_version: str
    state_source: str
    absence_bucket: int = 0
    similarity: ExplainedScore | None = None
    votes: ItemVotes | None = None
    history: Sequence[PastInteraction] = ()
    rules: Sequence[Rule] = ()

    @property
    def score_with_rules(self) -> float:
        return self.score + sum(rule.adds for rule in self.rules)

    @property
    def parts(self) -> tuple[float, float, float]:
        """The parts of the final score: from the model's own components, from refreshed ones, and from votes."""
        if self.similarity is None:
            return (0.0, 0.0, 0.0)
        weight = 1.0 if self.votes is None else self.votes.model_share
        vote = 0.0 if self.votes is None else self.votes.vote
        return (weight * self.similarity.from_model, weight * self.similarity.from_interactions, (1 - weight) * vote)

    @property
    def score(self) -> float:
        """model_share * s + (1 - model_share) * vote."""
        return sum(self.parts)

    @property
    def shares(self) -> tuple[float, float, float]:
        """Each part's share of the sum of absolute values: with opposite signs, a part can be larger than the score."""
        sizes = [abs(part) for part in self.parts]
        total = sum(sizes)
        if total == 0:
            return (0.0, 0.0, 0.0)
        model, refreshed, votes = (size / total for size in sizes)
        return (model, refreshed, votes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Explain:
    """The handler."""

    stages: Stages
    items: PopularItems
    rules: LiveRules

    async def __call__(self, query: ExplainQuery) -> Explanation:
        """Explain a score. Raises: InvalidRequest; NotFound for an item that no index serves; a component's error."""
        asked_ms = now_ms()
        await in_turn(check_explain, query, asked_ms, self.stages.model.kinds)
        rules = (*self.rules.now.rules, *query.rules, *query.arm_rules)
        found, history = await self._find_state(query, asked_ms)
        if found.query_state is None:
            return Explanation(model_version=self.stages.model.version, state_source=found.source)
        state, bucket = after_absence(found.query_state, self.stages.model.absence, found.last_event_ms, asked_ms)
        newest = sorted(history, key=_time)[::-1]
        past = newest[:MAX_PAST]
        seen = Seen(seen_in(newest, self.stages.model.schema), turned_down_in(newest[::-1], self.stages.model.schema))
        timeout_s = self.stages.limits.stage_timeout_s
        similarity, votes = await asyncio.gather(
            self.stages.ports.reranker.explain(
                state, query.item_id, max_pairs=query.max_pairs, rules=rules, timeout_s=timeout_s
            ),
            self.stages.ports.candidates.explain_votes(state, query.item_id, seen=seen, timeout_s=timeout_s),
        )
        return Explanation(
            model_version=self.stages.model.version,
            state_source=found.source,
            absence_bucket=bucket,
            similarity=similarity,
            votes=votes,
            history=[
                PastInteraction(item_id=event.item_id, title=title, age_seconds=max(0, asked_ms - _time(event)) / 1000)
                for event, title in zip(past, self.items.titles_of([event.item_id for event in past]), strict=True)
            ],
            rules=[rules[place] for place in similarity.rules],
        )

    async def _find_state(self, query: ExplainQuery, asked_ms: int) -> tuple[FoundState, Sequence[Event]]:
        """Return the state of the request's history, else the stored state, else the state of the stored history."""
        if query.history:
            history: Sequence[Event] = with_times(query.history, asked_ms)
            source = "request"
        else:
            view, history = await asyncio.gather(
                self.stages.ports.states.read_user(query.user_id, self.stages.model.version, with_seen=False),
                self.stages.ports.states.read_events(query.user_id),
            )
            if view.state is not None and (view.reaches_history or not view.has_history):
                return FoundState.of_stored(view.state), history
            source = "stored_history"
        if not history:
            return FoundState(), ()
        encoded = await self.stages.ports.encoder.encode(query.user_id, history, self.stages.limits.stage_timeout_s)
        if encoded.query_state is None:
            return FoundState(), history
        last_ms = last_event_ms(history, self.stages.model.schema)
        return FoundState(query_state=encoded.query_state, last_event_ms=last_ms, source=source), history


def _time(event: Event) -> int:
    return event.event_time_ms or 0
