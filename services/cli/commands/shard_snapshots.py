"""`freshet shard-snapshots`."""

from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from services.cli import options
from services.cli.output import answer, json_command, progress, sentences

if TYPE_CHECKING:
    from services.offline.backfill.shard_snapshots import ShardSnapshot


@json_command
def shard_snapshots(
    folder: Annotated[
        Path, typer.Argument(metavar="DIR", help="FRESHET_CANDIDATES_SNAPSHOTS of the future processes.")
    ],
    *,
    shards: Annotated[int, typer.Option(min=1, max=256, help="The number of shards.")],
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
    from services.stack import Stack

    made: dict[int, ShardSnapshot] = {}
    with sentences(), progress() as update:
        update("shards", 0, shards)
        settings = load_settings(
            CandidatesSettings, bundle=bundle.resolve(), kafka_bootstrap=kafka or Stack(state).kafka_bootstrap
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
    answer({"shards": [asdict(one) for one in found]}, "\n".join(lines))
