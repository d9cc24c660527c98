"""How trainings of text models report their progress."""

from collections.abc import Callable

# Called with stage, done and total in the stage's units, and loss, which is NaN outside training.
Progress = Callable[[str, int, int, float], None]


def unreported(stage: str, done: int, total: int, loss: float) -> None:
    """Report nothing."""
