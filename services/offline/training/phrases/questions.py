"""Questions with their documents, and each question's target identifier in an epoch.

A target is one of the document's identifiers, drawn again every epoch. It is the question's text only if there is no
other (arXiv:2406.06739, A.2). Up to 20 identifiers of a document are questions too. The lower layers' activations are
cached in float16.

Letters: N questions, T columns, s positions, D width.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from services.algorithms.text.word_pieces import WordPieces, padded
from services.offline.training.models.phrase_nar import PhraseEncoder
from services.offline.training.phrases.identifiers import Identifiers

Ints = npt.NDArray[np.int64]

MOST_OF_A_DOCUMENT = 20  # A.2 of the paper
_SORTED_BATCHES = 16  # so many batches are sorted by length together, which avoids almost all padding
_ENCODED_AT_ONCE = 128


@dataclass(frozen=True, kw_only=True, slots=True)
class Questions:
    """Questions: texts[i] asks for `documents[i]` and is itself identifier `own[i]`, or -1."""

    texts: list[str]
    documents: Ints
    own: Ints

    def __len__(self) -> int:
        return len(self.texts)

    def chosen(self, rows: npt.NDArray[np.integer]) -> "Questions":
        """Return the questions of these rows."""
        return Questions(texts=[self.texts[row] for row in rows], documents=self.documents[rows], own=self.own[rows])


def training_questions(
    pairs: Sequence[tuple[str, int]],
    documents: Sequence[Sequence[str]],
    own_row: Callable[[str], int],
    *,
    held_out: int,
    seed: int,
) -> tuple[Questions, Questions]:
    """Return (training questions, `held_out` drawn questions), which share no text.

    own_row: a text's identifier, or -1. Raises: ValueError if a pair names no row of `documents`.
    """
    wrong = next(((text, row) for text, row in pairs if not 0 <= row < len(documents)), None)
    if wrong is not None:
        raise ValueError(f"pair {wrong!r} names a document row; allowed: 0 to {len(documents) - 1}")
    rng = np.random.default_rng(seed)
    distinct = list(dict.fromkeys((text, row) for text, row in pairs))
    order = rng.permutation(len(distinct))
    left_out = {distinct[position][0] for position in order[:held_out]}
    kept = [pair for pair in distinct if pair[0] not in left_out]
    for row, texts in enumerate(documents):
        others = [text for text in texts if text not in left_out]
        if len(others) > MOST_OF_A_DOCUMENT:
            others = [others[position] for position in sorted(rng.permutation(len(others))[:MOST_OF_A_DOCUMENT])]
        kept += [(text, row) for text in others]
    aside = [pair for pair in distinct if pair[0] in left_out]
    return _questions(list(dict.fromkeys(kept)), own_row), _questions(aside, own_row)


def drawn_targets(questions: Questions, identifiers: Identifiers, rng: np.random.Generator) -> Ints:
    """Return one identifier per question, as ids padded with [PAD]: (N, s)."""
    targets = np.zeros((len(questions), identifiers.positions), dtype=np.int64)
    draws = rng.random(len(questions))
    for row, (document, own) in enumerate(zip(questions.documents, questions.own, strict=True)):
        every = identifiers.of_document[document]
        others = [position for position in every if position != own] or every
        tokens = identifiers.tokens[others[int(draws[row] * len(others))]]
        targets[row, : len(tokens)] = tokens
    return targets


class EncodedQuestions:
    """Word pieces of N questions, and with `keep_lower` the lower half's outputs."""

    def __init__(
        self,
        encoder: PhraseEncoder,
        pieces: WordPieces,
        texts: Sequence[str],
        *,
        keep_lower: bool,
        half: bool = False,
        progress: Callable[[int], None] | None = None,
    ) -> None:
        self._ids = [pieces.token_ids(text, max_tokens=encoder.shape.max_tokens) for text in texts]
        self._least = encoder.shape.positions + 1
        self._lower: list[Tensor] | None = None
        if keep_lower:
            self._lower = [torch.empty(0)] * len(texts)
            for rows in self.batches(_ENCODED_AT_ONCE, np.random.default_rng(0)):
                ids, mask = self.inputs(rows)
                with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=half):
                    hidden = encoder.lower(*encoder.widened(ids, mask)).half()
                for position, row in enumerate(rows):
                    self._lower[row] = hidden[position, : self._columns(row)].clone()
                if progress is not None:
                    progress(len(rows))

    def __len__(self) -> int:
        return len(self._ids)

    def batches(self, size: int, rng: np.random.Generator) -> Iterator[Ints]:
        """Yield every row once, in random batches of near-equal lengths."""
        order = rng.permutation(len(self))
        span = size * _SORTED_BATCHES
        groups: list[Ints] = []
        for start in range(0, len(order), span):
            near = np.array(sorted(order[start : start + span], key=lambda row: len(self._ids[row])), dtype=np.int64)
            groups += [near[first : first + size] for first in range(0, len(near), size)]
        for position in rng.permutation(len(groups)):
            yield groups[position]

    def inputs(self, rows: Ints) -> tuple[Tensor, Tensor]:
        """Return ids and mask (B, T)."""
        ids, mask = padded([self._ids[row] for row in rows])
        return torch.from_numpy(ids), torch.from_numpy(mask)

    def outputs(self, encoder: PhraseEncoder, rows: Ints, device: torch.device) -> Tensor:
        """Return x (B, 1+s, D), with gradients for the trained weights."""
        if self._lower is None:
            ids, mask = self.inputs(rows)
            answer: Tensor = encoder(ids.to(device), mask.to(device))
            return answer
        longest = max(self._columns(row) for row in rows)
        width = self._lower[rows[0]].shape[1]
        hidden, mask = torch.zeros(len(rows), longest, width), torch.zeros(len(rows), longest, dtype=torch.int64)
        for position, row in enumerate(rows):
            kept = self._lower[row]
            hidden[position, : len(kept)] = kept
            mask[position, : len(self._ids[row])] = 1
        return encoder.upper(hidden.to(device), mask.to(device))

    def _columns(self, row: int) -> int:
        return max(len(self._ids[row]), self._least)


def _questions(pairs: Sequence[tuple[str, int]], own_row: Callable[[str], int]) -> Questions:
    return Questions(
        texts=[text for text, _ in pairs],
        documents=np.array([row for _, row in pairs], dtype=np.int64),
        own=np.array([own_row(text) for text, _ in pairs], dtype=np.int64),
    )
