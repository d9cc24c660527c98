"""The generator: it turns the phrase encoder's output into identifiers and items in one call.

Letters: s positions, D width, U union, V vocabulary size, X items, K results.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Self

import numpy as np
import numpy.typing as npt

from services.algorithms.bundles.model_manifest import BundleError, errors_of
from services.algorithms.bundles.tensor_file import read_tensors
from services.algorithms.bundles.tensor_writer import SlicedTensor, write_tensors
from services.algorithms.generation.decoding import MODES, Mode, decode
from services.algorithms.generation.identifiers import TABLE_ARRAYS, IdentifierTable
from services.algorithms.generation.output_layer import OutputLayer
from services.algorithms.generation.shortlist import Shortlist
from services.algorithms.generation.trie import TRIE_ARRAYS, IdentifierTrie
from services.algorithms.ops.trie_search import TrieArrays

_INTS = ((1, "int32"),)
# The axes and types of a file's arrays.
_FORMS = {
    "weights": ((2, "uint8"), (2, "float16")),
    "scales": ((1, "float32"),),
    "centers": ((2, "float32"),),
    "sets": ((2, "int32"),),
    **dict.fromkeys(TRIE_ARRAYS, _INTS),
    "letters": ((1, "uint8"),),
    "letter_offsets": ((1, "int64"),),
    "rows": _INTS,
    "row_offsets": ((1, "int64"),),
    "settings": ((1, "int64"),),
}

_WIDEN = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class GeneratorSettings:
    """Limits of decoding. sets: number k of shortlist sets whose union is scored. beams: nodes kept per level. mode:
    whether tokens may come in any order.
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
    """Answers, best first. exact: whether these are proven the best."""

    answers: list[Answer]
    exact: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Generator:
    """The parts for decoding, checked against each other. Thread-safe."""

    output_layer: OutputLayer
    shortlist: Shortlist
    trie: IdentifierTrie
    identifiers: IdentifierTable
    settings: GeneratorSettings = field(default_factory=GeneratorSettings)

    def __post_init__(self) -> None:
        """Raise ValueError with both values if the parts differ in vocabulary size, width or identifiers."""
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
        """Build from a trained model and each identifier's tokens, text and item rows.

        Shapes: weights (V, D), centers (m, D), sets (m, r) most probable first. Raises: ValueError as the parts do.
        """
        num_tokens = len(weights)
        return cls(
            output_layer=OutputLayer.from_weights(weights, precision=precision),
            shortlist=Shortlist(centers, sets, num_tokens=num_tokens),
            trie=IdentifierTrie.build(sequences, range(len(texts)), max_tokens=max_tokens, num_tokens=num_tokens),
            identifiers=IdentifierTable.build(texts, item_rows),
            settings=settings or GeneratorSettings(),
        )

    def save(self, path: Path) -> None:
        """Write a new safetensors file. Raises: ValueError after inserts or deletes."""
        settings = self.settings
        numbers = (settings.sets, settings.beams, MODES.index(settings.mode), self.trie.max_tokens)
        arrays = {
            **self.output_layer.arrays,
            "centers": self.shortlist.centers,
            "sets": self.shortlist.sets,
            **self.trie.arrays,
            **self.identifiers.arrays,
            "settings": np.array(numbers, dtype=np.int64),
        }
        write_tensors(path, {name: SlicedTensor.whole(array) for name, array in arrays.items()})

    @classmethod
    def load(cls, path: Path) -> Self:
        """Load a file, memory-mapped if large. Its checksum is in the bundle's manifest.

        Raises: BundleError for an invalid file, or parts that do not match.
        """
        found = read_tensors(path)
        forms = {name: (array.ndim, array.dtype.name) for name, array in found.items()}
        if forms.keys() != _FORMS.keys() or any(form not in _FORMS[name] for name, form in forms.items()):
            raise BundleError(f"{path} holds {forms}; allowed: {_FORMS}")
        with errors_of(path, IndexError):
            sets, beams, mode, max_tokens = found["settings"].tolist()
            num_tokens = len(found["weights"])
            # Check these numbers first: a trie or table allocates memory up to the largest one.
            for name, limit in (("tokens", num_tokens), ("identifiers", len(found["row_offsets"]) - 1)):
                if found[name].max(initial=-1) >= limit:
                    raise ValueError(f"{name} reach {found[name].max()}; allowed: below {limit}")
            return cls(
                output_layer=OutputLayer.from_arrays(found["weights"], found["scales"]),
                shortlist=Shortlist(found["centers"], found["sets"], num_tokens=num_tokens),
                trie=IdentifierTrie(
                    TrieArrays(**{name: found[name] for name in TRIE_ARRAYS}),
                    max_tokens=max_tokens,
                    num_tokens=num_tokens,
                ),
                identifiers=IdentifierTable(*(found[name] for name in TABLE_ARRAYS)),
                settings=GeneratorSettings(sets=sets, beams=beams, mode=MODES[mode]),
            )

    def generate(
        self,
        x: npt.NDArray[np.float32],
        k: int,
        allowed: npt.NDArray[np.bool_] | None = None,
    ) -> Generated:
        """The `k` best identifiers with an allowed item. Shapes: x (1 + s, D), x_0 first; allowed (X,) over item rows.

        The beam widens while fewer than k are found and more may exist. Raises: ValueError for another shape, k below
        1, or a non-finite value.
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
        return Generated(answers, found.exact)

    def insert(self, text: str, tokens: Sequence[int], item_rows: Sequence[int]) -> int:
        """Insert an identifier for the next query; return its number.

        Raises: ValueError for invalid tokens or rows, such as more tokens than positions; then nothing is inserted.
        """
        self.trie.check(tokens)
        identifier = self.identifiers.add(text, item_rows)
        self.trie.insert(tokens, identifier)
        return identifier

    def delete(self, identifier: int) -> bool:
        """Delete an identifier for the next query; return whether it existed."""
        return self.trie.delete(identifier)
