"""All ways to cut texts into pieces, and the cheapest of them.

Each distinct word is cut into parts once. A text is cut into phrases and words. A phrase costs one token; a word
costs as many tokens as it has parts, more if characters are written as bytes. Matches are found once, because
fitting repeats the search many times with some pieces hidden.

Letters: N words of all texts, F distinct words with flags, M characters of those, C pieces.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from services.algorithms.generation.vocabulary_segments import Integers, Matches, fewest
from services.algorithms.generation.vocabulary_text import Cut

Shown = npt.NDArray[np.bool_]


@dataclass(frozen=True, kw_only=True, slots=True)
class Way:
    """One way to cut every text. Shapes: steps (N,): number of words of the step that begins here, or 0; phrases (N,):
    the piece of each step of two or more words, else -1; costs (F,): tokens of each distinct word.

    The other arrays have one entry per part of the distinct words, in order. parts: the piece, or -1 for a character
    written as bytes. characters: the part's first symbol. part_form: the distinct word.
    """

    steps: npt.NDArray[np.int32]
    phrases: npt.NDArray[np.int32]
    parts: npt.NDArray[np.int32]
    characters: Integers
    part_form: Integers
    costs: Integers


@dataclass(frozen=True, kw_only=True, slots=True)
class Lattice:
    """The pieces that begin at each position. form_of: index of each word's distinct word. letters: characters of the
    distinct words.

    Shapes: text.symbols (N,), form_of (N,), letters.symbols (M,), counts (C,). phrases (N, L) and parts (M, L') have
    one column per piece length; -1 means no piece.
    """

    text: Cut
    form_of: npt.NDArray[np.int64]
    letters: Cut
    phrases: Matches
    parts: Matches
    counts: Integers

    def cheapest(self, shown: Shown | None = None) -> Way:
        """The way with the fewest tokens per text, then the largest sum of counts, then the longest step."""
        num_forms = len(self.letters.starts) - 1
        parts, phrases = _visible(self.parts, shown), _visible(self.phrases, shown)
        single = parts[:, 0]
        codes = self.letters.symbols >> 1
        num_bytes = 1 + (codes > 0x7F) + (codes > 0x7FF) + (codes > 0xFFFF)
        known = single >= 0
        take = fewest(parts, np.where(known, 1, num_bytes), np.where(known, self.counts[single], 0), self.counts)
        positions = np.flatnonzero(take)
        piece = parts[positions, take[positions] - 1]
        there = piece >= 0
        form = np.searchsorted(self.letters.starts, positions, side="right") - 1
        costs = np.zeros(num_forms, dtype=np.int64)
        np.add.at(costs, form, np.where(there, 1, num_bytes[positions]))
        gains = np.zeros(num_forms, dtype=np.int64)
        np.add.at(gains, form, np.where(there, self.counts[piece], 0))
        steps = fewest(phrases, costs[self.form_of], gains[self.form_of], self.counts)
        stops = np.flatnonzero(steps)
        phrase = np.full(len(steps), -1, dtype=np.int32)
        phrase[stops] = phrases[stops, steps[stops] - 1]
        return Way(
            steps=steps,
            phrases=phrase,
            parts=piece,
            characters=self.letters.symbols[positions],
            part_form=form,
            costs=costs,
        )


def _visible(matches: Matches, shown: Shown | None) -> Matches:
    return matches if shown is None else np.where((matches >= 0) & shown[matches], matches, np.int32(-1))
