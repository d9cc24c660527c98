"""`freshet bench refresher`: attributions a second that one core folds, for a bundle's shape."""

import os
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from services.cli.output import CommandError, console, emit_json, reports_errors


@reports_errors
def refresher(
    *,
    bundle: Annotated[Path, typer.Option(envvar="FRESHET_BUNDLE", help="The model whose shape is folded.")] = Path(
        ".freshet/bundle"
    ),
    records: Annotated[int, typer.Option(min=1000, help="Random attributions on the bundle's items.")] = 50_000,
    seed: Annotated[int, typer.Option(help="Of the attributions.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
) -> None:
    """Decode, fold, publish and checkpoint as the refresher does, without a broker between.

    Example:  freshet bench refresher --bundle .freshet/bundle
    """
    # One core, as the launcher gives it; set before any library reads it.
    for variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        os.environ.setdefault(variable, "1")

    import structlog

    from services.algorithms.bundle import BundleError, load_bundle
    from services.cli.refresher_rate import measure

    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(40))
    try:
        rate = measure(load_bundle(bundle), records, seed=seed)
    except BundleError as error:
        raise CommandError(str(error), advice="`freshet train` makes a bundle") from error
    if as_json:
        emit_json(asdict(rate))
        return
    console().print(
        f"model {rate.model_version}: {rate.records:,} attributions in {rate.seconds:.1f} s "
        f"({rate.records_per_second:,.0f} a second; {rate.records_per_cpu_second:,.0f} a second of CPU)\n"
        f"{rate.deltas:,} deltas of {rate.delta_bytes / max(1, rate.deltas):,.0f} bytes; "
        f"{rate.bytes_per_item:,.0f} bytes per item, {rate.bytes_per_remembered:,.0f} per remembered query, "
        f"checkpoint {rate.checkpoint_bytes / 2**20:.1f} MiB"
    )
