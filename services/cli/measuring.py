"""Turn a benchmark into a command: its options, a progress line, a page or JSON at the end, errors as sentences.

Every `freshet bench <subject>` passes a `Request` to services/offline/evaluation and gets a report of plain values.
This module does not interpret the figures.
"""

import functools
import inspect
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from services.cli.output import CommandError, console, emit_json, reports_errors, sentences
from services.offline.openmp import wait_without_spinning

if TYPE_CHECKING:
    from services.offline.evaluation.common.report import Request

_DOCS, _SCRATCH = Path("docs/benchmarks"), Path(".freshet/bench")

Quick = Annotated[bool, typer.Option("--quick", help="Minutes instead of an hour: fewer queries and settings.")]
Out = Annotated[
    Path | None,
    typer.Option(help="Where tables and plots go. Default: .freshet/bench; in a checkout, without --quick, its pages."),
]
Seed = Annotated[int, typer.Option(min=0, help="Equal seeds make equal catalogues and queries.")]
AsJson = Annotated[bool, typer.Option("--json", help="End with one JSON object that holds `rows`.")]

_SHARED: dict[str, tuple[Any, Any]] = {
    "quick": (Quick, False),
    "out": (Out, None),
    "seed": (Seed, 0),
    "as_json": (AsJson, False),
}


def benchmark(
    app: typer.Typer, name: str, *, less_memory: str = "--quick", wrong: Callable[[dict[str, Any]], str] | None = None
) -> Callable[[Callable[..., dict[str, Any]]], Callable[..., None]]:
    """Register `measure(request, **options) -> report` as the command `name`; add --quick, --out, --seed and --json.

    `less_memory`: advice if memory is short. `wrong` is called after the report is shown; it returns a sentence about
    the violated invariant, or "".
    """

    def register(measure: Callable[..., dict[str, Any]]) -> Callable[..., None]:
        @functools.wraps(measure)
        def command(*, quick: bool, out: Path | None, seed: int, as_json: bool, **options: Any) -> None:
            wait_without_spinning()
            with sentences(no_memory=less_memory):
                ask = functools.partial(measure, **options)
                report = measured(ask, out=out, quick=quick, seed=seed, as_json=as_json)
            if sentence := wrong(report) if wrong else "":
                raise CommandError(sentence, advice="please report this with the seed")

        own = [one for one in inspect.signature(measure).parameters.values() if one.name != "request"]
        keyword = inspect.Parameter.KEYWORD_ONLY
        own += [
            inspect.Parameter(name, keyword, default=default, annotation=kind)
            for name, (kind, default) in _SHARED.items()
        ]
        command.__signature__ = inspect.Signature(own)  # type: ignore[attr-defined]
        command.__annotations__ = {one.name: one.annotation for one in own}
        wrapped = reports_errors(command)
        app.command(name)(wrapped)
        return wrapped

    return register


def measured(
    measure: "Callable[[Request], dict[str, Any]]", *, out: Path | None, quick: bool, seed: int, as_json: bool
) -> dict[str, Any]:
    """Measure with a progress line on the terminal, print where the tables are, and print the report if requested."""
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    from services.offline.evaluation.common.report import Request

    # Only Freshet's own checkout has pages to replace; any other working directory is the user's.
    is_checkout = (_DOCS / "render.py").is_file()
    folder = out or (_DOCS if is_checkout and not quick else _SCRATCH)
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
