"""Decide whether a failure is the record's fault.

A poison record fails alone and deterministically because of its content; it may be set aside. For other failures
(memory, a disk, a model, another version's process) the loop waits, which loses nothing.
"""

import traceback
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import structlog

from services.platform.errors import FreshetError

log = structlog.get_logger()

R = TypeVar("R")

# Failures of a batch before its records are tried alone: most pass within these waits.
ATTEMPTS = 3
# Records tried alone before and after the suspect.
NEIGHBOURS = 8
# Largest share of neighbours that may fail alone. A bad producer's records lie together; if more fail, the process or
# the model is the cause.
MAX_FAILING_NEIGHBOURS = 0.25
# Largest share of the last `WINDOW` records to set aside (`FEW` in any case). Errors of real data hit fewer than one
# record in a thousand; a broken process hits whole kinds. Beyond it the loop waits for an operator.
MAX_POISON_SHARE = 0.01
FEW = 3
WINDOW = 10_000
_MAX_SUSPECTS = 1_000

# Errors that no record causes by itself.
_ENVIRONMENT = (MemoryError, OSError, RecursionError, SystemError, ImportError, EOFError, BufferError, ReferenceError)


def depends_on_record(exc: BaseException) -> bool:
    """Whether a record can cause the error: it and its causes are not of the error tree, memory, files, time or the
    interpreter.
    """
    seen: set[int] = set()
    found: BaseException | None = exc
    while found is not None and id(found) not in seen:
        if isinstance(found, (FreshetError, *_ENVIRONMENT)) or not isinstance(found, Exception):
            return False
        seen.add(id(found))
        found = found.__cause__ or found.__context__
    return True


def signature(exc: BaseException) -> str:
    """Return what identifies a failure: the error's class, and the line that raised it."""
    frames = traceback.extract_tb(exc.__traceback__)
    place = f" at {frames[-1].filename.rpartition('/')[2]}:{frames[-1].lineno}" if frames else ""
    return f"{type(exc).__name__}{place}"


@dataclass(slots=True)
class _Suspect:
    """A record that failed alone; whether others passed since."""

    signature: str
    others_passed: bool = False


class PoisonPolicy(Generic[R]):
    """Judges records of one loop. Not thread-safe."""

    def __init__(self, name: str) -> None:
        """name: the loop's name in the log."""
        self._name = name
        # At most one per partition, besides suspects that passed later.
        self._suspects: OrderedDict[Hashable, _Suspect] = OrderedDict()
        self._lately: deque[R] = deque(maxlen=NEIGHBOURS)
        # Indices of records set aside, in the count of processed records.
        self._dealt_with = 0
        self._set_aside: deque[int] = deque()
        self._logged: tuple[Hashable, str] | None = None

    def applied(self, records: Sequence[R]) -> None:
        """Count applied records, and remember the last ones as neighbours."""
        self._dealt_with += len(records)
        self._lately.extend(records[-NEIGHBOURS:])

    def is_poison(
        self,
        key: Hashable,
        record: R,
        exc: Exception,
        *,
        behind: Sequence[R] = (),
        applied: int = 0,
        rehearse: Callable[[R], object] | None = None,
    ) -> bool:
        """Return whether a record that failed alone may be set aside; if not, wait and try again.

        It needs two calls with the same key and failure, and healthy neighbours: records of `behind` and the last
        applied ones that pass alone in `rehearse`. `rehearse` does all but the visible effects. If the record itself
        passes, writing fails; the evidence is then `applied`, the records applied alone just before.

        Raises: a FreshetError of `rehearse`.
        """
        reason = self._innocent_because(key, record, exc, behind, applied, rehearse)
        if reason:
            if self._logged != (key, reason):
                self._logged = (key, reason)
                log.error("record_holds_stream", follower=self._name, record=str(key), reason=reason, exc_info=exc)
            return False
        self._suspects.pop(key, None)
        self._logged = None
        self._dealt_with += 1
        self._set_aside.append(self._dealt_with)
        log.error("record_set_aside", follower=self._name, record=str(key), reason=signature(exc), exc_info=exc)
        return True

    def _innocent_because(
        self,
        key: Hashable,
        record: R,
        exc: Exception,
        behind: Sequence[R],
        applied: int,
        rehearse: Callable[[R], object] | None,
    ) -> str:
        """Return why it is not set aside; "" if it is."""
        if not depends_on_record(exc):
            return f"{type(exc).__name__}: no record causes this; waiting until it has passed"
        failure = signature(exc)
        known = self._suspects.get(key)
        if known is None or known.signature != failure:
            known = self._suspects[key] = _Suspect(failure)
            if len(self._suspects) > _MAX_SUSPECTS:
                self._suspects.popitem(last=False)
        elif known.others_passed:
            while self._set_aside and self._set_aside[0] <= self._dealt_with - WINDOW:
                self._set_aside.popleft()
            allowed = max(FEW, int(MAX_POISON_SHARE * min(WINDOW, self._dealt_with)))
            if len(self._set_aside) < allowed:
                return ""
            return (
                f"{failure}: {len(self._set_aside)} of the last {min(WINDOW, self._dealt_with)} records were set aside "
                f"already, allowed are {allowed}: the process or the model fails, not the records"
            )
        if rehearse is None or not _fails_alike(rehearse, record, failure):
            known.others_passed |= applied > 0
            return f"{failure}: it fails alone; waiting until other records pass alone"
        neighbours = [*self._lately, *behind[:NEIGHBOURS]]
        failing = sum(not _passes(rehearse, one) for one in neighbours)
        healthy = bool(neighbours) and failing <= MAX_FAILING_NEIGHBOURS * len(neighbours)
        known.others_passed |= healthy
        if healthy:
            return f"{failure}: it fails alone, {len(neighbours) - failing} others pass; it is tried once more"
        return f"{failure}: {failing} of {len(neighbours)} other records fail alone, too, or there are none"


def _passes(rehearse: Callable[[R], object], record: R) -> bool:
    try:
        rehearse(record)
    except FreshetError:
        raise
    except Exception:
        return False
    return True


def _fails_alike(rehearse: Callable[[R], object], record: R, failure: str) -> bool:
    try:
        rehearse(record)
    except FreshetError:
        raise
    except Exception as exc:
        return signature(exc) == failure
    return False
