"""Text collections: questions know their documents."""

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from services.offline.datasets.locate import Locator
from services.offline.datasets.texts import load_texts


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


def test_a_topic_is_its_answers(locator: Locator) -> None:
    found = load_texts("medquad", locator)

    assert found.documents[2] == "Illness 2  It is 2. It is 2."
    assert found.test[2] == ("What causes Illness 2 ?", (2,))
    assert (len(found.train), len(found.test)) == (12, 6)


def test_a_claim_wants_every_abstract_that_it_cites(locator: Locator) -> None:
    found = load_texts("scifact", locator)

    assert found.train == [("a claim", (0, 3))]
    assert found.test == [("another", (2,))]


def test_an_unknown_name_or_a_missing_file_is_said(locator: Locator, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="data='msmarco'; allowed: medquad, scifact"):
        load_texts("msmarco", locator)
    (tmp_path / "medquad" / "qa.parquet").unlink()
    with pytest.raises(ValueError, match=r"medquad/qa.parquet is not on this machine"):
        load_texts("medquad", locator)
