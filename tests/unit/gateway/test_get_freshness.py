"""GetFreshness on in-memory ports: positions and versions, and one mark per part that is away."""

from typing import Any

import pytest
from gateway_scene import Scene

from services.gateway.domain import Degradation
from services.gateway.ports import PartitionProgress
from services.platform.errors import DependencyUnavailable
from services.platform.stream.topic import NUM_PARTITIONS

DOWN = DependencyUnavailable("away")


async def test_every_part_says_how_far_it_is() -> None:
    report = await Scene().get_freshness()
    assert (report.model_version, report.epoch) == ("m1", "epoch-1")
    assert report.interactions[3] == PartitionProgress(partition=3, applied_offset=7, end_offset=9)
    assert report.interactions[4] == PartitionProgress(partition=4, applied_offset=-1, end_offset=2)
    assert [progress.partition for progress in report.interactions] == list(range(NUM_PARTITIONS))
    assert report.attributions == [PartitionProgress(partition=0, applied_offset=4, end_offset=5)]
    assert report.candidates is not None
    assert (report.candidates.index_version, report.candidates.freshness.deltas_offset) == ("index-1", 41)
    assert report.reranker is not None
    assert report.reranker.freshness.deltas_offset == 40
    assert report.degradations == []


@pytest.mark.parametrize(
    ("part", "mark", "lost"),
    [
        ("states", Degradation.STATE_STORE_DOWN, {"epoch": "", "interactions": []}),
        ("candidates", Degradation.POPULAR_FALLBACK, {"candidates": None}),
        ("reranker", Degradation.FIRST_STAGE_ORDER, {"reranker": None}),
    ],
)
async def test_what_is_away_is_marked_and_the_rest_is_told(
    part: str, mark: Degradation, lost: dict[str, Any], scene: Scene
) -> None:
    whole = await scene.get_freshness()
    getattr(scene, part).failure = DOWN
    report = await scene.get_freshness()
    assert report.degradations == [mark]
    for name in ("epoch", "interactions", "attributions", "candidates", "reranker"):
        assert getattr(report, name) == lost.get(name, getattr(whole, name))


async def test_a_partition_that_changes_hands_is_told_once_by_who_is_ahead(scene: Scene) -> None:
    ahead = PartitionProgress(partition=0, applied_offset=9, end_offset=12)
    scene.refreshers.held = [scene.refreshers.held[0], ahead, scene.refreshers.held[0]]
    assert (await scene.get_freshness()).attributions == [ahead]
