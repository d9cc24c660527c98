"""Off-policy estimates from the log: those of plain loops, and exact if each outcome is as frequent as its chance."""

from dataclasses import replace
from random import Random

import numpy as np
import pytest
from test_results import ARMS, EXPERIMENT, T0, World, log_of

from services.algorithms.rules.reserved_positions import draw_slots
from services.contracts.topics.experiments import Arm, Experiment
from services.contracts.topics.exposures import Exposure
from services.offline.experiments.off_policy import NoSupport
from services.offline.experiments.policies import Estimates, Given, of_arms, without_new_items
from services.offline.experiments.results import Metric
from services.platform.errors import InvalidRequest

CLICKS = Metric(type="click")
BETTER, CONTROL = Given(arm="better"), Given(arm="control")


def on_devices(world: World) -> World:
    """The same world, with an entry in each request's context."""
    world.exposures = [
        (user, replace(one, context={"device": "tv" if sum(one.exposure_id.encode()) % 3 else "phone"}))
        for user, one in world.exposures
    ]
    return world


def attributed(world: World) -> dict[str, int]:
    """Exposure -> its clicks, by plain loops."""
    found = dict.fromkeys((one.exposure_id for _, one in world.exposures), 0)
    for taken in (one for one in world.interactions if one.type == "click"):
        shown = [
            one
            for user, one in world.exposures
            if user == taken.user_id
            and taken.item_id in one.item_ids
            and one.shown_ms <= taken.event_time_ms < one.shown_ms + 24 * 3_600_000
        ]
        if taken.exposure_id or shown:
            found[taken.exposure_id or max(shown, key=lambda one: one.shown_ms).exposure_id] += 1
    return found


def test_arms_by_context_are_estimated_as_by_plain_loops() -> None:
    world = on_devices(World())
    clicks = attributed(world)
    with log_of(*world.topics()) as log:
        found = of_arms(log, EXPERIMENT, [Given(arm="better", name="device", value="tv"), CONTROL], CLICKS)
    wanted = [
        one
        for _, one in world.exposures
        if one.assignments[0][1] == ("better" if one.context["device"] == "tv" else "control")
    ]
    gained, answers = sum(clicks[one.exposure_id] for one in wanted), len(world.exposures)
    assert (found.answers, found.users) == (answers, world.people)
    assert found.ran.mean == pytest.approx(sum(clicks.values()) / answers)
    assert found.other["IPS"].mean == pytest.approx(gained / 0.5 / answers)
    assert found.other["self-normalised IPS"].mean == pytest.approx(gained / len(wanted))
    assert found.other["doubly robust"].mean == pytest.approx(gained / len(wanted), rel=0.05)
    assert found.other["IPS"].effective_users < world.people


def test_the_better_arm_for_all_is_better_than_what_ran() -> None:
    with log_of(*World(people=3_000, lift=0.8).topics()) as log:
        better, control = (of_arms(log, EXPERIMENT, [one], CLICKS) for one in (BETTER, CONTROL))
    assert better.other["doubly robust"].low > better.ran.high > control.other["doubly robust"].high
    assert better.ran == control.ran


def reserved(copies: int, share: float = 0.25, k: int = 4, num_new: int = 2) -> World:
    """Each outcome of the draw equally often, as its chance is; a user per answer. Users take ordinary item r at
    position j with probability 1 / (1 + r + j), counted exactly by a value."""
    slots = {tuple(one.rows): one for one in (draw_slots(k, num_new, share, Random(seed)) for seed in range(500))}
    world = World(people=0)
    for copy in range(copies):
        for number, (rows, one) in enumerate(sorted(slots.items())):
            items = [f"old-{row}" if row >= 0 else f"new-{-1 - row}" for row in rows]
            user, exposure_id = f"user-{copy}-{number}", f"e-{copy}-{number}"
            sources = ["mol" if row >= 0 else "new" for row in rows]
            exposure = Exposure(
                exposure_id=exposure_id, shown_ms=T0, surface="recommend", model_version="m1", item_ids=items,
                scores=[0.0] * k, sources=sources, propensities=one.propensities,
            )  # fmt: skip
            world.exposures.append((user, exposure))
            for at, row in enumerate(rows):
                world.take(user, items[at], T0 + 1, "buy", exposure_id)
                value = 1 / (1 + row + at) if row >= 0 else 0.125
                world.interactions[-1] = replace(world.interactions[-1], value=value)
    return world


