"""Text collections: questions know their documents, and no test question is an identifier."""

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from services.offline.datasets.locate import Locator
from services.offline.datasets.texts import identifier_texts, load_texts, masked, part


@pytest.fixture
def locator(tmp_path: Path) -> Locator:
    write(
        tmp_path / "medquad" / "qa.parquet",
        [
            {
                "document_id": f"d{topic}",
                "focus": f"Illness {topic}",
                "question": f"What {what} Illness {topic} ?",
                "answer": None if what == "is" else f"It is {topic}.",
                "split": "test" if what == "causes" else "train",
            }
            for topic in range(6)
            for what in ("is", "causes", "cures")
        ],
    )
    write(
        tmp_path / "scifact" / "corpus.parquet",
        [{"doc_id": row, "title": f"Title {row}", "text": f"Text {row}."} for row in range(4)],
    )
    write(
        tmp_path / "scifact" / "queries.parquet",
        [
            {"query_id": 1, "text": "a claim", "split": "train"},
            {"query_id": 2, "text": "another", "split": "validation"},
        ],
    )
    write(
        tmp_path / "scifact" / "qrels.parquet",
        [{"query_id": 1, "doc_id": 3}, {"query_id": 1, "doc_id": 0}, {"query_id": 2, "doc_id": 2}],
    )
    return Locator(root=tmp_path)


def write(path: Path, rows: list[dict[str, object]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows), path)


def test_a_topic_is_its_answers_and_is_named_by_its_training_questions_alone(locator: Locator) -> None:
    found = load_texts("medquad", locator)

    assert found.documents[2] == "Illness 2  It is 2. It is 2."
    assert found.identifiers[2] == ["Illness 2", "What is Illness 2 ?", "What cures Illness 2 ?"]
    assert found.test[2] == ("What causes Illness 2 ?", (2,))
    assert (len(found.train), len(found.test)) == (12, 6)


def test_a_masked_question_has_lost_its_topic_and_its_identifiers_have_not(locator: Locator) -> None:
    found = load_texts("medquad-masked", locator)

    assert found.test[2] == ("What causes ?", (2,))
    assert found.identifiers[2][0] == "Illness 2"


def test_masking_takes_whole_words_whatever_their_case_and_leaves_small_ones() -> None:
    assert masked("What is cancer of the breast in breasts?", "Breast Cancer of the") == "What is of the in breasts?"


def test_a_claim_wants_every_abstract_that_it_cites(locator: Locator) -> None:
    found = load_texts("scifact", locator)

    assert found.train == [("a claim", (0, 3))]
    assert found.test == [("another", (2,))]
    assert found.identifiers == [["Title 0", "a claim"], ["Title 1"], ["Title 2"], ["Title 3", "a claim"]]


def test_a_part_keeps_the_tested_documents_and_the_questions_about_what_is_kept(locator: Locator) -> None:
    whole = load_texts("medquad", locator)

    found = part(whole, documents=3, questions=2, seed=0)

    assert len(found.documents) == 3
    assert len(found.test) == 2
    assert len(found.train) == 6
    for text, (row,) in [*found.train, *found.test]:
        assert found.identifiers[row][0] in text


def test_an_unknown_name_or_a_missing_file_is_said(locator: Locator) -> None:
    with pytest.raises(ValueError, match="data='msmarco'; allowed: medquad, medquad-masked, scifact"):
        load_texts("msmarco", locator)
    with pytest.raises(ValueError, match="texts='tweets'; allowed: "):
        identifier_texts("tweets", locator)
    with pytest.raises(ValueError, match=r"queries/queries.parquet is not on this machine"):
        identifier_texts("queries", locator)
    with pytest.raises(ValueError, match="questions=0; allowed: at least 1"):
        part(load_texts("scifact", locator), documents=2, questions=0, seed=0)
