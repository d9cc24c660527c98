"""A compact stack is the split one's compose file with one process in the place of three."""

from pathlib import Path

import pytest

from services.cli.doctor.examine import examine
from services.stack import Ports, Stack
from services.stack.compose import compact, local_environment, read_compose

GONE = {"candidates", "reranker", "inference-server"}


def test_compact_has_what_split_has_but_three_and_nobody_waits_for_those() -> None:
    split, one = read_compose(), compact(read_compose())
    assert one.keys() == split.keys() - GONE
    assert all(not GONE & service.needs.keys() for service in one.values())
    assert one["gateway"].command == ("python", "-m", "services.compact")
    assert one["encoder"].environment["FRESHET_ENCODER_ENGINE"] == "in-process"
    assert {name: one[name] for name in ("kafka", "redis", "refresher", "generator")} == {
        name: split[name] for name in ("kafka", "redis", "refresher", "generator")
    }


def test_the_one_process_has_the_settings_of_the_three(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    services = read_compose()
    for name in ("candidates", "reranker", "gateway"):
        services[name].environment[f"FRESHET_OF_{name}"] = "1"  # type: ignore[index]
    ports = Ports.default(offset=100)
    settings = local_environment(compact(services)["gateway"], ports, tmp_path, tmp_path)
    assert {f"FRESHET_OF_{name}" for name in ("candidates", "reranker", "gateway")} <= settings.keys()
    assert settings["FRESHET_GATEWAY_PORT"] == str(ports["gateway"])
    assert settings["FRESHET_METRICS_PORT"] == str(ports["gateway-metrics"])


def test_a_stack_remembers_its_profile_and_knows_no_other_parts(tmp_path: Path) -> None:
    stack = Stack(tmp_path, profile="compact")
    assert not GONE & {*stack.parts}
    assert [part.name for part in stack.status()] == list(stack.parts)
    with pytest.raises(ValueError, match="candidates"):
        stack.up(["candidates"])
    assert Stack(tmp_path).profile == "split"


def test_a_sharded_stack_has_candidates_of_their_own_and_the_gateway_knows_where(tmp_path: Path) -> None:
    ports = Ports.free()
    stack = Stack(tmp_path, bundle=tmp_path / "bundle", ports=ports, shards=3, replicas=2)
    assert "candidates" not in stack.parts
    shards = dict(stack.shard_stacks())
    assert list(shards) == [f"{number}-of-3-replica-{place}" for number in range(3) for place in range(2)]
    addresses = [one.address("candidates") for one in shards.values()]
    assert len({*addresses, stack.address("candidates")}) == 7
    service = stack.components["gateway"].service
    assert service.environment["FRESHET_CANDIDATES_ADDRESS"] == ";".join(
        ",".join(addresses[number : number + 2]) for number in (0, 2, 4)
    )
    assert "candidates" not in service.needs
    for name, one in shards.items():
        assert one.place.settings == {"FRESHET_CANDIDATES_SHARD": f"{name[0]}/3"}
        launch = one.components["candidates"].launch(one.place)
        assert launch.environment["FRESHET_CANDIDATES_SHARD"] == f"{name[0]}/3"
        assert launch.environment["FRESHET_KAFKA_BOOTSTRAP"] == stack.kafka_bootstrap
    with pytest.raises(ValueError, match="shards=3 allowed: 1, or the profile split"):
        Stack(tmp_path, profile="compact", shards=3)


def test_the_doctor_looks_at_the_parts_of_the_profile(tmp_path: Path) -> None:
    abouts = {finding.about for finding in examine(Stack(tmp_path, ports=Ports.free(), profile="compact"))}
    assert "recipe of kafka" in abouts
    assert "recipe of inference-server" not in abouts
