"""`freshet plan`: sums that can be checked by hand, limits that are said, wrong input refused by name."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from services.cli.planning import (
    CANDIDATES_BYTES,
    CORE_SHARE,
    EVENT_MS,
    MAX_SEARCH_MS,
    MEMORY_SHARE,
    RECORD_BYTES,
    WRITTEN_BYTES,
    Asked,
    plan,
)
from tests.unit.cli.shell import refused, shown

_GIB = 2**30


def planned(**changes: Any) -> dict[str, Any]:
    asked = {"users": 10**6, "items": 10**6, "events_per_s": 1_000, "recommend_per_s": 1_000} | changes
    return plan(Asked(**asked))


def need(found: dict[str, Any], name: str) -> dict[str, Any]:
    return next(one for one in found["processes"] if one["name"] == name)


def test_a_million_items_are_one_shard_and_the_sums_are_right() -> None:
    found = planned()
    assert (found["shards"], found["search_ms"]) == (1, 5.63)
    # 1,000 of each: .955 and .601 ms are 1.56 cores of work, four processes where half of a core is planned.
    assert (need(found, "gateway")["processes"], need(found, "gateway")["cores"]) == (4, 3.1)
    # Among 3,706 items a Recommend takes 1.067 ms, less than its search of 1.29: nothing beside it.
    candidates = need(found, "candidates")
    assert candidates["processes"] == 12
    assert candidates["cores"] == pytest.approx((5.63 + 12 * EVENT_MS["candidates"]) / CORE_SHARE, abs=0.1)
    assert candidates["memory_gib"] == pytest.approx((158 + CANDIDATES_BYTES * 10**6 / 2**20) / 1024, abs=0.01)
    assert (need(found, "encoder")["processes"], need(found, "refresher")["processes"]) == (1, 2)
    assert need(found, "redis")["memory_gib"] == pytest.approx(11_389 * 10**6 / _GIB, abs=0.01)
    assert found["cores"] == pytest.approx(sum(one["cores"] for one in found["processes"]), abs=0.1)
    memory = sum(one["processes"] * one["memory_gib"] for one in found["processes"])
    assert found["memory_gib"] == pytest.approx(memory, abs=0.1)
    assert found["machines"] == math.ceil(max(found["cores"] / 16, memory / (64 * MEMORY_SHARE)))
    assert not found["extrapolated"]


def test_links_carry_what_their_records_take() -> None:
    found = planned(users=120 * 500)
    links = found["network_mb_per_s"]
    assert links["kafka to encoder"] == 0.11
    # Every one of twelve replicas of candidates and two of the reranker reads every delta.
    assert links["kafka to candidates and reranker"] == pytest.approx(14 * RECORD_BYTES["item delta"] / 1000, abs=0.01)
    # Histories: 60,000 users, each at most once in two minutes.
    assert links["encoder to kafka"] == pytest.approx(0.597 + 500 * 0.008207, abs=0.01)
    assert links["encoder and redis"] == pytest.approx(WRITTEN_BYTES / 1000, abs=0.01)
    assert found["growth_gib_per_day"]["refreshers' ledgers"] == pytest.approx(28_000 * 86_400 / _GIB, abs=0.01)


@pytest.mark.parametrize("items", [1, 99_999, 10**7, 10**8, 10**9, 10**11])
def test_a_shard_fits_into_a_machine_and_is_searched_in_time(items: int) -> None:
    found = planned(items=items, machine_memory_gb=32)
    assert need(found, "candidates")["memory_gib"] <= 32 * MEMORY_SHARE + 0.01
    assert found["search_ms"] <= MAX_SEARCH_MS
    assert found["items_per_shard"] * found["shards"] >= items
    # One shard less would not do.
    fewer = items / max(1, found["shards"] - 1)
    assert found["shards"] == 1 or 158 * 2**20 + fewer * CANDIDATES_BYTES > 32 * MEMORY_SHARE * _GIB


def test_what_cannot_be_built_says_why() -> None:
    found = planned(items=10**9)
    assert "a machine holds 51" in need(found, "reranker")["obstacle"]
    assert need(found, "candidates")["obstacle"] == ""
    assert found["extrapolated"]
    assert "following" in need(planned(events_per_s=6_000), "candidates")["obstacle"]


def test_the_pages_worked_rows_are_the_commands() -> None:
    text = (Path(__file__).resolve().parents[3] / "docs" / "operate" / "scale.md").read_text(encoding="utf-8")
    rows = [line.strip("| ").split(" | ") for line in text.partition("## Worked")[2].splitlines() if line[:3] > "| 0"]
    for cells in [row for row in rows if len(row) == 20 and row[0][0].isdigit()]:
        items, users, events, asks = (int(one.replace(",", "")) for one in cells[:4])
        cores, memory = map(int, cells[4].split(", "))
        found = planned(
            items=items,
            users=users,
            events_per_s=events,
            recommend_per_s=asks,
            machine_cores=cores,
            machine_memory_gb=memory,
        )
        needs = [need(found, name) for name in ("gateway", "candidates", "reranker", "encoder", "refresher", "redis")]
        assert cells[5:] == [
            f"{found['shards']:,}",
            f"{found['search_ms']:.1f}",
            *(f"{one['processes']:,} × {one['memory_gib']:,.1f}" for one in needs),
            f"{found['partitions']}",
            *(f"{found[name]:,.0f}" for name in ("cores", "memory_gib", "machines")),
            f"{sum(found['network_mb_per_s'].values()):,.0f}",
            f"{found['network_mb_per_s']['kafka to candidates and reranker']:,.0f}",
            ", ".join(one["name"] for one in found["processes"] if one["obstacle"]) or "–",
        ]


USUAL = ("--users", "1000000", "--items", "1000000", "--events-per-s", "1000", "--recommend-per-s", "1000")


def test_the_command_prints_a_table_and_that_it_estimates() -> None:
    text = shown("plan", *USUAL)
    for part in ("gateway", "refresher", "redis to gateway", "partitions", "estimates, off by at most 39%"):
        assert part in text


@pytest.mark.parametrize(
    ("option", "value", "field"),
    [
        ("--users", "0", "users=0 allowed: 1 to"),
        ("--items", "-5", "items=-5 allowed: 1 to"),
        ("--events-per-s", "-1", "events_per_s=-1.0 allowed: 0 to"),
        ("--recommend-per-s", "nan", "recommend_per_s=nan allowed: 0 to"),
        ("--machine-memory-gb", "0.5", "machine_memory_gb=0.5 allowed: 1 to"),
        ("--machine-cores", "0", "machine_cores=0 allowed: 1 to"),
    ],
)
def test_a_wrong_value_is_refused_by_name(option: str, value: str, field: str) -> None:
    assert field in json.loads(refused(2, "plan", *USUAL, option, value, "--json"))["error"]
