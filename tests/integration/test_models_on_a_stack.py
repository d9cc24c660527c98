"""A second model beside the first on a real stack: the operator's walk under load, and what is refused on the way."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from services.algorithms.bundles.model_bundle import load_bundle
from services.contracts.operation_log import Control
from services.contracts.topics.version_sets import OPERATIONS
from services.offline.backfill.jobs import import_interactions
from services.offline.bundles.model import write_bundle
from services.offline.datasets.simulator import SimulatorConfig, simulate
from services.platform.errors import Conflict
from services.stack import Ports, Stack
from services.stack.version_sets import remove_set, set_names
from tests.integration.model_traffic import Load
from tests.integration.model_walk import canary_of, judge, walk
from tests.unit.bundle.bundle_scene import content
from tests.unit.cli.shell import run

# The walk is a dozen commands and a second model's processes: 50 s on two idle cores, five minutes on busy ones.
pytestmark = pytest.mark.timeout(900)

PEOPLE = SimulatorConfig(
    num_users=300, num_items=400, num_topics=16, mean_events_per_user=40, max_events_per_user=120, seed=7
)


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory, small_bundle: Path) -> Iterator[Stack]:
    # An answer's scores are the model's: popular items score no more for people of few items, and feedback moves no
    # item, however long the walk takes.
    settings = {"FRESHET_GATEWAY_COLD_ITEMS": "0", "FRESHET_REFRESHER_SHARE": "frozen"}
    stack = Stack(tmp_path_factory.mktemp("sets"), bundle=small_bundle, ports=Ports.free(), settings=settings)
    try:
        stack.up()
        import_interactions(
            simulate(PEOPLE),
            bundle=stack.bundle,
            kafka=stack.kafka_bootstrap,
            redis_url=stack.redis_url,
            inference_server=stack.address("inference-server"),
            attributes=False,
        )
        yield stack
    finally:
        for name in set_names(stack):
            remove_set(stack, name)
        stack.down()


def refused(stack: Stack, *arguments: str) -> str:
    result = run("model", *arguments, "--state", stack.place.state.root, "--json")
    assert result.exit_code, result.output
    return result.output


def test_what_cannot_be_is_refused_and_serving_goes_on(stack: Stack, next_bundle: Path, tmp_path: Path) -> None:
    assert "no set was ever staged" in refused(stack, "promote", "next")
    other = write_bundle(tmp_path / "other", content()).path
    assert "a model of another catalogue" in refused(stack, "stage", "next", "--bundle", str(other))
    broken = shutil.copytree(next_bundle, tmp_path / "broken")
    weights = broken / "item_states.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\x01")
    assert "item_states.safetensors" in refused(stack, "stage", "next", "--bundle", str(broken))
    assert "is set 'first' already" in refused(stack, "stage", "next", "--bundle", str(stack.bundle))
    assert set_names(stack) == []
    assert Control(stack.kafka_bootstrap, OPERATIONS).read().last is None


def test_the_walk_under_load(stack: Stack, next_bundle: Path, tmp_path: Path) -> None:
    first, new = load_bundle(stack.bundle), load_bundle(next_bundle)
    load = Load(
        gateway=stack.address("gateway"),
        redis=stack.redis_url,
        users=list(simulate(PEOPLE).user_ids),
        items=list(first.item_ids),
        models=[first.model_version, new.model_version],
        recommends_per_s=10.0,
        events_per_s=20.0,
        seconds=600.0,
        seed=0,
    )
    phases, answers, failed = walk(stack, next_bundle, load, tmp_path / "traffic", quiet_s=1.0, warm_share=0.5)
    operations = Control(stack.kafka_bootstrap, OPERATIONS).read().operations
    salt = next(one.after.salt for one in operations if one.after.canary)
    judged = judge(phases, answers, first, new, canary_of(first.model_version, new.model_version, salt, 0.05))
    assert [one.status for one in answers if one.status != "OK"] == []
    assert failed == []
    assert (judged.mixed, judged.misnamed, judged.wrong) == (0, 0, 0)
    assert judged.scored > 0.5 * judged.checked > 0
    assert judged.by_new["promote"] == judged.by_new["retire"] == 1.0
    assert judged.by_new["before"] == judged.by_new["rollback"] == 0.0
    warmed = next(phase for phase in phases if phase.name == "warm").said
    assert warmed["warm"] == warmed["active"] > 0
    assert warmed["attributions"] > 0
    # The stack's own processes have taken the set over, and nothing is left of another.
    assert set_names(stack) == []
    assert stack.bundle != next_bundle  # as this object was opened
    assert Stack(stack.place.state.root).bundle == next_bundle
    assert "no predecessor" in refused(stack, "rollback")
    assert "allowed: next" in refused(stack, "canary", "first", "5%")
    assert "share=1.01" in refused(stack, "canary", "next", "101%")


def test_two_operators_at_once(stack: Stack) -> None:
    control = Control(stack.kafka_bootstrap, OPERATIONS)
    last = control.read().last
    assert last is not None
    both = last.after.staged(last.after.sets["next"].__class__(name="one", model_version="m-1", bundle="/one"))
    control.write(both, "stage one")
    with pytest.raises(Conflict, match="another operation came first"):
        control.write(both, "stage one")
    control.write(both.retired("one"), "retire one")
