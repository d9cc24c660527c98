"""`freshet archive`: copy past interactions to Parquet files."""

import time
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer

from services.cli import options
from services.cli.output import answer, json_command, progress, sentences, usage_error

_DAY_MS = 24 * 3600 * 1000


@json_command
def archive(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="The archive's folder; created if it does not exist.")],
    *,
    before: Annotated[
        datetime | None,
        typer.Option(formats=["%Y-%m-%d", "%Y-%m-%dT%H:%M:%S"], help="Only records before this time, UTC."),
    ] = None,
    older_than: Annotated[float | None, typer.Option(min=0, help="Only records older than this many days.")] = None,
    check: Annotated[bool, typer.Option("--check", help="Only compare every file with its checksum.")] = False,
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
    from services.stack import Stack

    if before is not None and older_than is not None:
        raise usage_error("--before and --older-than exclude each other", "give one of them")
    before_ms = None if before is None else int(before.replace(tzinfo=UTC).timestamp() * 1000)
    if older_than is not None:
        before_ms = int(time.time() * 1000 - older_than * _DAY_MS)
    with sentences(), progress() as update:
        if check:
            whole = open_whole(folder, update)
            report = {"files": len(whole.files), "records": sum(file.records for file in whole.files)}
        else:
            settings = EncoderSettings(kafka_bootstrap=kafka or Stack(state).kafka_bootstrap)
            report = asdict(run_archive(settings, folder, before_ms=before_ms, progress=update))
    if check:
        answer(report, f"{folder} is whole: {report['records']:,} records in {report['files']:,} files")
        return
    answer(
        report,
        f"{report['copied']:,} records copied, {report['forgotten']:,} of forgotten users left out or removed. "
        f"{folder} holds {report['records']:,} in {report['files']:,} files, {report['bytes'] / 1e6:,.1f} MB; "
        f"{report['exposures']:,} exposures copied",
    )
