"""The commands `freshet backup DIR` and `freshet restore DIR`."""

import asyncio
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Option

from services.cli import client, options
from services.cli.output import CommandError, ExitStatus, answer, echo, json_command

if TYPE_CHECKING:
    from services.cli.backup import Backup
    from services.stack import Stack

_Checkpoints = Annotated[
    Path | None,
    Option(
        envvar="FRESHET_REFRESHER_CHECKPOINTS",
        help="Folder of checkpoint files, for partitions without one in the topic [STATE/data/refresher].",
    ),
]


@json_command
def backup(
    folder: Annotated[Path, Argument(metavar="DIR", help="A folder that does not exist yet.")],
    *,
    state: options.State = options.DEFAULT_STATE,
    bundle: options.StackBundle = None,
    checkpoints: _Checkpoints = None,
) -> None:
    """Copy the bundle, checkpoints and stream positions into one checksummed folder, while everything runs.

    The folder has each partition's newest complete checkpoint. It does not contain Kafka's log: back up the log with
    Kafka's tools. After a restore, the refreshers continue from the backup's positions in the log.

    Example:  freshet backup backups/monday
    """
    from services.algorithms.bundles.model_manifest import BundleError
    from services.cli.backup import BackupError, make_backup
    from services.platform.stream.topic import NUM_PARTITIONS
    from services.refresher.adapters.checkpoint_topic import CheckpointFiles
    from services.refresher.bootstrap import checkpoint_topic
    from services.refresher.config import RefresherSettings

    stack = client.stack_of(state, bundle=bundle)
    settings = RefresherSettings(
        bundle=stack.bundle,
        kafka_bootstrap=stack.kafka_bootstrap,
        checkpoints=checkpoints or stack.place.state.data("refresher"),
    )
    epoch, interactions = _applied(stack)
    ends = _log_ends(stack)
    try:
        version = client.model_version(stack.bundle)
        with closing(checkpoint_topic(settings, version)) as topic:
            made = make_backup(
                folder,
                bundle=stack.bundle,
                checkpoints=CheckpointFiles(settings.checkpoints / version).load if ends is None else topic.look,
                partitions=range(NUM_PARTITIONS) if ends is None else ends.keys(),
                interactions=interactions,
                epoch=epoch,
            )
    except (BackupError, BundleError) as error:
        raise CommandError(str(error)) from error
    notes = [] if epoch is not None else ["Redis did not answer: the set has no positions of `interactions`"]
    if ends is None:
        notes.append("Kafka did not answer: the set has none of the checkpoints in its topic")
    if not made.positions.attributions:
        notes.append("there is no checkpoint of this model: the set has only the bundle")
    _show(made, notes, done="backed up")


@json_command
def restore(
    folder: Annotated[Path, Argument(metavar="DIR", help="A folder that `freshet backup` wrote.")],
    *,
    state: options.State = options.DEFAULT_STATE,
    bundle: options.StackBundle = None,
    checkpoints: _Checkpoints = None,
    replace: Annotated[bool, Option("--replace", help="Rename existing data instead of refusing.")] = False,
    check: Annotated[bool, Option("--check", help="Only verify the backup.")] = False,
) -> None:
    """Verify a backup and install it; the refreshers then continue from its positions.

    The command fails, and says why, if a file is missing, added or altered, if the parts are of different models or
    times, if Kafka's log ends before a checkpoint's position, or if the stack's processes run.

    Example:  freshet down && freshet restore backups/monday && freshet up

    Example:  freshet restore backups/monday --check
    """
    from services.cli.backup import BackupError, read_backup, restore_backup
    from services.stack.ports import PARTS

    stack = client.stack_of(state, bundle=bundle)
    notes: list[str] = []
    try:
        found = read_backup(folder)
        if not check:
            # Kafka and Redis may run during a restore: they do not use the set's files.
            running = [part.name for part in stack.status() if part.running and PARTS[part.name].needs_bundle]
            if running:
                raise CommandError(
                    f"{', '.join(running)} of {state} run and use the files that would be replaced",
                    advice=f"freshet down --state {state}",
                    status=ExitStatus.UNAVAILABLE,
                )
            ends = _log_ends(stack)
            if ends is None:
                notes.append("Kafka did not answer: the positions are not compared with its log")
            notes += restore_backup(
                found,
                bundle=stack.bundle,
                checkpoints=checkpoints or stack.place.state.data("refresher"),
                ends=ends,
                replace=replace,
            )
    except BackupError as error:
        raise CommandError(str(error)) from error
    _show(found, notes, done="whole" if check else "restored")


def _applied(stack: "Stack") -> tuple[str | None, Mapping[int, int]]:
    """Return the epoch and the watermarks of `interactions`, or (None, {}) if Redis is unavailable."""
    from services.platform.errors import DependencyUnavailable
    from services.user_state.reader import StateReader

    async def read() -> tuple[str | None, Mapping[int, int]]:
        reader = StateReader(stack.redis_url, timeout_s=1.0)
        try:
            epoch, progress = await reader.read_progress()
            return epoch, {number: found.watermark for number, found in progress.items()}
        except DependencyUnavailable:
            return None, {}
        finally:
            await reader.close()

    return asyncio.run(read())


def _log_ends(stack: "Stack") -> Mapping[int, int] | None:
    """Return the end of each partition of `attributions`, or None if Kafka is unavailable."""
    from services.contracts.topic_reader import TopicReader
    from services.contracts.topics.attributions import ATTRIBUTIONS
    from services.platform.config import environment_kafka
    from services.platform.errors import DependencyUnavailable

    brokers = environment_kafka(stack.kafka_bootstrap)
    with closing(TopicReader(brokers, ATTRIBUTIONS, group_id="freshet-restore")) as log:
        try:
            return log.end_offsets()
        except DependencyUnavailable:
            return None


def _show(found: "Backup", notes: list[str], *, done: str) -> None:
    def shown() -> None:
        positions = ", ".join(f"{number}:{offset}" for number, offset in sorted(found.positions.attributions.items()))
        echo(f"{done}: {found.folder}, model {found.model_version}, {found.nbytes / 1e6:,.1f} MB")
        echo(f"attributions folded (partition:offset): {positions or 'none'}", style="dim")
        for note in notes:
            echo(note, style="yellow")

    answer(found.describe() | {"notes": notes}, shown)
