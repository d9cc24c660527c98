"""Heads make states of users and items, and score a pair of states.

Mixture of Logits (arXiv:2407.15462, equation 2 and appendix A.3): P_q query and P_x item components, l2-normalised;
pair weights pi = softmax(SiLU(query gate * item gate + MLP of the P cosines)). Scores are similarities s = sum_p pi_p
c_p in [-1, 1]; a logit is s / tau. The dot product is the special case of one component and no gate. The gate's MLP is
trained on logits (cosines / tau), as by the authors, and exported for cosines.

Letters: N rows, P_q, P_x components, P = P_q * P_x, d component width, D encoder width, G gate hidden width.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from services.algorithms.bundles.model_manifest import HeadShape
from services.offline.training.models.hstu import unit_rows


class SwiGlu(nn.Module):
    """Linear, activation(a) * b, linear: (N, in) -> (N, out). With the activation `gelu` it is a GeGLU."""

    def __init__(self, width_in: int, hidden: int, width_out: int, *, activation: str = "silu") -> None:
        super().__init__()
        self.activation = functional.silu if activation == "silu" else functional.gelu
        self.inner = nn.Linear(width_in, 2 * hidden)
        self.outer = nn.Linear(hidden, width_out, bias=False)
        nn.init.xavier_normal_(self.inner.weight)
        # The authors' bias has shape (1, 2 * hidden) and is initialised as a weight of that shape.
        nn.init.xavier_normal_(self.inner.bias.detach().unsqueeze(0))
        nn.init.xavier_normal_(self.outer.weight)

    def forward(self, x: Tensor) -> Tensor:
        value, gate = self.inner(x).chunk(2, dim=-1)
        out: Tensor = self.outer(self.activation(gate) * value)
        return out


def _projection(width_in: int, hidden: int, width_out: int, *, activation: str = "silu") -> nn.Module:
    # Unlike the authors', it has no bias: all rows would share the bias's direction before normalisation.
    if hidden:
        return SwiGlu(width_in, hidden, width_out, activation=activation)
    linear = nn.Linear(width_in, width_out, bias=False)
    nn.init.xavier_normal_(linear.weight)
    return linear


@torch.no_grad()
def _align(query: nn.Module, item: nn.Module, component_width: int, noise: float = 0.0) -> None:
    """Initialise query component p and item component p mod P_x as one orthogonal map with rows of length 1, if both
    projections are linear. With `noise` all components start as one such map plus Gaussian noise.

    An untrained dot product of the encoder's output with the item's embedding already ranks similar items first. Random
    projections have to learn this, which explains most of the gap between mixture and dot product on Amazon Beauty
    (docs/decisions/026).
    """
    if not (isinstance(query, nn.Linear) and isinstance(item, nn.Linear)):
        return
    of_items, of_queries = (torch.split(side.weight, component_width) for side in (item, query))
    for component in of_items:
        nn.init.orthogonal_(component)
    if noise:
        base = of_items[0].clone()
        for component in (*of_items, *of_queries):
            component.copy_(base + torch.randn_like(base) * noise / base.shape[1] ** 0.5)
        return
    for number, component in enumerate(of_queries):
        component.copy_(of_items[number % len(of_items)])


class GateMlp(nn.Sequential):
    """One side's part of the gate, (N, in) -> (N, P), without a last bias."""

    def __init__(self, width_in: int, hidden: int, pairs: int) -> None:
        inner, outer = nn.Linear(width_in, hidden), nn.Linear(hidden, pairs, bias=False)
        nn.init.xavier_normal_(inner.weight)
        nn.init.zeros_(inner.bias)
        nn.init.xavier_normal_(outer.weight)
        super().__init__(inner, nn.SiLU(), outer)


class PairGateMlp(nn.Module):
    """W2 SiLU(W1 c / tau + b1) + b2 of a pair's P cosines c, whose logits are c / tau.

    The trained weight is `logit_weight` W1 (G, P), which reads logits. All other code reads cosines with
    `hidden_weight` = W1 / tau. The other names are as in `states.PairGate`.
    """

    def __init__(self, pairs: int, hidden: int, *, tau: float) -> None:
        super().__init__()
        self.tau = tau
        self.logit_weight, self.hidden_bias = (
            nn.Parameter(torch.empty(hidden, pairs)),
            nn.Parameter(torch.zeros(hidden)),
        )
        self.out_weight, self.out_bias = nn.Parameter(torch.empty(pairs, hidden)), nn.Parameter(torch.zeros(pairs))
        nn.init.xavier_normal_(self.logit_weight)
        nn.init.xavier_normal_(self.out_weight)

    @property
    def hidden_weight(self) -> Tensor:
        """Return the first layer for cosines (G, P); gradients pass to `logit_weight`."""
        return self.logit_weight / self.tau

    def forward(self, cosines: Tensor) -> Tensor:
        hidden = functional.silu(functional.linear(cosines, self.hidden_weight, self.hidden_bias))
        return functional.linear(hidden, self.out_weight, self.out_bias)

    def tensors(self) -> dict[str, Tensor]:
        """Return the network for cosines, detached, under the names of `states.PairGate`."""
        names = ("hidden_weight", "hidden_bias", "out_weight", "out_bias")
        return {name: getattr(self, name).detach() for name in names}


