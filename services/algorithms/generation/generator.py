"""From the phrase encoder's output to identifiers and items in one call.

Letters: s positions, D width, U union, V vocabulary size, X items, K results.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Self

import numpy as np
import numpy.typing as npt

from services.algorithms.bundles.model_manifest import errors_of
from services.algorithms.generation.array_file import read_arrays, write_arrays
from services.algorithms.generation.decoding import MODES, Mode, decode
from services.algorithms.generation.identifiers import IdentifierTable
from services.algorithms.generation.locality import locality_order
from services.algorithms.generation.output_layer import OutputLayer
from services.algorithms.generation.shortlist import Shortlist
from services.algorithms.generation.trie import PADDING, IdentifierTrie
from services.algorithms.ops.trie_search import laid_end_to_end

FILES = ("output_layer", "shortlist", "trie", "identifiers", "decoding")

_WIDEN = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class GeneratorSettings:
    """Limits of decoding. sets: number k of joined sets. beams: nodes per level. mode: whether tokens may come in any
    order.
    """

    sets: int = 5
    beams: int = 256
    mode: Mode = "permutation"

    def __post_init__(self) -> None:
        for name in ("sets", "beams"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} allowed: at least 1")
        if self.mode not in MODES:
            raise ValueError(f"mode={self.mode!r} allowed: {', '.join(MODES)}")


@dataclass(frozen=True, slots=True)
class Answer:
    """An identifier, its text, at most K rows of its allowed items, and its score (natural log)."""

    identifier: int
    text: str
    item_rows: npt.NDArray[np.int32]
    score: float


@dataclass(frozen=True, slots=True)
class Generated:
    """Best first. union_size: number U of scored phrases. exact: proven the best of these."""

    answers: list[Answer]
    union_size: int
    exact: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Generator:
    """The parts for decoding, checked against each other. Thread-safe.

    token_rows (V,): the row of each token in the parts (locality.py); None if it is the token's number.
    """

    output_layer: OutputLayer
    shortlist: Shortlist
    trie: IdentifierTrie
    identifiers: IdentifierTable
    settings: GeneratorSettings = field(default_factory=GeneratorSettings)
    token_rows: npt.NDArray[np.int32] | None = None

    def __post_init__(self) -> None:
        """Raise ValueError with both values if vocabulary sizes, widths or identifiers of parts differ."""
        for name, tokens in (("shortlist", self.shortlist.num_tokens), ("trie", self.trie.num_tokens)):
            if tokens != len(self.output_layer):
                raise ValueError(f"{name} is of {tokens} tokens, the output layer of {len(self.output_layer)}")
        if self.shortlist.centers.shape[1] != self.output_layer.width:
            raise ValueError(
                f"shortlist width={self.shortlist.centers.shape[1]} allowed: {self.output_layer.width}, the weights'"
            )
        if self.trie.num_identifiers > len(self.identifiers):
            raise ValueError(
                f"the trie names identifier {self.trie.num_identifiers - 1}; the table has {len(self.identifiers)}"
            )

        if self.token_rows is not None and (
            len(self.token_rows) != len(self.output_layer)
            or self.token_rows[PADDING] != PADDING
            or (np.bincount(np.clip(self.token_rows, 0, None), minlength=len(self.token_rows)) != 1).any()
        ):
            raise ValueError(f"token_rows is no order of {len(self.output_layer)} tokens with {PADDING} ([PAD]) first")

    @classmethod
    def build(
        cls,
        weights: npt.NDArray[np.float32],
        centers: npt.NDArray[np.float32],
        sets: npt.NDArray[np.int32],
        sequences: Sequence[Sequence[int]],
        texts: Sequence[str],
        item_rows: Sequence[Sequence[int]],
        *,
        max_tokens: int,
        precision: Literal["int8", "float16"] = "int8",
        settings: GeneratorSettings | None = None,
    ) -> Self:
        """Build from a trained model; phrases of one shortlist become adjacent.

        Shapes: weights (V, D), centers (m, D), sets (m, r) most probable first. Raises: ValueError as the parts do.
        """
        token_rows = locality_order(centers, sets, num_tokens=len(weights))
        ordered = np.empty_like(weights)
        ordered[token_rows] = weights
        tokens, offsets = laid_end_to_end(sequences)
        outside = np.flatnonzero((tokens < 0) | (tokens >= len(weights)))
        if len(outside):
            raise ValueError(f"an identifier holds token {tokens[outside[0]]}; allowed: 1 to {len(weights) - 1}")
        return cls(
            output_layer=OutputLayer.from_weights(ordered, precision=precision),
            shortlist=Shortlist(centers, token_rows[sets], num_tokens=len(weights)),
            trie=IdentifierTrie.build_flat(
                token_rows[tokens], offsets, np.arange(len(texts)), max_tokens=max_tokens, num_tokens=len(weights)
            ),
            identifiers=IdentifierTable.build(texts, item_rows),
            settings=settings or GeneratorSettings(),
            token_rows=token_rows,
        )

    def save(self, folder: Path) -> list[str]:
        """Write one file per part; return their names. Raises: ValueError after inserts or deletes."""
        folder.mkdir(parents=True, exist_ok=True)
        self.output_layer.save(folder / "output_layer")
        self.shortlist.save(folder / "shortlist")
        self.trie.save(folder / "trie")
        self.identifiers.save(folder / "identifiers")
        token_rows = np.zeros(0, dtype=np.int32) if self.token_rows is None else self.token_rows
        numbers = np.array([self.settings.sets, self.settings.beams, MODES.index(self.settings.mode)], dtype=np.int64)
        write_arrays(folder / "decoding", {"places": token_rows, "settings": numbers}, kind="decoding", version=1)
        return list(FILES)

    @classmethod
    def load(cls, folder: Path) -> Self:
        """Load memory-mapped. Raises: BundleError for an invalid file, and for parts that do not match."""
        found = read_arrays(folder / "decoding", ("places", "settings"), kind="decoding", version=1)
        sets, beams, mode = found["settings"].tolist()
        with errors_of(folder):
            return cls(
                output_layer=OutputLayer.load(folder / "output_layer"),
                shortlist=Shortlist.load(folder / "shortlist"),
                trie=IdentifierTrie.load(folder / "trie"),
                identifiers=IdentifierTable.load(folder / "identifiers"),
                settings=GeneratorSettings(sets=sets, beams=beams, mode=MODES[mode]),
                token_rows=found["places"] if len(found["places"]) else None,
            )

    def generate(
        self,
        x: npt.NDArray[np.float32],
        k: int,
        allowed: npt.NDArray[np.bool_] | None = None,
    ) -> Generated:
        """The `k` best identifiers with an allowed item. Shapes: x (1 + s, D), x_0 first; allowed (X,) over item rows.

        While a filter leaves fewer than k, the beam widens. Raises: ValueError for another shape, k below 1, or a
        non-finite value.
        """
        if x.ndim != 2 or len(x) < 2:
            raise ValueError(f"x has shape {x.shape}; allowed: (1 + s, {self.output_layer.width})")
        tokens = self.shortlist.tokens(x[0], self.settings.sets)
        scores = self.output_layer.scores(x[1:], tokens)
        items = self.identifiers.items()  # a filter leaves out identifiers that are added after this
        beams = self.settings.beams
        while True:
            found = decode(
                scores, tokens, self.trie, beams=beams, results=k, mode=self.settings.mode,
                items=items, allowed=allowed,
            )  # fmt: skip
            if len(found) == k or found.exact:
                break
            beams *= _WIDEN
        answers, items = [], self.identifiers.items()
        for identifier, score in found:
            rows = items.of(identifier)
            if allowed is not None:
                rows = rows[rows < len(allowed)]  # an item newer than the mask is not allowed
                rows = rows[allowed[rows]]
            answers.append(Answer(identifier, self.identifiers.text(identifier), rows[:k], score))
        return Generated(answers, len(tokens), found.exact)

    def insert(self, text: str, tokens: Sequence[int], item_rows: Sequence[int]) -> int:
        """Insert an identifier for the next query; return its number.

        Raises: ValueError, with nothing inserted, for invalid tokens or rows, such as more tokens than positions.
        """
        self.trie.check(tokens)
        if self.token_rows is not None:
            tokens = self.token_rows[np.asarray(tokens)].tolist()
        identifier = self.identifiers.add(text, item_rows)
        self.trie.insert(tokens, identifier)
        return identifier

    def delete(self, identifier: int) -> bool:
        """Delete an identifier for the next query; return whether it existed."""
        return self.trie.delete(identifier)
