"""Mixture of Logits over a language model (arXiv:2407.15462, section 2.2, appendices A.2.2 and A.3).

P_q aggregation tokens precede a query's tokens and P_x a document's; they are trained with the body. They join at
layer `joined`; training caches the output of the frozen layers below. Pooling is parameterized: the first position's
output gives each component a distribution over all positions, and the component is the l2-normalised mean of the
outputs with these weights. The gate reads only the P cosines. Query and document share the body.

Letters: B texts, L tokens, P_q, P_x components, P = P_q * P_x, D width, d = D, G gate hidden width.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional

from services.algorithms.bundles.model_manifest import HeadShape
from services.algorithms.models.text_bodies import BertBody
from services.algorithms.scoring.states import PairGate
from services.offline.training.models.mol import PairGateMlp


class Aggregation(nn.Module):
    """One side's aggregation tokens and pooling, for texts of at most `max_tokens` tokens."""

    def __init__(self, components: int, width: int, max_tokens: int) -> None:
        super().__init__()
        self.tokens = nn.Parameter(torch.zeros(components, width))
        self.pooling = nn.Linear(width, components * (components + max_tokens))

    def prepend(self, hidden: Tensor, real: Tensor) -> tuple[Tensor, Tensor]:
        """Put K tokens before hidden (B, L, D), real (B, L) -> (B, K + L, D), (B, K + L)."""
        # The exporter would make len(hidden) a constant.
        own = self.tokens.expand(hidden.shape[0], -1, -1).to(hidden.dtype)
        always = real.new_ones((real.shape[0], len(self.tokens)))
        return torch.cat([own, hidden], dim=1), torch.cat([always, real], dim=1)

    def components(self, hidden: Tensor, real: Tensor) -> Tensor:
        """Pool outputs (B, K + L, D), real (B, K + L) -> components (B, K, D), unit norm."""
        logits = self.pooling(hidden[:, 0]).unflatten(-1, (len(self.tokens), -1))[..., : hidden.shape[1]]
        weights = logits.float().masked_fill(~real[:, None, :], float("-inf")).softmax(dim=-1)
        return functional.normalize(weights @ hidden.float(), dim=-1, eps=1e-6)


class TextMol(nn.Module):
    """Components of queries and documents, and the similarity of a pair.

    `body` is trained from layer `joined` on. `from_kept` takes the lower layers' cached output.
    Raises: ValueError if `joined` is not a layer, or if the head's component width is not the body's.
    """

    def __init__(self, body: BertBody, head: HeadShape, *, joined: int, max_tokens: int) -> None:
        super().__init__()
        width, layers = body.shape.width, body.shape.layers
        if not 0 <= joined < layers:
            raise ValueError(f"joined={joined}; allowed: 0 to {layers - 1}, a layer of the body")
        if head.component_width != width:
            raise ValueError(f"head.component_width={head.component_width}; the body's width is {width}")
        self.body, self.head, self.joined, self.max_tokens = body, head, joined, max_tokens
        self.query = Aggregation(head.num_query_components, width, max_tokens)
        self.document = Aggregation(head.num_item_components, width, max_tokens)
        # The gate is trained on cosines. Logits were not measured for text models.
        self.gate = PairGateMlp(head.num_pairs, head.gate_hidden, tau=1.0)
        self._begin_as_mean()

    def lower(self, ids: Tensor, real: Tensor) -> Tensor:
        """Run the frozen layers: ids (B, L), real (B, L) true at tokens -> input of layer `joined` (B, L, D)."""
        return self.body.run(self.body.embed(ids), real, 0, self.joined)

    def from_kept(self, hidden: Tensor, real: Tensor, side: Aggregation) -> Tensor:
        """Run the trained layers: input of layer `joined` (B, L, D), real (B, L) -> components (B, K, D)."""
        hidden, real = side.prepend(hidden, real)
        return side.components(self.body.run(hidden, real, self.joined, self.body.shape.layers), real)

    def query_components(self, ids: Tensor, real: Tensor) -> Tensor:
        """Encode queries: ids (B, L), real (B, L) true at tokens -> (B, P_q, D)."""
        return self.from_kept(self.lower(ids, real), real, self.query)

    def scores(self, queries: Tensor, documents: Tensor) -> tuple[Tensor, Tensor]:
        """Return similarities s (B, N) and pair weights pi (B, N, P) of (B, P_q, D) and (N, P_x, D)."""
        cosines = torch.einsum("bqd,nxd->bnqx", queries, documents).flatten(-2)
        weights = functional.silu(self.gate(cosines)).softmax(dim=-1)
        return (weights * cosines).sum(dim=-1), weights

    def pair_gate(self) -> PairGate:
        """Return the gate's network."""
        return PairGate(**{name: value.numpy().copy() for name, value in self.gate.tensors().items()})

    def _begin_as_mean(self) -> None:
        """Start near the mean-pooled body, with almost even pooling and little weight on the new tokens.

        Random pooling would lose a mean-pooled body's knowledge. Noise separates the components, whose gradients would
        be equal.
        """
        for side in (self.query, self.document):
            nn.init.normal_(side.tokens, std=0.02)
            nn.init.normal_(side.pooling.weight, std=0.02)
            bias = side.pooling.bias.detach().view(len(side.tokens), -1)
            bias.zero_()
            bias[:, : len(side.tokens)] = -2.0
