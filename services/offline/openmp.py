"""How OpenMP's threads of a batch job wait; imported before PyTorch, so it loads nothing."""

import os


def wait_without_spinning() -> None:
    """Let OpenMP threads sleep at barriers instead of spinning, unless OMP_WAIT_POLICY is set.

    A spinning thread takes the core that another process needs: beside other work preset quick had 25,300 to 32,600
    positions/s sleeping, 2,200 to 37,600 spinning (two cores, five runs each).
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
