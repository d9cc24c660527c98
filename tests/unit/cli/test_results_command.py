"""`freshet results --follow`: it goes on after a failure, until the experiment is stopped or is to be stopped."""

import signal
from types import SimpleNamespace
from typing import Any

import pytest

from services.cli.commands import results
from services.cli.output import CommandError


def turns(monkeypatch: pytest.MonkeyPatch, *outcomes: Any, stop_broken: bool = False) -> tuple[Any, int]:
    """Return what `until_stopped` returns of these outcomes, and how many it left."""
    monkeypatch.setattr(results, "FOLLOW_S", 0.0)
    monkeypatch.setattr(results, "RETRY_S", 0.0)
    left = list(outcomes)

    def compare() -> Any:
        one = left.pop(0)
        if isinstance(one, CommandError):
            raise one
        stopped_ms, broken = one
        return SimpleNamespace(stopped_ms=stopped_ms), SimpleNamespace(broken=broken)

    found = results.until_stopped(compare, stop_broken=stop_broken)
    return found, len(left)


def test_it_follows_through_failures_until_the_experiment_is_stopped(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = [("click", "b")]
    (found, _), left = turns(monkeypatch, CommandError("no broker"), (0, []), (0, broken), (7, []), (8, []))
    assert (found.stopped_ms, left) == (7, 1)
    assert capsys.readouterr().err == "error: no broker\n"


def test_a_broken_guardrail_ends_it_if_it_is_to_stop_the_experiment(monkeypatch: pytest.MonkeyPatch) -> None:
    (found, one), left = turns(monkeypatch, (0, []), (0, [("click", "b")]), (7, []), stop_broken=True)
    assert (found.stopped_ms, one.broken, left) == (0, [("click", "b")], 1)


class Deleted:
    """Is interrupted while it is deleted, as a Kafka client was."""

    def __del__(self) -> None:
        signal.raise_signal(signal.SIGINT)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("is_query", [False, True])
def test_an_interrupt_that_python_or_duckdb_swallows_ends_it(is_query: bool) -> None:
    def compare() -> Any:
        Deleted()
        if is_query:
            raise RuntimeError("Query interrupted")
        return SimpleNamespace(stopped_ms=0), SimpleNamespace(broken=[])

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
    try:
        with pytest.raises(KeyboardInterrupt):
            results.until_stopped(compare, stop_broken=False)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)
