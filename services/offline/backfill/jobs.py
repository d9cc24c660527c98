"""Run the jobs over whole topics with the deployed processes' adapters and settings."""

from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path

from services.algorithms.bundles.model_bundle import load_bundle
from services.contracts.pseudonyms import pseudonym_key, pseudonym_of
from services.contracts.topic_reader import TopicReader
from services.contracts.topics.exposures import EXPOSURES
from services.encoder.adapters.kafka_outbox import KafkaOutbox
from services.encoder.bootstrap import (
    forget_log,
    in_process_encoder,
    kafka_stream,
    model_encoder,
    state_writer,
    vocabulary_of,
)
from services.encoder.config import EncoderSettings
from services.encoder.models import Model
from services.offline.archive.exposures import archive_exposures
from services.offline.archive.files import open_whole
from services.offline.archive.writing import ArchiveInteractions, ArchiveReport, check_continues
from services.offline.backfill.bulk_import import BulkImport, ImportReport
from services.offline.backfill.in_parts import run_parts
from services.offline.backfill.memory_store import MemoryStore
from services.offline.backfill.past_log import Progressed
from services.offline.backfill.reattribution import POLL_RECORDS, Reattribution, ReattributionReport
from services.offline.backfill.rebuild import Rebuild, RebuildReport
from services.offline.backfill.warming import warm
from services.offline.datasets import Interactions
from services.platform.stream.kafka import BulkProducer
from services.refresher.bootstrap import checkpoint_topic, fold_rules, kafka_log
from services.refresher.config import RefresherSettings
from services.user_state.warmth import Warmth, measure

BULK_TIMEOUT_S = 120.0


def run_import(
    settings: EncoderSettings,
    past: Interactions,
    progress: Progressed = lambda phase, done, total: None,
    *,
    attributes: bool = True,
) -> ImportReport:
    """Import past interactions (blocking); Kafka, Redis and the model must run. attributes: see `BulkImport`.

    Raises: BundleError, and the errors of `BulkImport.run`.
    """
    bundle = load_bundle(settings.bundle)
    stream = kafka_stream(settings)
    forgets = forget_log(settings)
    writer = bulk_producer(settings, "freshet-import")
    encoder = model_encoder(settings, bundle)
    store = state_writer(settings)
    job = BulkImport(
        stream=stream,
        writer=writer,
        outbox=KafkaOutbox(writer, timeout_s=BULK_TIMEOUT_S),
        store=store,
        forgets=forgets,
        encoder=encoder,
        vocabulary=vocabulary_of(bundle),
        pseudonym_key=pseudonym_key(settings),
        attributes=attributes,
        progress=progress,
    )
    with closing(stream), closing(forgets), closing(writer), closing(encoder), closing(store):
        return job.run(past)


def run_reattribution(
    settings: EncoderSettings,
    progress: Callable[[int, int], None] = lambda done, total: None,
    *,
    rekeys: bool = False,
    archive: Path | None = None,
    partitions: Sequence[int] | None = None,
) -> ReattributionReport:
    """Encode all of `interactions` with the settings' bundle and write attributions of its version (blocking).

    Only Kafka must run. archive: folder of `freshet archive`, which has records that retention deleted. rekeys: write
    the live bundle's attributions and all search clicks again under the settings' key.
    Raises: BundleError, PreconditionFailed, DependencyUnavailable.
    """
    bundle = load_bundle(settings.bundle)
    past = None if archive is None else open_whole(archive, partitions=partitions)
    # The consumer group's committed offsets record the progress of this model's attributions.
    group_id = f"freshet-attribute-{bundle.model_version}"
    if rekeys:
        # Each key has its own consumer group, whose name does not reveal the key.
        group_id = f"freshet-rekey-{bundle.model_version}-{pseudonym_of('', pseudonym_key(settings))[:8]}"
    mine = settings.model_copy(update={"group_id": group_id, "max_poll_records": POLL_RECORDS})
    every = kafka_stream(mine)
    forgets = forget_log(mine)
    producer = bulk_producer(settings, "freshet-attribute")
    encoder = in_process_encoder(settings, bundle)
    with closing(every), closing(forgets), closing(producer), closing(encoder):
        if past is not None:
            check_continues(past, every)
        job = Reattribution(
            open_stream=lambda partition: kafka_stream(mine, [partition]),
            partitions=list(every.partitions()) if partitions is None else partitions,
            outbox=KafkaOutbox(producer, timeout_s=BULK_TIMEOUT_S),
            forgets=forgets,
            encoder=encoder,
            vocabulary=vocabulary_of(bundle),
            pseudonym_key=pseudonym_key(settings),
            new_store=lambda: MemoryStore(max_seen=0),
            progress=progress,
            writes_clicks=rekeys,
            archive=past,
        )
        return job.run()


