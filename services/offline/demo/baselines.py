"""What the streaming answers are compared with: popularity, and the same model with user states frozen at the split.

Both leave out what the user has had, by the same rule as the system: the training past and every event of the replay
before the predicted one. Both are computed after the stream, so they cost it nothing. What learns from the stream
without a model is in `streaming_baselines`.

Letters: B users, X items, P_q components, d width.
"""

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from services.algorithms.bundle import Bundle
from services.algorithms.states import QueryStates
from services.offline.demo.measurement import HITS_AT
from services.offline.demo.plan import ReplayEvent


def top_k(order: Iterable[str], seen: set[str], *, k: int = HITS_AT) -> list[str]:
    """The first k items of `order` (best first) that are not in `seen`."""
    return list(itertools.islice((item_id for item_id in order if item_id not in seen), k))


def popularity_order(item_ids: Sequence[str], counts: npt.NDArray[np.integer]) -> list[str]:
    """Item ids by training count, most popular first; equal counts by item id."""
    descending = dict(zip(item_ids, (-counts).tolist(), strict=True))
    return sorted(item_ids, key=lambda item_id: (descending[item_id], item_id))


def seen_before(past: Mapping[str, set[str]], events: Sequence[ReplayEvent]) -> Iterator[tuple[ReplayEvent, set[str]]]:
    """Each predicted event with its user's seen items then (one live set: read it at once).

    `past` is what each user had before the split; `events` are the replay's, in sending order.
    """
    seen: dict[str, set[str]] = {}
    for event in events:
        known = seen.setdefault(event.user_id, set())
        if not known:
            known.update(past.get(event.user_id, ()))
        if event.predicted:
            yield event, known
        known.add(event.item_id)


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


def baseline_answers(
    bundle: Bundle,
    past: Mapping[str, set[str]],
    frozen: Mapping[str, npt.NDArray[np.int64]],
    events: Sequence[ReplayEvent],
) -> dict[str, list[list[str]]]:
    """Top tens of the predicted events, in sending order, by popularity and by the frozen states.

    `past`: what each user had before the split; `frozen`: each user's ranking of the catalogue at the split (see
    `rankings`). A user without one has no state to freeze: the answer is the popular one, as the system's would be.
    """
    popular = popularity_order(bundle.item_ids, bundle.counts)
    answers: dict[str, list[list[str]]] = {"frozen_state": [], "popularity": []}
    for event, seen in seen_before(past, events):
        ranking = frozen.get(event.user_id)
        own = popular if ranking is None else (bundle.item_ids[index] for index in ranking)
        for name, order in (("popularity", popular), ("frozen_state", own)):
            answers[name].append(top_k(order, seen))
    return answers
