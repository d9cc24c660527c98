"""Computes the plan of `freshet plan`, which has processes, cores, memory, partitions, shards and bytes a second.

The unit costs are measurements. docs/benchmarks/path.md has the processor times, docs/benchmarks/scale.md the others,
and docs/operate/scale.md the errors of the predictions.

Letters: X items in all, n shards of candidates, U users, E events a second, R recommendations a second.
"""

import math
from dataclasses import asdict, dataclass
from typing import Any

from services.contracts.processes import PROCESSES
from services.platform.stream.topic import NUM_PARTITIONS, SAFE_REPLICAS
from services.stack.ports import PARTS

# Processor milliseconds that a Recommend among PATH_ITEMS items and an event take in each process, with 8 callers.
RECOMMEND_MS = {"gateway": 0.955, "candidates": 1.067, "redis": 0.087}
EVENT_MS = {
    "gateway": 0.601,
    "encoder": 0.417,
    "candidates": 0.107,
    "reranker": 0.079,
    "refresher": 0.129,
    "kafka": 0.129,
    "redis": 0.044,
}
PATH_ITEMS = 3_706
# The gateway's cost of one more shard: its cost of two calls minus that of one.
FURTHER_SHARD_MS = 0.313
# Bytes per item. STATE_BYTES is an item state, TABLE_BYTES a row of the encoder's table, NAMES_BYTES an id with its
# number in the encoder, and IDS_BYTES an id in the refresher's columns. The others are a process's bytes, including
# mapped columns (docs/benchmarks/large-shards.md); CANDIDATES_BYTES includes neighbours and suffices for a first start.
# CANDIDATES_MIB is the memory of a process without items.
STATE_BYTES, TABLE_BYTES, CANDIDATES_BYTES, RERANKER_BYTES = 432, 200, 2_412, 478
GATEWAY_BYTES, NAMES_BYTES, IDS_BYTES = 62, 252, 60
CANDIDATES_MIB = 158
# Bytes of a user with 100 events in Redis: in memory, per write, per read.
USER_BYTES, WRITTEN_BYTES, READ_BYTES = 11_389, 11_707, 3_065
# Bytes of a record's key and value, and of a search's request and answer.
RECORD_BYTES = {
    "interaction": 111,
    "attribution": 597,
    "item delta": 552,
    "history": 8_207,
    "exposure": 385,
    "search": 2_880,
}
# The largest measured catalogue of one process, and the largest error of a prediction.
MEASURED_ITEMS, LARGEST_ERROR = 10_000_000, 0.39
# The plan uses half of a core, because arrivals are bursty, and four fifths of a machine's memory, because a merge
# copies data and the operating system needs memory too.
CORE_SHARE, MEMORY_SHARE = 0.5, 0.8
# If a search takes longer, the catalogue is split into shards, even if one shard fits into memory.
MAX_SEARCH_MS = 20.0
# A search by codes takes _CODES_MS plus _CODES_ROOT_MS times the square root of the number of items.
_CODES_MS, _CODES_ROOT_MS = 2.4, 3.23e-3
# From this many items on, candidates load codes besides `exact` (services/candidates, `auto`).
CODES_FROM = 100_000
# The shortest time between two writes of a user's history to `histories` (FRESHET_ENCODER_HISTORY_EVERY_S).
_HISTORY_EVERY_S = 120.0
# Bytes per counted interaction in the refreshers' ledgers (services/refresher).
_LEDGER_BYTES = 28
# A refresher's bytes per item (services/refresher, README): the bundle's state; P_x d sums of 8 bytes, which take twice
# the state's bytes; and 232 more.
_SUMS_TIMES, _SUMS_BYTES = 3, 232
_GIB, _MIB, _MB = 2.0**30, 2.0**20, 1e6