def run_reattribution_on(
    cluster: str, settings: EncoderSettings, progress: Callable[[int, int], None], *, archive: Path | None = None
) -> ReattributionReport:
    """Run `run_reattribution` for each partition on a Ray cluster; progress counts partitions.

    If a worker is killed, another one continues from the committed offset.
    Raises: the errors of `run_reattribution` and `run_parts`.
    """
    there = settings.model_copy(update={"bundle": settings.bundle.resolve()})
    past = None if archive is None else archive.resolve()
    with closing(kafka_stream(there)) as log:
        partitions = list(log.partitions())
    reports: list[ReattributionReport] = []

    def done(_: int, report: ReattributionReport) -> None:
        reports.append(report)
        progress(len(reports), len(partitions))

    calls = {one: partial(run_reattribution, there, archive=past, partitions=[one]) for one in partitions}
    run_parts(calls, done, bundle=there.bundle, on=cluster)
    return ReattributionReport(
        model_version=reports[0].model_version,
        records=sum(one.records for one in reports),
        attributions=sum(one.attributions for one in reports),
        skipped=sum(one.skipped for one in reports),
    )


def run_warming(settings: EncoderSettings, progress: Callable[[int, int], None] = lambda done, total: None) -> Warmth:
    """Compute states of all users with a history, with the bundle's model (blocking); only Redis must run.

    Raises: BundleError, PreconditionFailed, DependencyUnavailable.
    """
    bundle = load_bundle(settings.bundle)
    with closing(in_process_encoder(settings, bundle)) as encoder, closing(state_writer(settings)) as store:
        return warm(store, Model(vocabulary_of(bundle), encoder), progress)


def measure_warmth(settings: EncoderSettings) -> Warmth:
    """Count the users whose state of the bundle's model is current; only Redis must run.

    Raises: BundleError, PreconditionFailed, DependencyUnavailable.
    """
    with closing(state_writer(settings)) as store:
        return measure(store, load_bundle(settings.bundle, verify=False).model_version)


def run_archive(
    settings: EncoderSettings,
    folder: Path,
    *,
    before_ms: int | None = None,
    progress: Progressed = lambda what, done, total: None,
) -> ArchiveReport:
    """Update the archive in `folder` (blocking); only Kafka must run.

    With before_ms, exposures are not archived.
    Raises: the errors of `ArchiveInteractions.run`.
    """
    mine = settings.model_copy(update={"group_id": "freshet-archive", "max_poll_records": POLL_RECORDS})
    shown = TopicReader(settings.kafka, EXPOSURES, group_id="freshet-archive", client_id="freshet-archive")
    with closing(kafka_stream(mine)) as log, closing(forget_log(mine)) as forgets, closing(shown):
        report = ArchiveInteractions(folder, log=log, forgets=forgets, before_ms=before_ms, progress=progress).run()
        if before_ms is not None:
            return report
        return replace(report, exposures=archive_exposures(folder, shown, _forgotten_until(settings), progress))


def _forgotten_until(settings: EncoderSettings) -> dict[str, int]:
    """Return, by pseudonym, when the user was last forgotten, in Unix milliseconds."""
    key = pseudonym_key(settings)
    with closing(forget_log(settings)) as topic:
        found = [record.forget for record in topic.read() if record.forget is not None]
    return {pseudonym_of(one.user_id, key): one.requested_ms for one in found}


def run_rebuild(
    settings: RefresherSettings, *, keep: bool, progress: Callable[[int, int], None] = lambda done, total: None
) -> RebuildReport:
    """Fold the whole log from its beginning, independently of running processes (blocking); only Kafka must run.

    keep: save the result as checkpoints for a refresher of this bundle.
    Raises: BundleError; DependencyUnavailable, PreconditionFailed.
    """
    bundle = load_bundle(settings.bundle)
    with (
        closing(kafka_log(settings, bundle)) as log,
        closing(checkpoint_topic(settings, bundle.model_version)) as topic,
    ):
        return Rebuild(log=log, rules=fold_rules(settings, bundle), progress=progress).run(topic if keep else None)


def bulk_producer(settings: EncoderSettings, client_id: str) -> BulkProducer:
    """Return a producer for many records at once."""
    return BulkProducer(settings.kafka, client_id=client_id, linger_ms=50, delivery_timeout_ms=60_000)


def import_interactions(
    past: Interactions,
    *,
    bundle: Path,
    kafka: str,
    redis_url: str,
    inference_server: str | None,
    attributes: bool = True,
    progress: Callable[[str, int, int], None] = lambda phase, done, total: None,
) -> ImportReport:
    """Write `past` to the stream and fill histories, seen items and states.

    inference_server: host:port; if None, this process encodes.

    Raises: BundleError; InvalidRequest, PreconditionFailed (the stream has other records), DependencyUnavailable.
    """
    settings = EncoderSettings(bundle=bundle, kafka_bootstrap=kafka, redis_url=redis_url)
    where = {"engine": "in-process"} if inference_server is None else {"inference_server": inference_server}
    return run_import(settings.model_copy(update=where), _named(past), progress, attributes=attributes)


def _named(past: Interactions) -> Interactions:
    # A file's name may exceed the length limit of event ids.
    name = "".join(filter(str.isprintable, past.name)).encode()[:64].decode(errors="ignore")
    # Equal data get equal event ids, so an interrupted import is recognised.
    return replace(past, name=f"{name}-{past.fingerprint()}")
