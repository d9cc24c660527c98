"""The whole model, built from a bundle's shapes: item embeddings, an encoder of histories, and a head for both.

Letters: B batch, L history length, D width, X items, M positions per history, P_q, P_x components, P = P_q * P_x.
"""

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from services.algorithms.bundles.model_manifest import AbsenceShape, EncoderShape, HeadShape
from services.algorithms.encoding.absence import AbsenceRows
from services.algorithms.encoding.actions import STRIDE
from services.algorithms.scoring.states import ItemStates, PairGate
from services.offline.training.models.hstu import HstuEncoder, Past
from services.offline.training.models.mol import NO_DROPOUT, DotHead, Dropouts, MolHead
from services.offline.training.models.sasrec import SasRecEncoder

PADDING = -1


class SequentialModel(nn.Module):
    """Computes states of users, from their histories, and of items. The global random generator initialises it."""

    def __init__(
        self,
        encoder: EncoderShape,
        head: HeadShape,
        *,
        num_items: int,
        num_users: int = 0,
        dropouts: Dropouts = NO_DROPOUT,
        start_noise: float = 0.0,
        absence: AbsenceShape | None = None,
    ) -> None:
        super().__init__()
        if encoder.uses_user_index != (num_users > 0):
            needed = "at least 1" if encoder.uses_user_index else "0"
            raise ValueError(f"num_users={num_users}; uses_user_index={encoder.uses_user_index} needs {needed}")
        if num_users and not head.is_mixture:
            raise ValueError("a dot head has no user-id component; allowed: num_users=0")
        self.encoder_shape, self.head_shape, self.num_items = encoder, head, num_items
        self.absence_shape = absence
        self.item_embedding = nn.Embedding(num_items, encoder.width)
        nn.init.trunc_normal_(self.item_embedding.weight, std=0.02, a=-0.04, b=0.04)
        # Rows start at zero, so the untrained model equals one without actions; row 0 stays zero. In training only, the
        # outcome of a target that is not positive changes the state.
        self.action_embedding: nn.Embedding | None = None
        self.outcome_embedding: nn.Embedding | None = None
        if encoder.actions:
            self.action_embedding, self.outcome_embedding = (
                nn.Embedding(size, encoder.width, padding_idx=0, _weight=torch.zeros(size, encoder.width))
                for size in [1 + len(encoder.actions)] * 2
            )
        kind = HstuEncoder if encoder.kind == "hstu" else SasRecEncoder
        self.encoder = kind(encoder, dropout=dropouts.encoder)
        self.head: MolHead | DotHead
        if head.is_mixture:
            self.head = MolHead(head, encoder.width, num_users=num_users, dropouts=dropouts, start_noise=start_noise)
        else:
            self.head = DotHead(head, encoder.width, item_dropout=dropouts.item)
        # Rows start at zero; row 0 is never read.
        if absence is not None:
            rows = (absence.num_buckets, head.num_query_components, head.component_width)
            self.absence_components = nn.Parameter(torch.zeros(rows))
            if head.is_mixture:
                self.absence_gate = nn.Parameter(torch.zeros(absence.num_buckets, head.num_pairs))

    def encode(self, item_index: Tensor, event_time: Tensor) -> Tensor:
        """Encode histories: item_index (B, L), the dense index plus its action's row * STRIDE, PADDING at the end of
        rows; event_time (B, L) s -> (B, L, D).
        """
        if item_index.shape[1] > self.encoder_shape.max_history:
            raise ValueError(f"history length={item_index.shape[1]}; allowed: at most {self.encoder_shape.max_history}")
        encoded: Tensor = self.encoder(self.embedded(item_index), event_time)
        return encoded

    def embedded(self, item_index: Tensor) -> Tensor:
        """Return the encoder's input (B, L, D) of item_index (B, L) as in `encode`, zeros for padding."""
        return self._embedded(item_index.clamp(min=0)) * (item_index >= 0).unsqueeze(-1)

    def _embedded(self, item_index: Tensor) -> Tensor:
        if self.action_embedding is None:
            return self.item_embedding(item_index)  # type: ignore[no-any-return]
        action = torch.div(item_index, STRIDE, rounding_mode="floor")
        embedded: Tensor = self.item_embedding(item_index - action * STRIDE) + self.action_embedding(action)
        return embedded

    def query_states(
        self, encoded: Tensor, user_index: Tensor | None, bucket: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Return the head's states of encoded (N, D), user_index (N,) or None, in the absence `bucket` (N,): components
        (N, P_q, d), gate (N, P) or None. Bucket 0, or None, does not change a state.
        """
        components, gate = self.head.query_states(encoded, user_index)
        if bucket is None or self.absence_shape is None:
            return components, gate
        away = bucket.nonzero().squeeze(1)
        rows, old = bucket[away], components[away]
        moved = functional.normalize(old + self.absence_components[rows], dim=-1, eps=1e-6)
        # A zero user-id component (an unknown user) stays zero.
        moved = moved * (old.detach() != 0).any(dim=-1, keepdim=True)
        if gate is not None:
            gate = gate.index_add(0, away, self.absence_gate[rows])
        return components.index_copy(0, away, moved), gate

    def states_at(
        self, item_index: Tensor, event_time: Tensor, user_index: Tensor | None, position: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """Return query states after positions (B, M): components (B, M, P_q, d), gate (B, M, P) or None."""
        encoded = self.encode(item_index, event_time)
        chosen = encoded.gather(1, position.unsqueeze(-1).expand(-1, -1, encoded.shape[-1]))
        users = None if user_index is None else user_index.unsqueeze(1).expand(-1, position.shape[1])
        return self.head.query_states(chosen, users)

    def step(
        self,
        item_index: Tensor,
        event_time: Tensor,
        place: Tensor,
        user_index: Tensor | None,
        position: Tensor,
        past: Past,
    ) -> tuple[tuple[Tensor, Tensor | None], Tensor, Tensor]:
        """Do what `states_at` does for only the S events after `past` of one history; also return their keys and
        values.

        item_index, event_time, place (S,), without padding; user_index (1,); position (M,) counts from the first
        new event -> components (M, P_q, d), gate (M, P) or None.
        Raises: ValueError for an encoder that cannot continue from a past (SASRec).
        """
        if not isinstance(self.encoder, HstuEncoder):
            raise ValueError(f"encoder.kind={self.encoder_shape.kind!r} encodes whole histories only; allowed: 'hstu'")
        encoded, keys, values = self.encoder.step(self._embedded(item_index), event_time, place, past)
        users = None if user_index is None else user_index.expand(position.shape[0])
        return self.head.query_states(encoded[position], users), keys, values

    @property
    def item_rows(self) -> Tensor:
        """Return the items' embeddings (X, D)."""
        return self.item_embedding.weight[: self.num_items]

    @torch.no_grad()
    def fill_absences(self) -> None:
        """Copy to each bucket without training data, whose row is still zero, the row of the bucket below."""
        for bucket in range(1, 0 if self.absence_shape is None else self.absence_shape.num_buckets):
            if not self.absence_components[bucket].any():
                self.absence_components[bucket] = self.absence_components[bucket - 1]
                if self.head_shape.is_mixture:
                    self.absence_gate[bucket] = self.absence_gate[bucket - 1]

    @torch.no_grad()
    def absence_rows(self) -> AbsenceRows | None:
        """Return the rows learnt for absences, if any."""
        if self.absence_shape is None:
            return None
        return AbsenceRows(
            floor_seconds=self.absence_shape.floor_seconds,
            components=_array(self.absence_components),
            gate=_array(self.absence_gate) if self.head_shape.is_mixture else None,
        )

    @torch.no_grad()
    def all_item_states(self) -> ItemStates:
        """Return the catalogue's states by dense index."""
        components, gate = self.head.item_states(self.item_rows)
        return ItemStates(components=_array(components), gate=None if gate is None else _array(gate))

    @torch.no_grad()
    def pair_gate(self) -> PairGate | None:
        """Return the gate's pair network; None for a dot head."""
        if not isinstance(self.head, MolHead):
            return None
        return PairGate(**{name: _array(value) for name, value in self.head.pair_gate.tensors().items()})


def _array(tensor: Tensor) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
    return tensor.detach().to("cpu", torch.float32).contiguous().numpy().copy()
