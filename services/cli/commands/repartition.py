"""`freshet repartition`: change the number of partitions of `interactions`. A user's events stay in one partition."""

import shutil
from typing import Annotated

import typer

from services.cli import options
from services.cli.output import CommandError, console, emit_json, progress_bar, reports_errors, sentences


@reports_errors
def repartition(
    *,
    partitions: Annotated[int, typer.Option(help="The new number of partitions of `interactions`.")],
    state: options.State = options.DEFAULT_STATE,
    as_json: options.AsJson = False,
) -> None:
    """Change the number of partitions of `interactions`, while every process but Kafka and Redis is stopped.

    The command copies the log, compares the copy, and replaces the old log with it; records of forgotten users are left
    out. At their next start the processes compute histories, states and item sums again, which takes as long as reading
    the log. Earlier freshness tokens are not honoured. After an interruption run it again.

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
    with sentences(), progress_bar(as_json=as_json) as bar:
        task = bar.add_task("copying", total=None)
        report = run(
            environment_kafka(stack.kafka_bootstrap),
            stack.redis_url,
            partitions,
            replicas=ProcessSettings().replicas,
            progress=lambda what, done, total: bar.update(task, description=what, completed=done, total=total),
        )
    shutil.rmtree(stack.place.state.data("refresher"), ignore_errors=True)
    if as_json:
        emit_json({"partitions": report.num_partitions, "records": report.records, "forgotten": report.forgotten})
    else:
        console().print(
            f"{report.records:,} interactions in {report.num_partitions} partitions; {report.forgotten:,} of forgotten "
            "users left out. `freshet up`: histories and states are made again from them"
        )
