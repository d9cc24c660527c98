"""Measure how long a new item's state may be (decision 015), on trained items that it treats as new.

The sum of three users' query states gives the new state's direction. Other users who took the item then score both this
state and the trained state with their query states.

Letters: B users, M positions of a history, n interactions, k items, q queries, P_q query components, P pairs, d width.
"""

import numpy as np
import torch

from services.algorithms.encoding.actions import STRIDE
from services.algorithms.ops.mol_scores import MolScorer
from services.algorithms.pefa.contribution import Contributions, cold_start_items, mean_gate
from services.algorithms.pefa.refresh import refreshed
from services.algorithms.scoring.states import FloatArray, ItemStates, QueryStates
from services.offline.datasets import Interactions
from services.offline.training.models.sequential import SequentialModel
from services.offline.training.sequences import Histories, IntArray, windows_before

# Measuring takes two seconds with 2 blocks, twenty with 8 blocks and 200 events.
_USERS = 1000
_POSITIONS = 24
_USERS_PER_BATCH = 64
# The refresher's default `min_users`: searches must find an item with this many contributors.
_EARLY = 3
_LATER = 4
# With fewer items the measured ratio is too uncertain.
_FEWEST_ITEMS = 20
# A smaller ratio shows a poorly trained model: it scores the items that a user took no better than others. Without a
# measurement the length is a half (policy.NEW_ITEM_SHARE).
_LEAST = 0.5


def measure_new_item_length(model: SequentialModel, interactions: Interactions) -> float | None:
    """Return the length in [.5, 1] of a new item's components at which it scores like a trained item; None with too few
    data, or if users with the same items are no more similar than others.

    It uses 24 interactions of each of 1,000 users, and the items that at least four of these users took. So each item
    counts about as often as users take it. If items were drawn uniformly, the length for the 8x4x64 model would be .36
    instead of .53, and new items of this length would not be found. The user-id component is omitted, as for unknown
    users. On MovieLens-1M the result is .52 for the 8x4x64 model, where .5 to .55 is best, and .96 for 4x2x32.
    """
    users, items, queries = _taken(model, Histories.of(interactions))
    early, later, owner = _early_and_later(users, items)
    if len(early) < _FEWEST_ITEMS:
        return None
    catalogue, pair_gate, rows = model.all_item_states(), model.pair_gate(), items[early[:, 0]]
    trained = ItemStates(
        components=catalogue.components[rows], gate=None if catalogue.gate is None else catalogue.gate[rows]
    )
    directions = _directions(model, _rows(queries, early.ravel()), trained, mean_gate(catalogue))
    by_model, by_memory = (
        np.concatenate(MolScorer(states, pair_gate).scores_at(_rows(queries, later), list(owner[:, None])))
        for states in (trained, directions)
    )
    ahead, behind = (float(one.astype(np.float64).mean()) for one in (by_model, by_memory))
    if not ahead > 0 or not behind > 0:
        return None
    return round(min(max(_LEAST, ahead / behind), 1.0), 4)


@torch.no_grad()
def _taken(model: SequentialModel, histories: Histories) -> tuple[IntArray, IntArray, QueryStates]:
    """Return users (n,) and items (n,) of distinct interactions, and the states before these (n, P_q, d)."""
    rng = np.random.default_rng(0)
    shape, head = model.encoder_shape, model.head_shape
    device = model.item_embedding.weight.device
    chosen = rng.permutation(np.flatnonzero(np.diff(histories.offsets) >= 2))[:_USERS]
    nothing = np.zeros(0, np.int64)
    users, items = [nothing], [nothing]
    components = [np.zeros((0, head.num_query_components, head.component_width), np.float32)]
    gates = [np.zeros((0, head.num_pairs), np.float32)]
    for begin in range(0, len(chosen), _USERS_PER_BATCH):
        batch = chosen[begin : begin + _USERS_PER_BATCH]
        windows = windows_before(histories, histories.offsets[batch + 1], batch, shape.max_history)
        # The window's last state has no known next event; a window can have one event only.
        positions = rng.integers(0, np.maximum(windows.lengths - 1, 1)[:, None], (len(batch), _POSITIONS))
        following = np.minimum(positions + 1, windows.items.shape[1] - 1)
        targets = np.take_along_axis(windows.items % STRIDE, following, axis=1)
        keep = (positions + 1 < windows.lengths[:, None]).ravel()
        nobody = torch.full((len(batch),), -1, device=device) if shape.uses_user_index else None
        made, gate = model.states_at(
            torch.from_numpy(windows.items).to(device),
            torch.from_numpy(windows.times).to(device),
            nobody,
            torch.from_numpy(positions).to(device),
        )
        users.append(np.repeat(batch, _POSITIONS)[keep])
        items.append(targets.ravel()[keep])
        components.append(made.flatten(0, 1).cpu().numpy()[keep])
        if gate is not None:
            gates.append(gate.flatten(0, 1).cpu().numpy()[keep])
    who, what = np.concatenate(users), np.concatenate(items)
    states = QueryStates(components=np.concatenate(components), gate=np.concatenate(gates) if head.is_mixture else None)
    once = np.unique(who * model.num_items + what, return_index=True)[1]
    return who[once], what[once], _rows(states, once)


def _early_and_later(users: IntArray, items: IntArray) -> tuple[IntArray, IntArray, IntArray]:
    """Choose the k items that at least four users took. Return three interactions of each item (k, 3), up to four
    further interactions of each (q,), and for each of these q the row of its item among the k (q,).
    """
    shuffled = np.random.default_rng(1).permutation(len(users))
    order = shuffled[np.argsort(items[shuffled], kind="stable")]
    _, starts, counts = np.unique(items[order], return_index=True, return_counts=True)
    starts, counts = starts[counts > _EARLY], counts[counts > _EARLY]
    early = order[starts[:, None] + np.arange(_EARLY)]
    owner, nth = np.nonzero(np.arange(_EARLY, _EARLY + _LATER) < counts[:, None])
    return early, order[starts[owner] + _EARLY + nth], owner


def _directions(model: SequentialModel, early: QueryStates, trained: ItemStates, gate: FloatArray | None) -> ItemStates:
    """Return the states that a refresher would give the k items if they were new, at full length, from 3 k early
    states. gate (P,): the gate of a new item.
    """
    num_items, num_components, width = trained.components.shape
    leave_out = early.components.shape[1] - 1 if model.encoder_shape.uses_user_index else None
    rows = cold_start_items(len(early), num_components=num_components, width=width, mean_gate=gate)
    added = Contributions(model.pair_gate(), leave_out=leave_out)(early, np.ones(len(early)), rows)
    sums = added.reshape(num_items, _EARLY, num_components, width).sum(axis=1).astype(np.float64)
    base = cold_start_items(num_items, num_components=num_components, width=width, mean_gate=gate)
    return refreshed(base, sums, np.zeros(num_items))


def _rows(states: QueryStates, rows: IntArray) -> QueryStates:
    return QueryStates(components=states.components[rows], gate=None if states.gate is None else states.gate[rows])
