"""The ten cases of the state work, each with its fix taken back, to show that the checker would have found it.

A patch makes one part behave as it did before its fix (or, where that code is gone, as if the part did not exist).
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from typing import Any
from unittest import mock

from fakes.refresher import MemoryCheckpoints

from services.catalogue import follower as catalogue_follower
from services.gateway.dependencies import Breaker
from services.gateway.recommend.popular import PopularItems
from services.gateway.write import forget
from services.platform.errors import DependencyUnavailable, PreconditionFailed
from services.platform.stream.follower import PoisonPolicy
from services.user_state import layout, values, writer
from services.user_state.log_identity import LogIdentity
from services.user_state.stream_progress import StreamProgress
from services.user_state.writer import StateWriter


def _patches(*patches: Any) -> Callable[[], AbstractContextManager[Any]]:
    def all_of_them() -> AbstractContextManager[Any]:
        stack = ExitStack()
        for target, name, value in patches:
            stack.enter_context(mock.patch.object(target, name, value))
        return stack

    return all_of_them


def _nothing(*_: Any, **__: Any) -> None:
    return None


_apply, _advance = StateWriter.apply, StateWriter.advance


def _apply_unfenced(self: StateWriter, updates: Any, epoch: str, watermarks: Any, beside: Any = ()) -> None:
    _apply(self, updates, epoch, {}, beside)


def _advance_unfenced(self: StateWriter, steps: Any, epoch: str) -> None:
    _advance(self, [replace(step, unfinished=None) for step in steps], epoch)


_end, _made = Breaker.end, PopularItems.__init__


def _ended_by_outage(self: Breaker, error: BaseException | None, **how: Any) -> None:
    is_refusal = isinstance(error, PreconditionFailed)
    _end(self, DependencyUnavailable("an outage") if is_refusal else error, **how)


def _knows_at_once(self: PopularItems, *columns: Any) -> None:
    _made(self, *columns)
    self.knows_withdrawn = True


# Case, and what is taken back.
REVERTED: dict[str, tuple[str, Callable[[], AbstractContextManager[Any]]]] = {
    "1 eviction": (
        "the table of who was applied up to where is not asked",
        _patches(
            (values, "is_lost_user", lambda *_, **__: False),
            (writer, "is_lost_user", lambda *_, **__: False),
            (StateWriter, "find_lost", lambda *_: iter(())),
        ),
    ),
    "2 an older store": (
        "writes are not fenced by the watermarks that the writer knows",
        _patches(
            (StateWriter, "apply", _apply_unfenced),
            (StateWriter, "advance", _advance_unfenced),
            (StreamProgress, "check_in_step", _nothing),
        ),
    ),
    "3 a failing moment": (
        "a record that fails alone is set aside at once",
        _patches((PoisonPolicy, "is_poison", lambda *_, **__: True)),
    ),
    "4 model versions": (
        "a stored state counts as reaching its history",
        _patches((layout, "reaches", lambda state, history: bool(history))),
    ),
    "4 rolling deploy": (
        "a refusal of another model's replica counts as an outage",
        _patches((Breaker, "end", _ended_by_outage)),
    ),
    "5 another topic, a lost tail": (
        "logs are told by their offsets alone",
        _patches((LogIdentity, "check", _nothing), (LogIdentity, "resync", _nothing)),
    ),
    "6 partitions added": (
        "the number of partitions is not compared",
        _patches((writer, "check_epoch", _nothing)),
    ),
    "7 takeover elsewhere": (
        "checkpoints stay on the host that made them",
        _patches((MemoryCheckpoints, "load", lambda *_: iter(()))),
    ),
    "8 a restart without the topics": (
        "candidates and popular items answer before the catalogue is read",
        _patches((catalogue_follower.CatalogueGate, "check", _nothing), (PopularItems, "__init__", _knows_at_once)),
    ),
    "9 the forget report": (
        "the report names no topics",
        _patches((forget, "REMAINS", ())),
    ),
    "10 one hash slot": (
        "progress lies in another slot than the users that it covers",
        _patches((layout, "progress_key", lambda partition: f"{{progress}}:{partition}")),
    ),
}
