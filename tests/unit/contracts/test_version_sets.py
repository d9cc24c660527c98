"""Version sets: what operators may do, who is answered by which set, and whose record counts."""

import pytest

from services.contracts.operations import Counted, Operation
from services.contracts.topics.version_sets import Share, VersionSet, VersionSets, decode_operation, encode_operation
from services.platform.errors import InvalidRequest, NotFound, PreconditionFailed
from services.platform.stream.records import SourceRecord


def _set(name: str, model: str = "") -> VersionSet:
    return VersionSet(
        name=name,
        model_version=model or f"model-{name}",
        bundle=f"/bundles/{name}",
        candidates="127.0.0.1:1",
        refreshers=("127.0.0.1:2", "127.0.0.1:3"),
    )


def _two() -> VersionSets:
    return VersionSets.of_one(_set("a")).staged(_set("b"))


def _record(after: VersionSets, offset: int, operator: str = "ada") -> SourceRecord:
    made = Operation(after=after, operation="stage", operator=operator, operation_id=f"{operator}-{offset}", time_ms=5)
    return SourceRecord(
        topic="version-sets", partition=0, offset=offset, key=None, value=encode_operation(made), written_ms=5
    )


def test_the_walk_and_back() -> None:
    sets = _two().shadowed("b", 0.2).canaried("b", 0.05, "salt")
    assert (sets.serving, sets.revision) == ("a", 3)
    sets = sets.promoted("b")
    assert (sets.serving, sets.before, sets.canary, sets.shadow) == ("b", "a", None, None)
    back = sets.rolled_back()
    assert (back.serving, back.before) == ("a", "")
    assert set(sets.retired("a").sets) == {"b"}
    assert sets.retired("a").before == ""


def test_the_set_that_is_left_may_be_settled_with_the_processes_there_are() -> None:
    left = _two().promoted("b").retired("a")
    settled = left.settled()
    assert settled.revision == left.revision + 1
    assert settled.find("b") == VersionSet(name="b", model_version="model-b", bundle="/bundles/b")
    with pytest.raises(PreconditionFailed, match="2 sets"):
        _two().settled()


def test_rolling_back_a_canary_ends_it_and_nothing_else() -> None:
    back = _two().canaried("b", 0.5, "salt").rolled_back()
    assert (back.serving, back.canary) == ("a", None)


@pytest.mark.parametrize(
    ("operate", "error", "said"),
    [
        (lambda s: s.staged(_set("B!")), InvalidRequest, "name='B!'"),
        (lambda s: s.staged(_set("b")), PreconditionFailed, "staged already"),
        (lambda s: s.staged(_set("c")), PreconditionFailed, "allowed: 2; retire b first"),
        (lambda s: s.staged(_set("c", "model-b")), PreconditionFailed, "is set 'b' already"),
        (lambda s: s.canaried("b", 1.01, ""), InvalidRequest, "share=1.01"),
        (lambda s: s.canaried("b", float("nan"), ""), InvalidRequest, "share=nan"),
        (lambda s: s.canaried("a", 0.5, ""), PreconditionFailed, "serves"),
        (lambda s: s.shadowed("c", 0.5), NotFound, "allowed: a, b"),
        (lambda s: s.promoted("a"), PreconditionFailed, "serves already"),
        (lambda s: s.rolled_back(), PreconditionFailed, "no predecessor"),
        (lambda s: s.retired("a"), PreconditionFailed, "serves"),
        (lambda s: s.canaried("b", 0.05, "").retired("b"), PreconditionFailed, "5.000% of users"),
        (lambda s: s.promoted("b").rolled_back().rolled_back(), PreconditionFailed, "no predecessor"),
    ],
)
def test_what_may_not_be_is_refused_with_its_reason(operate, error, said) -> None:
    with pytest.raises(error, match=said.replace("(", r"\(")):
        operate(_two())


def test_the_canary_moves_its_share_of_users_and_keeps_them_as_it_grows() -> None:
    users = [f"user-{n}" for n in range(100_000)]
    five = _two().canaried("b", 0.05, "first")
    moved = {user for user in users if five.set_for(user) == "b"}
    assert abs(len(moved) / len(users) - 0.05) < 0.0025
    twenty = five.canaried("b", 0.2, "another")
    assert moved <= {user for user in users if twenty.set_for(user) == "b"}
    other = _two().canaried("b", 0.05, "second")
    again = {user for user in users if other.set_for(user) == "b"}
    assert len(moved & again) < 0.2 * len(moved)
    assert five.set_for("") == "a"


def test_of_two_operators_at_once_the_first_ones_record_counts() -> None:
    staged = _two()
    ada, bob = staged.canaried("b", 0.05, "x"), staged.promoted("b")
    records = [_record(staged, 0), _record(ada, 1, "ada"), _record(bob, 2, "bob"), _record(ada.promoted("b"), 3)]
    counted = Counted(decode_operation)
    assert counted.take(records)
    assert counted.void == 1
    assert counted.last is not None
    assert counted.last.after.serving == "b"
    # Another reader in other steps sees the same.
    stepwise = Counted(decode_operation)
    for record in records:
        stepwise.take([record])
    assert stepwise.last == counted.last
    assert not counted.take([SourceRecord(topic="t", partition=0, offset=4, key=None, value=b"\xff", written_ms=0)])
    assert counted.void == 2


def test_a_record_is_read_as_it_was_written_and_checked() -> None:
    made = Operation(
        after=_two().shadowed("b", 0.25).canaried("b", 0.05, "s"),
        operation="canary b 5%",
        operator="ada",
        operation_id="1",
        time_ms=7,
    )
    assert decode_operation(encode_operation(made)) == made
    nobody = VersionSets(revision=1, sets={"a": _set("a")}, serving="a", canary=Share(name="", share=0.5))
    with pytest.raises(InvalidRequest, match="canary='' allowed: one of a"):
        decode_operation(_record(nobody, 0).value)
    wrong = VersionSets(revision=1, sets={"a": _set("a")}, serving="b")
    with pytest.raises(InvalidRequest, match="serving='b' allowed: one of a"):
        decode_operation(_record(wrong, 0).value)
