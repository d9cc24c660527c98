"""How trainings of text models report their progress."""

from collections.abc import Callable

# Stage, done and total in the stage's units, and the loss, NaN outside the training.
Progress = Callable[[str, int, int, float], None]


def unreported(stage: str, done: int, total: int, loss: float) -> None:
    """Report nothing."""
