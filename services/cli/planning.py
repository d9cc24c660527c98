"""From users, items and rates to processes, cores, memory, partitions, shards and bytes a second: the arithmetic of
`freshet plan`, with the unit costs that were measured.

Estimates: docs/operate/scale.md says which parts were measured, how far predictions were off, and what is extrapolated.

Letters: X items in all, n shards of candidates, U users, E events a second, R recommendations a second.
"""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from services.contracts.processes import PROCESSES
from services.offline.evaluation.scale.unit_costs import Fit
from services.platform.stream.topic import NUM_PARTITIONS, SAFE_REPLICAS
from services.stack.ports import PARTS

# How full things are planned: half of a core, since arrivals bunch; four fifths of a machine's memory, since a merge
# copies and the system needs some.
CORE_SHARE, MEMORY_SHARE = 0.5, 0.8
# A search that takes longer is cut into shards, even where memory would hold it.
MAX_SEARCH_MS = 20.0
# From so many items on candidates loads codes beside `exact` (services/candidates, `auto`).
CODES_FROM = 100_000
# A user's history goes to `histories` at most so often (FRESHET_ENCODER_HISTORY_EVERY_S).
_HISTORY_EVERY_S = 120.0
# The refreshers' ledger: of every interaction that counts (services/refresher).
_LEDGER_BYTES = 36
# Beside the bundle's item states (services/refresher, README): P_x d sums of 8 bytes in the place of 4, and 456.
_SUMS_TIMES, _SUMS_BYTES = 3, 456
_GIB, _MIB, _MB = 2.0**30, 2.0**20, 1e6


