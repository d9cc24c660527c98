"""`python -m services.offline.quickstart FOLDER`: train the small model of `freshet quickstart` and write its bundle.

It uses MovieLens latest-small if that is on this machine, else simulated data, and downloads nothing. One epoch is
enough to try the system, because item neighbours contribute most of the score.
"""

import sys
from pathlib import Path

from services.offline.datasets import SimulatorConfig, simulate
from services.offline.datasets.locate import Locator
from services.offline.datasets.movielens import read_movielens
from services.offline.openmp import wait_without_spinning

DATA = "ml-latest-small"


def data_here() -> str:
    """Return the name of the data to train on."""
    return DATA if Locator(download=False).on_this_machine(DATA) else "simulator"


def train(out: Path) -> None:
    """Train and write the bundle. Raises: the errors of `run_training`."""
    wait_without_spinning()
    from services.offline.training.run import run_training

    located = Locator(download=False).on_this_machine(DATA)
    if located is not None:
        data = read_movielens(located.path, name=DATA, found=located.where)
    else:
        data = simulate(SimulatorConfig(num_users=800, num_items=1_500))
    run_training(out=out, interactions=data, epochs=1, split="none", head="dot")


if __name__ == "__main__":
    train(Path(sys.argv[1]))
