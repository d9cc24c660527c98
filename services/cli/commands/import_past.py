"""`freshet import`."""

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from services.cli import options
from services.cli.option_groups import reads_a_table
from services.cli.output import answer, console, is_json, json_command, progress, sentences

if TYPE_CHECKING:
    from services.offline.datasets import TableOptions


@json_command
@reads_a_table
def import_past(
    data: Annotated[
        str, typer.Argument(help="auto, a MovieLens name, simulator, or the path of a CSV or Parquet table.")
    ] = "auto",
    *,
    table: "TableOptions",
    before: Annotated[
        float, typer.Option(min=0.0, max=1.0, help="Only the first share of the events by time; 1: all of them.")
    ] = 1.0,
    attributes: Annotated[
        bool,
        typer.Option(
            help="Also update item states (PEFA) from these events. Do not if the model was trained on all of them."
        ),
    ] = True,
    state: options.State = options.DEFAULT_STATE,
) -> None:
    """Write past interactions to the stream and compute all users' histories and states, before going live.

    The stack has to run. Its stream has to be empty, or contain the beginning of the same import, which then continues.

    Example:  freshet import ml-1m --before 0.8 --no-attributes
    """
    from services.algorithms.bundles.model_bundle import load_bundle
    from services.offline.backfill.jobs import import_interactions
    from services.offline.datasets import account_text, global_time_split, read_data
    from services.stack import Stack

    with sentences():
        stack = Stack(state)
        schema = load_bundle(stack.bundle).event_schema
        reading = read_data(data, schema=schema, table=table)
        out = console(stderr=is_json())
        for line in reading.summary:
            out.print(line)
        past = reading.accepted()
        if before < 1.0:
            past = global_time_split(past, before).train
        rows = reading.account(
            past.select(past.of_types({name for name in past.type_names if schema.of(name).history})), given=past
        )
        with progress() as update:
            report = import_interactions(
                past,
                bundle=stack.bundle,
                kafka=stack.kafka_bootstrap,
                redis_url=stack.redis_url,
                inference_server=stack.address("inference-server") if "inference-server" in stack.parts else None,
                attributes=attributes,
                progress=update,
            )
    answer(
        asdict(report) | {"data": past.name, "source": past.source, "rows": rows},
        f"{account_text(rows)}\nimported {report.interactions:,} interactions of {report.users_filled:,} users "
        f"in {report.write_seconds + report.fill_seconds:.0f} s, {report.attributions:,} attributions "
        f"({report.unknown_items:,} interactions on items that the model does not know)",
    )
