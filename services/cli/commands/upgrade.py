"""`freshet upgrade`: what an earlier version stored becomes what this one reads."""

import time

from services.cli import options
from services.cli.output import console, emit_json, progress_bar, reports_errors, sentences


@reports_errors
def upgrade(*, state: options.State = options.DEFAULT_STATE, as_json: options.AsJson = False) -> None:
    """Bring the state store of an earlier version to this version's layout, in place.

    Stop the encoder and gateway processes first; Redis has to run. Other data of an earlier version (bundles, topics,
    checkpoints) is read as it is. It can be run again: what is done is left alone.

    Example:  freshet up --only redis && freshet upgrade
    """
    from services.cli.stack import Stack
    from services.common.state_store import DEFAULT_TTL_SECONDS
    from services.common.stream.topic import NUM_PARTITIONS
    from services.offline.backfill.store_upgrade import upgrade_store

    stack = Stack(state)
    with sentences(), progress_bar(as_json=as_json) as bar:
        task = bar.add_task("users", total=None)
        report = upgrade_store(
            stack.redis_url,
            num_partitions=NUM_PARTITIONS,
            ttl_seconds=DEFAULT_TTL_SECONDS,
            now_s=int(time.time()),
            progress=lambda users: bar.update(task, completed=users),
        )
    if as_json:
        emit_json({"epoch": report.epoch, "users": report.users})
    else:
        console().print(f"{report.users:,} users moved; the store's epoch is {report.epoch}")
