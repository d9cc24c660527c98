"""What the streaming answers are compared with: popularity, and the same model with user states frozen at the split.

Both leave out what the user has had, by the same rule as the system: the training past and every event of the replay
before the predicted one. Both are computed after the stream, so they cost it nothing. What learns from the stream
without a model is in `streaming_baselines`.

Letters: B users, X items, P_q components, d width.
"""

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from services.algorithms.bundle import Bundle
from services.algorithms.states import QueryStates
from services.offline.demo.measurement import HITS_AT


def top_k(order: Iterable[str], seen: set[str], *, k: int = HITS_AT) -> list[str]:
    """The first k items of `order` (best first) that are not in `seen`."""
    return list(itertools.islice((item_id for item_id in order if item_id not in seen), k))


def popularity_order(item_ids: Sequence[str], counts: npt.NDArray[np.integer]) -> list[str]:
    """Item ids by training count, most popular first; equal counts by item id."""
    descending = dict(zip(item_ids, (-counts).tolist(), strict=True))
    return sorted(item_ids, key=lambda item_id: (descending[item_id], item_id))


def seen_before(
    past: Mapping[str, set[str]], users: Sequence[str], items: Sequence[str], predicted: npt.NDArray[np.bool_]
) -> Iterator[tuple[int, set[str]]]:
    """For each predicted event, its position and the user's seen items then (one live set: read it at once).

    `past` is what each user had before the split; `users` and `items` are the replay's events in sending order.
    """
    seen: dict[str, set[str]] = {}
    for position, (user, item) in enumerate(zip(users, items, strict=True)):
        known = seen.get(user)
        if known is None:
            known = seen[user] = set(past.get(user, ()))
        if predicted[position]:
            yield position, known
        known.add(item)


def rankings(bundle: Bundle, states: Mapping[str, QueryStates], *, batch: int = 64) -> dict[str, npt.NDArray[np.int64]]:
    """Every item's dense index, best first, for each user's one query state (B = 1 each), by the full model."""
    from services.algorithms.ops.mol_scores import mol_scores

    users = list(states)
    ranked: dict[str, npt.NDArray[np.int64]] = {}
    for start in range(0, len(users), batch):
        some = users[start : start + batch]
        gates = [states[user].gate for user in some]
        queries = QueryStates(
            components=np.concatenate([states[user].components for user in some]),
            gate=None if gates[0] is None else np.concatenate([gate for gate in gates if gate is not None]),
        )
        scores = np.asarray(mol_scores(queries, bundle.item_states, bundle.pair_gate))
        ranked.update(zip(some, np.argsort(-scores, axis=1, kind="stable"), strict=True))
    return ranked


@dataclass(frozen=True, kw_only=True, slots=True)
class BaselineAnswers:
    """Top tens of the predicted events, in sending order, M of them each."""

    popularity: list[list[str]]
    frozen_state: list[list[str]]


def baseline_answers(
    *,
    bundle: Bundle,
    past: Mapping[str, set[str]],
    frozen: Mapping[str, npt.NDArray[np.int64]],
    users: Sequence[str],
    items: Sequence[str],
    predicted: npt.NDArray[np.bool_],
) -> BaselineAnswers:
    """What popularity and the frozen states would have answered at each predicted event.

    `past`: what each user had before the split; `frozen`: each user's ranking of the catalogue at the split (see
    `rankings`). A user without one has no state to freeze: the answer is the popular one, as the system's would be.
    """
    popular = popularity_order(bundle.item_ids, bundle.counts)
    item_ids = bundle.item_ids
    by_popularity: list[list[str]] = []
    by_frozen_state: list[list[str]] = []
    for position, seen in seen_before(past, users, items, predicted):
        by_popularity.append(top_k(popular, seen))
        ranking = frozen.get(users[position])
        named = popular if ranking is None else (item_ids[index] for index in ranking)
        by_frozen_state.append(top_k(named, seen))
    return BaselineAnswers(popularity=by_popularity, frozen_state=by_frozen_state)
