"""Candidates in shards on a real stack: `freshet bench shards` on a small model, held against what it must say."""

from pathlib import Path

from services.offline.evaluation.common.report import Request
from services.offline.evaluation.shards.rows import run


def test_shards_answer_as_one_process_and_say_what_is_missing(small_bundle: Path, tmp_path: Path) -> None:
    request = Request(how="freshet bench shards", out=tmp_path, quick=True, seed=3)
    report = run(request, bundle=small_bundle, shards=2, replicas=2, searches=800)
    assert report["compared"] == 800
    assert report["versions"] > 3
    assert report["different"] == 0, report["examples"]
    for row in report["promises"]:
        assert row["promises"] > 0
        assert row["broken"] == 0
        assert row["recall_sharded"] >= row["recall_whole"]
    whole, one_killed, both_killed, back = report["rows"]
    for row in (whole, one_killed):
        assert (row["failed"], row["marked"]) == (0, 0), row
    assert both_killed["failed"] == 0
    assert both_killed["marks"] == "PARTIAL_CATALOGUE"
    assert both_killed["estimates"] == both_killed["marked"] > 0
    assert 0.3 < both_killed["share"] < 0.7
    assert back["last_marked_s"] < 5
    assert "0 different" in (tmp_path / "shards.md").read_text()
