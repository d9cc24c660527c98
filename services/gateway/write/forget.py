"""Forget a user: write a record, wait until every process has applied it, report.

Processes that are unavailable now apply the record later. The gateway itself has no user data. The report names which
data remain, where, and until when. It states the retention that Freshet defines for a topic; an operator may have
changed it.
"""

import asyncio
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from services.contracts.topics import TOPICS
from services.contracts.topics.attributions import ATTRIBUTIONS
from services.contracts.topics.dead_letters import SUFFIX
from services.contracts.topics.experiments import EXPERIMENTS
from services.contracts.topics.exposures import EXPOSURES
from services.contracts.topics.forgets import FORGETS, Forget
from services.contracts.topics.histories import HISTORIES
from services.contracts.topics.index_deltas import INDEX_DELTAS
from services.contracts.topics.interactions import INTERACTIONS
from services.contracts.topics.items import ITEMS
from services.contracts.topics.refresher_checkpoints import REFRESHER_CHECKPOINTS
from services.contracts.topics.rules import RULES
from services.contracts.topics.search_clicks import SEARCH_CLICKS
from services.contracts.topics.version_sets import VERSION_SETS
from services.gateway.ports import Contributions, Ports, Refreshers, StoredUser
from services.gateway.write.record import RETRY_AFTER_MS
from services.platform import request_context
from services.platform.errors import DeadlineExceeded, DependencyUnavailable, FreshetError
from services.platform.stream.records import covers
from services.platform.stream.topic import Topic
from services.platform.validation import validate_id
from services.user_state.values import now_ms

# By topic: user data that remain after ForgetUser. Every topic is here or in `WITHOUT_USER_DATA`.
WITH_USER_DATA: Mapping[str, str] = {
    INTERACTIONS: "the user's records with the user id; every reading skips them, rebuilds and imports included",
    ATTRIBUTIONS: "the user's interactions and query states under a pseudonym; every reading skips them",
    SEARCH_CLICKS: "the words that the user searched with, under a pseudonym; every reading skips them",
    INDEX_DELTAS: "remembered interactions of the user and earlier item states; newer records cancel them",
    HISTORIES: "the user id, applied positions and hashes of event ids, permanently; the user's earlier records, "
    "which nothing reads any more",
    FORGETS: "the user id and the last forgotten offset of each partition, so that rebuilds skip the forgotten records",
    EXPOSURES: "what the user was shown, under a pseudonym; `ListExposures` and `GetExposure` still return it",
    INTERACTIONS + SUFFIX: "records of the user that could not be read, with the user id, until `freshet dead-letters "
    "forget` removes them",
    ATTRIBUTIONS + SUFFIX: "unreadable records of the user under a pseudonym; a forget does not reach them",
    SEARCH_CLICKS + SUFFIX: "unreadable searches of the user under a pseudonym; a forget does not reach them",
    REFRESHER_CHECKPOINTS: "the user's pseudonyms and their last forgotten offsets, in every checkpoint; and what the "
    "refreshers held before the forget, under hashes of a pseudonym, until two later checkpoints of a partition",
    FORGETS + SUFFIX: "unreadable requests to forget, with the user id; a forget does not reach them",
}
WITHOUT_USER_DATA = frozenset({ITEMS, ITEMS + SUFFIX, VERSION_SETS, EXPERIMENTS, RULES})

_ELSEWHERE = (
    "answers may use earlier item states until the refresher's next changes are served, seconds later",
    "the generator removes what it learnt from the user's clicks after the forget; the report does not wait for it",
    "Redis keeps the user id in two keys, with the applied positions and the last forgotten offsets, so that no record "
    "counts again: `{pN}:users` and `{pN}:history:`, until the user's keys would expire",
    "Redis's append-only file keeps earlier writes until Redis rewrites the file",
    "an archive (`freshet archive`) holds the user's interactions, with the user id, and exposures, under a pseudonym, "
    "until its next run removes them",
    "earlier backups, snapshots and exports keep their contents",
)
_DAY_MS = 24 * 3600 * 1000


def until(topic: Topic) -> str:
    settings = topic.settings
    if settings.get("cleanup.policy") == "compact":
        if topic.name == FORGETS:
            return "permanently"
        return "until the broker compacts the topic"
    retention_ms = int(settings.get("retention.ms", "0"))
    if retention_ms < 0:
        return "permanently: the topic's records never expire"
    if retention_ms:
        return f"until their retention ends, {retention_ms / _DAY_MS:.3g} days after each was written"
    return "until their retention ends, which is the broker's default"


REMAINS: tuple[str, ...] = (
    *(
        f"`{topic.name}` keeps {WITH_USER_DATA[topic.name]}; this stays {until(topic)}"
        for topic in TOPICS
        if topic.name in WITH_USER_DATA
    ),
    *_ELSEWHERE,
)


# Time limit of a call without a deadline.
DEFAULT_WAIT_S = 10.0
_ANSWER_RESERVE_S, _ASK_TIMEOUT_S = 0.1, 1.0
_LOOK_AGAIN_S = 0.05

_IN_MODEL = "the model's weights keep a component of this user until a training without it"
_STORE_UNKNOWN = "what the state store holds is not known: the encoder process did not answer"
_SUMS_UNKNOWN = "what item states and memory hold is not known everywhere: not every refresher answered"


