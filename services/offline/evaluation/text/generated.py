"""What phrase models generate: how long, by vocabulary (PIXAR's Figure 2), and for two questions (its Table 5).

Every model answers the test questions with its ten best identifiers. Lengths are in words, so that vocabularies can be
compared; beside them stands the mean over the identifiers that the model may generate: those of more tokens than it
has positions are left out, and with short tokens that leaves out the long ones.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from services.offline.evaluation.text.baselines import Asked
from services.offline.evaluation.text.trained import Budget, TrainPhrases, phrase_model
from services.offline.training.phrases.fit import TrainedPhrases, train_phrases

Row = dict[str, Any]

_ANSWERS, _SHOWN = 10, 4


def vocabularies(budget: Budget) -> list[tuple[str, int]]:
    """Word pieces, and phrases of every size of the budget: kinds and sizes."""
    return [("word pieces", 0), *(("phrases", size) for size in reversed(budget.sizes))]


def generated_row(
    asked: Asked, seed: int, budget: Budget, *, kind: str, size: int, train: TrainPhrases = train_phrases
) -> Row:
    """Train one model, and measure what it generates for the test questions."""
    model = phrase_model(asked, seed, kind=kind, size=size, budget=budget, train=train)
    return {"table": "generated", "data": asked.texts.name, "tokenizer": kind, **_lengths(model, asked)}


def _lengths(model: TrainedPhrases, asked: Asked) -> Row:
    questions = [text for text, _ in asked.texts.test]
    generator = model.generator()
    answers = [
        [one.identifier for one in generator.generate(x, _ANSWERS).answers]
        for start in range(0, len(questions), 64)
        for x in model.encode(questions[start : start + 64])
    ]
    identifiers = model.identifiers
    words = np.array([len(text.split()) for text in identifiers.texts])
    tokens = np.array([len(one) for one in identifiers.tokens])
    generated = np.array([number for found in answers for number in found])
    return {
        "vocabulary": len(model.tokenizer),
        "positions": identifiers.positions,
        "questions": len(questions),
        "question_words": float(np.mean([len(text.split()) for text in questions])),
        "identifiers": len(identifiers),
        "left_out": identifiers.left_out,
        "identifier_words": float(words.mean()),
        "first_words": float(np.mean([words[found[0]] for found in answers if found])),
        "words": float(words[generated].mean()),
        "words_p90": float(np.percentile(words[generated], 90)),
        "tokens": float(tokens[generated].mean()),
        # A third and two thirds of the way through the questions: chosen before anything was generated.
        "examples": [
            {"question": questions[row], "sentences": [_sentence(model, number) for number in answers[row][:_SHOWN]]}
            for row in (len(questions) // 3, 2 * len(questions) // 3)
        ],
    }


def _sentence(model: TrainedPhrases, identifier: int) -> str:
    """An identifier, its tokens apart."""
    return " · ".join(model.tokenizer.phrase(token) for token in model.identifiers.tokens[identifier])


def examples(rows: Sequence[Row]) -> list[Row]:
    """A row per question and vocabulary, for the page."""
    return [
        {**row, "question": example["question"], "shown": "<br>".join(example["sentences"])}
        for row in rows
        for example in row["examples"]
    ]
