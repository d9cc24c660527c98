"""`freshet bench histories`: how soon users whom Redis lost are right again, beside a replay of the log."""

import os
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import typer

from services.cli.output import CommandError, ExitStatus, console, emit_json, reports_errors


@reports_errors
def histories(
    *,
    bundle: Annotated[Path, typer.Option(envvar="FRESHET_BUNDLE", help="The model, in this process.")] = Path(
        ".freshet/bundle"
    ),
    users: Annotated[int, typer.Option(min=100, help="With twenty events each.")] = 200_000,
    evicted: Annotated[int, typer.Option(min=1, help="Users who are evicted under load.")] = 1_000,
    rate: Annotated[float, typer.Option(min=0, help="Events a second meanwhile.")] = 100.0,
    seed: Annotated[int, typer.Option(help="Of users and items.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
) -> None:
    """Empty Redis, then evict users under load, on a Kafka and a Redis of its own; contents are compared with a replay.

    The exit status is 1 if a history, a state or an unmarked answer was wrong.

    Example:  freshet bench histories --users 20000
    """
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    import structlog

    from services.algorithms.bundle import BundleError, load_bundle
    from services.cli.lost_histories import measure
    from services.cli.stack import Ports, Stack
    from services.encoder.bootstrap import in_process_encoder, vocabulary_of
    from services.encoder.config import EncoderSettings

    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(40))
    with TemporaryDirectory() as folder:
        stack = Stack(Path(folder), ports=Ports.free())
        try:
            model = load_bundle(bundle)
            stack.up(["kafka", "redis"])
            settings = EncoderSettings(bundle=bundle, kafka_bootstrap=stack.kafka_bootstrap, redis_url=stack.redis_url)
            times = measure(
                settings,
                in_process_encoder(settings, model),
                vocabulary_of(model),
                users=users,
                evicted=evicted,
                load_per_s=rate,
                seed=seed,
                say=lambda what: console(stderr=True).print(what),
            )
        except BundleError as error:
            raise CommandError(str(error), advice="`freshet train` makes a bundle") from error
        finally:
            stack.down()
    if as_json:
        emit_json(asdict(times))
    else:
        for name, value in asdict(times).items():
            console().print(f"{name.replace('_', ' '):<24} {round(value, 1):,}")
    if wrong := times.emptied_wrong + times.evicted_wrong + times.answers_wrong:
        raise CommandError(f"{wrong} users or answers were wrong and not marked", status=ExitStatus.FAILED)
