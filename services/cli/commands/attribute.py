"""`freshet attribute`: every interaction encoded again by a new model, beside the live system."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from services.cli.options import DEFAULT_STATE, State
from services.cli.output import CommandError, ExitStatus, console, emit_json, reports_errors


@reports_errors
def attribute(
    bundle: Annotated[Path, typer.Option("--bundle", help="The new model's bundle.")],
    *,
    state: State = DEFAULT_STATE,
    as_json: Annotated[bool, typer.Option("--json", help="The report as one JSON object on stdout.")] = False,
) -> None:
    """Write attributions of another model for all interactions so far, so that it goes live with what people taught.

    Only Kafka has to run; the model runs inside this command, and nobody is disturbed. Run it again shortly before
    switching models: it adds what has come since. Undone and forgotten interactions are left out.

    Example:  freshet attribute --bundle .freshet/bundles/next
    """
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from services.algorithms.bundle import BundleError
    from services.cli.stack import Stack
    from services.common.errors import DependencyUnavailable, FreshetError
    from services.encoder.config import EncoderSettings
    from services.offline.backfill.jobs import run_reattribution

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    try:
        settings = EncoderSettings(bundle=bundle, kafka_bootstrap=Stack(state).kafka_bootstrap)
        with Progress(*columns, console=console(stderr=as_json), refresh_per_second=2) as bar:
            task = bar.add_task("interactions", total=None)
            report = run_reattribution(settings, lambda done, total: bar.update(task, completed=done, total=total))
    except DependencyUnavailable as error:
        raise CommandError(str(error), advice="`freshet up` starts the stack", status=ExitStatus.UNAVAILABLE) from error
    except FreshetError as error:
        raise CommandError(str(error), status=ExitStatus.FAILED) from error
    except BundleError as error:
        raise CommandError(str(error), advice="`freshet train` makes a bundle") from error
    if as_json:
        emit_json(asdict(report))
        return
    typer.echo(
        f"{report.attributions:,} attributions of model {report.model_version} from {report.records:,} interactions "
        f"({report.skipped:,} of them were attributed before)"
    )