@dataclass(frozen=True, slots=True, kw_only=True)
class ForgetReport:
    """The report. found, left: known counts by kind of data, before and after it. is_applied: whether every process has
    applied the forget. remains: sentences that name remaining data and their end.
    """

    forget_id: str
    found: Mapping[str, int]
    left: Mapping[str, int]
    is_applied: bool
    remains: Sequence[str]


@dataclass(frozen=True, slots=True)
class _Holdings:
    """A user's data. stored: None if the encoder did not answer. of_sets: refreshers' reports by version set."""

    stored: StoredUser | None
    of_sets: Sequence[Sequence[Contributions]]
    all_answered: bool

    @property
    def contributions(self) -> list[Contributions]:
        return [part for of_set in self.of_sets for part in of_set]

    def counts(self) -> dict[str, int]:
        counts: dict[str, int] = {}
        if self.stored is not None:
            counts |= {name: getattr(self.stored, name) for name in ("history_events", "seen_items", "query_states")}
        if self.contributions:
            for name in ("summed_interactions", "remembered_interactions"):
                counts[name] = sum(getattr(part, name) for part in self.contributions)
        return counts

    def remains(self) -> list[str]:
        sentences = list(REMAINS)
        if self.stored is None:
            sentences.append(_STORE_UNKNOWN)
        elif self.stored.in_model:
            sentences.insert(0, _IN_MODEL)
        if not self.all_answered:
            sentences.append(_SUMS_UNKNOWN)
        return sentences


@dataclass(frozen=True, slots=True, kw_only=True)
class ForgetUser:
    """The handler. others: returns the refreshers of the other version sets; each set's refreshers must report every
    partition of `attributions`.
    """

    ports: Ports
    others: Callable[[], Sequence[Refreshers]] = tuple
    append_timeout_s: float = 1.5

    async def __call__(self, user_id: str, *, preview: bool) -> ForgetReport:
        """Forget a user. preview: whether only to report.

        Raises: InvalidRequest; DependencyUnavailable with a retry hint if the record was not acknowledged (it may be
        written), or the encoder does not answer a preview.
        """
        validate_id("user_id", user_id)
        deadline = time.monotonic() + (request_context.remaining_seconds() or DEFAULT_WAIT_S) - _ANSWER_RESERVE_S
        before = await self._look(user_id, (time.monotonic() + deadline) / 2)
        if preview:
            if before.stored is None:
                raise DependencyUnavailable("the encoder process does not answer", retry_after_ms=RETRY_AFTER_MS)
            counts = before.counts()
            return ForgetReport(forget_id="", found=counts, left=counts, is_applied=False, remains=before.remains())
        forget = await self._write(user_id, deadline)
        while True:
            now = await self._look(user_id, deadline)
            applied = await self._is_applied(now, forget, deadline)
            if applied or time.monotonic() + _LOOK_AGAIN_S >= deadline:
                break
            await asyncio.sleep(_LOOK_AGAIN_S)
        return ForgetReport(
            forget_id=forget.forget_id,
            found=before.counts(),
            left=now.counts(),
            is_applied=applied,
            remains=now.remains(),
        )

    async def _write(self, user_id: str, deadline: float) -> Forget:
        try:
            # Callers share a request, so the first answer may be older than this call; the second is not.
            await self.ports.ends.interactions(_within(self.append_timeout_s, deadline))
            ends = await self.ports.ends.interactions(_within(self.append_timeout_s, deadline))
            forget = Forget(
                forget_id=secrets.token_hex(16),
                user_id=user_id,
                up_to={partition: end - 1 for partition, end in ends.items()},
                requested_ms=now_ms(),
            )
            await self.ports.forgets.append(forget, _within(self.append_timeout_s, deadline))
        except (DependencyUnavailable, DeadlineExceeded) as exc:
            raise DependencyUnavailable(f"Kafka: {exc.message}", retry_after_ms=RETRY_AFTER_MS) from exc
        return forget

    async def _look(self, user_id: str, until: float) -> _Holdings:
        """Return the data that is reported until `until` (monotonic clock)."""
        try:
            timeout_s = _within(_ASK_TIMEOUT_S, until)
            async with asyncio.timeout(timeout_s):
                stored = await self.ports.encoder.describe_user(user_id, timeout_s)
        except (FreshetError, TimeoutError):
            return _Holdings(None, (), all_answered=False)
        found = await asyncio.gather(
            *(
                refreshers.contributions(stored.pseudonym, _within(_ASK_TIMEOUT_S, until))
                for refreshers in (self.ports.refreshers, *self.others())
            )
        )
        return _Holdings(stored, [part for part, _ in found], all(answered for _, answered in found))

    async def _is_applied(self, found: _Holdings, forget: Forget, until: float) -> bool:
        if found.stored is None or not covers(found.stored.forgotten_up_to, forget.up_to):
            return False
        spoken_for = [
            {
                partition
                for part in of_set
                if covers(part.forgotten_up_to, forget.up_to)
                for partition in part.partitions
            }
            for of_set in found.of_sets
        ]
        if not found.all_answered:
            return False
        try:
            # Partitions may be added at any time.
            number = await self.ports.ends.attribution_partitions(_within(self.append_timeout_s, until))
        except (DependencyUnavailable, DeadlineExceeded):
            return False
        return all(of_set >= set(range(number)) for of_set in spoken_for)


def _within(limit_s: float, until: float) -> float:
    return max(0.001, min(limit_s, until - time.monotonic()))
