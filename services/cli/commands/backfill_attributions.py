"""`freshet backfill-attributions`: every interaction encoded again by a new model, beside the live system."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from services.cli import options
from services.cli.output import emit_json, progress_bar, reports_errors, sentences


@reports_errors
def backfill_attributions(
    bundle: Annotated[Path, typer.Option("--bundle", help="The new model's bundle.")],
    *,
    state: options.State = options.DEFAULT_STATE,
    archive: options.Archive = None,
    on: options.On = None,
    as_json: options.AsJson = False,
) -> None:
    """Write attributions of another model for all interactions so far, so that it goes live with what people taught.

    Only Kafka has to run; the model runs inside this command, and nobody is disturbed. Run it again shortly before
    switching models: it adds what has come since. Undone and forgotten interactions are left out. With `--archive` it
    reads what retention took from there first, then the topic.

    Example:  freshet backfill-attributions --bundle .freshet/bundles/next

    Example:  freshet backfill-attributions --bundle .freshet/bundles/next --archive archives/interactions

    Example:  freshet backfill-attributions --bundle /models/next --on ray://head:10001
    """
    from services.encoder.config import EncoderSettings
    from services.offline.backfill.jobs import run_reattribution, run_reattribution_on
    from services.stack import Stack

    with sentences(), progress_bar(as_json=as_json) as bar:
        settings = EncoderSettings(bundle=bundle, kafka_bootstrap=Stack(state).kafka_bootstrap)
        task = bar.add_task("interactions" if on is None else "partitions", total=None)

        def progress(done: int, total: int) -> None:
            bar.update(task, completed=done, total=total)

        if on is None:
            report = run_reattribution(settings, progress, archive=archive)
        else:
            report = run_reattribution_on(on, settings, progress, archive=archive)
    if as_json:
        emit_json(asdict(report))
        return
    typer.echo(
        f"{report.attributions:,} attributions of model {report.model_version} from {report.records:,} interactions "
        f"({report.skipped:,} of them were attributed before)"
    )
