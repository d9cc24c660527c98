"""Trained answerers of `freshet bench text`: fine-tuned dot product, text MoL, and PIXAR with several vocabularies.

Each is trained on the training questions alone, as much as `Budget` says, the same for all of a kind, with the settings
that users have. How answers are judged, it does not know.

Letters: B questions, V tokens.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from services.algorithms.generation.decoding import decode
from services.algorithms.generation.generator import Generator
from services.algorithms.indexes.by_name import make_index, parse_algorithm
from services.algorithms.models.sentence_encoder import model_folder
from services.algorithms.ops.mol_scores import MolScorer
from services.algorithms.scoring.states import FloatArray
from services.offline.datasets.locate import Locator
from services.offline.datasets.texts import IDENTIFIER_TEXTS, identifier_texts
from services.offline.evaluation.common.recall import MOST
from services.offline.evaluation.text.baselines import Answerer, Answering, Asked, Encoded, Ranked, with_pefa
from services.offline.evaluation.text.target_tokenizers import (
    WordPieceTokenizer,
    bpe_tokenizer,
    unigram_tokenizer,
    word_tokenizer,
)
from services.offline.training.phrases.fit import PhraseSettings, TrainedPhrases, train_phrases
from services.offline.training.phrases.identifiers import TargetTokenizer
from services.offline.training.phrases.vocabulary_fit import build_vocabulary
from services.offline.training.text_mol import TextFit, TextMolSettings, train_text_mol
from services.offline.training.text_mol.fit import Prepared

# Pairs of a question and a document row, each document's identifiers, a tokenizer, settings, a seed.
TrainPhrases = Callable[
    [Sequence[tuple[str, int]], Sequence[Sequence[str]], TargetTokenizer, PhraseSettings, int], TrainedPhrases
]

# Several identifiers name one document: so many are asked for, that a hundred documents are found.
_IDENTIFIERS = 3 * MOST


@dataclass(frozen=True, kw_only=True, slots=True)
class Budget:
    """How much training a row gets. `steps`: of the dot product and of text MoL; `epochs`: of a phrase model, more
    where they would be fewer than `least_steps` steps; `sizes`: of phrase vocabularies; `equal_size`: at which the
    other tokenizers stand beside them. Steps and epochs and not seconds: what else the machine does must not decide
    which vocabulary is trained longer."""

    steps: int
    epochs: int
    least_steps: int
    sizes: tuple[int, ...]
    equal_size: int

    def lasting(self, epochs: int) -> "Budget":
        """The same with so many epochs for each phrase model, however few steps they are."""
        return replace(self, epochs=epochs, least_steps=0)


FULL = Budget(steps=300, epochs=4, least_steps=256, sizes=(2_000, 8_000, 16_000), equal_size=8_000)
QUICK = Budget(steps=20, epochs=1, least_steps=0, sizes=(1_500,), equal_size=1_500)

TOKENIZERS: dict[str, Callable[[Sequence[str], int], TargetTokenizer]] = {
    "phrases": lambda texts, size: build_vocabulary(texts, size=size, min_count=scaled_min_count(len(texts))),
    "words": lambda texts, size: word_tokenizer(texts, size=size, min_count=scaled_min_count(len(texts))),
    "BPE": lambda texts, size: bpe_tokenizer(texts, size=size),
    "unigram": lambda texts, size: unigram_tokenizer(texts, size=size),
    "word pieces": lambda texts, size: WordPieceTokenizer(_word_list()),
}


def scaled_min_count(num_texts: int) -> int:
    """The paper's 20 is for tens of millions of identifiers: here one for each 50,000, between 2 and 20."""
    return min(20, max(2, num_texts // 50_000))


def trained(budget: Budget, *, quick: bool, train: TrainPhrases = train_phrases) -> tuple[Answerer, ...]:
    """All trained answerers; when quick, text MoL without its ablation, and phrases beside unigrams alone."""
    mol = {"text MoL": 0.001} if quick else {"text MoL": 0.001, "text MoL, no mutual information": 0.0}
    others = ("unigram",) if quick else ("words", "BPE", "unigram", "word pieces")
    kinds = [("phrases", size) for size in budget.sizes] + [(other, budget.equal_size) for other in others]
    return (
        Answerer(
            name="fine-tuned",
            make=partial(_fine_tuned, budget=budget, mutual_information=mol),
            seeded=True,
        ),
        *(
            Answerer(
                name=f"PIXAR {kind} {size}",
                make=partial(_phrases, train=train, kind=kind, size=size, budget=budget),
                seeded=True,
            )
            for kind, size in kinds
        ),
    )


def _fine_tuned(
    asked: Asked, seed: int, *, budget: Budget, mutual_information: dict[str, float]
) -> dict[str, Answering]:
    """The dot product (alone and with PEFA) and text MoL: the same body, steps, batches and kept lower layers."""
    texts = asked.texts
    pairs = [(text, document) for text, documents in texts.train for document in documents]
    asked.say(f"{texts.name}: lower layers of questions and documents")
    prepared = Prepared(pairs, texts.documents, TextMolSettings())

    def fit(kind: str, weight: float) -> TextFit:
        asked.say(f"{texts.name}: fine-tuning, {kind}, seed {seed}")
        settings = TextMolSettings(kind=kind, steps=budget.steps, mutual_information_weight=weight)
        return train_text_mol(pairs, texts.documents, settings, seed, prepared=prepared)

    dot = fit("dot", 0.0)

    def encode(texts: Sequence[str]) -> FloatArray:
        return np.ascontiguousarray(dot.query_states(texts).components[:, 0])

    documents = np.ascontiguousarray(dot.item_states.components[:, 0])
    rows = with_pefa("fine-tuned dot product", asked, Encoded(documents=documents, encode=encode), seed)
    for name, weight in mutual_information.items():
        rows[name] = _mol(fit("mol", weight))
    return rows


def _mol(fit: TextFit) -> Answering:
    """Exact search, certified, over the documents' states."""
    scorer = MolScorer(fit.item_states, fit.pair_gate)
    index = make_index(parse_algorithm("exact"), scorer, np.arange(len(fit.item_states.components)))

    def answer(texts: Sequence[str]) -> Ranked:
        found = []
        for start in range(0, len(texts), 64):
            answers = index.search(fit.query_states(texts[start : start + 64]), min(MOST, index.num_items))
            found += list(np.asarray(answers.item_indices, dtype=np.int64))
        return found

    return Answering(answer=answer, nbytes=index.nbytes, notes={"train_seconds": round(fit.seconds, 1)})


def phrase_model(
    asked: Asked, seed: int, *, kind: str, size: int, budget: Budget, train: TrainPhrases = train_phrases
) -> TrainedPhrases:
    """PIXAR over identifiers that are the documents' names and training questions, cut by one tokenizer."""
    texts = asked.texts
    tokenizer = TOKENIZERS[kind]([text for each in texts.identifiers for text in each], size)
    asked.say(f"{texts.name}: PIXAR, {len(tokenizer):,} {kind}, seed {seed}")
    pairs = [(text, document) for text, documents in texts.train for document in documents]
    settings = PhraseSettings(epochs=budget.epochs, least_steps=budget.least_steps)
    return train(pairs, texts.identifiers, tokenizer, settings, seed)


def _phrases(
    asked: Asked, seed: int, *, train: TrainPhrases, kind: str, size: int, budget: Budget
) -> dict[str, Answering]:
    """PIXAR by one tokenizer: with the shortlist, and of phrases in other ways, too."""
    model = phrase_model(asked, seed, train=train, kind=kind, size=size, budget=budget)
    tokenizer = model.tokenizer
    report = model.report
    notes = {
        "tokenizer": kind,
        "positions": report["positions"],
        "steps": report["steps"],
        "train_seconds": round(report["train_seconds"], 1),
        "identifier_tokens": float(np.mean([len(tokens) for tokens in model.identifiers.tokens])),
    }
    generator = model.generator()
    name = f"PIXAR, {kind}, {size:,}" if kind != "word pieces" else f"PIXAR, {kind}"
    found = {name: partial(_identified, generator)}
    if kind == "phrases" and size == budget.equal_size:
        in_order = replace(generator, settings=replace(generator.settings, mode="fixed"))
        found |= {f"{name}, fixed positions": partial(_identified, in_order)}
        found |= {f"{name}, full softmax": partial(_in_full, generator)}
    # Only one of them stands in the plot of sizes.
    return {
        each: Answering(
            answer=partial(_answered, model, identify),
            nbytes=model.weights.size * 2 + model.centers.nbytes + model.sets.nbytes,  # weights in half precision
            vocabulary=len(tokenizer) if each == name else None,
            notes=notes,
        )
        for each, identify in found.items()
    }


def _answered(model: TrainedPhrases, identify: Callable[[FloatArray], list[int]], texts: Sequence[str]) -> Ranked:
    found = []
    for start in range(0, len(texts), 64):
        for x in model.encode(texts[start : start + 64]):
            found.append(np.array(list(dict.fromkeys(identify(x)))[:MOST], dtype=np.int64))
    return found


def _identified(generator: Generator, x: FloatArray) -> list[int]:
    """Document rows of the best identifiers, best first."""
    return [row for one in generator.generate(x, _IDENTIFIERS).answers for row in one.item_rows.tolist()]


def _in_full(generator: Generator, x: FloatArray) -> list[int]:
    """The same without a shortlist: every token of the vocabulary is scored at every position."""
    tokens = np.arange(len(generator.output_layer), dtype=np.int32)
    settings, scores = generator.settings, generator.output_layer.full_scores(x[1:])
    best = decode(scores, tokens, generator.trie, beams=settings.beams, results=_IDENTIFIERS, mode=settings.mode)
    items = generator.identifiers.items()
    return [row for identifier, _ in best for row in items.of(identifier).tolist()]


def _word_list() -> list[str]:
    return (model_folder() / "vocab.txt").read_text(encoding="utf-8").removesuffix("\n").split("\n")


Row = dict[str, Any]

SIZES = {
    "medquad-questions": (2_000, 8_000, 32_000),
    "ml-25m-titles": (8_000, 32_000, 128_000),
    "queries": (8_000, 32_000, 128_000),
}
_QUICK_TEXTS = 4_000
_QUICK_SIZES = (2_000,)
_PIECES = "word pieces"


def length_rows(
    *, quick: bool, locator: Locator | None = None, say: Callable[[str], None] = lambda line: None
) -> list[Row]:
    """Mean and 99th percentile of the lengths, per set, tokenizer and size; the share of the word pieces' mean."""
    found = []
    for name in IDENTIFIER_TEXTS:
        texts = identifier_texts(name, locator)
        texts = texts[:_QUICK_TEXTS] if quick else texts
        say(f"{name}: word pieces")
        pieces = _length_row(name, texts, _PIECES, 0, base=None)
        base = float(pieces["mean"])
        found.append(pieces | {"share_of_word_pieces": 1.0})
        for size in _QUICK_SIZES if quick else SIZES[name]:
            for kind in TOKENIZERS:
                if kind != _PIECES:
                    say(f"{name}: {kind}, {size:,}")
                    found.append(_length_row(name, texts, kind, size, base=base))
    return found


def lengths(tokenizer: TargetTokenizer, texts: Sequence[str]) -> tuple[float, float]:
    """Mean and 99th percentile of the numbers of tokens. Raises: ValueError for no texts."""
    if not texts:
        raise ValueError("texts has 0 entries; allowed: 1 or more")
    counts = np.array([len(tokens) for tokens in tokenizer.encode_all(texts)])
    return float(counts.mean()), float(np.percentile(counts, 99))


def _length_row(name: str, texts: Sequence[str], kind: str, size: int, *, base: float | None) -> Row:
    began = time.perf_counter()
    tokenizer = TOKENIZERS[kind](texts, size)
    built = time.perf_counter()
    mean, high = lengths(tokenizer, texts)
    return {
        "table": "lengths",
        "data": name,
        "texts": len(texts),
        "tokenizer": kind,
        "asked_size": size or None,
        "size": len(tokenizer),
        "mean": mean,
        "p99": high,
        "share_of_word_pieces": mean / base if base else None,
        "build_seconds": round(built - began, 1),
        "encode_seconds": round(time.perf_counter() - built, 1),
    }
