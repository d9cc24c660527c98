"""Compute the top K of all users in a partition of `interactions`, with the live system's code (`freshet score`).

All of it runs in this process: the live consumer's handler computes histories, the bundle's model computes states from
them, and the code of the candidates process searches exactly and adds the votes of memory and neighbours. `freshet
score --help` says what the gateway adds.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import pyarrow as pa
from prometheus_client import CollectorRegistry

from services.algorithms.bundles.model_bundle import load_bundle
from services.algorithms.native.threads import set_compute_threads
from services.algorithms.rules.filters import ItemFilter
from services.algorithms.scoring.packed_state import after_absence, unpack_query_state
from services.candidates.bootstrap import Live, load_catalogue, make_follower, make_live
from services.candidates.config import CandidatesSettings
from services.candidates.domain import SearchQuery, SearchResult, Stage
from services.candidates.metrics import CandidatesMetrics
from services.catalogue.follower import CatalogueGate
from services.contracts.shards import WHOLE
from services.contracts.wire import PackedQueryState
from services.encoder.bootstrap import forget_log, in_process_encoder, kafka_stream, vocabulary_of
from services.encoder.config import EncoderSettings
from services.encoder.domain import Vocabulary
from services.encoder.handlers.apply_records import ApplyRecords
from services.encoder.handlers.encode import states_of
from services.encoder.models import Model
from services.encoder.ports import SequenceEncoder
from services.offline.archive.files import open_whole
from services.offline.archive.writing import check_continues
from services.offline.backfill.answer_rows import SCHEMA
from services.offline.backfill.memory_store import MemoryStore
from services.offline.backfill.reattribution import POLL_RECORDS, RECORDS_PER_USER, read_partition
from services.platform.errors import DependencyUnavailable
from services.platform.request_context import OFF
from services.platform.rpc.server import HealthState
from services.user_state.forgetting import Forgotten

# Number of users in one call of the model or of the search.
_USERS = 32

Row = dict[str, Any]


class ScoringCandidates(CandidatesSettings):
    """Settings of a candidates process that writes no dead letters and no snapshots."""

    @property
    def does_common_work(self) -> bool:
        return False

    @property
    def alone(self) -> Self:
        """Return settings for the whole catalogue, searched exactly in memory without audits."""
        return self.model_copy(update={"algorithms": "exact", "shard": WHOLE, "device": "cpu", "audit_share": 0.0})


class _NoOutbox:
    """Drops all records: scoring writes no attributions, and the live consumer writes the dead letters."""

    def publish(self, *records: Any) -> None:
        """Drop the records."""

    def close(self) -> None:
        """Do nothing."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Scoring:
    """The inputs of a run.

    run: unique name. archive: the job reads it first, then the topic from the archive's end. cold_items: the gateway's
    setting. as_of_ms: request time of all users in Unix milliseconds.
    """

    run: str
    encoder: EncoderSettings
    candidates: ScoringCandidates
    archive: Path | None
    k: int
    cold_items: int
    as_of_ms: int


def score_partition(job: Scoring, partition: int, users: Sequence[str] | None = None) -> pa.Table:
    """Return a row, as `freshet recommend --batch` does, for each user of the partition.

    users: score only these users, in this order; a user without a history gets no items. None scores all users with a
    history, sorted by id.
    Raises: BundleError, PreconditionFailed, DependencyUnavailable.
    """
    live = _live(job)  # verifies the checksums of the bundle's files
    bundle = load_bundle(job.encoder.bundle, verify=False)
    vocabulary, encoder = vocabulary_of(bundle), in_process_encoder(job.encoder, bundle)
    store, epoch = _folded(job, partition, vocabulary, encoder)
    wanted = sorted(store.user_ids(partition, epoch)) if users is None else users
    rows: list[Row] = []
    for start in range(0, len(wanted), _USERS):
        histories = store.load_users(wanted[start : start + _USERS], epoch)
        asked = {
            user_id: after_absence(state.query_state, vocabulary.absence, state.event_time_ms, job.as_of_ms)
            for user_id, state in states_of(Model(vocabulary, encoder), histories, epoch, cached=False).items()
        }
        states = {user_id: state for user_id, (state, _) in asked.items()}
        seen = {user_id: _newest_first(store.seen.get(user_id, {})) for user_id in states}
        searches = [_search(one, job.k, seen[user], store.turned_down[user]) for user, one in states.items()]
        found = dict(zip(states, live.search.find_all(searches) if searches else (), strict=True))
        for user_id in wanted[start : start + _USERS]:
            is_cold = len(seen.get(user_id, ())) < job.cold_items
            position = histories[user_id].positions.get(partition)
            bucket = asked[user_id][1] if user_id in asked else 0
            row = _row(user_id, found.get(user_id), vocabulary, partition, position, is_cold=is_cold)
            rows.append(row | {"absence_bucket": bucket})
    return pa.Table.from_pylist(rows, schema=SCHEMA)


