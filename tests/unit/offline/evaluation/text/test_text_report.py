"""`freshet bench text`: measures as defined, rows over seeds, and a page of what was measured."""

import json
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from services.offline.datasets.texts import TextCollection
from services.offline.evaluation.common.embeddings import EmbeddingSource
from services.offline.evaluation.common.recall import measures
from services.offline.evaluation.common.report import Request
from services.offline.evaluation.text import report as text_report
from services.offline.evaluation.text.baselines import Answerer, Answering, Asked, Encoded, bm25, with_pefa
from services.offline.evaluation.text.generated import generated_row, vocabularies
from services.offline.evaluation.text.report import rows
from services.offline.evaluation.text.trained import (
    FULL,
    QUICK,
    TOKENIZERS,
    Budget,
    lengths,
    scaled_min_count,
    trained,
)
from services.offline.training.phrases.fit import PhraseSettings, TrainedPhrases, train_phrases
from services.offline.training.phrases.shortlist_fit import ShortlistSize
from tests.unit.offline.training.phrase_scene import WordTokens, corpus, tiny_encoder

TOPICS = ("red apples", "green pears", "blue plums", "ripe figs", "sour limes", "old grapes", "dried dates", "big nuts")


def collection() -> TextCollection:
    asked = [
        (f"{what} {topic}", (row,)) for row, topic in enumerate(TOPICS) for what in ("where are", "who eats", "why buy")
    ]
    return TextCollection(
        name="scifact",
        documents=[f"About {topic} and nothing else." for topic in TOPICS],
        identifiers=[[topic] for topic in TOPICS],
        train=asked[::2],
        test=asked[1::2],
        tested_are_trained=False,
    )


def asked_of(texts: TextCollection, tmp_path: Path) -> Asked:
    return Asked(texts=texts, source=EmbeddingSource(environ={"XDG_CACHE_HOME": str(tmp_path)}), quick=True)


def test_measures_are_those_of_a_worked_example() -> None:
    found = measures([[7, 3, 5], [1], list(range(30))], [(3, 9), (2,), (10, 29)])

    assert found["recall@1"].tolist() == [0, 0, 0]
    assert found["recall@5"].tolist() == [0.5, 0, 0]
    assert found["recall@20"].tolist() == [0.5, 0, 0.5]
    assert found["recall@100"].tolist() == [0.5, 0, 1]
    assert found["hits@20"].tolist() == [1, 0, 1]
    assert found["mrr@10"].tolist() == [0.5, 0, 0]


