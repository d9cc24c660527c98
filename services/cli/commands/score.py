"""`freshet score`."""

import hashlib
import secrets
import time
from collections.abc import Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Option

from services.cli import client, options
from services.cli.output import answer, json_command, progress, sentences

if TYPE_CHECKING:
    import pyarrow as pa

    from services.encoder.config import EncoderSettings


@json_command
def score(
    *,
    out: Annotated[Path, Option(help="The Parquet table of answers.")],
    users: Annotated[Path | None, Option(help="A Parquet table with a column user_id: only these users.")] = None,
    k: Annotated[int, Option(min=1, max=1000, help="How many items.")] = 10,
    bundle: options.BundlePath = options.DEFAULT_BUNDLE,
    archive: options.Archive = None,
    as_of: options.AsOf = "",
    on: options.On = None,
    kafka: options.Kafka = "",
    state: options.State = options.DEFAULT_STATE,
) -> None:
    """Compute recommendations for all users from the log of interactions, without the gateway.

    Only Kafka has to run. The live consumer's code computes the histories. The search is exact over the catalogue that
    is served now. Scores include item neighbours and remembered interactions as FRESHET_CANDIDATES_VOTE_ sets. Seen
    items are left out. The rows have the columns of `freshet recommend --batch` and are sorted by partition and id.
    The column index_version names the catalogue.

    The rows lack what the gateway adds: standing rules, positions for new items, and impressions. Users without a state
    have no items and the degradation `no_state`, where the gateway returns popular items. Users with fewer items than
    FRESHET_GATEWAY_COLD_ITEMS have `popular_not_boosted`, where the gateway boosts popular items. A state differs from
    the stored one by at most one rounding to half precision.

    After an interruption, run the same command again; it skips finished partitions. Without --as-of, the others are
    computed as of the later time.

    Example:  freshet score --out scores.parquet --k 50

    Example:  freshet score --out scores.parquet --users users.parquet --on ray://head:10001
    """
    from services.cli.batch import RowParts, read_users
    from services.encoder.config import EncoderSettings
    from services.gateway.config import GatewaySettings
    from services.offline.backfill.in_parts import run_parts
    from services.offline.backfill.scoring import Scoring, ScoringCandidates, score_partition
    from services.platform.config import load_settings

    with sentences(), progress() as update:
        moment_ns = client.parse_time_ns("as-of", as_of) if as_of else time.time_ns()
        wanted = None if users is None else read_users(users, out)
        model_version = client.model_version(bundle)
        overrides = {"bundle": bundle.resolve(), "kafka_bootstrap": kafka or client.stack_of(state).kafka_bootstrap}
        encoder = load_settings(EncoderSettings, **overrides)
        job = Scoring(
            run=secrets.token_hex(8),
            encoder=encoder,
            candidates=load_settings(ScoringCandidates, **overrides).alone,
            archive=None if archive is None else archive.resolve(),
            k=k,
            cold_items=load_settings(GatewaySettings).cold_items,
            as_of_ms=moment_ns // 1_000_000,
        )
        theirs = _by_partition(job.encoder, wanted or ())
        named = hashlib.sha256("\0".join(wanted or ()).encode()).hexdigest()
        log_is = {"kafka": encoder.kafka_bootstrap, "partitions": len(theirs), "archive": str(job.archive)}
        parts = RowParts(out, {"model": model_version, "users": named, "k": k, "as_of": as_of, **log_is})
        found = parts.found
        update("partitions", found, len(theirs))

        def finished(number: int, rows: "pa.Table") -> None:
            parts.write(number, rows)
            update("partitions", parts.found, len(theirs))

        run_parts(
            {
                number: partial(score_partition, job, number, None if wanted is None else users_there)
                for number, users_there in theirs.items()
                if not parts.has(number)
            },
            finished,
            bundle=job.encoder.bundle,
            on=on,
        )
        summary = parts.join() | {"model_version": model_version, "parts_found": found}
    sources = ", ".join(f"{count:,} {source}" for source, count in sorted(summary["state_sources"].items()))
    answer(summary, f"model {summary['model_version']}, states: {sources}: {out}")


def _by_partition(encoder: "EncoderSettings", users: Sequence[str]) -> dict[int, list[str]]:
    """Return every partition of the log, with the given users whose events are in it."""
    from services.encoder.bootstrap import kafka_stream
    from services.platform.stream.kafka import partition_for

    with closing(kafka_stream(encoder)) as log:
        theirs: dict[int, list[str]] = {partition: [] for partition in log.partitions()}
    for user_id in users:
        theirs[partition_for(user_id.encode(), len(theirs))].append(user_id)
    return theirs
