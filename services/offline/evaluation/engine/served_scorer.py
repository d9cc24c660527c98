"""Score with a bundle as its processes do, by the ONNX encoder, states, mixture and neighbours.

Letters: B events, X items of the data.
"""

import time
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from services.algorithms.bundles.model_bundle import Bundle
from services.algorithms.ops.mol_scores import MolScorer
from services.offline.datasets import Interactions
from services.offline.evaluation.engine.served_states import Person, ServedStates, stored_events
from services.offline.training.sequences import Histories, IntArray


class ServedScorer:
    """Scores in the data's order of items; -inf for items without a score."""

    def __init__(self, bundle: Bundle, data: Interactions, *, clock: Callable[[], float] = time.process_time) -> None:
        self._bundle, self._data, self._clock = bundle, data, clock
        self._states = ServedStates(bundle)
        self._scorer = MolScorer(bundle.item_states, bundle.pair_gate)
        self._rows, _ = data.by_user()
        # Each item's row in the bundle, or -1.
        self._item = np.array([bundle.item_index.get(item_id, -1) for item_id in data.item_ids], dtype=np.int64)
        self._against = data.speaking_against(bundle.event_schema)
        self._popular = bundle.counts / max(1, bundle.counts.sum())
        self._seconds: list[float] = []  # seconds per event, by batch

    @property
    def seconds_per_event(self) -> float:
        """Return the median over batches, which a slow first batch and pauses of the machine hardly change."""
        return float(np.median(self._seconds))

    def scores(self, histories: Histories, events: IntArray, users: IntArray) -> npt.NDArray[np.floating]:
        began = self._clock()
        past = [self._rows[histories.offsets[user] : event] for event, user in zip(events, users, strict=True)]
        people = [
            Person(self._data.user_ids[user], stored_events(self._data, rows), as_of)
            for user, rows, as_of in zip(users.tolist(), past, histories.times[events].tolist(), strict=True)
        ]
        states, known = self._states(people)
        own = np.broadcast_to(self._popular, (len(events), len(self._popular))).astype(np.float64)
        if len(known):
            own[known] = self._final(self._scorer.scores(states), [past[row] for row in known.tolist()])
        found = np.full((len(events), len(self._item)), -np.inf)
        here = self._item >= 0
        found[:, here] = own[:, self._item[here]]
        self._seconds.append((self._clock() - began) / len(events))
        return found

    def _final(self, scores: npt.NDArray[np.floating], past: Sequence[IntArray]) -> npt.NDArray[np.float64]:
        near = self._bundle.neighbours
        if near is None:
            return scores.astype(np.float64)
        share = near.shape.model_share
        final = share * scores.astype(np.float64)
        for row, rows in enumerate(past):
            newest_first = rows[::-1][self._item[self._data.items[rows[::-1]]] >= 0]
            seen = self._item[self._data.items[newest_first]]
            distinct, newest = np.unique(seen, return_index=True)
            votes = np.sort(newest[~self._against[newest_first[newest]]])
            voted, values = near.votes(seen[votes], distinct)
            final[row, voted] += (1 - share) * values
        return final
