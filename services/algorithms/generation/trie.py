"""The trie of all document identifiers, mapped from a file and changed while it serves.

The file's trie is immutable. Inserted identifiers are in small tries, merged as they grow. An array marks deleted
identifiers. The next query sees changes; the caller replays them after a restart.

Letters: I identifiers, n tokens of an identifier.
"""

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
import numpy.typing as npt

from services.algorithms.ops.trie_search import MAX_POSITIONS, Ints, TrieArrays, laid_end_to_end

PADDING = 0
TRIE_ARRAYS = ("tokens", "children", "ends", "identifiers")

# A small trie is merged into the previous one once it has an eighth of the previous trie's identifiers. So most inserts
# rebuild few identifiers, and a search walks few tries.
_MERGE_AT = 8


@dataclass(frozen=True, slots=True)
class _Addition:
    sequences: tuple[tuple[int, ...], ...]
    identifiers: tuple[int, ...]
    arrays: TrieArrays


class IdentifierTrie:
    """Token sequences of identifiers; two identifiers may have equal sequences. Thread-safe."""

    def __init__(self, arrays: TrieArrays, *, max_tokens: int, num_tokens: int) -> None:
        """Take built arrays. max_tokens: longest allowed sequence; num_tokens: V. Raises: ValueError
        if out of range.
        """
        if not 1 <= max_tokens <= MAX_POSITIONS:
            raise ValueError(f"max_tokens={max_tokens} allowed: 1 to {MAX_POSITIONS}")
        if num_tokens < 1:
            raise ValueError(f"num_tokens={num_tokens} allowed: at least 1")
        lowest, highest = _extremes(arrays.tokens[1:])
        if not (lowest > PADDING and highest < num_tokens):
            raise ValueError(f"tokens {lowest} to {highest}; allowed: 1 to {num_tokens - 1}")
        lowest, highest = _extremes(arrays.identifiers)
        if lowest < 0:
            raise ValueError(f"identifier={lowest} allowed: 0 or more")
        self.max_tokens, self.num_tokens = max_tokens, num_tokens
        self._arrays = arrays
        self._additions: list[_Addition] = []
        self._lock = threading.Lock()
        self._present = np.zeros(highest + 1 if len(arrays.identifiers) else 0, dtype=bool)
        self._present[arrays.identifiers] = True
        if np.count_nonzero(self._present) != len(arrays.identifiers):
            raise ValueError("identifiers repeat; each has one token sequence")
        self._deleted = ~self._present

    @classmethod
    def build(
        cls,
        sequences: Sequence[Sequence[int]],
        identifiers: Sequence[int] | Ints,
        *,
        max_tokens: int,
        num_tokens: int,
    ) -> Self:
        """Build from sequences. Raises: ValueError with the first sequence that is empty, too long, or has a token
        outside 1 to V - 1.
        """
        if len(sequences) != len(identifiers):
            raise ValueError(f"{len(sequences)} token sequences for {len(identifiers)} identifiers")
        tokens, offsets = laid_end_to_end(sequences)
        return cls.build_flat(tokens, offsets, np.asarray(identifiers), max_tokens=max_tokens, num_tokens=num_tokens)

    @classmethod
    def build_flat(
        cls,
        tokens: Ints,
        offsets: npt.NDArray[np.int64],
        identifiers: npt.NDArray[np.integer],
        *,
        max_tokens: int,
        num_tokens: int,
    ) -> Self:
        """Build from concatenated sequences. Raises: ValueError as `build`.

        Shapes: tokens (sum of all n,), offsets (I + 1,), identifiers (I,).
        """
        lengths = np.diff(offsets)
        wrong = np.flatnonzero((lengths < 1) | (lengths > max_tokens))
        if len(wrong):
            row = int(wrong[0])
            raise ValueError(
                f"identifier {int(identifiers[row])} has {int(lengths[row])} tokens; allowed: 1 to {max_tokens}"
            )
        wrong = np.flatnonzero((tokens <= PADDING) | (tokens >= num_tokens))
        if len(wrong):
            row = int(np.searchsorted(offsets, wrong[0], side="right")) - 1
            raise ValueError(
                f"identifier {int(identifiers[row])} holds token {int(tokens[wrong[0]])}; allowed: 1 to "
                f"{num_tokens - 1} (0 is padding)"
            )
        arrays = TrieArrays.build(np.asarray(tokens, dtype=np.int32), offsets, np.asarray(identifiers, dtype=np.int32))
        return cls(arrays, max_tokens=max_tokens, num_tokens=num_tokens)

    def __len__(self) -> int:
        return int(np.count_nonzero(~self._deleted))

    def __contains__(self, identifier: int) -> bool:
        return 0 <= identifier < len(self._deleted) and not self._deleted[identifier]

    @property
    def num_identifiers(self) -> int:
        """The highest identifier so far, plus one."""
        present = np.flatnonzero(self._present)
        return int(present[-1]) + 1 if len(present) else 0

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.view()[0])

    def view(self) -> tuple[tuple[TrieArrays, ...], npt.NDArray[np.bool_]]:
        """All tries, as a snapshot for a search, and whether each identifier is deleted."""
        with self._lock:
            return (self._arrays, *(addition.arrays for addition in self._additions)), self._deleted

    def insert(self, sequence: Sequence[int], identifier: int) -> None:
        """Insert an identifier for the next query. Cost: a merge of small tries, 0.2 ms on average.

        Raises: ValueError as `build`, or for an identifier that exists or was deleted; a running query could return the
        deleted identifier.
        """
        self.check(sequence)
        if not 0 <= identifier < 2**31 - 1:
            raise ValueError(f"identifier={identifier} allowed: 0 to {2**31 - 2}")
        with self._lock:
            if identifier < len(self._present) and self._present[identifier]:
                raise ValueError(f"identifier={identifier} is there already, or was; allowed: one that is new")
            additions = [*self._additions, _addition((tuple(sequence),), (identifier,))]
            while len(additions) > 1 and _MERGE_AT * len(additions[-1].identifiers) >= len(additions[-2].identifiers):
                last, before = additions.pop(), additions.pop()
                additions.append(_addition(before.sequences + last.sequences, before.identifiers + last.identifiers))
            if identifier >= len(self._present):
                grown = max(identifier + 1, len(self._present) + len(self._present) // 8 + 1024)
                self._present = np.pad(self._present, (0, grown - len(self._present)))
                self._deleted = np.pad(self._deleted, (0, grown - len(self._deleted)), constant_values=True)
            self._present[identifier] = True
            self._deleted[identifier] = False
            self._additions = additions

    def check(self, sequence: Sequence[int]) -> None:
        """Raise ValueError for an invalid token sequence."""
        if not 1 <= len(sequence) <= self.max_tokens:
            raise ValueError(f"an identifier of {len(sequence)} tokens; allowed: 1 to {self.max_tokens}")
        for token in sequence:
            if not PADDING < token < self.num_tokens:
                raise ValueError(f"token={token} allowed: 1 to {self.num_tokens - 1} (0 is padding)")

    def delete(self, identifier: int) -> bool:
        """Delete an identifier, which running queries see too; return whether it existed."""
        with self._lock:
            if identifier not in self:
                return False
            self._deleted[identifier] = True
            return True

    @property
    def arrays(self) -> dict[str, Ints]:
        """The built trie's arrays, for a file. Raises: ValueError after inserts or deletes."""
        with self._lock:
            if self._additions or np.count_nonzero(~self._deleted) != len(self._arrays.identifiers):
                raise ValueError("the trie has changed since it was built; only a built one is saved")
        return {name: getattr(self._arrays, name) for name in TRIE_ARRAYS}


def _addition(sequences: tuple[tuple[int, ...], ...], identifiers: tuple[int, ...]) -> _Addition:
    tokens, offsets = laid_end_to_end(sequences)
    arrays = TrieArrays.build(tokens, offsets, np.array(identifiers, dtype=np.int32))
    return _Addition(sequences, identifiers, arrays)


def _extremes(values: Ints) -> tuple[int, int]:
    return (int(values.min()), int(values.max())) if len(values) else (PADDING + 1, 0)
