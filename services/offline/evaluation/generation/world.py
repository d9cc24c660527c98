"""A phrase model of any vocabulary size, made without training: weights, identifiers, queries and a fitted shortlist.

Training with millions of phrases is too expensive. The cost of decoding depends on the weights' spectrum and on how
queries cluster around topics, and both come from real data. A phrase's row is the sum of .8, .7 and .3 times three rows
of MiniLM's word-piece embeddings: those of its topic's word, a frequent word and a rare word.

Tokens are numbered so that the phrases of one shortlist are adjacent. A row that is scattered over gigabytes costs a
page walk. Of 5 million int8 rows, 25,000 scattered ones take 5.4 ms of processor time, and runs of 25 adjacent rows
take 2.1 ms. Bundles do not use this order (decision 060).

Letters: V vocabulary size, D width (384), s positions, I identifiers, m vectors, r tokens of a set, N queries.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from services.algorithms.bundles.tensor_file import read_tensors
from services.algorithms.generation.output_layer import OutputLayer
from services.algorithms.generation.shortlist import Shortlist
from services.algorithms.generation.trie import IdentifierTrie
from services.algorithms.models.sentence_encoder import model_folder
from services.algorithms.ops.token_scores import CodedRows, code_rows

Floats = npt.NDArray[np.float32]
Tokens = npt.NDArray[np.int32]

MAKING = (
    "synthetic: a row is .8, .7 and .3 times three of MiniLM's word-piece embeddings (topic, frequent word, rare "
    "word), centred; identifiers of 1 to 5 phrases of one topic, queries around an identifier's rows mixed with those "
    "of a random identifier; the shortlist's vectors by k-means of x_0"
)
_WORD_PIECES = "embeddings.word_embeddings.weight"
_FIRST_WORD = 1996  # earlier rows are reserved and single characters
_CHUNK = 1 << 16
_SPREAD = 2.5  # standard deviation of a position's logits over the vocabulary, in nats


@dataclass(frozen=True, kw_only=True, slots=True)
class WorldShape:
    """V, I, and the shortlist's m and r."""

    num_tokens: int
    num_identifiers: int = 1_000_000
    positions: int = 8
    vectors: int = 512
    set_tokens: int = 6000
    topics: int = 2048


@dataclass(frozen=True, kw_only=True)
class Phrases:
    """The output layer, and the tokens of all identifiers in one array, in which identifier i begins at offsets[i]."""

    shape: WorldShape
    layer: OutputLayer
    tokens: Tokens
    offsets: npt.NDArray[np.int64]

    def query(self, rng: np.random.Generator, identifier: int) -> Floats:
        """Return x (1 + s, D) near an identifier; x_0 is the mean of its phrases' rows.

        A position has the row of its phrase, or of [PAD] after the last phrase, plus .3 times the mean and .3 times a
        row of a random other identifier. Every vector gets noise.
        """
        other = int(rng.integers(0, self.shape.num_identifiers))
        own, mixed = (
            self.layer.decoded(self.tokens[self.offsets[one] : self.offsets[one + 1]]) for one in (identifier, other)
        )
        mean = own.mean(axis=0)
        padding = self.layer.decoded(np.zeros(1, dtype=np.int32))[0]
        x = np.empty((1 + self.shape.positions, self.layer.width), dtype=np.float32)
        x[0] = mean
        for position in range(self.shape.positions):
            there = own[position] if position < len(own) else padding
            x[1 + position] = there + 0.3 * mean + 0.3 * mixed[position % len(mixed)]
        return x + rng.normal(scale=0.4 * float(own.std()), size=x.shape).astype(np.float32)

    def centers(self, rng: np.random.Generator) -> Floats:
        """Return m spherical k-means centres of x_0, fitted to 16 m queries."""
        asked = rng.integers(0, self.shape.num_identifiers, size=16 * self.shape.vectors)
        lengths = (self.offsets[asked + 1] - self.offsets[asked]).astype(np.int64)
        begins = np.cumsum(lengths) - lengths
        places = np.arange(lengths.sum()) + np.repeat(self.offsets[asked] - begins, lengths)
        own = np.add.reduceat(self.layer.decoded(self.tokens[places]), begins)
        own = own / lengths[:, None].astype(np.float32)
        noise = rng.normal(scale=0.4 * float(own.std()), size=own.shape).astype(np.float32)
        x0 = torch.nn.functional.normalize(torch.from_numpy(own + noise), dim=1)
        centers = x0[: self.shape.vectors].clone()
        for _ in range(8):
            nearest = torch.cat([(part @ centers.T).argmax(dim=1) for part in torch.split(x0, 4096)])
            sums = torch.zeros_like(centers).index_add_(0, nearest, x0)
            norms = sums.norm(dim=1, keepdim=True)
            centers = torch.where(norms > 0, sums / norms.clamp(min=1e-9), centers)
        return centers.numpy()