@dataclass(frozen=True, kw_only=True, slots=True)
class Asked:
    """The plan's input. `machine_memory_gb` is in GiB. Raises: ValueError naming field, value and range."""

    users: int
    items: int
    events_per_s: float
    recommend_per_s: float
    machine_memory_gb: float = 64.0
    machine_cores: int = 16

    def __post_init__(self) -> None:
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
    """Need of one kind of process: number, cores of all, GiB of one, and the obstacle, if any."""

    name: str
    processes: int
    cores: float
    memory_gib: float
    obstacle: str = ""


def plan(asked: Asked) -> dict[str, Any]:
    """Return the plan as plain values."""
    shards = _shards(asked)
    items, a_shard = asked.items, asked.items / shards
    search_ms = _search_ms(a_shard)
    # What a Recommend takes in candidates beside its search.
    beside_ms = max(0.0, RECOMMEND_MS["candidates"] - _search_ms(PATH_ITEMS))
    gateway_ms = RECOMMEND_MS["gateway"] + (shards - 1) * FURTHER_SHARD_MS
    mib = {name: process.memory_mb for name, process in PROCESSES.items()}
    table_bytes = PROCESSES["encoder"].holds["encoder.onnx"] * TABLE_BYTES
    sums_bytes = _SUMS_TIMES * STATE_BYTES + _SUMS_BYTES

    def busy(name: str, recommend_ms: float = 0.0) -> float:
        """Return the cores that all processes of a name need together."""
        return (asked.recommend_per_s * recommend_ms + asked.events_per_s * EVENT_MS[name]) / 1000

    # Two rerankers, sized by the stream alone, because only Search, and Recommend with rules, call them. Their memory
    # is an upper bound, because a reranker has no codes.
    needs = [
        _need("gateway", busy("gateway", gateway_ms), mib["gateway"] + GATEWAY_BYTES * items / _MIB, least=2),
        _need(
            "candidates",
            asked.recommend_per_s * (search_ms + beside_ms) / 1000,
            CANDIDATES_MIB + CANDIDATES_BYTES * a_shard / _MIB,
            least=2,
            follows=busy("candidates"),
            times=shards,
        ),
        _need("reranker", 0.0, CANDIDATES_MIB + RERANKER_BYTES * items / _MIB, least=2, follows=busy("reranker")),
        _need("encoder", busy("encoder"), mib["encoder"] + (NAMES_BYTES + table_bytes) * items / _MIB),
        _need("refresher", busy("refresher"), mib["refresher"] + (IDS_BYTES + sums_bytes) * items / _MIB, least=2),
        _redis(asked, busy("redis", RECOMMEND_MS["redis"])),
        # Every broker writes every record. The memory for disk cache is not included.
        _whole("kafka", SAFE_REPLICAS, SAFE_REPLICAS * busy("kafka"), PARTS["kafka"].memory_mb / 1024),
    ]
    by_name = {need.name: need.processes for need in needs}
    memory = sum(need.processes * need.memory_gib for need in needs)
    cores = sum(need.cores for need in needs)
    most = asked.machine_memory_gb * MEMORY_SHARE
    return {
        "asked": asdict(asked),
        "shards": shards,
        "items_per_shard": math.ceil(a_shard),
        "search_ms": round(search_ms, 2),
        "processes": [asdict(need) | {"obstacle": need.obstacle or _too_large(need, most)} for need in needs],
        "partitions": max(NUM_PARTITIONS, 2 ** math.ceil(math.log2(max(by_name["encoder"], by_name["refresher"])))),
        "network_mb_per_s": _network(asked, shards, by_name["candidates"] + by_name["reranker"]),
        "growth_gib_per_day": _growth(asked),
        "cores": round(cores, 1),
        "memory_gib": round(memory, 1),
        "machines": max(math.ceil(cores / asked.machine_cores), math.ceil(memory / most)),
        "extrapolated": a_shard > MEASURED_ITEMS,
        "largest_error": LARGEST_ERROR,
    }


