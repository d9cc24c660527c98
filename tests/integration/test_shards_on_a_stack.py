"""Candidates in shards beside one process of the same catalogue: equal in every bit, promises kept, outages said.

Every answer is compared with the one process's while items change; then bounds and recall of algorithms that leave
something out; then replicas are killed under load.
"""

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from services.algorithms.bundles.model_bundle import Bundle, load_bundle
from services.contracts.wire import PackedQueryState
from services.offline.evaluation.large.catalogue import queries
from services.stack import Ports, Stack
from services.stack.launcher import up_together
from services.stack.ports import owner
from tests.integration.shard_outages import watched
from tests.integration.sharded_answers import Found, Promises, changing, compare, connected, promises, states_of

SEARCHES, POOL_SIZE, SEED = 800, 200, 3
ALGORITHMS = "FRESHET_CANDIDATES_ALGORITHMS"


@pytest.fixture(scope="module")
def bundle(small_bundle: Path) -> Bundle:
    return load_bundle(small_bundle)


@pytest.fixture(scope="module")
def states(bundle: Bundle) -> list[PackedQueryState]:
    return states_of(bundle, queries(bundle, 2_000, seed=SEED))


def alone(stack: Stack, state: Path, settings: dict[str, str] | None = None) -> Stack:
    """One process of candidates with all items beside the stack, unstarted."""
    numbers = {port: number for port, number in Ports.free().numbers.items() if owner(port) == "candidates"}
    ports = Ports({**stack.ports.numbers, **numbers})
    return Stack(state, bundle=stack.bundle, ports=ports, profile="split", settings=settings)


@pytest.fixture(scope="module")
def stack(small_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    stack = Stack(
        tmp_path_factory.mktemp("shards") / "state", bundle=small_bundle, ports=Ports.free(), shards=2, replicas=2
    )
    try:
        stack.up()
        yield stack
    finally:
        for _, one in stack.shard_stacks():
            one.down()
        stack.down()


@pytest.fixture(scope="module")
def whole(stack: Stack, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    one = alone(stack, tmp_path_factory.mktemp("whole") / "state")
    try:
        up_together([*(each for _, each in stack.shard_stacks()), one], ["candidates"], timeout_s=300.0)
        yield one
    finally:
        one.down()


def test_shards_answer_as_one_process_while_items_change(
    stack: Stack, whole: Stack, bundle: Bundle, states: list[PackedQueryState]
) -> None:
    async def exact() -> Found:
        async with connected(stack, whole) as (sharded, one):
            with changing(stack, bundle, SEED):
                return await compare(sharded, one, bundle, states, searches=SEARCHES, seed=SEED)

    found = asyncio.run(exact())
    assert found.compared == SEARCHES
    assert len(found.versions) > 3
    assert found.different == 0, found.examples[:5]


def test_answers_say_what_is_missing_while_replicas_are_killed(stack: Stack, whole: Stack, bundle: Bundle) -> None:
    quiet, one_killed, both_killed, back = asyncio.run(watched(stack, bundle.item_ids, phase_s=2.0, seed=SEED))
    for row in (quiet, one_killed):
        assert (row["failed"], row["marked"]) == (0, 0), row
    assert both_killed["failed"] == 0
    assert both_killed["marks"] == "PARTIAL_CATALOGUE"
    assert both_killed["estimates"] == both_killed["marked"] > 0
    assert 0.3 < both_killed["share"] < 0.7
    assert back["last_marked_s"] < 5


def test_algorithms_that_leave_something_out_keep_their_promises(
    stack: Stack, whole: Stack, bundle: Bundle, states: list[PackedQueryState], tmp_path: Path
) -> None:
    # Changes are in the topic: the one that says what is true follows them, too.
    truth = alone(stack, tmp_path / "truth", {ALGORITHMS: "exact"})
    asked = [*(each for name, each in stack.shard_stacks() if name.endswith("-0")), whole]
    tenth = max(POOL_SIZE, bundle.num_items // 10)
    try:
        for name, replica in stack.shard_stacks():
            if name.endswith("-1"):  # one replica of each shard answers as two do
                replica.stop("candidates")
        truth.up(["candidates"], timeout_s=300.0)
        for algorithm in (
            f"top_k_avg({tenth})",
            f"combined_top_k({tenth // 8},{tenth})",
            f"quantized_tangents({tenth})",
        ):
            for one in asked:
                one.stop("candidates")
                one.place = replace(one.place, settings={**one.place.settings, ALGORITHMS: algorithm})
            up_together(asked, ["candidates"], timeout_s=300.0)

            async def pools(algorithm: str = algorithm) -> Promises:
                async with connected(stack, whole) as (sharded, one), connected(stack, truth) as (_, exactly):
                    return await promises(
                        sharded, one, exactly, bundle, states,
                        algorithm=algorithm, pool_size=POOL_SIZE, seed=SEED,
                    )  # fmt: skip

            found = asyncio.run(pools())
            # Two searches have fewer items than a pool, so every algorithm can prove pools and answers to them.
            assert found.complete >= 8, found
            assert (found.unproven, found.broken) == (0, 0), found
            # Codes prove nothing else; the averages' and pairs' bounds do.
            assert found.promises > found.complete or algorithm.startswith("quantized"), found
            assert found.recall_sharded >= found.recall_whole - 0.1, found
    finally:
        truth.down()
