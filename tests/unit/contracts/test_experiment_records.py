"""Experiments: who gets which arm, what an operator may do, and how it is written."""

from collections import Counter
from dataclasses import replace

import pytest

from services.algorithms.rules.filters import ItemFilter
from services.algorithms.rules.ranking_rules import Rule
from services.contracts.operations import Operation
from services.contracts.topics.experiments import (
    Arm,
    Experiment,
    Experiments,
    State,
    decode_operation,
    encode_operation,
)
from services.platform.errors import InvalidRequest, NotFound, PreconditionFailed

USERS = [f"user-{number}" for number in range(20_000)]
BOOSTED = Rule(name="boost", which=ItemFilter(exclude_seen=False, allow_categories=("x",)), boost=0.1)
ARMS = (Arm(name="control", share=0.5), Arm(name="diverse", share=0.5, diversity=0.3))


def experiment(name: str, /, **changes: object) -> Experiment:
    return replace(Experiment(name=name, arms=ARMS, salt=f"salt of {name}"), **changes)  # type: ignore[arg-type]


def running(*experiments: Experiment) -> Experiments:
    all_of_them = Experiments()
    for one in experiments:
        all_of_them = all_of_them.created(one).started(one.name, 7)
    return all_of_them


def arms_of(experiments: Experiments, user_id: str) -> dict[str, str]:
    return {one.experiment.name: one.arm.name for one in experiments.assigned(user_id, {}) if one.arm}


def test_shares_are_those_of_the_arms_and_layers_are_independent() -> None:
    three = (Arm(name="a", share=0.5), Arm(name="b", share=0.3), Arm(name="c", share=0.2))
    found = running(
        experiment("one", arms=three), experiment("two", layer="words", arms=(ARMS[0], Arm(name="x", share=0.5)))
    )
    pairs = Counter((arms["one"], arms["two"]) for arms in (arms_of(found, user) for user in USERS))
    for (first, second), count in pairs.items():
        expected = {arm.name: arm.share for arm in three}[first] * 0.5
        assert count / len(USERS) == pytest.approx(expected, abs=0.012), (first, second)


def test_layers_with_long_names_that_differ_at_the_end_are_independent() -> None:
    layers = ["l" * 63 + end for end in "ab"]
    plain = (ARMS[0], Arm(name="other", share=0.5))
    found = running(*(experiment(f"of-{layer[-1]}", layer=layer, share=0.5, arms=plain) for layer in layers))
    both = Counter(tuple(sorted(arms_of(found, user))) for user in USERS)
    assert both["of-a", "of-b"] / len(USERS) == pytest.approx(0.25, abs=0.012)


def test_no_user_is_in_two_experiments_of_a_layer() -> None:
    found = running(experiment("one", share=0.4), experiment("two", share=0.6))
    counts = Counter(tuple(arms_of(found, user)) for user in USERS)
    assert set(counts) == {("one",), ("two",)}
    assert counts["one",] / len(USERS) == pytest.approx(0.4, abs=0.012)
    with pytest.raises(PreconditionFailed, match=r"wants 10.0% of the users of layer 'default'.* 0.0% are free"):
        found.created(experiment("three", share=0.1))
    stopped = found.stopped("one", 9).created(experiment("three", share=0.4))
    assert stopped.experiments["three"].first == 0.0


def test_a_user_keeps_the_arm_while_others_come_and_go() -> None:
    alone = running(experiment("one", share=0.4))
    later = alone.created(experiment("two", share=0.3)).started("two", 8)
    assert [arms_of(alone, user).get("one") for user in USERS[:500]] == [
        arms_of(later, user).get("one") for user in USERS[:500]
    ]


def test_who_takes_part_visitors_context_and_testers() -> None:
    found = running(experiment("one", context={"surface": "home"}))
    at_home = {"surface": "home", "device": "tv"}
    assert found.assigned("user-1", {}) == ()
    (assigned,) = found.assigned("user-1", at_home)
    assert assigned.share == 0.5
    assert found.assigned("", at_home) == ()
    (visitor,) = found.assigned("", at_home | {"visitor": "v-1"})
    assert visitor.arm in ARMS
    for arm in ("control", "diverse"):
        (forced,) = found.assigned("user-1", {}, {"one": arm})
        assert forced.arm is not None
        assert (forced.arm.name, forced.share) == (arm, 0.0)
    with pytest.raises(InvalidRequest, match=r"arms='two' allowed: a running experiment: one"):
        found.assigned("user-1", {}, {"two": "control"})
    with pytest.raises(InvalidRequest, match=r"'third' allowed: one of control, diverse"):
        found.assigned("user-1", {}, {"one": "third"})


