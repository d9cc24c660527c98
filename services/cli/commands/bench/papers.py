"""`freshet bench paper ...`: a table of the papers, measured on this machine."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from services.cli.commands.bench.group import paper
from services.cli.measuring import Out, benchmark, measured
from services.cli.output import CommandError, ExitStatus, group_command, sentences
from services.offline.openmp import wait_without_spinning

if TYPE_CHECKING:
    from services.offline.evaluation.common.report import Report, Request


@group_command(paper, "table-3")
def table_3(
    *,
    data: Annotated[list[str] | None, typer.Option(help="A set of the table; may be repeated. Default: all.")] = None,
    seeds: Annotated[int | None, typer.Option(min=1, help="Final runs per arm. Default: 3.")] = None,
    hours: Annotated[
        float | None,
        typer.Option(min=0, help="Stop after this many hours; the next call continues. 0: only write the page."),
    ] = None,
    store: Annotated[
        Path | None, typer.Option(help="Finished runs and checkpoints. Default: quality in the local cache.")
    ] = None,
    threads: Annotated[int | None, typer.Option(min=1, help="PyTorch's threads; default: its own choice.")] = None,
    out: Out = None,
) -> None:
    """Compare SASRec and HSTU, each with a dot product and a mixture, with tuned baselines: quality, intervals, hours.

    Every arm's trials on validation get the same processor time, ten minutes a split; the test split is used once.
    Processor hours, estimated: ml-1m-long (30 epochs) 16, all other sets 20. You may interrupt the command: finished
    runs are kept, and training resumes from its checkpoint.

    Example:  freshet bench paper table-3 --data ml-latest-small --hours 8
    """
    wait_without_spinning()
    from services.offline.datasets.locate import Locator
    from services.offline.evaluation.common.timing import use_threads
    from services.offline.evaluation.quality import page
    from services.offline.evaluation.quality.table import DATA

    known = {one.key: one for one in DATA}
    for name in data or []:
        if name not in known:
            raise CommandError(f"data={name!r}; allowed: {', '.join(known)}", status=ExitStatus.USAGE)
    if threads is not None:
        use_threads(threads)
    with sentences(no_memory="--data ml-latest-small"):
        measured(
            lambda request: page.quality(
                request,
                data=[one for one in DATA if not data or one.key in data],
                store=store or Locator().cache_dir().with_name("quality"),
                seeds=seeds,
                hours=hours,
            ),
            out=out,
            quick=False,
            seed=0,
        )


@benchmark(paper, "published")
def published(request: "Request") -> "Report":
    """Measure how each difference of the authors' protocol changes our leave-one-out result on ml-1m, at preset quick.

    Takes about two hours on one core. You may interrupt it: trainings in the page's JSON are not repeated.

    Example:  freshet bench paper published --quick
    """
    from services.offline.evaluation.quality import published

    return published.run(request)