def without(world: World) -> Estimates:
    with log_of(*world.topics()) as log:
        return without_new_items(log, Metric(type="buy", of_values=True))


def test_answers_without_new_items_are_estimated_exactly() -> None:
    found = without(reserved(25))
    assert (found.answers, found.users) == (200, 200)
    # One position is always reserved, so the last item of an answer without new ones was never shown there.
    assert found.positions == 3
    truth = sum(1 / (1 + 2 * at) for at in range(3))
    for name in ("IPS", "self-normalised IPS"):
        assert found.other[name].mean == pytest.approx(truth, rel=1e-6), name
    robust = found.other["doubly robust"]
    assert robust.mean == pytest.approx(truth, rel=0.02)
    assert robust.high - robust.low < found.other["IPS"].high - found.other["IPS"].low
    assert found.ran.mean < truth


def test_pinned_items_and_answers_of_another_length_or_without_a_draw_change_nothing() -> None:
    world = reserved(25)
    expected = without(world)
    for number, (user, one) in enumerate(world.exposures[:30]):
        for change in (
            {"item_ids": one.item_ids[:3], "scores": [0.0] * 3, "sources": one.sources[:3]}
            | {"propensities": one.propensities[:3]},
            {"propensities": ()},
            {"surface": "search"},
            {"first_position": 5},
            {"context": {"surface": "console"}},
        ):
            world.exposures.append((user, replace(one, exposure_id=f"other-{number}-{len(world.exposures)}", **change)))
    assert without(world).other["IPS"].mean == pytest.approx(expected.other["IPS"].mean)
    world = reserved(25)
    world.exposures = [
        (
            user,
            replace(
                one,
                item_ids=["pinned", *one.item_ids],
                scores=[0.0] * 5,
                sources=["mol", *one.sources],
                propensities=[1.0, *one.propensities],
            ),
        )
        for user, one in world.exposures
    ]
    pinned = without(world)
    assert pinned.positions == 4
    assert pinned.other["IPS"].mean == pytest.approx(expected.other["IPS"].mean)


def test_a_log_that_cannot_say_it_is_refused_with_the_reason() -> None:
    world = World(people=2_000)
    with log_of(*world.topics()) as log:
        with pytest.raises(NoSupport, match=r"every logged propensity is 1.*a log without chance"):
            without_new_items(log, CLICKS)
        with pytest.raises(NoSupport, match=r"no user had arm 'third'.*allowed: control, better"):
            of_arms(log, EXPERIMENT, [Given(arm="third")], CLICKS)
        with pytest.raises(InvalidRequest, match="give='better' allowed: an arm for all other requests"):
            of_arms(log, EXPERIMENT, [Given(arm="better", name="device", value="tv")], CLICKS)
        with pytest.raises(InvalidRequest, match="metric='like' allowed: a type that occurred"):
            of_arms(log, EXPERIMENT, [BETTER], Metric(type="like"))
        mixed = Experiment(name="one", arms=ARMS, interleaved=True)
        with pytest.raises(NoSupport, match="an interleaved answer has items of both arms"):
            of_arms(log, mixed, [BETTER], CLICKS)
        wrong = replace(EXPERIMENT, arms=(Arm(name="control", share=0.7), Arm(name="better", share=0.3)))
        with pytest.raises(NoSupport, match=r"the mean weight is 1\.\d+ .*, and 1 where the propensities are right"):
            of_arms(log, wrong, [BETTER], CLICKS)
    with log_of(*World(people=50).topics()) as log, pytest.raises(NoSupport, match="50 users; allowed: 100"):
        of_arms(log, EXPERIMENT, [BETTER], CLICKS)


def test_wrong_propensities_of_slots_are_refused_with_their_position() -> None:
    world = reserved(25)
    world.exposures = [
        (user, replace(one, propensities=[float(np.clip(2 * p, 0, 0.99)) for p in one.propensities]))
        for user, one in world.exposures
    ]
    with pytest.raises(NoSupport, match="the mean weight at position 1 is"):
        without(world)
