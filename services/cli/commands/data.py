"""`freshet data validate`."""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from services.cli.option_groups import reads_a_table
from services.cli.output import ExitStatus, answer, console, group_command, sentences, usage_error

if TYPE_CHECKING:
    from services.offline.datasets import TableOptions

app = typer.Typer(name="data", no_args_is_help=True)

_STYLES = {"error": "bold red", "warning": "yellow", "info": "dim"}


@app.callback()
def data() -> None:
    """Look at interaction data."""


@group_command(app, "validate")
@reads_a_table
def validate(
    path: Annotated[Path, typer.Argument(help="A CSV or Parquet table, or a MovieLens folder or zip.")],
    *,
    table: "TableOptions",
    events: Annotated[Path | None, typer.Option(help="The YAML file for `freshet train --events`.")] = None,
) -> None:
    """Check a table for duplicates, unsorted times, ids out of range and unknown types, and say what to do.

    `freshet train` and `freshet import` have the same findings. The exit status is 1 if the table is unusable.

    Example:  freshet data validate ratings.csv
    """
    from services.algorithms.bundles.event_schema import EventSchema, default_schema
    from services.offline.datasets import account_text, read_data

    if not path.exists():
        raise usage_error(f"{path} does not exist", "freshet data validate ratings.csv")
    with sentences():
        schema = default_schema() if events is None else EventSchema.read(events)
        reading = read_data(path, schema=schema, table=table)
    errors = sum(finding.severity == "error" for finding in reading.findings)
    used = None if errors or reading.interactions is None else reading.interactions.encoded(schema)
    account = reading.account(used)

    def shown() -> None:
        out = console()
        if reading.read_as:
            out.print(reading.read_as)
        for finding in reading.findings:
            out.print(finding.text, style=_STYLES[finding.severity])
        out.print(f"{len(reading.findings)} found, {errors} of them errors" if reading.findings else "nothing found")
        out.print(account_text(account))

    findings = [asdict(finding) for finding in reading.findings]
    report = {"path": str(path), "read_as": reading.read_as, "errors": errors, "findings": findings, "rows": account}
    answer(report, shown)
    if errors:
        raise typer.Exit(int(ExitStatus.FAILED))
