"""`freshet demo`."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

from typer import Option

from services.cli import options
from services.cli.output import CommandError, ExitStatus, answer, console, is_json, json_command


@json_command
def demo(
    *,
    events: Annotated[int, Option(min=1, help="How many held-out events to replay.")] = 24_000,
    rate: Annotated[float, Option(min=1.0, help="Events a second.")] = 100.0,
    dataset: Annotated[
        str, Option("--data", help="auto, ml-1m, ml-latest-small, ml-100k, simulator, or the path of a table.")
    ] = "auto",
    epochs: Annotated[int | None, Option(min=1, help="Training epochs; default: by the size of the data.")] = None,
    seed: options.Seed = 0,
    state: options.State = options.DEFAULT_STATE,
    reuse: Annotated[
        bool, Option("--reuse", help="Use the bundle of an earlier demo on the same data instead of training.")
    ] = False,
    with_console: options.WithConsole = True,
    port_offset: options.PortOffset = 0,
    keep: Annotated[bool, Option("--keep", help="Do not stop the stack at the end.")] = False,
) -> None:
    """Train on past events, stream later ones through Kafka, and watch the recommendations change.

    The command replaces the data of an earlier demo in the state folder. It fails if the folder has a running
    stack or another stream's data. The exit status is 1 if the counts do not match.

    Example:  freshet demo --keep

    Example:  freshet demo --events 2000 --epochs 1 --data ml-latest-small
    """
    from services.offline.demo.demo import run_demo
    from services.offline.demo.display import Display
    from services.offline.demo.steps import DemoOptions

    wanted = DemoOptions(
        dataset=dataset,
        events=events,
        rate_per_s=rate,
        epochs=epochs,
        seed=seed,
        state_dir=state,
        keep=keep,
        reuse=reuse,
        port_offset=port_offset,
        with_console=with_console,
    )
    display = Display(console(stderr=is_json()))
    # SIGTERM stops the demo and its stack, as Ctrl-C does.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with _sentences(state):
        summary = run_demo(wanted, display)
    answer(summary, lambda: None)
    if not summary["events"]["adds_up"]:
        counts = {name: summary["events"][name] for name in ("sent", "applied", "dead_lettered", "unacknowledged")}
        raise CommandError(f"the counts do not add up: {counts}", advice=f"the logs are in {state / 'logs'}")


@contextmanager
def _sentences(state: Path) -> Iterator[None]:
    from services.algorithms.bundles.model_manifest import BundleError
    from services.offline.demo.stream import ReplayFailedError, StreamStalledError
    from services.platform.errors import FreshetError
    from services.platform.machine import PortTaken
    from services.stack import StackError
    from services.stack.note import port_advice

    logged = f"the parts' logs are in {state / 'logs'}"
    rows: tuple[tuple[type[Exception], str, ExitStatus], ...] = (
        (StackError, "", ExitStatus.UNAVAILABLE),
        (ReplayFailedError, logged, ExitStatus.FAILED),
        (StreamStalledError, logged, ExitStatus.FAILED),
        (FreshetError, logged, ExitStatus.UNAVAILABLE),
        (BundleError, "name another --state, or move what is there", ExitStatus.FAILED),
        # Errors of data sets and settings: the message names the field, its value and the allowed values.
        (ValueError, "", ExitStatus.USAGE),
    )
    try:
        yield
    except PortTaken as error:
        raise CommandError(
            str(error), advice=port_advice(error, state, "demo"), status=ExitStatus.UNAVAILABLE
        ) from error
    except Exception as error:
        for kind, advice, status in rows:
            if isinstance(error, kind):
                raise CommandError(str(error), advice=advice, status=status) from error
        raise
