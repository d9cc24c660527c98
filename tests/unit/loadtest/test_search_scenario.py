"""`python -m loadtest search` against a real gRPC server: the rate, the claims, and clicks watched in answers."""

import subprocess
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from loadtest.population import title_words
from loadtest.scenarios.search import click_claim, latency_claim, read_queries
from tests.unit.loadtest.running import loadtest, summary_of


@pytest.fixture
def items(tmp_path: Path) -> Path:
    titles = ["Toy Story (1995)", "2001: A Space Odyssey (1968)", "", None]
    path = tmp_path / "items.parquet"
    pq.write_table(pa.table({"item_id": ["1", "2", "3", "4"], "title": titles}), path)
    return path


def search(port: int, items: Path, *more: str) -> subprocess.CompletedProcess[str]:
    return loadtest("search", port, items, "--warmup", "0.5", "--arrivals", "uniform", *more)


def test_searches_and_clicks_are_made_and_claimed(small_gateway: Any, items: Path) -> None:
    finished = search(small_gateway.port, items, "--seconds", "3", "--search-rate", "40", "--click-rate", "2")
    summary = summary_of(finished)
    assert summary["calls"]["search"]["offered_per_s"] == pytest.approx(40, rel=0.02)
    assert summary["counts"]["for_a_user"] > 0
    assert summary["counts"]["for_everybody"] > 0
    assert summary["stages_ms"]["text_mol"]["p50"] == 3.0
    found = summary["findings"]
    assert (found["unseen"], found["sources"]) == (0, {"lexical": "answers", "text_mol": "answers"})
    assert found["probes"] >= 5
    assert [claim["held"] for claim in summary["claims"]][1] is True
    histories = [one for request in small_gateway.recorded for one in request.interactions if one.type == "view"]
    assert len(histories) == 5 * 200
    assert {one.user_id for one in histories} == {f"loadtest-{row}" for row in range(200)}
    assert {one.item_id for one in histories} <= {"1", "2", "3", "4"}
    clicks = [request.interactions for request in small_gateway.recorded if request.interactions[0].type != "view"]
    assert all(len({one.user_id for one in probe}) == 3 and len({one.query for one in probe}) == 1 for probe in clicks)
    assert {one.type for probe in clicks for one in probe} == {"search_click"}
    # Words of the titles, years left out.
    asked = {word for request in small_gateway.searched for word in request.query.split()}
    assert asked <= {"Toy", "Story", "2001:", "A", "Space", "Odyssey"}


def test_a_click_that_changes_nothing_breaks_its_claim(small_gateway: Any, items: Path) -> None:
    small_gateway.is_deaf = True
    finished = search(
        small_gateway.port, items, "--seconds", "2", "--search-rate", "5", "--click-rate", "1", "--wait-seconds", "0.3"
    )
    assert finished.returncode == 1
    summary = summary_of(finished)
    assert summary["findings"]["unseen"] >= 1
    assert summary["claims"][1]["held"] is False


def test_clicks_need_a_source_that_learns(small_gateway: Any, items: Path) -> None:
    small_gateway.text_mol_failure = "text_mol is not loaded: no text bundle"
    refused = search(small_gateway.port, items, "--seconds", "1")
    assert refused.returncode != 0
    assert "no text bundle" in refused.stderr
    without = summary_of(search(small_gateway.port, items, "--seconds", "1.5", "--click-rate", "0"))
    assert without["claims"][1]["held"] is None
    assert without["findings"]["sources"]["text_mol"] == "text_mol is not loaded: no text bundle"


def test_the_claims_are_about_p99() -> None:
    assert latency_claim([10.0] * 99 + [59.0]).held
    assert not latency_claim([10.0] * 90 + [99.0] * 10).held
    assert latency_claim([]).held is None
    assert click_claim([0.5, 4.9], unseen=0).held
    assert not click_claim([0.5, 5.5], unseen=0).held
    assert not click_claim([0.5], unseen=1).held
    assert not click_claim([], unseen=1).held
    assert click_claim([], unseen=0).held is None


def test_words_come_from_titles_or_a_file(items: Path, tmp_path: Path) -> None:
    assert title_words(items) == [["Toy", "Story"], ["2001:", "A", "Space", "Odyssey"]]
    queries = tmp_path / "queries.txt"
    queries.write_text("space movies\n\n  films about toys \n")
    assert read_queries(queries) == [["space movies"], ["films about toys"]]
    queries.write_text("\n")
    with pytest.raises(ValueError, match="holds no query"):
        read_queries(queries)
    with pytest.raises(ValueError, match="cannot be read"):
        read_queries(tmp_path / "absent")
    (tmp_path / "ids.txt").write_text("1\n")
    with pytest.raises(ValueError, match="has no titles"):
        title_words(tmp_path / "ids.txt")


def test_probes_that_overlap_write_clicks_of_their_own(small_gateway: Any, items: Path) -> None:
    small_gateway.search_s = 0.2
    finished = search(
        small_gateway.port, items, "--seconds", "2", "--search-rate", "1", "--click-rate", "15", "--with-user", "0"
    )
    clicks = [one for request in small_gateway.recorded for one in request.interactions]
    assert len(clicks) >= 60, finished.stderr
    assert len({one.event_id for one in clicks}) == len({one.user_id for one in clicks}) == len(clicks)
