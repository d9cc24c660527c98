"""`freshet rekey`: what came under an earlier key of pseudonyms becomes the users' under the present one."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from services.cli import options
from services.cli.output import emit_json, progress_bar, reports_errors, sentences


@reports_errors
def rekey(
    *,
    state: options.State = options.DEFAULT_STATE,
    bundle: Annotated[Path | None, typer.Option(help="The live model's bundle [the stack's].")] = None,
    archive: options.Archive = None,
    as_json: options.AsJson = False,
) -> None:
    """Write attributions and search clicks once more, under the pseudonyms of FRESHET_PSEUDONYM_KEY.

    First give the encoder the new key, and the old one in FRESHET_PSEUDONYM_KEYS_BEFORE. Sums, memory and what clicks
    taught stay as they are; they are the same users' under new names. Once the refreshers and generators have read what
    was written, the old key may be dropped. What retention took from `interactions` is renamed with `--archive`;
    else a forget finds it only while the old key is known. Run it for each model that is live.

    Example:  FRESHET_PSEUDONYM_KEY=new FRESHET_PSEUDONYM_KEYS_BEFORE=old freshet rekey
    """
    from services.encoder.config import EncoderSettings
    from services.offline.backfill.jobs import run_reattribution
    from services.stack import Stack

    stack = Stack(state)
    with sentences(), progress_bar(as_json=as_json) as bar:
        settings = EncoderSettings(bundle=bundle or stack.bundle, kafka_bootstrap=stack.kafka_bootstrap)
        task = bar.add_task("interactions", total=None)
        report = run_reattribution(
            settings, lambda done, total: bar.update(task, completed=done, total=total), rekeys=True, archive=archive
        )
    if as_json:
        emit_json(asdict(report))
        return
    typer.echo(
        f"{report.attributions:,} attributions of model {report.model_version} from {report.records:,} interactions "
        f"under the present key ({report.skipped:,} of them were written under it before)"
    )
