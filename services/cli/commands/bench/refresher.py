"""`freshet bench refresher`: attributions a second that one core folds, for a bundle's shape."""

import os
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from services.cli.commands.bench.group import app
from services.cli.output import CommandError, console, emit_json, reports_errors, sentences


@app.command("refresher")
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

    from services.algorithms.bundles.model_bundle import BundleError, load_bundle
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


@app.command("refresher-size")
@reports_errors
def refresher_size(
    *,
    bundle: Annotated[Path, typer.Option(envvar="FRESHET_BUNDLE", help="The model whose items are used.")] = Path(
        ".freshet/bundle"
    ),
    users: Annotated[int, typer.Option(min=100, help="Users in the one refresher.")] = 2_000_000,
    each: Annotated[int, typer.Option(min=1, help="Interactions of each.")] = 20,
    rate: Annotated[int, typer.Option(min=10, help="Live attributions a second.")] = 200,
    seconds: Annotated[float, typer.Option(min=1, help="How long they come.")] = 60.0,
    seed: Annotated[int, typer.Option(help="Of the interactions.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
) -> None:
    """Fill one refresher, run it on a broker of its own, kill it, and time the process that takes over.

    Example:  freshet bench refresher-size --users 2000000 --each 20
    """
    from tempfile import TemporaryDirectory

    from services.cli.refresher_size import measure

    with sentences(), TemporaryDirectory() as folder:
        size = measure(bundle, Path(folder), users=users, each=each, rate=rate, seconds=seconds, seed=seed)
    if as_json:
        emit_json(asdict(size))
        return
    console().print(
        f"{size.users:,} users, {size.interactions:,} interactions: {size.memory_bytes / 2**30:.2f} GiB resident, "
        f"checkpoints {size.checkpoint_bytes / 2**20:,.0f} MiB\n"
        f"{size.checkpoints} checkpoints under {size.live_records:,} live records: longest pause "
        f"{size.longest_pause_ms:.1f} ms (median {size.pauses_p50_ms:.1f}, of processor time "
        f"{size.longest_pause_cpu_ms:.1f}), longest write {size.longest_checkpoint_s:.1f} s; "
        f"leases lost: {size.leases_lost}\n"
        f"takeover of one half by a process that held the other: {size.takeover_s:.1f} s after the kill; of all by a "
        f"process that had to start: {size.cold_takeover_s:.1f} s, {size.cold_start_s:.1f} until its first line "
        f"({size.takeover_cpu_s:.1f} s of processor time; the machine's load average: {size.load_average:.1f})"
    )
