"""`freshet plan`: sums that can be checked by hand, limits that are said, wrong input refused by name."""

import json
import math
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from services.cli.main import app
from services.cli.planning import CORE_SHARE, MAX_SEARCH_MS, MEMORY_SHARE, Asked, error_of, plan
from services.offline.evaluation.scale.unit_costs import shipped_costs

_GIB = 2**30
# Round numbers: each a different digit, so that a wrong factor shows.
COSTS: dict[str, Any] = {
    "milliseconds": {
        "recommend": {"gateway": 1.0, "candidates": 1.5, "redis": 0.1},
        "event": {
            "gateway": 0.5, "encoder": 0.4, "candidates": 0.1, "reranker": 0.05, "refresher": 0.2, "kafka": 0.1,
            "redis": 0.02,
        },
    },
    "further_shard_ms": 0.25,
    "path_items": 1_000,
    "item_bytes": {"state": 400, "encoder": 200, "neighbours": 0},
    "fits": {
        "exact_ms": {"at_zero": 0.9, "slope": 1e-4, "power": 1.0},
        "codes_ms": {"at_zero": 1.0, "slope": 1e-3, "power": 0.5},
        "candidates_mib": {"at_zero": 100.0, "slope": 1e-3, "power": 1.0},
        "candidates_peak_mib": {"at_zero": 128.0, "slope": 2**-10, "power": 1.0},
        "gateway_mib": {"at_zero": 10.0, "slope": 1e-3, "power": 1.0},
        "names_mib": {"at_zero": 10.0, "slope": 5e-4, "power": 1.0},
    },
    "user_bytes": {"events": 100, "memory": 10_000, "written": 8_000, "read": 3_000},
    "record_bytes": {
        "interaction": 100, "attribution": 600, "item delta": 500, "history": 8_000, "exposure": 400, "search": 2_000,
    },
    "measured_items": [1_000, 1_000_000],
    "predictions": [
        {"num_items": 300_000, "error": -0.2},
        {"num_items": 300_000, "error": 0.1},
    ],
}  # fmt: skip


def planned(**changes: Any) -> dict[str, Any]:
    asked = {"users": 10**6, "items": 10**6, "events_per_s": 1_000, "recommend_per_s": 1_000} | changes
    return plan(Asked(**asked), COSTS)


def need(found: dict[str, Any], name: str) -> dict[str, Any]:
    return next(one for one in found["processes"] if one["name"] == name)


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["plan", *arguments], env={"COLUMNS": "200", "NO_COLOR": "1", "TERM": "dumb"})


def test_a_million_items_are_one_shard_and_the_sums_are_right() -> None:
    found = planned()
    assert (found["shards"], found["search_ms"]) == (1, 2.0)
    # 1,000 · 1 ms + 1,000 · .5 ms are 1.5 cores of work, three where half of each is planned.
    assert (need(found, "gateway")["processes"], need(found, "gateway")["cores"]) == (3, 3.0)
    # A Recommend takes 1.5 ms where exact takes 1.0 of it: .5 beside the search, which takes 2.0. 2.5 cores of work,
    # and .1 in each replica for following.
    candidates = need(found, "candidates")
    assert candidates["processes"] == 5
    assert candidates["cores"] == pytest.approx((2.5 + 5 * 0.1) / CORE_SHARE)
    assert candidates["memory_gib"] == pytest.approx((128 + 10**6 / 1024) / 1024, abs=0.01)
    assert (need(found, "encoder")["processes"], need(found, "refresher")["processes"]) == (1, 2)
    assert need(found, "redis")["memory_gib"] == pytest.approx(10**10 / _GIB, abs=0.01)
    assert found["cores"] == pytest.approx(sum(one["cores"] for one in found["processes"]), abs=0.1)
    memory = sum(one["processes"] * one["memory_gib"] for one in found["processes"])
    assert found["memory_gib"] == pytest.approx(memory, abs=0.1)
    assert found["machines"] == math.ceil(max(found["cores"] / 16, memory / (64 * MEMORY_SHARE)))
    assert not found["extrapolated"]


