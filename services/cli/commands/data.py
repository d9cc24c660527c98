"""The commands `freshet data validate` and `freshet import` check interactions and write them to the stream."""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Argument, Option

from services.cli import client, options, output
from services.cli.options import reads_a_table

if TYPE_CHECKING:
    from services.offline.datasets import TableOptions

app = typer.Typer(name="data", no_args_is_help=True)

_STYLES = {"error": "bold red", "warning": "yellow", "info": "dim"}


@app.callback()
def data() -> None:
    """Check interaction data."""


@output.group_command(app, "validate")
@reads_a_table
def validate(
    path: Annotated[Path, Argument(help="A CSV or Parquet table, or a MovieLens folder or zip.")],
    *,
    table: "TableOptions",
    events: Annotated[Path | None, Option(help="The YAML file for `freshet train --events`.")] = None,
) -> None:
    """Check a table for duplicates, unsorted times, ids out of range and unknown types; advise how to mend it.

    `freshet train` and `freshet import` report the same findings. The exit status is 1 if the table is unusable.

    Example:  freshet data validate ratings.csv
    """
    from services.algorithms.bundles.event_schema import EventSchema, default_schema
    from services.offline.datasets import account_text, read_data

    if not path.exists():
        raise output.usage_error(f"{path} does not exist", "freshet data validate ratings.csv")
    with output.sentences():
        schema = default_schema() if events is None else EventSchema.read(events)
        reading = read_data(path, schema=schema, table=table)
    errors = sum(finding.severity == "error" for finding in reading.findings)
    used = None if errors or reading.interactions is None else reading.interactions.encoded(schema)
    account = reading.account(used)

    def shown() -> None:
        if reading.read_as:
            output.echo(reading.read_as)
        for finding in reading.findings:
            output.echo(finding.text, style=_STYLES[finding.severity])
        output.echo(f"{len(reading.findings)} found, {errors} of them errors" if reading.findings else "nothing found")
        output.echo(account_text(account))

    findings = [asdict(finding) for finding in reading.findings]
    report = {"path": str(path), "read_as": reading.read_as, "errors": errors, "findings": findings, "rows": account}
    output.answer(report, shown)
    if errors:
        raise typer.Exit(int(output.ExitStatus.FAILED))


@output.json_command
@reads_a_table
def import_past(
    data: Annotated[str, Argument(help="auto, a MovieLens name, simulator, or a CSV or Parquet file's path.")] = "auto",
    *,
    table: "TableOptions",
    before: Annotated[float, Option(min=0.0, max=1.0, help="Only the first share of events by time; 1: all.")] = 1.0,
    attributes: Annotated[
        bool,
        Option(
            help="Also update item states (PEFA) from these events. Do not if the model was trained on all of them."
        ),
    ] = True,
    state: options.State = options.DEFAULT_STATE,
) -> None:
    """Write past interactions to the stream and compute all users' histories and states, before going live.

    The stack has to run. Its stream has to be empty or contain the beginning of the same import, which then continues.

    Example:  freshet import ml-1m --before 0.8 --no-attributes
    """
    from services.algorithms.bundles.model_bundle import load_bundle
    from services.offline.backfill.jobs import import_interactions
    from services.offline.datasets import account_text, global_time_split, read_data

    with output.sentences():
        stack = client.stack_of(state)
        schema = load_bundle(stack.bundle).event_schema
        reading = read_data(data, schema=schema, table=table)
        terminal = output.console(stderr=output.is_json())
        for line in reading.summary:
            terminal.print(line)
        past = reading.accepted()
        if before < 1.0:
            past = global_time_split(past, before).train
        rows = reading.account(
            past.select(past.of_types({name for name in past.type_names if schema.of(name).history})), given=past
        )
        with output.progress() as update:
            report = import_interactions(
                past,
                bundle=stack.bundle,
                kafka=stack.kafka_bootstrap,
                redis_url=stack.redis_url,
                inference_server=stack.address("inference-server") if "inference-server" in stack.parts else None,
                attributes=attributes,
                progress=update,
            )
    output.answer(
        asdict(report) | {"data": past.name, "source": past.source, "rows": rows},
        f"{account_text(rows)}\nimported {report.interactions:,} interactions of {report.users_filled:,} users "
        f"in {report.write_seconds + report.fill_seconds:.0f} s, {report.attributions:,} attributions "
        f"({report.unknown_items:,} interactions on items that the model does not know)",
    )
