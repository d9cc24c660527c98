"""What is the record's fault: it fails alone, again, because of what it holds, and its neighbours do not."""

from collections.abc import Callable, Collection, Iterator

import pytest
from structlog.testing import capture_logs

from services.platform.errors import DependencyUnavailable, FreshetError, PreconditionFailed
from services.platform.stream.follower import FEW, NEIGHBOURS, WINDOW, PoisonPolicy, depends_on_record


@pytest.fixture(autouse=True)
def _no_logs() -> Iterator[None]:
    """A stack trace per record would take longer than the tests."""
    with capture_logs():
        yield


def fails_on(bad: Collection[int], error: Callable[[], Exception] = lambda: KeyError("no such item")):
    """Tries a record: those in `bad` fail."""

    def rehearse(record: int) -> None:
        if record in bad:
            raise error()

    return rehearse


def verdict(policy: PoisonPolicy[int], record: int, rehearse, **evidence) -> bool:
    """What is said of a record that has just failed alone."""
    try:
        rehearse(record)
    except FreshetError:
        raise
    except Exception as exc:
        return policy.is_poison(record, record, exc, rehearse=rehearse, **evidence)
    pytest.fail("it passes")


@pytest.mark.parametrize(
    ("error", "is_the_records"),
    [
        (KeyError("x"), True),
        (ValueError("x"), True),
        (RuntimeError("x"), True),
        (MemoryError(), False),
        (OSError("disk"), False),
        (TimeoutError(), False),
        (RecursionError(), False),
        (ImportError("x"), False),
        (DependencyUnavailable("x"), False),
        (PreconditionFailed("another format"), False),
    ],
)
def test_only_some_kinds_of_errors_can_be_a_records_fault(error: Exception, is_the_records: bool) -> None:
    assert depends_on_record(error) is is_the_records


def test_what_comes_from_an_error_of_the_environment_is_one() -> None:
    error = ValueError("the batch cannot be made")
    error.__cause__ = MemoryError()
    assert not depends_on_record(error)


def test_without_neighbours_nothing_is_poison_until_some_come() -> None:
    policy, rehearse = PoisonPolicy[int]("test"), fails_on({3})
    assert not any(verdict(policy, 3, rehearse) for _ in range(20))
    assert [verdict(policy, 3, rehearse, behind=[4]) for _ in range(2)] == [False, True]


def test_records_that_were_applied_before_are_neighbours_too() -> None:
    policy, rehearse = PoisonPolicy[int]("test"), fails_on({3})
    policy.applied([1, 2])
    assert [verdict(policy, 3, rehearse) for _ in range(2)] == [False, True]


def test_where_the_neighbours_fail_too_it_is_the_process() -> None:
    policy, rehearse = PoisonPolicy[int]("test"), fails_on(range(3, 100))
    policy.applied([1, 2])
    assert not any(verdict(policy, 3, rehearse, behind=range(4, 20)) for _ in range(20))


def test_another_failure_of_the_same_record_begins_anew() -> None:
    policy = PoisonPolicy[int]("test")
    assert not verdict(policy, 3, fails_on({3}), behind=[4])
    assert not verdict(policy, 3, fails_on({3}, lambda: ValueError("else")), behind=[4])


@pytest.mark.parametrize("error", [MemoryError, OSError])
def test_errors_of_the_environment_never_set_a_record_aside(error: Callable[[], Exception]) -> None:
    policy, rehearse = PoisonPolicy[int]("test"), fails_on({3}, error)
    assert not any(verdict(policy, 3, rehearse, behind=[4, 5]) for _ in range(20))


def test_a_failure_in_writing_needs_others_that_were_really_written() -> None:
    policy = PoisonPolicy[int]("test")
    error = ValueError("what is written does not fit")
    passes = fails_on(())
    assert not any(policy.is_poison(3, 3, error, behind=[4, 5], rehearse=passes) for _ in range(9))
    assert not policy.is_poison(3, 3, error, behind=[4, 5], rehearse=passes, applied=1)
    assert policy.is_poison(3, 3, error, behind=[4, 5], rehearse=passes)


def test_a_dependency_that_is_away_during_the_trial_is_raised() -> None:
    policy = PoisonPolicy[int]("test")

    def rehearse(record: int) -> None:
        raise DependencyUnavailable("away") if record == 4 else KeyError("x")

    with pytest.raises(DependencyUnavailable):
        verdict(policy, 3, rehearse, behind=[4])


def set_aside(policy: PoisonPolicy[int], first: int, poison: int, good: int) -> int:
    """How many are set aside of `poison` records, each with `good` ones behind it."""
    found = 0
    for number in range(poison):
        record = first + number * (good + 1)
        behind = range(record + 1, record + 1 + good)
        rehearse = fails_on({record})
        if any(verdict(policy, record, rehearse, behind=behind) for _ in range(3)):
            found += 1
            policy.applied(behind)
    return found


def test_a_flood_stops_after_a_few() -> None:
    assert set_aside(PoisonPolicy("test"), 0, poison=200, good=NEIGHBOURS) == FEW


def test_one_record_in_a_thousand_is_set_aside_for_as_long_as_it_lasts() -> None:
    policy = PoisonPolicy[int]("test")
    assert set_aside(policy, 0, poison=50, good=999) == 50
    assert WINDOW < 50 * 1_000


def test_what_passes_in_other_partitions_meanwhile_changes_nothing() -> None:
    policy, rehearse = PoisonPolicy[int]("test"), fails_on({3})
    assert not verdict(policy, 3, rehearse, behind=[4])
    policy.applied([100, 101])
    assert verdict(policy, 3, rehearse, behind=[4])


def test_why_a_record_holds_the_stream_is_said_once() -> None:
    policy, rehearse = PoisonPolicy[int]("test"), fails_on({3, 4})
    with capture_logs() as logs:
        for _ in range(10):
            verdict(policy, 3, rehearse, behind=[4])
    assert [entry["event"] for entry in logs] == ["record_holds_stream"]