@dataclass(frozen=True, kw_only=True)
class PhraseWorld(Phrases):
    """The parts of an identifier generator (`Generator`), with tokens numbered by `locality_order`."""

    shortlist: Shortlist
    trie: IdentifierTrie
    gain: float

    def queries(self, count: int, seed: int) -> tuple[Floats, npt.NDArray[np.int64]]:
        """Return x (N, 1 + s, D) and each query's identifier."""
        rng = np.random.default_rng(seed)
        wanted = rng.integers(0, self.shape.num_identifiers, size=count)
        x = np.stack([self.query(rng, int(one)) for one in wanted])
        return (x * np.float32(self.gain)).astype(np.float32), wanted


def make_world(shape: WorldShape, seed: int, *, say: Callable[[str], None] = lambda line: None) -> PhraseWorld:
    """Make a world. Memory: V (D + 4) bytes, and about 700 MB during construction.

    Raises: ValueError if MiniLM's weights are not installed (`make setup`).
    """
    rng = np.random.default_rng(seed)
    words = read_tensors(model_folder() / "model.safetensors")[_WORD_PIECES][_FIRST_WORD:].astype(np.float32)
    words -= words.mean(axis=0)
    say(f"{shape.num_tokens:,} phrases: weights")
    rows = _weights(words, shape, seed)
    tokens, offsets = _identifiers(rng, shape)
    layer = OutputLayer(rows)
    say(f"{shape.num_tokens:,} phrases: shortlist")
    centers = Phrases(shape=shape, layer=layer, tokens=tokens, offsets=offsets).centers(rng)
    sets = _sets(centers, rows, shape)
    places = locality_order(centers, sets, num_tokens=shape.num_tokens)
    _move(rows, places)
    phrases = Phrases(shape=shape, layer=layer, tokens=places[tokens], offsets=offsets)
    say(f"{shape.num_tokens:,} phrases: trie of {shape.num_identifiers:,} identifiers")
    identifiers = np.arange(shape.num_identifiers)
    trie = IdentifierTrie.build_flat(
        phrases.tokens, offsets, identifiers, max_tokens=shape.positions, num_tokens=shape.num_tokens
    )
    probe = np.stack([phrases.query(rng, int(one))[1] for one in rng.integers(0, 1000, 16)])
    sample = layer.decoded(slice(1 << 18))[:: max(1, len(layer) // 20_000) if len(layer) < 1 << 18 else 13]
    gain = _SPREAD / float((probe @ sample.T).std(axis=1).mean())
    shortlist = Shortlist(centers, places[sets], num_tokens=shape.num_tokens)
    return PhraseWorld(**vars(phrases), shortlist=shortlist, trie=trie, gain=gain)


def _weights(words: Floats, shape: WorldShape, seed: int) -> CodedRows:
    weights = np.empty((shape.num_tokens, words.shape[1]), dtype=np.uint8)
    scales = np.empty(shape.num_tokens, dtype=np.float32)
    topic_words = np.random.default_rng(seed).permutation(len(words))[: shape.topics]
    for begin in range(0, shape.num_tokens, _CHUNK):
        numbers = np.arange(begin, min(begin + _CHUNK, shape.num_tokens))
        rng = np.random.default_rng((seed, begin))
        frequent = (len(words) * rng.random(len(numbers)) ** 4).astype(np.int64)
        rare = rng.integers(0, len(words), size=len(numbers))
        part = 0.8 * words[topic_words[numbers % shape.topics]] + 0.7 * words[frequent] + 0.3 * words[rare]
        coded = code_rows(part.astype(np.float32))
        weights[begin : begin + len(numbers)], scales[begin : begin + len(numbers)] = coded.weights, coded.scales
    return CodedRows(weights, scales)


def _identifiers(rng: np.random.Generator, shape: WorldShape) -> tuple[Tokens, npt.NDArray[np.int64]]:
    lengths = rng.choice(5, size=shape.num_identifiers, p=[0.15, 0.35, 0.3, 0.15, 0.05]) + 1
    offsets = np.append(0, np.cumsum(lengths))
    of_topic = shape.num_tokens // shape.topics
    ranks = (of_topic * rng.random(offsets[-1]) ** 3).astype(np.int64)  # a third of the draws from the first 4 %
    topics = np.repeat(rng.integers(0, shape.topics, size=shape.num_identifiers), lengths)
    return np.maximum(1, ranks * shape.topics + topics).astype(np.int32), offsets


def _sets(centers: Floats, rows: CodedRows, shape: WorldShape) -> Tokens:
    """Return the r best tokens of each vector, best first: (m, r). Products are in bfloat16."""
    vectors = torch.from_numpy(centers).to(torch.bfloat16)
    values = torch.empty((len(centers), 0))
    tokens = torch.empty((len(centers), 0), dtype=torch.int32)
    for begin in range(0, len(rows.weights), _CHUNK):
        codes = torch.from_numpy(rows.weights[begin : begin + _CHUNK]).to(torch.bfloat16) - 128
        scores = (vectors @ codes.T).float() * torch.from_numpy(rows.scales[begin : begin + _CHUNK])
        numbers = torch.arange(begin, begin + scores.shape[1], dtype=torch.int32).expand_as(scores)
        joined = torch.cat([values, scores], dim=1)
        values, kept = joined.topk(min(shape.set_tokens, joined.shape[1]), dim=1)
        tokens = torch.cat([tokens, numbers], dim=1).gather(1, kept)
    return tokens.numpy()


def _move(rows: CodedRows, places: Tokens) -> None:
    """Move a few columns at a time, to avoid a second copy of gigabytes."""
    for begin in range(0, rows.weights.shape[1], 48):
        rows.weights[places, begin : begin + 48] = rows.weights[:, begin : begin + 48].copy()
    rows.scales[places] = rows.scales.copy()


def locality_order(centers: Floats, sets: Tokens, *, num_tokens: int) -> Tokens:
    """Return `token_rows` (V,), the new row of each token; [PAD] stays at 0.

    Shapes: centers (m, D), sets (m, r), most probable first. Each token is placed with the
    set in which it has its best rank. Similar sets are near each other. The tokens of a set are ordered by rank, and
    tokens in no set come last. Cost: m r operations.
    """
    chain = _chain(centers)
    home = np.full(num_tokens, len(sets), dtype=np.int64)
    standing = np.full(num_tokens, sets.shape[1], dtype=np.int64)
    ranks = np.arange(sets.shape[1])
    for number, row in enumerate(chain.tolist()):
        members = sets[row]
        closer = ranks < standing[members]
        standing[members[closer]] = ranks[closer]
        home[members[closer]] = number
    home[0] = -1
    token_rows = np.empty(num_tokens, dtype=np.int32)
    token_rows[np.lexsort((np.arange(num_tokens), standing, home))] = np.arange(num_tokens, dtype=np.int32)
    return token_rows


def _chain(centers: Floats) -> npt.NDArray[np.int64]:
    """Order vectors by dividing the set in half repeatedly, along the line between two distant vectors."""
    order = np.arange(len(centers))
    waiting = [(0, len(order))]
    while waiting:
        begin, end = waiting.pop()
        if end - begin < 3:
            continue
        part = centers[order[begin:end]]
        one = part[np.argmax(((part - part.mean(axis=0)) ** 2).sum(axis=1))]
        other = part[np.argmax(((part - one) ** 2).sum(axis=1))]
        order[begin:end] = order[begin:end][np.argsort(part @ (other - one), kind="stable")]
        middle = (begin + end) // 2
        waiting += [(begin, middle), (middle, end)]
    return order
