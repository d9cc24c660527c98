"""Turns a benchmark into a command with shared options, a progress line, and a page or JSON at the end.

Every `freshet bench <subject>` passes a `Request` to services/offline/evaluation and gets a report of plain values.
"""

import functools
import shlex
import sys
from collections.abc import Callable, Collection
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Option

from services.cli.options import with_options
from services.cli.output import CommandError, answer, console, group_command, sentences
from services.offline.openmp import wait_without_spinning

if TYPE_CHECKING:
    from services.offline.evaluation.common.report import Request

_DOCS, _SCRATCH = Path("docs/benchmarks"), Path(".freshet/bench")

Quick = Annotated[bool, Option("--quick", help="Minutes instead of an hour: fewer queries and settings.")]
Out = Annotated[
    Path | None,
    Option(help="Where tables and plots go. Default: .freshet/bench; in a checkout, without --quick, its pages."),
]
Seed = Annotated[int, Option(min=0, help="Equal seeds make equal catalogues and queries.")]

_SHARED: dict[str, tuple[Any, Any]] = {"quick": (Quick, False), "out": (Out, None), "seed": (Seed, 0)}


def benchmark(
    app: typer.Typer,
    name: str,
    *,
    less_memory: str = "--quick",
    wrong: Callable[[dict[str, Any]], str] | None = None,
    shared: Collection[str] = tuple(_SHARED),
) -> Callable[[Callable[..., dict[str, Any]]], Callable[..., None]]:
    """Register `measure(request, **options) -> report` as the command `name`, with the options `shared` and --json.

    `less_memory`: advice if memory is short. `wrong` returns a sentence about the invariant that a shown report
    violates, or "".
    """

    def register(measure: Callable[..., dict[str, Any]]) -> Callable[..., None]:
        def call(*, out: Path | None, quick: bool = False, seed: int = 0, **options: Any) -> None:
            wait_without_spinning()
            with sentences(no_memory=less_memory):
                report = _measured(functools.partial(measure, **options), out=out, quick=quick, seed=seed)
            if sentence := wrong(report) if wrong else "":
                raise CommandError(sentence, advice="please report this with the seed")

        own = {option: _SHARED[option] for option in shared}
        return group_command(app, name)(with_options(measure, call, own, without="request"))

    return register


def _measured(
    measure: "Callable[[Request], dict[str, Any]]", *, out: Path | None, quick: bool, seed: int
) -> dict[str, Any]:
    """Measure with a progress line on the terminal, then print the page, or the report as JSON."""
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    from services.offline.evaluation.common.report import Request

    # Only Freshet's own checkout has pages to replace; any other working directory is the user's.
    is_checkout = (_DOCS / "render.py").is_file()
    folder = out or (_DOCS if is_checkout and not quick else _SCRATCH)
    how = shlex.join(["freshet", *sys.argv[1:]])
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console(stderr=True), transient=True) as progress:
        task = progress.add_task("measuring the machine", total=None)
        say = functools.partial(progress.update, task)
        report = measure(Request(how=how, out=folder, quick=quick, seed=seed, say=lambda line: say(description=line)))
    page = folder / f"{report['benchmark']}.md"
    rows = f"{len(report['rows'])} rows in {report['seconds']:.0f} s; tables and plots in {page}"
    answer(report, f"{page.read_text(encoding='utf-8')}\n{rows}")
    return report
