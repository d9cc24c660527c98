"""`freshet data validate`: the usual troubles of interaction data, before they cost a training run."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from services.cli import options
from services.cli.output import ExitStatus, console, emit_json, reports_errors, sentences, usage_error

app = typer.Typer(name="data", help="Look at interaction data.", no_args_is_help=True)

_STYLES = {"error": "bold red", "warning": "yellow", "info": "dim"}


@app.callback()
def data() -> None:
    """Look at interaction data."""


@app.command("validate")
@reports_errors
def validate(
    path: Annotated[Path, typer.Argument(help="A CSV or Parquet table, or a MovieLens folder or zip.")],
    *,
    user: Annotated[str, typer.Option(help="Name of the user column, when it is not found by itself.")] = "",
    item: Annotated[str, typer.Option(help="Name of the item column.")] = "",
    timestamp: Annotated[str, typer.Option(help="Name of the timestamp column.")] = "",
    as_json: options.AsJson = False,
) -> None:
    """Check a table for duplicates, unsorted times, ids out of range, constant columns; say what to do.

    The exit status is 1 when something keeps the data from being used.

    Example:  freshet data validate ratings.csv
    """
    from services.offline.datasets import ColumnNames
    from services.offline.datasets import validate as find_troubles

    if not path.exists():
        raise usage_error(f"{path} does not exist", "freshet data validate ratings.csv")
    with sentences():
        findings = find_troubles(path, columns=ColumnNames(user=user, item=item, timestamp=timestamp))
    errors = sum(finding.severity == "error" for finding in findings)
    if as_json:
        emit_json({"path": str(path), "errors": errors, "findings": [asdict(finding) for finding in findings]})
    else:
        out = console()
        for finding in findings:
            out.print(f"{finding.severity:8}", style=_STYLES[finding.severity], end="")
            out.print(f"{finding.what}: {finding.count:,} ({finding.where})", markup=False)
            out.print(f"        {finding.advice}", style="dim", markup=False)
        out.print("nothing found" if not findings else f"{len(findings)} found, {errors} of them errors")
    if errors:
        raise typer.Exit(int(ExitStatus.FAILED))
