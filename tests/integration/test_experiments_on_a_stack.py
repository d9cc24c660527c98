"""An experiment on the whole stack, by its commands: every user has one arm through kills of the gateway, exposures say
which, and the results are those of a replay of the topics."""

import json
import uuid
from collections import defaultdict
from pathlib import Path
from typing import Any

import grpc
import pytest
from freshet.v1 import gateway_pb2
from outside import Outside, event, until
from typer.testing import CliRunner

from services.cli.main import app
from services.contracts.topic_reader import TopicReader
from services.contracts.topics.experiments import OPERATIONS
from services.contracts.topics.exposures import EXPOSURES, Exposure, decode_exposure
from services.stack import Stack
from services.stack.operation_record import Control

pytestmark = pytest.mark.integration

PEOPLE = 320


def run(stack: Stack, *arguments: str) -> dict[str, Any]:
    result = CliRunner().invoke(app, [*arguments, "--state", str(stack.place.state.root), "--json"])
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def exposures_of(stack: Stack, name: str) -> list[tuple[str, Exposure]]:
    topic = TopicReader(stack.kafka_bootstrap, EXPOSURES, group_id="test", client_id="test")
    try:
        topic.seek(dict.fromkeys(topic.partitions(), 0))
        records = [(one.key or b"", decode_exposure(one.value)) for one in topic.read_to_end()]
    finally:
        topic.close()
    return [(key.decode(), one) for key, one in records if name in {said[0] for said in one.assignments}]


def test_users_keep_their_arm_and_results_are_a_replays(stack: Stack, tmp_path: Path) -> None:
    stack.up()
    name = f"limit-{uuid.uuid4().hex[:8]}"
    file = tmp_path / "experiment.yaml"
    file.write_text(
        f"name: {name}\nlayer: {name}\narms:\n- {{name: control, share: 0.5}}\n"
        "- {name: limited, share: 0.5, max_per_category: 1}\n"
    )
    run(stack, "experiments", "create", str(file))
    started = run(stack, "experiments", "start", name)
    assert started["state"] == "running"
    people = [f"{name}-{number}" for number in range(PEOPLE)]
    experiments = Control(stack.kafka_bootstrap, OPERATIONS).read().last
    assert experiments is not None
    expected = {user: experiments.after.assigned(user, {})[0].arm for user in people}
    with Outside(stack) as outside:

        def ask(user: str) -> gateway_pb2.RecommendResponse | None:
            try:
                return outside.gateway.Recommend(gateway_pb2.RecommendRequest(user_id=user, k=5), timeout=10)
            except grpc.RpcError:
                return None

        def assigned(user: str) -> str:
            answer = until("the gateway answers by the experiment", lambda: (a := ask(user)) and a.assignments and a)
            (said,) = (one for one in answer.assignments if one.experiment == name)
            return str(said.arm)

        def written(num_people: int) -> list[tuple[str, Exposure]] | None:
            found = exposures_of(stack, name)
            return found if len({key for key, _ in found}) == num_people else None

        for number, user in enumerate(people):
            arm = expected[user]
            assert arm is not None
            assert assigned(user) == arm.name
            if number in (100, 200):
                until("what was shown is in the topic", lambda so_far=number + 1: written(so_far))  # type: ignore[misc]
                stack.kill("gateway")
                stack.up()
        shown = until("every exposure is in the topic", lambda: written(PEOPLE))
        outside.record(*(event(user, outside.items[0], type="click") for user in people[: PEOPLE // 4]))
    arms = defaultdict(set)
    for key, one in shown:
        arms[key] |= {said[1] for said in one.assignments if said[0] == name}
    assert {len(found) for found in arms.values()} == {1}
    found = run(stack, "results", name, "--metric", "click", "--horizon-hours", "0")
    counts = defaultdict(int)
    for arm in arms.values():
        counts[next(iter(arm))] += 1
    assert {arm: one["users"] for arm, one in found["arms"].items()} == counts
    assert {arm: one["exposures"] for arm, one in found["arms"].items()} == {
        arm: sum(1 for _, one in shown if (name, arm, 0.5) in one.assignments) for arm in counts
    }
    assert found["in_two_arms"] == 0
    assert found["sample_ratio_p_value"] > 0.001
    assert run(stack, "experiments", "stop", name)["state"] == "stopped"
    archived = run(stack, "archive", str(tmp_path / "archive"))
    assert archived["exposures"] >= len(shown)
    again = run(
        stack, "results", name, "--metric", "click", "--horizon-hours", "0", "--archive", str(tmp_path / "archive")
    )
    assert again["arms"] == found["arms"]
