"""Does it help to know what was turned down? Ranks of what people took next, of models trained before that time.

One event at a time, from everything that its person did before, with seen items left out. Ratings of 4 stars or more
are likes, of 2 or less dislikes.

Letters: E events, X items.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from services.algorithms.bundles.model_bundle import Bundle
from services.algorithms.ops.mol_scores import MolScorer
from services.contracts.stored_history import StoredEvent
from services.offline.datasets import Interactions
from services.offline.evaluation.engine.served_states import Person, ServedStates, stored_events
from services.offline.training.neighbours import learn_neighbours

LIKED, DISLIKED = 4.0, 2.0
_AT_ONCE = 64

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, slots=True)
class Asked:
    """E events (rows of the data), with what their people did before each (rows, oldest first)."""

    data: Interactions
    rows: Ints
    before: list[Ints]

    @property
    def is_liked(self) -> npt.NDArray[np.bool_]:
        return np.asarray(self.data.values[self.rows] >= LIKED)

    @property
    def is_disliked(self) -> npt.NDArray[np.bool_]:
        return np.asarray(self.data.values[self.rows] <= DISLIKED)


def asked_after(data: Interactions, first_row: int, count: int, seed: int) -> Asked:
    """A sample of the events from `first_row` on whose people did something before."""
    order, offsets = data.by_user()
    place = np.empty(len(data), dtype=np.int64)
    place[order] = np.arange(len(data)) - np.repeat(offsets[:-1], np.diff(offsets))
    late = np.arange(first_row, len(data))
    late = late[place[late] > 0]
    generator = np.random.default_rng(seed)
    rows = np.sort(generator.choice(late, min(count, len(late)), replace=False))
    starts = offsets[data.users[rows]]
    before = [order[start : start + many] for start, many in zip(starts, place[rows], strict=True)]
    return Asked(data=data, rows=rows, before=before)


def ranks_by_arm(bundle: Bundle, asked: Asked, say: Callable[[str], None]) -> dict[str, Ints]:
    """By arm, the rank of each event's item (E,); one that the model does not know has rank X + 1.

    Arms are ways to ask a model of items and times; one that reads actions has its own.
    """
    data = asked.data
    alike = [
        Person(data.user_ids[data.users[row]], stored_events(data, past), int(data.timestamps[row]))
        for row, past in _each(asked)
    ]
    if bundle.encoder.actions:
        return _ranks(bundle, asked, {"actions encoded": (alike, False), "encoded and led away": (alike, True)}, say)
    named = [Person(one.user_id, [_by_name(event) for event in one.events], one.as_of) for one in alike]
    arms = {
        "all events alike": (alike, False),
        "led away (served)": (alike, True),
        "turned down left out": (named, False),
        "left out and led away": (named, True),
    }
    return _ranks(bundle, asked, arms, say) | {"item neighbours alone": _ranks_by_neighbours(bundle, asked, say)}


def _ranks(
    bundle: Bundle, asked: Asked, arms: Mapping[str, tuple[list[Person], bool]], say: Callable[[str], None]
) -> dict[str, Ints]:
    """arms: by name, the people, and whether what they turned down leads their states away."""
    data, found = asked.data, {}
    scorer = MolScorer(bundle.item_states, bundle.pair_gate)
    index = np.array([bundle.item_index.get(item_id, -1) for item_id in data.item_ids])
    for name, (people, leads_away) in arms.items():
        say(name)
        states, known = ServedStates(bundle, leads_away=leads_away)(people)
        ranks = np.full(len(asked.rows), bundle.num_items + 1)
        for start in range(0, len(known), _AT_ONCE):
            scores = scorer.scores(states.take(slice(start, start + _AT_ONCE)))
            for number, mine in zip(known[start : start + _AT_ONCE].tolist(), scores, strict=True):
                ranks[number] = _rank(mine, index, asked, number)
        found[name] = ranks
    return found


def _ranks_by_neighbours(bundle: Bundle, asked: Asked, say: Callable[[str], None]) -> Ints:
    say("item neighbours")
    data = asked.data
    learnt = learn_neighbours(data.select(slice(0, int(bundle.manifest.data["events"]))))
    ranks = np.full(len(asked.rows), bundle.num_items + 1)
    for number, past in enumerate(asked.before):
        recent = list(dict.fromkeys(data.items[past[::-1]].tolist()))
        rows, votes = learnt.votes(recent, recent)
        scores = np.full(data.num_items, -np.inf)
        scores[rows] = votes
        ranks[number] = _rank(scores, np.arange(data.num_items), asked, number)
    return ranks


def _each(asked: Asked) -> list[tuple[int, Ints]]:
    return list(zip(asked.rows.tolist(), asked.before, strict=True))


def _by_name(event: StoredEvent) -> StoredEvent:
    return event._replace(type="dislike") if event.value <= DISLIKED else event


def _rank(scores: npt.NDArray[np.floating], index: Ints, asked: Asked, number: int) -> int:
    """1 + the unseen items that score as high or higher; one past all for an item that has no score."""
    wanted = index[asked.data.items[asked.rows[number]]]
    if wanted < 0 or not np.isfinite(scores[wanted]):
        return len(scores) + 1
    seen = index[asked.data.items[asked.before[number]]]
    others = scores.copy()
    others[seen[seen >= 0]] = -np.inf
    others[wanted] = -np.inf
    return 1 + int((others >= scores[wanted]).sum())
