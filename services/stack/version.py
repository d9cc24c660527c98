"""Which Freshet this is: the version of the installed distribution, whose name is not that of the import roots."""

from importlib.metadata import version

DISTRIBUTION = "freshet-recsys"


def freshet_version() -> str:
    """As in pyproject.toml when it was installed."""
    return version(DISTRIBUTION)
