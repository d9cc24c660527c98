"""The commands `freshet archive`, `backfill-attributions`, `rebuild`, `repartition` and `shard-snapshots`."""

import shutil
import time
from contextlib import suppress
from dataclasses import asdict
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

from services.cli import client, options, output

if TYPE_CHECKING:
    from services.offline.backfill.rebuild import RebuildReport
    from services.offline.backfill.shard_snapshots import ShardSnapshot
    from services.stack import Stack

_DAY_MS = 24 * 3600 * 1000


@output.json_command
def archive(
    folder: Annotated[Path, Argument(metavar="DIR", help="The archive's folder; created if it does not exist.")],
    *,
    before: Annotated[
        datetime | None, Option(formats=["%Y-%m-%d", "%Y-%m-%dT%H:%M:%S"], help="Only records before this time, UTC.")
    ] = None,
    older_than: Annotated[float | None, Option(min=0, help="Only records older than this many days.")] = None,
    check: Annotated[bool, Option("--check", help="Only compare every file with its checksum.")] = False,
    kafka: options.Kafka = "",
    state: options.State = options.DEFAULT_STATE,
) -> None:
    """Copy `interactions` and `exposures` into Parquet files; each run continues where the archive ends.

    A record is stored whole, with position, time, headers, and columns for training. Records of users who were
    forgotten since the last run are removed. The command fails and changes nothing if a file was altered, if the topic
    is not the archive's log, or if retention removed records before they were archived. After an interruption run it
    again. `freshet train --data DIR` and `freshet backfill-attributions --archive DIR` read the archive.

    Example:  freshet archive archives/interactions --older-than 7

    Example:  freshet archive archives/interactions --check
    """
    from services.encoder.config import EncoderSettings
    from services.offline.archive.files import open_whole
    from services.offline.backfill.jobs import run_archive

    if before is not None and older_than is not None:
        raise output.usage_error("--before and --older-than exclude each other", "give one of them")
    before_ms = None if before is None else int(before.replace(tzinfo=UTC).timestamp() * 1000)
    if older_than is not None:
        before_ms = int(time.time() * 1000 - older_than * _DAY_MS)
    with output.sentences(), output.progress() as update:
        if check:
            whole = open_whole(folder, update)
            report = {"files": len(whole.files), "records": sum(file.records for file in whole.files)}
        else:
            settings = EncoderSettings(kafka_bootstrap=kafka or client.stack_of(state).kafka_bootstrap)
            report = asdict(run_archive(settings, folder, before_ms=before_ms, progress=update))
    if check:
        output.answer(report, f"{folder} is whole: {report['records']:,} records in {report['files']:,} files")
        return
    output.answer(
        report,
        f"{report['copied']:,} records copied, {report['forgotten']:,} of forgotten users left out or removed. "
        f"{folder} holds {report['records']:,} in {report['files']:,} files, {report['bytes'] / 1e6:,.1f} MB; "
        f"{report['exposures']:,} exposures copied",
    )


@output.json_command
def backfill_attributions(
    *,
    bundle: Annotated[Path | None, Option(help="The new model's bundle; with --rekey [the stack's].")] = None,
    rekey: Annotated[bool, Option("--rekey", help="Rename users to the present FRESHET_PSEUDONYM_KEY.")] = False,
    state: options.State = options.DEFAULT_STATE,
    archive: options.Archive = None,
    on: options.On = None,
) -> None:
    """Write another model's attributions for all interactions so far. The model then starts with all past feedback.

    Only Kafka has to run. Run the command again shortly before you switch models, to include newer interactions. Undone
    and forgotten interactions are left out. With `--archive`, the command also reads interactions that retention
    removed from the topic.

    With `--rekey`, the command writes a live model's attributions and search clicks again, under the pseudonyms of
    FRESHET_PSEUDONYM_KEY. First give the encoder the new key, and the old key in FRESHET_PSEUDONYM_KEYS_BEFORE. Sums,
    memory and the effect of clicks stay the same. Remove the old key when refreshers and generators have read the new
    records. Add `--archive` if retention removed interactions; otherwise `freshet forget` needs the old key to find
    them. Run the command for each live model.

    Example:  freshet backfill-attributions --bundle .freshet/bundles/next --archive archives/interactions

    Example:  freshet backfill-attributions --bundle /models/next --on ray://head:10001

    Example:  FRESHET_PSEUDONYM_KEY=new FRESHET_PSEUDONYM_KEYS_BEFORE=old freshet backfill-attributions --rekey
    """
    if bundle is None and not rekey:
        raise output.usage_error("neither --bundle nor --rekey is given", "--bundle .freshet/bundles/next")
    if rekey and on is not None:
        raise output.usage_error("--rekey works here, not --on", "leave --on out")
    from services.encoder.config import EncoderSettings
    from services.offline.backfill.jobs import run_reattribution, run_reattribution_on

    stack = client.stack_of(state)
    with output.sentences(), output.progress() as update:
        settings = EncoderSettings(bundle=bundle or stack.bundle, kafka_bootstrap=stack.kafka_bootstrap)
        if on is None:
            report = run_reattribution(settings, partial(update, "interactions"), rekeys=rekey, archive=archive)
        else:
            report = run_reattribution_on(on, settings, partial(update, "partitions"), archive=archive)
    under, before = (" under the present key", "written under it before") if rekey else ("", "attributed before")
    output.answer(
        asdict(report),
        f"{report.attributions:,} attributions of model {report.model_version} from {report.records:,} interactions"
        f"{under} ({report.skipped:,} of them were {before})",
    )


