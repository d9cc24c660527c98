"""`freshet backfill-attributions`."""

from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from services.cli import options
from services.cli.output import answer, json_command, progress, sentences, usage_error


@json_command
def backfill_attributions(
    *,
    bundle: Annotated[Path | None, typer.Option(help="The new model's bundle; with --rekey [the stack's].")] = None,
    rekey: Annotated[bool, typer.Option("--rekey", help="Rename users to the present FRESHET_PSEUDONYM_KEY.")] = False,
    state: options.State = options.DEFAULT_STATE,
    archive: options.Archive = None,
    on: options.On = None,
) -> None:
    """Write another model's attributions for all interactions so far. The model then starts with all past feedback.

    Only Kafka has to run. Run the command again shortly before you switch models, for newer interactions. Undone and
    forgotten interactions are left out. With `--archive` it first reads the archive, for interactions that retention
    removed.

    With `--rekey` it writes attributions and search clicks of a live model again, under the pseudonyms of
    FRESHET_PSEUDONYM_KEY. First give the encoder the new key, and the old one in FRESHET_PSEUDONYM_KEYS_BEFORE. Sums,
    memory and the effect of clicks stay the same. Drop the old key when refreshers and generators have read the new
    records. Interactions that retention removed need `--archive`; otherwise a forget finds them only with the old key.
    Run it for each live model.

    Example:  freshet backfill-attributions --bundle .freshet/bundles/next --archive archives/interactions

    Example:  freshet backfill-attributions --bundle /models/next --on ray://head:10001

    Example:  FRESHET_PSEUDONYM_KEY=new FRESHET_PSEUDONYM_KEYS_BEFORE=old freshet backfill-attributions --rekey
    """
    if bundle is None and not rekey:
        raise usage_error("neither --bundle nor --rekey is given", "--bundle .freshet/bundles/next")
    if rekey and on is not None:
        raise usage_error("--rekey works here, not --on", "leave --on out")
    from services.encoder.config import EncoderSettings
    from services.offline.backfill.jobs import run_reattribution, run_reattribution_on
    from services.stack import Stack

    stack = Stack(state)
    with sentences(), progress() as update:
        settings = EncoderSettings(bundle=bundle or stack.bundle, kafka_bootstrap=stack.kafka_bootstrap)
        if on is None:
            report = run_reattribution(settings, partial(update, "interactions"), rekeys=rekey, archive=archive)
        else:
            report = run_reattribution_on(on, settings, partial(update, "partitions"), archive=archive)
    under, before = (" under the present key", "written under it before") if rekey else ("", "attributed before")
    answer(
        asdict(report),
        f"{report.attributions:,} attributions of model {report.model_version} from {report.records:,} interactions"
        f"{under} ({report.skipped:,} of them were {before})",
    )
