"""`freshet rebuild`."""

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from services.cli import client, options
from services.cli.output import CommandError, answer, console, json_command, progress, sentences, table

if TYPE_CHECKING:
    from services.offline.backfill.rebuild import RebuildReport
    from services.stack import Stack

_STATUS_TIMEOUT_S = 5.0


@json_command
def rebuild(
    *,
    state: options.State = options.DEFAULT_STATE,
    bundle: Annotated[
        Path | None,
        typer.Option(help="Another model's bundle: its sums are written as checkpoints [the stack's bundle]."),
    ] = None,
) -> None:
    """Compute the refresher's sums from the whole stream of attributions and print their digests, while all runs.

    For the running refresher's bundle the digests are compared: the exit status is 1 if one differs at the same
    position. For another bundle, or without a running refresher, the result is written as checkpoints, from which a
    refresher of that bundle continues. Run `freshet backfill-attributions` first: it writes another model's
    attributions.

    Example:  freshet rebuild --bundle bundles/new
    """
    from services.offline.backfill.jobs import run_rebuild
    from services.refresher.config import RefresherSettings
    from services.stack import Stack

    stack = Stack(state)
    live = _live(stack)
    with sentences(), progress() as update:
        settings = RefresherSettings(
            bundle=bundle or stack.bundle,
            kafka_bootstrap=stack.kafka_bootstrap,
            redis_url=stack.redis_url,
            checkpoints=stack.place.state.data("refresher"),
        )
        is_live = live is not None and live.model_version == _version(settings.bundle)
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
    answer(facts, lambda: _show(report, rows, kept=not is_live))
    if any(row["equal"] is False for row in rows):
        raise CommandError(
            "a live digest differs from the rebuild's at the same position",
            advice="stop the refresher and run `freshet rebuild`: a refresher continues from the written checkpoints",
        )


def _version(bundle: Path) -> str:
    from services.algorithms.bundles.model_bundle import load_bundle

    return load_bundle(bundle, verify=False).model_version


def _live(stack: "Stack") -> Any:
    """Return the running refresher's status; None if none answers."""
    import grpc
    from freshet.v1 import refresher_pb2

    with client.process("refresher", stack.address("refresher")) as stub:
        try:
            return stub.GetStatus(refresher_pb2.GetStatusRequest(), timeout=_STATUS_TIMEOUT_S)
        except grpc.RpcError:
            return None


def _compared(report: "RebuildReport", live: Any) -> list[dict[str, Any]]:
    """Return a row per partition. equal: None if no running refresher is at the same position."""
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


def _show(report: "RebuildReport", rows: list[dict[str, Any]], *, kept: bool) -> None:
    numbers = ("partition", "folded to", "items", "remembered")
    shown = table(*numbers, "digest", "live", right=numbers, header_style="bold")
    labels = {True: "equal", False: "DIFFERS"}
    for row in rows:
        label = labels.get(row["equal"], "" if row["live_offset"] is None else f"is at {row['live_offset']}")
        counts = (row["partition"], row["folded_offset"], row["items"], row["remembered"])
        shown.add_row(*(f"{count:,}" for count in counts), row["digest"], label)
    console().print(shown)
    counted = ", ".join(f"{name} {count:,}" for name, count in sorted(report.counts.items()) if count)
    console().print(f"model {report.model_version}: {report.records:,} records in {report.seconds:.1f} s ({counted})")
    if kept:
        console().print("written as checkpoints: a refresher of this bundle continues from them")