_STATUS_TIMEOUT_S = 5.0


@output.json_command
def rebuild(
    *,
    state: options.State = options.DEFAULT_STATE,
    bundle: Annotated[
        Path | None, Option(help="Another model's bundle: its sums are written as checkpoints [the stack's bundle].")
    ] = None,
) -> None:
    """Compute the refresher's sums from the whole stream of attributions and print their digests.

    The stack may run meanwhile. If the running refresher uses the same bundle, its digests are compared; the exit
    status is 1 if a digest differs at the same position. Otherwise the result is written as checkpoints, from which a
    refresher of the bundle continues. For another model, first run `freshet backfill-attributions`, which writes the
    model's attributions.

    Example:  freshet rebuild --bundle bundles/new
    """
    from services.offline.backfill.jobs import run_rebuild
    from services.refresher.config import RefresherSettings

    stack = client.stack_of(state)
    live = _live(stack)
    with output.sentences(), output.progress() as update:
        settings = RefresherSettings(
            bundle=bundle or stack.bundle,
            kafka_bootstrap=stack.kafka_bootstrap,
            redis_url=stack.redis_url,
            checkpoints=stack.place.state.data("refresher"),
        )
        is_live = live is not None and live.model_version == client.model_version(settings.bundle)
        report = run_rebuild(settings, keep=not is_live, progress=partial(update, "folding"))
    rows = _compared(report, live if is_live else None)
    facts = {
        "model_version": report.model_version,
        "policy": report.policy,
        "records": report.records,
        "seconds": round(report.seconds, 3),
        "counts": dict(report.counts),
        "kept": not is_live,
        "partitions": rows,
    }
    output.answer(facts, lambda: _show_rebuilt(report, rows, kept=not is_live))
    if any(row["equal"] is False for row in rows):
        raise output.CommandError(
            "a live digest differs from the rebuild's at the same position",
            advice="stop the refresher and run `freshet rebuild`: a refresher continues from the written checkpoints",
        )


def _live(stack: "Stack") -> Any:
    """Return the running refresher's status, or None if no refresher answers."""
    import grpc
    from freshet.v1 import refresher_pb2

    with client.process("refresher", stack.address("refresher")) as stub, suppress(grpc.RpcError):
        return stub.GetStatus(refresher_pb2.GetStatusRequest(), timeout=_STATUS_TIMEOUT_S)
    return None


def _compared(report: "RebuildReport", live: Any) -> list[dict[str, Any]]:
    """Return a row per partition. `equal` is None if no running refresher is at the same position."""
    live_partitions = {} if live is None else {one.partition: one for one in live.partitions}
    rows: list[dict[str, Any]] = []
    for one in report.partitions:
        other = live_partitions.get(one.partition)
        equal = None
        if other is not None and other.digest and other.folded_offset == one.folded_offset:
            equal = other.digest == one.digest
        rows.append(
            {
                "partition": one.partition,
                "folded_offset": one.folded_offset,
                "digest": one.digest,
                "items": one.num_items,
                "remembered": one.num_remembered,
                "live_offset": None if other is None else other.folded_offset,
                "equal": equal,
            }
        )
    return rows