def _folded(job: Scoring, partition: int, vocabulary: Vocabulary, encoder: SequenceEncoder) -> tuple[MemoryStore, str]:
    mine = job.encoder.model_copy(update={"group_id": "freshet-score", "max_poll_records": POLL_RECORDS})
    stream = kafka_stream(mine, [partition])
    every, forgets = kafka_stream(mine), forget_log(mine)
    try:
        archive = None if job.archive is None else open_whole(job.archive, partitions=[partition])
        if archive is not None:
            check_continues(archive, every)
        store, forgotten = MemoryStore(max_seen=mine.max_seen_items), Forgotten()
        forgotten.read(forgets)
        handler = ApplyRecords(
            store=store,
            outbox=_NoOutbox(),
            encoder=encoder,
            vocabulary=vocabulary,
            pseudonym_key=b"",
            forgotten=forgotten,
            stores_states=False,
            attributes=False,
            records_per_user=RECORDS_PER_USER,
        )
        handler.resync(stream)
        for records in read_partition(stream, partition, stream.end_offsets()[partition], archive):
            handler.apply(records)
        return store, handler.progress.epoch
    finally:
        for reader in (stream, every, forgets):
            reader.close()


# Workers and broker may share a machine's cores: 10 s were too short while two workers imported PyTorch.
_SILENCE_S = 30.0
# Catalogues by run: a worker computes several parts of a run with one catalogue, and each new run reads it again.
_opened: dict[str, Live] = {}


def _live(job: Scoring) -> Live:
    if job.run not in _opened:
        _opened.clear()
        _opened[job.run] = caught_up(job.candidates)
    return _opened[job.run]


def caught_up(settings: CandidatesSettings) -> Live:
    """Return the served catalogue after reading its topics once.

    Raises: BundleError, MemoryError; DependencyUnavailable for unreadable topics.
    """
    set_compute_threads(settings.compute_threads)
    metrics, health = CandidatesMetrics(CollectorRegistry()), HealthState()
    live = make_live(settings, load_catalogue(settings), metrics)
    follower, _ = make_follower(settings, live, metrics, health, CatalogueGate("candidates", health), OFF)
    heard = time.monotonic()
    try:
        while follower.is_behind:
            if follower.turn():
                heard = time.monotonic()
            elif time.monotonic() - heard > _SILENCE_S:
                raise DependencyUnavailable("the catalogue's topics fell silent, or there is no memory for its changes")
    finally:
        follower.finish()
    return live


def _newest_first(seen: Mapping[str, int]) -> tuple[str, ...]:
    return tuple(sorted(seen, key=lambda item_id: (seen[item_id], item_id), reverse=True))


def _search(state: PackedQueryState, k: int, seen: tuple[str, ...], against: Sequence[str]) -> SearchQuery:
    query = unpack_query_state(
        state.components, state.gate, num_components=state.num_components, component_width=state.component_width
    )
    wanted = ItemFilter(exclude_seen=True, seen_item_ids=seen)
    return SearchQuery(
        query=query,
        model_version=state.model_version,
        k=k,
        stage=Stage.FULL,
        filter=wanted,
        turned_down_item_ids=against,
    )


def _row(
    user_id: str,
    found: SearchResult | None,
    vocabulary: Vocabulary,
    partition: int,
    position: int | None,
    *,
    is_cold: bool,
) -> Row:
    proven = None if found is None else found.certificate
    marks = ["no_state"] if found is None else ["popular_not_boosted"] if is_cold else []
    return {
        "user_id": user_id,
        "item_ids": [] if found is None else found.item_ids,
        "scores": [] if found is None else found.scores,
        "source": "mol" if found is not None and found.item_ids else None,
        "model_version": vocabulary.model_version,
        "index_version": "" if found is None else found.served.name,
        "state_source": "none" if found is None else "log",
        "state_partition": None if position is None else partition,
        "state_offset": position,
        "certificate": None if proven is None else proven.kind,
        "gap": proven.gap if proven is not None and proven.kind == "bounded" else None,
        "degradations": marks,
    }