@dataclass(frozen=True, kw_only=True, slots=True)
class Asked:
    """What is planned for. machine_memory_gb: GiB of one machine."""

    users: int
    items: int
    events_per_s: float
    recommend_per_s: float
    machine_memory_gb: float = 64.0
    machine_cores: int = 16

    def __post_init__(self) -> None:
        """Raises: ValueError naming field, value and allowed range."""
        for name, least, most in (
            ("users", 1, 10**11),
            ("items", 1, 10**11),
            ("events_per_s", 0, 10**8),
            ("recommend_per_s", 0, 10**8),
            ("machine_memory_gb", 1, 65_536),
            ("machine_cores", 1, 4_096),
        ):
            value = getattr(self, name)
            if not least <= value <= most:
                raise ValueError(f"{name}={value} allowed: {least:,} to {most:,}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Need:
    """Of one kind of process: how many, cores of all, memory of one (GiB), and why it cannot be had; "": it can."""

    name: str
    processes: int
    cores: float
    memory_gib: float
    obstacle: str = ""


def plan(asked: Asked, costs: Mapping[str, Any]) -> dict[str, Any]:
    """The plan as plain values. costs: as of `unit_costs.unit_costs`."""
    fits = {name: Fit(**one) for name, one in costs["fits"].items()}
    neighbours_mib = costs["item_bytes"]["neighbours"] / _MIB
    shards = _shards(asked, fits, neighbours_mib)
    search_ms = _search_ms(asked.items / shards, fits)
    candidates, reranker = _candidates(asked, costs, fits, shards, search_ms), _reranker(asked, costs, fits)
    encoder, refresher = _encoder(asked, costs, fits), _refresher(asked, costs, fits)
    needs = [_gateway(asked, costs, fits, shards), candidates, reranker, encoder, refresher]
    needs += [_redis(asked, costs), _kafka(asked, costs)]
    memory = sum(need.processes * need.memory_gib for need in needs)
    cores = sum(need.cores for need in needs)
    most = asked.machine_memory_gb * MEMORY_SHARE
    return {
        "asked": asdict(asked),
        "shards": shards,
        "items_per_shard": math.ceil(asked.items / shards),
        "search_ms": round(search_ms, 2),
        "processes": [
            asdict(need) | ({} if need.obstacle or need.memory_gib <= most else {"obstacle": _too_large(need, most)})
            for need in needs
        ],
        "partitions": max(NUM_PARTITIONS, 2 ** math.ceil(math.log2(max(encoder.processes, refresher.processes)))),
        "network_mb_per_s": _network(asked, costs, shards, candidates.processes + reranker.processes),
        "growth_gib_per_day": _growth(asked, costs),
        "cores": round(cores, 1),
        "memory_gib": round(memory, 1),
        "machines": max(math.ceil(cores / asked.machine_cores), math.ceil(memory / most)),
        "extrapolated": asked.items / shards > max(costs["measured_items"]),
    }


def _shards(asked: Asked, fits: Mapping[str, Fit], item_mib: float) -> int:
    """The fewest that fit into a machine and are searched in time. item_mib: of an item beside the fit."""
    memory, codes = fits["candidates_peak_mib"], fits["codes_ms"]
    by_memory = (asked.machine_memory_gb * MEMORY_SHARE * 1024 - memory.at_zero) / (memory.slope + item_mib)
    by_time = float(((MAX_SEARCH_MS - codes.at_zero) / codes.slope) ** (1 / codes.power))
    return math.ceil(asked.items / min(by_memory, by_time))


def _search_ms(items: float, fits: Mapping[str, Fit]) -> float:
    return fits["exact_ms" if items < CODES_FROM else "codes_ms"](items)


def _need(name: str, busy: float, memory_mib: float, *, least: int = 1, follows: float = 0.0) -> Need:
    """Processes that work on a core each. busy: cores of work that they share; follows: of a core, what each spends on
    the stream in a thread beside."""
    processes = max(least, math.ceil(busy / CORE_SHARE))
    obstacle = "" if follows <= CORE_SHARE else f"each spends {follows:.1f} cores on following everybody's changes"
    cores = (busy + processes * follows) / CORE_SHARE
    memory_gib = round(memory_mib / 1024, 2)
    return Need(name=name, processes=processes, cores=round(cores, 1), memory_gib=memory_gib, obstacle=obstacle)


def _too_large(need: Need, most_gib: float) -> str:
    return f"one takes {need.memory_gib:,.0f} GiB, a machine holds {most_gib:,.0f}"


def _gateway(asked: Asked, costs: Mapping[str, Any], fits: Mapping[str, Fit], shards: int) -> Need:
    call_ms = costs["milliseconds"]["recommend"]["gateway"] + (shards - 1) * costs["further_shard_ms"]
    event_ms = costs["milliseconds"]["event"]["gateway"]
    busy = (asked.recommend_per_s * call_ms + asked.events_per_s * event_ms) / 1000
    memory = PROCESSES["gateway"].memory_mb + fits["gateway_mib"].slope * asked.items
    return _need("gateway", busy, memory, least=2)


def _candidates(asked: Asked, costs: Mapping[str, Any], fits: Mapping[str, Fit], shards: int, search_ms: float) -> Need:
    """Replicas of every shard. A Recommend takes more than its search: as in path.json, less the search there."""
    beside_ms = max(0.0, costs["milliseconds"]["recommend"]["candidates"] - fits["exact_ms"](costs["path_items"]))
    follows = asked.events_per_s * costs["milliseconds"]["event"]["candidates"] / 1000
    busy = asked.recommend_per_s * (search_ms + beside_ms) / 1000
    held = asked.items / shards
    memory = fits["candidates_peak_mib"](held) + held * costs["item_bytes"]["neighbours"] / _MIB
    one = _need("candidates", busy, memory, least=2, follows=follows)
    return Need(
        name=one.name,
        processes=shards * one.processes,
        cores=round(shards * one.cores, 1),
        memory_gib=one.memory_gib,
        obstacle=one.obstacle,
    )


def _reranker(asked: Asked, costs: Mapping[str, Any], fits: Mapping[str, Fit]) -> Need:
    """Two that follow: only Recommend with rules, and Search, ask it. The memory is a bound: it has no codes."""
    follows = asked.events_per_s * costs["milliseconds"]["event"]["reranker"] / 1000
    return _need("reranker", 0.0, fits["candidates_mib"](asked.items), least=2, follows=follows)


def _encoder(asked: Asked, costs: Mapping[str, Any], fits: Mapping[str, Fit]) -> Need:
    busy = asked.events_per_s * costs["milliseconds"]["event"]["encoder"] / 1000
    table = PROCESSES["encoder"].holds["encoder.onnx"] * costs["item_bytes"]["encoder"] * asked.items / _MIB
    return _need("encoder", busy, PROCESSES["encoder"].memory_mb + fits["names_mib"].slope * asked.items + table)


def _refresher(asked: Asked, costs: Mapping[str, Any], fits: Mapping[str, Fit]) -> Need:
    busy = asked.events_per_s * costs["milliseconds"]["event"]["refresher"] / 1000
    states = asked.items * (_SUMS_TIMES * costs["item_bytes"]["state"] + _SUMS_BYTES) / _MIB
    memory = PROCESSES["refresher"].memory_mb + fits["names_mib"].slope * asked.items + states
    return _need("refresher", busy, memory, least=2)


def _redis(asked: Asked, costs: Mapping[str, Any]) -> Need:
    """One copy of the users, on so many nodes that one fits into a machine."""
    took = costs["milliseconds"]
    busy = (asked.recommend_per_s * took["recommend"]["redis"] + asked.events_per_s * took["event"]["redis"]) / 1000
    total_gib = asked.users * costs["user_bytes"]["memory"] / _GIB
    nodes = max(math.ceil(total_gib / (asked.machine_memory_gb * MEMORY_SHARE)), math.ceil(busy / CORE_SHARE), 1)
    return Need(
        name="redis",
        processes=nodes,
        cores=round(max(nodes, busy / CORE_SHARE), 1),
        memory_gib=round(total_gib / nodes, 2),
    )


def _kafka(asked: Asked, costs: Mapping[str, Any]) -> Need:
    """Three brokers: of every record one has the original, the others write copies. Disk cache comes on top."""
    busy = SAFE_REPLICAS * asked.events_per_s * costs["milliseconds"]["event"]["kafka"] / 1000
    return Need(
        name="kafka",
        processes=SAFE_REPLICAS,
        cores=round(max(SAFE_REPLICAS, busy / CORE_SHARE), 1),
        memory_gib=round(PARTS["kafka"].memory_mb / 1024, 2),
    )


def _network(asked: Asked, costs: Mapping[str, Any], shards: int, scoring: int) -> dict[str, float]:
    """MB a second by link. scoring: processes that each read every delta; of items, at most one an event."""
    size, user = costs["record_bytes"], costs["user_bytes"]
    events, asks = asked.events_per_s, asked.recommend_per_s
    histories = min(events, asked.users / _HISTORY_EVERY_S) * size["history"]
    written = events * (size["interaction"] + size["attribution"] + size["item delta"]) + histories
    written += asks * size["exposure"]
    links = {
        "redis to gateway": asks * user["read"],
        "gateway and candidates": asks * shards * size["search"],
        "gateway to kafka": events * size["interaction"] + asks * size["exposure"],
        "kafka to encoder": events * size["interaction"],
        "encoder and redis": events * user["written"],
        "encoder to kafka": events * size["attribution"] + histories,
        "kafka to refresher": events * size["attribution"],
        "refresher to kafka": events * size["item delta"],
        "kafka to candidates and reranker": scoring * events * size["item delta"],
        "between brokers": (SAFE_REPLICAS - 1) * written,
    }
    return {name: round(value / _MB, 2) for name, value in links.items()}


def _growth(asked: Asked, costs: Mapping[str, Any]) -> dict[str, float]:
    """What a day adds: on Kafka's disks, all copies, of topics that are kept; in memory to the refreshers' ledgers."""
    size, day = costs["record_bytes"], 86_400
    kept = asked.events_per_s * (size["interaction"] + size["attribution"]) + asked.recommend_per_s * size["exposure"]
    return {
        "kafka disks": round(SAFE_REPLICAS * kept * day / _GIB, 2),
        "refreshers' ledgers": round(asked.events_per_s * _LEDGER_BYTES * day / _GIB, 2),
    }


def error_of(costs: Mapping[str, Any]) -> dict[str, Any]:
    """How far predictions of sizes that the fit had not seen were off: share, and in words."""
    errors = [abs(row["error"]) for row in costs["predictions"] if row["error"] is not None]
    sizes = " and ".join(f"{size:,}" for size in sorted({row["num_items"] for row in costs["predictions"]}))
    measured = max(costs["measured_items"])
    says = "not checked yet against a size that was not fitted"
    if errors:
        says = f"off by at most {max(errors):.0%} in memory and search time of {sizes} items, which were not fitted"
    return {"largest": max(errors, default=None), "measured_items": measured, "says": says}