@pytest.mark.parametrize(
    ("answers", "wanted", "said"),
    [([[1]], [], "answers has 1"), ([[1]], [()], "wanted"), ([[1, 1]], [(1,)], "twice")],
)
def test_answers_that_cannot_be_judged_are_refused(
    answers: list[list[int]], wanted: list[tuple[int, ...]], said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        measures(answers, wanted)


def test_bm25_finds_the_document_that_has_the_words(tmp_path: Path) -> None:
    texts = collection()

    answer = bm25(asked_of(texts, tmp_path), 0)["BM25"].answer([text for text, _ in texts.test])

    assert [found[0] for found in answer] == [wanted for _, (wanted,) in texts.test]


def test_pefa_joins_any_encoder_that_has_vectors(tmp_path: Path) -> None:
    texts = replace(collection(), tested_are_trained=True)
    rng = np.random.default_rng(0)
    of_topic = {topic: rng.normal(size=16).astype(np.float32) for topic in TOPICS}

    def encode(asked: Sequence[str]) -> np.ndarray:
        """Questions about a topic resemble each other; documents below resemble nothing."""
        vectors = np.stack([of_topic[next(topic for topic in TOPICS if topic in text)] for text in asked])
        return np.asarray(vectors / np.linalg.norm(vectors, axis=1, keepdims=True))

    documents = rng.normal(size=(len(TOPICS), 16)).astype(np.float32)
    documents /= np.linalg.norm(documents, axis=1, keepdims=True)
    found = with_pefa("vectors", asked_of(texts, tmp_path), Encoded(documents=documents, encode=encode), seed=0)

    trained_topics = {wanted for _, (wanted,) in texts.train}
    asked = [(text, wanted) for text, (wanted,) in texts.test if wanted in trained_topics]
    assert list(found) == ["vectors", "vectors + PEFA-XS", "vectors + PEFA-XL"]
    first = [answer[0] for answer in found["vectors + PEFA-XL"].answer([text for text, _ in asked])]
    assert first == [wanted for _, wanted in asked]


def test_a_seeded_contender_is_made_for_every_seed_and_others_once(tmp_path: Path) -> None:
    made: list[tuple[str, int]] = []

    def contender(name: str, *, seeded: bool) -> Answerer:
        def make(asked: Asked, seed: int) -> dict[str, Answering]:
            made.append((name, seed))
            right = {text: list(wanted) for text, wanted in asked.texts.test}

            def answer(texts: Sequence[str]) -> list[np.ndarray]:
                return [np.array(right[text] if seed == 0 else [], dtype=np.int64) for text in texts]

            return {name: Answering(answer=answer, nbytes=8)}

        return Answerer(name=name, make=make, seeded=seeded)

    asked = asked_of(collection(), tmp_path)
    found = rows(asked, [contender("fixed", seeded=False), contender("drawn", seeded=True)], seeds=[0, 1])

    assert made == [("fixed", 0), ("drawn", 0), ("drawn", 1)]
    assert [(row["contender"], row["seeds"], row["mrr@10"]) for row in found] == [("fixed", 1, 1.0), ("drawn", 2, 0.5)]
    assert found[0]["mrr@10_sd"] is None
    assert found[1]["mrr@10_sd"] == pytest.approx(np.sqrt(0.5))


def test_the_page_shows_every_contender_and_plots_sizes_and_latency(tmp_path: Path) -> None:
    def generated(asked: Asked, seed: int) -> dict[str, Answering]:
        notes = {"tokenizer": "phrases", "identifier_tokens": 2.5, "train_seconds": 3.0, "positions": 4, "steps": 9}
        return {
            "PIXAR": Answering(
                answer=lambda texts: [np.array([0], dtype=np.int64)] * len(texts), nbytes=1, vocabulary=500, notes=notes
            )
        }

    asked = asked_of(collection(), tmp_path)
    found = rows(asked, [Answerer(name="BM25", make=bm25), Answerer(name="PIXAR", make=generated)], seeds=[0])
    length = {"table": "lengths", "data": "queries", "texts": 5, "tokenizer": "words", "asked_size": 9, "size": 9}
    length |= {"mean": 2.0, "p99": 3.0, "share_of_word_pieces": 0.5, "build_seconds": 0.1, "encode_seconds": 0.1}
    parts = [{"command": f"freshet --data {data}"} for data in ("scifact", "scifact", "medquad")]
    report = {"rows": [*found, length], "parts": parts, "machine": "m", "seconds": 1.0, "quick": True,
              "remark": "Beside other work."}  # fmt: skip

    page = text_report.page(report)
    text_report.plot(report, tmp_path)

    assert "| BM25 | 1 |" in page
    assert "500 tokens, 2.5 per identifier, 9 steps, trained 3 s" in page
    assert "| Search queries (5) | words | 9 | 2.00 | 3 | 0.50 | 0.1 |" in page
    assert {path.name for path in tmp_path.glob("*.png")} == {"text_vocabulary.png", "text_latency.png"}
    json.dumps(report)


def test_a_run_that_ended_early_goes_on_with_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[tuple[str, str]] = []
    broken = [True]

    def contender(name: str) -> Answerer:
        def make(asked: Asked, seed: int) -> dict[str, Answering]:
            if name == "second" and asked.texts.name == "medquad" and broken[0]:
                raise ValueError("the power is gone")
            made.append((asked.texts.name, name))
            return {name: Answering(answer=lambda texts: [np.array([0], dtype=np.int64)] * len(texts), nbytes=8)}

        return Answerer(name=name, make=make)

    monkeypatch.setattr(text_report, "BASELINES", (contender("first"), contender("second")))
    monkeypatch.setattr(text_report, "load_texts", lambda name, _: replace(collection(), name=name))
    monkeypatch.setattr(text_report, "length_rows", lambda **_: [])
    request = Request(how="freshet", out=tmp_path, quick=False, seed=0)

    with pytest.raises(ValueError, match="power"):
        text_report.run(request, names=["scifact", "medquad"], seeds=[0])
    assert json.loads((tmp_path / "text.json").read_text())["seconds"] >= 0
    broken[0] = False
    report = text_report.run(request, names=["medquad"], seeds=[0], resume=True)

    assert made == [("scifact", "first"), ("scifact", "second"), ("medquad", "first"), ("medquad", "second")]
    assert [(row["data"], row["contender"]) for row in report["rows"]] == [made[2], made[3], made[0], made[1]]
    with pytest.raises(ValueError, match="epochs 4, this run 2"):
        text_report.run(request, names=["medquad"], seeds=[0], epochs=2, resume=True)


def test_trained_answerers_have_names_of_their_own_and_quick_ones_are_few() -> None:
    names = [one.name for one in trained(FULL, quick=False)]

    assert len(set(names)) == len(names) == 8
    assert len(trained(QUICK.lasting(2), quick=True)) == 3


def tiny_phrases(
    made: list[TrainedPhrases],
    pairs: Sequence[tuple[str, int]],
    identifiers: Sequence[Sequence[str]],
    tokenizer: object,
    settings: PhraseSettings,
    seed: int,
) -> TrainedPhrases:
    size = ShortlistSize(vectors=2, tokens=4, joined=1)
    small = replace(settings, positions=2, max_tokens=16, batch=25, shortlist=size, encoder_rate=3e-3,
                    output_rate=5e-2)  # fmt: skip
    made.append(train_phrases(pairs, identifiers, WordTokens(), small, seed, encoder=tiny_encoder))
    return made[-1]


def test_what_is_generated_is_counted_in_words_and_shown_by_tokens(tmp_path: Path) -> None:
    pairs, identifiers = corpus()
    # A document with an identifier that is too long for two positions, which nothing can generate.
    identifiers = [[*identifiers[0], "red green blue"], *identifiers[1:]]
    texts = replace(collection(), documents=[one[0] for one in identifiers], identifiers=identifiers,
                    train=[(text, (row,)) for text, row in pairs],
                    test=[(text, (row,)) for text, row in pairs])  # fmt: skip
    budget = Budget(steps=1, epochs=12, least_steps=0, sizes=(320,), equal_size=320)
    made: list[TrainedPhrases] = []
    asked, learn = asked_of(texts, tmp_path), partial(tiny_phrases, made)
    found = [generated_row(asked, 0, budget, kind=kind, size=size, train=learn) for kind, size in vocabularies(budget)]

    assert [row["tokenizer"] for row in found] == ["word pieces", "phrases"]
    for row, model in zip(found, made, strict=True):
        assert (row["left_out"], row["positions"], row["questions"]) == (1, 2, len(pairs))
        assert row["identifier_words"] == np.mean([len(text.split()) for text in model.identifiers.texts])
        generator = model.generator()
        answers = [generator.generate(x, 10).answers for x in model.encode([text for text, _ in pairs])]
        assert row["words"] == np.mean([len(one.text.split()) for each in answers for one in each])
        assert row["first_words"] == np.mean([len(each[0].text.split()) for each in answers])
        for example, place in zip(row["examples"], (len(pairs) // 3, 2 * len(pairs) // 3), strict=True):
            said = [one.text.replace(" ", " · ") for one in answers[place][:4]]
            assert example == {"question": pairs[place][0], "sentences": said}
    report = {"rows": found, "parts": [], "machine": "m", "seconds": 1.0, "quick": False}
    page = text_report.page(report)
    for row in found:
        assert all("<br>".join(example["sentences"]) in page for example in row["examples"])


def test_the_shortlist_stands_beside_full_softmax_and_fixed_positions_of_the_same_model(tmp_path: Path) -> None:
    made: list[TrainedPhrases] = []
    pairs, identifiers = corpus()
    questions = [(text, (row,)) for text, row in pairs]
    texts = replace(collection(), documents=[one[0] for one in identifiers], identifiers=identifiers, train=questions,
                    test=questions)  # fmt: skip
    budget = Budget(steps=1, epochs=12, least_steps=0, sizes=(320,), equal_size=320)
    contender = next(
        one for one in trained(budget, quick=True, train=partial(tiny_phrases, made)) if one.name == "PIXAR phrases 320"
    )
    found = rows(asked_of(texts, tmp_path), [contender], seeds=[0])
    by_name = {row["contender"]: row for row in found}

    assert list(by_name) == ["PIXAR, phrases, 320" + more for more in ("", ", fixed positions", ", full softmax")]
    assert len(made) == 1
    # One set of four tokens has not every document's words; all tokens do.
    full, short = by_name["PIXAR, phrases, 320, full softmax"], by_name["PIXAR, phrases, 320"]
    assert full["recall@100"] == 1.0 > short["recall@100"] > 0
    assert full["mrr@10"] > 0.2  # by chance .12
    assert [row["vocabulary"] is None for row in found] == [False, True, True]


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_every_tokenizer_of_the_rows_cuts_the_identifiers(kind: str) -> None:
    texts = [identifier for each in collection().identifiers for identifier in each] * 2

    mean, high = lengths(TOKENIZERS[kind](texts, 600), texts)

    assert 1 <= mean <= high


def test_the_least_count_grows_with_the_corpus_and_stays_between_the_papers_and_two() -> None:
    assert [scaled_min_count(count) for count in (1, 150_000, 170_000_000)] == [2, 3, 20]