def test_an_interleaved_experiment_gives_everybody_both_arms() -> None:
    (assigned,) = running(experiment("one", interleaved=True)).assigned("user-1", {})
    assert (assigned.arm, assigned.share) == (None, 1.0)


def test_what_an_operator_may_do() -> None:
    created = Experiments().created(experiment("one"))
    assert created.experiments["one"].state is State.CREATED
    assert created.assigned("user-1", {}) == ()
    with pytest.raises(PreconditionFailed, match="exists: take another name"):
        created.created(experiment("one", share=0.1))
    with pytest.raises(PreconditionFailed, match="only a running one can stop"):
        created.stopped("one", 1)
    with pytest.raises(NotFound, match="experiment='two' allowed: one"):
        created.started("two", 1)
    started = created.started("one", 5)
    with pytest.raises(PreconditionFailed, match="only a created one can start"):
        started.started("one", 6)
    with pytest.raises(PreconditionFailed, match="stop it first"):
        started.removed("one")
    other = started.created(experiment("two", layer="other"))
    with pytest.raises(PreconditionFailed, match="both set diversity: put them into one layer"):
        other.started("two", 6)
    ended = started.stopped("one", 9)
    assert (ended.experiments["one"].started_ms, ended.experiments["one"].stopped_ms) == (5, 9)
    assert ended.removed("one").experiments == {}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"name": "One"}, "name='One' allowed"),
        ({"layer": ""}, "layer=''"),
        ({"share": float("nan")}, "share=nan"),
        ({"share": 1.5}, "share=1.5"),
        ({"arms": ARMS[:1]}, "1 arms"),
        ({"arms": (ARMS[0], ARMS[0])}, "each name once"),
        ({"arms": (ARMS[0], Arm(name="b", share=0.4))}, "shares that add up to 0.9"),
        ({"arms": (ARMS[0], Arm(name="b", share=1.0))}, r"arms\[1\].share=1.0"),
        ({"arms": (Arm(name="a", share=0.0), Arm(name="b", share=1.0))}, r"arms\[0\].share=0.0"),
        ({"arms": (ARMS[0], Arm(name="b", share=0.5, diversity=2.0))}, r"arms\[1\].diversity=2.0"),
        ({"arms": (ARMS[0], Arm(name="b", share=0.5, new_item_share=0.6))}, r"arms\[1\].new_item_share=0.6"),
        ({"arms": (ARMS[0], Arm(name="b", share=0.5, max_gap=-0.1))}, r"arms\[1\].max_gap=-0.1"),
        ({"arms": (ARMS[0], Arm(name="b", share=0.5, rules=(BOOSTED,) * 9))}, "9 rules"),
        ({"interleaved": True, "arms": (*ARMS[:1], Arm(name="b", share=0.25), Arm(name="c", share=0.25))}, "exactly 2"),
    ],
)
def test_bad_experiments_are_refused_by_field(changes: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        Experiments().created(experiment("one", **changes))


def test_records_are_read_as_they_were_written() -> None:
    arm = Arm(
        name="b", share=0.5, version_set="next", rules=(BOOSTED,), max_per_category=2, new_item_share=0.0, max_gap=0.0
    )
    found = running(experiment("one", arms=(ARMS[0], arm), context={"surface": "home"}, share=0.25))
    found = found.created(experiment("two", interleaved=True, layer="words")).stopped("one", 11)
    made = Operation(after=found, operation="stop one", operator="ada", operation_id="1", time_ms=11)
    assert decode_operation(encode_operation(made)) == made


def test_a_record_that_breaks_a_limit_is_refused_by_field() -> None:
    outside = Experiments(revision=1, experiments={"one": experiment("one", share=0.5, first=0.9)})
    value = encode_operation(Operation(after=outside, operation="", operator="", operation_id="", time_ms=1))
    with pytest.raises(InvalidRequest, match=r"experiments\[0\].first=0.9 allowed: 0 to 0.5"):
        decode_operation(value)