def _show_rebuilt(report: "RebuildReport", rows: list[dict[str, Any]], *, kept: bool) -> None:
    numbers = ("partition", "folded to", "items", "remembered")
    shown = output.table(*numbers, "digest", "live", right=numbers, header_style="bold")
    labels = {True: "equal", False: "DIFFERS"}
    for row in rows:
        label = labels.get(row["equal"], "" if row["live_offset"] is None else f"is at {row['live_offset']}")
        counts = (row["partition"], row["folded_offset"], row["items"], row["remembered"])
        shown.add_row(*(f"{count:,}" for count in counts), row["digest"], label)
    output.echo(shown)
    counted = ", ".join(f"{name} {count:,}" for name, count in sorted(report.counts.items()) if count)
    output.echo(f"model {report.model_version}: {report.records:,} records in {report.seconds:.1f} s ({counted})")
    if kept:
        output.echo("written as checkpoints: a refresher of this bundle continues from them")


@output.json_command
def repartition(
    *,
    partitions: Annotated[int, Option(help="The new number of partitions of `interactions`.")],
    state: options.State = options.DEFAULT_STATE,
) -> None:
    """Change the number of partitions of `interactions`, while every process but Kafka and Redis is stopped.

    The command copies the log without records of forgotten users, compares the copy, and replaces the old log. At their
    next start, the processes read the log and compute histories, states and item sums again. Earlier freshness tokens
    are not honoured. After an interruption, run the command again.

    Example:  freshet down && freshet up --only kafka,redis && freshet repartition --partitions 16
    """
    from services.offline.backfill.repartition import repartition as run
    from services.platform.config import ProcessSettings, environment_kafka

    stack = client.stack_of(state)
    running = [part.name for part in stack.status() if part.running and part.name not in ("kafka", "redis")]
    if running:
        raise output.CommandError(
            f"{', '.join(running)} must be stopped first: only Kafka and Redis may run",
            advice="freshet down && freshet up --only kafka,redis",
        )
    with output.sentences(), output.progress() as update:
        report = run(
            environment_kafka(stack.kafka_bootstrap),
            stack.redis_url,
            partitions,
            replicas=ProcessSettings().replicas,
            progress=update,
        )
    shutil.rmtree(stack.place.state.data("refresher"), ignore_errors=True)
    output.answer(
        {"partitions": report.num_partitions, "records": report.records, "forgotten": report.forgotten},
        f"{report.records:,} interactions in {report.num_partitions} partitions; {report.forgotten:,} of forgotten "
        "users left out. `freshet up`: histories and states are computed from them",
    )


@output.json_command
def shard_snapshots(
    folder: Annotated[Path, Argument(metavar="DIR", help="FRESHET_CANDIDATES_SNAPSHOTS of the future processes.")],
    *,
    shards: Annotated[int, Option(min=1, max=256, help="The number of shards.")],
    bundle: options.BundlePath = options.DEFAULT_BUNDLE,
    on: options.On = None,
    kafka: options.Kafka = "",
    state: options.State = options.DEFAULT_STATE,
) -> None:
    """Make the snapshots that the shards' processes would make, so that their first start does not read whole topics.

    Use it before you change the number of shards or the machines. A process uses a snapshot that is at most 12 hours
    old. With --on each shard is a task with one core and the shard's memory, and all nodes and processes share DIR. The
    processes must not write there meanwhile.

    Example:  freshet shard-snapshots /shared/snapshots --shards 16 --on ray://head:10001
    """
    from services.candidates.config import CandidatesSettings
    from services.contracts.shards import Shard
    from services.offline.backfill.in_parts import run_parts
    from services.offline.backfill.shard_snapshots import write_shard_snapshot
    from services.platform.config import load_settings

    made: dict[int, ShardSnapshot] = {}
    with output.sentences(), output.progress() as update:
        update("shards", 0, shards)
        settings = load_settings(
            CandidatesSettings, bundle=bundle.resolve(), kafka_bootstrap=kafka or client.stack_of(state).kafka_bootstrap
        )

        def call(number: int) -> "partial[ShardSnapshot]":
            mine = {"shard": Shard(number, shards), "snapshots": str(folder.resolve())}
            return partial(write_shard_snapshot, settings.model_copy(update=mine))

        def done(number: int, snapshot: "ShardSnapshot") -> None:
            made[number] = snapshot
            update("shards", len(made), shards)

        run_parts({number: call(number) for number in range(shards)}, done, bundle=settings.bundle, on=on)
    found = [made[number] for number in sorted(made)]
    unchanged = "nothing has changed since the bundle: no snapshot is needed"
    lines = [f"shard {one.shard}: {one.items:,} items at {one.position}: {one.path or unchanged}" for one in found]
    output.answer({"shards": [asdict(one) for one in found]}, "\n".join(lines))
