"""What commands that measure something share: a progress line, a page or JSON at the end, wrong requests as sentences.

`freshet bench` measures speed, `freshet evaluate` quality; both hand a `Request` to services/offline/evaluation and
get a report of plain values back. Which numbers there are is not known here.
"""

import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from services.cli.output import CommandError, ExitStatus, console, emit_json

if TYPE_CHECKING:
    from services.offline.evaluation.common.report import Request

_DOCS, _SCRATCH = Path("docs/benchmarks"), Path(".freshet/bench")

Quick = Annotated[bool, typer.Option("--quick", help="Minutes instead of an hour: fewer queries and settings.")]
Out = Annotated[
    Path | None, typer.Option(help="Where tables and plots go. Default: docs/benchmarks; with --quick .freshet/bench.")
]
Seed = Annotated[int, typer.Option(min=0, help="Equal seeds make equal catalogues and queries.")]
AsJson = Annotated[bool, typer.Option("--json", help="End with one JSON object that holds `rows`.")]


def measured(
    measure: "Callable[[Request], dict[str, Any]]", *, out: Path | None, quick: bool, seed: int, as_json: bool
) -> dict[str, Any]:
    """Measure with a progress line on the terminal, say where the tables are, and print the report if asked to."""
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    from services.offline.evaluation.common.report import Request

    folder = out or (_SCRATCH if quick else _DOCS)
    how = shlex.join(["freshet", *sys.argv[1:]])
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console(stderr=True), transient=True) as progress:
        task = progress.add_task("measuring the machine", total=None)
        report = measure(
            Request(
                how=how,
                out=folder,
                quick=quick,
                seed=seed,
                say=lambda line: progress.update(task, description=line),
            )
        )
    page = folder / f"{report['benchmark']}.md"
    if as_json:
        emit_json(report)
    else:
        typer.echo(page.read_text(encoding="utf-8"))
        typer.echo(f"{len(report['rows'])} rows in {report['seconds']:.0f} s; tables and plots in {page}")
    return report


@contextmanager
def in_sentences(*, when_memory_ends: str) -> Iterator[None]:
    """What evaluation raises, as sentences: its messages name field, value and what is allowed."""
    try:
        yield
    except ValueError as error:
        raise CommandError(str(error), advice="see --help for an example", status=ExitStatus.USAGE) from error
    except MemoryError as error:
        raise CommandError("there is not enough memory", advice=when_memory_ends) from error
