"""A cut of `make fuzz`: FRESHET_FUZZ_INPUTS inputs (2,000) of seed FRESHET_FUZZ_SEED (0), each target its share."""

import contextlib
import os
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path

import pytest
from campaign import Campaign, Violation, random_of
from freshet.v1 import candidates_pb2, encoder_pb2, gateway_pb2, generator_pb2, refresher_pb2, reranker_pb2
from generator import message_bytes
from rpcs import Service
from targets import all_targets

from services.contracts import topics

INPUTS, SEED = int(os.environ.get("FRESHET_FUZZ_INPUTS", "2000")), int(os.environ.get("FRESHET_FUZZ_SEED", "0"))
TARGETS = {target.name: target for target in all_targets()}
WHOLE = sum(target.weight for target in TARGETS.values())


@pytest.mark.parametrize("name", TARGETS)
async def test_random_inputs_end_as_documented(name: str, tmp_path: Path) -> None:
    campaign = Campaign([TARGETS[name]], SEED)
    await campaign.run(max(10, INPUTS * TARGETS[name].weight // WHOLE), tmp_path)
    assert not campaign.findings, campaign.said()


def test_every_rpc_is_called() -> None:
    files = (gateway_pb2, encoder_pb2, candidates_pb2, reranker_pb2, refresher_pb2, generator_pb2)
    methods = {
        (service.name, method.name)
        for file in files
        for service in file.DESCRIPTOR.services_by_name.values()
        for method in service.methods
    }
    services = [target for target in TARGETS.values() if isinstance(target, Service)]
    assert {(service.name, rpc.name) for service in services for rpc in service.rpcs} == methods


def test_every_topic_has_a_target() -> None:
    words = " ".join(TARGETS).replace("-", "_")
    folder = Path(topics.__file__).parent
    found = {path.stem for path in folder.glob("*.py")} - {"__init__"}
    assert {name for name in found if name not in words} == {"exposures"}  # which nothing reads


def test_an_input_follows_from_its_seed_and_number() -> None:
    request = gateway_pb2.RecommendRequest(user_id="ann", k=3)
    drawn = [[message_bytes(random_of(seed, "x", number), request, {}) for number in range(50)] for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]
    assert len(set(drawn[0])) > 40


class Broken:
    """Fails for one number, and for the numbers after it only within an episode of it."""

    name, weight, episode = "broken", 1, 10

    @contextlib.asynccontextmanager
    async def opened(self, folder: Path) -> AsyncIterator[None]:
        yield

    async def run(self, seed: int, numbers: Sequence[int], found: Callable[[int, BaseException], None]) -> None:
        for number in numbers:
            if number == 17:
                found(number, Violation(f"begun at {numbers[0]}"))


async def test_a_finding_is_told_with_what_gives_it_again(tmp_path: Path) -> None:
    campaign = Campaign([Broken()], 3)
    await campaign.run(40, tmp_path / "all")
    (finding,) = campaign.findings
    assert (finding.target, finding.number) == ("broken", 17)
    assert "--seed 3 --only broken:17" in campaign.said()
    again = Campaign([Broken()], 3)
    await again.run_one("broken", 17, tmp_path / "one")
    assert [one.place.split(" test")[0] for one in again.findings] == ["begun at 10"]
