"""PNG plots of benchmark rows in one style."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from matplotlib.figure import Figure


@contextmanager
def panels(
    path: Path | IO[bytes], lines: int, columns: int, *, size: tuple[float, float], dpi: int = 130
) -> Iterator[Any]:
    """Yield axes (lines, columns) to draw on, each of `size` inches; then write them to `path`.

    Panels with labelled artists get a legend. The file's description repeats the labels, so that a reader can check
    the numbers in them.
    """
    figure = Figure(figsize=(columns * size[0], lines * size[1]), layout="constrained")
    drawn = figure.subplots(lines, columns, squeeze=False)
    yield drawn
    labels: list[str] = []
    for panel in drawn.flat:
        panel.grid(alpha=0.3)
        panel.spines[["top", "right"]].set_visible(False)
        if panel.get_legend_handles_labels()[0]:
            panel.legend(frameon=False, fontsize=7)
            labels += panel.get_legend_handles_labels()[1]
    figure.savefig(path, dpi=dpi, metadata={"Description": "; ".join(labels)})


def titled(panel: Any, title: str, **settings: Any) -> Any:
    """Return the panel with a title on the left, and `Axes.set` settings."""
    panel.set(**settings)
    panel.set_title(title, loc="left", fontsize=10)
    return panel
