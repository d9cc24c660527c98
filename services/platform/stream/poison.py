"""When a failure is the record's fault, and when it is not: the one policy of every loop that follows topics.

Poison is what fails alone, deterministically, because of the record. It may be set aside. Everything else (memory, a
disk, a model, a process of another version) makes the loop stop, wait and say why: nothing is lost by waiting. It knows
neither topics nor clients: a loop says what was applied, and how a record is tried without writing anything.
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

# Failures of a whole batch before its records are tried alone: most trouble passes within these few waits.
ATTEMPTS = 3
# So many records before the suspect and so many behind it are tried alone beside it.
NEIGHBOURS = 8
# Of the neighbours, at most this share may fail alone. One bad producer's records lie together, so some may; where more
# fail, it is the process or the model.
MAX_FAILING_NEIGHBOURS = 0.25
# Of the last `WINDOW` records, at most this share (and `FEW` in any case) may be set aside. The errors of real data met
# so far hit fewer than one record in a thousand; a broken process or model hits whole kinds of records. Beyond it the
# loop waits: somebody has to look, and a mended version then loses nothing.
MAX_POISON_SHARE = 0.01
FEW = 3
WINDOW = 10_000
_MAX_SUSPECTS = 1_000

# Kinds of errors that no record causes by itself.
_ENVIRONMENT = (MemoryError, OSError, RecursionError, SystemError, ImportError, EOFError, BufferError, ReferenceError)


def depends_on_record(exc: BaseException) -> bool:
    """Whether the error is of a kind that a record can cause: none of the tree, of memory, files, time or the
    interpreter, neither itself nor what it came from."""
    seen: set[int] = set()
    found: BaseException | None = exc
    while found is not None and id(found) not in seen:
        if isinstance(found, (FreshetError, *_ENVIRONMENT)) or not isinstance(found, Exception):
            return False
        seen.add(id(found))
        found = found.__cause__ or found.__context__
    return True


def signature(exc: BaseException) -> str:
    """What makes two failures the same one: the error's class, and the line that raised it."""
    frames = traceback.extract_tb(exc.__traceback__)
    place = f" at {frames[-1].filename.rpartition('/')[2]}:{frames[-1].lineno}" if frames else ""
    return f"{type(exc).__name__}{place}"


@dataclass(slots=True)
class _Suspect:
    """A record that failed alone: how, and whether others passed alone since."""

    signature: str
    others_passed: bool = False


class PoisonPolicy(Generic[R]):
    """Judges records of one loop; for its thread alone."""

    def __init__(self, name: str) -> None:
        """name: of the loop, in the log."""
        self._name = name
        # One for each partition at most, but for what passed in the end.
        self._suspects: OrderedDict[Hashable, _Suspect] = OrderedDict()
        self._lately: deque[R] = deque(maxlen=NEIGHBOURS)
        # Positions of what was set aside, counted in records that this loop has dealt with.
        self._dealt_with = 0
        self._set_aside: deque[int] = deque()
        self._said: tuple[Hashable, str] | None = None

    def applied(self, records: Sequence[R]) -> None:
        """These were applied."""
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
        """A record failed alone: whether it may be set aside. False: wait, and try it again; why is said once.

        True takes two calls for the same key with the same failure, and healthy neighbours by the first one: those of
        `behind` (in order) and of the records applied last pass alone in `rehearse`, which does all but what others
        see and raises as applying does. A failure that rehearsing the record does not show lies in writing: then only
        records that were really `applied` alone just before prove anything.

        Raises: what a rehearsal raises of the error tree: a dependency is away.
        """
        reason = self._innocent_because(key, record, exc, behind, applied, rehearse)
        if reason:
            if self._said != (key, reason):
                self._said = (key, reason)
                log.error("record_holds_stream", follower=self._name, record=str(key), reason=reason, exc_info=exc)
            return False
        self._suspects.pop(key, None)
        self._said = None
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
        """Why the record is not to be set aside now; "" when it is."""
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
