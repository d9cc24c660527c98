"""The refresher's settings and its gRPC edge."""

import numpy as np
import pytest
from freshet.v1 import refresher_pb2
from refresher_scene import START_MS, World, interaction, make_rules

from services.platform.config import ConfigError, load_settings
from services.platform.errors import InvalidRequest
from services.refresher.config import RefresherSettings
from services.refresher.domain.records import Forgetting
from services.refresher.server import RefresherServicer


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("SHARE", "fixed(least=2)"),
        ("SHARE", "sometimes"),
        ("MIN_USERS", "0"),
        ("MAX_REMEMBERED", "0"),
        ("PUBLISH_MS", "1"),
        ("LEASE_MS", "10"),
        ("TEXT_ENCODER", "bert"),
    ],
)
def test_a_bad_setting_is_named_with_its_value(name: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(f"FRESHET_REFRESHER_{name}", value)
    with pytest.raises(ConfigError) as refusal:
        load_settings(RefresherSettings)
    assert f"FRESHET_REFRESHER_{name}" in str(refusal.value)
    assert value in str(refusal.value)


async def test_the_edge_speaks_of_partitions_items_and_users() -> None:
    rng = np.random.default_rng(1)
    world = World(make_rules())
    world.log.append(0, interaction(rng, place=(1, 1), item="item-1", user="ab"))
    world.log.append(0, Forgetting(0, "cd", {1: 7}))
    running = world.settled()
    edge = RefresherServicer(running.describe)
    status = await edge.GetStatus(refresher_pb2.GetStatusRequest(), None)
    (partition,) = status.partitions
    assert (partition.folded_offset, partition.end_offset, partition.num_items) == (1, 2, 1)
    assert partition.newest_recorded_time.ToMilliseconds() == START_MS
    assert partition.digest == running.digests()[0]
    assert partition.counts["folded"] == 1
    item = await edge.DescribeItem(refresher_pb2.DescribeItemRequest(item_id="item-1"), None)
    assert item.found
    assert item.is_published
    assert (item.num_users, item.reason, item.evidence, item.coherence) == (1, "", 1.0, item.coherence)
    user = await edge.DescribeContributions(refresher_pb2.DescribeContributionsRequest(user_pseudonym="cd"), None)
    assert [(place.partition, place.offset) for place in user.forgotten_up_to] == [(1, 7)]
    assert user.interactions == 0
    with pytest.raises(InvalidRequest, match="item_id"):
        await edge.DescribeItem(refresher_pb2.DescribeItemRequest(), None)
