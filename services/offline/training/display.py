"""What a person sees of training: a progress bar while it runs, a table when it is done."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.table import Table

from services.offline.training.loop import ProgressListener, Step

_METRICS = ("hr@1", "hr@10", "hr@50", "hr@200", "ndcg@10", "mrr")


@contextmanager
def training_progress(console: Console | None, num_epochs: int) -> Iterator[ProgressListener | None]:
    """A listener that moves a bar with epoch, positions/s and loss; None without a console."""
    if console is None:
        yield None
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TextColumn("{task.fields[rate]} positions/s  loss {task.fields[loss]}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console) as bar:
        task = bar.add_task(f"epoch 1/{num_epochs}", total=None, rate="–", loss="–")

        def listener(step: Step) -> None:
            bar.update(
                task,
                description=f"epoch {step.epoch + 1}/{step.num_epochs}",
                total=step.total_positions,
                completed=step.positions,
                rate=f"{step.positions_per_s:,.0f}",
                loss=f"{step.loss:.3f}",
            )

        yield listener


def show_report(console: Console, report: Mapping[str, Any]) -> None:
    """Speed, where the time went, memory, and quality beside the popularity baseline."""
    shares = ", ".join(f"{part} {share:.0%}" for part, share in report["part_shares"].items())
    console.print(
        f"{report['positions']:,} positions in {report['seconds']:.1f} s: "
        f"[bold]{report['positions_per_s']:,.0f} positions/s[/bold] on {report['threads']} threads ({shares}); "
        f"peak memory {report['peak_memory_bytes'] / 2**20:,.0f} MiB"
    )
    metrics = report["metrics"]
    if metrics:
        table = Table(title=f"{metrics['num_events']:,} held-out events, seen items left out")
        for column in ("", *_METRICS):
            table.add_column(column, justify="right" if column else "left")
        for name in ("model", "popularity"):
            table.add_row(name, *(f"{metrics[name][metric]:.4f}" for metric in _METRICS))
        console.print(table)
    console.print(f"Bundle {report['bundle']} (model version {report['model_version']})")
