"""Reserved positions of an answer get the user's best new items (decision 056)."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from random import Random

from services.algorithms.rules.reserved_positions import MAX_POSITIONS, draw_slots
from services.contracts.wire import PackedQueryState
from services.gateway.domain import Ranking, RecommendQuery, ScoredItem
from services.gateway.recommend.popular import PopularItems
from services.gateway.recommend.rankings import rescored, within_rules
from services.gateway.stages import Preferences, Stages, Work

# How many newest items are scored, and from how many of the best the draw chooses.
MAX_NEW, NEW_DRAWN_FROM = 500, 20


@dataclass(frozen=True, slots=True, kw_only=True)
class NewItems:
    """Draws new items."""

    stages: Stages
    popular: PopularItems
    rng: Random
    preferences: Preferences

    async def among(
        self, work: Work[RecommendQuery], state: PackedQueryState, ranking: Ranking, asked_ms: int
    ) -> Ranking:
        """Return the ranking with new items, each once, at some positions."""
        query, items = work.query, ranking.items
        share = self.preferences.new_item_share if query.new_item_share is None else query.new_item_share
        if not share or not (fresh := self._fresh(query, items, asked_ms)):
            return ranking
        is_ruled = bool(query.rules or query.max_per_category or work.discounts)
        found = await self.stages.search(work, state, len(fresh) if is_ruled else NEW_DRAWN_FROM, fresh)
        if found is None:
            return ranking
        free, new = list(range(len(items))), list(found.items)
        if is_ruled:
            free = self._not_pinned(query, items)
            new = self._admitted(work, items, free, new, share)
        if not new:
            return ranking
        slots = draw_slots(len(free), len(new), share, self.rng)
        drawn = list(items)
        for at, row, chance in zip(free, slots.rows, slots.propensities, strict=True):
            one = items[free[row]] if row >= 0 else replace(new[-1 - row], source="new")
            drawn[at] = replace(one, propensity=chance)
        return replace(ranking, items=drawn)

    def _fresh(self, query: RecommendQuery, items: Sequence[ScoredItem], asked_ms: int) -> list[str]:
        asked_for, in_answer = frozenset(query.filter.allow_item_ids), {item.item_id for item in items}
        fresh = [
            item_id
            for item_id in self.popular.newest(asked_ms - round(self.preferences.new_item_age_s * 1000), MAX_NEW)
            if item_id not in in_answer and (not asked_for or item_id in asked_for)
        ]
        for rule in query.rules:
            if rule.bury:  # a reserved position does not lift a buried item
                (buried,) = self.popular.named(fresh, [rule.which])
                fresh = [item_id for item_id, is_buried in zip(fresh, buried, strict=True) if not is_buried]
        return fresh

    def _not_pinned(self, query: RecommendQuery, items: Sequence[ScoredItem]) -> list[int]:
        free, end = list(range(len(items))), len(items)
        for pin in sorted({rule.pin for rule in query.rules if rule.pin}, reverse=True):
            # A pin beyond the answer's end is at the last position.
            at = min(pin, end) - 1
            there = [item.item_id for item in items[at : at + 1]]
            which = [rule.which for rule in query.rules if rule.pin == pin]
            if any(mask.any() for mask in self.popular.named(there, which)):
                free.remove(at)
                end = at
        return free

    def _admitted(
        self,
        work: Work[RecommendQuery],
        items: Sequence[ScoredItem],
        free: Sequence[int],
        new: Sequence[ScoredItem],
        share: float,
    ) -> list[ScoredItem]:
        """Return rescored new items. Together with the items that no draw replaces, they fit the limits."""
        query, in_answer = work.query, {item.item_id for item in items}
        scored = rescored(new, query, work.discounts, self.popular)
        admitted: list[ScoredItem] = []
        for dropped in (math.floor(share * min(len(free), MAX_POSITIONS)), 0):
            gone = set(free[len(free) - dropped :])
            kept = [item for row, item in enumerate(items) if row not in gone]
            both = within_rules([*kept, *scored], len(items) + NEW_DRAWN_FROM, query, self.popular, pins=False)
            admitted = [item for item in both if item.item_id not in in_answer][:NEW_DRAWN_FROM]
            if len(admitted) >= dropped:
                break
        return admitted