def _shards(asked: Asked) -> int:
    """Return the fewest shards that fit into a machine and are searched in time."""
    room = asked.machine_memory_gb * MEMORY_SHARE * _GIB - CANDIDATES_MIB * _MIB
    in_time = ((MAX_SEARCH_MS - _CODES_MS) / _CODES_ROOT_MS) ** 2
    return math.ceil(asked.items / min(room / CANDIDATES_BYTES, in_time))


def _search_ms(items: float) -> float:
    """Return the processor time of a search by `exact`, or from CODES_FROM items on by `quantized_tangents(2000)`."""
    return 0.88 + 1.11e-4 * items if items < CODES_FROM else _CODES_MS + _CODES_ROOT_MS * math.sqrt(items)


def _need(name: str, busy: float, memory_mib: float, *, least: int = 1, follows: float = 0.0, times: int = 1) -> Need:
    """Return the need of `times` groups of processes that use at most one core each.

    `busy` is the cores that a group's processes need together. `follows` is the share of a core that each process
    spends on the stream.
    """
    processes = max(least, math.ceil(busy / CORE_SHARE))
    return Need(
        name=name,
        processes=times * processes,
        cores=round(times * round((busy + processes * follows) / CORE_SHARE, 1), 1),
        memory_gib=round(memory_mib / 1024, 2),
        obstacle="" if follows <= CORE_SHARE else f"each spends {follows:.1f} cores on following everybody's changes",
    )


def _whole(name: str, processes: int, busy: float, memory_gib: float) -> Need:
    """Return the need of `processes` processes, which take at least one core each."""
    cores = round(max(processes, busy / CORE_SHARE), 1)
    return Need(name=name, processes=processes, cores=cores, memory_gib=round(memory_gib, 2))


def _redis(asked: Asked, busy: float) -> Need:
    """One copy of the users, split over nodes that each fit into a machine."""
    total_gib = asked.users * USER_BYTES / _GIB
    nodes = max(math.ceil(total_gib / (asked.machine_memory_gb * MEMORY_SHARE)), math.ceil(busy / CORE_SHARE), 1)
    return _whole("redis", nodes, busy, total_gib / nodes)


def _too_large(need: Need, most: float) -> str:
    return "" if need.memory_gib <= most else f"one takes {need.memory_gib:,.0f} GiB, a machine holds {most:,.0f}"


def _network(asked: Asked, shards: int, scoring: int) -> dict[str, float]:
    """Return MB a second by link. `scoring` processes read all item deltas, of which an event causes at most one."""
    size, events, asks = RECORD_BYTES, asked.events_per_s, asked.recommend_per_s
    histories = min(events, asked.users / _HISTORY_EVERY_S) * size["history"]
    written = events * (size["interaction"] + size["attribution"] + size["item delta"]) + histories
    written += asks * size["exposure"]
    links = {
        "redis to gateway": asks * READ_BYTES,
        "gateway and candidates": asks * shards * size["search"],
        "gateway to kafka": events * size["interaction"] + asks * size["exposure"],
        "kafka to encoder": events * size["interaction"],
        "encoder and redis": events * WRITTEN_BYTES,
        "encoder to kafka": events * size["attribution"] + histories,
        "kafka to refresher": events * size["attribution"],
        "refresher to kafka": events * size["item delta"],
        "kafka to candidates and reranker": scoring * events * size["item delta"],
        "between brokers": (SAFE_REPLICAS - 1) * written,
    }
    return {name: round(value / _MB, 2) for name, value in links.items()}


def _growth(asked: Asked) -> dict[str, float]:
    """Return GiB per day of Kafka's disks (all copies, no retention) and of the refreshers' ledgers."""
    size, day = RECORD_BYTES, 86_400
    bytes_per_s = (
        asked.events_per_s * (size["interaction"] + size["attribution"]) + asked.recommend_per_s * size["exposure"]
    )
    return {
        "kafka disks": round(SAFE_REPLICAS * bytes_per_s * day / _GIB, 2),
        "refreshers' ledgers": round(asked.events_per_s * _LEDGER_BYTES * day / _GIB, 2),
    }