@dataclass(frozen=True, kw_only=True, slots=True)
class Dropouts:
    """The probabilities of training's dropouts.

    `user` drops the whole user-id component. `user_element` drops its elements before normalisation, as the authors do.
    `gate` drops pair weights, and `pair` drops cosines that the pair network reads.
    """

    encoder: float = 0.0
    item: float = 0.0
    user: float = 0.0
    gate: float = 0.0
    user_element: float = 0.0
    pair: float = 0.0


NO_DROPOUT = Dropouts()


class MolHead(nn.Module):
    """Query and item states of a mixture of logits, and the score of aligned pairs.

    With `num_users` > 0 the last query component is a user-id embedding. It is zero for an unknown user (-1).
    """

    def __init__(
        self,
        shape: HeadShape,
        width: int,
        *,
        num_users: int = 0,
        dropouts: Dropouts = NO_DROPOUT,
        start_noise: float = 0.0,
    ) -> None:
        super().__init__()
        self.shape, self.dropouts = shape, dropouts
        from_encoder = shape.num_query_components - (1 if num_users else 0)
        self.query = _projection(
            width, shape.query_hidden, from_encoder * shape.component_width, activation=shape.query_activation
        )
        self.item = _projection(width, shape.item_hidden, shape.num_item_components * shape.component_width)
        _align(self.query, self.item, shape.component_width, start_noise)
        self.query_gate = GateMlp(width, shape.gate_hidden, shape.num_pairs)
        self.item_gate = GateMlp(width, shape.gate_hidden, shape.num_pairs)
        self.pair_gate = PairGateMlp(shape.num_pairs, shape.gate_hidden, tau=shape.tau)
        self.user: nn.Embedding | None = None
        if num_users:
            self.user = nn.Embedding(num_users, shape.component_width)
            nn.init.xavier_normal_(self.user.weight)

    def query_states(self, encoded: Tensor, user_index: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Map encoded (N, D), user_index (N,) with -1 = unknown -> components (N, P_q, d), gate (N, P)."""
        components = self.query(encoded).unflatten(-1, (-1, self.shape.component_width))
        components = unit_rows(components)
        if self.user is not None:
            components = torch.cat([components, self._user_component(user_index, encoded).unsqueeze(-2)], dim=-2)
        return components, self.query_gate(encoded)

    def item_states(self, embedded: Tensor) -> tuple[Tensor, Tensor]:
        """Map embedded (N, D) -> components (N, P_x, d), gate (N, P)."""
        # As in the authors' code, the gate reads the embedding without dropout.
        dropped = functional.dropout(embedded, self.dropouts.item, self.training)
        components = self.item(dropped).unflatten(-1, (-1, self.shape.component_width))
        return unit_rows(components), self.item_gate(embedded)

    def score_pairs(self, query: tuple[Tensor, Tensor], item: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Return similarity s (N,) and pair weights pi (N, P) of N queries with N items, row by row."""
        cosines = (query[0] @ item[0].transpose(-1, -2)).flatten(-2)
        read = functional.dropout(cosines, self.dropouts.pair, self.training)
        weights = functional.silu(query[1] * item[1] + self.pair_gate(read)).softmax(dim=-1)
        if self.training and self.dropouts.gate:
            weights = weights * (torch.rand_like(weights) >= self.dropouts.gate)
            weights = weights / weights.sum(dim=-1, keepdim=True).clamp(min=1e-6)
        return (weights * cosines).sum(dim=-1), weights

    def _user_component(self, user_index: Tensor | None, encoded: Tensor) -> Tensor:
        if self.user is None or user_index is None:
            return encoded.new_zeros((*encoded.shape[:-1], self.shape.component_width))
        known = user_index >= 0
        if self.training and self.dropouts.user:
            known = known & (torch.rand(known.shape, device=known.device) >= self.dropouts.user)
        component = self.user(user_index.clamp(min=0))
        component = functional.dropout(component, self.dropouts.user_element, self.training)
        component = functional.normalize(component, dim=-1, eps=1e-6)
        return component * known.unsqueeze(-1).to(component.dtype)


class DotHead(nn.Module):
    """The cosine of one query and one item component: P_q = P_x = 1, no gate.

    At the encoder's width (d = D) components are the encoder's output and the item's embedding. At any other width a
    query network like the mixture's and a linear map of the embedding project them.
    """

    def __init__(self, shape: HeadShape, width: int, *, item_dropout: float = 0.0) -> None:
        super().__init__()
        self.shape, self.item_dropout = shape, item_dropout
        self.query: nn.Module = nn.Identity()
        self.item: nn.Module = nn.Identity()
        if shape.component_width != width:
            self.query = _projection(width, shape.query_hidden, shape.component_width)
            self.item = _projection(width, shape.item_hidden, shape.component_width)
            _align(self.query, self.item, shape.component_width)

    def query_states(self, encoded: Tensor, user_index: Tensor | None = None) -> tuple[Tensor, None]:
        """Map encoded (N, D) -> components (N, 1, d), no gate."""
        del user_index
        return unit_rows(self.query(encoded)).unsqueeze(-2), None

    def item_states(self, embedded: Tensor) -> tuple[Tensor, None]:
        """Map embedded (N, D) -> components (N, 1, d), no gate."""
        embedded = functional.dropout(embedded, self.item_dropout, self.training)
        return unit_rows(self.item(embedded)).unsqueeze(-2), None