def test_links_carry_what_their_records_take() -> None:
    found = planned(users=120 * 500)
    links = found["network_mb_per_s"]
    assert links["kafka to encoder"] == 0.1
    # Every one of five replicas of candidates and two of the reranker reads every delta.
    assert links["kafka to candidates and reranker"] == 7 * 0.5
    # Histories: 60,000 users, each at most once in two minutes.
    assert links["encoder to kafka"] == pytest.approx(0.6 + 500 * 0.008)
    assert links["encoder and redis"] == 8.0
    assert links["redis to gateway"] == 3.0
    assert found["growth_gib_per_day"]["refreshers' ledgers"] == pytest.approx(36_000 * 86_400 / _GIB, abs=0.01)


@pytest.mark.parametrize("items", [1, 99_999, 10**7, 10**8, 10**9, 10**11])
def test_a_shard_fits_into_a_machine_and_is_searched_in_time(items: int) -> None:
    found = planned(items=items, machine_memory_gb=32)
    assert need(found, "candidates")["memory_gib"] <= 32 * MEMORY_SHARE + 0.01
    assert found["search_ms"] <= MAX_SEARCH_MS
    assert found["items_per_shard"] * found["shards"] >= items
    # One shard less would not do.
    fewer = items / max(1, found["shards"] - 1)
    assert found["shards"] == 1 or 128 + fewer / 1024 > 32 * MEMORY_SHARE * 1024


def test_every_shard_costs_the_gateway_a_call() -> None:
    one, many = planned(machine_memory_gb=64), planned(machine_memory_gb=1)
    extra = (many["shards"] - one["shards"]) * 0.25
    assert many["shards"] > 1
    more = need(many, "gateway")["cores"] - need(one, "gateway")["cores"]
    assert more == pytest.approx(extra / CORE_SHARE, abs=0.1)


def test_partitions_are_as_many_as_the_encoders_and_a_power_of_two() -> None:
    assert planned()["partitions"] == 8
    found = planned(events_per_s=4_000_000 / 400)
    assert need(found, "encoder")["processes"] == 8
    assert planned(events_per_s=12_000)["partitions"] == 16


def test_what_cannot_be_built_says_why() -> None:
    found = planned(items=10**9)
    assert "a machine holds 51" in need(found, "reranker")["obstacle"]
    assert need(found, "candidates")["obstacle"] == ""
    assert found["extrapolated"]
    assert "following" in need(planned(events_per_s=6_000), "candidates")["obstacle"]


def test_the_error_that_was_measured_is_said() -> None:
    assert error_of(COSTS)["largest"] == 0.2
    assert "at most 20% in memory and search time of 300,000 items" in error_of(COSTS)["says"]
    unchecked = COSTS | {"predictions": [{"num_items": 300_000, "error": None}]}
    assert error_of(unchecked)["largest"] is None


USUAL = ("--users", "1000000", "--items", "1000000", "--events-per-s", "1000", "--recommend-per-s", "1000")


def test_the_command_prints_a_table_its_sources_and_that_it_estimates() -> None:
    result = run(*USUAL)
    assert result.exit_code == 0, result.output
    for shown in ("gateway", "refresher", "redis to gateway", "partitions", "estimates", "docs/benchmarks/path.json"):
        assert shown in result.stdout
    assert error_of(shipped_costs())["says"] in " ".join(result.stdout.split())


def test_in_json_it_is_one_object_with_the_costs() -> None:
    answer = json.loads(run(*USUAL, "--json").stdout)
    assert answer["asked"]["items"] == 10**6
    assert answer["costs"] == shipped_costs()
    assert {one["name"] for one in answer["processes"]} >= {"gateway", "candidates", "redis", "kafka"}


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
    result = run(*USUAL, option, value, "--json")
    assert result.exit_code == 2
    assert field in json.loads(result.stdout)["error"]
