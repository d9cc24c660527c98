"""`freshet repartition`."""

import shutil
from typing import Annotated

import typer

from services.cli import options
from services.cli.output import CommandError, answer, json_command, progress, sentences


@json_command
def repartition(
    *,
    partitions: Annotated[int, typer.Option(help="The new number of partitions of `interactions`.")],
    state: options.State = options.DEFAULT_STATE,
) -> None:
    """Change the number of partitions of `interactions`, while every process but Kafka and Redis is stopped.

    The command copies the log without records of forgotten users, compares the copy, and replaces the old log. At their
    next start the processes compute histories, states and item sums again, which takes as long as reading the log.
    Earlier freshness tokens are not honoured. After an interruption run it again.

    Example:  freshet down && freshet up --only kafka,redis && freshet repartition --partitions 16
    """
    from services.offline.backfill.repartition import repartition as run
    from services.platform.config import ProcessSettings, environment_kafka
    from services.stack import Stack

    stack = Stack(state)
    running = [part.name for part in stack.status() if part.running and part.name not in ("kafka", "redis")]
    if running:
        raise CommandError(
            f"{', '.join(running)} must be stopped first: only Kafka and Redis may run",
            advice="freshet down && freshet up --only kafka,redis",
        )
    with sentences(), progress() as update:
        report = run(
            environment_kafka(stack.kafka_bootstrap),
            stack.redis_url,
            partitions,
            replicas=ProcessSettings().replicas,
            progress=update,
        )
    shutil.rmtree(stack.place.state.data("refresher"), ignore_errors=True)
    answer(
        {"partitions": report.num_partitions, "records": report.records, "forgotten": report.forgotten},
        f"{report.records:,} interactions in {report.num_partitions} partitions; {report.forgotten:,} of forgotten "
        "users left out. `freshet up`: histories and states are computed from them",
    )
