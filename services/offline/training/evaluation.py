"""Score held-out events with a model, from the state just before each event.

Letters: B events at a time, X items.
"""

import numpy as np
import numpy.typing as npt
import torch

from services.algorithms.encoding.absence import buckets_of
from services.algorithms.ops.mol_scores import MolScorer
from services.algorithms.scoring.states import QueryStates
from services.offline.training.models.sequential import SequentialModel
from services.offline.training.sequences import Histories, IntArray, windows_before

_AT_ONCE = 256


class ModelScorer:
    """Scores events with a model, which it puts into evaluation mode.

    `user_index` (U,): a user's dense index in the model, or -1.
    """

    def __init__(self, model: SequentialModel, user_index: IntArray | None = None) -> None:
        self._model, self._user_index = model.eval(), user_index
        self._scorer = MolScorer(model.all_item_states(), model.pair_gate())
        self._absence = model.absence_rows()

    def scores(self, histories: Histories, events: IntArray, users: IntArray) -> npt.NDArray[np.floating]:
        states = states_before(self._model, histories, events, users, self._user_index)
        if self._absence is not None:
            states = self._absence.apply(states, buckets_of(histories.gaps(events), self._absence.shape))
        return self._scorer.scores(states)


@torch.no_grad()
def states_before(
    model: SequentialModel, histories: Histories, events: IntArray, users: IntArray, user_index: IntArray | None
) -> QueryStates:
    """Return the states (B,) before the positions `events` of users' histories, as `windows_before` cuts them.

    `user_index` (U,): a user's dense index in the model, or -1. At most 256 windows are encoded at a time.
    """
    device = model.item_embedding.weight.device
    parts = []
    for begin in range(0, len(events), _AT_ONCE):
        owners = users[begin : begin + _AT_ONCE]
        windows = windows_before(histories, events[begin : begin + _AT_ONCE], owners, model.encoder_shape.max_history)
        components, gate = model.states_at(
            torch.from_numpy(windows.items).to(device),
            torch.from_numpy(windows.times).to(device),
            None if user_index is None else torch.from_numpy(user_index[owners]).to(device),
            torch.from_numpy(windows.lengths - 1).unsqueeze(1).to(device),
        )
        parts.append(
            QueryStates(
                components=components.squeeze(1).cpu().numpy(),
                gate=None if gate is None else gate.squeeze(1).cpu().numpy(),
            )
        )
    return QueryStates.joined(parts)
