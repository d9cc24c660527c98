"""Sentences of ForgetUser's report: which data of a forgotten user remain, where, and until when.

Retention is that of Freshet's definition of the topic; an operator may have changed it.
"""

from collections.abc import Mapping

from services.contracts.topics import TOPICS
from services.contracts.topics.attributions import ATTRIBUTIONS
from services.contracts.topics.dead_letters import SUFFIX
from services.contracts.topics.experiments import EXPERIMENTS
from services.contracts.topics.exposures import EXPOSURES
from services.contracts.topics.forgets import FORGETS
from services.contracts.topics.histories import HISTORIES
from services.contracts.topics.index_deltas import INDEX_DELTAS
from services.contracts.topics.interactions import INTERACTIONS
from services.contracts.topics.items import ITEMS
from services.contracts.topics.refresher_checkpoints import REFRESHER_CHECKPOINTS
from services.contracts.topics.rules import RULES
from services.contracts.topics.search_clicks import SEARCH_CLICKS
from services.contracts.topics.version_sets import VERSION_SETS
from services.platform.stream.topic import Topic

# Topic -> a user's data after a forget; every topic is here or in `WITHOUT_USER_DATA`.
WITH_USER_DATA: Mapping[str, str] = {
    INTERACTIONS: "the user's records with the user id; every reading skips them, rebuilds and imports included",
    ATTRIBUTIONS: "the user's interactions and query states under a pseudonym; every reading skips them",
    SEARCH_CLICKS: "the words that the user searched with, under a pseudonym; every reading skips them",
    INDEX_DELTAS: "remembered interactions of the user and earlier item states; newer records take them back",
    HISTORIES: "the user id, applied positions and hashes of event ids for good; the user's earlier records, which "
    "nothing reads any more",
    FORGETS: "the user id and up to where it is void, so that rebuilds honour it",
    EXPOSURES: "what the user was shown, under a pseudonym; nothing reads it here",
    INTERACTIONS + SUFFIX: "records of the user that could not be read, with the user id, until `freshet dead-letters "
    "forget` takes them out",
    ATTRIBUTIONS + SUFFIX: "unreadable records of the user under a pseudonym; a forget does not reach them",
    SEARCH_CLICKS + SUFFIX: "unreadable searches of the user under a pseudonym; a forget does not reach them",
    REFRESHER_CHECKPOINTS: "the user's pseudonyms and up to where they are void, in every checkpoint; and what the "
    "refreshers held before the forget, under hashes of a pseudonym, until two later checkpoints of a partition",
    FORGETS + SUFFIX: "unreadable wishes to forget, with the user id; a forget does not reach them",
}
WITHOUT_USER_DATA = frozenset({ITEMS, ITEMS + SUFFIX, VERSION_SETS, EXPERIMENTS, RULES})

_ELSEWHERE = (
    "answers may rest on earlier item states until the refresher's next changes are served, seconds later",
    "the generator takes back what the user's clicks taught it when it reads of the forget; it is not asked for that",
    "Redis keeps the user id in two keys, with the applied positions and up to where the user is forgotten, so that no "
    "record counts again: `{pN}:users` and `{pN}:history:`, until the user's keys would expire",
    "Redis's append-only file keeps earlier writes until Redis writes it anew",
    "an archive (`freshet archive`) holds the user's interactions with the user id until its next run takes them out",
    "backups, snapshots and exports that were made before hold what they held",
)
_DAY_MS = 24 * 3600 * 1000


def until(topic: Topic) -> str:
    settings = topic.settings
    if settings.get("cleanup.policy") == "compact":
        if topic.name == FORGETS:
            return "for good"
        return "until the broker compacts the topic"
    retention_ms = int(settings.get("retention.ms", "0"))
    if retention_ms < 0:
        return "for good: the topic's retention is endless"
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
